"""A probe, from a directory to what is known of its machine (floor 3: imports probing, storage, tuning.machine)."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import final

from pccheck.errors import OptionError, UsageError
from pccheck.options import check_whole_number
from pccheck.probing import place, trials
from pccheck.probing.timing import Stopwatch, Timed
from pccheck.probing.trials import Trial
from pccheck.saving import sizing
from pccheck.tuning.machine import Machine
from pccheck.version import __version__

Progress = Callable[[float, str], object]
_FIRST_S = 0.5  # for each of the first two looks


def probe(
    directory: str | os.PathLike[str],
    *,
    seconds: float = 30.0,
    size_bytes: int | None = None,
    in_flight: int = 4,
    progress: Progress | None = None,
) -> Machine:
    """Measure what the storage of a directory does with checkpoints, and give it for `pccheck.tuning`.

    Saves states of random bytes with a Checkpointer of its own, in a folder `pccheck-probe.tmp` that is removed at the
    end, also after errors and Ctrl-C; what a killed probe left is removed by the next. Leave the machine alone
    meanwhile. One probe of a directory at a time; the thread that calls it is busy.

    Args:
        directory: the folder that checkpoints will be written to.
        seconds: about how long it may take, 1..3600; a save that was begun is ended.
        size_bytes: of the largest state; None = as much as storage writes in that time, at most 256 MiB. It takes
            `in_flight + 1` times as much on disk, at most half of what is free, and `in_flight + 2` times as much
            memory, at most half of what is left.
        in_flight: most checkpoints at once, 1..16.
        progress: called now and then with the share that is done, 0..1, and what is being measured.

    Raises:
        OptionError, UsageError: an argument is out of range; or another probe is at work there.
        CapacityError: there is too little room.
        MediumError: the directory cannot be used, or storage failed.
    """
    began_s = time.monotonic()
    where = os.path.abspath(os.fsdecode(directory))
    _check(seconds, size_bytes, in_flight)
    with place.workplace(where) as folder:
        free, memory = place.free_bytes(where), sizing.available_bytes()
        most = trials.check_size(where, size_bytes, in_flight, free, memory)
        survey = _Survey(os.path.join(folder, place.STORE), began_s, seconds, progress or (lambda done, doing: None))
        survey.go(most, in_flight, fit=size_bytes is None)
        return survey.machine(where, free, memory)


def _check(seconds: float, size_bytes: int | None, in_flight: int) -> None:
    check_whole_number("in_flight", in_flight, 1, 16)
    if size_bytes is not None:
        check_whole_number("size_bytes", size_bytes, 1, 1 << 46)
    if isinstance(seconds, bool) or not isinstance(seconds, (int, float)) or not 1 <= seconds <= 3600:
        raise OptionError("seconds", seconds, "a number from 1 to 3600")


@final
class _Survey:
    """What was found so far. Used by one thread."""

    def __init__(self, store: str, began_s: float, seconds: float, progress: Progress) -> None:
        self._began_s, self._until_s, self._seconds = began_s, began_s + seconds, seconds
        self._progress = progress
        self._watch = Stopwatch(store, self._until_s, timeout_s=max(60.0, 2 * seconds))
        self._found: list[tuple[Trial, Timed]] = []
        self._missed: list[str] = []

    def go(self, most_bytes: int, in_flight: int, *, fit: bool) -> None:
        """Time all trials, with states of at most so many bytes; `fit` = only as large as there is time for."""
        for trial in (trials.first(), trials.scout(most_bytes)):
            if not self._time(trial, _FIRST_S):
                raise UsageError(f"{self._seconds:g} s are too short to measure this storage: give it more")
        commit_s, look = self._found[0][1].sample.durable_s, self._found[1][1].sample
        rate, bare = look.bytes_per_s, look.state_bytes / max(look.period_s - commit_s, look.period_s / 3)
        size = trials.affordable_bytes(most_bytes, bare, commit_s, self._left_s(), in_flight) if fit else most_bytes
        planned = trials.plan(size, in_flight)
        for index, trial in enumerate(planned):
            weights = [each.weight for each in planned[index:]]
            possible = trials.least_bytes(trial) <= rate * self._left_s()
            if not possible or not self._time(trial, self._left_s() * weights[0] / sum(weights)):
                self._missed.append(trial.title)
            elif not trial.rests:
                rate = self._found[-1][1].sample.bytes_per_s
        self._progress(1.0, "done")

    def _left_s(self) -> float:
        return max(0.0, self._until_s - time.monotonic())

    def _time(self, trial: Trial, seconds: float) -> bool:
        """Time a trial; False = there was no time for it."""
        self._progress(min(1.0, 1 - self._left_s() / self._seconds), trial.title)
        timed = self._watch.time(trial, time.monotonic() + seconds)
        if timed is not None:
            self._found.append((trial, timed))
        return timed is not None

    def machine(self, directory: str, free_bytes: int, memory_bytes: int) -> Machine:
        """Give what was found."""
        kind, storage = place.filesystem_of(directory)
        copied = [t for trial, t in self._found if trial.snapshot == "copy"]
        lazy = [t for trial, t in self._found if trial.snapshot == "lazy"]
        # The first look counts where nothing better was had: in copy mode a save takes its copy longer.
        busy = [t for t in lazy if t.sample.in_flight == 1 and not t.sample.pause_s]
        read = next((t.read for _, t in self._found if t.read is not None), None)
        first, look = self._found[0][1], self._found[1][1]
        return Machine(
            path=directory,
            filesystem=f"{kind}, {storage}",
            time_s=time.time(),
            pccheck=__version__,
            pipeline=first.pipeline,
            cpus=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
            memory_bytes=memory_bytes,
            free_bytes=free_bytes,
            seconds=time.monotonic() - self._began_s,
            copy_bytes_per_s=copied[-1].sample.state_bytes / copied[-1].copy_s,
            read_bytes_per_s=read.read_bytes / read.median_s if read else None,
            worst_read_bytes_per_s=read.read_bytes / read.worst_s if read else None,
            reads=read.reads if read else 0,
            fresh_memory_bytes_per_s=read.read_bytes / read.fresh_s if read else None,
            read_past_cache=bool(read) and storage == "direct",
            commit_s=first.sample.durable_s,
            save_s=max(lazy, key=lambda t: t.sample.state_bytes).save_s,
            samples=tuple(t.sample for t in (lazy if busy else (*lazy, look))),
            notes=self._notes(bool(read), storage),
        )

    def _notes(self, read: bool, storage: str) -> tuple[str, ...]:
        notes = []
        if self._missed:
            notes.append(f"no time for: {'; '.join(self._missed)} (give it more than {self._seconds:g} s)")
        if read and storage != "direct":
            notes.append("read back through the page cache: storage may read slower than that")
        return tuple(notes)
