"""What one checkpoint costs the trainer, told from the noise of the steps (floor 0: imports nothing of pccheck)."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Collection
from dataclasses import dataclass
from typing import final

_WINDOWS = 32  # that are remembered: the mean of so many is known to a sixth of the noise of one
_SURE_ONE = 3.0  # standard errors by which one window must be beyond a bound: by chance once in 700 windows
_SURE_MANY = 2.0  # and the mean of several, since the last change
_MANY = 4
_GONE = 0.7  # two windows in a row that cost less than this of the mean tell that it has changed


@dataclass(frozen=True, kw_only=True)
class _Cost:
    saves: int
    known_s: float
    other_s: float
    error_s: float
    shared_s: float


@final
class Stalls:
    """Estimates the cost of one checkpoint from windows. Not thread-safe.

    A part of it is known exactly: what `save()` and fences made the trainer wait for. The rest, what steps took longer
    beside a checkpoint, is a small difference of noisy numbers: it counts by 1 - (standard error / itself)^2, or not at
    all (James and Stein's shrinkage), and the more windows are remembered the smaller that error is. What was measured
    before the cost changed is forgotten.
    """

    def __init__(self) -> None:
        self._costs: deque[_Cost] = deque(maxlen=_WINDOWS)

    @property
    def each_s(self) -> float:
        """Seconds that one checkpoint costs; 0 before any is known."""
        saves, known_s, other_s, error_s = _sums(self._costs)
        counts = max(0.0, 1 - (error_s / other_s) ** 2) if other_s > 0 else 0.0
        return (known_s + counts * max(0.0, other_s)) / max(1, saves)

    @property
    def surely_s(self) -> float:
        """Seconds that one costs at least, as far as all windows and the last one agree."""
        return min(_each(self._costs, _SURE_MANY), _each(list(self._costs)[-1:], -_SURE_ONE))

    def add(self, *, saves: int, known_s: float, other_s: float, error_s: float, shared_s: float = 0.0) -> None:
        """Take in what the saves of a window cost: known waits, all else, and the standard error of that.

        A part of that error, `shared_s`, is that of the step time, which does not grow less by more windows.
        """
        cost = _Cost(saves=saves, known_s=known_s, other_s=other_s, error_s=error_s, shared_s=shared_s)
        self._costs.append(cost)
        last, earlier = list(self._costs)[-2:], list(self._costs)[:-2]
        if earlier and all(_each([one], -_SURE_ONE) < _GONE * _each(earlier, 1.0) for one in last):
            self._keep(2)

    def too_much(self, bound_s: float) -> tuple[float, bool]:
        """Give what a checkpoint costs, and whether that is surely more than a bound, in seconds; 0 if it is not.

        By the last window alone, which then stands for a change: what was before it is forgotten. Or by the mean.
        """
        last = list(self._costs)[-1:]
        if last and _each(last, _SURE_ONE) > bound_s:
            if _each(list(self._costs)[:-1], 0.0) < bound_s:
                self._keep(1)
            return max(_each(last, 0.0), self.each_s), True
        if len(self._costs) >= _MANY and _each(self._costs, _SURE_MANY) > bound_s:
            return _each(self._costs, 0.0), True
        return 0.0, False

    def _keep(self, windows: int) -> None:
        self._costs = deque(list(self._costs)[-windows:], maxlen=_WINDOWS)


def _each(costs: Collection[_Cost], errors: float) -> float:
    """Give the mean cost of a checkpoint, less so many standard errors of what is not known exactly."""
    saves, known_s, other_s, error_s = _sums(costs)
    return (known_s + max(0.0, other_s - errors * error_s)) / max(1, saves)


def _sums(costs: Collection[_Cost]) -> tuple[int, float, float, float]:
    return (
        sum(one.saves for one in costs), sum(one.known_s for one in costs), sum(one.other_s for one in costs),
        math.sqrt(sum(one.error_s**2 for one in costs) + sum(one.shared_s for one in costs) ** 2),
    )  # fmt: skip
