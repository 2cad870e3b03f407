"""How the threads behind `save()` are scheduled (floor 1: imports nothing of pccheck)."""

from __future__ import annotations

import os


def give_way() -> None:
    """Let the calling thread wait for the end of a turn when it wakes, rather than take the waker's core at once.

    The trainer wakes these threads in `save()`, and where it shares a core with them it stood still for half a
    millisecond until they slept again (measured). Where the system refuses, nothing but that is lost. Native threads do
    the same.
    """
    if hasattr(os, "SCHED_BATCH"):
        try:
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
        except OSError:
            pass
