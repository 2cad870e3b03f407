"""What both pipelines promise: chunks flow from host memory through a bounded pool to a medium (floor 2).

Imports floor 1 and below.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from pccheck.devices import Ticket
from pccheck.state.plan import Layout
from pccheck.storage.medium import Medium


@dataclass(frozen=True, kw_only=True)
class JobStats:
    """What one job did: seconds since submit, waits, and counts."""

    captured_s: float
    written_s: float
    pool_wait_s: float  # time that captures waited for a free buffer: back-pressure of the storage
    retries: int


class Job(Protocol):
    """One checkpoint on its way to a medium. Thread-safe."""

    def wait_captured(self, timeout_s: float | None = None, *, chunks: int | None = None) -> bool:
        """Wait until no byte of the caller's memory is needed any more (also after a failure); False = time is up.

        With `chunks`, only until that holds for the first so many chunks; 0 = none, more than there are = all.
        """

    def wait_written(self, timeout_s: float | None = None) -> bool:
        """Wait until every chunk was written (not synced); False = time is up; raises the first error.

        That is a MediumError, or what a filler, or one of its tickets, raised.
        """

    def digests(self) -> bytes:
        """Give XXH3-128 of each chunk's stored bytes in order, 16 bytes each, canonical (big-endian) form.

        Legal once `wait_written` has returned True.
        """

    def cancel(self) -> None:
        """Stop as soon as the writes now running end; `wait_written` then raises MediumError(ECANCELED)."""

    def stats(self) -> JobStats:
        """Give what the job did so far."""


class Filler(Protocol):
    """Fills what of a checkpoint lies on devices. Called by one thread at a time, chunk after chunk in order.

    A pipeline queues the copies of several chunks before it waits for the tickets, in the same order.
    """

    def has(self, chunk: int) -> bool:
        """Tell whether anything of this chunk lies on a device."""

    def fill(self, chunk: int, address: int, nbytes: int) -> Ticket:
        """Queue copies of what lies on devices of a chunk into its buffer; the rest of it is not touched.

        Where it raises, no copy into the buffer is under way any more: it is used for something else at once.
        """

    def end(self) -> None:
        """Nothing will be filled any more, be it that all was or that the job failed; called exactly once.

        Also where `submit` raises: whoever calls that has handed the filler over.
        """


class Pipeline(Protocol):
    """Threads and a buffer pool shared by all jobs; jobs are captured in order and the oldest is written first.

    A device that does not end its copies in time fails the job; their buffers stay out of the pool until it has ended
    them, since it may write to them, and the pool stays mapped.
    """

    name: str  # "native" or "portable"

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
        """Start one job and return at once.

        Args:
            layout: the byte space; gaps and padding are stored as zeros.
            addresses: where in host memory each piece of the layout begins; 0 = on a device, the filler's to copy.
            keep: kept referenced until everything is captured.
            medium: written to; stays open until the job has ended.
            prologue: one page, written at offset 0 and synced before the first payload byte.
            filler: copies what lies on devices; needed where an address of a piece with bytes is 0.
        """

    def close(self, timeout_s: float = 60.0) -> None:
        """Let running jobs end, then stop the threads and free the pool.

        Raises DeadlineError after `timeout_s`, also where a device has not ended its copies to the pool.
        """

    @property
    def memory(self) -> tuple[int, int]:
        """Address and bytes of the buffer pool, what devices copy to; the same from the first to `close`."""

    @property
    def free_buffers(self) -> int:
        """Buffers of the pool that no job holds."""

    @property
    def buffers(self) -> int:
        """Buffers of the pool in all."""
