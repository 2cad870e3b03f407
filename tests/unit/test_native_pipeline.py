"""The native pipeline: exact bytes on every medium, errors, waits, cancelling, closing, dropping.

What both pipelines must do is in tests/conformance; here is what is the native one's own. A write that never ends is
had from /proc/self/mem: writing where no memory is mapped fails with EIO, which is tried again.
"""

from __future__ import annotations

import _thread
import errno
import gc
import mmap
import os
import random
import threading
import time
import weakref

import numpy as np
import pytest

pytest.importorskip("pccheck.pipeline.native", exc_type=ImportError, reason="the extension was not built")
from pccheck import _native
from pccheck.errors import ClosedError, DeadlineError, MediumError, OptionError, UsageError
from pccheck.pipeline.native import NativePipeline
from pccheck.state.plan import Layout, Piece, lay_out
from pccheck.storage.media import FileMedium
from pccheck.storage.memory import MemoryMedium
from pccheck.testing.pipelines import check_file, make_state

PAGE = 4096
CHUNK = 64 * 1024
LONG_S = 30.0
STUCK = "/proc/self/mem"


def open_medium(path, storage, size=0):
    medium = FileMedium(os.open(path, os.O_RDWR | os.O_CREAT), str(path), storage=storage, write=True)
    if size:
        medium.allocate(size)
    return medium


@pytest.fixture
def stuck():
    """Give a medium every write to which fails with EIO."""
    if not os.access(STUCK, os.W_OK):
        pytest.skip(f"no {STUCK}")
    medium = FileMedium(os.open(STUCK, os.O_RDWR), STUCK, storage="buffered", write=True)
    yield medium
    medium.close()


@pytest.fixture
def state():
    """Give a state of ten chunks."""
    return make_state(random.Random(1), [9 * CHUNK, 7, 3000], CHUNK)


def submit(pipeline, state, medium, **more):
    return pipeline.submit(state.layout, state.addresses, state.arrays, medium, **more)


def threads():
    return len(os.listdir("/proc/self/task")) if os.path.isdir("/proc/self/task") else 0


def descriptors():
    return len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else 0


# -- bytes -------------------------------------------------------------------------------------------------------------


@pytest.fixture(params=["c", "best"])
def kernel(request):
    """Run with the plain and the best kernel."""
    _native.choose_isa(request.param)
    yield request.param
    _native.choose_isa("best")


@pytest.mark.parametrize("storage", ["direct", "buffered", "mapped"])
def test_random_layouts_are_stored_exactly(tmp_path, storage, kernel):
    rng = random.Random(kernel + storage)
    for round_ in range(12):
        largest = rng.choice((1, 64, 5000, 300_000))
        count = rng.choice((0, 1, 3, 50, 400)) if largest <= 5000 else rng.randrange(12)
        lengths = [rng.choice((0, 1, largest, rng.randrange(largest + 1))) for _ in range(count)]
        state = make_state(rng, lengths, rng.choice((PAGE, 5 * PAGE, 256 * 1024)), gaps=round_ % 2 == 0)
        want = state.chunks()
        medium = open_medium(tmp_path / str(round_), storage, state.file_bytes)
        medium.write_from(memoryview(b"\xff" * state.file_bytes), 0)  # gaps and padding must be written as zeros
        shape = {"copiers": rng.choice((1, 3)), "writers": rng.choice((1, 2, 5))}
        pipeline = NativePipeline(rng.choice((2, 5)) * 256 * 1024, 256 * 1024, **shape)
        job = submit(pipeline, state, medium, prologue=rng.randbytes(PAGE) if round_ % 3 else None)
        assert job.wait_captured(LONG_S)
        state.overwrite()
        assert job.wait_written(LONG_S)
        check_file(want, state.layout, medium, job)
        assert pipeline.free_buffers == pipeline.buffers
        pipeline.close(LONG_S)
        medium.close()


