"""How an interval follows what is measured while a job runs: a state machine (floor 0: imports tuning.*).

No clock and no I/O: `pccheck.Controller` drives it with what it measures, the replay of traces with simulated time.

It goes up at once and comes down step by step, as CheckFreq's (FAST 2021) does. What differs: the bound on what
storage keeps up with is PCcheck's; what waits in `save()` and for storage is known to the microsecond, but what else
slows the steps is told from their noise by its standard error; and what raised the interval is forgotten once it is
gone.
"""

from __future__ import annotations

import math
from collections import deque
from typing import final

from pccheck.tuning.domain import LEAST_SHARE, at_least, not_negative, positive, ratio, share, whole
from pccheck.tuning.intervals import Choice, choose_interval
from pccheck.tuning.stalls import Stalls
from pccheck.tuning.tries import Tries
from pccheck.tuning.windows import Decision, Window

__all__ = ["Decision", "IntervalLaw", "Window"]

PROFILE_STEPS = 50  # CheckFreq's profile: 50 steps, or 1 % of all, whichever is less
_PROFILE_S = 60.0  # and this long without a save at most: 25 steps of a minute each would be lost with a failure
_PROFILES = 10  # at least so many of these in the time between failures: each restart begins with one
MOST_STEPS = 1_000_000
SLOWDOWN = 1.05  # allowed where nothing else is asked for
_UNBOUNDED = 0.99
_GROWS = 8  # times at most by one decision on stalls: one hiccup must not leave a job unprotected for long
_CALM = 2  # windows within all bounds before the interval comes down
_CALMEST = 32  # at most so many, where it went up again soon after it came down: twice as many each time
_SOON = 4  # windows
_FAR = 0.6  # of itself: an interval so much too long tells that a disturbance is gone, and waits for no more than _CALM
_SHRINKS = 2 / 3  # of itself, with each calm window: from 8 times too long it is back after 2 + 6
_WORTH = 0.85  # a shorter interval is aimed at only if it is this much shorter: jitter must not make it wander
_SHORTER = 0.8  # of itself, with each such try
_ROOM = 1.1  # times what storage keeps up with is the first try: jitter must not make it fail
_RECENT = 2  # windows whose worst time until durable counts


