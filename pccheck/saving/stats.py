"""What a Checkpointer did so far, in numbers (floor 2: imports nothing of pccheck)."""

from __future__ import annotations

from dataclasses import dataclass


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
