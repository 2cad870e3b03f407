"""The native half of fillers, seen from the thread that fills: calls out of turn, jobs that were not begun, forks.

What both pipelines must do is in tests/conformance.
"""

from __future__ import annotations

import ctypes
import gc
import os
import random
import threading
import time
import weakref

import pytest

pytest.importorskip("pccheck.pipeline.native", exc_type=ImportError, reason="the extension was not built")
from pccheck import _native
from pccheck.errors import DeadlineError, ForkedError
from pccheck.pipeline import fills
from pccheck.pipeline.native import NativePipeline
from pccheck.state.plan import lay_out
from pccheck.storage.memory import MemoryMedium
from pccheck.testing.late_device import LateFiller, late_device, submit
from pccheck.testing.states import check_file, make_state

PAGE = 4096
CHUNK = 64 * 1024
LONG_S = 30.0


@pytest.fixture
def threads():
    """Give native threads with three buffers."""
    pipeline = _native.Pipeline(3, CHUNK, 1, 1, 1, 0)
    yield pipeline
    assert pipeline.close(LONG_S)


@pytest.fixture
def device():
    """Give a device whose copies come late."""
    with late_device() as device:
        yield device


class Raw:
    """A job of six chunks, every other one of which is to be filled, begun without the thread that fills it."""

    def __init__(self, threads, tell=None):
        self.state = make_state(random.Random(1), [CHUNK] * 6, CHUNK)
        self.medium = MemoryMedium(self.state.file_bytes)
        self.told = []
        addresses = [0 if i % 2 else a for i, a in enumerate(self.state.addresses)]
        layout = _native.Layout(*self.state.layout.tables)
        self.job = threads.submit(
            layout, addresses, self.state.arrays, -1, self.medium.mapping(), 1, None, tell or self.told.append
        )


def fill(job, state):
    """Take the next chunk and copy to it; gives its index."""
    chunk, address, nbytes = job.take_fill(LONG_S)
    assert nbytes == CHUNK
    ctypes.memmove(address, state.arrays[chunk].ctypes.data, nbytes)
    return chunk


def test_chunks_are_filled_in_order(threads):
    raw = Raw(threads)
    job = raw.job
    assert raw.told == [job]
    assert job.fills_left() == 3
    for chunk in (1, 3, 5):
        assert fill(job, raw.state) == chunk
        assert job.fill_done(chunk) is True
        assert job.wait_captured(LONG_S, chunk + 1)
    assert job.fills_left() == 0
    assert job.take_fill(LONG_S) is None  # at once: nothing is left
    assert job.wait_ended(LONG_S)
    check_file(raw.state.chunks(), raw.state.layout, raw.medium, job)
    assert threads.free_buffers == threads.buffers


def test_calls_out_of_turn_are_refused(threads):
    raw = Raw(threads)
    job = raw.job
    for call in (job.fill_done, job.reclaim, lambda c: job.drop_fill(c, True)):
        for chunk in (0, 1, 99, -1):
            with pytest.raises(ValueError, match="chunk"):
                call(chunk)
    chunk = fill(job, raw.state)
    job.fill_done(chunk)
    with pytest.raises(ValueError, match="chunk"):
        job.fill_done(chunk)
    assert fill(job, raw.state) == 3
    job.drop_fill(3, True)
    assert job.wait_ended(LONG_S)
    assert job.failure()[0] == "fill"
    assert threads.free_buffers == threads.buffers
    with pytest.raises(ValueError, match="chunk"):
        job.reclaim(3)


def test_a_lost_buffer_comes_back_when_it_is_reclaimed():
    threads = _native.Pipeline(3, CHUNK, 1, 1, 1, 0)
    raw = Raw(threads)
    job = raw.job
    assert fill(job, raw.state) == 1
    job.fail_fill()
    assert not job.wait_captured(0)
    assert job.fill_done(1) is False
    job.drop_fill(1, False)
    assert job.wait_captured(0)
    assert job.wait_ended(LONG_S)
    assert threads.free_buffers == 2
    assert threads.close(LONG_S)
    address, nbytes = threads.memory
    assert nbytes == 3 * CHUNK
    assert address  # a device may still write to it
    job.reclaim(1)
    assert threads.memory[0] == 0


def test_whoever_does_not_hear_of_a_job_cancels_it(threads):
    def tell(job):
        told.append(job)
        raise ZeroDivisionError

    told = []
    with pytest.raises(ZeroDivisionError):
        Raw(threads, tell)
    assert told[0].wait_ended(LONG_S)
    assert told[0].failure()[0] == "write"
    assert threads.free_buffers == threads.buffers


def test_layouts_that_contradict_themselves_are_refused():
    pieces, chunks = lay_out([100, 5000], PAGE).tables
    _native.Layout(pieces, chunks)
    for tables in (
        (pieces[:8], chunks), (pieces, chunks[:8]), (pieces[16:] + pieces[:16], chunks), (pieces, chunks[::-1]),
    ):  # fmt: skip
        with pytest.raises(ValueError, match="contradict"):
            _native.Layout(*tables)


