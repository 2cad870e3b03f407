"""Checks of pipelines: whether one keeps the promises of pipeline/interface.py (beside the floors).

Imports floors 0 to 2. Plain functions that need no test framework; each raises AssertionError that says what was
promised. Sources are overwritten as soon as a capture is said to be over, so that what is read late is seen.
"""

from __future__ import annotations

import errno
import os
import random
import threading
import time
from array import array
from collections.abc import Callable, Sequence

from pccheck.errors import DeadlineError, MediumError, PccheckError
from pccheck.format import PAGE, PAYLOAD_OFFSET
from pccheck.pipeline.interface import Job, Pipeline
from pccheck.state.plan import lay_out
from pccheck.storage.media import FileMedium
from pccheck.storage.medium import Medium
from pccheck.testing.faults import FOREVER, Fault, FaultyMedium, Script
from pccheck.testing.promises import check, raises, read
from pccheck.testing.states import LONG_S, Gate, State, check_file, make_state

MakePipeline = Callable[[int, int], Pipeline]
MakeMedium = Callable[[int], Medium]
CHUNK = 64 * 1024


def check_pipeline(make_pipeline: MakePipeline, make_medium: MakeMedium, *, wrappers: bool = True) -> None:
    """Check a pipeline on a kind of medium.

    Args:
        make_pipeline: gives a new pipeline with `(buffer_bytes, chunk_bytes)`.
        make_medium: gives a new medium of at least this many bytes.
        wrappers: whether it takes media that have neither descriptor nor mapping, as the fault wrappers are.
    """
    checks: list[Callable[[MakePipeline, MakeMedium], None]] = [
        check_layouts, check_more_jobs_than_buffers, check_failing_descriptor, check_edges, check_close
    ]  # fmt: skip
    if wrappers:
        checks += [check_failing_writes, check_prologue_order, check_cancel, check_deadlines]
    for part in checks:
        part(make_pipeline, make_medium)


def finish(pipeline: Pipeline) -> None:
    """Close a pipeline all of whose jobs have ended, and check that it has every buffer."""
    check(pipeline.free_buffers == pipeline.buffers, "every buffer is back when all jobs have ended")
    pipeline.close(LONG_S)


def _written(job: Job) -> None:
    check(job.wait_captured(LONG_S), "a capture ends")
    check(job.wait_written(LONG_S), "a job ends")


def check_layouts(make_pipeline: MakePipeline, make_medium: MakeMedium) -> None:
    """Random layouts: up to 300 pieces of 0 B to 200 kB at odd addresses, gaps, several chunk sizes and pools."""
    rng = random.Random(2)
    for round_ in range(14):
        chunk_bytes = rng.choice((PAGE, 3 * PAGE, CHUNK, 256 * 1024, 1 << 20))
        pieces = rng.choice((0, 1, 2, 7, 40, 300))
        largest = rng.choice((1, 63, 5000, 200_000)) if pieces < 300 else 5000
        lengths = [rng.choice((0, 1, largest, rng.randrange(largest + 1))) for _ in range(pieces)]
        state = make_state(rng, lengths, chunk_bytes, gaps=round_ % 3 == 0)
        medium = make_medium(state.file_bytes)
        pipeline = make_pipeline(rng.choice((2, 3, 9)) * chunk_bytes, chunk_bytes)
        prologue = rng.randbytes(PAGE) if round_ % 2 else None
        want = state.chunks()
        addresses: Sequence[int] = state.addresses
        if round_ % 4 == 0:
            addresses = array("Q", addresses)  # numbers of 64 bits, as a cached plan has them
        job = pipeline.submit(state.layout, addresses, state.arrays, medium, prologue=prologue)
        check(job.wait_captured(LONG_S), "a capture ends")
        state.overwrite()
        check(job.wait_written(LONG_S), "a job ends")
        check_file(want, state.layout, medium, job)
        if prologue is not None:
            check(read(medium, PAGE, 0) == prologue, "the prologue is the first page")
        stats = job.stats()
        check(stats.captured_s >= 0 and stats.written_s >= 0 and stats.retries == 0, "stats tell what was done")
        finish(pipeline)
        medium.close()


