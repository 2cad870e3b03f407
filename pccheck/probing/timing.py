"""One way of saving, timed with the real Checkpointer (floor 3: imports checkpointer and below)."""

from __future__ import annotations

import statistics
import threading
import time
from dataclasses import dataclass
from typing import final

import numpy as np
from numpy.typing import NDArray

from pccheck.checkpointer import Checkpointer
from pccheck.probing.readback import ReadBack, read_back
from pccheck.probing.trials import LEAST_SAVES, MOST_SAVES, Trial
from pccheck.saving import sizing
from pccheck.saving.save import Save
from pccheck.tuning.machine import Sample

State = dict[str, NDArray[np.uint8]]

_LEAVES = 32
_FILL_BYTES = 4 << 20
_LEAST_REST_S, _MOST_REST_S = 0.02, 1.0
# Disks of virtual machines were seen to be slow for a second or two after blocks were first written.
WARM_ROUNDS, WARM_SHARE = 2, 1 / 30  # at least so often, and for such a share of the time that is left


@dataclass(frozen=True, kw_only=True)
class Timed:
    """What one trial found.

    Args:
        sample: of the storage.
        save_s: median seconds of `save()` itself, its waits not counted.
        copy_s: median seconds that `save()` waited for the copy of the state.
        pipeline: "native" or "portable".
        read: the last checkpoint, read back; None = it was not.
    """

    sample: Sample
    save_s: float
    copy_s: float
    pipeline: str
    read: ReadBack | None = None


def random_bytes(count: int) -> NDArray[np.uint8]:
    """Give bytes that no storage can compress or has already."""
    random = np.random.Generator(np.random.SFC64())
    found = np.empty(count, np.uint8)
    for start in range(0, count, _FILL_BYTES):  # in parts: no second copy of all of it
        part = found[start : start + _FILL_BYTES]
        part[:] = np.frombuffer(random.bytes(part.nbytes), np.uint8)
    return found


