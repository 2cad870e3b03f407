"""Names in a store's folder, opened relative to its descriptor, following nothing (floor 1: floor 0, fileio, forks)."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager

from pccheck.errors import CapacityError, FormatError, MediumError
from pccheck.format import PAGE
from pccheck.storage import fileio
from pccheck.storage.fileio import Storage

FOLDER_FLAGS = os.O_RDONLY | os.O_DIRECTORY
HALF = ".half"  # ends the hidden name of a copy that is being made
# What file systems without hard links answer.
NO_LINKS = frozenset({errno.EPERM, errno.EOPNOTSUPP, errno.ENOTSUP, errno.EMLINK, errno.ENOSYS})
_COPY_BYTES = 1 << 20


def half(leaf: str) -> str:
    """Give the hidden name of a file that is being made, and will be `leaf`."""
    return f".{leaf}{HALF}"


@contextmanager
def told(operation: str, where: str, hint: str = "") -> Iterator[None]:
    """Turn errors of the operating system into MediumError, and a lack of room into CapacityError."""
    try:
        yield
    except MediumError:
        raise
    except OSError as error:
        if error.errno in fileio.NO_ROOM:
            raise CapacityError(where, PAGE, 0) from error  # a name, too, takes space
        if hint and error.errno not in (errno.EWOULDBLOCK, errno.EACCES):
            error = OSError(error.errno, f"{error.strerror}; {hint}")
        raise MediumError(operation, where, error) from error


@contextmanager
def if_there() -> Iterator[None]:
    """Take it for no error that something is missing."""
    try:
        yield
    except MediumError as error:
        if error.errno != errno.ENOENT:
            raise


def split(name: str) -> tuple[str, str]:
    """Give folder ("" for the store's) and file name; raises ValueError for what is no plain name in a store."""
    parts = name.split("/")
    if len(parts) > 2 or any(p in ("", ".", "..") or "\0" in p for p in parts):
        raise ValueError(f"{name!r} is not the name of a file in a store: `name` or `folder/name`")
    return (parts[0] if len(parts) == 2 else ""), parts[-1]


def check_regular(status: os.stat_result, where: str) -> None:
    """Raise FormatError unless the status is a regular file's."""
    if not stat.S_ISREG(status.st_mode):
        kind = "a symbolic link" if stat.S_ISLNK(status.st_mode) else "not a regular file"
        raise FormatError(f"{where} is {kind}; a store has regular files only, remove it")


def exists(leaf: str, folder_fd: int) -> bool:
    """Tell whether a name is there, whatever it names."""
    try:
        os.lstat(leaf, dir_fd=folder_fd)
    except FileNotFoundError:
        return False
    return True


def is_named(fd: int, leaf: str, folder_fd: int, where: str, storage: Storage = "buffered") -> bool:
    """Tell whether `leaf`, called `where` in messages, is still a name of the open file; MediumError."""
    own = fileio.status(fd, where, storage)
    try:
        found = os.lstat(leaf, dir_fd=folder_fd)
    except FileNotFoundError:
        return False
    except OSError as error:
        raise MediumError("status query", where, error) from error
    return own.is_of(found)


def open_folder(base: int, folder: str, where: str, *, make: bool) -> int:
    """Open the store's folder ("") or a subfolder of it, made if it is missing and `make`."""
    with told("open", where):
        if folder:
            split(folder + "/x")
            if make:
                try:
                    os.mkdir(folder, dir_fd=base)
                except FileExistsError:
                    pass
        try:
            return os.open(folder or ".", FOLDER_FLAGS | os.O_NOFOLLOW, dir_fd=base)
        except OSError as error:
            if error.errno in (errno.ELOOP, errno.ENOTDIR):
                raise FormatError(f"{where} is not a folder of a store: {error.strerror}; remove it") from error
            raise


def open_regular(folder_fd: int, leaf: str, where: str, flags: int, operation: str) -> int:
    """Open a regular file; FormatError, naming it, for a symbolic link and whatever else is there."""
    with told(operation, where):
        try:
            # Without O_NONBLOCK a planted FIFO would keep the opener waiting for ever.
            fd = os.open(leaf, flags | os.O_NOFOLLOW | os.O_NONBLOCK, 0o666, dir_fd=folder_fd)
        except OSError as error:
            if error.errno == errno.ELOOP:
                raise FormatError(f"{where} is a symbolic link; a store follows none, put the file there") from error
            if error.errno in (errno.EISDIR, errno.ENXIO, errno.ENODEV):  # folder, FIFO or socket, device
                raise FormatError(f"{where} is not a regular file; remove it") from error
            raise
        try:
            check_regular(os.fstat(fd), where)
        except BaseException:
            os.close(fd)
            raise
    return fd


def copy_synced(fd: int, leaf: str, new_fd: int, new_leaf: str, where: str) -> None:
    """Copy a file under a hidden name, sync it, and only then give it its name; a name that is there is left."""
    if exists(new_leaf, new_fd):
        return
    hidden = half(new_leaf)  # a fixed name, so that crashes leave at most one behind
    source = target = -1
    with told("copy", where):
        try:
            source = os.open(leaf, os.O_RDONLY | os.O_NOFOLLOW, dir_fd=fd)
            if exists(hidden, new_fd):
                os.unlink(hidden, dir_fd=new_fd)
            target = os.open(hidden, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o666, dir_fd=new_fd)
            fileio.allocate(target, os.fstat(source).st_size, where)
            room, offset = memoryview(bytearray(_COPY_BYTES)), 0
            while got := fileio.read_up_to(source, room, offset, where):
                fileio.write_all(target, room[:got], offset, where)
                offset += got
            fileio.sync_file(target, where)
            os.rename(hidden, new_leaf, src_dir_fd=new_fd, dst_dir_fd=new_fd)
        except BaseException:
            if target >= 0:
                os.unlink(hidden, dir_fd=new_fd)
            raise
        finally:
            for each in (source, target):
                if each >= 0:
                    os.close(each)


def read_side(folder_fd: int, leaf: str, where: str, limit: int) -> bytes | None:
    """Give at most the first `limit` bytes of a file; None where it is missing."""
    try:
        fd = open_regular(folder_fd, leaf, where, os.O_RDONLY, "open")
    except MediumError as error:
        if error.errno == errno.ENOENT:
            return None
        raise
    try:
        room = memoryview(bytearray(limit))
        return bytes(room[: fileio.read_up_to(fd, room, 0, where)])
    finally:
        os.close(fd)


def replace_side(folder_fd: int, leaf: str, where: str, data: bytes) -> None:
    """Put a file there by a rename over what has that name; what fails, and what a crash cut short, is removed."""
    hidden = half(leaf)
    fd = open_regular(folder_fd, hidden, where, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, "creation")
    try:
        try:
            fileio.write_all(fd, memoryview(data), 0, where)
        finally:
            os.close(fd)
        with told("rename", where):
            os.rename(hidden, leaf, src_dir_fd=folder_fd, dst_dir_fd=folder_fd)
    except BaseException:
        if exists(hidden, folder_fd):
            os.unlink(hidden, dir_fd=folder_fd)
        raise


def remove_half_copies(folder_fd: int, where: str) -> None:
    """Remove what a writer that died left half copied; for the holder of the writer lock only."""
    with told("removal", where):
        with os.scandir(folder_fd) as entries:
            halves = [e for e in entries if e.name[0] == "." and e.name.endswith(HALF)]
            found = [e.name for e in halves if e.is_file(follow_symlinks=False)]  # no writer makes anything else
        for name in found:
            os.unlink(name, dir_fd=folder_fd)


def sync_way_to(path: str, device: int) -> None:
    """Make the names of a folder and of those above it on its device durable, whoever made them.

    A crash must lose none of them. A folder above that may not be listed ends it: it was not made by us.
    """
    folder = os.path.realpath(path)
    while (above := os.path.dirname(folder)) != folder:
        try:
            fd = os.open(above, FOLDER_FLAGS)
        except PermissionError:
            return
        except OSError as error:
            raise MediumError("open", above, error) from error
        try:
            if os.fstat(fd).st_dev != device:
                return
            fileio.sync_folder(fd, above)
        finally:
            os.close(fd)
        folder = above