def check_more_jobs_than_buffers(make_pipeline: MakePipeline, make_medium: MakeMedium) -> None:
    """Six checkpoints of one state in flight over three buffers: each holds its own moment."""
    rng = random.Random(3)
    state = make_state(rng, [CHUNK, 5, 3 * CHUNK + 1, 77, 2 * CHUNK], CHUNK)
    pipeline = make_pipeline(3 * CHUNK, CHUNK)
    jobs = []
    for _ in range(6):
        medium = make_medium(state.file_bytes)
        want = state.chunks()
        job = pipeline.submit(state.layout, state.addresses, state.arrays, medium, prologue=bytes(PAGE))
        check(job.wait_captured(LONG_S), "a capture ends though the pool is smaller than the state")
        state.overwrite()
        jobs.append((job, medium, want))
    for job, medium, want in jobs:
        _written(job)
        check_file(want, state.layout, medium, job)
        medium.close()
    finish(pipeline)


def check_edges(make_pipeline: MakePipeline, make_medium: MakeMedium) -> None:
    """Jobs of nothing, jobs at once, smaller chunks than buffers, and calls that cannot be carried out."""
    pipeline = make_pipeline(4 * CHUNK, CHUNK)
    medium = make_medium(PAYLOAD_OFFSET)
    empty = pipeline.submit(lay_out([], CHUNK), [], None, medium)
    _written(empty)
    check(empty.digests() == b"", "a job of no chunks has no digests")
    only = pipeline.submit(lay_out([0, 0], CHUNK), [1, 1], None, medium, prologue=b"p" * PAGE)
    _written(only)
    check(read(medium, PAGE, 0) == b"p" * PAGE, "a job of no chunks writes its prologue")
    rng = random.Random(4)
    states = [make_state(rng, [CHUNK * 2 + i], chunk) for i, chunk in enumerate((CHUNK, PAGE, 2 * PAGE))]
    media = [make_medium(s.file_bytes) for s in states]
    jobs = [pipeline.submit(s.layout, s.addresses, s.arrays, m) for s, m in zip(states, media, strict=True)]
    for job, state, one in zip(jobs, states, media, strict=True):
        _written(job)
        job.cancel()
        _written(job)  # an end is an end
        check_file(state.chunks(), state.layout, one, job)
        one.close()
    large = lay_out([CHUNK * 4], 2 * CHUNK)
    refused = (PccheckError, ValueError)
    raises(refused, lambda: pipeline.submit(large, [1], None, medium), "chunks larger than the buffers")
    raises(refused, lambda: pipeline.submit(lay_out([8], CHUNK), [], None, medium), "an address too few")
    raises(refused, lambda: pipeline.submit(lay_out([], CHUNK), [], None, medium, prologue=b"x"), "a short prologue")
    medium.close()
    finish(pipeline)


def check_failing_descriptor(make_pipeline: MakePipeline, make_medium: MakeMedium) -> None:
    """A device that is full: that job fails with its errno, captures end all the same, other jobs do not notice."""
    if not os.path.exists("/dev/full"):
        return
    rng = random.Random(5)
    state = make_state(rng, [9 * CHUNK + 3], CHUNK)
    for prologue in (None, bytes(PAGE)):
        pipeline = make_pipeline(3 * CHUNK, CHUNK)
        full = FileMedium(os.open("/dev/full", os.O_RDWR), "/dev/full", storage="buffered", write=True)
        good = [make_medium(state.file_bytes) for _ in range(2)]
        first = pipeline.submit(state.layout, state.addresses, state.arrays, good[0], prologue=prologue)
        bad = pipeline.submit(state.layout, state.addresses, state.arrays, full, prologue=prologue)
        last = pipeline.submit(state.layout, state.addresses, state.arrays, good[1], prologue=prologue)
        check(bad.wait_captured(LONG_S), "a capture ends though its job has failed")
        fails_with(bad, errno.ENOSPC)
        fails_with(bad, errno.ENOSPC)  # each time it is asked
        for job, medium in zip((first, last), good, strict=True):
            _written(job)
            check_file(state.chunks(), state.layout, medium, job)
            medium.close()
        full.close()
        finish(pipeline)


