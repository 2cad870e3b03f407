"""Checks of pipelines whose fillers, devices or storage fail, or that are cancelled meanwhile (beside the floors).

Imports floors 0 to 2.
"""

from __future__ import annotations

import errno
import os
import random
from collections.abc import Sequence

from pccheck.errors import DeadlineError, MediumError, PccheckError
from pccheck.format import PAGE
from pccheck.pipeline.interface import Job
from pccheck.state.plan import lay_out
from pccheck.storage.media import FileMedium
from pccheck.storage.medium import Medium
from pccheck.testing.late_device import (
    LateFiller,
    finish,
    late_device,
    spread_state,
    submit,
    wait_until,
    written,
)
from pccheck.testing.pipelines import CHUNK, MakeMedium, MakePipeline, fails_with
from pccheck.testing.promises import check, raises, read
from pccheck.testing.states import LONG_S


def check_failing_fills(make_pipeline: MakePipeline, make_medium: MakeMedium) -> None:
    """What a filler, or a ticket, raises is what wait_written raises; captures end, buffers are back, others go on."""
    rng, state = random.Random(25), spread_state(random.Random(25))
    pipeline = make_pipeline(3 * CHUNK, CHUNK)
    fillers = []
    with late_device(0.001) as device:
        for how in ("fill", "ticket", "has", "end"):
            for at in (0, 1, 4):
                bad, good = make_medium(state.file_bytes), make_medium(state.file_bytes)
                error = ZeroDivisionError(f"{how} {at}")
                filler = LateFiller(state, range(6), device, pipeline.memory)
                behind = LateFiller(state, rng.sample(range(6), 3), device, pipeline.memory)
                fillers += [filler, behind]
                if how == "fill":
                    filler.raises[at] = error
                elif how == "ticket":
                    device.fail(at + 1, error)
                elif how == "has":
                    filler.denied.add(at)
                else:
                    filler.end_raises = error
                job = submit(pipeline, state, filler, bad, bytes(PAGE))
                check(how != "ticket" or job.wait_captured(LONG_S), "a capture ends though its filler has failed")
                other = submit(pipeline, state, behind, good)
                check(job.wait_captured(LONG_S), "a capture ends though its filler has failed")
                _filler_fails(job, PccheckError if how == "has" else error)
                written(other, state, state.chunks(), good)
                bad.close()
                good.close()
    finish(pipeline, *fillers)


def _filler_fails(job: Job, wanted: BaseException | type[BaseException]) -> None:
    for _ in range(2):  # each time it is asked
        try:
            done = job.wait_written(LONG_S)
        except BaseException as error:
            same = isinstance(error, wanted) if isinstance(wanted, type) else error is wanted
            check(same and not isinstance(error, MediumError), f"the error is that of the filler ({error!r})")
        else:
            raise AssertionError(f"broken promise: a job whose filler fails fails (wait_written gave {done})")
    raises(PccheckError, job.digests, "digests() of a job that failed")


def check_failing_storage(make_pipeline: MakePipeline, make_medium: MakeMedium) -> None:
    """Storage that is full while a device copies: the medium's error is told, and the filler is ended."""
    if not os.path.exists("/dev/full"):
        return
    state, pipeline = spread_state(random.Random(26), 9), make_pipeline(2 * CHUNK, CHUNK)
    fillers = []
    with late_device(0.001) as device:
        for _ in range(3):
            full = FileMedium(os.open("/dev/full", os.O_RDWR), "/dev/full", storage="buffered", write=True)
            filler, behind = (LateFiller(state, range(0, 9, 2), device, pipeline.memory) for _ in range(2))
            medium = make_medium(state.file_bytes)
            fillers += [filler, behind]
            job, other = submit(pipeline, state, filler, full), submit(pipeline, state, behind, medium)
            check(job.wait_captured(LONG_S), "a capture ends though its storage has failed")
            fails_with(job, errno.ENOSPC)
            written(other, state, state.chunks(), medium)
            full.close()
            medium.close()
    finish(pipeline, *fillers)


def check_cancelled_fills(make_pipeline: MakePipeline, make_medium: MakeMedium) -> None:
    """A cancelled job needs the caller's memory until the device has ended what it was told, and no longer."""
    state, pipeline = spread_state(random.Random(27)), make_pipeline(3 * CHUNK, CHUNK)
    media = [make_medium(state.file_bytes) for _ in range(3)]
    with late_device() as device:
        device.hold()
        fillers = [LateFiller(state, range(6), device, pipeline.memory) for _ in range(3)]
        jobs = [submit(pipeline, state, f, m, bytes(PAGE)) for f, m in zip(fillers, media, strict=True)]
        check(device.is_told(2), "a device is told what to copy")
        jobs[1].cancel()  # it waits for its turn
        check(jobs[1].wait_captured(LONG_S), "a job that was cancelled before its turn needs nothing")
        jobs[0].cancel()
        check(not jobs[0].wait_captured(0.05), "what a device may still read must not be changed")
        device.go_on()
        for job in jobs[:2]:
            check(job.wait_captured(LONG_S), "a cancelled job is captured as soon as the device has ended")
            fails_with(job, errno.ECANCELED)
        written(jobs[2], state, state.chunks(), media[2])
    for medium in media:
        medium.close()
    finish(pipeline, *fillers)


