"""The Controller's loop on a disk that gets slower and recovers (bench: imports disks, lab, scale, states, tables)."""

from __future__ import annotations

import os
import statistics
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

import pccheck
from pccheck.events import Published
from pccheck.storage.directory import Directory
from pccheck.testing.throttle import ThrottledVolume

from .disks import SlowDisk
from .lab import emptied
from .scale import Bench, size_text
from .states import MIB, Marks, gpt_state, size_of
from .tables import Cell, Figure, Table

_BOUND = 0.05
_IN_FLIGHT = 2
_WITHIN, _BACK_WITHIN = 2, 10  # intervals until overhead is under its bound, and until the interval is what it was
_SAME = 1.15  # an interval that is no more than this times what it was, or a step longer, is back


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What is done.

    Args:
        state_bytes: of the state.
        step_s: of a step.
        mib_per_s: of the disk; a third of it while it is slow.
        intervals: that pass before the disk gets slow, while it is, and after.
        baseline_steps: without saves, before all.
    """

    state_bytes: int
    step_s: float
    mib_per_s: float
    intervals: tuple[int, int, int]
    baseline_steps: int


@dataclass(frozen=True, kw_only=True)
class Passed:
    """One interval from save to save: its phase, steps, the time they took over that without saves, and until durable.

    `durable_s` is of the newest checkpoint that was durable by then; 0 = none was.
    """

    phase: str
    steps: int
    overhead: float
    durable_s: float


@final
class _Changing:
    """A rate of `pccheck.testing.throttle` that may change at any time, for the transfers that begin from then on."""

    def __init__(self, mib_per_s: float) -> None:
        self.mib_per_s = mib_per_s

    def end(self, start_s: float, count: float) -> float:
        return start_s + count / (self.mib_per_s * MIB)


def measure_controller(directory: Path, plan: Plan, disk: SlowDisk | None) -> tuple[list[Passed], list[str]]:
    """Train with a Controller on a disk that changes; give each interval, and the decisions in words.

    Args:
        directory: of the store.
        plan: what is done.
        disk: whose rate is changed; None = a medium made slow by `pccheck.testing.throttle`.
    """
    rate = _Changing(plan.mib_per_s)
    where: Any = directory
    if disk is None:
        inner = Directory(os.fspath(directory), create=True, write=True)
        where = ThrottledVolume(inner, total=rate)  # type: ignore[arg-type]  # it has what it is asked for
    phases = ("usual", "a third", "usual again")
    with pccheck.Checkpointer(where, in_flight=_IN_FLIGHT, snapshot="lazy") as ck:
        loop = _Loop(ck, plan)
        for phase, intervals in zip(phases, plan.intervals, strict=True):
            if phase != phases[0]:
                wanted = plan.mib_per_s / 3 if phase == phases[1] else plan.mib_per_s
                rate.mib_per_s = wanted
                if disk is not None:  # in a thread: the loop must not wait for a tool
                    threading.Thread(target=disk.set_rate, args=(wanted,)).start()
            loop.train(phase, intervals)
        return loop.passed, loop.reasons


@final
class _Loop:
    def __init__(self, ck: pccheck.Checkpointer, plan: Plan) -> None:
        self._ck, self._plan = ck, plan
        state = gpt_state(plan.state_bytes)
        self._state, self._marks = state, Marks(state)
        self._step = 0
        self._durable_s = 0.0
        ck.subscribe(self._hear)
        began = time.perf_counter()
        for _ in range(plan.baseline_steps):
            self._train()
        self._alone_s = (time.perf_counter() - began) / plan.baseline_steps
        self._controller = pccheck.Controller(ck, slowdown=1 + _BOUND, profile_steps=20)
        self._since: tuple[int, float] | None = None  # step and time of the last save
        self.passed: list[Passed] = []

    def _hear(self, event: object) -> None:
        if isinstance(event, Published):
            self._durable_s = event.seconds

    def _train(self) -> None:
        time.sleep(self._plan.step_s)
        self._ck.fence()
        self._step += 1
        self._marks.set(self._step)

    def train(self, phase: str, intervals: int) -> None:
        """Train so many intervals."""
        passed = 0
        while passed < intervals:
            self._train()
            if not self._controller.due(self._step):
                continue
            now = time.perf_counter()
            if self._since is not None:
                steps, seconds = self._step - self._since[0], now - self._since[1]
                over = seconds / (steps * self._alone_s) - 1
                self.passed.append(Passed(phase=phase, steps=steps, overhead=over, durable_s=self._durable_s))
                passed += 1
            self._since = self._step, now
            self._ck.save(self._step, self._state)

    @property
    def reasons(self) -> list[str]:
        """The decisions in words."""
        return [
            f"step {one.step}: {one.before} -> {one.interval} steps, {one.reason}"
            for one in self._controller.decisions
        ]  # fmt: skip


def controller(bench: Bench) -> Table:
    """The closed loop on a disk that is slowed to a third and recovers."""
    quick = bench.scale.state_bytes < 64 * MIB
    if quick:
        plan = Plan(state_bytes=2 * MIB, step_s=0.002, mib_per_s=64, intervals=(4, 3, 4), baseline_steps=20)
    else:
        plan = Plan(state_bytes=96 * MIB, step_s=0.05, mib_per_s=192, intervals=(25, 15, 15), baseline_steps=100)
    why_not = bench.slow_disk.up(plan.mib_per_s, 2)
    try:
        bench.say("controller: a disk that is slowed to a third and recovers")
        directory = bench.directory / "run" if why_not else bench.slow_disk.mountpoint / "run"
        with emptied(directory) as place:
            disk = None if why_not else bench.slow_disk
            passed, reasons = bench.lab.run(measure_controller, place, plan, disk)
    finally:
        if why_not is None:
            bench.slow_disk.down()
    rows = [_row(number, one) for number, one in enumerate(passed, start=1)]
    kind = "ext4 on a device whose writes the kernel limits" if why_not is None else f"a throttled medium ({why_not})"
    notes = [
        f"{size_text(size_of(gpt_state(plan.state_bytes)))}, steps of {1e3 * plan.step_s:.0f} ms, in_flight "
        f"{_IN_FLIGHT}, lazy. The disk: {kind}; {plan.mib_per_s:.0f} MiB/s, then {plan.mib_per_s / 3:.0f}, and back.",
        "overhead: the time from save to save over that of so many steps without saves, measured before.",
        *verdicts(passed),
        *reasons,
    ]
    return Table(name="controller", title="The Controller on a disk that changes", rows=rows, notes=notes)


def verdicts(passed: list[Passed]) -> list[str]:
    """Say whether overhead came back under its bound, and the interval to what it was, soon enough."""
    usual, slow, again = ([one for one in passed if one.phase == phase] for phase in _phases(passed))
    before = statistics.median(one.steps for one in usual[len(usual) // 2 :])
    under = _first(slow, lambda one: one.overhead <= _BOUND)
    late = [one.overhead for one in slow[_WITHIN:]]
    back = _first(again, lambda one: one.steps <= max(_SAME * before, before + 1))
    return [
        f"overhead back under {_BOUND:.0%}: {_within(under, _WITHIN)}; after that "
        f"{statistics.median(late):.1%} in the middle, {max(late):.1%} at most",
        f"interval back at {before:.0f} steps: {_within(back, _BACK_WITHIN)}",
    ]


def _phases(passed: list[Passed]) -> list[str]:
    return list(dict.fromkeys(one.phase for one in passed))


def _first(passed: list[Passed], holds: Callable[[Passed], bool]) -> int | None:
    """Give after how many intervals it holds, in that one and in the next."""
    for number, one in enumerate(passed):
        if holds(one) and (number + 1 == len(passed) or holds(passed[number + 1])):
            return number
    return None


def _within(intervals: int | None, allowed: int) -> str:
    if intervals is None:
        return f"NOT within what was measured (wanted: {allowed} intervals)"
    return f"{'yes' if intervals <= allowed else 'NO'}, after {intervals} intervals (wanted: {allowed})"


def _row(number: int, one: Passed) -> dict[str, Cell]:
    return {
        "": f"interval {number}",
        "disk": one.phase,
        "steps": Figure([one.steps], 0),
        "overhead": Figure([100 * one.overhead], 1, "%"),
        "durable": Figure([one.durable_s], 2, "s"),
    }


TABLES: dict[str, Callable[[Bench], Table]] = {"controller": controller}