def fails_with(job: Job, code: int) -> None:
    """Wait for the end of a job, and check that its medium failed with this errno."""
    try:
        done = job.wait_written(LONG_S)
    except MediumError as error:
        check(error.errno == code, f"the error is that of the medium ({error!r}), {errno.errorcode[code]}")
        raises(PccheckError, job.digests, "digests() of a job that failed")
    else:
        raise AssertionError(f"broken promise: a job on a failing medium fails (wait_written gave {done})")


def check_failing_writes(make_pipeline: MakePipeline, make_medium: MakeMedium) -> None:
    """Every write, the prologue and its sync fail in turn, once and for ever, whole and short."""
    rng = random.Random(6)
    state = make_state(rng, [3 * CHUNK + 3], CHUNK)
    faults = [(Fault("write", n, code, FOREVER), code) for n in (1, 2, 5) for code in (errno.EIO, errno.ENOSPC)]
    faults += [(Fault("write", n, errno.ENOSPC, how="short"), errno.ENOSPC) for n in (1, 3)]
    faults += [(Fault("sync", 1, errno.EIO), errno.EIO)]
    passing = [Fault("write", n, errno.EIO, how=how) for n in (1, 2, 5) for how in ("before", "short")]
    pipeline = make_pipeline(2 * CHUNK, CHUNK)
    for fault, code in faults:
        inner, other = make_medium(state.file_bytes), make_medium(state.file_bytes)
        job = pipeline.submit(
            state.layout, state.addresses, state.arrays, FaultyMedium(inner, Script(fault)), prologue=bytes(PAGE)
        )
        healthy = pipeline.submit(state.layout, state.addresses, state.arrays, other, prologue=bytes(PAGE))
        check(job.wait_captured(LONG_S), "a capture ends though its job has failed")
        fails_with(job, code)
        _written(healthy)
        check_file(state.chunks(), state.layout, other, healthy)
        check(pipeline.free_buffers == pipeline.buffers, "a failed job keeps no buffer")
        inner.close()
        other.close()
    for fault in passing:
        inner, script = make_medium(state.file_bytes), Script(fault)
        job = pipeline.submit(
            state.layout, state.addresses, state.arrays, FaultyMedium(inner, script), prologue=b"q" * PAGE
        )
        _written(job)
        check(script.failed == 1 and job.stats().retries == 1, "one EIO is tried again, and counted")
        check_file(state.chunks(), state.layout, inner, job)
        check(read(inner, PAGE, 0) == b"q" * PAGE, "the prologue is whole after a short write")
        inner.close()
    finish(pipeline)


def check_prologue_order(make_pipeline: MakePipeline, make_medium: MakeMedium) -> None:
    """The prologue is written, then synced, then come the chunks."""
    rng = random.Random(7)
    state = make_state(rng, [6 * CHUNK], CHUNK)
    pipeline = make_pipeline(4 * CHUNK, CHUNK)
    for _ in range(5):
        inner, script = make_medium(state.file_bytes), Script()
        job = pipeline.submit(
            state.layout, state.addresses, state.arrays, FaultyMedium(inner, script), prologue=bytes(PAGE)
        )
        _written(job)
        done = [operation for operation, _ in script.operations]
        check(done == ["write", "sync"] + ["write"] * 6, f"the prologue is durable before any payload byte ({done})")
        inner.close()
    finish(pipeline)


def _gated(pipeline: Pipeline, state: State, inner: Medium) -> tuple[Gate, Job]:
    gate = Gate(inner)
    job = pipeline.submit(state.layout, state.addresses, state.arrays, gate)  # type: ignore[arg-type]
    return gate, job


