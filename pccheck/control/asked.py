"""What may be asked of a Controller, checked at the call (floor 0: imports errors)."""

from __future__ import annotations

import math
from collections.abc import Callable

from pccheck.errors import OptionError, UsageError

_ENDLESS_S = 1e8  # more than any wait can take


def seconds_left(value: object) -> float:
    """Give seconds from 0 on, and no more than any wait can take; raises OptionError."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or value != value:
        raise OptionError("seconds", value, "a number of seconds")
    return float(min(max(0.0, value), _ENDLESS_S))


def clock_of(clock: Callable[[], float]) -> Callable[[], float]:
    """Give a clock that was asked once; raises OptionError for what gives no seconds."""
    now_s = clock() if callable(clock) else None
    if isinstance(now_s, bool) or not isinstance(now_s, (int, float)) or not math.isfinite(now_s):
        raise OptionError("clock", clock, "a function that gives seconds, as time.monotonic does")
    return clock


def entered(call: str) -> UsageError:
    """Give the error of a call that came while another was at work."""
    return UsageError(
        f"{call}() was called while another call of this Controller was at work, from a signal handler or another "
        "thread: have the handler set a flag, as pccheck.control.notice.Notice does, and call it from the loop"
    )
