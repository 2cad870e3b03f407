"""What happens to open things in a forked child: they are closed there (floor 1: imports floor 0).

A child that inherits the descriptor of the lock keeps the store locked for as long as it lives: idle DataLoader workers
did so after their parent was killed. So everything that holds a descriptor is entered here when it is opened, and one
hook per process, installed with the first of them, lets go of all of them in every forked child.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from pccheck.errors import ForkedError

FORK_WAIT_S = 5.0


class Held(Protocol):
    """Something open that a forked child must not keep."""

    def forget(self) -> None:
        """Let go of descriptors in a forked child; called in its only thread, must not take a lock."""


# Process-wide because fork is: a hook can neither be installed per store nor be removed again.
_opening = threading.Lock()
_open: weakref.WeakSet[Held] = weakref.WeakSet()
_installed: list[int] = []


@contextmanager
def opening() -> Iterator[None]:
    """Hold off forks of this process while a descriptor is opened and entered, so that no child is left with it."""
    with _opening:
        if not _installed:
            _installed.append(os.getpid())
            if hasattr(os, "register_at_fork"):
                os.register_at_fork(before=_before, after_in_parent=_in_parent, after_in_child=_in_child)
        yield


def enter(thing: Held) -> None:
    """Have `thing.forget()` called in forked children for as long as it lives; call it inside `opening()`."""
    _open.add(thing)


def check_owner(pid: int, what: str) -> None:
    """Raise ForkedError unless this process is `pid`, the one that opened `what`."""
    if os.getpid() != pid:
        raise ForkedError(
            f"{what} was opened by process {pid} and this is its forked child {os.getpid()}: "
            "a store belongs to the process that opened it, open it again here"
        )


# Whether the fork that a thread is making holds `_opening`: one that timed out must not release it for another.
_forking = threading.local()


def _before() -> None:
    _forking.holds = _opening.acquire(timeout=FORK_WAIT_S)


def _in_parent() -> None:
    if _forking.holds:
        _opening.release()


def _in_child() -> None:
    global _opening
    _opening = threading.Lock()  # the old one may be held by a thread that the child has not got
    for thing in list(_open):
        thing.forget()
    _open.clear()
