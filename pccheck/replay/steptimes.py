"""How long each step of a simulated job takes, the same whoever saves when (floor 0: imports nothing of pccheck).

With jitter, steps differ. A step's time follows from the seed and the number of the step, so that all policies train
through the same steps, and what one gains over another is no luck of the draw; a step that is done again takes the same
time again. The times of n steps together then vary by the spread / sqrt(n), as those of independent steps do.
"""

from __future__ import annotations

import math
import random
from array import array
from bisect import bisect_left, bisect_right
from functools import lru_cache
from itertools import accumulate
from typing import final

# So many steps are drawn, independently; then they come again, so that any step is found at once. Their mean is exactly
# 1: the sum over any number of steps varies no more than that of independent ones.
DRAWN_STEPS = 1 << 16
_ROUNDING = 1e-9  # of a step


def factor(dice: random.Random, spread: float) -> float:
    """Give a factor around 1 (log-normal with mean 1) with this coefficient of variation."""
    if not spread:
        return 1.0
    variance = math.log1p(spread * spread)
    return dice.lognormvariate(-variance / 2, math.sqrt(variance))


@lru_cache(maxsize=4)
def _starts(spread: float, seed: int) -> array[float]:
    """Give when each of the drawn steps starts, and all of them end, in mean steps."""
    if not spread:
        return array("d", (0.0, 1.0))
    dice = random.Random(f"steps {seed}")
    drawn = [factor(dice, spread) for _ in range(DRAWN_STEPS)]
    scale = DRAWN_STEPS / math.fsum(drawn)
    return array("d", [*accumulate((scale * one for one in drawn[:-1]), initial=0.0), DRAWN_STEPS])


@final
class StepTimes:
    """The times of a job's steps. Safe to share between threads.

    Args:
        step_s: mean seconds of a step, above 0.
        spread: coefficient of variation of the time of a step, 0 to 1; steps are independent.
        seed: of the spread.
    """

    def __init__(self, step_s: float, spread: float, seed: int) -> None:
        self._step_s, self._starts = step_s, _starts(spread, seed)
        self._drawn = len(self._starts) - 1

    def seconds(self, first: int, last: int) -> float:
        """Give what the steps take that lead from one to another: `seconds(0, n)` is that of the first n."""
        return self._step_s * (self._start(last) - self._start(first))

    def done(self, first: int, seconds: float) -> int:
        """Give how many steps, from one on, end within so many seconds; one that lacks a rounding error does."""
        turns, rest = self._at(first, seconds + _ROUNDING * self._step_s)
        return max(0, turns * self._drawn + bisect_right(self._starts, rest) - 1 - first)

    def begun(self, first: int, seconds: float) -> int:
        """Give how many steps, from one on, begin before so many seconds are over; one within a rounding error not."""
        turns, rest = self._at(first, seconds - _ROUNDING * self._step_s)
        return max(0, turns * self._drawn + bisect_left(self._starts, rest) - first)

    def _start(self, step: int) -> float:
        turns, rest = divmod(step, self._drawn)
        return turns * self._drawn + self._starts[rest]

    def _at(self, first: int, seconds: float) -> tuple[int, float]:
        """Give how often all drawn steps were done so long after a step's start, and what is left, in mean steps."""
        turns, rest = divmod(self._start(first) + seconds / self._step_s, self._drawn)
        return int(turns), rest
