"""Hears the signal that announces the end, for whoever asks for that (floor 1: imports errors).

The one room that sets signal handlers, and only while its `with` block runs.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterable, Sequence
from types import FrameType, TracebackType
from typing import Any, Self, final

from pccheck.errors import OptionError, UsageError


@final
class Notice:
    """Notes when a signal came, while its `with` block runs, and how much time that leaves. Thread-safe.

        with Notice(seconds=30) as notice:
            for step in range(start, steps):
                train_step()
                if notice.given:
                    controller.save_by(step, state, notice.remaining())
                    break

    The handler does nothing but note the time: the process goes on, and it is for the loop to look. The handlers that
    were there come back at the end of the block. A signal that came is not sent again: where the process is to end,
    let it end.

    Args:
        seconds: from the signal to the end, as the scheduler or the cloud says: 30 for most spot machines, `KillWait`
            under Slurm, `terminationGracePeriodSeconds` in Kubernetes.
        signals: which ones, one or more, each once.

    Raises:
        OptionError: seconds is negative, or a signal cannot be handled.
        UsageError: it is entered while it is entered already, or in another thread than the main one, where Python sets
            no handlers.
    """

    def __init__(self, seconds: float, *, signals: Sequence[int] = (signal.SIGTERM,)) -> None:
        if isinstance(seconds, bool) or not isinstance(seconds, (int, float)) or not 0 <= seconds < 1e9:
            raise OptionError("seconds", seconds, "a number of seconds from 0 to 1e9")
        self.seconds, self.signals = float(seconds), _numbers(signals)
        self._at_s: float | None = None
        self._entered = False
        self._before: dict[int, Any] = {}

    @property
    def given(self) -> bool:
        """Whether the signal came."""
        return self._at_s is not None

    def remaining(self) -> float:
        """Give the seconds until the end, 0 once they are over; infinite while no signal came."""
        at_s = self._at_s
        return float("inf") if at_s is None else max(0.0, at_s + self.seconds - time.monotonic())

    def _hear(self, number: int, frame: FrameType | None) -> None:
        if self._at_s is None:  # the second one does not bring more time
            self._at_s = time.monotonic()

    def __enter__(self) -> Self:
        if threading.current_thread() is not threading.main_thread():
            raise UsageError("a Notice must be entered in the main thread: Python sets signal handlers nowhere else")
        if self._entered:  # it would take its own handler for the one that was there, and that one would be lost
            raise UsageError("this Notice is entered already: leave its `with` block first, or make another Notice")
        try:
            self._entered = True
            for number in self.signals:
                self._before[number] = signal.getsignal(number)  # first: whatever comes between, it is put back
                signal.signal(number, self._hear)
        except (OSError, ValueError, TypeError, OverflowError) as error:
            self._before.pop(number, None)  # this one cannot be set
            self._restore()
            raise OptionError("signals", self.signals, f"signals that can be handled ({error})") from error
        except BaseException:  # a Ctrl-C
            self._restore()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._restore()

    def _restore(self) -> None:
        while self._before:
            number, handler = next(iter(self._before.items()))
            # None: a handler that was not set from Python, which Python cannot set again.
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
            self._before.pop(number)
        self._entered = False

    def __repr__(self) -> str:
        return f"<Notice: {self.remaining():.1f} s remain>" if self.given else "<Notice: none was given>"


def _numbers(signals: object) -> tuple[int, ...]:
    numbers = tuple(signals) if isinstance(signals, Iterable) and not isinstance(signals, (str, bytes)) else ()
    whole = all(isinstance(one, int) and not isinstance(one, bool) for one in numbers)
    if not numbers or not whole or len(set(numbers)) < len(numbers):
        raise OptionError("signals", signals, "numbers of signals, such as (signal.SIGTERM,), each once")
    return numbers
