"""Carries events to observers on a thread of its own (floor 2: imports events, background)."""

from __future__ import annotations

import threading
import time
import warnings
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress

from pccheck.events import Event
from pccheck.saving.background import give_way

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
        # Entered as a lock, which is one step: a Ctrl-C within the Python code that enters a condition left it locked.
        self._state = threading.RLock()
        self._wake = threading.Condition(self._state)
        self._closing = False
        self.dropped = 0
        self._hear: Callable[[Event], bool] | None = None
        self._tick: Callable[[], object] | None = None
        self._every_s: float | None = None
        self._urgent = False
        self._thread = threading.Thread(target=self._run, name="pccheck-notify", daemon=True)
        if observer is not None:
            self.add(observer)

    def add(self, observer: Callable[[Event], object]) -> None:
        """Call one more observer, with the events from now on."""
        with self._state:
            self._observers += (observer,)
            if self._thread.ident is None and not self._closing:
                self._thread.start()

    def remove(self, observer: Callable[[Event], object]) -> None:
        """Call an observer no more, or once more if that has begun; one that is not there is no error."""
        with self._state:
            self._observers = tuple(each for each in self._observers if each != observer)

    def record(self, hear: Callable[[Event], bool], tick: Callable[[], object], every_s: float) -> None:
        """Let a recorder hear every event at once, and tick on the notifier's thread every so many seconds.

        Args:
            hear: called by whoever notifies, so it must be quick; True = tick now. What it raises is dropped.
            tick: called from the first such time on, as long as this is open; likewise.
            every_s: other events wake no thread for it: where trainer and notifier share a core, each wake-up is a
                turn that the trainer does not get.
        """
        self._hear, self._tick, self._every_s = hear, tick, every_s

    def start(self) -> None:
        """Start the thread where anybody is to hear of events: else the first event does, and whoever sends it waits.

        Where the system gives no thread now, the next event asks again.
        """
        with self._state:
            wanted = self._observers or self._tick is not None
            if wanted and self._thread.ident is None and not self._closing:
                with suppress(RuntimeError):
                    self._thread.start()

    def __call__(self, event: Event) -> None:
        """Queue one event."""
        urgent = False
        if self._hear is not None:
            with suppress(Exception):
                urgent = self._hear(event)
        if not self._observers and not urgent and not self._urgent:
            return
        with self._state:
            self._urgent = self._urgent or urgent
            self.start()
            if self._observers:
                if len(self._queue) >= QUEUE_EVENTS:
                    self._queue.popleft()
                    self.dropped += 1
                self._queue.append(event)
            self._wake.notify()

    def _run(self) -> None:
        give_way()
        due_s: float | None = None
        while True:
            with self._state:
                left_s = None if due_s is None else max(0.0, due_s - time.monotonic())
                self._wake.wait_for(lambda: self._queue or self._closing or self._urgent, left_s)
                if not self._queue and self._closing:
                    return
                event, observers = (self._queue.popleft() if self._queue else None), self._observers
                ticks, self._urgent = self._urgent or (due_s is not None and time.monotonic() >= due_s), False
            if event is not None:
                self._tell(event, observers)
            if ticks and self._tick is not None and self._every_s is not None:
                with suppress(BaseException):
                    self._tick()
                due_s = time.monotonic() + self._every_s

    def _tell(self, event: Event, observers: Sequence[Callable[[Event], object]]) -> None:
        for observer in observers:
            try:
                observer(event)
            except BaseException as error:  # an observer's fault is not the checkpoint's, be it a sys.exit()
                with suppress(BaseException):  # warnings may be errors, and others want the next event
                    warnings.warn(f"the observer raised {error!r} on {event!r}", RuntimeWarning, stacklevel=1)

    def close(self, timeout_s: float = 5.0) -> None:
        """Deliver what is queued, for at most `timeout_s`."""
        with self._state:
            self._closing = True
            self._wake.notify()
        if self._thread.ident is not None and self._thread is not threading.current_thread():
            self._thread.join(timeout_s)
