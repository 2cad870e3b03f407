"""When which operation of a storage fails, for `pccheck.testing.faults` (beside the floors: imports floors 0 and 1)."""

from __future__ import annotations

import errno as codes
import os
import threading
from dataclasses import dataclass
from typing import Literal, final

from pccheck.errors import CapacityError, MediumError
from pccheck.storage.fileio import NO_ROOM

Operation = Literal[
    "*", "read", "write", "sync", "allocate", "open", "create", "link", "remove", "names", "sync_names",
    "check_page", "check_write", "check_sync", "lock", "link_out", "copy_out", "sync_out",
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
class Guard:
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