def check_refused_fills(make_pipeline: MakePipeline, make_medium: MakeMedium) -> None:
    """Jobs that are not begun: nothing is filled, and the filler is ended all the same."""
    state, pipeline = spread_state(random.Random(28)), make_pipeline(3 * CHUNK, CHUNK)
    medium = make_medium(state.file_bytes)
    refused = (PccheckError, ValueError)
    with late_device() as device:
        fillers = [LateFiller(state, [0], device, pipeline.memory) for _ in range(2)]
        raises(
            refused,
            lambda: pipeline.submit(state.layout, fillers[0].addresses, None, medium),
            "a piece on a device and no filler",
        )
        fillers[0].end()
        raises(
            refused,
            lambda: pipeline.submit(lay_out([8], CHUNK), [], None, medium, filler=fillers[1]),
            "an address too few",
        )
        filler = LateFiller(state, [], device, pipeline.memory)
        written(submit(pipeline, state, filler, medium), state, state.chunks(), medium)
        finish(pipeline, *fillers, filler)
        late = LateFiller(state, [0], device, pipeline.memory)
        raises(PccheckError, lambda: submit(pipeline, state, late, medium), "submit() after close()")
        check(late.ends == 1 and not late.filled, "a filler that is refused is ended")
    medium.close()


def check_no_buffer_is_left(make_pipeline: MakePipeline, make_medium: MakeMedium) -> None:
    """Devices that keep every buffer fail all who need one, until they end their copies; arguments as below."""
    state, pipeline = spread_state(random.Random(31)), make_pipeline(2 * CHUNK, CHUNK)
    media = [make_medium(state.file_bytes) for _ in range(3)]
    with late_device() as stuck:
        stuck.hold()
        fillers = [LateFiller(state, range(6), stuck, pipeline.memory) for _ in range(3)]
        jobs = [submit(pipeline, state, f, m) for f, m in zip(fillers, media, strict=True)]
        for job in jobs:
            check(job.wait_captured(LONG_S), "a fence does not hang though no buffer is left")
            _filler_fails(job, DeadlineError)
        check(pipeline.free_buffers == 0, "buffers that a device may still write to are nobody else's")
        stuck.go_on()
        wait_until(lambda: pipeline.free_buffers == pipeline.buffers)
        fillers.append(LateFiller(state, range(6), stuck, pipeline.memory))
        written(submit(pipeline, state, fillers[-1], media[0]), state, state.chunks(), media[0])
        finish(pipeline, *fillers)
    for medium in media:
        medium.close()


def check_stuck_device(make_pipeline: MakePipeline, make_medium: MakeMedium) -> None:
    """A device that ends no copy fails the job in time and gets no buffer taken away; others go on without those.

    Args:
        make_pipeline: gives a pipeline that allows a device no more than about a second for one chunk.
        make_medium: as for `check_pipeline`.
    """
    state, pipeline = spread_state(random.Random(30)), make_pipeline(12 * CHUNK, CHUNK)
    media: Sequence[Medium] = [make_medium(state.file_bytes) for _ in range(4)]
    with late_device() as stuck, late_device() as device:
        stuck.hold()
        bad = LateFiller(state, [0, 1, 2], stuck, pipeline.memory)
        job = submit(pipeline, state, bad, media[0], bytes(PAGE))
        check(job.wait_captured(LONG_S), "a fence does not hang for a device that does")
        _filler_fails(job, DeadlineError)
        lost = pipeline.buffers - pipeline.free_buffers
        check(lost == len(bad.filled) > 0, "buffers that a device may still write to are nobody else's")
        fillers = [bad]
        for medium in media[1:]:
            fillers.append(LateFiller(state, [1, 3], device, pipeline.memory))
            written(submit(pipeline, state, fillers[-1], medium), state, state.chunks(), medium)
        raises(DeadlineError, lambda: pipeline.close(0.05), "close() while a device may write to the pool")
        state.overwrite()
        stuck.go_on()  # it writes now: to memory that is still there
        wait_until(lambda: pipeline.free_buffers == pipeline.buffers)
        finish(pipeline, *fillers)
    state.overwrite()
    for medium in media[1:]:
        for chunk, want in zip(state.layout.chunks, state.chunks(), strict=True):
            check(read(medium, chunk.stored_bytes, chunk.file_offset) == want, "what was stored stays as it was")
    for medium in media:
        medium.close()
