"""Wrappers that make storage fail on purpose (beside the floors: imports floors 0 and 1 only).

`FaultyVolume(volume, script)` behaves as `volume` until its script says otherwise. Operations are counted over the
volume and everything that is opened through it, so a test can first run unharmed, look at `script.operations`, and
then fail each of them in turn:

    for n in range(1, len(script.operations) + 1): run(Script(Fault("*", n)))
"""

from __future__ import annotations

import errno as codes
import os
import threading
from dataclasses import dataclass
from typing import Literal, final

from pccheck.errors import CapacityError, MediumError
from pccheck.storage.fileio import NO_ROOM
from pccheck.storage.medium import Medium
from pccheck.storage.volume import CheckPage, Volume

Operation = Literal[
    "*", "read", "write", "sync", "allocate", "open", "create", "link", "remove", "names", "sync_names",
    "check_page", "check_write", "check_sync", "lock",
]  # fmt: skip
FOREVER = 1 << 62


@dataclass(frozen=True)
class Fault:
    """One thing that goes wrong.

    Args:
        operation: what fails; "*" = any.
        nth: the first that fails, counted from 1.
        errno: with what; ENOSPC and EDQUOT become CapacityError where space is taken.
        times: how many in a row fail; FOREVER = all from then on.
        how: "before" = nothing of it is done; "after" = all of it is; "short" = of a write its first half is.
    """

    operation: Operation
    nth: int = 1
    errno: int = codes.EIO
    times: int = 1
    how: Literal["before", "after", "short"] = "before"


@final
class Script:
    """Which faults happen, and what was done so far. Thread-safe.

    Attributes:
        operations: `(operation, path)` of everything that was called, in order, failed or not.
        failed: how many of them were made to fail.
    """

    def __init__(self, *faults: Fault) -> None:
        self.faults = faults
        self.operations: list[tuple[str, str]] = []
        self.failed = 0
        self._counts: dict[str, int] = {}
        self._lock = threading.Lock()

    def count(self, operation: Operation = "*") -> int:
        """Give how often an operation was called."""
        with self._lock:
            return self._counts.get(operation, 0)

    def arm(self, *faults: Fault) -> None:
        """Replace the faults and count from 1 again."""
        with self._lock:
            self.faults, self._counts = faults, {}

    def call(self, operation: Operation, path: str) -> Fault | None:
        """Take note of a call, and give the fault that meets it."""
        with self._lock:
            self.operations.append((operation, path))
            for key in (operation, "*"):
                self._counts[key] = self._counts.get(key, 0) + 1
            for fault in self.faults:
                count = self._counts[fault.operation] if fault.operation in (operation, "*") else 0
                if fault.nth <= count < fault.nth + fault.times:
                    self.failed += 1
                    return fault
            return None


def _raise(fault: Fault, operation: str, path: str, offset: int | None = None) -> None:
    if fault.errno in NO_ROOM and operation in ("create", "allocate", "link", "check_page"):
        raise CapacityError(path, 1, 0)
    raise MediumError(operation, path, OSError(fault.errno, os.strerror(fault.errno)), offset)


@final
class _Guard:
    """Fails one operation as the script says: where it is made, before the operation, or in `done()`, after it."""

    def __init__(self, script: Script, operation: Operation, path: str, offset: int | None = None) -> None:
        self.fault = script.call(operation, path)
        self._facts = (operation, path, offset)
        if self.fault is not None and self.fault.how == "before":
            _raise(self.fault, *self._facts)

    def done(self) -> None:
        """Fail an operation that was carried out all the same."""
        if self.fault is not None:
            _raise(self.fault, *self._facts)


