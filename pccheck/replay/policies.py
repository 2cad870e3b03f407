"""Who decides when to save in a simulation (floor 0: imports tuning, and rooms of replay)."""

from __future__ import annotations

import math
from typing import final

from pccheck.control.deciding import LEAST_STEPS, LOOK_STEPS, Decider, Glance, Word
from pccheck.replay.job import Job, Outcome
from pccheck.replay.policy import Policy, Watch
from pccheck.replay.steptimes import StepTimes
from pccheck.replay.timeline import Segment, Timeline
from pccheck.replay.trace import Trace
from pccheck.tuning import checkfreq, checkfreq_retuned
from pccheck.tuning.law import PROFILE_STEPS, IntervalLaw
from pccheck.tuning.windows import Window


@final
class Fixed(Policy):
    """A save every so many steps.

    Args:
        name: for people.
        interval: steps, 1 or more.
        in_flight: checkpoints at once, 1 or more.
        waits: the trainer waits until each is durable: synchronous.
    """

    def __init__(self, name: str, interval: int, *, in_flight: int = 1, waits: bool = False) -> None:
        self.name, self.in_flight, self.waits = name, in_flight, waits
        self._interval = interval

    @property
    def interval(self) -> int:
        """Steps between saves."""
        return self._interval

    def restarted(self, *, up_s: float, failures: int) -> None:
        """Go on as before."""


