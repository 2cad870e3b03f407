"""Training loops, without and with checkpoints in turn within one process (bench: imports contenders, states)."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, final

from .contenders import Saver
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
        blocked_ms: what the trainer waited for each save, in `save` and in `fence`.
        restored: the step whose state was restored, equal to the expected in every bit; None = saves nothing.
    """

    ratio: float
    worst_step_s: float
    blocked_ms: list[float]
    restored: int | None


class Trained(Protocol):
    """A state that training changes."""

    @property
    def state(self) -> Any:
        """What is saved, as it is now."""

    def set(self, step: int) -> None:
        """Change the state: it is now that of `step`, one more than before."""

    def differences(self, restored: Any, step: int) -> list[str]:
        """Give what of a restored state is not that of `step`; the state may be another one afterwards."""

    def step_of(self, restored: Any) -> int:
        """Give the step that a restored state says."""


def measure_slowdown(contender: Saver, directory: Path, loop: Loop) -> Slowdown:
    """Measure a loop that trains tensors; raises as `measure_loop`."""
    return measure_loop(contender, directory, loop, _Tensors(gpt_state(loop.state_bytes)))


def measure_loop(contender: Saver, directory: Path, loop: Loop, trained: Trained) -> Slowdown:
    """Alternate loops without and with checkpoints; afterwards restore the last one and compare every bit.

    Raises AssertionError if what comes back is not the state of the last save.
    """
    compute = _python_step(loop.step_s) if loop.python else _waiting_step(loop.step_s)
    contender.prepare(directory)
    run = _Run(contender, trained, compute, loop)
    for _ in range(loop.warm_up):
        run.save_next()
        contender.finish()
    ratios = []
    for _ in range(loop.pairs):
        without_s = run.window(save=False)
        ratios.append(run.window(save=True) / without_s)
        contender.finish()
    restored = contender.restore(trained.state)
    if restored is not None:
        differing = trained.differences(restored, run.last_saved)
        assert not differing, f"{contender.name} restored another state than step {run.last_saved}: {differing[:5]}"
    return Slowdown(
        ratio=statistics.median(ratios),
        worst_step_s=run.worst_step_s,
        blocked_ms=[1e3 * s for s in run.blocked_s],
        restored=None if restored is None else trained.step_of(restored),
    )


@final
class _Tensors:
    """Tensors that are marked in place."""

    def __init__(self, state: State) -> None:
        self.state, self._marks = state, Marks(state)

    def set(self, step: int) -> None:
        self._marks.set(step)

    def differences(self, restored: State, step: int) -> list[str]:
        self._marks.set(step)
        return differences(restored, self.state)

    def step_of(self, restored: State) -> int:
        return int(restored["progress"]["step"])


class _Run:
    """One process's loop: steps count on over all windows."""

    def __init__(self, contender: Saver, trained: Trained, compute: Callable[[], None], loop: Loop) -> None:
        self._contender, self._trained, self._compute = contender, trained, compute
        self._loop = loop
        self._step = 0
        self.last_saved = -1
        self.worst_step_s = 0.0
        self.blocked_s: list[float] = []

    def save_next(self) -> None:
        """Change the state and save it."""
        self._step += 1
        self._contender.fence()
        self._trained.set(self._step)
        self._save(self._trained.state)

    def _save(self, state: Any) -> None:
        self._contender.save(self._step, state)
        self.last_saved = self._step

    def _fence(self) -> float:
        began = time.perf_counter()
        self._contender.fence()
        return time.perf_counter() - began

    def window(self, *, save: bool) -> float:
        """Give the seconds per measured step: compute, fence, change the state, collect and save it when it is time."""
        loop, lead = self._loop, self._loop.lead if save else 0
        measured = loop.intervals if save else min(loop.intervals, loop.intervals_without)
        began = time.perf_counter()
        for i in range((lead + measured) * loop.every):
            step_began = time.perf_counter()
            if i == lead * loop.every:
                began = step_began
            self._step += 1
            self._compute()
            fenced_s = self._fence()
            self._trained.set(self._step)
            saved = time.perf_counter()
            if i % loop.every == 0:
                # Without checkpoints, too: 150 jax arrays put into a tree slow down pure Python by 1 to 2 % for
                # the five steps that follow, which is not the doing of who saves.
                state = self._trained.state
                if save:
                    self._save(state)
                del state
            if save and i >= lead * loop.every:
                if i % loop.every == 0:
                    self.blocked_s.append(time.perf_counter() - saved)
                else:
                    self.blocked_s[-1] += fenced_s
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
