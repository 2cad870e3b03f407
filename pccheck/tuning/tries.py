"""Tries of shorter intervals than storage was seen to keep up with, once in a while (floor 0: imports tuning.windows).

Several checkpoints at once may get more out of storage than one alone: a network disk limits each stream, a local disk
does not. Whether they do is only seen by trying.
"""

from __future__ import annotations

from typing import final

from pccheck.tuning.windows import Window

_AFTER = 4  # calm windows before a try
_RARELY = 64  # windows, at most, between tries: twice as many after each that failed
_WINDOWS = 3  # until the saves of the interval tried are what is measured
_SHARED = 1.1  # a checkpoint that takes this much longer beside others shares what storage can do
_OTHER_STORAGE = 1.4  # times as fast or as slow: what failed on it before may be tried again soon


@final
class Tries:
    """Tells when to try, and whether a try has failed. Not thread-safe.

    Attributes:
        before: the interval before the try under way; None = none is under way.
    """

    def __init__(self) -> None:
        self.before: int | None = None
        self._durable_s = self._service_s = self._failed_at_s = 0.0  # before it; and before the last that failed
        self._windows = self._steady = 0
        self._after = _AFTER

    def begin(self, before: int, durable_s: float, service_s: float) -> None:
        """Begin a try, from an interval at which a checkpoint took so long until durable, and of storage."""
        self.before, self._durable_s, self._service_s = before, durable_s, service_s
        self._windows = self._steady = 0

    def fails(self, window: Window) -> bool:
        """Tell whether checkpoints now take longer, each: together they get no more than one alone did."""
        slower = window.durable_s is not None and window.durable_s > _SHARED * self._durable_s
        return slower or window.held_back or window.slot_wait_s > 0

    def passes(self, window: Window) -> bool:
        """Count a window of the try under way in which it did not fail; tell whether storage has kept up with it."""
        self._windows += 1
        if self._windows < _WINDOWS or window.durable_s is None:
            return False
        self.before, self._after, self._steady = None, _AFTER, _AFTER
        return True

    def disturbed(self) -> None:
        """Note that the interval goes up: if a try is under way, it has failed."""
        if self.before is not None:
            self.before, self._failed_at_s = None, self._service_s
            self._after = min(2 * self._after, _RARELY)
        self._steady = 0

    def unsteady(self) -> None:
        """Note that the interval is on its way down."""
        self._steady = 0

    def are_due(self, service_s: float) -> bool:
        """Count a steady window, in which a checkpoint took so much of storage; tell whether to try."""
        if self._failed_at_s and not 1 / _OTHER_STORAGE < service_s / self._failed_at_s < _OTHER_STORAGE:
            self._after, self._failed_at_s = _AFTER, 0.0
        self._steady += 1
        return self._steady > self._after
