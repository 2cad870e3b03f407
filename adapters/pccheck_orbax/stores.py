"""The stores that this process has open for Orbax, shared by its engines (may import pccheck)."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, final

import pccheck
from pccheck.errors import DeadlineError, PccheckError, UsageError
from pccheck_orbax.layout import STORES

_LOCK_S = 600.0  # opening reads records and may wait for the lock of a writer that has just died


@dataclass
class _Open:
    checkpointer: pccheck.Checkpointer
    options: Mapping[str, Any]
    identity: tuple[int, int]
    users: set[int] = field(default_factory=set)


@final
class Stores:
    """Open stores by folder. Thread-safe.

    A store has one writer, but Orbax's users make managers as they please: a second one on a root whose first was never
    closed is common, and so is a handler made anew for each save. All of one process use the same Checkpointer.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open: dict[tuple[int, str], _Open] = {}

    def take(
        self, folder: str, user: object, options: Mapping[str, Any], make: Callable[[], pccheck.Checkpointer]
    ) -> pccheck.Checkpointer:
        """Give the Checkpointer of a store, opened by `make` unless it is open, and note who uses it.

        One whose folder was removed meanwhile is closed and opened anew.

        Raises:
            UsageError: it is open with other options.
            (any): what `make` raises.
        """
        key = (os.getpid(), folder)  # what a forked child inherits is not its own
        self._acquire(folder)
        try:
            held = self._open.get(key)
            if held is not None and held.identity != _identity(folder):
                _close_gone(self._open.pop(key))
                held = None
            if held is None:
                held = self._open[key] = _Open(make(), dict(options), _identity(folder))
            elif held.options != options:
                raise UsageError(
                    f"{folder} is open in this process with {dict(held.options)}, and {dict(options)} are asked for: "
                    "use the same options, share one Engine, or close the other manager first"
                )
            held.users.add(id(user))
            return held.checkpointer
        finally:
            self._lock.release()

    def look(self, folder: str) -> pccheck.Checkpointer | None:
        """Give the Checkpointer of a store if it is open; it may be closed at any time."""
        held = self._open.get((os.getpid(), folder))
        return None if held is None else held.checkpointer

    def give_back(self, folder: str, user: object) -> None:
        """Note that somebody uses a store no more; it is closed when nobody does. Raises what failed in it."""
        key = (os.getpid(), folder)
        self._acquire(folder)
        try:
            held = self._open.get(key)
            if held is None or id(user) not in held.users:
                return
            held.users.discard(id(user))
            if held.users:
                return
            del self._open[key]
        finally:
            self._lock.release()
        held.checkpointer.close()

    def _acquire(self, folder: str) -> None:
        if not self._lock.acquire(timeout=_LOCK_S):
            raise DeadlineError(f"another thread that opens or closes a store, to open {folder}", _LOCK_S)


OPEN = Stores()
_CHECK = "CHECK"  # of every store: docs/format.md


def assert_no_checkpointer(root: str) -> None:
    """Raise UsageError for a folder that a `Checkpointer` of the user's saves in, and no manager of ours yet.

    Once steps lay there, too, the Checkpointer would refuse it.
    """
    if os.path.isfile(os.path.join(root, _CHECK)) and not os.path.lexists(os.path.join(root, STORES)):
        raise UsageError(
            f"{root} holds checkpoints of a pccheck.Checkpointer (it has a file {_CHECK}), and nothing was changed: "
            "save Orbax's steps in another directory"
        )


def _identity(folder: str) -> tuple[int, int]:
    try:
        found = os.stat(os.path.join(folder, _CHECK))
    except OSError:
        return (0, 0)
    return (found.st_dev, found.st_ino)


def _close_gone(held: _Open) -> None:
    try:
        held.checkpointer.close()
    except PccheckError:
        pass  # its files are gone: whoever had saves under way in it was told by these
