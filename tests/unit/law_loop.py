"""A training loop in simulated time that an IntervalLaw drives: storage shared by the saves in flight, noisy steps."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass, field

from pccheck.tuning.law import Decision, IntervalLaw, Window


@dataclass
class Storage:
    """Serves checkpoints side by side: each of them at most at `alone` of its size per second, all at most at `all`.

    Both are rates in checkpoints per second, and may depend on the time.
    """

    alone: Callable[[float], float]
    total: Callable[[float], float]

    def run(self, now: float, until: float, left: list[float]) -> tuple[float, list[float]]:
        """Serve until a time, or until the first is served; give the time, and what is left of each."""
        while left and now < until:
            rate = min(self.alone(now), self.total(now) / len(left))
            slice_s = min(until - now, 0.05, min(left) / rate)
            left = [each - rate * slice_s for each in left]
            now += slice_s
            if min(left) <= 1e-9:
                break
        return (now if left else max(now, until)), left


@dataclass
class Interval:
    """What happened in one."""

    began_s: float
    steps: int
    overhead: float
    decision: Decision | None


@dataclass
class Loop:
    """Trains: steps, saves each `law.interval` steps, waits for a place, tells the law of each interval.

    Args:
        law: what is driven.
        storage: what serves the saves.
        step_s: of a step alone, by time.
        stall_s: what a save costs the trainer at once, by time.
        slowed: what a step takes longer while a save is in flight, by time, as a share of it.
        noise: standard deviation of a step, as a share of it.
        holds: whether a save that would wait for a place is held back instead, while training goes on.
    """

    law: IntervalLaw
    storage: Storage
    in_flight: int
    step_s: Callable[[float], float] = lambda now: 1.0
    stall_s: Callable[[float], float] = lambda now: 0.0
    slowed: Callable[[float], float] = lambda now: 0.0
    noise: float = 0.0
    holds: bool = False
    seed: int = 1
    now: float = 0.0
    left: list[float] = field(default_factory=list)
    began: list[float] = field(default_factory=list)
    ended: list[float] = field(default_factory=list)
    history: list[Interval] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)
        self.served: list[float] = []
        self.service: list[float] = []

    def advance(self, until: float) -> None:
        while self.left and self.now < until:
            before, k = self.now, len(self.left)
            self.now, self.left = self.storage.run(self.now, until, self.left)
            self.service = [each + (self.now - before) / k for each in self.service]
            while self.left and min(self.left) <= 1e-9:
                at = self.left.index(min(self.left))
                self.left.pop(at)
                self.ended.append(self.now - self.began.pop(at))
                self.served.append(self.service.pop(at))
        self.now = max(self.now, until)

    def step(self) -> tuple[float, float]:
        """Do a step; give its seconds and what of it was noise."""
        t = self.step_s(self.now)
        seconds = t * (1 + (self.slowed(self.now) if self.left else 0.0))
        seconds = max(0.1 * t, seconds + t * self.noise * self.random.gauss(0, 1))
        self.advance(self.now + seconds)
        return seconds, t

    def would_wait(self) -> bool:
        """Tell whether a save would wait for a place for longer than the slowdown that is allowed."""
        if len(self.left) < self.in_flight:
            return False
        rate = min(self.storage.alone(self.now), self.storage.total(self.now) / len(self.left))
        return min(self.left) / rate > 0.05 * self.law.interval * self.step_s(self.now)

    def interval(self, saves: int) -> None:
        """Train until the next save begins, and tell the law."""
        began, steps, work_s, loaded, held, spent = self.now, 0, 0.0, 0, False, 0.0
        slot_wait_s = stall_s = 0.0
        if saves:
            while len(self.left) >= self.in_flight:
                before = self.now
                self.advance(self.now + 0.01)
                slot_wait_s += self.now - before
            stall_s = self.stall_s(self.now)
            self.advance(self.now + stall_s)
            self.left.append(1.0)
            self.began.append(self.now)
            self.service.append(0.0)
        while steps < self.law.interval or (self.holds and self.would_wait()):
            held |= steps >= self.law.interval
            beside = bool(self.left)
            seconds, t = self.step()
            steps, work_s, loaded = steps + 1, work_s + t, loaded + beside
            spent += seconds if beside else t
        t = work_s / steps
        ages = [self.now - one for one in self.began]
        done = self.ended
        durable = max([*done, *(a for a in ages if done and a > max(done))], default=None)
        window_s = spent + stall_s + slot_wait_s
        decision = self.law.observed(
            Window(
                steps=steps, step_s=t, window_s=window_s, saves=saves, durable_s=durable,
                service_s=max(self.served, default=None), stall_s=stall_s, slot_wait_s=slot_wait_s, held_back=held,
                error_s=t * self.noise * math.sqrt(loaded),
            )
        )  # fmt: skip
        self.ended, self.served = [], []
        self.history.append(Interval(began, steps, (self.now - began) / work_s - 1, decision))

    def run(self, intervals: int) -> Loop:
        for _ in range(intervals):
            self.interval(1 if self.history else 0)
        return self

    def run_until(self, now: float) -> Loop:
        while self.now < now:
            self.interval(1 if self.history else 0)
        return self
