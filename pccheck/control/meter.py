"""Tells what steps take alone, and what checkpoints add to them, from their noise (floor 0: imports nothing).

No clock: durations come in, a summary goes out.

A step beside which nothing was in flight is a *clean* one. The step time t is the mean of the newest clean steps that
came 8 or more in a row, so that it follows a drift, and steps that alternate (gradient accumulation) give what they
take on average: of single ones, the one before each save for instance, all may be short. Clean steps add nothing by
definition; what others took longer than t is what checkpoints add, and its standard error follows from the spread of
the clean ones. Where saves are almost always in flight there are none: then what a step takes beside them bounds t from
above, and after a while `deciding` holds a save back until some clean steps were seen.

A pause is a step many times as long: an evaluation, a stall of the data. What was waited for checkpoints is known and
taken out before, so that it is none. It is left out, unless steps beside saves have one in this window and in one of
the two before, and more of them than clean steps have.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Collection
from dataclasses import dataclass
from typing import final

_CLEAN_STEPS = 64  # newest, that the step time is the mean of: to an eighth of the noise of one
_ROW = 8  # clean steps, before which their times tell nothing
_PAUSE = 8.0  # times as long as the step time
_MUCH = 0.6  # of the step time: so much faster they are whatever the spread
_SURE = 3.0  # standard errors by which steps beside saves must be faster before all steps count as faster


@dataclass(kw_only=True)
class Sums:
    """What was added up over some steps; two of them that follow each other can be joined."""

    steps: int = 0
    seconds: float = 0.0
    clean: int = 0
    telling: int = 0  # of the clean ones: in a row with others
    loaded: int = 0
    loaded_s: float = 0.0
    pause_s: float = 0.0  # beside saves
    waited_s: float = 0.0
    slot_wait_s: float = 0.0
    saves: int = 0
    held_back: bool = False

    def joined(self, later: Sums) -> Sums:
        """Give the sums over these steps and those after them."""
        return Sums(
            steps=self.steps + later.steps, seconds=self.seconds + later.seconds, clean=self.clean + later.clean,
            telling=self.telling + later.telling, loaded=self.loaded + later.loaded,
            loaded_s=self.loaded_s + later.loaded_s,
            pause_s=self.pause_s + later.pause_s, waited_s=self.waited_s + later.waited_s,
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
        self._clean_steps, self._clean_pause_s = 0, 0.0  # since the beginning
        self._pauses: deque[float] = deque(maxlen=2)  # beside saves, in the last two windows with saves

    @property
    def fastest_s(self) -> float:
        """The fastest of the newest clean steps; 0 = none was counted."""
        return min(self._clean or self._row, default=0.0)

    def looks_long(self, seconds: float) -> bool:
        """Tell whether a step would count as a pause, unless some of it was waited for checkpoints."""
        return 0 < _PAUSE * self.step_s < seconds

    def step(
        self, seconds: float, *, beside: bool, waited_s: float = 0.0, slot_wait_s: float = 0.0, steps: int = 1
    ) -> None:
        """Count a step, or several of which only the time of all is known.

        Args:
            seconds: it took, all in all.
            beside: a save was in flight during a part of it.
            waited_s, slot_wait_s: of it, what was waited in `save()` and fences, and for a place in flight.
            steps: how many these were.
        """
        sums, usual_s = self.sums, self.step_s * steps
        sums.steps += steps
        sums.seconds += seconds
        sums.waited_s += waited_s
        sums.slot_wait_s += slot_wait_s
        seconds -= waited_s + slot_wait_s
        long = self.looks_long(seconds / steps)
        if beside:
            self._row.clear()
            self._in_row = False
            sums.loaded += steps
            sums.loaded_s += usual_s if long else seconds
            self._beside.append(usual_s / steps if long else seconds / steps)
            sums.pause_s += seconds - usual_s if long else 0.0
            return
        sums.clean += steps
        self._clean_steps += steps
        if long:
            self._clean_pause_s += seconds - usual_s
        elif len(self._row) < _ROW - 1:
            self._row.append(seconds / steps)
        else:
            fresh = [seconds / steps] if self._in_row else [*self._row, seconds / steps]
            self._in_row = True
            self._beside.clear()
            self._clean.extend(fresh)
            sums.telling += len(fresh)

    def known(self, waited_s: float, slot_wait_s: float) -> None:
        """Note that so much of what was counted as steps beside saves was waited for them."""
        self.sums.waited_s += waited_s
        self.sums.slot_wait_s += slot_wait_s
        self.sums.loaded_s -= waited_s + slot_wait_s

    def cut(self) -> Sums:
        """Give the sums so far and begin anew."""
        sums, self.sums = self.sums, Sums()
        return sums

    def uncut(self, sums: Sums) -> None:
        """Take sums back: what comes now belongs to the same window."""
        self.sums = sums.joined(self.sums)

    def measured(self, sums: Sums) -> Measured:
        """Give what a window tells, and learn the step time from it; at least one step was counted, then or before."""
        t, spread_s, known = self._learn(sums)
        window_s = t * sums.clean + sums.loaded_s + sums.waited_s + sums.slot_wait_s + self._counted_pause_s(sums)
        return Measured(
            steps=sums.steps, step_s=t, window_s=window_s, pause_s=max(0.0, sums.seconds - window_s),
            error_s=spread_s * math.sqrt(sums.loaded), shared_error_s=spread_s * sums.loaded / math.sqrt(known),
        )  # fmt: skip

    def settle(self, sums: Sums) -> None:
        """Note that a window is over, and was decided on."""
        if sums.saves:
            self._pauses.append(self._unusual_pause_s(sums))

    def _learn(self, sums: Sums) -> tuple[float, float, int]:
        """Give the step time, its spread, and the number of steps that they are known from."""
        if not self._clean:
            self._clean.extend(self._row)  # at the very start a few must do
        usual = self._usual()
        t, spread_s = _mean_and_spread(usual or self._beside)
        known = max(1, len(usual))
        if usual and not sums.telling and len(self._beside) >= _ROW:
            beside_s, error_s = _mean(self._beside), spread_s * math.sqrt(1 / known + 1 / len(self._beside))
            # Checkpoints make no step faster: all steps have become so, or those that t is known from were compiled.
            if beside_s < max(t - _SURE * error_s, _MUCH * t):
                self._clean = self._beside.copy()
                t, spread_s = _mean_and_spread(self._clean)
                known = len(self._clean)
        self.step_s = t
        return t, spread_s, known

    def _usual(self) -> list[float]:
        """Give the newest clean steps but for pauses: the first steps of a job compile, and are such."""
        if not self._clean:
            return []
        middle = statistics.median(self._clean)
        return [one for one in self._clean if one <= _PAUSE * middle]

    def _counted_pause_s(self, sums: Sums) -> float:
        """Give the pauses beside saves that count as their fault: what this and one of two before have too much."""
        if not sums.saves or len(self._pauses) < 2:
            return 0.0
        now_s = self._unusual_pause_s(sums)
        return min(now_s, statistics.median([*self._pauses, now_s]))

    def _unusual_pause_s(self, sums: Sums) -> float:
        usual_s = self._clean_pause_s / self._clean_steps * sums.loaded if self._clean_steps else 0.0
        return max(0.0, sums.pause_s - usual_s)


def _mean(values: Collection[float]) -> float:
    return math.fsum(values) / len(values)


def _mean_and_spread(values: Collection[float]) -> tuple[float, float]:
    mean = _mean(values)
    return mean, math.sqrt(math.fsum((one - mean) ** 2 for one in values) / len(values))
