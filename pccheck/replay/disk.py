"""Storage that saves share while they are written, in simulated time (floor 0: imports replay.job)."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from pccheck.replay.job import Job


@dataclass(slots=True)
class Flight:
    """One save on its way to storage.

    Args:
        step: that it holds.
        start_s: when it was begun.
        left_bytes: to write.
        ready_s: when it may be durable at the earliest; from when all is written, when it is.
        service_s: what it took of storage so far, had it been alone: the time, shared by all that were under way.
        written: nothing is left to write.
    """

    step: int
    start_s: float
    left_bytes: float
    ready_s: float
    service_s: float = 0.0
    written: bool = False


class Disk:
    """Processor sharing: each write gets the rate of a stream, all together that of the device. Not thread-safe."""

    def __init__(self, job: Job) -> None:
        self._storage = job.storage
        self._changes = [*job.storage_changes, (math.inf, 1.0)]
        self._factor = 1.0
        self._now = 0.0
        self.flights: list[Flight] = []

    def begin(self, flight: Flight) -> None:
        """Add a save at the time that `advance` reached."""
        self.flights.append(flight)

    def clear(self) -> None:
        """Drop what is under way: its process is gone."""
        self.flights.clear()

    def advance(self, until_s: float) -> Iterator[tuple[float, Flight]]:
        """Let time pass, and give (time, save) of each save that becomes durable up to `until_s`."""
        while self._now < until_s or self.next_s() <= until_s:
            stop = min(until_s, self.next_s())
            rate, share_s = self._rate(), (stop - self._now) / max(1, len(self.flights))
            for flight in self.flights:
                flight.service_s += share_s
                if not flight.written:
                    flight.left_bytes -= rate * (stop - self._now)
                    # Less than a microsecond's worth is rounding, or what the clock can tell apart, where that is
                    # more; waiting for it could stop the clock.
                    if flight.left_bytes <= rate * (1e-6 + 2 * math.ulp(stop)):
                        flight.written = True
                        flight.ready_s = max(flight.ready_s, stop + self._storage.commit_s)
            self._now = stop
            while self._changes[0][0] <= stop:
                self._factor = self._changes.pop(0)[1]
            for flight in [f for f in self.flights if f.written and f.ready_s <= stop]:
                self.flights.remove(flight)
                yield stop, flight

    def next_s(self) -> float:
        """Give a time before which no save becomes durable, and at which one may: when a wait should look again."""
        rate = self._rate()
        times = [f.ready_s if f.written else self._now + f.left_bytes / rate for f in self.flights]
        return min([*times, self._changes[0][0]])

    def _rate(self) -> float:
        """Give the bytes per second of each write now."""
        writing = sum(not f.written for f in self.flights)
        if not writing:
            return 0.0
        each = min(self._storage.stream_bytes_per_s, self._storage.total_bytes_per_s / writing)
        return each * self._factor