def test_six_jobs_over_three_buffers_each_hold_their_moment(tmp_path, state, kernel):
    pipeline = NativePipeline(3 * CHUNK, CHUNK, copiers=2)
    jobs = []
    for number in range(6):
        medium = open_medium(tmp_path / str(number), "direct", state.file_bytes)
        jobs.append((submit(pipeline, state, medium, prologue=bytes(PAGE)), medium, state.chunks()))
        assert jobs[-1][0].wait_captured(LONG_S)
        state.overwrite()
    for job, medium, want in jobs:
        assert job.wait_written(LONG_S)
        check_file(want, state.layout, medium, job)
        medium.close()
    assert pipeline.buffers == pipeline.free_buffers == 3
    pipeline.close(LONG_S)


def test_a_mapping_without_alignment_is_written_too(state):
    memory = mmap.mmap(-1, state.file_bytes + PAGE)

    class Odd:
        path, alignment = "memory", 1

        def fileno(self):
            return None

        def mapping(self):
            return memoryview(memory)[3 : 3 + state.file_bytes]

    pipeline = NativePipeline(2 * CHUNK, CHUNK)
    job = submit(pipeline, state, Odd(), prologue=b"p" * PAGE)
    assert job.wait_written(LONG_S)
    for chunk, want in zip(state.layout.chunks, state.chunks(), strict=True):
        assert memory[3 + chunk.file_offset : 3 + chunk.file_offset + chunk.stored_bytes] == want
    assert memory[3 : 3 + PAGE] == b"p" * PAGE
    pipeline.close()
    memory.close()  # nothing holds on to the mapping of a job that has ended


def test_the_descriptor_is_the_pipelines_own(tmp_path, state):
    """The caller's medium may be closed, and its number reused, while the job runs."""
    medium, stranger = open_medium(tmp_path / "slot", "buffered", state.file_bytes), tmp_path / "stranger"
    pipeline = NativePipeline(2 * CHUNK, CHUNK)
    number = medium.fileno()
    job = submit(pipeline, state, medium)
    medium.close()
    other = os.open(stranger, os.O_RDWR | os.O_CREAT)
    assert other == number
    assert job.wait_written(LONG_S)
    pipeline.close()
    os.close(other)
    assert stranger.stat().st_size == 0
    check_file(state.chunks(), state.layout, open_medium(tmp_path / "slot", "buffered"), job)


# -- errors ------------------------------------------------------------------------------------------------------------


def test_a_descriptor_opened_for_reading_is_one_error(tmp_path, state):
    path = tmp_path / "slot"
    path.write_bytes(bytes(state.file_bytes))
    medium = FileMedium(os.open(path, os.O_RDONLY), str(path), storage="buffered", write=False)
    pipeline = NativePipeline(3 * CHUNK, CHUNK)
    for prologue, offset in ((None, state.layout.chunks[0].file_offset), (bytes(PAGE), 0)):
        job = submit(pipeline, state, medium, prologue=prologue)
        assert job.wait_captured(LONG_S)
        with pytest.raises(MediumError) as caught:
            job.wait_written(LONG_S)
        assert (caught.value.operation, caught.value.errno, caught.value.path) == ("write", errno.EBADF, str(path))
        assert caught.value.offset is not None
        assert caught.value.offset >= offset
        with pytest.raises(UsageError):
            job.digests()
        assert pipeline.free_buffers == 3
    pipeline.close()
    medium.close()


def test_a_prologue_that_cannot_be_synced_is_a_sync_error(state, tmp_path):
    """/dev/null takes every write and knows no fdatasync."""
    medium = FileMedium(os.open("/dev/null", os.O_RDWR), "/dev/null", storage="buffered", write=True)
    pipeline = NativePipeline(3 * CHUNK, CHUNK)
    assert submit(pipeline, state, medium).wait_written(LONG_S)
    job = submit(pipeline, state, medium, prologue=bytes(PAGE))
    with pytest.raises(MediumError) as caught:
        job.wait_written(LONG_S)
    assert (caught.value.operation, caught.value.errno, caught.value.offset) == ("sync", errno.EINVAL, None)
    assert pipeline.free_buffers == 3
    pipeline.close()
    medium.close()


def test_retries_are_bounded_and_counted(stuck, state):
    pipeline = NativePipeline(2 * CHUNK, CHUNK, writers=1, retries=2)
    job = submit(pipeline, state, stuck)
    with pytest.raises(MediumError) as caught:
        job.wait_written(LONG_S)
    assert (caught.value.errno, caught.value.offset) == (errno.EIO, state.layout.chunks[0].file_offset)
    assert job.stats().retries == 2
    pipeline.close()