def check_cancel(make_pipeline: MakePipeline, make_medium: MakeMedium) -> None:
    """A cancelled job ends with the writes that run; one that waits behind it goes on."""
    rng = random.Random(8)
    state = make_state(rng, [12 * CHUNK], CHUNK)
    pipeline = make_pipeline(3 * CHUNK, CHUNK)
    inner, other = make_medium(state.file_bytes), make_medium(state.file_bytes)
    gate, job = _gated(pipeline, state, inner)
    behind = pipeline.submit(state.layout, state.addresses, state.arrays, other)
    check(not job.wait_captured(0.05), "a capture waits while no buffer comes back")
    job.cancel()
    check(job.wait_captured(LONG_S), "a cancelled job needs the caller's memory no more")
    gate.open()
    fails_with(job, errno.ECANCELED)
    check(gate.writes <= 3, "a cancelled job starts no more writes")
    _written(behind)
    check_file(state.chunks(), state.layout, other, behind)
    waiting_gate, waiting = _gated(pipeline, state, inner)
    queued = pipeline.submit(state.layout, state.addresses, state.arrays, other)
    queued.cancel()
    fails_with(queued, errno.ECANCELED)  # before it was captured
    waiting_gate.open()
    _written(waiting)
    inner.close()
    other.close()
    finish(pipeline)


def check_deadlines(make_pipeline: MakePipeline, make_medium: MakeMedium) -> None:
    """Waits that end without their event say so, and close() names what it waits for."""
    rng = random.Random(9)
    state = make_state(rng, [8 * CHUNK], CHUNK)
    pipeline = make_pipeline(2 * CHUNK, CHUNK)
    inner = make_medium(state.file_bytes)
    gate, job = _gated(pipeline, state, inner)
    check(not job.wait_captured(0) and not job.wait_captured(0.02), "wait_captured gives False when time is up")
    check(not job.wait_written(0) and not job.wait_written(0.02), "wait_written gives False when time is up")
    raises(PccheckError, job.digests, "digests() of a job that is not written")
    raises(DeadlineError, lambda: pipeline.close(0.05), "close() while a job cannot end")
    raises(PccheckError, lambda: pipeline.submit(state.layout, state.addresses, None, inner), "submit() after close()")
    gate.open()
    _written(job)
    check(job.stats().pool_wait_s > 0, "time that captures waited for a buffer is counted")
    check_file(state.chunks(), state.layout, inner, job)
    inner.close()
    finish(pipeline)


def check_close(make_pipeline: MakePipeline, make_medium: MakeMedium) -> None:
    """close() lets jobs end, may be called twice, and leaves no thread; dropped pipelines leave none either."""
    rng = random.Random(10)
    state = make_state(rng, [20 * CHUNK + 9], CHUNK)
    before = threading.active_count()
    pipeline = make_pipeline(4 * CHUNK, CHUNK)
    medium = make_medium(state.file_bytes)
    job = pipeline.submit(state.layout, state.addresses, state.arrays, medium)
    pipeline.close(LONG_S)
    pipeline.close(LONG_S)
    _written(job)
    check_file(state.chunks(), state.layout, medium, job)
    raises(PccheckError, lambda: pipeline.submit(state.layout, state.addresses, None, medium), "submit() after close()")
    dropped = make_pipeline(4 * CHUNK, CHUNK)
    job = dropped.submit(state.layout, state.addresses, state.arrays, medium)
    del dropped
    check(job.wait_captured(LONG_S), "a capture ends though its pipeline was dropped")
    try:
        check(job.wait_written(LONG_S), "a job ends though its pipeline was dropped")
    except MediumError as error:
        check(error.errno == errno.ECANCELED, "a pipeline that is dropped lets its jobs end or cancels them")
    deadline = time.monotonic() + LONG_S
    while threading.active_count() > before and time.monotonic() < deadline:
        time.sleep(0.01)
    check(threading.active_count() <= before, "no thread outlives its pipeline")
    medium.close()