@final
class CheckFreqLoop(Policy):
    """CheckFreq (FAST 2021): a profile, Algorithm 1, then re-tuning by the measured overhead; one in flight.

    What it found outlives a restart, as its cache of parameters does. It profiles the first 1 % of the steps, or 50.

    Args:
        total_steps: of the whole job; 1 or more.
        fraction: the overhead it allows; the paper's 0.035.
    """

    def __init__(self, *, total_steps: int, fraction: float = 0.035, name: str = "CheckFreq") -> None:
        self.name, self.in_flight = name, 1
        self._interval = min(PROFILE_STEPS, max(1, total_steps // 100))
        self._fraction = fraction
        self._least: int | None = None  # the first term of Algorithm 1; None while it profiles
        self._settled = False  # a window at the interval that was chosen is over

    @property
    def interval(self) -> int:
        """Steps between saves."""
        return self._interval

    def asked(self, watch: Watch) -> int:
        """Choose once a checkpoint was timed, then re-tune by what was measured since the last save; always save."""
        if self._least is None:
            if watch.durable_s is not None and watch.saves:
                self._choose(watch.window())
        elif self._settled:
            window = watch.window()
            if window.durable_s is not None:
                self._least = self._finishes(window)
            self._interval = checkfreq_retuned(self._interval, window.overhead, self._fraction, least=self._least)
        else:
            self._settled = True  # what was waited in this window was for saves of the profile: not to be judged by
        watch.cut()
        return 0

    def _choose(self, window: Window) -> None:
        """Run Algorithm 1: all of the stall that was measured did not fit beside a step, which T_update = T_i says."""
        stall_s = window.stall_s / window.saves
        self._least = self._finishes(window)
        _, self._interval = checkfreq(
            step_s=window.step_s,
            update_s=window.step_s,
            device_copy_s=0.0,
            host_copy_s=stall_s,
            storage_s=max(0.0, (window.durable_s or 0.0) - stall_s),
            device_has_room=False,
            fraction=self._fraction,
        )

    def _finishes(self, window: Window) -> int:
        """Give the shortest interval in which one checkpoint is written: the first term of Algorithm 1."""
        stall_s = window.stall_s / max(1, window.saves)
        return max(1, math.ceil(max(0.0, (window.durable_s or 0.0) - stall_s) / window.step_s))

    def restarted(self, *, up_s: float, failures: int) -> None:
        """Go on with the interval that was found."""


@final
class ControllerLoop(Policy):
    """`pccheck.Controller`: the same law, driven by simulated measurements.

    A restart begins a new law, which is told of the failures and the time up so far, as by the store's history.

    Args:
        in_flight: checkpoints at once, 1 or more.
        slowdown: that is allowed, 1 or more; None as of a Controller.
        mtbf_s: the expected mean time between failures; None = not known.
        restart_s: from a failure until training goes on.
        profile_steps: of the profile.
    """

    def __init__(
        self,
        *,
        in_flight: int,
        slowdown: float | None = None,
        mtbf_s: float | None = None,
        restart_s: float = 0.0,
        profile_steps: int = PROFILE_STEPS,
        name: str = "controller",
    ) -> None:
        self.name, self.in_flight = name, in_flight
        self._slowdown, self._mtbf_s, self._restart_s = slowdown, mtbf_s, restart_s
        self._profile_steps = profile_steps
        self._decider = self._new(0, 0.0)

    @property
    def interval(self) -> int:
        """Steps between saves, or until the length of a step is looked at."""
        law = self._decider.law
        return law.interval if law.step_s else min(LOOK_STEPS, law.interval)

    def asked(self, watch: Watch) -> int:
        """Have the Controller's decider decide, as one that is alone does: a save held back is asked for every step."""
        law = self._decider.law
        word = _word(watch, law.durable_s or 0.0)
        if law.step_s and watch.steps < LEAST_STEPS and not self._decider.held_for([word.glance]):
            return 0
        plan = self._decider.decide([word])
        if plan.held:
            watch.held_back |= plan.held == "place"
            return max(1, plan.after)
        watch.cut()
        return 0

    def restarted(self, *, up_s: float, failures: int) -> None:
        """Begin with a new profile."""
        self._decider = self._new(failures, up_s)

    def _new(self, failures: int, up_s: float) -> Decider:
        law = IntervalLaw(
            in_flight=self.in_flight,
            slowdown=self._slowdown,
            mtbf_s=self._mtbf_s,
            restart_s=self._restart_s,
            profile_steps=self._profile_steps,
            failures=failures,
            uptime_s=up_s,
        )
        return Decider(law, in_flight=self.in_flight, slowdown=law.slowdown)


def _word(watch: Watch, durable_s: float) -> Word:
    """Give what was measured, in the Controller's words."""
    left_s = 0.0 if not watch.running else durable_s - watch.oldest_s if watch.oldest_s < durable_s else None
    glance = Glance(running=watch.running, left_s=left_s, steps=watch.steps, clean=watch.clean)
    return Word(glance=glance, window=watch.window())


def ideal(job: Job, trace: Trace) -> Outcome:
    """Give what no policy can beat: checkpoints cost nothing, and a kill only the restart, without loading."""
    now, up_s, down_s, kills, kills_down = 0.0, 0.0, 0.0, 0, 0
    down_until = 0.0
    times = StepTimes(job.step_s, job.jitter, job.seed)
    segments: list[Segment] = []
    marks: list[tuple[float, int, int]] = []
    for stop in [*trace.losses, trace.end_s]:
        resumed = min(max(now, down_until), stop)
        first = times.done(0, up_s)
        down_s += resumed - now
        up_s += stop - resumed
        last = times.done(0, up_s)
        segments += [Segment("down", now, resumed, first, first)] * (resumed > now)
        segments += [Segment("work", resumed, stop, first, last)] * (stop > resumed)
        if len(marks) < trace.failures:
            kills_down += now < stop and resumed == stop and bool(marks)
            marks.append((stop, last, last))
            kills += 1
        now, down_until = stop, stop + job.restart_s
    return Outcome(
        policy="ideal",
        goodput=up_s / trace.end_s,
        wall_s=trace.end_s,
        steps=times.done(0, up_s),
        useful_s=up_s,
        lost_s=0.0,
        stall_s=0.0,
        slot_wait_s=0.0,
        down_s=down_s,
        in_flight=0,
        intervals=(),
        saves=0,
        durable=0,
        kills=kills,
        kills_down=kills_down,
        restarts=0,
        timeline=Timeline(segments=tuple(segments), saves=(), kills=tuple(marks), end_s=trace.end_s),
    )
