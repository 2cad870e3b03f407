"""Checks of pipelines that are filled from devices: what pipeline/interface.py promises of fillers (beside the floors).

Imports floors 0 to 2. The device is a real one of host memory whose copies come late; see late_device.
"""

from __future__ import annotations

import random
import threading

from pccheck.errors import MediumError
from pccheck.format import PAGE
from pccheck.testing.fill_failures import (
    check_cancelled_fills,
    check_failing_fills,
    check_failing_storage,
    check_refused_fills,
)
from pccheck.testing.late_device import (
    LateFiller,
    finish,
    late_device,
    spread_state,
    submit,
    wait_until,
    written,
)
from pccheck.testing.pipelines import CHUNK, MakeMedium, MakePipeline
from pccheck.testing.promises import check, raises, read
from pccheck.testing.states import LONG_S, make_state


def check_fillers(make_pipeline: MakePipeline, make_medium: MakeMedium) -> None:
    """Check that a pipeline keeps the promises about fillers on a kind of medium; arguments as for `check_pipeline`."""
    for part in (
        check_filled_layouts, check_jobs_of_both_kinds, check_first_chunks, check_looks_ahead, check_failing_fills,
        check_failing_storage, check_cancelled_fills, check_refused_fills, check_ends_of_filled,
    ):  # fmt: skip
        part(make_pipeline, make_medium)


def check_filled_layouts(make_pipeline: MakePipeline, make_medium: MakeMedium) -> None:
    """Random layouts of which none, some or all pieces lie on a device, in chunks with and without gaps."""
    rng = random.Random(21)
    with late_device() as device:
        for round_ in range(14):
            chunk_bytes = rng.choice((PAGE, 3 * PAGE, CHUNK, 1 << 20))
            count = rng.choice((0, 1, 3, 40, 300))
            largest = rng.choice((63, 5000, 200_000)) if count < 300 else 5000
            lengths = [rng.choice((0, 1, largest, rng.randrange(largest + 1))) for _ in range(count)]
            state = make_state(rng, lengths, chunk_bytes, gaps=round_ % 3 == 0)
            share = rng.choice((0.0, 0.1, 0.5, 1.0))
            pipeline, medium = (
                make_pipeline(rng.choice((2, 3, 9)) * chunk_bytes, chunk_bytes),
                make_medium(state.file_bytes),
            )
            memory = pipeline.memory
            filler = LateFiller(state, [i for i in range(count) if rng.random() < share], device, memory)
            prologue, want = rng.randbytes(PAGE) if round_ % 2 else None, state.chunks()
            job = submit(pipeline, state, filler, medium, prologue)
            check(job.wait_captured(LONG_S), "a capture ends")
            state.overwrite()
            written(job, state, want, medium)
            check(filler.filled == filler.chunks, "just the chunks that lie on the device are filled")
            check(prologue is None or read(medium, PAGE, 0) == prologue, "the prologue is the first page")
            check(pipeline.memory == memory and memory[0] % PAGE == 0, "the pool stays where it is")
            check(memory[1] == pipeline.buffers * chunk_bytes, "the pool is as large as its buffers")
            finish(pipeline, filler)
            medium.close()


def check_jobs_of_both_kinds(make_pipeline: MakePipeline, make_medium: MakeMedium) -> None:
    """Checkpoints with and without fillers in turn over few buffers: each holds its own moment, none starves."""
    rng = random.Random(22)
    for buffers in (2, 3):
        with late_device(0.001) as device:
            state, pipeline = spread_state(rng), make_pipeline(buffers * CHUNK, CHUNK)
            jobs, fillers = [], []
            for number in range(8):
                medium, want = make_medium(state.file_bytes), state.chunks()
                filler = LateFiller(state, rng.sample(range(6), number % 4), device, pipeline.memory)
                if number % 4:
                    job = submit(pipeline, state, filler, medium, bytes(PAGE))
                    fillers.append(filler)
                else:
                    job = pipeline.submit(state.layout, state.addresses, state.arrays, medium)
                jobs.append((job, medium, want))
                if number % 3:  # else the next one is submitted while this one is being captured
                    for one, _, _ in jobs:
                        check(one.wait_captured(LONG_S), "a capture ends though the pool is smaller than the state")
                    state.overwrite()
            for job, medium, want in jobs:
                written(job, state, want, medium)
                medium.close()
            finish(pipeline, *fillers)


