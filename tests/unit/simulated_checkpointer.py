"""What a Controller sees of a Checkpointer, in simulated time: saves share a storage, steps take what they take."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from dataclasses import replace

from pccheck.control.controller import Controller
from pccheck.events import Event, Failed, IntervalChosen, Published, Returned
from pccheck.options import Options
from pccheck.ranks.agreement import Agreement
from pccheck.ranks.coordination import Solo
from pccheck.saving.stats import Stats
from tests.unit.law_loop import Storage

OPTIONS = Options(
    in_flight=2, keep=1, keep_every=None, buffer_bytes=None, chunk_bytes=16 << 20, writers=2,
    writers_per_checkpoint=None, snapshot="copy", when_full="block", max_block_s=None, on_error="raise",
    write_timeout_s=3600.0, lock_timeout_s=10.0, exit_timeout_s=60.0, agree_timeout_s=600.0, pipeline="auto",
    replicated=False, debug_captures=False,
)  # fmt: skip


class SimulatedCheckpointer:
    """Saves take a share of the storage each; `save` blocks, in simulated time, for a place and for `stall_s`.

    Attributes:
        now: the time.
        saved: (time, step) of each save.
        waited_s: for places, in all.
        fails: whether saves fail rather than become durable.
    """

    rank, world, path = 0, 1, "/no/such/store"

    def __init__(self, storage: Storage, *, in_flight: int = 2, stall_s: Callable[[float], float] = lambda now: 0.0):
        self.options = replace(OPTIONS, in_flight=in_flight)
        self.agreement = Agreement(Solo())
        self.now, self.saved, self.waited_s, self.fails = 0.0, [], 0.0, False
        self.told: list[Event] = []
        self._storage, self._stall_s, self._stats = storage, stall_s, Stats()
        self._left: list[float] = []
        self._begun: list[tuple[int, int, float]] = []  # step, counter, when
        self._observers: list[Callable[[Event], object]] = []

    def clock(self) -> float:
        return self.now

    def subscribe(self, observer) -> None:
        self._observers.append(observer)

    def unsubscribe(self, observer) -> None:
        self._observers.remove(observer)

    def tell(self, event: Event) -> None:
        self.told.append(event)
        for observer in self._observers:
            observer(event)

    def stats(self) -> Stats:
        return self._stats

    @property
    def counter(self) -> int:
        return self._stats.saves

    @property
    def busy(self) -> bool:
        return bool(self._left)

    def advance(self, until: float) -> None:
        while self._left and self.now < until:
            self.now, self._left = self._storage.run(self.now, until, self._left)
            while self._left and min(self._left) <= 1e-9:
                at = self._left.index(min(self._left))
                self._left.pop(at)
                step, counter, began = self._begun.pop(at)
                if self.fails:
                    self._stats = replace(self._stats, failed=self._stats.failed + 1)
                    self.tell(Failed(step=step, counter=counter, error=OSError("no disk")))
                else:
                    self._stats = replace(self._stats, committed=self._stats.committed + 1)
                    self.tell(Published(step=step, counter=counter, slot=0, seconds=self.now - began))
        self.now = max(self.now, until)

    def save(self, step: int, state: object, *, metadata=None) -> None:
        began = self.now
        while len(self._left) >= self.options.in_flight:
            self.advance(self.now + 0.01)
        waited_s = self.now - began
        self.waited_s += waited_s
        counter = self._stats.saves + 1
        self.saved.append((self.now, step))
        self._left.append(1.0)
        self._begun.append((step, counter, self.now))
        self.advance(self.now + self._stall_s(self.now))
        seconds, had = self.now - began, self._stats
        self._stats = replace(
            had, saves=had.saves + 1, save_s=had.save_s + seconds, slot_wait_s=had.slot_wait_s + waited_s
        )
        self.tell(Returned(step=step, counter=counter, seconds=seconds, slot_wait_s=waited_s, copy_wait_s=0.0))


class Run:
    """A training loop in simulated time with a Controller.

    Args:
        ck: saves.
        controller: decides.
        step_s: of a step alone, by time.
        slowed: what a step takes longer while a save is in flight, as a share of it, by time.
        noise: standard deviation of a step, as a share of it.
        pause_s: what a step takes longer, by its number.
    """

    def __init__(
        self, ck: SimulatedCheckpointer, controller: Controller, *, step_s=lambda now: 1.0, slowed=lambda now: 0.0,
        noise=0.0, pause_s=lambda step: 0.0, seed=1,
    ) -> None:  # fmt: skip
        self.ck, self.controller, self.step = ck, controller, 0
        self._step_s, self._slowed, self._noise, self._pause_s = step_s, slowed, noise, pause_s
        self._random = random.Random(seed)
        self.spent: list[tuple[float, float, float]] = []  # of each step: when it ended, its seconds, and alone

    def until(self, now: float) -> Run:
        while self.ck.now < now:
            began = self.ck.now
            alone = self._step_s(began)
            noise = alone * self._noise * self._random.gauss(0, 1)
            slowed = alone * (self._slowed(began) if self.ck.busy else 0.0)
            self.ck.advance(began + max(0.1 * alone, alone + slowed + noise) + self._pause_s(self.step))
            if self.controller.due(self.step):
                self.ck.save(self.step, None)
            self.spent.append((self.ck.now, self.ck.now - began - noise - self._pause_s(self.step), alone))
            self.step += 1
        return self

    @property
    def decisions(self) -> list[IntervalChosen]:
        return list(self.controller.decisions)

    def intervals(self) -> list[tuple[float, int, float]]:
        """Of each interval between saves: when it began, its steps, and what checkpoints added, as a share."""
        saves = [at for at, _ in self.ck.saved]
        found = []
        for began, ended in itertools.pairwise(saves):
            steps = [(spent, alone) for at, spent, alone in self.spent if began < at <= ended]
            found.append((began, len(steps), sum(s for s, _ in steps) / sum(a for _, a in steps) - 1))
        return found
