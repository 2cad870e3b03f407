"""Carries events to observers on a thread of its own (floor 2: imports events)."""

from __future__ import annotations

import threading
import warnings
from collections import deque
from collections.abc import Callable

from pccheck.events import Event

QUEUE_EVENTS = 10_000


class Notifier:
    """Calls observers with every event, in order; never delays whoever notifies.

    Args:
        observer: called on the notifier's thread; what it raises is warned about. None = none yet.

    Observers that fall QUEUE_EVENTS behind lose the oldest events; `dropped` counts them. Thread-safe.
    """

    def __init__(self, observer: Callable[[Event], object] | None) -> None:
        self._observers: tuple[Callable[[Event], object], ...] = ()
        self._queue: deque[Event] = deque()
        self._wake = threading.Condition()
        self._closing = False
        self.dropped = 0
        self._thread = threading.Thread(target=self._run, name="pccheck-notify", daemon=True)
        if observer is not None:
            self.add(observer)

    def add(self, observer: Callable[[Event], object]) -> None:
        """Call one more observer, with the events from now on."""
        with self._wake:
            self._observers += (observer,)
            if self._thread.ident is None and not self._closing:
                self._thread.start()

    def remove(self, observer: Callable[[Event], object]) -> None:
        """Call an observer no more, or once more if that has begun; one that is not there is no error."""
        with self._wake:
            self._observers = tuple(each for each in self._observers if each != observer)

    def __call__(self, event: Event) -> None:
        """Queue one event."""
        if not self._observers:
            return
        with self._wake:
            if len(self._queue) >= QUEUE_EVENTS:
                self._queue.popleft()
                self.dropped += 1
            self._queue.append(event)
            self._wake.notify()

    def _run(self) -> None:
        while True:
            with self._wake:
                self._wake.wait_for(lambda: self._queue or self._closing)
                if not self._queue:
                    return
                event, observers = self._queue.popleft(), self._observers
            for observer in observers:
                try:
                    observer(event)
                except Exception as error:  # an observer's fault is not the checkpoint's
                    warnings.warn(f"the observer raised {error!r} on {event!r}", RuntimeWarning, stacklevel=1)

    def close(self, timeout_s: float = 5.0) -> None:
        """Deliver what is queued, for at most `timeout_s`."""
        with self._wake:
            self._closing = True
            self._wake.notify()
        if self._thread.ident is not None and self._thread is not threading.current_thread():
            self._thread.join(timeout_s)
