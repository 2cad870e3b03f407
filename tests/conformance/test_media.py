"""Every kind of medium keeps the promises of the Medium protocol."""

from __future__ import annotations

import pytest

from pccheck.storage.memory import MemoryMedium
from pccheck.testing.conformance import check_medium
from pccheck.testing.faults import FaultyMedium, Script
from pccheck.testing.throttle import Limit, Rate, ThrottledMedium
from tests.conformance.makers import files, of_volume


def test_direct(tmp_path):
    check_medium(of_volume(tmp_path, "direct"))


def test_buffered(tmp_path):
    check_medium(files(tmp_path, "buffered"))


def test_mapped(shared_memory):
    check_medium(of_volume(shared_memory, "mapped"))


def test_mapped_on_a_disk(tmp_path):
    """What DAX looks like from here: a mapped file that has a disk below it."""
    check_medium(files(tmp_path, "mapped"))


def test_memory():
    check_medium(MemoryMedium, grows=False)


def test_faulty_without_faults(tmp_path):
    check_medium(files(tmp_path, "buffered", lambda medium: FaultyMedium(medium, Script())))


def test_throttled(tmp_path):
    limit = Limit(Rate.steady(1 << 40))
    check_medium(files(tmp_path, "buffered", lambda medium: ThrottledMedium(medium, limit)))


def test_the_checks_can_fail(tmp_path):
    """A medium that forgets one write in twenty is found."""

    class Forgetful:
        def __init__(self, inner):
            self.inner, self.writes = inner, 0

        def __getattr__(self, name):
            return getattr(self.inner, name)

        def write_from(self, buffer, offset):
            self.writes += 1
            if self.writes % 20:
                self.inner.write_from(buffer, offset)

    with pytest.raises(AssertionError, match="are what was written"):
        check_medium(lambda size: Forgetful(MemoryMedium(size)), grows=False)
