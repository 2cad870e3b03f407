"""Both pipelines keep the promises of the Pipeline protocol, on every kind of medium."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from pccheck.pipeline.portable import PortablePipeline
from pccheck.state.plan import lay_out
from pccheck.storage.memory import MemoryMedium
from pccheck.testing.conformance import check_pipeline
from pccheck.testing.faults import FaultyMedium, Script
from tests.conformance.makers import PIPELINES, Changed, files, hasty, maker, of_volume


@pytest.mark.parametrize("name", PIPELINES)
def test_on_disk(tmp_path, name):
    check_pipeline(maker(name, 2), of_volume(tmp_path), wrappers=name == "portable")


@pytest.mark.parametrize("name", PIPELINES)
def test_on_tmpfs(shared_memory, name):
    check_pipeline(maker(name, 3), of_volume(shared_memory), wrappers=name == "portable")


@pytest.mark.parametrize("name", PIPELINES)
def test_buffered(tmp_path, name):
    check_pipeline(maker(name, 1), files(tmp_path, "buffered"), wrappers=name == "portable")


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

    def make(size):
        return FaultyMedium(MemoryMedium(size), Script())

    with pytest.raises(AssertionError, match="stored exactly"):
        check_pipeline(lambda b, c: Changed(PortablePipeline(b, c, writers=1), hasty), make)