def test_what_cannot_be_is_refused(tmp_path, state):
    for arguments in ({"chunk_bytes": 5000}, {"chunk_bytes": 0}, {"writers": 0}, {"copiers": 65}, {"retries": -1}):
        with pytest.raises(OptionError, match=next(iter(arguments))):
            NativePipeline(**({"buffer_bytes": CHUNK, "chunk_bytes": CHUNK} | arguments))
    for buffer_bytes in (1 << 60, 1 << 80):
        with pytest.raises(MemoryError, match="lower buffer_bytes"):
            NativePipeline(buffer_bytes, 1 << 30)
    pipeline = NativePipeline(0, CHUNK)
    assert pipeline.buffers == 2
    medium = open_medium(tmp_path / "slot", "buffered", state.file_bytes)
    layout, addresses = state.layout, state.addresses

    class Neither:
        path, alignment = "nowhere", 1

        def fileno(self):
            return None

        mapping = fileno

    for refused in (
        lambda: pipeline.submit(layout, addresses[1:], None, medium),
        lambda: pipeline.submit(lay_out([CHUNK], 2 * CHUNK), [1], None, medium),
        lambda: pipeline.submit(layout, addresses, None, medium, prologue=bytes(PAGE - 1)),
        lambda: pipeline.submit(layout, addresses, None, Neither()),
        lambda: pipeline.submit(layout, [0] * len(addresses), None, medium),
        lambda: pipeline.submit(layout, addresses, None, MemoryMedium(PAGE)),
        lambda: pipeline.submit(Layout((Piece(64, 8), Piece(64, 8)), CHUNK), [1, 1], None, medium),
        lambda: pipeline.submit(Layout((Piece(64, 8), Piece(0, 8)), CHUNK), [1, 1], None, medium),
    ):
        with pytest.raises(ValueError):
            refused()
    with pytest.raises(OverflowError):
        pipeline.submit(layout, [-1] * len(addresses), None, medium)
    with pytest.raises(TypeError):
        pipeline.submit(layout, ["x"] * len(addresses), None, medium)
    assert submit(pipeline, state, medium).wait_written(LONG_S)
    pipeline.close()
    with pytest.raises(ClosedError):
        submit(pipeline, state, medium)
    medium.close()


# -- waiting, cancelling, closing --------------------------------------------------------------------------------------


def test_waits_have_ends_and_a_full_pool_is_back_pressure(stuck, state):
    pipeline = NativePipeline(2 * CHUNK, CHUNK, retries=100)
    job, behind = submit(pipeline, state, stuck), submit(pipeline, state, stuck)
    assert not job.wait_written(0)
    assert not job.wait_captured(0.02)
    assert not behind.wait_captured(-1)
    assert pipeline.free_buffers == 0
    assert "being captured" in repr(job)
    before = job.stats()
    assert before.pool_wait_s > 0
    assert job.stats().pool_wait_s > before.pool_wait_s
    with pytest.raises(UsageError, match="wait_written"):
        job.digests()
    with pytest.raises(DeadlineError, match="0 of 2 buffers free"):
        pipeline.close(0.02)
    with pytest.raises(ClosedError):
        submit(pipeline, state, stuck)
    for one in (behind, job):
        one.cancel()
        assert one.wait_captured(LONG_S)
        with pytest.raises(MediumError) as caught:
            one.wait_written(LONG_S)
        assert caught.value.errno == errno.ECANCELED
    assert pipeline.free_buffers == 2
    pipeline.close(LONG_S)
    pipeline.close(0)
    assert pipeline.free_buffers == 2


def test_a_job_goes_on_while_an_older_one_waits_for_its_prologue(stuck, state, tmp_path):
    pipeline = NativePipeline(30 * CHUNK, CHUNK, writers=2, retries=100)
    older = submit(pipeline, state, stuck, prologue=bytes(PAGE))
    assert older.wait_captured(LONG_S)
    assert pipeline.free_buffers == 30 - len(state.layout.chunks)
    medium = open_medium(tmp_path / "slot", "direct", state.file_bytes)
    younger = submit(pipeline, state, medium)
    assert younger.wait_written(LONG_S)
    check_file(state.chunks(), state.layout, medium, younger)
    assert not older.wait_written(0)
    older.cancel()
    pipeline.close(LONG_S)
    medium.close()


