"""Where a checkpoint's file lives until Orbax asks for it (may import pccheck, Orbax).

A save becomes durable whether or not Orbax manages to make the folder of its step: it is linked into a folder of ours,
and moved when Orbax waits for it, which it does once its own folders are there. What it never asks for is removed. A
save that waited for Orbax's folder instead would hold its slot, and up the saves behind it, for as long as Orbax fails
to say that there will be none.
"""

from __future__ import annotations

import errno
import os
import shutil
import threading
import time
import uuid
from concurrent.futures import CancelledError
from pathlib import Path
from typing import Literal, final

from pccheck import links
from pccheck.errors import DeadlineError
from pccheck_orbax.durable import TEMPORARY, sync_file, sync_names
from pccheck_orbax.layout import STAGED

_POLL_S = 0.005
_COPYING = ".pccheck_copying-"
_FOLDER_S = 300.0  # what Orbax gives the making of folders


@final
class Staged:
    """A place for the file of one save of one process, in a folder of its own under the root. Thread-safe.

    Args:
        root: the folder that holds the steps.
        item: the item's name.
        process: the process's number.

    Raises OSError where the folder cannot be made.
    """

    def __init__(self, root: str, item: str, process: int) -> None:
        self._folder = os.path.join(root, STAGED, f"{prefix(item, process)}{uuid.uuid4().hex}")
        self._name = links.rank_name(process)
        self._lock = threading.Lock()
        self._state: Literal["staged", "moved", "dropped"] = "staged"
        self._moved: tuple[str, int, int] | None = None  # path, device and inode
        self._seen = False  # the step's temporary folder was there
        os.makedirs(self._folder)

    @property
    def path(self) -> str:
        """Where the save is to be linked to."""
        return os.path.join(self._folder, self._name)

    def look(self, folder: str) -> None:
        """Note whether Orbax has made the step's temporary folder: if it then goes, nobody will make it again."""
        self._seen = self._seen or _has_step(folder)

    def move(self, folder: str, timeout_s: float | None = None) -> None:
        """Move the file into the folder of its item, durably; once it was moved, do nothing.

        Raises:
            CancelledError: it was dropped, or the step's temporary folder was there and was removed.
            DeadlineError: the folder is not there in time.
            OSError: it cannot be moved.
        """
        self._await(folder, _FOLDER_S if timeout_s is None else min(timeout_s, _FOLDER_S))
        target = os.path.join(folder, self._name)
        with self._lock:
            if self._state == "dropped":
                raise CancelledError(f"the save into {folder} was called off")
            if self._state == "moved":
                return
            try:
                os.rename(self.path, target)
            except OSError as error:
                if error.errno != errno.EXDEV:
                    raise
                _copy(self.path, folder)
            found = os.stat(target)
            self._moved, self._state = (target, found.st_dev, found.st_ino), "moved"
        sync_names(Path(folder))
        _remove_folder(self._folder)

    def _await(self, folder: str, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        while not os.path.isdir(folder):
            self.look(folder)
            if self._seen and not _has_step(folder):
                raise CancelledError(f"{os.path.dirname(folder)} was removed before the save into it was whole")
            if time.monotonic() > deadline:
                raise DeadlineError(f"Orbax to make {folder}", timeout_s)
            time.sleep(_POLL_S)

    def drop(self) -> None:
        """Remove the file, unless it was moved; a save under way fails for want of its folder."""
        with self._lock:
            if self._state != "staged":
                return
            self._state = "dropped"
        _remove(self.path)
        _remove_folder(self._folder)

    def drop_moved(self) -> None:
        """Remove the file from the folder that it was moved to, if it is still there under that name."""
        with self._lock:
            moved = self._moved
        if moved is None:
            return
        path, device, inode = moved
        try:
            found = os.stat(path, follow_symlinks=False)
        except OSError:
            return  # the folder was renamed, as it should be, or removed
        if (found.st_dev, found.st_ino) == (device, inode):  # not what another attempt has put there
            _remove(path)


def prefix(item: str, process: int) -> str:
    """Give how the names begin of the folders that a process stages an item in."""
    return f"{item}.{process}."


def clear(root: str, item: str, process: int, store: str) -> None:
    """Remove what a process has staged of an item, whose store nobody has open."""
    staged = os.path.join(root, STAGED)
    links.drop_stale(staged, store, process)
    try:
        names = os.listdir(staged)
    except OSError:
        return
    for name in names:
        if name.startswith(prefix(item, process)):
            _remove_folder(os.path.join(staged, name))


def _has_step(folder: str) -> bool:
    step = os.path.dirname(folder)
    return TEMPORARY in os.path.basename(step) and os.path.isdir(step)


def _copy(path: str, folder: str) -> None:
    """Move a file into a folder of another file system: a synced copy gets its name there, then the file goes.

    Until then it has the name that `links.drop_stale` looks for, in a folder of its own: a crash leaves nothing behind.
    """
    name = os.path.basename(path)
    beside = os.path.join(folder, f"{_COPYING}{uuid.uuid4().hex}")
    copy = os.path.join(beside, name)
    os.mkdir(beside)
    try:
        shutil.copyfile(path, copy, follow_symlinks=False)
        sync_file(copy)
        os.rename(copy, os.path.join(folder, name))
    finally:
        _remove(copy)
        _remove_folder(beside)
    _remove(path)


def _remove(path: str) -> None:
    try:
        os.unlink(path)
    except OSError:
        pass  # it is not there; or it is found at the next start


def _remove_folder(path: str) -> None:
    try:
        os.rmdir(path)
    except OSError:
        pass  # it is not there, or not empty; then it is found at the next start
