"""One checkpoint on its way through the portable pipeline (floor 2: imports floor 1 and below, and the interface)."""

from __future__ import annotations

import errno
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import final

from pccheck.errors import MediumError, UsageError
from pccheck.pipeline.interface import JobStats
from pccheck.state.plan import Layout
from pccheck.storage import forks
from pccheck.storage.buffers import Buffer
from pccheck.storage.digest import DIGEST_BYTES
from pccheck.storage.medium import Medium

PROLOGUE = -1  # stands for the prologue where a chunk's index is meant


@final
class PortableJob:
    """A job of the portable pipeline; made by `PortablePipeline.submit`.

    Everything that changes is changed under `changed`, the pipeline's one condition.
    """

    def __init__(
        self,
        layout: Layout,
        addresses: Sequence[int],
        keep: object,
        medium: Medium,
        prologue: bytes | None,
        changed: threading.Condition,
        fail: Callable[[PortableJob, BaseException], None],
    ) -> None:
        self.layout, self.medium, self.prologue = layout, medium, prologue
        self.addresses = addresses
        self.keep = keep
        self.submitted = time.monotonic()
        self.captured_at: float | None = None
        self.ended_at: float | None = None
        self.pool_wait_s = 0.0
        self.retries = 0
        self.error: BaseException | None = None
        self.filled: deque[tuple[int, Buffer | None]] = deque()  # chunks that wait for a writer; no buffer = mapped
        self.prologue_taken = prologue is None  # by a writer
        self.prologue_written = prologue is None
        self.left = len(layout.chunks) + (prologue is not None)  # writes not yet acknowledged
        self.busy = 0  # writes that run now
        self.captured_first = 0  # so many chunks from the first on need the caller's memory no more
        self.take_turn: Callable[[], None] | None = None  # captures it, where devices bring some of its bytes
        self.out_of_order: set[int] = set()  # captured behind those
        self.digest_bytes = bytearray(DIGEST_BYTES * len(layout.chunks))
        self._pid = os.getpid()
        self._changed = changed
        self._fail = fail

    def __repr__(self) -> str:
        state = (
            "ended" if self.ended_at is not None
            else "failed, ends with its last write" if self.error is not None
            else "captured, waits for storage" if self.captured_at is not None
            else "waits for its prologue" if not self.prologue_written
            else "being captured"
        )  # fmt: skip
        return f"<PortableJob on {self.medium.path}: {state}, {self.left} writes left, {self.busy} running>"

    def wait_captured(self, timeout_s: float | None = None, *, chunks: int | None = None) -> bool:
        """Wait until no byte of the caller's memory is needed any more (of the first chunks); False = time is up."""
        self._check_owner()
        wanted = len(self.layout.chunks) + 1 if chunks is None else min(chunks, len(self.layout.chunks))
        if wanted < 0:
            raise ValueError(f"chunks must be 0 or more, not {chunks}")
        with self._changed:
            return self._changed.wait_for(
                lambda: self.captured_at is not None or self.captured_first >= wanted, timeout_s
            )

    def wait_written(self, timeout_s: float | None = None) -> bool:
        """Wait until the job has ended; False = time is up; raises its first error."""
        self._check_owner()
        with self._changed:
            if not self._changed.wait_for(lambda: self.ended_at is not None, timeout_s):
                return False
            error = self.error
        if error is not None:
            raise error
        return True

    def digests(self) -> bytes:
        """Give XXH3-128 of each chunk's stored bytes, 16 bytes each; raises UsageError before the job was written."""
        self._check_owner()
        with self._changed:
            if self.ended_at is None or self.error is not None:
                raise UsageError("digests() is legal once wait_written() has returned True")
            return bytes(self.digest_bytes)

    def cancel(self) -> None:
        """Stop as soon as the writes now running end; nothing happens to a job that has ended."""
        self._check_owner()
        cause = OSError(errno.ECANCELED, os.strerror(errno.ECANCELED))
        self._fail(self, MediumError("write", self.medium.path, cause))

    def stats(self) -> JobStats:
        """Give what the job did so far; times that are still running are up to now."""
        self._check_owner()
        now = time.monotonic()
        with self._changed:
            return JobStats(
                captured_s=(now if self.captured_at is None else self.captured_at) - self.submitted,
                written_s=(now if self.ended_at is None else self.ended_at) - self.submitted,
                pool_wait_s=self.pool_wait_s,
                retries=self.retries,
            )

    def _check_owner(self) -> None:
        forks.check_owner(self._pid, "a checkpoint under way")
