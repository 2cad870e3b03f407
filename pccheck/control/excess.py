"""Tells what steps beside saves take longer than others, whatever a few of them take (floor 0: imports nothing).

What a save slows are many steps, or the one in which it is made, again and again. A pause of the loop, an evaluation or
a stall of the data, is one long step or a few; where saves are almost always in flight it falls beside one nearly
always, and so often that no comparison of means can tell it from a cost. So all steps, those alone and those beside
saves, are cut off at the same length before their means are compared: at the longest that is none of the few.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import final

FEW = 6  # one step in so many: what comes as rarely is no cost of a checkpoint
_FEW_AT_ONCE = 3  # the same in one window: a cost that is new shows in more of its steps
_AT_ONCE = 3  # steps beside saves that a window must have to tell of one
_STEPS = 32  # beside saves, that are remembered
_SAVES = 8  # steps with a save in them; more than half of them must be long


@dataclass(frozen=True, kw_only=True)
class Over:
    """Seconds by which a step beside saves is longer, and one with a save in it; and the spread of steps alone."""

    beside_s: float
    saving_s: float
    spread_s: float


@final
class Excess:
    """Remembers the newest steps beside saves, and compares those of a window with steps alone. Not thread-safe."""

    def __init__(self) -> None:
        self._beside: deque[float] = deque(maxlen=_STEPS)
        self._saving: deque[float] = deque(maxlen=_SAVES)

    def add(self, seconds: float, *, saving: bool) -> None:
        """Take in a step beside saves, without what was waited for them; `saving`: one was made in it."""
        (self._saving if saving else self._beside).append(seconds)

    def measured(self, alone: Sequence[float], beside: Sequence[float], saving: Sequence[float]) -> Over:
        """Compare steps of a window, beside saves and with one made in them, with steps alone; `alone`: 1 or more."""
        usual_s = longest(alone, FEW)
        now_s = longest(beside, _FEW_AT_ONCE) if len(beside) >= _AT_ONCE else 0.0
        cut_s = max(usual_s, now_s, longest(self._beside, FEW))
        beside_s, spread_s = _over(alone, beside, cut_s)
        often_s = statistics.median_low(self._saving) if len(self._saving) > 1 else 0.0
        saving_s, _ = _over(alone, saving, max(cut_s, often_s))
        return Over(beside_s=beside_s, saving_s=saving_s, spread_s=spread_s)


def longest(values: Collection[float], few: int) -> float:
    """Give the longest but for one in so many, rounded up; 0 = there are no more."""
    left = sorted(values, reverse=True)[math.ceil(len(values) / few) :]
    return left[0] if left else 0.0


def _over(alone: Sequence[float], values: Sequence[float], cut_s: float) -> tuple[float, float]:
    """Give by what the mean of values is above that of steps alone, all cut off at a length, and their spread."""
    short = [min(one, cut_s) for one in alone]
    mean_s = math.fsum(short) / len(short)
    spread_s = math.sqrt(math.fsum((one - mean_s) ** 2 for one in short) / len(short))
    over_s = math.fsum(min(one, cut_s) for one in values) / len(values) - mean_s if values else 0.0
    return over_s, spread_s
