"""Decides at each step whether to save, and keeps that right while the job runs (floor 3: imports below)."""

from __future__ import annotations

import math
import time
import warnings
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any, final

from pccheck import arguments
from pccheck.bill.history import past_failures
from pccheck.checkpointer import Checkpointer
from pccheck.control import asked
from pccheck.control.council import Council
from pccheck.control.deciding import LEAST_STEPS, LOOK_STEPS, Decider, Plan
from pccheck.control.lastsave import Answer, LastSave
from pccheck.control.sensors import Sensors
from pccheck.errors import PccheckError, RanksError, UsageError
from pccheck.events import IntervalChosen
from pccheck.options import check_whole_number
from pccheck.saving.save import Save
from pccheck.tuning.law import MOST_STEPS, PROFILE_STEPS, IntervalLaw

_DECISIONS = 256  # that are remembered
_SETTLE_S = 0.05  # that the words of other ranks get to arrive before anybody needs them
_NEVER = 1 << 64
_MOST = (1 << 63) - 1  # as steps
_SHARE = 100  # of all steps: the profile takes one in so many, as CheckFreq's does


@final
class Controller:
    """Decides at each step whether to save. Not thread-safe: the training loop calls it.

        controller = pccheck.Controller(ck, mtbf_s=6 * 3600)
        for step in range(start, steps):
            train_step()
            controller.save_if_due(step, make_state)

    It times the steps between two calls of `due`, hears of the saves from the Checkpointer's events, and has an
    `IntervalLaw` choose the interval: after a short profile, and again at each save. A signal handler must not call it,
    but note that a signal came (see `Notice`), for the loop to look. With several ranks every one of them has a
    Controller with the same arguments and asks it at the same steps; all give the same answer, since one rank decides
    from what all measured. If ranks are lost, the others keep the interval.

    Args:
        ck: saves; the Controller subscribes to its events.
        slowdown: time with checkpoints over time without that is allowed, 1 or more: 1.05 = 5 % slower; None = 1.05,
            and where mtbf_s is given as much as pays.
        stall_fraction: what checkpoints may add to the step time, as a share of it; None = as slowdown says.
        mtbf_s: expected mean seconds between failures of the whole job; None = unknown, until the store's history tells
            of two. Known, the interval is the one of the greatest useful fraction of the time.
        prior_failures: how many failures that expectation is worth beside those that are seen.
        restart_s: seconds from a failure until training goes on; None = 0: it does not change the interval.
        rpo_s: greatest age in seconds of the newest durable state; None = any.
        profile_steps: of the profile at the start, at least 2: half of it without a save, half with one.
        total_steps: of the job; the profile then takes at most 1 % of them.
        max_interval: steps.
        clock: gives seconds; for tests.

    Raises OptionError for a value out of its range; its calls UsageError for a step that is no whole number of 64 bits,
    and while another of them is at work (in another thread, or interrupted by a signal handler).

    Attributes:
        interval: steps from save to save, now.
        decisions: the newest changes of the interval, oldest first, each with its reason; also told to the observers.
    """

    def __init__(
        self,
        ck: Checkpointer,
        *,
        slowdown: float | None = None,
        stall_fraction: float | None = None,
        mtbf_s: float | None = None,
        prior_failures: float = 1.0,
        restart_s: float | None = None,
        rpo_s: float | None = None,
        profile_steps: int = PROFILE_STEPS,
        total_steps: int | None = None,
        max_interval: int = MOST_STEPS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if not isinstance(ck, Checkpointer) and not hasattr(ck, "subscribe"):
            raise UsageError(
                f"a Controller needs the Checkpointer whose saves it times; it was given {type(ck).__name__}"
            )
        clock = asked.clock_of(clock)
        check_whole_number("profile_steps", profile_steps, 2, MOST_STEPS)
        check_whole_number("max_interval", max_interval, 1, _MOST)
        if total_steps is not None:
            check_whole_number("total_steps", total_steps, 1, _MOST)
            profile_steps = max(2, min(profile_steps, total_steps // _SHARE))
        uptime_s, failures = _past(ck)
        law = IntervalLaw(
            in_flight=ck.options.in_flight, slowdown=slowdown, stall_fraction=stall_fraction, mtbf_s=mtbf_s,
            prior_failures=prior_failures, restart_s=0.0 if restart_s is None else restart_s, rpo_s=rpo_s,
            profile_steps=profile_steps, max_interval=max_interval, failures=failures,
            uptime_s=uptime_s,
        )  # fmt: skip
        self._ck, self._clock = ck, clock
        self._decider = Decider(law, in_flight=ck.options.in_flight, slowdown=law.slowdown)
        self._council = Council(ck.agreement, self._decider, ck.options.agree_timeout_s)
        self._sensors = Sensors(ck, clock)
        self.interval = law.interval
        self.decisions: deque[IntervalChosen] = deque(maxlen=_DECISIONS)
        self._reason = "the profile"
        self._known_s = 0.0  # a step, as all ranks know it; 0 = not yet
        self._step: int | None = None  # of the last call, and when that was, and what it gave
        self._at_s, self._answer = 0.0, False
        self._reached: int | None = None  # the last step that was heard of, in any call
        self._inside = False  # a call is at work
        self._relayed = self._apart = False
        self._save_at = self._decide_at = self._relay_at = self._offer_at = _NEVER

    # -- what users call ----------------------------------------------------------------------------------------------

    def due(self, step: int) -> bool:
        """Tell whether to save the state of this step; call it once after every step, on all ranks.

        It takes some microseconds; where ranks decide, once in an interval at most, some more. Asked again about the
        same step it gives the same answer. A step before the last one, as after a roll-back, begins a new interval.
        """
        step = arguments.step(step)
        if self._inside:
            raise asked.entered("due")
        try:
            self._inside = True
            now_s = self._clock()
            self._reach(step)
            if self._step is None or step < self._step:
                self._begin(step, now_s)
            elif step > self._step:
                self._sensors.count(step - self._step, now_s - self._at_s, saved=self._answer)
                self._step, self._at_s = step, now_s
                self._answer = self._decided(step)
            return self._answer
        finally:
            self._inside = False

    def save_if_due(
        self, step: int, make_state: Callable[[], Any], *, metadata: Mapping[str, Any] | None = None
    ) -> Save | None:
        """Save if it is `due`; None if it is not. Raises as `Checkpointer.save`.

        Args:
            step: as for `due`.
            make_state: gives the state, called only if it is due; or the state itself, if it cannot be called.
            metadata: as for `save`.
        """
        if not self.due(step):
            return None
        state = make_state() if callable(make_state) else make_state
        try:
            self._inside = True
            return self._ck.save(step, state, metadata=metadata)
        finally:
            self._inside = False

    def save_by(self, step: int, state: Any, seconds: float, *, fresh_steps: int = 0) -> Answer:
        """Make the state durable within some seconds, if that can be; after a notice of preemption, say.

        Only what the numbers allow is begun: a newer save never takes the storage that one in flight needs to be in
        time. So this is never worse than to do nothing. It takes at most about `seconds`. Every rank calls it with the
        same step; what can be done in the shortest of their times is done by all.

        Args:
            step: the step of the state.
            state: as for `save`, or a function that gives it, called only if it is saved.
            seconds: until the process ends; less than 0 counts as 0.
            fresh_steps: how many steps older a checkpoint in flight may be and still do: 0 = none. Where steps went
                back, which a lower one than before tells (here or in `due`), nothing counts that was saved before.
        """
        step = arguments.step(step)
        seconds = asked.seconds_left(seconds)
        check_whole_number("fresh_steps", fresh_steps, 0, _MOST)
        make_state = state if callable(state) else lambda: state
        if self._inside:
            raise asked.entered("save_by")
        try:
            self._inside = True
            self._reach(step)
            return LastSave(self._ck, self._sensors.flights, step, make_state, seconds, fresh_steps).run()
        finally:
            self._inside = False

    def paused(self) -> AbstractContextManager[None]:
        """Tell that what a `with` block does is no part of a step: an evaluation, a break; it counts for no cost.

        Exact, and as cheap as `due`. Single long steps are told from costs without it; it is for pauses at each save.
        """
        return self._sensors.paused()

    def close(self) -> None:
        """Hear no more events; a Controller that goes with its Checkpointer need not be closed."""
        self._sensors.close()

    def __repr__(self) -> str:
        return f"<Controller: a save every {self.interval} steps ({self._reason})>"

    # -- deciding -----------------------------------------------------------------------------------------------------

    def _reach(self, step: int) -> None:
        """Note how far steps are; where they went back, no save made so far is of what is trained now."""
        if self._reached is not None and step < self._reached:
            self._sensors.flights.leave(self._ck.counter)
        self._reached = step

    def _begin(self, step: int, now_s: float) -> None:
        """Begin an interval, at the start or after a jump back; what ranks had begun to exchange is void."""
        self._step, self._at_s, self._answer = step, now_s, False
        self._sensors.take_back()
        self._sensors.begin()
        self._council.forget()
        self._plan_ahead(step)

    def _plan_ahead(self, step: int) -> None:
        """Set the steps of the next save, of the next decision, and of the words before it."""
        self._save_at = step + self.interval
        if not self._apart:
            lead = self._lead()
            if not self._known_s:
                self._decide_within(step, min(LOOK_STEPS, self.interval), lead)
                self._save_at = self._decide_at
                return
            saves = math.ceil(max(LEAST_STEPS, 2 * lead + 1) / self.interval)
            self._decide_within(step, saves * self.interval, lead)

    def _lead(self) -> int:
        """Give the steps in which the words of other ranks arrive; before the step time is known, a third of a look."""
        if self._ck.world == 1:
            return 0
        return max(1, math.ceil(_SETTLE_S / self._known_s)) if self._known_s else min(LOOK_STEPS, self.interval) // 3

    def _decide_within(self, step: int, steps: int, lead: int) -> None:
        self._decide_at = step + steps
        self._relay_at, self._offer_at = self._decide_at - lead, self._decide_at - 2 * lead
        self._relayed = False

    def _decided(self, step: int) -> bool:
        if self._ck.world == 1 and step >= self._save_at and (why := self._decider.held_for([self._sensors.glance()])):
            self._sensors.held_back(why)
            return False
        try:
            if step >= self._offer_at and not self._sensors.offered and self._sensors.steps:
                self._council.offer(self._sensors.word())
            if step >= self._relay_at and self._sensors.offered and not self._relayed:
                self._relayed = True
                self._council.relay()
            return step >= self._save_at and (step < self._decide_at or self._followed(step)) and self._again(step)
        except RanksError as error:
            self._lost(error)
            return step >= self._save_at and self._again(step)

    def _again(self, step: int) -> bool:
        self._save_at = step + self.interval
        self._sensors.begun()
        return True

    def _followed(self, step: int) -> bool:
        """Do what was decided for this step; False = hold the save back, and decide again soon."""
        plan = self._council.plan() if self._sensors.offered else None
        if plan is None or plan.held:
            self._sensors.take_back()
            lead = self._lead()
            steps = 2 * lead + 1
            if plan is not None and plan.held == "profile":
                steps = max(1, plan.after - (self._decide_at - self._offer_at))
                lead = min(lead, (steps - 1) // 2)
            elif plan is not None:
                self._sensors.held_back(plan.held)
            self._decide_within(step, steps, lead)
            self._save_at = self._decide_at
            return False
        self._sensors.settle()
        self._adopt(step, plan)
        self._plan_ahead(step)
        return True

    def _adopt(self, step: int, plan: Plan) -> None:
        self._known_s = plan.step_s
        if plan.reason and plan.interval != self.interval:
            decision = IntervalChosen(
                step=step, counter=0, interval=plan.interval, before=self.interval, reason=plan.reason,
                step_s=plan.step_s, stall_s=plan.stall_s, durable_s=plan.durable_s, mtbf_s=plan.mtbf_s,
                overhead=plan.overhead,
            )  # fmt: skip
            self._note(decision)
        self.interval = plan.interval

    def _note(self, decision: IntervalChosen) -> None:
        self._reason = decision.reason
        self.decisions.append(decision)
        self._ck.tell(decision)

    def _lost(self, error: RanksError) -> None:
        """Keep the interval from here on: no other can be agreed on."""
        self._apart = True
        self._decide_at = self._relay_at = self._offer_at = _NEVER
        self._sensors.take_back()
        reason = f"it stays as it is, the ranks do not decide together any more: {error}"
        decision = IntervalChosen(
            step=self._step or 0, counter=0, interval=self.interval, before=self.interval, reason=reason,
            step_s=self._known_s, stall_s=0.0, durable_s=0.0, mtbf_s=None, overhead=0.0,
        )  # fmt: skip
        self._note(decision)
        warnings.warn(f"the interval of checkpoints: {reason}", RuntimeWarning, stacklevel=4)


def _past(ck: Checkpointer) -> tuple[float, int]:
    """Give how long earlier runs of this store went on together, and how many failed; of ranks, the first decides."""
    if ck.rank:
        return 0.0, 0
    try:
        return past_failures(ck.path)
    except PccheckError:  # a store without a history is fine
        return 0.0, 0
