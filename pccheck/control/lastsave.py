"""Saves what can be saved before an announced end (floor 3: imports checkpointer, flights, rescue)."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, final

import msgspec

from pccheck.checkpointer import Checkpointer
from pccheck.control.flights import Flights
from pccheck.control.rescue import Move, Prospect, decide, joined, predicted
from pccheck.errors import PccheckError, RanksError
from pccheck.saving.save import Save

_TOPIC = "save_by"
_TOLD_S = 0.25  # for events that are on their way
_prospects = msgspec.json.Decoder(Prospect)


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What became of a state that was to be durable in time.

    Args:
        action: "saved" = a save of it was begun; "awaited" = one in flight was waited for; "declined" = neither.
        durable: whether the state of the step that was asked for, or one as fresh as was asked for, is durable.
        step: of the newest save that this run made durable since steps last went back, as far as it knows; None = none.
        reason: in words, with the numbers.
        waited_s: seconds that the call took.
        save: what was begun, if anything was.
    """

    action: Literal["saved", "awaited", "declined"]
    durable: bool
    step: int | None
    reason: str
    waited_s: float
    save: Save | None = None


@final
class LastSave:
    """Carries out one call of `save_by`. Not thread-safe.

    Args:
        ck: saves.
        flights: what is in flight, and what saves took.
        step: of the state.
        make_state: gives it.
        seconds: until the end.
        fresh_steps: how much older a checkpoint may be and still do.
    """

    def __init__(
        self, ck: Checkpointer, flights: Flights, step: int, make_state: Callable[[], Any], seconds: float,
        fresh_steps: int,
    ) -> None:  # fmt: skip
        self._ck, self._flights, self._make_state = ck, flights, make_state
        self._step, self._least = step, step - fresh_steps
        self._began_s = time.monotonic()
        self._until_s = self._began_s + seconds

    def run(self) -> Answer:
        """Do what the numbers say, until the state is durable or nothing more can be done."""
        waited = False
        while True:
            ends = self._flights.ends
            try:
                move, reason = self._agreed()
            except RanksError as error:
                return self._alone(error)
            if move == "save":
                return self._save(reason)
            if move == "decline":
                return self._answer("awaited" if waited else "declined", reason)
            waited = True
            if self._flights.running() and not self._ended(ends):
                return self._answer("awaited", f"{reason}; it was not durable in time")

    def _ended(self, ends: int) -> bool:
        """Wait until more saves have ended than `ends`, or none is in flight; False = no time is left.

        One that ended without a word must not be waited for: the notice would pass with nothing done.
        """
        while not self._flights.await_end(ends, min(_TOLD_S, self._left_s())):
            if not self._ck.stats().in_flight:
                self._flights.forget()
                return True
            if self._left_s() <= 0:
                return False
        return True

    def _await_at_most(self, running: int) -> None:
        """Wait until no more saves than these are in flight, or no time is left."""
        ends = self._flights.ends
        while len(self._flights.running()) > running and self._ended(ends):
            ends = self._flights.ends

    def _left_s(self) -> float:
        return self._until_s - time.monotonic()

    def _agreed(self) -> tuple[Move, str]:
        mine = self._prospect()
        if self._ck.world == 1:
            return decide(mine)
        timeout_s = min(self._ck.options.agree_timeout_s, max(0.0, self._left_s()))
        said = self._ck.agreement.exchange(_TOPIC, msgspec.json.encode(mine), timeout_s)
        theirs = [_prospects.decode(one) for one in said]
        steps = {one.step for one in theirs}
        if len(steps) > 1:
            raise RanksError(f"all ranks must call save_by with the same step; they gave {sorted(steps)}")
        together = joined(theirs)
        self._until_s = min(self._until_s, time.monotonic() + together.left_s)  # no rank waits where another is gone
        return decide(together)

    def _prospect(self) -> Prospect:
        wait_s = min(_TOLD_S, max(0.0, self._left_s()))
        told = self._flights.await_told(self._ck.counter, lambda: self._ck.stats().in_flight, wait_s)
        if not told and not self._ck.stats().in_flight:
            self._flights.forget()
        running, took = self._flights.running(), self._flights.worst()
        service_s, durable_s = (None, None) if took is None else (took.service_s, self._flights.quickest_s)
        finish_s, best_s, sure_s = predicted([one.served_s for one in running], service_s, durable_s)
        durable = self._is_fresh(self._flights.newest)
        left_s = self._left_s()
        return Prospect(
            step=self._step, left_s=left_s if math.isfinite(left_s) else 1e9, running=len(running), durable=durable,
            enough=durable or any(self._is_fresh(one.step) and not one.left for one in running), finish_s=finish_s,
            best_s=best_s, sure_s=sure_s,
        )  # fmt: skip

    def _is_fresh(self, step: int | None) -> bool:
        """Tell whether a checkpoint of this step will do; one of a greater step is of a training that was left."""
        return step is not None and self._least <= step <= self._step

    def _save(self, reason: str) -> Answer:
        try:
            self._await_at_most(self._ck.options.in_flight - 1)
            save = self._ck.save(self._step, self._make_state(), when_full="skip", report=False)
        except PccheckError as error:
            return self._answer("declined", f"{reason}; it could not be begun: {error}")
        try:
            save.durable.result(max(0.0, self._left_s()))
        except PccheckError as error:
            return self._answer("saved", f"{reason}; but {error}", save=save)
        except TimeoutError:
            return self._answer("saved", f"{reason}; it was not durable in time", save=save)
        return self._answer("saved", reason, durable=True, save=save)

    def _alone(self, error: RanksError) -> Answer:
        """Nothing can be saved without the other ranks; what is in flight may still be agreed."""
        self._await_at_most(0)
        return self._answer("declined", f"the ranks do not decide together: {error}")

    def _answer(
        self, action: Literal["saved", "awaited", "declined"], reason: str, *, durable: bool = False,
        save: Save | None = None,
    ) -> Answer:  # fmt: skip
        newest = self._step if durable else self._flights.newest
        return Answer(
            action=action, durable=durable or self._is_fresh(newest), step=newest, reason=reason,
            waited_s=time.monotonic() - self._began_s, save=save,
        )  # fmt: skip
