"""Both pipelines keep the promises of the Pipeline protocol, on every kind of medium."""

from __future__ import annotations

import itertools
import os

import pytest

from pccheck.pipeline.choose import make_pipeline, native_missing
from pccheck.pipeline.portable import PortablePipeline
from pccheck.storage.directory import Directory
from pccheck.storage.media import FileMedium
from pccheck.storage.memory import MemoryMedium
from pccheck.testing.conformance import check_pipeline
from pccheck.testing.faults import FaultyMedium, Script

MISSING = native_missing()
PIPELINES = [
    "portable",
    pytest.param("native", marks=pytest.mark.skipif(MISSING is not None, reason=f"native not built: {MISSING}")),
]


def maker(name, writers):
    """Give a maker of pipelines."""
    return lambda buffer_bytes, chunk_bytes: make_pipeline(name, buffer_bytes, chunk_bytes, writers)


def of_volume(folder):
    """Give a maker of media as the volume chooses them."""
    volume, numbers = Directory(folder, create=True, write=True), itertools.count()
    return lambda size: volume.create(f"slot-{next(numbers):03d}.pcc", size)


def buffered(folder):
    """Give a maker of buffered media."""
    numbers = itertools.count()

    def make(size):
        path = f"{folder}/{next(numbers)}"
        medium = FileMedium(os.open(path, os.O_RDWR | os.O_CREAT), path, storage="buffered", write=True)
        medium.allocate(size)
        return medium

    return make


@pytest.mark.parametrize("name", PIPELINES)
def test_on_disk(tmp_path, name):
    check_pipeline(maker(name, 2), of_volume(tmp_path), wrappers=name == "portable")


@pytest.mark.parametrize("name", PIPELINES)
def test_on_tmpfs(shared_memory, name):
    check_pipeline(maker(name, 3), of_volume(shared_memory), wrappers=name == "portable")


@pytest.mark.parametrize("name", PIPELINES)
def test_buffered(tmp_path, name):
    check_pipeline(maker(name, 1), buffered(tmp_path), wrappers=name == "portable")


@pytest.mark.parametrize("name", PIPELINES)
def test_in_memory(name):
    check_pipeline(maker(name, 2), MemoryMedium, wrappers=name == "portable")


def test_through_wrappers():
    check_pipeline(maker("portable", 2), lambda size: FaultyMedium(MemoryMedium(size), Script()))


def test_the_checks_can_fail():
    """A pipeline that frees the caller's memory too soon is found."""

    class Hasty:
        def __init__(self, job):
            self.job = job

        def __getattr__(self, name):
            return getattr(self.job, name)

        def wait_captured(self, timeout_s=None):
            return True

    class HastyPipeline:
        def __init__(self, inner):
            self.inner = inner

        def __getattr__(self, name):
            return getattr(self.inner, name)

        def submit(self, *args, **kwargs):
            return Hasty(self.inner.submit(*args, **kwargs))

    def make(size):
        return FaultyMedium(MemoryMedium(size), Script())

    with pytest.raises(AssertionError, match="stored exactly"):
        check_pipeline(lambda b, c: HastyPipeline(PortablePipeline(b, c, writers=1)), make)
