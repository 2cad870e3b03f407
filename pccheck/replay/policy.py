"""What decides when to save in a simulation (floor 0: imports tuning.windows)."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod

from pccheck.tuning.windows import Window


class Watch:
    """What a trainer measures between two decisions. Not thread-safe.

    Args:
        noise: standard deviation of the time of one step, as a share of it, of which the trainer knows.

    Attributes:
        running: saves under way.
        oldest_s: since the oldest of them was begun; 0 = none is.
        steps, clean: done, and those of them beside which no save was under way.
        saves: begun.
        held_back: a save was due, but there was no place for it: set by who decides.
    """

    def __init__(self, noise: float) -> None:
        self._noise = noise
        self.running, self.oldest_s = 0, 0.0
        self._all_steps, self._all_s = 0, 0.0  # since the process began: what the mean is taken of
        self.cut()

    def cut(self) -> None:
        """Begin anew."""
        self.steps = self.clean = self.saves = 0
        self.work_s = self.stall_s = self.slot_wait_s = 0.0
        self.held_back = False
        self.durable_s: float | None = None
        self.service_s: float | None = None

    def worked(self, steps: int, seconds: float, clean: int) -> None:
        """Add steps, and how many of them had no save under way beside them."""
        self.steps, self.work_s, self.clean = self.steps + steps, self.work_s + seconds, self.clean + clean
        self._all_steps, self._all_s = self._all_steps + steps, self._all_s + seconds

    def landed(self, durable_s: float, service_s: float) -> None:
        """Add a save that became durable."""
        self.durable_s = max(durable_s, self.durable_s or 0.0)
        self.service_s = max(service_s, self.service_s or 0.0)

    def window(self) -> Window:
        """Give it all; there is at least one step."""
        step_s = self._all_s / self._all_steps
        return Window(
            steps=self.steps,
            step_s=step_s,
            window_s=self.work_s + self.stall_s + self.slot_wait_s,
            saves=self.saves,
            durable_s=self.durable_s,
            service_s=self.service_s,
            stall_s=self.stall_s,
            slot_wait_s=self.slot_wait_s,
            held_back=self.held_back,
            error_s=self._noise * math.sqrt(self.steps) * step_s,
        )


class Policy(ABC):
    """Decides when to save. One object serves one run; not thread-safe.

    Attributes:
        name: for people.
        in_flight: checkpoints under way at once; a save beyond them waits for one to be durable.
        waits: the trainer goes on only when its checkpoint is durable.
    """

    name: str
    in_flight: int
    waits: bool = False

    @property
    @abstractmethod
    def interval(self) -> int:
        """Steps from the last save, or the restart, to the next one; 1 or more."""

    def asked(self, watch: Watch) -> int:
        """Decide, now that a save is due: 0 = make it, else the steps to go on before to ask again.

        `watch` tells what was measured; `watch.cut()` begins anew. By default each save is made.
        """
        watch.cut()
        return 0

    @abstractmethod
    def restarted(self, *, up_s: float, failures: int) -> None:
        """Start anew in a new process, with what a history file would tell: seconds up so far, and failures."""
