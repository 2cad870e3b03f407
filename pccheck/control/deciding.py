"""When to save, from what all ranks measured: one decision, by one of them (floor 0: imports tuning.*)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal, final

import msgspec

from pccheck.tuning.law import IntervalLaw
from pccheck.tuning.windows import Window

LEAST_STEPS = 8  # between decisions: of fewer too little can be told
LOOK_STEPS = 3  # after which it is looked at how long one takes: the profile is bounded in seconds, too
_CLEAN_STEPS = 8  # that a step time is measured with
_STALE = 32  # windows without so many, after which a save is held back for them
_LONGEST = 2  # intervals, and those in flight, for which it is held back at most


# A place in flight, the first save to be durable, steps beside which nothing is in flight, the profile.
Why = Literal["", "place", "first", "steps", "profile"]


class Glance(msgspec.Struct, frozen=True, kw_only=True):
    """What one rank sees when a save is due.

    Args:
        running: saves in flight.
        left_s: until the first of them ends, if it takes no longer than any of late; None = it does already.
        steps, clean: since the last decision, and those of them that tell how long a step takes alone.
        fastest_s: seconds of the fastest step so far, since the first ones may compile; 0 = not known.
        passed: saves that have ended since the last one that was due was made.
    """

    running: int
    left_s: float | None
    steps: int
    clean: int
    fastest_s: float = 0.0
    passed: int = 0


class Word(msgspec.Struct, frozen=True, kw_only=True):
    """What one rank measured since the last decision."""

    glance: Glance
    window: Window


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """What all ranks do.

    Args:
        held: for what the save is held back; "" = save now.
        interval: steps from here to the next save.
        step_s, stall_s, durable_s, mtbf_s: what is known; durable_s: 0 = nothing yet.
        overhead: of the last window.
        reason: why the interval is another than before; "" = it is the same.
        after: held for the profile, steps to go on before it is decided again; counted from what was measured.
    """

    held: Why
    interval: int
    step_s: float
    stall_s: float
    durable_s: float
    mtbf_s: float | None
    overhead: float
    reason: str
    after: int = 0


@final
class Decider:
    """Decides for all ranks. Not thread-safe.

    A save that would wait for a place in flight is held back, while training goes on; with several ranks, if it would
    wait for longer than the slowdown that is allowed. So are all until the first is durable, since nothing is known of
    storage before; and one, now and then, where saves are always in flight, until some steps showed how long a step
    takes alone. A loop that saves by itself besides takes each place that gets free: for that none is held back.

    Args:
        law: gives the interval.
        in_flight: places.
        slowdown: that is allowed.
    """

    def __init__(self, law: IntervalLaw, *, in_flight: int, slowdown: float) -> None:
        self.law = law
        self._in_flight, self._slowdown = in_flight, slowdown
        self._stale = 0  # windows in a row without enough clean steps

    def held_for(self, glances: Sequence[Glance]) -> Why:
        """Tell for what a save that is due is to be held back; "" = it is not."""
        law = self.law
        mine = [one for one in glances if one.passed <= self._in_flight]  # beside others, saves go on that no one holds
        if law.durable_s is None:
            return "first" if any(one.running for one in mine) else ""
        if self._stale >= _STALE:
            steps = max(one.steps for one in glances)
            if min(one.clean for one in glances) < _CLEAN_STEPS and steps < self._patience():
                return "steps"
        # What is left is a guess: one that is alone can look again after the next step, and need not believe it.
        alone = len(glances) == 1 or law.trying
        allowed_s = 0.0 if alone else (self._slowdown - 1) * law.interval * law.step_s
        full = any(one.running >= self._in_flight and _more(one.left_s, allowed_s) for one in mine)
        return "place" if full else ""

    def _patience(self) -> int:
        return (self._in_flight + _LONGEST) * self.law.interval + _LONGEST * _CLEAN_STEPS

    def decide(self, words: Sequence[Word]) -> Plan:
        """Give what all do, from what each measured."""
        after = max(self.law.steps_to_go(one.glance.steps, one.glance.fastest_s or one.window.step_s) for one in words)
        if after:
            return self._plan(held="profile", after=after)
        if held := self.held_for([one.glance for one in words]):
            return self._plan(held=held)
        clean, steps = min(one.glance.clean for one in words), max(one.glance.steps for one in words)
        self._stale = 0 if clean >= min(_CLEAN_STEPS, steps) or self._stale >= _STALE else self._stale + 1
        window = _joined(words)
        decision = self.law.observed(window)
        return self._plan(overhead=window.overhead, reason=decision.reason if decision else "")

    def _plan(self, *, held: Why = "", overhead: float = 0.0, reason: str = "", after: int = 0) -> Plan:
        law = self.law
        return Plan(
            held=held, interval=law.interval, step_s=law.step_s, stall_s=law.stall_s, durable_s=law.durable_s or 0.0,
            mtbf_s=law.mtbf_s, overhead=overhead, reason=reason, after=after,
        )  # fmt: skip


def _more(seconds: float | None, than_s: float) -> bool:
    return seconds is None or seconds > than_s


def _joined(words: Sequence[Word]) -> Window:
    """Give the window of the rank that checkpoints slow down most, with the worst of storage of any."""
    windows = [one.window for one in words]
    return replace(
        max(windows, key=lambda one: one.overhead),
        slot_wait_s=max(one.slot_wait_s for one in windows), saves=max(one.saves for one in windows),
        durable_s=max((one.durable_s for one in windows if one.durable_s is not None), default=None),
        service_s=max((one.service_s for one in windows if one.service_s is not None), default=None),
        held_back=any(one.held_back for one in windows),
    )  # fmt: skip
