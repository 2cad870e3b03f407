"""The native pipeline: captures and writes in native threads (floor 2: imports the extension, floor 1 and below)."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import final

from pccheck import _native
from pccheck._native import Pipeline as NativeThreads  # also where `_native` is but a checkout's folder of C files
from pccheck.errors import DeadlineError, MediumError, OptionError, UsageError
from pccheck.format import PAGE, padded
from pccheck.pipeline.interface import Job, JobStats
from pccheck.state.plan import Layout
from pccheck.storage.medium import Medium

MAX_THREADS = 64
MAX_RETRIES = 100


@final
class NativeJob:
    """A job of the native pipeline; made by `NativePipeline.submit`. Thread-safe."""

    def __init__(self, job: _native.Job, path: str) -> None:
        self._job, self._path = job, path

    def __repr__(self) -> str:
        if self._job.wait_ended(0):
            failure = self._job.failure()
            return f"<NativeJob on {self._path}: {'ended' if failure is None else f'{failure[0]} failed'}>"
        state = "captured, waits for storage" if self._job.wait_captured(0) else "being captured"
        return f"<NativeJob on {self._path}: {state}>"

    def wait_captured(self, timeout_s: float | None = None) -> bool:
        """Wait until no byte of the caller's memory is needed any more (also after a failure); False = time is up."""
        return self._job.wait_captured(timeout_s)

    def wait_written(self, timeout_s: float | None = None) -> bool:
        """Wait until every chunk was written (not synced); False = time is up; raises the first MediumError."""
        if not self._job.wait_ended(timeout_s):
            return False
        failure = self._job.failure()
        if failure is not None:
            operation, code, offset = failure
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

    def submit(
        self, layout: Layout, addresses: Sequence[int], keep: object, medium: Medium, *, prologue: bytes | None = None
    ) -> Job:
        """Start one job and return at once; see the Pipeline protocol.

        `addresses` is quickest as an array of 64-bit numbers. The medium's descriptor is duplicated, or its mapping
        held, until the job has ended.

        Raises:
            UsageError: addresses do not fit the layout, or its chunks the buffers, or the prologue is no page, or the
                medium has neither a descriptor nor a mapping.
            ClosedError: the pipeline was closed.
            ForkedError: the pipeline belongs to the parent of this process.
        """
        if layout.chunk_bytes > self.chunk_bytes:
            raise UsageError(f"chunks of {layout.chunk_bytes} do not fit buffers of {self.chunk_bytes} bytes")
        if len(addresses) != len(layout.pieces):
            raise UsageError(f"{len(addresses)} addresses do not fit a layout of {len(layout.pieces)} pieces")
        if prologue is not None and len(prologue) != PAGE:
            raise UsageError(f"a prologue is one page of {PAGE} bytes, not {len(prologue)}")
        mapping, fileno = medium.mapping(), medium.fileno()
        if mapping is None and fileno is None:
            raise UsageError(f"{medium.path} has neither a descriptor nor a mapping: use the portable pipeline for it")
        if mapping is not None and layout.chunks:
            last = layout.chunks[-1]
            if last.file_offset + last.stored_bytes > mapping.nbytes:
                raise UsageError(f"{medium.path} is shorter than the checkpoint; allocate it first")
        pieces, chunks = layout.tables
        fd = -1 if fileno is None else fileno
        try:
            job = self._threads.submit(pieces, chunks, addresses, keep, fd, mapping, medium.alignment, prologue)
        except OSError as error:  # no descriptor is left for a duplicate
            raise MediumError("write", medium.path, error) from error
        return NativeJob(job, medium.path)

    def close(self, timeout_s: float = 60.0) -> None:
        """Let running jobs end, then stop the threads and free the pool.

        Raises DeadlineError after `timeout_s` seconds; new jobs are refused by then, and close may be called again.
        """
        if not self._threads.close(timeout_s):
            raise DeadlineError(f"{self!r} to write its running checkpoints", timeout_s)
