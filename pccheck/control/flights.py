"""Follows the saves of a Checkpointer by its events (floor 2: imports events)."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import final

from pccheck.events import Event, Failed, Published, Restored, Returned, Skipped, Superseded

_RECENT = 8  # durations that are remembered
_LOOK_S = 0.002
_EARLY = 64  # ends that are remembered, of saves of which nothing else was heard


@dataclass(frozen=True, kw_only=True)
class Running:
    """A save in flight: its step, seconds since it began, and what it would have had of storage alone by now.

    `left`: steps went back after it began, so that its state is none of the steps that are done now.
    """

    step: int
    age_s: float
    served_s: float
    left: bool = False


@dataclass(frozen=True, kw_only=True)
class Took:
    """What saves took: until durable, and of storage had each been alone."""

    durable_s: float
    service_s: float


@dataclass(frozen=True)
class _Begun:
    step: int
    began_s: float
    served_s: float  # of the sum over all time, when it began


@final
class Flights:
    """What is in flight, and what saves took that became durable. Thread-safe; an observer of a Checkpointer.

    What a save takes of storage is the integral of dt over the number in flight. It does not grow while others are
    served beside it, so that it tells what storage can do, however many are in flight.

    Args:
        clock: gives seconds.
        asked: the counter of the last save of which nothing will be heard here.

    Attributes:
        newest: the step that became durable, or was restored, of the newest save (not the greatest step: steps may have
            gone back since); None = none was, or steps went back since (`leave`).
    """

    def __init__(self, clock: Callable[[], float], *, asked: int = 0) -> None:
        self._clock, self._heard = clock, asked
        # Entered as a lock, which is one step: entering a condition runs Python code, and a Ctrl-C within that has left
        # it locked for ever (seen).
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._running: dict[int, _Begun] = {}  # by counter
        self._ended_early: deque[int] = deque(maxlen=_EARLY)  # before `save()` returned
        self._served_s, self._since_s = 0.0, clock()
        self._window: list[Took] = []
        self._recent: deque[Took] = deque(maxlen=_RECENT)
        self._ends = 0
        self._left = -1  # up to this counter, saves are of steps that were gone back from
        self._newest_counter = -1
        self.newest: int | None = None

    def __call__(self, event: Event) -> None:
        """Hear an event."""
        match event:
            case Returned():
                self._begin(event)
            case Published() | Superseded():
                self._end(event.counter, event.step, event.seconds)
            case Failed() | Skipped():
                self._end(event.counter, event.step, None)
            case Restored():
                with self._lock:  # what is saved from here on has a greater counter; an older branch is left
                    self.newest, self._newest_counter = event.step, event.counter

    def leave(self, counter: int) -> None:
        """Note that steps went back: no save up to this counter, durable or in flight, is of those that are done now.

        By the counter, and not by what was heard: events of those saves may still come.
        """
        with self._lock:
            self._left = max(counter, self._left)
            self.newest, self._newest_counter = None, -1

    def forget(self) -> None:
        """Note that nothing is in flight, whatever was heard: some saves have ended without a word."""
        with self._lock:
            self._advance()
            self._ended_early.extend(self._running)  # should one come after all
            self._running.clear()
            self._changed.notify_all()

    def _begin(self, event: Returned) -> None:
        with self._lock:
            self._heard = max(self._heard, event.counter)
            if event.counter in self._ended_early:
                self._ended_early.remove(event.counter)
                return
            now = self._advance()
            gone_s = max(0.0, event.seconds - event.slot_wait_s)
            served_s = self._served_s - gone_s / (len(self._running) + 1)
            self._running[event.counter] = _Begun(event.step, now - gone_s, served_s)
            self._changed.notify_all()

    def _end(self, counter: int, step: int, seconds: float | None) -> None:
        with self._lock:
            self._heard = max(self._heard, counter)
            self._advance()
            begun = self._running.pop(counter, None)
            if begun is None:
                self._ended_early.append(counter)
            if seconds is not None:
                served_s = seconds if begun is None else min(seconds, self._served_s - begun.served_s)
                took = Took(durable_s=seconds, service_s=served_s)
                self._window.append(took)
                self._recent.append(took)
                if counter > max(self._left, self._newest_counter):
                    self.newest, self._newest_counter = step, counter
            self._ends += 1
            self._changed.notify_all()

    def _advance(self) -> float:
        now = self._clock()
        if self._running:
            self._served_s += (now - self._since_s) / len(self._running)
        self._since_s = now
        return now

    @property
    def busy(self) -> bool:
        """Whether anything is in flight, as far as was heard."""
        return bool(self._running)

    def running(self) -> list[Running]:
        """Give what is in flight, the oldest first."""
        with self._lock:
            now = self._advance()
            return [
                Running(
                    step=one.step, age_s=now - one.began_s, served_s=self._served_s - one.served_s,
                    left=counter <= self._left,
                )
                for counter, one in self._running.items()
            ]  # fmt: skip

    def worst(self) -> Took | None:
        """Give the worst of the last saves that became durable; None = none has."""
        with self._lock:
            return _worst(self._recent)

    @property
    def quickest_s(self) -> float | None:
        """The least time until durable of the last saves; None = none is durable."""
        with self._lock:
            return min((one.durable_s for one in self._recent), default=None)

    def left_s(self) -> float | None:
        """Give the seconds until one in flight ends, if none takes longer than any of late; None if one does."""
        with self._lock:
            now, worst = self._clock(), _worst(self._recent)
            ages_s = [now - one.began_s for one in self._running.values()]
        if not ages_s:
            return 0.0
        return None if worst is None or max(ages_s) >= worst.durable_s else worst.durable_s - max(ages_s)

    def cut(self) -> Took | None:
        """Give the worst of the saves that became durable since the last call; None = none has.

        One in flight that already takes longer than any of late counts as well: that far, it is known.
        """
        with self._lock:
            now, recent = self._advance(), _worst(self._recent)
            found, self._window = self._window, []
            if recent is not None:
                for one in self._running.values():
                    so_far = Took(durable_s=now - one.began_s, service_s=self._served_s - one.served_s)
                    if so_far.durable_s > recent.durable_s:
                        found.append(so_far)
            return _worst(found)

    def uncut(self, took: Took | None) -> None:
        """Take back what `cut` gave: it belongs to the same window as what comes now."""
        if took is not None:
            with self._lock:
                self._window.append(took)

    def await_told(self, asked: int, in_flight: Callable[[], int], timeout_s: float) -> bool:
        """Wait until saves up to the counter `asked` were heard of, and as many are known as there are.

        Events come a little later than what they tell of; by the number alone, one that has just ended was taken for
        one that has just begun.
        """
        until_s = time.monotonic() + timeout_s
        with self._lock:
            while self._heard < asked or len(self._running) != in_flight():
                if time.monotonic() >= until_s:
                    return False
                self._changed.wait(_LOOK_S)
            return True

    @property
    def ends(self) -> int:
        """How many saves have ended so far, for `await_end`."""
        return self._ends

    def await_end(self, ends: int, timeout_s: float) -> bool:
        """Wait until more saves have ended than `ends`; False = `timeout_s` is over."""
        with self._lock:
            return self._changed.wait_for(lambda: self._ends > ends, max(0.0, timeout_s))


def _worst(took: deque[Took] | list[Took]) -> Took | None:
    if not took:
        return None
    return Took(durable_s=max(one.durable_s for one in took), service_s=max(one.service_s for one in took))
