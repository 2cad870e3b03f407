"""The captures under way: which still read the caller's memory, and the waits for them (floor 2: imports below)."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import final

import numpy as np

from pccheck.errors import DeadlineError
from pccheck.pipeline.interface import Job
from pccheck.saving.ordering import OrderedFiller
from pccheck.state.planner import Prepared


@final
@dataclass(frozen=True, kw_only=True, eq=False)
class Waits:
    """How many leading chunks must be captured before leaves may be changed.

    Args:
        host: by owner, for its leaves in host memory; under None, for all leaves.
        device: by owner, for its leaves on devices; under None, for all leaves.
        owned: it is known who owns which leaves: whoever is not named has none.
    """

    host: Mapping[int | None, int]
    device: Mapping[int | None, int]
    owned: bool

    @classmethod
    def of(cls, prepared: Prepared) -> Waits:
        """Say so of a state of which nothing is captured any more but what an owner has, or all without a guard."""
        owners, changeable = prepared.owners, prepared.changeable
        waits: list[dict[int | None, int]] = []
        for pieces in (changeable.host, np.asarray(changeable.device, np.intp)):
            if owners is None:
                waits.append({None: prepared.chunks_of(pieces)})
                continue
            if prepared.filler is None and pieces.size:
                found: dict[int | None, int] = dict(prepared.owned_chunks.items())
            else:
                mine = owners[pieces]
                found = {o: prepared.chunks_of(pieces[mine == o]) for o in np.unique(mine[mine >= 0]).tolist()}
            waits.append({None: max(found.values(), default=0), **found})
        return cls(host=waits[0], device=waits[1], owned=owners is not None)

    def chunks(self, owner: int | None) -> tuple[int, int]:
        """Give how many chunks somebody must wait for, for leaves in host memory and on devices."""
        if owner is None or not self.owned:
            return self.host[None], self.device[None]
        return self.host.get(owner, 0), self.device.get(owner, 0)


EVERYTHING = Waits(host={None: 1 << 62}, device={None: 0}, owned=False)


@final
@dataclass(frozen=True, kw_only=True, eq=False)
class Capture:
    """One capture out of the caller's memory.

    Args:
        job: what captures.
        waits: how much of it must be waited for.
        filler: puts what is queued later behind its copies on devices.
    """

    job: Job
    waits: Waits
    filler: OrderedFiller | None = None

    def wait(self, owner: int | None, timeout_s: float) -> bool:
        """Wait until the leaves of an owner (None = all leaves) may be changed; False = time is up."""
        host, device = self.waits.chunks(owner)
        end = time.monotonic() + timeout_s
        if host and not self.job.wait_captured(timeout_s, chunks=host):
            return False
        if not device:
            return True
        assert self.filler is not None, "what lies on devices has a filler"
        return self.filler.order(device, max(0.0, end - time.monotonic()))


@final
class Captures:
    """All captures of one Checkpointer that may still read the caller's memory. Thread-safe.

    Args:
        describe: tells who waits for what, for errors.
    """

    def __init__(self, describe: Callable[[], str]) -> None:
        self._describe = describe
        self._lock = threading.RLock()  # entered in one step: a Ctrl-C leaves it as it was
        self._running: dict[int, Capture] = {}  # by counter
        self.waited_s = 0.0

    def __len__(self) -> int:
        return len(self._running)

    def add(self, counter: int, capture: Capture) -> None:
        """Enter a capture that was started."""
        with self._lock:
            self._running[counter] = capture

    def get(self, counter: int) -> Capture | None:
        """Give the capture of a save, as long as it is known."""
        with self._lock:
            return self._running.get(counter)

    def remove(self, counter: int) -> None:
        """Forget a capture."""
        with self._lock:
            self._running.pop(counter, None)

    def wait(self, timeout_s: float, *, owner: int | None = None) -> float:
        """Wait until no capture reads the leaves of an owner (None = any leaf), and give the seconds; DeadlineError."""
        if not self._running:  # asked before every step of a training loop
            return 0.0
        with self._lock:
            captures = list(self._running.values())
        return self._wait(captures, owner, timeout_s)

    def wait_chunks(self, job: Job, chunks: int | None, timeout_s: float) -> float:
        """Wait for the leading chunks of one job (None = all), and give the seconds; DeadlineError."""
        waits = EVERYTHING if chunks is None else Waits(host={None: chunks}, device={None: 0}, owned=False)
        return 0.0 if chunks == 0 else self._wait([Capture(job=job, waits=waits)], None, timeout_s)

    def _wait(self, captures: Sequence[Capture], owner: int | None, timeout_s: float) -> float:
        began = time.monotonic()
        for capture in captures:
            if not capture.wait(owner, max(0.0, began + timeout_s - time.monotonic())):
                raise DeadlineError(f"the capture of a checkpoint; {self._describe()}", time.monotonic() - began)
        waited = time.monotonic() - began
        with self._lock:
            self._running = {n: c for n, c in self._running.items() if not c.job.wait_captured(0)}
            self.waited_s += waited
        return waited
