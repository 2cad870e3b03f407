"""The native pipeline: captures and writes in native threads (floor 2: imports the extension, floor 1 and below)."""

from __future__ import annotations

import os
import time
import weakref
from collections.abc import Sequence
from typing import final

from pccheck import _native
from pccheck._native import Pipeline as NativeThreads  # also where `_native` is but a checkout's folder of C files
from pccheck.errors import DeadlineError, MediumError, OptionError, UsageError
from pccheck.format import PAGE, padded
from pccheck.pipeline.fills import FILL_TIMEOUT_S, NO_BUFFERS, FillThread, Order
from pccheck.pipeline.gather import check_job, check_mapping
from pccheck.pipeline.interface import Filler, Job, JobStats
from pccheck.state.plan import Layout
from pccheck.storage.medium import Medium

MAX_THREADS = 64
MAX_RETRIES = 100


@final
class NativeJob:
    """A job of the native pipeline; made by `NativePipeline.submit`. Thread-safe."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._error: BaseException | None = None  # of a filler
        self._job: _native.Job  # as soon as it runs

    def begin(self, job: _native.Job) -> NativeJob:
        """Take what the native code gave."""
        self._job = job
        return self

    def __repr__(self) -> str:
        if self._job.wait_ended(0):
            failure = self._job.failure()
            return f"<NativeJob on {self._path}: {'ended' if failure is None else f'{failure[0]} failed'}>"
        state = "captured, waits for storage" if self._job.wait_captured(0) else "being captured"
        return f"<NativeJob on {self._path}: {state}>"

    def wait_captured(self, timeout_s: float | None = None, *, chunks: int | None = None) -> bool:
        """Wait until no byte of the caller's memory is needed any more (also after a failure); False = time is up."""
        return self._job.wait_captured(timeout_s) if chunks is None else self._job.wait_captured(timeout_s, chunks)

    def wait_written(self, timeout_s: float | None = None) -> bool:
        """Wait until every chunk was written (not synced); False = time is up; raises the first error."""
        if not self._job.wait_ended(timeout_s):
            return False
        failure = self._job.failure()
        if failure is not None:
            operation, code, offset = failure
            if operation == "fill":
                raise self._error or DeadlineError(NO_BUFFERS, 0.0)
            raise MediumError(operation, self._path, OSError(code, os.strerror(code)), offset)
        return True

    def digests(self) -> bytes:
        """Give XXH3-128 of each chunk's stored bytes, 16 bytes each; raises UsageError before the job was written."""
        if not self._job.wait_ended(0) or self._job.failure() is not None:
            raise UsageError("digests() is legal once wait_written() has returned True")
        return self._job.digests()

    def cancel(self) -> None:
        """Stop as soon as the writes now running end; nothing happens to a job that has ended."""
        self._job.cancel()

    def stats(self) -> JobStats:
        """Give what the job did so far; times that are still running are up to now."""
        captured_s, written_s, pool_wait_s, retries = self._job.stats()
        return JobStats(captured_s=captured_s, written_s=written_s, pool_wait_s=pool_wait_s, retries=retries)

    # -- for the thread that fills it: see pipeline/fills.py -----------------------------------------------------------

    def fills_left(self) -> int:
        """Chunks to fill that have not been taken."""
        return self._job.fills_left()

    def failed(self) -> bool:
        """Tell whether the job has failed."""
        return self._job.failure() is not None

    def take_fill(self, timeout_s: float) -> tuple[int, int, int] | None:
        """Wait, without the interpreter's lock, for the next chunk to fill: index, address, bytes of its buffer."""
        return self._job.take_fill(timeout_s)

    def fill_done(self, chunk: int) -> None:
        """Hand a chunk to the copiers, which bring in what lies in host memory, and digest it."""
        if not self._job.fill_done(chunk):
            self.drop_fill(chunk, reusable=True)

    def drop_fill(self, chunk: int, *, reusable: bool) -> None:
        """Give a chunk up, and its buffer back if it is reusable."""
        self._job.drop_fill(chunk, reusable)

    def reclaim(self, chunk: int) -> None:
        """Give a buffer back that was not reusable."""
        self._job.reclaim(chunk)

    def fail_fill(self, error: BaseException) -> None:
        """Fail the job with an error of its filler."""
        if self._error is None:
            self._error = error  # first: whoever sees the failure finds it
        self._job.fail_fill()