@final
class IntervalLaw:
    """Gives the interval, from windows as they are measured. Not thread-safe.

    It begins with half the profile without a save, in which the step time is measured (`steps_to_go`), and one save in
    its other half, which is as long. From then on the interval is the one of `choose_interval` for what was measured,
    at first as if storage served as many at once as are allowed, each as fast as one alone, and

    * goes up at once where checkpoints cost more than their bound for sure: to ceil(interval * cost / bound), at most
      8 times as long; and to no less than what storage keeps up with, ceil(T_w / (N q t));
    * comes down to two thirds, again and again, once two windows kept all bounds and a shorter one would do;
    * tries, where storage alone binds and more checkpoints could be in flight, whether storage serves more than it was
      seen to: more and more rarely where it does not.

    Args:
        in_flight: checkpoints that may be under way at once (N).
        slowdown: time with checkpoints over time without that is allowed (q), 1 or more; None = 1.05.
        stall_fraction: what checkpoints may add to the step time, as a share of it (p); None = slowdown - 1, 0.05 at
            slowdown 1; without a bound where slowdown is None too and mtbf_s is given, since the best interval weighs
            what checkpoints cost against what failures do.
        mtbf_s: expected mean seconds between failures (M); None = unknown, until two failures were seen.
        prior_failures: how many failures that expectation is worth (the weight of a gamma prior).
        restart_s: seconds from a failure until training goes on (R).
        rpo_s: greatest age in seconds of the newest durable state; None = any.
        profile_steps: of the profile, 2 or more.
        max_interval: steps, 1 or more.
        failures, uptime_s: seen in earlier runs.

    Raises OptionError for a value out of its range.
    """

    def __init__(
        self, *, in_flight: int, slowdown: float | None = None, stall_fraction: float | None = None,
        mtbf_s: float | None = None, prior_failures: float = 1.0, restart_s: float = 0.0, rpo_s: float | None = None,
        profile_steps: int = PROFILE_STEPS, max_interval: int = MOST_STEPS, failures: int = 0, uptime_s: float = 0.0,
    ) -> None:  # fmt: skip
        self._in_flight = whole("in_flight", in_flight)
        self._slowdown = self.slowdown = ratio("slowdown", SLOWDOWN if slowdown is None else slowdown)
        weighed = slowdown is None and mtbf_s is not None
        over = max(self._slowdown - 1, LEAST_SHARE) if self._slowdown > 1 else 0.05
        default = _UNBOUNDED if weighed else min(_UNBOUNDED, over)
        self._bound = default if stall_fraction is None else share("stall_fraction", stall_fraction)
        self._prior_mtbf_s = None if mtbf_s is None else positive("mtbf_s", mtbf_s)
        self._prior_failures = positive("prior_failures", prior_failures, what="a number of failures")
        self._restart_s = not_negative("restart_s", restart_s)
        self._rpo_s = None if rpo_s is None else positive("rpo_s", rpo_s)
        self._most = whole("max_interval", max_interval)
        self._profile = max(1, whole("profile_steps", profile_steps) // 2)
        self._failures, self._uptime_s = failures, not_negative("uptime_s", uptime_s)
        self.interval = min(self._profile, self._most)
        self.step_s = 0.0
        self._stalls = Stalls()
        self._durable: deque[float] = deque(maxlen=_RECENT)
        self._service: deque[float] = deque(maxlen=_RECENT)
        self._warm = self._chosen = False  # the first save was made; the profile is over
        self._calm = self._longer = 0  # windows in a row
        self._coming_down = False
        self._calm_needed, self._came_down = _CALM, _SOON  # and windows since
        self._tries = Tries()

    # -- what is known ------------------------------------------------------------------------------------------------

    @property
    def durable_s(self) -> float | None:
        """The worst time until durable of late; None = none is known."""
        return max(self._durable, default=None)

    @property
    def service_s(self) -> float | None:
        """The worst time of late that storage took for one checkpoint, had it been alone."""
        return max(self._service, default=None)

    @property
    def trying(self) -> bool:
        """Whether the interval is one that storage was not yet seen to keep up with."""
        return self._tries.before is not None

    @property
    def stall_s(self) -> float:
        """What one checkpoint costs the trainer, interference included."""
        return self._stalls.each_s

    @property
    def mtbf_s(self) -> float | None:
        """Mean time between failures: the posterior mean of a gamma prior; None = not known."""
        if self._prior_mtbf_s is not None:
            weight = self._prior_failures
            return (weight * self._prior_mtbf_s + self._uptime_s) / (weight + self._failures)
        return self._uptime_s / self._failures if self._failures >= 2 and self._uptime_s > 0 else None

    def failed(self, failures: int = 1) -> None:
        """Count failures; the time up to them came with the windows."""
        self._failures += failures

    def steps_to_go(self, steps: int, step_s: float) -> int:
        """Give how many steps of the profile's first half are left after so many, of so many seconds each."""
        return 0 if self.step_s else max(0, self._half(positive("step_s", step_s)) - steps)

    def _half(self, step_s: float) -> int:
        """Give the steps of half the profile: bounded in seconds, too, and less where failures come often."""
        mtbf_s = self.mtbf_s
        most_s = _PROFILE_S if mtbf_s is None else min(_PROFILE_S, mtbf_s / _PROFILES)
        return min(self._profile, self._most, at_least(most_s / step_s))

    def choice(self, *, side_by_side: bool = False, surely: bool = False) -> Choice | None:
        """Give the interval for what is known now, and what binds; None while too little is known.

        `side_by_side`: as if all that may be in flight were served side by side, each as fast as now; `surely`: with
        what a checkpoint costs at least, not most likely.
        """
        durable, service = self.durable_s, self.service_s
        if durable is None or service is None or not self.step_s:
            return None
        return choose_interval(
            step_s=self.step_s, stall_s=self._stalls.surely_s if surely else self.stall_s,
            durable_s=durable if side_by_side else max(durable, self._in_flight * service), durable_alone_s=durable,
            in_flight=self._in_flight, slowdown=self._slowdown, stall_fraction=self._bound, mtbf_s=self.mtbf_s,
            restart_s=self._restart_s, rpo_s=self._rpo_s,
        )  # fmt: skip

    # -- what happens -------------------------------------------------------------------------------------------------

    def observed(self, window: Window) -> Decision | None:
        """Take in a window; give the decision if the interval changes."""
        self._uptime_s += window.window_s + window.pause_s
        self.step_s = positive("step_s", window.step_s)
        self._learn(window)
        choice = self.choice()
        if choice is None:
            return self._none_durable(window)
        raised = self._raised(window, choice)
        if not self._chosen:
            self._chosen = True
            return self._first(window, choice, max(choice.interval, raised[0]))
        if raised[0] > self.interval:
            self._disturbed()
            return self._decide(window, *raised)
        self._calm += 1
        self._came_down += 1
        if self._came_down == _SOON:
            self._calm_needed = max(_CALM, self._calm_needed // 2)
        return self._lowered(window, choice)

    def _first(self, window: Window, choice: Choice, sure: int) -> Decision | None:
        """Choose for the first time: a try of more than one in flight, where storage alone asks for longer than that.

        To find that out later would cost the more the shorter jobs live: a replay of a trace of spot machines, with
        states that take a third of the time between failures to write, did 6 % better so.
        """
        reason, tried = f"measured in the profile: {_why(choice)}", self.choice(side_by_side=True)
        steps = sure if tried is None else max(tried.interval, min(at_least(_ROOM * tried.terms["bandwidth"]), sure))
        if steps < sure and choice.binds in ("bandwidth", "waits"):
            self._tries.begin(sure, self.durable_s or 0.0, self.service_s or 0.0)
            return self._decide(window, steps, f"{reason}; and it may serve {self._in_flight} side by side")
        return self._decide(window, sure, reason)

    def _learn(self, window: Window) -> None:
        if window.durable_s is not None:
            self._durable.append(window.durable_s)
            period = window.window_s / max(1, window.saves)
            share_of_it = max(window.durable_s / self._in_flight, min(window.durable_s, period))
            self._service.append(share_of_it if window.service_s is None else window.service_s)
        if window.saves and self._warm:
            self._stalls.add(
                saves=window.saves, known_s=window.stall_s, error_s=window.error_s, shared_s=window.shared_error_s,
                other_s=window.window_s - window.steps * window.step_s - window.stall_s - window.slot_wait_s,
            )  # fmt: skip
        self._warm |= window.saves > 0  # the first save also allocates the slots: what it stalled is told of no other

    def _none_durable(self, window: Window) -> Decision | None:
        """Slow down while not even the first save is durable: nothing is known of storage but that it is slow."""
        if not window.saves and not window.held_back:
            return self._decide(window, self._half(self.step_s), "the profile takes no longer")
        return self._decide(window, 2 * self.interval, "no save has become durable yet")

    def _raised(self, window: Window, choice: Choice) -> tuple[int, str]:
        """Give the interval that this window asks for at once, if any does, and why."""
        wanted, t = [(0, "")], self.step_s
        durable_s = self.durable_s or 0.0
        stall_s, sure = self._stalls.too_much(self._bound * self.interval * t)
        if sure:
            steps = min(_GROWS * self.interval, at_least(stall_s / (self._bound * t)))
            share_of_it = stall_s / (self.interval * t)
            reason = f"checkpoints cost {share_of_it:.1%} of the time, above {self._bound:.1%}: {stall_s:.3g} s each"
            wanted.append((steps, reason))
        if self._tries.before is not None:
            if self._tries.fails(window):
                wanted.append((self._tries.before, "storage serves no more than before"))
            return max(wanted, key=lambda one: one[0])
        waits = window.slot_wait_s > (self._slowdown - 1) * window.steps * t
        if waits or window.held_back:
            steps = at_least(durable_s / (self._in_flight * self._slowdown * t))
            how = "waited" if waits else "would have waited"
            wanted.append((max(self.interval + 1, steps), f"a save {how} for one of {self._in_flight} places"))
        sustained_s = min(self._service)  # of two windows: one may be jitter, and a save that would wait is held back
        keeps_up = at_least(sustained_s / (self._slowdown * t))
        wanted.append((keeps_up, f"storage takes {sustained_s:.3g} s for a checkpoint, more than between two"))
        if choice.binds == "failures":  # it weighs what a checkpoint costs: noise must not raise it
            choice = self.choice(surely=True) or choice
        self._longer = self._longer + 1 if choice.interval * _WORTH >= self.interval else 0
        if self._longer >= _CALM and choice.binds != "stall":  # that is above, once it is sure
            wanted.append((min(_GROWS * self.interval, choice.interval), _why(choice)))
        return max(wanted, key=lambda one: one[0])

    def _disturbed(self) -> None:
        """Note that the interval goes up: a try of a shorter one has failed."""
        self._tries.disturbed()
        if self._came_down < _SOON:
            self._calm_needed = min(2 * self._calm_needed, _CALMEST)
        self._calm = self._longer = 0
        self._coming_down = False

    def _lowered(self, window: Window, choice: Choice) -> Decision | None:
        if self.trying:
            if not self._tries.passes(window):
                return None
            while len(self._service) > 1:  # those before were of another interval
                self._service.popleft()
        near = choice.interval > _WORTH * self.interval  # too near to come down to, or it would wander
        if choice.interval >= self.interval or (near and not self._coming_down):
            self._coming_down = False
            return self._tried(window, choice)
        self._tries.unsteady()
        needed = _CALM if choice.interval <= _FAR * self.interval else self._calm_needed
        if not self._coming_down and self._calm < needed:
            return None
        self._coming_down, self._came_down = True, 0
        steps = max(choice.interval, min(self.interval - 1, math.ceil(_SHRINKS * self.interval)))
        return self._decide(window, steps, f"the bounds are kept again: {_why(choice)}")

    def _tried(self, window: Window, choice: Choice) -> Decision | None:
        """Try whether storage serves more checkpoints than it was seen to, once in a while."""
        durable_s, service_s = self.durable_s or 0.0, self.service_s or 0.0
        least = at_least(durable_s / (self._in_flight * self._slowdown * self.step_s))
        due = self._tries.are_due(service_s)
        if not due or choice.binds not in ("bandwidth", "waits") or least >= self.interval:
            return None
        self._tries.begin(self.interval, durable_s, service_s)
        steps = max(least, min(self.interval - 1, math.floor(_SHORTER * self.interval)))
        reason = f"storage may serve more: one checkpoint is durable after {durable_s:.3g} s"
        return self._decide(window, steps, reason)

    def _decide(self, window: Window, interval: int, reason: str) -> Decision | None:
        before, self.interval = self.interval, max(1, min(interval, self._most))
        if self.interval == before:
            return None
        return Decision(
            interval=self.interval, before=before, reason=reason, step_s=self.step_s, stall_s=self.stall_s,
            durable_s=self.durable_s or 0.0, overhead=window.overhead, mtbf_s=self.mtbf_s,
        )  # fmt: skip


_BINDS = {
    "bandwidth": "storage keeps up with no more",
    "waits": "storage keeps up with no more",
    "stall": "checkpoints may cost no more",
    "failures": "the optimum for this rate of failures",
    "recovery point": "the recovery point asks for it",
    "every step": "nothing asks for less often than every step",
}


def _why(choice: Choice) -> str:
    return _BINDS[choice.binds] + (f"; {choice.why}" if choice.why else "")
