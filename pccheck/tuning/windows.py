"""What is measured while a job runs, and what is decided from it (floor 0: imports nothing of pccheck)."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Window:
    """What was measured over some steps, most often those from one save to the next.

    Args:
        steps: how many, 1 or more.
        step_s: seconds of a step that no checkpoint disturbs (t).
        window_s: seconds of all these steps, without pauses that are no checkpoint's fault.
        saves: that began in it.
        durable_s: the worst time from `save()` to durable of those that became durable in it; None = none did.
        service_s: the worst time that one took of storage, had it been alone (the integral of dt over the number in
            flight): what storage can serve one checkpoint in. None = taken from durable_s by Little's law.
        stall_s: of window_s, what the trainer is known to have waited for in `save()` and fences, but for slot_wait_s.
        slot_wait_s: of window_s, waits for a place among the checkpoints in flight.
        held_back: a save was due, but waited for such a place while training went on.
        error_s: standard error of window_s - steps * step_s, by the noise of these steps.
        shared_error_s: and by the error of step_s, which is much the same in the windows before and after.
        pause_s: seconds that were left out of window_s; they count for the rate of failures.
    """

    steps: int
    step_s: float
    window_s: float
    saves: int = 1
    durable_s: float | None = None
    service_s: float | None = None
    stall_s: float = 0.0
    slot_wait_s: float = 0.0
    held_back: bool = False
    error_s: float = 0.0
    shared_error_s: float = 0.0
    pause_s: float = 0.0

    @property
    def overhead(self) -> float:
        """What checkpoints added to the time of the steps, as a share of it; may be negative by noise."""
        return self.window_s / (self.steps * self.step_s) - 1


@dataclass(frozen=True, kw_only=True)
class Decision:
    """A new interval, and why.

    Args:
        interval: steps from checkpoint to checkpoint from now on.
        before: what it was.
        reason: in words.
        step_s, stall_s, durable_s: what it was worked out from: t, c and T_w.
        overhead: measured over the last window, a share of the undisturbed time.
        mtbf_s: the rate of failures that was assumed; None = not known.
    """

    interval: int
    before: int
    reason: str
    step_s: float
    stall_s: float
    durable_s: float
    overhead: float
    mtbf_s: float | None
