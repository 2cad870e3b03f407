"""Counts one run's events into its entry in the history (floor 0: imports bill.runs, bill.durations, events).

Every event costs the same, however many there were, and what is held does not grow.
"""

from __future__ import annotations

from collections import Counter
from typing import final

from pccheck import events
from pccheck.bill.durations import bucket
from pccheck.bill.runs import MOST_POINTS, Point, joined, thin


@final
class Account:
    """What is known of one run from its events. Not thread-safe.

    Times are seconds after the run began; events come in order.
    """

    def __init__(self) -> None:
        self.returned = self.progress = self.climbs = self.longest = 0
        self.climbed_s = self.first_save_s = 0.0
        self.first_step = self.last_step = 0
        self.snapshot = ""
        self.restored_step: int | None = None
        self.restored_at_s: float | None = None
        self.written_bytes = self.state_bytes = 0
        self.durable: Counter[int] = Counter()
        self.paces: Counter[int] = Counter()  # seconds of a step from save to save, without what `save()` took
        self.durable_worst_s = 0.0
        self.durable_step: int | None = None
        self._durable_counter = -1  # of that step: committers tell of what they published in any order
        self.saved_at_s = 0.0  # of the newest durable checkpoint; before the first, all of the run would be lost
        self.stride = 1
        self.returned_at_s = self._aged_to_s = self._age_s2 = self._age_worst_s = 0.0
        self._points: list[Point] = []
        self._open: Point | None = None  # stands for `_in_open` publications, fewer than the stride
        self._in_open = 0

    def heard(self, event: events.Event, at_s: float) -> None:
        """Count one event that came at this time."""
        # By type: to ask whether it is of each abstract class in turn cost as much as all the counting (profiled).
        if type(event) is events.Returned:
            self._came_back(event, at_s)
        elif type(event) is events.Persisted:
            self.written_bytes += event.payload_bytes
            self.state_bytes = event.payload_bytes
        elif type(event) is events.Published:
            self._durable(event.seconds)
            self._published(event, at_s)
        elif type(event) is events.Superseded:
            self._durable(event.seconds)
        elif type(event) is events.Restored:
            if not self.returned:
                self.restored_step, self.restored_at_s = event.step, at_s
        elif type(event) is events.SnapshotPicked:
            self.snapshot = event.mode

    def age(self, at_s: float) -> tuple[float, float]:
        """Give the age of the newest durable checkpoint, integrated from the beginning to a time, and its worst."""
        area = self._age_s2 + self._area_to(at_s)
        return area, max(self._age_worst_s, at_s - self.saved_at_s, 0.0)

    def points(self) -> tuple[Point, ...]:
        """Give the series of ages, at most MOST_POINTS."""
        return (*self._points, *([] if self._open is None else [self._open]))

    def _came_back(self, event: events.Returned, at_s: float) -> None:
        if not self.returned:
            self.first_step, self.first_save_s = event.step, event.seconds
        elif event.step > self.last_step:  # a roll-back is no progress
            self.progress += event.step - self.last_step
            self.climbs += 1
            self.longest = max(self.longest, event.step - self.last_step)
            apart_s = max(0.0, at_s - self.returned_at_s)
            self.climbed_s += apart_s
            self.paces[bucket(max(0.0, apart_s - event.seconds) / (event.step - self.last_step))] += 1
        self.returned += 1
        self.last_step, self.returned_at_s = event.step, at_s

    def _durable(self, seconds: float) -> None:
        self.durable[bucket(seconds)] += 1
        self.durable_worst_s = max(self.durable_worst_s, seconds)

    def _published(self, event: events.Published, at_s: float) -> None:
        self._age_s2 += self._area_to(at_s)
        worst_s = max(0.0, at_s - self.saved_at_s)
        self._age_worst_s = max(self._age_worst_s, worst_s)
        self._aged_to_s = max(self._aged_to_s, at_s)
        if event.counter > self._durable_counter:
            self._durable_counter, self.durable_step = event.counter, event.step
        self.saved_at_s = max(self.saved_at_s, at_s - event.seconds)
        step = event.step if self.durable_step is None else self.durable_step
        point = Point(round(at_s, 3), step, round(worst_s, 3), round(max(0.0, at_s - self.saved_at_s), 3))
        self._open = point if self._open is None else joined(self._open, point)
        self._in_open += 1
        if self._in_open < self.stride:
            return
        self._points.append(self._open)
        self._open, self._in_open = None, 0
        if len(self._points) >= MOST_POINTS:
            self._points, self.stride = thin(self._points), self.stride * 2

    def _area_to(self, at_s: float) -> float:
        """Integrate the age from where that was done last: it grows as time does."""
        seconds = at_s - self._aged_to_s
        return max(0.0, seconds * (self._aged_to_s - self.saved_at_s + seconds / 2)) if seconds > 0 else 0.0
