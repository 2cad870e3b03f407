"""What a Checkpointer did so far, in numbers (floor 2: imports below)."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, replace
from typing import Any, final

from pccheck.events import Returned
from pccheck.pipeline.interface import JobStats
from pccheck.saving.save import Outcome, Save


@dataclass(frozen=True, kw_only=True)
class Stats:
    """What a Checkpointer did so far.

    Args:
        saves: calls of `save()` that were not refused.
        committed, superseded, skipped, failed: how the ended ones ended.
        save_s: time that callers spent in `save()`, all in all.
        slot_wait_s: of that, waited because in_flight checkpoints were under way.
        copy_wait_s: of that, waited for copies of the state.
        fence_wait_s: time that fences, gates before optimizer steps, and `save()` itself, waited for captures.
        pool_wait_s: time that captures waited for a free buffer (back-pressure of the storage).
        retries: writes that were tried again.
        pipeline: "native", "portable", or "" before the first save.
    """

    saves: int = 0
    committed: int = 0
    superseded: int = 0
    skipped: int = 0
    failed: int = 0
    save_s: float = 0.0
    slot_wait_s: float = 0.0
    copy_wait_s: float = 0.0
    fence_wait_s: float = 0.0
    pool_wait_s: float = 0.0
    retries: int = 0
    pipeline: str = ""

    @property
    def in_flight(self) -> int:
        """How many saves have begun and not ended."""
        return self.saves - self.committed - self.superseded - self.skipped - self.failed

    @property
    def gate_wait_s(self) -> float:
        """What fences and gates waited outside of `save()`: what it waited for copies is in `fence_wait_s`, too."""
        return max(0.0, self.fence_wait_s - self.copy_wait_s)


@final
class Tally:
    """Counts what a Checkpointer does. Thread-safe, and entered in one step: a Ctrl-C leaves it as it was."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._stats = Stats()

    @property
    def stats(self) -> Stats:
        """What was counted so far."""
        return self._stats

    def begun(self, save: Save, waited_s: float, *, skipped: int = 0) -> None:
        """Count a save that was admitted, or skipped, after it had waited for a place."""
        save.slot_wait_s = waited_s
        with self._lock:
            had = self._stats
            slot_wait_s = had.slot_wait_s + waited_s
            self._stats = replace(had, saves=had.saves + 1, slot_wait_s=slot_wait_s, skipped=had.skipped + skipped)

    def returned(self, save: Save) -> Returned:
        """Count the time that a caller spent in `save()`, and give the event that tells of it."""
        seconds = time.monotonic() - save.began_s
        with self._lock:
            had = self._stats
            copy_wait_s = had.copy_wait_s + save.copy_wait_s
            self._stats = replace(had, save_s=had.save_s + seconds, copy_wait_s=copy_wait_s)
        return Returned(
            step=save.step, counter=save.counter, seconds=seconds, slot_wait_s=save.slot_wait_s,
            copy_wait_s=save.copy_wait_s,
        )  # fmt: skip

    def ended(self, outcome: Outcome, job: JobStats | None) -> None:
        """Count the end of an admitted save, and what its job did, where it had one."""
        pool_wait_s, retries = (0.0, 0) if job is None else (job.pool_wait_s, job.retries)
        with self._lock:
            had = self._stats
            more: dict[str, Any] = {outcome: getattr(had, outcome) + 1}
            pool_wait_s, retries = had.pool_wait_s + pool_wait_s, had.retries + retries
            self._stats = replace(had, pool_wait_s=pool_wait_s, retries=retries, **more)