@final
class NativePipeline:
    """A pool of buffers, copiers that capture in order, and writers that serve the oldest job first. Thread-safe.

    Serves media with a descriptor, and mapped ones, which are captured to in place without a buffer. The interpreter's
    lock is not needed while a job runs. Dropped without `close` it cancels its jobs.

    Args:
        buffer_bytes: size of the pool; at least two chunks are taken.
        chunk_bytes: largest `chunk_bytes` of a layout, and the size of each buffer; a multiple of 4096.
        writers: threads that write, 1..64.
        writers_per_job: of these, how many may be at one job at once; None = all of them.
        copiers: threads that capture, 1..64; one copies and digests at the speed of memory.
        retries: how often in a row a write that fails with EINTR, EIO, ESTALE or EAGAIN is tried again, 0..100.
        fill_timeout_s: longest that a device may take to copy one chunk.

    Raises:
        OptionError: an argument is out of its range.
        MemoryError: there is no memory for the pool.
    """

    name = "native"

    def __init__(
        self,
        buffer_bytes: int,
        chunk_bytes: int,
        *,
        writers: int = 2,
        writers_per_job: int | None = None,
        copiers: int = 1,
        retries: int = 5,
        fill_timeout_s: float = FILL_TIMEOUT_S,
    ) -> None:
        if chunk_bytes < PAGE or chunk_bytes % PAGE:
            raise OptionError("chunk_bytes", chunk_bytes, "a multiple of 4096, at least 4096")
        per_job = writers if writers_per_job is None else writers_per_job
        for field, value, low, high in (
            ("writers", writers, 1, MAX_THREADS),
            ("writers_per_job", per_job, 1, MAX_THREADS),
            ("copiers", copiers, 1, MAX_THREADS),
            ("retries", retries, 0, MAX_RETRIES),
        ):
            if not low <= value <= high:
                raise OptionError(field, value, f"a whole number from {low} to {high}")
        self.chunk_bytes = chunk_bytes
        buffers = max(2, buffer_bytes // padded(chunk_bytes))
        try:
            self._threads = NativeThreads(buffers, chunk_bytes, copiers, writers, per_job, retries)
        except (MemoryError, OverflowError):
            raise MemoryError(
                f"no memory for a pool of {buffers} buffers of {chunk_bytes:,} bytes; lower buffer_bytes"
            ) from None
        self._memory = self._threads.memory
        self._last: tuple[Layout | None, _native.Layout | None] = (None, None)  # saves of one structure share it
        self._fills = FillThread(fill_timeout_s)
        self._dropped = weakref.finalize(self, _stop, self._fills, os.getpid())
        self._dropped.atexit = False

    def __repr__(self) -> str:
        return f"<NativePipeline ({_native.isa()}) {self.free_buffers} of {self.buffers} buffers free>"

    @property
    def free_buffers(self) -> int:
        """Buffers of the pool that no job holds."""
        return self._threads.free_buffers

    @property
    def buffers(self) -> int:
        """Buffers of the pool in all."""
        return self._threads.buffers

    @property
    def memory(self) -> tuple[int, int]:
        """Address and bytes of the buffer pool: what devices copy to."""
        return self._memory

    def submit(
        self,
        layout: Layout,
        addresses: Sequence[int],
        keep: object,
        medium: Medium,
        *,
        prologue: bytes | None = None,
        filler: Filler | None = None,
    ) -> Job:
        """Start one job and return at once; see the Pipeline protocol.

        `addresses` is quickest as an array of 64-bit numbers. The medium's descriptor is duplicated, or its mapping
        held, until the job has ended.

        Raises:
            UsageError: addresses do not fit the layout, or its chunks the buffers, or the prologue is no page, or the
                medium has neither a descriptor nor a mapping, or a piece with bytes has the address 0, and there is no
                filler.
            ClosedError: the pipeline was closed.
            ForkedError: the pipeline belongs to the parent of this process.
        """
        return self._fills.submit(filler, lambda order: self._submit(layout, addresses, keep, medium, prologue, order))

    def _submit(
        self,
        layout: Layout,
        addresses: Sequence[int],
        keep: object,
        medium: Medium,
        prologue: bytes | None,
        order: Order | None,
    ) -> NativeJob:
        check_job(layout, addresses, prologue, self.chunk_bytes)
        mapping, fileno = medium.mapping(), medium.fileno()
        if mapping is None and fileno is None:
            raise UsageError(f"{medium.path} has neither a descriptor nor a mapping: use the portable pipeline for it")
        if mapping is not None:
            check_mapping(layout, medium, mapping)
        known, tables = self._last
        if known is not layout or tables is None:
            tables = _native.Layout(*layout.tables)
            self._last = layout, tables
        job, fd = NativeJob(medium.path), -1 if fileno is None else fileno
        started = None if order is None else lambda native: self._fills.put(order, job.begin(native))
        try:
            native = self._threads.submit(tables, addresses, keep, fd, mapping, medium.alignment, prologue, started)
        except OSError as error:  # no descriptor is left for a duplicate
            raise MediumError("write", medium.path, error) from error
        except UsageError:  # closed, or forked
            raise
        except ValueError as error:
            raise UsageError(f"{error}: a piece with bytes has the address 0, and there is no filler") from error
        return job.begin(native)

    def close(self, timeout_s: float = 60.0) -> None:
        """Let running jobs end, then stop the threads and free the pool.

        Raises DeadlineError after `timeout_s` seconds; new jobs are refused by then, and close may be called again.
        """
        start = time.monotonic()
        if not self._threads.drain(timeout_s):
            raise DeadlineError(f"{self!r} to write its running checkpoints", timeout_s)
        self._fills.close(start, timeout_s)  # before the pool is unmapped that it gives to devices
        if not self._threads.close(max(0.0, start + timeout_s - time.monotonic())):
            raise DeadlineError(f"{self!r} to stop", timeout_s)
        self._dropped.detach()


def _stop(fills: FillThread, pid: int) -> None:
    if os.getpid() == pid:  # a forked child has not got the thread
        fills.stop()
