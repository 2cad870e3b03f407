"""The folders of a live replay, and what a preempted machine would have forgotten (floor 4: imports errors)."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from pccheck.errors import CapacityError, MediumError, UsageError

_TAIL = 4000  # bytes of a log that are shown


@contextmanager
def workplace(directory: Path, need_bytes: int) -> Iterator[Path]:
    """Make a folder of our own in `directory`, give its absolute path, and remove it with all that is in it.

    Raises UsageError if `directory` is none, which may be mistyped; MediumError if nothing can be made there;
    CapacityError if fewer than `need_bytes` are free.
    """
    check(directory)
    try:
        free = shutil.disk_usage(directory).free
        if free < need_bytes:
            raise CapacityError(str(directory), need_bytes, free)
        folder = Path(tempfile.mkdtemp(prefix="pccheck-replay-", dir=directory.absolute()))  # Orbax takes no other
    except OSError as error:
        raise MediumError("making a folder for the replay", str(directory), error) from error
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def check(directory: Path) -> None:
    """Raise UsageError if this is no folder."""
    if not directory.is_dir():
        raise UsageError(f"{directory} is no folder: name one that is there, on the storage that is to be measured")


def made(directory: Path) -> None:
    """Make the directory if it is not there."""
    directory.mkdir(exist_ok=True)


def emptied(directory: Path) -> None:
    """Make the directory, or remove what is in it."""
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)


def log_file(folder: Path) -> BinaryIO:
    """Open a nameless file for what a process prints."""
    return tempfile.TemporaryFile(dir=folder)


def tail(log: BinaryIO) -> str:
    """Give the end of what was printed."""
    end = log.seek(0, os.SEEK_END)
    log.seek(max(0, end - _TAIL))
    return log.read().decode(errors="replace").strip()


def forget(directory: Path) -> None:
    """Write back what lies in the page cache, and drop it there: a preempted machine's successor has none of it.

    What was written but not synced therefore survives here, as it does the death of a process.
    """
    for folder, _, names in os.walk(directory):
        for name in names:
            try:
                fd = os.open(os.path.join(folder, name), os.O_RDONLY | os.O_NOFOLLOW)
            except OSError:  # not a plain file: nothing that could be cached
                continue
            try:
                os.fsync(fd)
                if hasattr(os, "posix_fadvise"):
                    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            except OSError:  # a file system that cannot: it is only about how quick a restore is
                pass
            finally:
                os.close(fd)
