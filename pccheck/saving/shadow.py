"""Private host memory that a state is copied to within `save()`, kept and reused (floor 2: imports below)."""

from __future__ import annotations

from typing import final

from pccheck import format
from pccheck.errors import DeadlineError
from pccheck.pipeline.interface import Job
from pccheck.saving import sizing
from pccheck.storage.buffers import Buffer, BufferPool


@final
class HostShadow:
    """One buffer, used by one checkpoint at a time. Called by one thread at a time.

    Its pages are touched once and stay: fresh memory for each checkpoint costs as much again as the copy. It is not
    copied by fork.
    """

    def __init__(self) -> None:
        self._pool: BufferPool | None = None
        self._buffer: Buffer | None = None
        self._job: Job | None = None  # captures from it

    def ready(self, timeout_s: float) -> None:
        """Wait until nothing is captured from it any more; DeadlineError after `timeout_s` seconds."""
        if self._job is not None and not self._job.wait_captured(timeout_s):
            raise DeadlineError(f"the copy that the checkpoint before is captured from; {self._job!r}", timeout_s)
        self._job = None

    def room(self, nbytes: int) -> int | None:
        """Give the address of `nbytes` bytes, after `ready`; None where there is no memory for them.

        A new buffer may take a quarter of what the host and the control group leave.
        """
        if self._buffer is not None and self._buffer.view.nbytes >= nbytes:
            return self._buffer.address
        self.close()
        if nbytes > sizing.available_bytes() // 4:
            return None
        try:
            self._pool = BufferPool(1, format.padded(max(nbytes, 1)))
        except (OSError, MemoryError, ValueError):
            return None
        self._buffer = self._pool.take(0)
        return None if self._buffer is None else self._buffer.address

    def used_by(self, job: Job) -> None:
        """Take note of the job that captures from it."""
        self._job = job

    def close(self) -> None:
        """Free the memory, after `ready`."""
        pool, buffer, self._pool, self._buffer = self._pool, self._buffer, None, None
        if pool is not None:
            pool.close()
            if buffer is not None:
                pool.give_back(buffer)
