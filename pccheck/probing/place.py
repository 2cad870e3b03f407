"""Where a probe works: a folder of its own, within bounds, that is gone afterwards (floor 3: imports errors, storage).

The folder has one name, and whoever holds its lock has the probe of that directory. So what a killed probe leaves is
found by the next, and two never measure each other.
"""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager

from pccheck.errors import UsageError
from pccheck.storage import filesystem
from pccheck.storage.names import FOLDER_FLAGS, told

NAME = "pccheck-probe.tmp"
STORE = "store"  # the one thing in it
SHARE = 0.5  # of what is free, at most so much is used
_RACES = 8
_NO_LOCKS = frozenset({errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL})


@contextmanager
def workplace(directory: str) -> Iterator[str]:
    """Give the path of an empty folder in a directory, and remove it at the end, whatever that is.

    What a killed probe left there is removed first.

    Raises:
        UsageError: the directory is none, another probe is at work there, or the folder holds what no probe made.
        MediumError: the directory cannot be written to.
    """
    if not os.path.isdir(directory):
        raise UsageError(
            f"{directory} is no folder; make the folder that checkpoints will be written to, then probe it"
        )
    path = os.path.join(directory, NAME)
    fd = _locked(path)
    try:
        _check_ours(path)
        _empty(path)
        try:
            yield path
        finally:
            _empty(path)
            with told("removal", path):
                os.rmdir(path)
    finally:
        os.close(fd)  # only now may another probe have the name


def _locked(path: str) -> int:
    """Make the folder, and give its descriptor with the lock on it; where the file system has no locks, without."""
    for _ in range(_RACES):
        with told("open", path):
            try:
                os.mkdir(path, 0o700)
            except FileExistsError:
                pass
            try:
                fd = os.open(path, FOLDER_FLAGS | os.O_NOFOLLOW)
            except FileNotFoundError:  # the probe that held it has just ended
                continue
            except NotADirectoryError:
                raise UsageError(f"{path} is no folder of a probe; remove it") from None
        try:
            if _lock(fd, path) and _is_named(fd, path):
                return fd
        except BaseException:
            os.close(fd)
            raise
        os.close(fd)
    raise UsageError(f"other probes begin and end at {path} all the time; let one of them run")


def _lock(fd: int, path: str) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise UsageError(f"another probe is at work in {path}; two would measure each other: wait for it") from None
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
    return True


def _is_named(fd: int, path: str) -> bool:
    try:
        return os.path.samestat(os.fstat(fd), os.lstat(path))
    except FileNotFoundError:
        return False


def _check_ours(path: str) -> None:
    """Raise UsageError where there is anything but what a killed probe left."""
    with told("listing", path):
        others = sorted(set(os.listdir(path)) - {STORE})
    left = os.path.join(path, STORE)
    if not others and os.path.lexists(left) and not stat.S_ISDIR(os.lstat(left).st_mode):
        others = [STORE]
    if others:
        raise UsageError(f"{path} holds {others[0]!r}, which no probe made; move it away")


def _empty(path: str) -> None:
    left = os.path.join(path, STORE)
    if os.path.lexists(left):
        with told("removal", left):
            shutil.rmtree(left)


def free_bytes(directory: str) -> int:
    """Give the bytes that this user may still write to the file system of a directory."""
    with told("free space query", directory):
        found = os.statvfs(directory)
    return found.f_bavail * found.f_frsize


def filesystem_of(directory: str) -> tuple[str, str]:
    """Give the kind of the file system that a folder is on, "?" where nothing tells, and that of the medium there."""
    fd = os.open(directory, FOLDER_FLAGS)
    try:
        device = os.fstat(fd).st_dev
        storage = filesystem.storage_of(fd)
    finally:
        os.close(fd)
    wanted = f"{os.major(device)}:{os.minor(device)}"
    try:
        lines = filesystem.MOUNTS.read_text("utf-8", "surrogateescape").splitlines()
    except OSError:
        lines = []
    for head, _, tail in (line.partition(" - ") for line in lines):
        if len(head.split()) > 2 and head.split()[2] == wanted and tail:
            return tail.split()[0], storage
    return "?", storage
