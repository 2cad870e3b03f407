"""One run of a scenario on a simulated disk, and what was promised to its user at each moment (beside the floors).

A scenario is a function of a `Run`: it opens the store, saves, restores, pins, rolls back. The Run notes what was saved
under which counter, and marks in the log of the disk when each promise was made.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, final

import numpy as np
import xxhash

from pccheck.testing.disk import Op, SimulatedDisk
from pccheck.testing.simulated import SimulatedVolume
from pccheck.testing.system import System

WAIT_S = 60.0  # the deadline of every wait of a scenario
DATA_BYTES = 3 * 4096 - 512  # of a state: 3 chunks of 4 KiB


def make_state(step: int, salt: str = "", *, data_bytes: int = DATA_BYTES) -> dict[str, Any]:
    """Give a state that differs in every sector from that of any other step and salt.

    Args:
        step: becomes part of it.
        salt: likewise; runs that save the same steps use different ones.
        data_bytes: of its two arrays together; the default makes 3 chunks of 4 KiB.
    """
    seed = np.frombuffer(xxhash.xxh3_128_digest(f"{step} {salt}".encode()), dtype=np.uint64)
    generator = np.random.Generator(np.random.Philox(key=seed))
    half = data_bytes // 2
    return {
        "weights": generator.integers(0, 256, half, dtype=np.uint8),
        "moments": generator.standard_normal((data_bytes - half) // 8),
        "step": step,
        "salt": salt,
    }


def fingerprint(state: object) -> bytes:
    """Give a digest of a state: nested dict, list, tuple, arrays and plain values, with types, dtypes and shapes."""
    digest = xxhash.xxh3_128()

    def tell(text: str) -> None:
        digest.update(text.encode() + b"\0")

    def visit(value: object) -> None:
        if isinstance(value, dict):
            tell(f"dict {len(value)}")
            for key in value:
                visit(key)
                visit(value[key])
        elif isinstance(value, (list, tuple)):
            tell(f"{type(value).__name__} {len(value)}")
            for item in value:
                visit(item)
        elif hasattr(value, "dtype") and hasattr(value, "shape"):
            array = np.asarray(value)
            tell(f"array {array.dtype} {array.shape}")
            digest.update(np.ascontiguousarray(array).tobytes())
        else:
            tell(f"{type(value).__name__} {value!r}")

    visit(state)
    return digest.digest()


@dataclass(frozen=True, kw_only=True)
class Saved:
    """What was saved under one counter."""

    step: int
    content: bytes


@dataclass(kw_only=True)
class Promises:
    """What a crash must respect, from the marks of a log.

    Args:
        durable: the least counter that restore may give.
        pinned: steps that must be there.
        forbidden: counters that a roll-back left behind for good.
        seen: counters whose `save()` had returned.
    """

    durable: int = 0
    pinned: frozenset[int] = frozenset()
    forbidden: frozenset[int] = frozenset()
    seen: frozenset[int] = frozenset()

    def note(self, op: Op) -> bool:
        """Take in one operation; tell whether it was a mark."""
        if op.kind != "mark":
            return False
        value = op.value
        if op.name == "durable":
            self.durable = max(self.durable, value)
        elif op.name == "saved":
            self.seen |= {value}
        elif op.name == "pinned":
            self.pinned |= {value}
        elif op.name == "unpinning":
            self.pinned -= {value}
        elif op.name == "rolling back":  # from here on either branch is right, until the call has returned
            self.durable = min(self.durable, value)
        elif op.name == "rolled back":
            self.durable = value
            self.forbidden |= {c for c in self.seen if c > value}
        return True


@final
@dataclass(kw_only=True)
class Run:
    """One execution of a scenario.

    Args:
        system: what is explored.
        disk: where it works.
        salt: of the states that it saves.
        saved: what was saved under which counter; shared with the run that this one resumes.
    """

    system: System
    disk: SimulatedDisk
    salt: str = ""
    saved: dict[int, Saved] = field(default_factory=dict)

    @contextmanager
    def open(self) -> Iterator[Any]:
        """Open the store as a new process would."""
        volume = SimulatedVolume(self.disk)
        with self.system.open(volume) as saver:
            yield saver
        volume.unlock()

    def save(self, saver: Any, step: int, *, wait: bool = False, data_bytes: int = DATA_BYTES, **options: Any) -> Any:
        """Save the state of a step; its `durable` becomes a promise the moment it resolves."""
        state = make_state(step, self.salt, data_bytes=data_bytes)
        save = saver.save(step, state, **options)
        self.saved[save.counter] = Saved(step=step, content=fingerprint(state))
        self.disk.mark("saved", save.counter)

        def resolved(future: Any) -> None:
            if not future.cancelled() and future.exception() is None:
                self.disk.mark("durable", save.counter)

        save.durable.add_done_callback(resolved)
        if wait:
            save.durable.result(WAIT_S)
        return save

    def restore(self, saver: Any) -> Any:
        """Restore the newest; what the user was given is a promise, too: he trains on from it."""
        restored = saver.restore()
        if restored is not None:
            self.disk.mark("durable", restored.counter)
        return restored

    def roll_back(self, saver: Any, step: int) -> Any:
        """Restore an older step, which starts a branch."""
        counter = max(c for c, s in self.saved.items() if s.step == step)
        self.disk.mark("rolling back", counter)
        restored = saver.restore(step)
        self.disk.mark("rolled back", restored.counter)
        return restored

    def delete(self, saver: Any, step: int) -> None:
        """Delete the newest step: from then on the one before counts."""
        left = [c for c, s in self.saved.items() if s.step in saver.steps() and s.step != step]
        self.disk.mark("rolling back", max(left, default=0))
        saver.delete(step)
        self.disk.mark("rolled back", max(left, default=0))

    def pin(self, saver: Any, step: int) -> None:
        """Pin a step."""
        saver.pin(step)
        self.disk.mark("pinned", step)

    def unpin(self, saver: Any, step: int) -> None:
        """Unpin a step."""
        self.disk.mark("unpinning", step)
        saver.unpin(step)


Scenario = Callable[[Run], None]


def restore_and_save(run: Run) -> None:
    """Reopen, restore, save the next step: what a restarted job does."""
    with run.open() as saver:
        restored = run.restore(saver)
        run.save(saver, 1000 + (restored.step if restored else 0), wait=True)


def save_blindly(run: Run) -> None:
    """Reopen and save twice without restoring anything."""
    with run.open() as saver:
        run.save(saver, 2000, wait=True)
        run.save(saver, 2001, wait=True)


def wait_until(condition: Callable[[], bool], what: str, timeout_s: float = WAIT_S) -> None:
    """Wait for a condition, such as a point of the commit being reached; raises TimeoutError."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"waited {timeout_s:.0f} s for {what}")
        time.sleep(0.001)