def check_first_chunks(make_pipeline: MakePipeline, make_medium: MakeMedium) -> None:
    """wait_captured(chunks=n) waits for the first n chunks, and for no other."""
    rng = random.Random(23)
    state = make_state(rng, [CHUNK] * 6, CHUNK)
    pipeline, medium = make_pipeline(8 * CHUNK, CHUNK), make_medium(state.file_bytes)
    with late_device() as device:
        device.hold()
        filler = LateFiller(state, [2, 4], device, pipeline.memory)
        job = submit(pipeline, state, filler, medium)
        check(job.wait_captured(LONG_S, chunks=2), "chunks before the one that the device holds up are captured")
        check(job.wait_captured(0, chunks=0), "no chunk is captured at once")
        check(device.is_told(2), "chunks behind it are captured meanwhile")
        for chunks in (3, 4, 6, 7, None):
            check(not job.wait_captured(0.01, chunks=chunks), "a prefix with a chunk in it that is not captured waits")
        seen: list[int] = []
        waiter = threading.Thread(target=lambda: seen.append(job.wait_captured(LONG_S, chunks=4)))
        waiter.start()
        device.go_on()
        waiter.join(LONG_S)
        check(seen == [True], "whoever waits for a prefix is woken")
        for chunks in (6, 7, None):
            check(job.wait_captured(LONG_S, chunks=chunks), "more chunks than there are stand for all")
        written(job, state, state.chunks(), medium)
        raises(ValueError, lambda: job.wait_captured(0, chunks=-1), "a number of chunks below 0")
        device.hold()
        filler = LateFiller(state, [3], device, pipeline.memory)
        job = submit(pipeline, state, filler, medium)
        check(device.is_told(3), "a chunk on a device is queued")
        job.cancel()
        device.go_on()
        for chunks in (6, 4, None):
            check(
                job.wait_captured(LONG_S, chunks=chunks), "a job that was cancelled needs the caller's memory no more"
            )
        raises(MediumError, lambda: job.wait_written(LONG_S), "wait_written() of a job that was cancelled")
    medium.close()
    finish(pipeline, filler)


def check_looks_ahead(make_pipeline: MakePipeline, make_medium: MakeMedium) -> None:
    """Copies of the next chunk are queued before those of one chunk have ended, so that a device never waits."""
    state = make_state(random.Random(24), [CHUNK] * 5, CHUNK)
    pipeline, medium = make_pipeline(4 * CHUNK, CHUNK), make_medium(state.file_bytes)
    with late_device() as device:
        device.hold()
        filler = LateFiller(state, [0, 2, 3, 4], device, pipeline.memory)
        job = submit(pipeline, state, filler, medium, b"p" * PAGE)
        check(device.is_told(2) and device.made == 0, "the next chunk is queued before the device has made the first")
        device.go_on()
        written(job, state, state.chunks(), medium)
    medium.close()
    finish(pipeline, filler)


def check_ends_of_filled(make_pipeline: MakePipeline, make_medium: MakeMedium) -> None:
    """close() lets jobs be filled to their end; pipelines that are dropped end them, too, and leave no thread."""
    state, before = spread_state(random.Random(29), 20), threading.active_count()
    medium = make_medium(state.file_bytes)
    with late_device(0.001) as device:
        pipeline = make_pipeline(4 * CHUNK, CHUNK)
        filler = LateFiller(state, range(0, 20, 2), device, pipeline.memory)
        job = submit(pipeline, state, filler, medium)
        pipeline.close(LONG_S)
        check(filler.ends == 1, "close() ends a filler")
        written(job, state, state.chunks(), medium)
        dropped = make_pipeline(4 * CHUNK, CHUNK)
        filler = LateFiller(state, range(20), device, dropped.memory)
        job = submit(dropped, state, filler, medium)
        del dropped
        check(job.wait_captured(LONG_S), "a capture ends though its pipeline was dropped")
        wait_until(lambda: filler.ends > 0 and threading.active_count() <= before + 1)
        check(filler.ends == 1, "a filler is ended though its pipeline was dropped")
        check(threading.active_count() <= before + 1, "no thread outlives its pipeline")  # 1: the device's
    medium.close()
