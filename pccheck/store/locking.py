"""The one writer lock of a store, and the name of its holder (floor 2: imports floors 0 and 1)."""

from __future__ import annotations

import errno
import os
import time
import warnings

from pccheck import format
from pccheck.errors import MediumError, StoreTaken
from pccheck.holders import is_alive, pid_and_parent
from pccheck.storage.volume import CheckPage, Volume
from pccheck.store.check import believed


def take_lock(volume: Volume, check: CheckPage, timeout_s: float) -> None:
    """Take the store's lock; wait for it only while its recorded holder is dead or unknown."""
    deadline = time.monotonic() + timeout_s
    while not _lock(volume):
        holder = format.unpack_holder(check.read(format.HOLDER_OFFSET, format.SECTOR))
        if holder is not None and is_alive(holder):
            raise StoreTaken(volume.path, holder, _hint(holder))
        if time.monotonic() >= deadline:
            hint = "Its recorded holder is dead, but a process that inherited its files still runs: end that one."
            raise StoreTaken(volume.path, holder or "a process that did not leave its name", hint)
        time.sleep(0.02)


def fence_out(check: CheckPage) -> None:
    """Let whoever has this store open without a lock find it taken before anything is looked at.

    Ranks wait for each other between the look and `_adopt`, which sets the incarnation of this life: a writer left over
    went on meanwhile, and gave away the slots of what all had just said to hold (seen). A store that was never opened
    stays so, since that tells one that was lost (see worlds).
    """
    incarnation = believed(check.load(format.INCARNATION_OFFSET))
    if incarnation:
        check.store(format.INCARNATION_OFFSET, incarnation + 1)
        check.sync()


def _lock(volume: Volume) -> bool:
    try:
        return volume.lock()
    except MediumError as error:
        if error.errno not in (errno.ENOTSUP, errno.ENOLCK, errno.ENOSYS):
            raise
        text = f"{error}; a second writer is noticed only when it has opened the store: its opening fences this one out"
        warnings.warn(text, RuntimeWarning, stacklevel=5)
        return True


def _hint(holder: str) -> str:
    pid, parent = pid_and_parent(holder)
    if pid == os.getpid():
        return (
            "That is this very process: it has a Checkpointer open there. close() that one first "
            "(a `with` block does so; one that was dropped without it stays open until the process ends)."
        )
    if parent == os.getppid():
        return (
            "An earlier run of yours that has not ended? Then end that one. Or, since the same parent started it, a "
            "rank of this job? Then pass coordinator= (pccheck_torch.StoreCoordinator() under torchrun, or "
            "pccheck.SharedDirectory), with which ranks share one directory. Unrelated jobs need a directory each."
        )
    return ""
