"""What saving costs a trainer, by kind of step, and what each snapshot mode costs (bench: imports contenders, trained).

The state changes as it does in training: through an optimizer's step, after about 100 ms of a forward and backward pass
that is made of many steps of one kind. A save comes right after such a change.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import final

import torch
from torch import nn

from .contenders import Contender, Pccheck, check_restored
from .trained import Leaves, Touch

KINDS = ("tiny operations", "small model", "waiting")


@dataclass(frozen=True, kw_only=True)
class Training:
    """What is trained, and for how long.

    Args:
        leaves: of the state, and bytes of each.
        kinds: of steps to measure, from KINDS.
        pass_s: seconds from change to change.
        short_s: length of a short window, from whose difference lost milliseconds are seen best.
        long_s: length of a long window: with one save in each, that is one checkpoint per so many seconds.
        pairs_s: seconds for pairs of short windows; 0 = lost milliseconds are those of the long ones.
        long_pairs_s: seconds for pairs of long windows.
    """

    leaves: tuple[int, int]
    kinds: tuple[str, ...] = KINDS
    pass_s: float = 0.1
    short_s: float = 0.2
    long_s: float = 1.0
    pairs_s: float = 8.0
    long_pairs_s: float = 6.0


@dataclass(frozen=True, kw_only=True)
class Cost:
    """What one kind of step lost.

    Args:
        lost_ms: trainer milliseconds per checkpoint, of each pair of windows.
        ratio: time per step with one checkpoint per long window over that without, of each pair.
        longest_ms: the longest step while a checkpoint was under way, median of the windows.
    """

    lost_ms: list[float]
    ratio: list[float]
    longest_ms: float


def measure_trainer(contender: Contender, directory: Path, training: Training) -> dict[str, Cost]:
    """Give the cost by kind of step; windows without and with a save alternate.

    Raises AssertionError if what is restored is not the state as it was at the last save.
    """
    torch.set_num_threads(1)
    count, leaf_bytes = training.leaves
    trainer = Trainer(contender, directory, count, leaf_bytes // 4)
    for _ in range(contender.in_flight + 2 if contender.in_flight else 0):
        trainer.save()
        contender.finish()
    found = {kind: _measure_kind(trainer, _STEPS[kind](), training) for kind in training.kinds}
    trainer.check_restored()
    return found


def _measure_kind(trainer: Trainer, step: Callable[[], None], training: Training) -> Cost:
    trainer.set_pace(step, training.pass_s)
    short = _pairs(trainer, max(1, round(training.short_s / training.pass_s)), training.pairs_s)
    long = _pairs(trainer, max(1, round(training.long_s / training.pass_s)), training.long_pairs_s)
    lost = short or long
    return Cost(
        lost_ms=[w.lost_ms for w in lost],
        ratio=[w.ratio for w in long],
        longest_ms=1e3 * statistics.median(w.longest_s for w in lost),
    )


@dataclass(frozen=True, kw_only=True)
class _Pair:
    lost_ms: float
    ratio: float
    longest_s: float


def _pairs(trainer: Trainer, passes: int, seconds: float) -> list[_Pair]:
    """Measure pairs of windows for about so many seconds, and at least three; none for 0 seconds.

    The window with a save goes on until that is durable, so that slow background work is counted in whole: lost is its
    time less that of as many passes at the pace of the window before.
    """
    found: list[_Pair] = []
    until = time.perf_counter() + seconds
    while seconds and (len(found) < 3 or time.perf_counter() < until):
        without_s, _, _ = trainer.window(passes, save=False)
        with_s, done, longest_s = trainer.window(passes, save=True)
        expected_s = done * without_s / passes
        found.append(_Pair(lost_ms=1e3 * (with_s - expected_s), ratio=with_s / expected_s, longest_s=longest_s))
    return found


@final
class Trainer:
    """Changes a state and has a contender save it.

    Args:
        contender: who saves; it is prepared here.
        directory: where to.
        count: leaves of the state.
        elements: of each.
    """

    def __init__(self, contender: Contender, directory: Path, count: int, elements: int) -> None:
        self._contender, self._model = contender, Leaves(count, elements)
        self._optimizer = Touch(self._model)
        contender.prepare(directory)
        self._state = contender.train(self._model, self._optimizer)
        self._saves = 0
        self._step: Callable[[], None] = lambda: None
        self._steps = 1

    def set_pace(self, step: Callable[[], None], pass_s: float) -> None:
        """Take a kind of step, and find how many of it are a forward and backward pass."""
        for _ in range(5):
            step()
        best = float("inf")
        for _ in range(5):
            began = time.perf_counter()
            for _ in range(10):
                step()
            best = min(best, (time.perf_counter() - began) / 10)
        self._step, self._steps = step, max(1, round(pass_s / best))
        self.window(1, save=False)

    def save(self) -> None:
        """Save the state as it is."""
        self._saves += 1
        self._contender.save(self._saves, self._state)

    def change(self) -> None:
        """Change the state as soon as that is allowed."""
        self._contender.fence()
        self._optimizer.step()

    def window(self, passes: int, *, save: bool) -> tuple[float, int, float]:
        """Train for so many passes, with a save before the first until that is durable, too.

        Give the seconds, the passes done, and the seconds of the longest step, of the first one with the call to save.
        """
        longest_s, done = 0.0, 0
        began = now = time.perf_counter()
        if save:
            self.save()
        while done < passes or (save and self._contender.busy()):
            for _ in range(self._steps):
                self._step()
                before, now = now, time.perf_counter()
                longest_s = max(longest_s, now - before)
            self.change()
            now = time.perf_counter()
            done += 1
        took_s = time.perf_counter() - began
        self._contender.finish()
        return took_s, done, longest_s

    def timed_save(self, pause_s: float) -> tuple[float, float]:
        """Save, wait a while, change the state; give the seconds that the save and the gate before the change took."""
        began = time.perf_counter()
        self.save()
        saved = time.perf_counter()
        if pause_s:
            time.sleep(pause_s)
        paused = time.perf_counter()
        self._contender.fence()
        gate_s = time.perf_counter() - paused
        self._optimizer.step()
        return saved - began, gate_s

    def check_restored(self) -> None:
        """Save once more, change the state at once, and compare what is restored with what was saved."""
        self.change()
        check_restored(self._contender, self._model, self._optimizer, self._saves + 1, self._state)


@dataclass(frozen=True, kw_only=True)
class ModeCost:
    """Milliseconds per save of one snapshot mode: save(), and the gate before the next change; the mode at the end."""

    save_ms: list[float]
    gate_ms: list[float]
    mode: str


def measure_mode(
    contender: Pccheck, directory: Path, leaves: tuple[int, int], saves: int, pause_s: float, untimed: int
) -> ModeCost:
    """Give what save() and the gate cost a trainer that changes its state so many seconds after each save.

    Each save is durable before the next, so that none waits for a place or for the disk.
    """
    torch.set_num_threads(1)
    trainer = Trainer(contender, directory, leaves[0], leaves[1] // 4)
    trainer.change()
    times = []
    for _ in range(untimed + saves):
        times.append(trainer.timed_save(pause_s))
        contender.finish()
    trainer.check_restored()
    timed = times[untimed:]
    return ModeCost(save_ms=[1e3 * s for s, _ in timed], gate_ms=[1e3 * g for _, g in timed], mode=contender.picked)


def _tiny_operations() -> Callable[[], None]:
    xs = [torch.randn(16) for _ in range(400)]

    def step() -> None:
        for x in xs:
            (x + 1).mul_(0.5)
        {i: i * 2 for i in range(300)}

    return step


def _small_model() -> Callable[[], None]:
    layers = [part for _ in range(12) for part in (nn.Linear(16, 16), nn.ReLU())]
    model = nn.Sequential(*layers)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    inputs, targets = torch.randn(8, 16), torch.randn(8, 16)

    def step() -> None:
        optimizer.zero_grad()
        nn.functional.mse_loss(model(inputs), targets).backward()  # type: ignore[no-untyped-call]
        optimizer.step()

    return step


def _waiting() -> Callable[[], None]:
    x = torch.randn(16)

    def step() -> None:
        time.sleep(0.004)
        for _ in range(20):
            x.add_(1e-3)

    return step


_STEPS: dict[str, Callable[[], Callable[[], None]]] = dict(
    zip(KINDS, (_tiny_operations, _small_model, _waiting), strict=True)
)
