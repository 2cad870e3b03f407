"""Real training processes, killed at a trace's times: who gets how far (floor 4: imports rooms of replay).

Each contender trains in processes of its own, in a directory of its own, and is killed with SIGKILL at the trace's
times, scaled down. The lives of all are taken in turn, one at a time, so that each has the machine to itself and all
share its slow spells. Between them no contender's clock runs: what a process needs to import and set up counts for
nobody, and `restart_s` stands for it; then its files are written back and dropped from the page cache, as a preempted
machine's successor would not have them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean
from typing import final

from pccheck.errors import OptionError, UsageError
from pccheck.replay import contender as contenders
from pccheck.replay import places, tuned
from pccheck.replay.chronicle import Chronicle, LiveOutcome
from pccheck.replay.process import Trainer, TrainerError
from pccheck.replay.schedule import Life, lives
from pccheck.replay.told import Job, Missing
from pccheck.replay.trace import Trace

Progress = Callable[[str], object]
_START_S = 2.5  # that processes need to import and set up, all at once; frameworks take longer on few cores
_TUNING = 4  # measurements for each contender
_COPIES = 4  # of the state that one contender may hold on storage at a time


@dataclass(frozen=True, kw_only=True)
class Settings:
    """How a live replay is run.

    Attributes:
        directory: a folder in it holds all that is written, and is removed at the end.
        duration_s: seconds that the trace is scaled to, for each contender; above 0.
        restart_s: seconds from a kill until the next process begins to open and restore; 0 or more.
        every: steps between saves, 1 or more; or of each contender by name. With `tuned`, only where that begins.
        step_s: seconds that the device is at work in each step; the update on the host comes on top. Above 0.
        state_bytes: of the state, all of which each step changes; up to 64 GiB.
        tuned: give each contender the interval that its own measured costs call for.
        measure_s: seconds of undisturbed training that are measured before and after; above 0.
        seed: of what is trained.

    Raises OptionError for a value out of range. Immutable.
    """

    directory: Path
    duration_s: float = 120.0
    restart_s: float = 0.5
    every: int | Mapping[str, int] = 10
    step_s: float = 0.04
    state_bytes: int = 64 << 20
    tuned: bool = False
    measure_s: float = 3.0
    seed: int = 0

    def __post_init__(self) -> None:
        def check(name: str, fine: bool, allowed: str) -> None:
            if not fine:
                raise OptionError(name, getattr(self, name), allowed)

        every = self.every.values() if isinstance(self.every, Mapping) else (self.every,)
        check("duration_s", 0 < self.duration_s < math.inf, "seconds above 0")
        check("restart_s", 0 <= self.restart_s < math.inf, "seconds, 0 or more")
        check("every", all(isinstance(n, int) and n >= 1 for n in every), "1 or more steps")
        check("step_s", 0 < self.step_s <= 60, "seconds above 0, up to 60")
        check("state_bytes", 0 <= self.state_bytes <= 64 << 30, "bytes, up to 64 GiB")
        check("measure_s", 0 < self.measure_s <= 600, "seconds above 0, up to 600")


@dataclass(frozen=True, kw_only=True)
class Results:
    """What contenders made of the same kills.

    Attributes:
        settings: as asked for.
        trace: scaled.
        step_s: seconds of an undisturbed step, measured.
        state_bytes: of the state.
        outcomes: in the order of the contenders.
        skipped: by name, why one did not take part: what it needs is not installed.
        failed: by name, how one's process ended by itself, with what it printed; it has no outcome.
    """

    settings: Settings
    trace: Trace
    step_s: float
    state_bytes: int
    outcomes: tuple[LiveOutcome, ...]
    skipped: Mapping[str, str] = field(default_factory=dict)
    failed: Mapping[str, str] = field(default_factory=dict)


def run(trace: Trace, names: Sequence[str], settings: Settings, *, progress: Progress | None = None) -> Results:
    """Have contenders live through a trace, and measure what comes of it.

    Blocks for about `duration_s` times the number of contenders, and the seconds that their processes take to start.
    Whatever happens, a Ctrl-C included, no process and no file is left.

    Args:
        trace: of any length: it is scaled to `settings.duration_s`.
        names: contenders, as installed or FILE.py:CLASS.
        settings: how.
        progress: called with a line of text now and then.

    Raises:
        UsageError: a contender is not known, or the trace kills nobody.
        CapacityError, MediumError: the directory cannot be used.
        TrainerError: the training itself fails, without any contender.
    """
    names = list(names)
    contenders.check(names)
    scaled = trace.scaled(settings.duration_s / trace.end_s)
    if not scaled.losses:
        raise UsageError(f"{trace.name} has no losses: nothing would be killed")
    need = _COPIES * len(names) * settings.state_bytes
    with places.workplace(settings.directory, need) as folder:
        return _Replay(scaled, names, settings, folder, progress or (lambda text: None)).run()


def expected_s(trace: Trace, count: int, settings: Settings) -> float:
    """Estimate the seconds that `run` takes with so many contenders: they take turns, and processes need a start."""
    scaled = trace.scaled(settings.duration_s / trace.end_s)
    plan = lives(scaled, settings.restart_s)
    measurements = 2 + _TUNING * count * settings.tuned
    starts = len(plan) + scaled.killed_at_end + measurements
    return (
        count * sum(life.end_s - life.start_s for life in plan) + measurements * settings.measure_s + starts * _START_S
    )


@final
class _Replay:
    """One replay, under way."""

    def __init__(self, trace: Trace, names: list[str], settings: Settings, folder: Path, progress: Progress) -> None:
        self._trace, self._settings, self._folder, self._progress = trace, settings, folder, progress
        self._directories = {name: folder / f"{i:02}" for i, name in enumerate(names)}
        self._chronicles: dict[str, Chronicle] = {}  # of those that are still in it
        self._skipped: dict[str, str] = {}
        self._failed: dict[str, str] = {}
        self._state_bytes = settings.state_bytes

    def run(self) -> Results:
        """Do all of it."""
        measured = [self._undisturbed()]
        for name in self._directories:
            interval = self._interval(name, measured[0].mean_s)
            if interval is not None:
                self._chronicles[name] = Chronicle(name, interval)
        plan = lives(self._trace, self._settings.restart_s)
        for number, life in enumerate(plan):
            self._round(number, life, f"life {number + 1} of {len(plan)}")
        finals = self._finals() if self._trace.killed_at_end else {}
        measured.append(self._undisturbed())
        step_s = mean(one.median_s for one in measured)
        return Results(
            settings=self._settings, trace=self._trace, step_s=step_s, state_bytes=self._state_bytes,
            outcomes=tuple(c.outcome(self._trace, step_s, finals.get(n)) for n, c in self._chronicles.items()),
            skipped=self._skipped, failed=self._failed,
        )  # fmt: skip

    def _job(self, name: str, every: int) -> Job:
        directory = self._directories.get(name, self._folder / name)
        places.made(directory)
        return Job(
            contender=name, directory=str(directory), state_bytes=self._settings.state_bytes,
            device_s=self._settings.step_s, every=every, seed=self._settings.seed,
        )  # fmt: skip

    def _undisturbed(self) -> tuned.Measured:
        """Measure a step without checkpoints."""
        self._progress("measuring a step without checkpoints")
        measured = tuned.measure(self._job(contenders.NOTHING, 1), self._folder, self._settings.measure_s)
        assert not isinstance(measured, Missing)
        return measured

    def _interval(self, name: str, step_s: float) -> int | None:
        """Give how often a contender saves; None if it cannot take part."""
        every = self._settings.every
        interval = every.get(name, 10) if isinstance(every, Mapping) else every
        if not self._settings.tuned:
            return interval
        self._progress(f"{name}: measuring what its saves cost")
        job, mtbf_s = self._job(name, interval), self._trace.mtbf_s
        try:
            found = tuned.interval(job, self._folder, step_s, mtbf_s, self._settings.measure_s)
        except TrainerError as error:
            self._drop(name, error)
            return None
        if isinstance(found, Missing):
            self._skip(name, found)
            return None
        return found

    def _skip(self, name: str, missing: Missing) -> None:
        self._skipped[name] = missing.reason
        self._chronicles.pop(name, None)
        self._progress(f"{name} is skipped: {missing.reason}")

    def _drop(self, name: str, error: TrainerError) -> None:
        self._failed[name] = str(error)
        self._chronicles.pop(name, None)
        self._progress(f"{name} is out: {error.reason}")

    def _round(self, number: int, life: Life, title: str) -> None:
        """Have each contender live one life."""
        with ExitStack() as stack:
            trainers = self._started(stack)
            names = list(trainers)
            first = number % max(1, len(names))  # nobody always comes right after the same one
            for name in [*names[first:], *names[:first]]:
                self._progress(f"{title}, {life.end_s - life.start_s:.1f} s: {name}")
                try:
                    self._live(trainers[name], self._chronicles[name], life)
                except TrainerError as error:
                    self._drop(name, error)
                trainers[name].close()
                places.forget(self._directories[name])

    def _started(self, stack: ExitStack) -> dict[str, Trainer]:
        """Start a process for each contender, all at once, and wait until all are ready; then they hold still."""
        trainers = {
            name: stack.enter_context(Trainer(self._job(name, chronicle.every), self._folder))
            for name, chronicle in self._chronicles.items()
        }
        for name, trainer in trainers.items():
            try:
                ready = trainer.await_ready()
            except TrainerError as error:
                self._drop(name, error)
                continue
            if isinstance(ready, Missing):
                self._skip(name, ready)
                continue
            self._state_bytes = ready.state_bytes
            self._chronicles[name].started(ready.start_s)
        return {name: trainer for name, trainer in trainers.items() if name in self._chronicles}

    def _live(self, trainer: Trainer, chronicle: Chronicle, life: Life) -> None:
        went_at = trainer.go(chronicle.digests)
        told = trainer.follow(went_at + life.end_s - life.start_s)
        told += trainer.kill()
        chronicle.lived(life, went_at, told)

    def _finals(self) -> dict[str, int]:
        """Find out after which step each contender would go on, now that the trace is over."""
        self._progress("looking at what is left")
        found = {}
        with ExitStack() as stack:
            trainers = self._started(stack)
            for name, trainer in trainers.items():
                try:
                    trainer.go(self._chronicles[name].digests)
                    began = trainer.await_began()
                except TrainerError as error:
                    self._drop(name, error)
                    continue
                self._chronicles[name].loaded(began)
                found[name] = began.step
                trainer.close()
        return found