def test_layouts_may_change_from_job_to_job():
    state = make_state(random.Random(2), [CHUNK] * 4, CHUNK)
    other = make_state(random.Random(3), [7, 0, CHUNK], PAGE)
    pipeline, medium = NativePipeline(4 * CHUNK, CHUNK), MemoryMedium(max(state.file_bytes, other.file_bytes))
    for _ in range(3):
        assert pipeline.submit(state.layout, state.addresses, None, medium).wait_written(LONG_S)
    for one in (other, state, other):
        job = pipeline.submit(one.layout, one.addresses, None, medium)
        assert job.wait_written(LONG_S)
        check_file(one.chunks(), one.layout, medium, job)
    pipeline.close(LONG_S)


def test_what_is_filled_is_let_go_of(device):
    state = make_state(random.Random(4), [CHUNK] * 4, CHUNK)
    pipeline, medium = NativePipeline(4 * CHUNK, CHUNK), MemoryMedium(state.file_bytes)
    for fails in (False, True):
        filler = LateFiller(state, [1, 2], device, pipeline.memory)
        if fails:
            filler.raises[2] = ZeroDivisionError()
        gone = threading.Event()
        weakref.finalize(filler, gone.set)
        job = submit(pipeline, state, filler, medium)
        assert job.wait_captured(LONG_S)
        del filler, job
        deadline = time.monotonic() + LONG_S
        while not gone.wait(0.01) and time.monotonic() < deadline:
            gc.collect()  # an error and what it tells of hold each other
        assert gone.is_set()
    pipeline.close(LONG_S)


def test_a_thread_is_started_with_the_first_filler_only(device):
    def names():
        return [t.name for t in threading.enumerate()]

    state = make_state(random.Random(5), [CHUNK] * 4, CHUNK)
    pipeline, medium = NativePipeline(4 * CHUNK, CHUNK), MemoryMedium(state.file_bytes)
    assert pipeline.submit(state.layout, state.addresses, None, medium).wait_written(LONG_S)
    assert "pccheck-fill" not in names()
    for _ in range(3):
        filler = LateFiller(state, [3], device, pipeline.memory)
        assert submit(pipeline, state, filler, medium).wait_written(LONG_S)
        assert names().count("pccheck-fill") == 1
    pipeline.close(LONG_S)
    assert "pccheck-fill" not in names()


def test_a_system_that_refuses_a_thread_fails_the_submission(device, monkeypatch):
    state = make_state(random.Random(6), [CHUNK] * 4, CHUNK)
    pipeline, medium = NativePipeline(4 * CHUNK, CHUNK), MemoryMedium(state.file_bytes)

    def refuse(self):
        raise RuntimeError("can't start new thread")

    filler = LateFiller(state, [1], device, pipeline.memory)
    with monkeypatch.context() as patch:
        patch.setattr(fills.threading.Thread, "start", refuse)
        with pytest.raises(RuntimeError, match="new thread"):
            submit(pipeline, state, filler, medium)
    assert filler.ends == 1
    filler = LateFiller(state, [1], device, pipeline.memory)
    assert submit(pipeline, state, filler, medium).wait_written(LONG_S)
    pipeline.close(LONG_S)


def test_a_ctrl_c_behind_the_submission_cancels_the_job(device, monkeypatch):
    state = make_state(random.Random(7), [CHUNK] * 4, CHUNK)
    pipeline, medium = NativePipeline(4 * CHUNK, CHUNK), MemoryMedium(state.file_bytes)
    put = fills.FillThread.put

    def interrupted(self, order, job):
        put(self, order, job)
        raise KeyboardInterrupt

    filler = LateFiller(state, [1], device, pipeline.memory)
    with monkeypatch.context() as patch:
        patch.setattr(fills.FillThread, "put", interrupted)
        with pytest.raises(KeyboardInterrupt):
            submit(pipeline, state, filler, medium)
    pipeline.close(LONG_S)
    assert filler.ends == 1
    assert pipeline.free_buffers == pipeline.buffers


def test_a_forked_child_drops_its_copy_and_calls_nothing(device):
    state = make_state(random.Random(8), [CHUNK] * 4, CHUNK)
    pipeline, medium = NativePipeline(4 * CHUNK, CHUNK), MemoryMedium(state.file_bytes)
    device.hold()
    filler = LateFiller(state, [1], device, pipeline.memory)
    job = submit(pipeline, state, filler, medium)
    assert device.is_told(1)
    pid = os.fork()
    if pid == 0:
        code = 3
        try:
            for call in (job.fills_left, lambda: job.take_fill(0), lambda: job.fill_done(1), lambda: job.reclaim(1),
                         lambda: job.fail_fill(ValueError()), lambda: job.wait_captured(0, chunks=1)):  # fmt: skip
                with pytest.raises(ForkedError):
                    call()
            pipeline._dropped()
            code = 0
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    with pytest.raises(DeadlineError):
        pipeline.close(0.01)
    device.go_on()
    assert job.wait_written(LONG_S)
    pipeline.close(LONG_S)
