"""What a Checkpointer did so far, in numbers (floor 2: imports below)."""

from __future__ import annotations

from dataclasses import dataclass, replace

from pccheck.pipeline.interface import JobStats
from pccheck.saving.save import Outcome


@dataclass(frozen=True, kw_only=True)
class Stats:
    """What a Checkpointer did so far.

    Args:
        saves: calls of `save()` that were not refused.
        committed, superseded, skipped, failed: how the ended ones ended.
        slot_wait_s: time that `save()` waited because in_flight checkpoints were under way.
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
    slot_wait_s: float = 0.0
    fence_wait_s: float = 0.0
    pool_wait_s: float = 0.0
    retries: int = 0
    pipeline: str = ""


def begun(had: Stats, waited_s: float, *, skipped: int = 0) -> Stats:
    """Count a save that was admitted, or skipped, after it had waited for a place."""
    slot_wait_s = had.slot_wait_s + waited_s
    return replace(had, saves=had.saves + 1, slot_wait_s=slot_wait_s, skipped=had.skipped + skipped)


def ended(had: Stats, outcome: Outcome, job: JobStats | None) -> Stats:
    """Count the end of an admitted save, and what its job did, where it had one."""
    pool_wait_s, retries = (0.0, 0) if job is None else (job.pool_wait_s, job.retries)
    counted = replace(had, pool_wait_s=had.pool_wait_s + pool_wait_s, retries=had.retries + retries)
    return replace(counted, **{outcome: getattr(had, outcome) + 1})
