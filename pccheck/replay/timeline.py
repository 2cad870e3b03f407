"""What a run did when, told the same by the simulation and by live runs (floor 0: imports nothing of pccheck)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

# down: no process, until `restart_s` has passed since the kill. load: opening and restoring. work: steps that counted.
# lost: steps that a kill undid. stall: what checkpoints kept the loop from (only where it can be told apart).
SegmentKind = Literal["down", "load", "work", "lost", "stall"]


@dataclass(frozen=True)
class Segment:
    """One stretch of a run.

    Args:
        kind: what was done.
        start_s, end_s: seconds since the run began.
        first, last: progress in steps at the start and the end; the same where no step was done.
    """

    kind: SegmentKind
    start_s: float
    end_s: float
    first: int
    last: int


@dataclass(frozen=True)
class Timeline:
    """One run: its stretches in order, without gaps, and its marks.

    Args:
        segments: of the whole run.
        saves: (seconds, step) of each save when it was asked for.
        kills: (seconds, step reached, step that the next process went on from) of each kill.
        end_s: when the run ended, in seconds since it began.
        flights: (begun, ended, durable) of each save, as far as known: how long it took, and what became of it.
    """

    segments: tuple[Segment, ...]
    saves: tuple[tuple[float, int], ...]
    kills: tuple[tuple[float, int, int], ...]
    end_s: float
    flights: tuple[tuple[float, float, bool], ...] = ()
