"""Carries events to the observer on a thread of its own (floor 2: imports events)."""

from __future__ import annotations

import threading
import warnings
from collections import deque
from collections.abc import Callable

from pccheck.events import Event

QUEUE_EVENTS = 10_000


class Notifier:
    """Calls one observer with every event, in order; never delays whoever notifies.

    Args:
        observer: called on the notifier's thread; what it raises is warned about. None = events are dropped.

    An observer that falls QUEUE_EVENTS behind loses the oldest events; `dropped` counts them. Thread-safe.
    """

    def __init__(self, observer: Callable[[Event], object] | None) -> None:
        self._observer = observer
        self._queue: deque[Event] = deque()
        self._wake = threading.Condition()
        self._closing = False
        self.dropped = 0
        self._thread = threading.Thread(target=self._run, name="pccheck-notify", daemon=True)
        if observer is not None:
            self._thread.start()

    def __call__(self, event: Event) -> None:
        """Queue one event."""
        if self._observer is None:
            return
        with self._wake:
            if len(self._queue) >= QUEUE_EVENTS:
                self._queue.popleft()
                self.dropped += 1
            self._queue.append(event)
            self._wake.notify()

    def _run(self) -> None:
        assert self._observer is not None
        while True:
            with self._wake:
                self._wake.wait_for(lambda: self._queue or self._closing)
                if not self._queue:
                    return
                event = self._queue.popleft()
            try:
                self._observer(event)
            except Exception as error:  # an observer's fault is not the checkpoint's
                warnings.warn(f"the observer raised {error!r} on {event!r}", RuntimeWarning, stacklevel=1)

    def close(self, timeout_s: float = 5.0) -> None:
        """Deliver what is queued, for at most `timeout_s`."""
        with self._wake:
            self._closing = True
            self._wake.notify()
        if self._observer is not None and self._thread is not threading.current_thread():
            self._thread.join(timeout_s)
