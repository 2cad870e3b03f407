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

from pccheck.errors import ClosedError, ForkedError

FORK_WAIT_S = 5.0


class Held(Protocol):
    """Something open that a forked child must not keep."""

    def forget(self) -> None:
        """Let go of descriptors in a forked child; called in its only thread, must not take a lock."""


# Process-wide because fork is: a hook can neither be installed per store nor be removed again.
_changing = threading.RLock()  # re-entrant: a signal handler may save inside an opening
_open: weakref.WeakSet[Held] = weakref.WeakSet()
_installed: list[int] = []


@contextmanager
def held_off() -> Iterator[None]:
    """Hold off forks of this process while a descriptor is opened and entered, or closed: no child is left with it."""
    with _changing:
        if not _installed:
            _installed.append(os.getpid())
            if hasattr(os, "register_at_fork"):
                os.register_at_fork(before=_before, after_in_parent=_in_parent, after_in_child=_in_child)
        yield


def enter(thing: Held) -> None:
    """Have `thing.forget()` called in forked children for as long as it lives; call it inside `held_off()`."""
    _open.add(thing)


def closer(owner: object, fd: int) -> weakref.finalize[[int], object]:
    """Give what closes `fd` when it is called, once, or when `owner` is dropped without."""
    closes = weakref.finalize(owner, os.close, fd)
    closes.atexit = False  # the end of the process closes it, and until then daemon threads may use it
    return closes


def check_owner(pid: int, what: str) -> None:
    """Raise ForkedError unless this process is `pid`, the one that opened `what`."""
    if os.getpid() != pid:
        raise ForkedError(
            f"{what} was opened by process {pid} and this is its forked child {os.getpid()}: "
            "a store belongs to the process that opened it, open it again here"
        )


def check_open(fd: int, pid: int, what: str) -> int:
    """Give the descriptor of `what`, which process `pid` opened; raises ForkedError, or ClosedError where it is -1."""
    check_owner(pid, what)
    if fd < 0:
        raise ClosedError(f"{what} was closed before this call")
    return fd


# Whether the fork that a thread is making holds `_changing`: one that timed out must not release it for another.
_forking = threading.local()


def _before() -> None:
    _forking.holds = _changing.acquire(timeout=FORK_WAIT_S)


def _in_parent() -> None:
    if getattr(_forking, "holds", False):
        _changing.release()


def _in_child() -> None:
    global _changing
    _changing = threading.RLock()  # the old one may be held by a thread that the child has not got
    for thing in list(_open):
        thing.forget()
    _open.clear()
