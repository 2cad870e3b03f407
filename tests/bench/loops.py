"""Training loops, without and with checkpoints in turn within one process (bench: imports contenders, states)."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from .contenders import Contender
from .states import Marks, State, differences, gpt_state


@dataclass(frozen=True, kw_only=True)
class Loop:
    """What a training loop does.

    Args:
        state_bytes: size of the state.
        step_s: seconds of one step.
        every: steps from save to save.
        python: the step holds the interpreter lock (pure Python work); else it waits outside of it.
        lead: saves before the clock starts, so that pipelines are full and the steady state is what is measured.
        intervals: saves that are measured, with the steps that follow each.
        intervals_without: at most so many are measured without checkpoints, where no disk makes a difference.
        pairs: how many times the loop without and the loop with checkpoints alternate.
        warm_up: saves before all, each waited for, so that every slot was written and every buffer touched.
    """

    state_bytes: int
    step_s: float
    every: int
    python: bool = False
    lead: int = 1
    intervals: int = 3
    intervals_without: int = 40
    pairs: int = 1
    warm_up: int = 3


@dataclass(frozen=True, kw_only=True)
class Slowdown:
    """What a process measured.

    Args:
        ratio: time with checkpoints over time without, median of its pairs.
        worst_step_s: the longest step with checkpoints.
        restored: the step whose state was restored, equal to the expected in every bit; None = saves nothing.
    """

    ratio: float
    worst_step_s: float
    restored: int | None


def measure_slowdown(contender: Contender, directory: Path, loop: Loop) -> Slowdown:
    """Alternate loops without and with checkpoints; afterwards restore the last one and compare every bit.

    Raises AssertionError if what comes back is not the state of the last save.
    """
    state = gpt_state(loop.state_bytes)
    marks, compute = Marks(state), _python_step(loop.step_s) if loop.python else _waiting_step(loop.step_s)
    contender.prepare(directory)
    run = _Run(contender, state, marks, compute, loop)
    for _ in range(loop.warm_up):
        run.save_next()
        contender.finish()
    ratios = []
    for _ in range(loop.pairs):
        without_s = run.window(save=False)
        ratios.append(run.window(save=True) / without_s)
        contender.finish()
    restored = contender.restore(state)
    if restored is not None:
        marks.set(run.last_saved)
        differing = differences(restored, state)
        assert not differing, f"{contender.name} restored another state than step {run.last_saved}: {differing[:5]}"
    return Slowdown(
        ratio=statistics.median(ratios),
        worst_step_s=run.worst_step_s,
        restored=None if restored is None else int(restored["progress"]["step"]),
    )


class _Run:
    """One process's loop: steps count on over all windows."""

    def __init__(
        self, contender: Contender, state: State, marks: Marks, compute: Callable[[], None], loop: Loop
    ) -> None:
        self._contender, self._state, self._marks, self._compute = contender, state, marks, compute
        self._loop = loop
        self._step = 0
        self.last_saved = -1
        self.worst_step_s = 0.0

    def save_next(self) -> None:
        """Change the state and save it."""
        self._step += 1
        self._contender.fence()
        self._marks.set(self._step)
        self._save()

    def _save(self) -> None:
        self._contender.save(self._step, self._state)
        self.last_saved = self._step

    def window(self, *, save: bool) -> float:
        """Give the seconds per measured step: compute, fence, change the state, save when it is time."""
        loop, lead = self._loop, self._loop.lead if save else 0
        measured = loop.intervals if save else min(loop.intervals, loop.intervals_without)
        began = time.perf_counter()
        for i in range((lead + measured) * loop.every):
            step_began = time.perf_counter()
            if i == lead * loop.every:
                began = step_began
            self._step += 1
            self._compute()
            self._contender.fence()
            self._marks.set(self._step)
            if save and i % loop.every == 0:
                self._save()
            if save and i >= lead * loop.every:
                self.worst_step_s = max(self.worst_step_s, time.perf_counter() - step_began)
        return (time.perf_counter() - began) / (measured * loop.every)


def _waiting_step(seconds: float) -> Callable[[], None]:
    return lambda: time.sleep(seconds)


def _python_step(seconds: float) -> Callable[[], None]:
    """Give a fixed amount of pure Python work, which takes about `seconds` undisturbed."""

    def work(units: int) -> int:
        total = 0
        for i in range(units):
            total += i & 3
        return total

    probe = max(1000, int(2_000_000 * min(1.0, seconds)))
    best = float("inf")
    for _ in range(9):
        began = time.perf_counter()
        work(probe)
        best = min(best, time.perf_counter() - began)
    units = int(probe * seconds / best)

    def step() -> None:
        work(units)

    return step