def state_of(content: NDArray[np.uint8], count: int) -> State:
    """Give the first `count` bytes as the leaves of a state."""
    edges = [count * i // _LEAVES for i in range(_LEAVES + 1)]
    return {f"leaf-{i:02}": content[edges[i] : edges[i + 1]] for i in range(_LEAVES)}


@final
class Stopwatch:
    """Times trials, one after the other, in one store. Used by one thread.

    Args:
        store: its folder, made by the first trial.
        until_s: on the monotonic clock, when it should have an end.
        timeout_s: longest that one save may take.
    """

    def __init__(self, store: str, until_s: float, timeout_s: float) -> None:
        self._store, self._content = store, random_bytes(0)
        self._until_s, self._timeout_s = until_s, timeout_s
        self._written = (0, 0)  # slots that were written once, and how far

    def time(self, trial: Trial, until_s: float) -> Timed | None:
        """Time a trial until `until_s`, and no fewer saves than give a median; None = all time is up before that.

        Slots are written once before the clock runs, as those of a training job soon are. Raises what a Checkpointer
        raises.
        """
        if self._content.nbytes < trial.state_bytes:
            self._content = random_bytes(trial.state_bytes)
        buffer_bytes = sizing.pool_bytes(None, trial.state_bytes, trial.in_flight, trial.chunk_bytes)
        with Checkpointer(
            self._store, in_flight=trial.in_flight, writers=trial.writers, snapshot=trial.snapshot,
            writers_per_checkpoint=trial.writers_per_checkpoint, chunk_bytes=trial.chunk_bytes,
            buffer_bytes=buffer_bytes, write_timeout_s=self._timeout_s, history=False,
        ) as checkpointer:  # fmt: skip
            run = _Run(checkpointer, state_of(self._content, trial.state_bytes))
            if not self._warm_up(run, trial):
                return None
            lead, tail = (0, 0) if trial.rests else (trial.in_flight, trial.in_flight - 1)
            while (made := len(run.saves)) < lead + MOST_SAVES + tail:
                now_s = time.monotonic()
                if now_s >= self._until_s or (now_s >= until_s and made >= lead + LEAST_SAVES + tail):
                    break
                run.save(rest=trial.rests)
            checkpointer.wait()
            read = read_back(self._store, self._until_s) if trial.reads else None
            pipeline = checkpointer.stats().pipeline
            for step in set(checkpointer.steps()):  # else the next trial begins by verifying the newest
                checkpointer.delete(step)
        saves = run.saves[lead : len(run.saves) - tail]
        if len(saves) < 2:
            return None
        return Timed(
            sample=_sample(trial, buffer_bytes, saves, run.rested_s),
            save_s=statistics.median(s.called_s - s.save.slot_wait_s - s.save.copy_wait_s for s in saves),
            copy_s=statistics.median(s.save.copy_wait_s for s in saves),
            pipeline=pipeline,
            read=read,
        )

    def _warm_up(self, run: _Run, trial: Trial) -> bool:
        """Write every slot once; False = all time is up before that."""
        count, size = self._written
        slots = trial.in_flight + 1
        new = count < slots or size < trial.state_bytes
        began_s, made = time.monotonic(), 0
        enough, enough_s = (WARM_ROUNDS * slots, WARM_SHARE * (self._until_s - began_s)) if new else (1, 0.0)
        while made < enough or time.monotonic() < began_s + enough_s:
            if time.monotonic() >= self._until_s:
                return False
            run.save(rest=False)  # one after the other would take turns in two slots
            made += 1
        run.forget()
        self._written = (max(slots, count), max(size, trial.state_bytes))
        return True


@final
class _Stamped:
    """A save, and when it was durable."""

    def __init__(self, save: Save, called_s: float) -> None:
        self.save, self.called_s = save, called_s  # that the call took
        self.durable_at_s = 0.0
        self._stamped = threading.Event()
        save.durable.add_done_callback(self._stamp)

    def _stamp(self, _: object) -> None:
        self.durable_at_s = time.monotonic()
        self._stamped.set()

    def durable_s(self) -> float:
        """Wait until it is durable, or raise why it failed; give the seconds that took, from when it had its slot."""
        self._stamped.wait()  # a save has its own deadline, and the stamp may come after whoever waits for the future
        self.save.durable.result()
        return self.durable_at_s - self.save.began_s - self.save.slot_wait_s


@final
class _Run:
    """Saves of one trial, in order."""

    def __init__(self, checkpointer: Checkpointer, state: State) -> None:
        self._checkpointer, self._state = checkpointer, state
        self._step = 0
        self._last: _Stamped | None = None
        self.saves: list[_Stamped] = []
        self.rested_s: list[float] = []

    def save(self, *, rest: bool) -> None:
        """Save; before that, rest as long as the last save took."""
        if rest and self._last is not None:
            rest_s = min(_MOST_REST_S, max(_LEAST_REST_S, self._last.durable_s()))
            self.rested_s.append(rest_s)
            time.sleep(rest_s)
        self._step += 1
        began_s = time.monotonic()
        save = self._checkpointer.save(self._step, self._state)
        self._last = _Stamped(save, time.monotonic() - began_s)
        self.saves.append(self._last)

    def forget(self) -> None:
        """Count from here on, when all are durable."""
        self._checkpointer.wait()
        self.saves, self.rested_s = [], []


def _sample(trial: Trial, buffer_bytes: int, saves: list[_Stamped], rested_s: list[float]) -> Sample:
    taken = [s.durable_s() for s in saves]
    ends = sorted(s.durable_at_s for s in saves)
    between_s = (ends[-1] - ends[0]) / (len(ends) - 1)
    pause_s = statistics.fmean(rested_s) if trial.rests else 0.0
    return Sample(
        state_bytes=trial.state_bytes, in_flight=trial.in_flight, writers=trial.writers,
        writers_per_checkpoint=trial.writers_per_checkpoint, chunk_bytes=trial.chunk_bytes,
        buffer_bytes=buffer_bytes, saves=len(saves), durable_s=statistics.median(taken), worst_durable_s=max(taken),
        period_s=max(between_s - pause_s, min(taken) / trial.in_flight), pause_s=pause_s,
    )  # fmt: skip
