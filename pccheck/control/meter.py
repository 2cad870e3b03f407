"""Tells what steps take alone, and what checkpoints add to them, from their noise (floor 0: imports excess).

No clock: durations come in, a summary goes out.

A step beside which nothing was in flight is a *clean* one. The step time t is the mean of the newest clean steps that
came 8 or more in a row, so that it follows a drift, and steps that alternate (gradient accumulation) give what they
take on average: of single ones, the one before each save for instance, all may be short. Clean steps add nothing by
definition; what others took longer than t is what checkpoints add, and its standard error follows from the spread of
the clean ones. Where saves are almost always in flight there are none: then what a step takes beside them bounds t from
above, and after a while `deciding` holds a save back until some clean steps were seen.

What was waited for checkpoints is known and taken out of each step before. What else is longer is told from pauses of
the loop by `excess`: a few long steps are none of the checkpoints' fault. Steps 8 times as long do not count for t.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from typing import final

from pccheck.control.excess import Excess

_CLEAN_STEPS = 64  # newest, that the step time is the mean of: to an eighth of the noise of one
_ROW = 8  # clean steps, before which their times tell nothing
_PAUSE = 8.0  # times as long as the step time: what a step alone takes so much longer is none of that
_KEPT = 512  # steps of a window, that its mean is of: an interval may be a million
_MUCH = 0.6  # of the step time: so much faster they are whatever the spread
_SURE = 3.0  # standard errors by which steps beside saves must be faster before all steps count as faster


def _kept(values: Iterable[float] = ()) -> deque[float]:
    return deque(values, maxlen=_KEPT)


@dataclass(kw_only=True)
class Sums:
    """What was added up over some steps; two of them that follow each other can be joined."""

    steps: int = 0
    seconds: float = 0.0
    clean: int = 0
    telling: int = 0  # of the clean ones: in a row with others
    loaded: int = 0
    loading: int = 0  # of these: a save was made in it
    beside: deque[float] = field(default_factory=_kept)  # seconds of the newest of the others
    saving: deque[float] = field(default_factory=_kept)  # and of these
    missed_s: float = 0.0  # waited beside saves, but not taken out of any step
    waited_s: float = 0.0
    slot_wait_s: float = 0.0
    saves: int = 0
    held_back: bool = False

    def joined(self, later: Sums) -> Sums:
        """Give the sums over these steps and those after them."""
        return Sums(
            steps=self.steps + later.steps, seconds=self.seconds + later.seconds, clean=self.clean + later.clean,
            telling=self.telling + later.telling, loaded=self.loaded + later.loaded,
            loading=self.loading + later.loading, beside=_kept([*self.beside, *later.beside]),
            saving=_kept([*self.saving, *later.saving]), missed_s=self.missed_s + later.missed_s,
            waited_s=self.waited_s + later.waited_s,
            slot_wait_s=self.slot_wait_s + later.slot_wait_s, saves=self.saves + later.saves,
            held_back=self.held_back or later.held_back,
        )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Measured:
    """What `Meter.measured` gives: the fields of a `Window` that come from steps."""

    steps: int
    step_s: float
    window_s: float
    pause_s: float
    error_s: float
    shared_error_s: float


@final
class Meter:
    """Measures steps. Not thread-safe.

    Attributes:
        sums: of the steps since the last `cut`.
        step_s: seconds of a step without checkpoints, as far as known; 0 = not yet.
    """

    def __init__(self) -> None:
        self.sums = Sums()
        self.step_s = 0.0
        self._clean: deque[float] = deque(maxlen=_CLEAN_STEPS)
        self._row: deque[float] = deque(maxlen=_ROW - 1)  # clean steps, not yet enough in a row
        self._in_row = False  # those of `_row` were enough, and count
        self._beside: deque[float] = deque(maxlen=_CLEAN_STEPS)  # the newest of the others since
        self._excess = Excess()

    @property
    def fastest_s(self) -> float:
        """The fastest of the newest clean steps; 0 = none was counted."""
        return min(self._clean or self._row, default=0.0)

    def looks_long(self, seconds: float) -> bool:
        """Tell whether a step would count as a pause, unless some of it was waited for checkpoints."""
        return 0 < _PAUSE * self.step_s < seconds

    def step(
        self, seconds: float, *, beside: bool, saving: bool = False, waited_s: float = 0.0, slot_wait_s: float = 0.0,
        paused_s: float = 0.0, steps: int = 1,
    ) -> None:  # fmt: skip
        """Count a step, or several of which only the time of all is known.

        Args:
            seconds: it took, all in all.
            beside: a save was in flight during a part of it.
            saving: one was made in it.
            waited_s, slot_wait_s: of it, what was waited in `save()` and fences, and for a place in flight.
            paused_s: of it, what the loop says that it was no step.
            steps: how many these were.
        """
        sums = self.sums
        sums.steps += steps
        sums.seconds += seconds
        sums.waited_s += waited_s
        sums.slot_wait_s += slot_wait_s
        each_s = max(0.0, seconds - waited_s - slot_wait_s - paused_s) / steps
        if beside:
            self._row.clear()
            self._in_row = False
            sums.loaded += steps
            sums.loading += steps if saving else 0
            (sums.saving if saving else sums.beside).append(each_s)
            self._excess.add(each_s, saving=saving)
            self._beside.append(each_s)
            return
        sums.clean += steps
        if self.looks_long(each_s):
            return
        if len(self._row) < _ROW - 1:
            self._row.append(each_s)
        else:
            fresh = [each_s] if self._in_row else [*self._row, each_s]
            self._in_row = True
            self._beside.clear()
            self._clean.extend(fresh)
            sums.telling += len(fresh)

    def known(self, waited_s: float, slot_wait_s: float) -> None:
        """Note that so much more of what was counted as steps was waited for saves."""
        self.sums.waited_s += waited_s
        self.sums.slot_wait_s += slot_wait_s
        self.sums.missed_s += waited_s + slot_wait_s

    def cut(self) -> Sums:
        """Give the sums so far and begin anew."""
        sums, self.sums = self.sums, Sums()
        return sums

    def uncut(self, sums: Sums) -> None:
        """Take sums back: what comes now belongs to the same window."""
        self.sums = sums.joined(self.sums)

    def measured(self, sums: Sums) -> Measured:
        """Give what a window tells, and learn the step time from it; at least one step was counted, then or before."""
        t, known = self._learn(sums)
        alone = self._usual(self._clean) or self._usual(self._beside)
        over = self._excess.measured(alone, sums.beside, sums.saving)
        other_s = over.beside_s * (sums.loaded - sums.loading) + over.saving_s * sums.loading - sums.missed_s
        window_s = max(0.0, t * sums.steps + other_s) + sums.waited_s + sums.slot_wait_s
        return Measured(
            steps=sums.steps, step_s=t, window_s=window_s, pause_s=max(0.0, sums.seconds - window_s),
            error_s=over.spread_s * math.sqrt(sums.loaded),
            shared_error_s=over.spread_s * sums.loaded / math.sqrt(known),
        )  # fmt: skip

    def _learn(self, sums: Sums) -> tuple[float, int]:
        """Give the step time, and the number of steps that it is known from."""
        if not self._clean:
            self._clean.extend(self._row)  # at the very start a few must do
        usual, beside = self._usual(self._clean), self._usual(self._beside)
        t, spread_s = _mean_and_spread(usual or beside)
        known = max(1, len(usual))
        if usual and not sums.telling and len(self._beside) >= _ROW:
            beside_s, error_s = _mean(beside), spread_s * math.sqrt(1 / known + 1 / len(beside))
            # Checkpoints make no step faster: all steps have become so, or those that t is known from were compiled.
            if beside_s < max(t - _SURE * error_s, _MUCH * t):
                self._clean = deque(beside, maxlen=_CLEAN_STEPS)
                t, known = beside_s, len(beside)
        self.step_s = t
        return t, known

    def _usual(self, values: Collection[float]) -> list[float]:
        """Give those that are no pauses: the first steps of a job compile, and are such."""
        if not values:
            return []
        middle = statistics.median(values)
        return [one for one in values if one <= _PAUSE * middle]


def _mean(values: Collection[float]) -> float:
    return math.fsum(values) / len(values)


def _mean_and_spread(values: Collection[float]) -> tuple[float, float]:
    mean = _mean(values)
    return mean, math.sqrt(math.fsum((one - mean) ** 2 for one in values) / len(values))
