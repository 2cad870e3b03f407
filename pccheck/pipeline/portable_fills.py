"""A job of the portable pipeline as the thread sees it that has it filled (floor 2: imports floor 1 and below)."""

from __future__ import annotations

import ctypes
import time
from typing import final

from pccheck.pipeline.gather import check_mapping, gather, has_gaps
from pccheck.pipeline.job import PortableJob
from pccheck.pipeline.schedule import IDLE_S, Schedule
from pccheck.storage.buffers import Buffer
from pccheck.storage.media import address_of


@final
class PortableFilling:
    """Takes a job's chunks one after the other: those of host memory are captured on the way. See `fills.Fillable`.

    Args:
        core: of the pipeline.
        job: which one.
    """

    def __init__(self, core: Schedule, job: PortableJob) -> None:
        self._core, self._job, self._addresses = core, job, job.addresses
        self._turn = False
        self._next = 0  # chunk that was not taken
        self._out: dict[int, Buffer | None] = {}  # taken and not handed on; no buffer = captured to the mapping
        self._lost: dict[int, Buffer] = {}

    def take_turn(self) -> None:
        """Let the job be filled, the ones before it having been captured, and wait until it is: all, or it has failed.

        Called by the thread that captures jobs in order.
        """
        with self._core.changed:
            self._turn = True
            self._core.changed.notify_all()
            while self.fills_left() or self._out:
                self._core.changed.wait(IDLE_S)

    def cancel(self) -> None:
        """Cancel the job."""
        self._job.cancel()

    def fills_left(self) -> int:
        """Chunks that have not been taken; 0 as soon as the job has failed."""
        with self._core.changed:
            return 0 if self._job.error is not None else len(self._job.layout.chunks) - self._next

    def failed(self) -> bool:
        """Tell whether the job has failed."""
        return self._job.error is not None

    def take_fill(self, timeout_s: float) -> tuple[int, int, int] | None:
        """Capture chunks of host memory until one is to be filled: index, address and bytes of its buffer."""
        deadline = time.monotonic() + timeout_s
        while self._may_take(deadline):
            index, chunk = self._next, self._job.layout.chunks[self._next]
            external = has_gaps(self._job.layout, self._addresses, chunk)
            buffer = None
            if external or self._job.medium.mapping() is None:
                buffer = self._core.take_buffer(self._job, max(0.0, deadline - time.monotonic()))
                if buffer is None:
                    return None
            if not self._take(index, buffer):
                return None
            if external and buffer is not None:
                return index, buffer.address, chunk.stored_bytes
            self.fill_done(index)
        return None

    def fill_done(self, chunk: int) -> None:
        """Bring in what lies in host memory, and hand the chunk to the writers."""
        try:
            self._complete(chunk)
        except BaseException as error:
            self._core.fail(self._job, error)
            self.drop_fill(chunk, reusable=True)

    def drop_fill(self, chunk: int, *, reusable: bool) -> None:
        """Give a chunk up, and its buffer back if it is reusable."""
        with self._core.changed:
            buffer = self._out.pop(chunk, None)
            if buffer is not None and not reusable:
                self._lost[chunk] = buffer
                self._core.lost += 1
                self._core.pool.wake()  # if it was the last one, whoever waits for another waits in vain
            elif buffer is not None:
                self._core.pool.give_back(buffer)
            self._core.changed.notify_all()

    def reclaim(self, chunk: int) -> None:
        """Give a buffer back that was not reusable."""
        with self._core.changed:
            self._core.lost -= 1
            self._core.pool.give_back(self._lost.pop(chunk))

    def fail_fill(self, error: BaseException) -> None:
        """Fail the job with an error of its filler."""
        self._core.fail(self._job, error)

    def _may_take(self, deadline: float) -> bool:
        """Wait until it is this job's turn, and payload may be written to where it is stored directly."""
        core, job = self._core, self._job
        mapped = job.medium.mapping() is not None
        with core.changed:
            core.changed.wait_for(
                lambda: job.error is not None or (self._turn and (job.prologue_written or not mapped)),
                max(0.0, deadline - time.monotonic()),
            )
            return self._turn and (job.prologue_written or not mapped) and self.fills_left() > 0

    def _take(self, index: int, buffer: Buffer | None) -> bool:
        """Note that a chunk is out, unless the job has failed: then its memory may be somebody else's by now."""
        with self._core.changed:
            if self._job.error is None:
                self._out[index] = buffer
                self._next += 1
                return True
        if buffer is not None:
            self._core.pool.give_back(buffer)
        return False

    def _complete(self, index: int) -> None:
        """Gather a taken chunk, in its buffer or the mapping, and hand it on."""
        job, core, chunk = self._job, self._core, self._job.layout.chunks[index]
        mapping, buffer = job.medium.mapping(), self._out[index]
        if buffer is not None:
            gather(job.layout, self._addresses, chunk, buffer.view, buffer.address)
        if mapping is not None and job.error is None:
            check_mapping(job.layout, job.medium, mapping)
            target = address_of(mapping) + chunk.file_offset
            if buffer is None:
                place = mapping[chunk.file_offset : chunk.file_offset + chunk.stored_bytes]
                gather(job.layout, self._addresses, chunk, place, target)
            else:
                ctypes.memmove(target, buffer.address, chunk.stored_bytes)
        with core.changed:  # in one step: whoever sees it handed on sees that it is not out
            self._out.pop(index, None)
            if mapping is not None and buffer is not None:
                core.pool.give_back(buffer)
            core.filled(job, index, None if mapping is not None else buffer)
            core.changed.notify_all()  # also where the job has failed: nothing is out now
