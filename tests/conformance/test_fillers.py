"""Both pipelines keep the promises about fillers, on every kind of medium, with a device whose copies come late."""

from __future__ import annotations

import random

import pytest

from pccheck.errors import MediumError
from pccheck.pipeline import fills
from pccheck.storage.memory import MemoryMedium
from pccheck.testing.faults import FaultyMedium, Script
from pccheck.testing.fill_failures import check_no_buffer_is_left, check_stuck_device
from pccheck.testing.fillers import check_filled_layouts, check_fillers
from pccheck.testing.late_device import CHUNK, LateFiller, finish, late_device, spread_state, submit, wait_until
from tests.conformance.makers import PIPELINES, Changed, files, hasty, maker, of_volume


@pytest.mark.parametrize("name", PIPELINES)
def test_on_disk(tmp_path, name):
    check_fillers(maker(name, 2), of_volume(tmp_path))


@pytest.mark.parametrize("name", PIPELINES)
def test_on_tmpfs(shared_memory, name):
    check_fillers(maker(name, 3), of_volume(shared_memory))


@pytest.mark.parametrize("name", PIPELINES)
def test_buffered(tmp_path, name):
    check_fillers(maker(name, 1), files(tmp_path, "buffered"))


@pytest.mark.parametrize("name", PIPELINES)
def test_in_memory(name):
    check_fillers(maker(name, 2), MemoryMedium)


def test_through_wrappers():
    check_fillers(maker("portable", 2), lambda size: FaultyMedium(MemoryMedium(size), Script()))


@pytest.mark.parametrize("name", PIPELINES)
def test_a_device_that_never_ends(tmp_path, name):
    check_stuck_device(maker(name, 2, fill_timeout_s=0.3), files(tmp_path, "buffered"))
    check_stuck_device(maker(name, 2, fill_timeout_s=0.3), MemoryMedium)


@pytest.mark.parametrize("name", PIPELINES)
def test_a_device_that_keeps_every_buffer(tmp_path, name):
    check_no_buffer_is_left(maker(name, 2, fill_timeout_s=0.3), files(tmp_path, "buffered"))
    check_no_buffer_is_left(maker(name, 2, fill_timeout_s=0.3), MemoryMedium)


@pytest.mark.parametrize("name", PIPELINES)
def test_a_cancelled_job_does_not_wait_for_ever_for_its_device(name, monkeypatch):
    """Copies may take long, but not once their job has failed."""
    monkeypatch.setattr(fills, "GRACE_S", 0.1)
    state = spread_state(random.Random(1))
    pipeline, medium = maker(name, 1, fill_timeout_s=1e9)(3 * CHUNK, CHUNK), MemoryMedium(state.file_bytes)
    with late_device() as device:
        device.hold()
        filler = LateFiller(state, [0, 1], device, pipeline.memory)
        job = submit(pipeline, state, filler, medium)
        assert device.is_told(2)
        job.cancel()
        assert job.wait_captured(30)
        with pytest.raises(MediumError):
            job.wait_written(30)
        assert pipeline.buffers - pipeline.free_buffers == 2
        device.go_on()
        wait_until(lambda: pipeline.free_buffers == pipeline.buffers)
        finish(pipeline, filler)


@pytest.mark.parametrize("name", PIPELINES)
def test_the_checks_can_fail(tmp_path, name):
    """A pipeline that frees the caller's memory too soon is found, and one that forgets a filler."""

    class Endless:
        def __init__(self, filler):
            self.has, self.fill, self.end = filler.has, filler.fill, lambda: None

    def endless(inner, args, kwargs):
        return inner.submit(*args, **{**kwargs, "filler": Endless(kwargs["filler"])})

    for change, found in ((hasty, "stored exactly"), (endless, "exactly once")):
        make = maker(name, 1)
        with pytest.raises(AssertionError, match=found):
            check_filled_layouts(lambda b, c, m=make, f=change: Changed(m(b, c), f), files(tmp_path, "buffered"))