@final
class FaultyMedium:
    """A medium that fails by script; it hides descriptor and mapping, so that every byte goes through it."""

    def __init__(self, inner: Medium, script: Script) -> None:
        self.inner, self.script, self.path = inner, script, inner.path

    @property
    def alignment(self) -> int:
        """Always 1: there is no descriptor."""
        return 1

    def size(self) -> int:
        """Give the size in bytes."""
        return self.inner.size()

    def links(self) -> int:
        """Give how many names the file has."""
        return self.inner.links()

    def allocate(self, size: int) -> None:
        """Allocate, or fail."""
        guard = _Guard(self.script, "allocate", self.path)
        self.inner.allocate(size)
        guard.done()

    def read_into(self, buffer: memoryview, offset: int) -> None:
        """Read, or fail."""
        guard = _Guard(self.script, "read", self.path, offset)
        self.inner.read_into(buffer, offset)
        guard.done()

    def write_from(self, buffer: memoryview, offset: int) -> None:
        """Write, write a half, or fail."""
        guard = _Guard(self.script, "write", self.path, offset)
        data = buffer.cast("B")
        short = guard.fault is not None and guard.fault.how == "short"
        self.inner.write_from(data[: data.nbytes // 2] if short else data, offset)
        guard.done()

    def sync(self) -> None:
        """Sync, or fail."""
        guard = _Guard(self.script, "sync", self.path)
        self.inner.sync()
        guard.done()

    def drop_cache(self) -> None:
        """Drop the cache."""
        self.inner.drop_cache()

    def fileno(self) -> int | None:
        """None."""
        return None

    def mapping(self) -> memoryview | None:
        """None."""
        return None

    def lock_shared(self) -> bool:
        """Lock for reading."""
        return self.inner.lock_shared()

    def lock_exclusive(self) -> bool:
        """Lock for writing."""
        return self.inner.lock_exclusive()

    def unlock(self) -> None:
        """Unlock."""
        self.inner.unlock()

    def close(self) -> None:
        """Close."""
        self.inner.close()


@final
class FaultyPage:
    """A CHECK page that fails by script where it is written as bytes or synced."""

    def __init__(self, inner: CheckPage, script: Script, path: str) -> None:
        self.inner, self.script, self.path = inner, script, path
        self.atomic = inner.atomic

    def load(self, offset: int) -> int:
        """Give a word."""
        return self.inner.load(offset)

    def store(self, offset: int, value: int) -> None:
        """Set a word."""
        self.inner.store(offset, value)

    def compare_and_swap(self, offset: int, expected: int, value: int) -> bool:
        """Set a word if it is `expected`."""
        return self.inner.compare_and_swap(offset, expected, value)

    def read(self, offset: int, length: int) -> bytes:
        """Give bytes."""
        return self.inner.read(offset, length)

    def write(self, offset: int, data: bytes) -> None:
        """Set bytes, or fail."""
        guard = _Guard(self.script, "check_write", self.path, offset)
        self.inner.write(offset, data)
        guard.done()

    def sync(self) -> None:
        """Sync, or fail."""
        guard = _Guard(self.script, "check_sync", self.path)
        self.inner.sync()
        guard.done()

    def links(self) -> int:
        """Give how many names CHECK has."""
        return self.inner.links()

    def close(self) -> None:
        """Close."""
        self.inner.close()


@final
class FaultyVolume:
    """A volume that fails by script, and gives media and a CHECK page that do."""

    def __init__(self, inner: Volume, script: Script) -> None:
        self.inner, self.script, self.path = inner, script, inner.path

    def names(self, folder: str = "") -> list[str]:
        """List, or fail."""
        guard = _Guard(self.script, "names", folder)
        names = self.inner.names(folder)
        guard.done()
        return names

    def create(self, name: str, size: int) -> Medium:
        """Create, or fail; a create that fails has left nothing, also one that fails "after"."""
        guard = _Guard(self.script, "create", name)
        medium = self.inner.create(name, size)
        if guard.fault is not None:
            medium.close()
            self.inner.remove(name)
            guard.done()
        return FaultyMedium(medium, self.script)

    def open(self, name: str, *, write: bool = False) -> Medium:
        """Open, or fail."""
        guard = _Guard(self.script, "open", name)
        medium = self.inner.open(name, write=write)
        if guard.fault is not None:
            medium.close()
            guard.done()
        return FaultyMedium(medium, self.script)

    def link(self, name: str, new_name: str) -> None:
        """Link, or fail."""
        guard = _Guard(self.script, "link", new_name)
        self.inner.link(name, new_name)
        guard.done()

    def remove(self, name: str) -> None:
        """Remove, or fail."""
        guard = _Guard(self.script, "remove", name)
        self.inner.remove(name)
        guard.done()

    def is_named(self, name: str, medium: Medium) -> bool:
        """Tell whether a name leads to a medium."""
        return self.inner.is_named(name, medium.inner if isinstance(medium, FaultyMedium) else medium)

    def sync_names(self, folder: str = "") -> None:
        """Sync names, or fail."""
        guard = _Guard(self.script, "sync_names", folder)
        self.inner.sync_names(folder)
        guard.done()

    def check_page(self, *, create: bool) -> CheckPage:
        """Open CHECK, or fail."""
        guard = _Guard(self.script, "check_page", "CHECK")
        page = self.inner.check_page(create=create)
        if guard.fault is not None:
            page.close()
            guard.done()
        return FaultyPage(page, self.script, "CHECK")

    def lock(self) -> bool:
        """Lock, or fail; a failed one holds nothing."""
        guard = _Guard(self.script, "lock", "CHECK")
        locked = self.inner.lock()
        if guard.fault is not None:
            self.inner.unlock()
            guard.done()
        return locked

    def unlock(self) -> None:
        """Unlock."""
        self.inner.unlock()

    def free_bytes(self) -> int:
        """Give the free bytes."""
        return self.inner.free_bytes()

    def close(self) -> None:
        """Close."""
        self.inner.close()