def test_control_c_comes_out_of_a_wait(stuck, state):
    pipeline = NativePipeline(2 * CHUNK, CHUNK, retries=100)
    job = submit(pipeline, state, stuck)
    for wait in (job.wait_captured, job.wait_written, pipeline.close):
        timer = threading.Timer(0.05, _thread.interrupt_main)
        timer.start()
        with pytest.raises(KeyboardInterrupt):
            wait(LONG_S)
        timer.join()
    job.cancel()
    assert job.wait_captured(LONG_S)
    pipeline.close(LONG_S)


def test_many_threads_wait_for_one_job(tmp_path, state):
    pipeline = NativePipeline(2 * CHUNK, CHUNK)
    medium = open_medium(tmp_path / "slot", "direct", state.file_bytes)
    job = submit(pipeline, state, medium)
    seen = []
    waiting = [
        threading.Thread(target=lambda: seen.append(job.wait_captured(LONG_S) and job.wait_written(LONG_S)))
        for _ in range(8)
    ]
    closers = [threading.Thread(target=pipeline.close, args=(LONG_S,)) for _ in range(2)]
    for thread in waiting + closers:
        thread.start()
    for thread in waiting + closers:
        thread.join(LONG_S)
    assert seen == [True] * 8
    medium.close()


# -- what is kept, and let go ------------------------------------------------------------------------------------------


class Memory(np.ndarray):
    """An array that can be referenced weakly."""


def test_sources_live_as_long_as_they_are_read_and_no_longer(stuck):
    layout = lay_out([8 * CHUNK], CHUNK)
    pipeline = NativePipeline(2 * CHUNK, CHUNK, retries=100)
    source = np.zeros(8 * CHUNK, np.uint8).view(Memory)
    alive = weakref.ref(source)
    job = pipeline.submit(layout, [source.ctypes.data], [source], stuck)
    other = pipeline.submit(layout, [source.ctypes.data], [source], stuck)
    del source
    gc.collect()
    assert alive() is not None
    del other  # dropped, but still to be captured
    gc.collect()
    assert alive() is not None
    job.cancel()
    assert job.wait_captured(LONG_S)
    assert alive() is not None
    del pipeline  # cancels the other one
    assert alive() is None
    with pytest.raises(MediumError):
        job.wait_written(0)


def test_the_next_submit_lets_go_of_what_was_captured(tmp_path):
    layout = lay_out([8 * CHUNK], CHUNK)
    pipeline = NativePipeline(8 * CHUNK, CHUNK)
    medium = open_medium(tmp_path / "slot", "direct", 1 << 20)
    source = np.zeros(8 * CHUNK, np.uint8).view(Memory)
    alive = weakref.ref(source)
    pipeline.submit(layout, [source.ctypes.data], source, medium)
    del source
    empty = lay_out([], CHUNK)
    assert pipeline.submit(empty, [], None, medium).wait_written(LONG_S)
    pipeline.close(LONG_S)
    assert alive() is None
    medium.close()


def test_fifty_pipelines_leave_no_thread_and_no_descriptor(tmp_path, state):
    medium = open_medium(tmp_path / "slot", "buffered", state.file_bytes)
    before = threads(), descriptors()
    for number in range(50):
        pipeline = NativePipeline(3 * CHUNK, CHUNK)
        job = submit(pipeline, state, medium, prologue=bytes(PAGE) if number % 2 else None)
        match number % 4:
            case 0:
                assert job.wait_written(LONG_S)
                pipeline.close(LONG_S)
            case 1:
                job.cancel()
            case 2:
                pipeline.close(LONG_S)
            case _:
                del job
        del pipeline
    job = None
    deadline = time.monotonic() + LONG_S  # a joined thread is listed for a moment longer
    while threads() > before[0] and time.monotonic() < deadline:
        time.sleep(0.01)
    assert (threads(), descriptors()) == before
    medium.close()
