"""Every kind of volume keeps the promises of the Volume protocol."""

from __future__ import annotations

import errno
import itertools
import os

import pytest

from pccheck.storage import checkpage, directory
from pccheck.storage.directory import Directory
from pccheck.testing.conformance import check_volume
from pccheck.testing.faults import FaultyVolume, Script
from pccheck.testing.throttle import Rate, ThrottledVolume


def folders(root, wrap=lambda volume: volume):
    """Give a maker of volumes, each over a new folder."""
    numbers = itertools.count()
    return lambda: wrap(Directory(f"{root}/{next(numbers)}/store", create=True, write=True))


def test_on_disk(tmp_path):
    check_volume(folders(tmp_path))


def test_on_tmpfs(shared_memory):
    check_volume(folders(shared_memory))


def test_faulty_without_faults(tmp_path):
    check_volume(folders(tmp_path, lambda volume: FaultyVolume(volume, Script())))


def test_throttled(tmp_path):
    rate = Rate.steady(1 << 40)
    check_volume(folders(tmp_path, lambda v: ThrottledVolume(v, total=rate, stream_bytes_per_s=1 << 40, delay_s=1e-6)))


def test_where_links_cannot_be(tmp_path, monkeypatch):
    """The answer of FAT and of some network file systems; there is none here to ask."""

    def no_links(*args, **kwargs):
        raise OSError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr(os, "link", no_links)
    check_volume(folders(tmp_path), links=False)


@pytest.mark.parametrize("mapped", [True, False])
def test_without_the_extension(tmp_path, monkeypatch, mapped):
    """Words change under a lock; and without a mapping, as on file systems that cannot map a shared file."""
    real = checkpage.FilePage
    monkeypatch.setattr(
        directory,
        "FilePage",
        lambda fd, path, *, native, **options: real(fd, path, native=None, mapped=mapped, **options),
    )
    volume = Directory(tmp_path / "store", create=True, write=True)
    page = volume.check_page(create=True)
    assert not page.atomic
    page.close()
    volume.close()
    check_volume(folders(tmp_path))


def test_the_checks_can_fail(tmp_path):
    """A volume that takes a name that is taken is found."""

    class Careless:
        def __init__(self, inner):
            self.inner = inner

        def __getattr__(self, name):
            return getattr(self.inner, name)

        def create(self, name, size):
            self.inner.remove(name)
            return self.inner.create(name, size)

    with pytest.raises(AssertionError, match="a name that is taken"):
        check_volume(folders(tmp_path, Careless))
