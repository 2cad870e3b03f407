"""Both pipelines keep the promises of the Pipeline protocol, on every kind of medium."""

from __future__ import annotations

import itertools
import os
import threading

import numpy as np
import pytest

from pccheck.pipeline.choose import make_pipeline, native_missing
from pccheck.pipeline.portable import PortablePipeline
from pccheck.state.plan import lay_out
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


@pytest.mark.parametrize("per_job", [1, 2])
def test_writers_per_job_is_a_cap(per_job):
    """Of four writers at most `per_job` are at one job, so that several jobs go on side by side."""
    pipeline = PortablePipeline(64 * 4096, 4096, writers=4, writers_per_job=per_job)
    gate = threading.Event()
    media = [_Counting(gate) for _ in range(3)]
    data = np.arange(16 * 4096, dtype=np.uint8)
    layout = lay_out([data.nbytes], 4096)
    jobs = [pipeline.submit(layout, [data.ctypes.data], data, medium) for medium in media]
    wanted = [per_job] * (4 // per_job) if per_job > 1 else [1, 1, 1]
    for medium, count in zip(media, wanted, strict=False):
        medium.reaches(count)
    gate.set()
    for job in jobs:
        assert job.wait_written(60)
    assert [m.most for m in media[: len(wanted)]] == wanted
    assert max(m.most for m in media) <= per_job
    pipeline.close()


class _Counting:
    """A medium whose writes wait at a gate; counts how many are in it at once."""

    def __init__(self, gate):
        self.inner, self.gate = MemoryMedium(4 << 20), gate
        self.now = self.most = 0
        self.changed = threading.Condition()

    def __getattr__(self, name):
        return getattr(self.inner, name)

    def mapping(self):
        return None  # so that it is written to

    def write_from(self, buffer, offset):
        with self.changed:
            self.now += 1
            self.most = max(self.most, self.now)
            self.changed.notify_all()
        assert self.gate.wait(60)
        self.inner.write_from(buffer, offset)
        with self.changed:
            self.now -= 1

    def reaches(self, count):
        with self.changed:
            assert self.changed.wait_for(lambda: self.now >= count, 60)


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
