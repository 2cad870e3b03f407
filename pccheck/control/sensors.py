"""What a Controller knows of its own rank: steps, waits, saves (floor 3: imports checkpointer, meter, flights)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import final

from pccheck.checkpointer import Checkpointer
from pccheck.control.deciding import Glance, Why, Word
from pccheck.control.flights import Flights, Took
from pccheck.control.meter import Meter, Sums
from pccheck.saving.stats import Stats
from pccheck.tuning.windows import Window

_REGULAR = 8  # calls in a row with the same stride, before that many steps are taken to be done between two
_ODD = 16  # calls in a row that count for nothing; more count as one step each, or a profile might never end


@final
class Sensors:
    """Measures one rank. Not thread-safe.

    Args:
        ck: whose saves they are; its events are subscribed to.
        clock: gives seconds.

    Attributes:
        flights: what is in flight, and what saves took.
    """

    def __init__(self, ck: Checkpointer, clock: Callable[[], float]) -> None:
        self._ck, self._clock, self._meter, self.flights = ck, clock, Meter(), Flights(clock, asked=ck.counter)
        self._stats = ck.stats()  # up to which waits were counted
        self._saves = self._stats.saves  # and saves
        self._early = (0.0, 0.0)  # of them, before a pause in the step under way
        self._paused_at_s: float | None = None  # since when, up to which it was counted
        self._pause_s = 0.0  # not yet taken out of a step
        self._stride, self._same, self._odd = 1, 0, 0  # between the last two calls; calls in a row that were so; or odd
        self._busy = False
        self._passed = 0  # saves that had ended when one was last begun
        self._idle = False  # nothing was in flight at the last word
        self._offered: tuple[Sums, Took | None] | None = None
        ck.subscribe(self.flights)

    @property
    def steps(self) -> int:
        """Steps that were measured since the last `word`."""
        return self._meter.sums.steps

    @property
    def offered(self) -> bool:
        """Whether a word was given that was neither taken back nor settled."""
        return self._offered is not None

    def count(self, steps: int, seconds: float, *, saved: bool) -> None:
        """Count steps that ended now; `saved`: a save was due before them."""
        paused_s = self._taken_s()
        beside, self._busy = self._busy or saved, self.flights.busy
        if steps == 1:
            self._stride, self._same, self._odd = 1, 0, 0
        elif not (steps := self._counted(steps)):
            return
        waited_s = slot_wait_s = 0.0
        if beside or self._busy or self._meter.looks_long(seconds / steps):
            waited_s, slot_wait_s = self._waits()
        self._meter.step(
            seconds, steps=steps, beside=beside or self._busy, saving=saved, waited_s=waited_s,
            slot_wait_s=slot_wait_s, paused_s=paused_s,
        )  # fmt: skip

    def _counted(self, stride: int) -> int:
        """Give as how many steps to count a stride of more than one; 0 = none: it is a jump, and tells nothing.

        Some loops count several at a time, always as many. A jump is not so many steps: what was done meanwhile nobody
        knows. Where nothing but jumps comes, each counts as one.
        """
        self._same = self._same + 1 if stride == self._stride else 1
        self._stride = stride
        if self._same >= _REGULAR:
            self._odd = 0
            return stride
        self._odd += 1
        return 1 if self._odd > _ODD else 0

    def begun(self) -> None:
        """Note that the save that was due is made."""
        self._passed = self.flights.ends

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Count the time of a `with` block, and what is waited for saves in it, to no step."""
        if self._paused_at_s is not None:  # inside another
            yield
            return
        self._early = self._waits()
        self._paused_at_s = self._clock()
        try:
            yield
        finally:
            self._pause_s += self._clock() - self._paused_at_s
            self._paused_at_s = None
            self._stats = self._ck.stats()

    def _taken_s(self) -> float:
        """Give the seconds of pauses since the last call; one may be under way."""
        now_s = self._clock()
        if self._paused_at_s is not None:
            self._pause_s += now_s - self._paused_at_s
            self._paused_at_s, self._stats = now_s, self._ck.stats()
        pause_s, self._pause_s = self._pause_s, 0.0
        return pause_s

    def begin(self) -> None:
        """Begin anew, after a jump: pauses before it were none of a step's that is counted."""
        self._taken_s()

    def _waits(self) -> tuple[float, float]:
        """Give what was waited for checkpoints since the last call: in `save()` and gates, and for a place."""
        before, self._stats = self._stats, self._ck.stats()
        (waited_s, slot_wait_s), self._early = self._early, (0.0, 0.0)
        waited_s += _waited_s(self._stats) - _waited_s(before)
        return waited_s, slot_wait_s + self._stats.slot_wait_s - before.slot_wait_s

    def held_back(self, why: Why) -> None:
        """Note that a save was due and is held back; only for want of a place does that tell of storage."""
        self._meter.sums.held_back |= why == "place"

    def glance(self) -> Glance:
        """Give what is seen now."""
        running, sums = self._ck.stats().in_flight, self._meter.sums
        left_s = self.flights.left_s() if running else None
        fastest_s = self._meter.fastest_s
        return Glance(
            running=running, left_s=left_s, steps=sums.steps, clean=sums.telling, fastest_s=fastest_s,
            passed=self.flights.ends - self._passed,
        )  # fmt: skip

    def word(self) -> Word:
        """Give what was measured since the last word that was settled; `settle` or `take_back` must follow."""
        glance = self.glance()
        if not glance.running and self._idle:  # and whatever is still known to be in flight ended without a word
            self.flights.forget()
        self._idle = not glance.running
        self._meter.known(*self._waits())
        self._meter.sums.saves += self._stats.saves - self._saves
        self._saves = self._stats.saves
        sums, took = self._meter.cut(), self.flights.cut()
        self._offered = sums, took
        measured = self._meter.measured(sums)
        window = Window(
            steps=sums.steps, step_s=max(1e-9, measured.step_s), window_s=measured.window_s, saves=sums.saves,
            durable_s=None if took is None else took.durable_s, service_s=None if took is None else took.service_s,
            stall_s=sums.waited_s, slot_wait_s=sums.slot_wait_s, held_back=sums.held_back, error_s=measured.error_s,
            shared_error_s=measured.shared_error_s, pause_s=measured.pause_s,
        )  # fmt: skip
        return Word(glance=glance, window=window)

    def settle(self) -> None:
        """Note that it was decided on what was offered."""
        self._offered = None

    def take_back(self) -> None:
        """Let what was offered and not decided on belong to the window under way."""
        if self._offered is not None:
            sums, took = self._offered
            self._meter.uncut(sums)
            self.flights.uncut(took)
            self._offered = None

    def close(self) -> None:
        """Hear no more events."""
        self._ck.unsubscribe(self.flights)


def _waited_s(stats: Stats) -> float:
    """Give what was waited in all, but for places."""
    return stats.save_s - stats.slot_wait_s + stats.gate_wait_s
