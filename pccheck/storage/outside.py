"""Files of a store under names in other people's folders: linked, copied, listed, cleared (floor 1: imports floor 0,
names, fileio).

A path here is somebody else's: symbolic links that lead to its folder are followed, its last part never is.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from signal import SIGURG

from pccheck.errors import MediumError, StoreGoneError
from pccheck.format import CHECK_NAME, PAGE, RECORD_BYTES
from pccheck.storage import fileio, names
from pccheck.storage.fileio import Storage
from pccheck.storage.names import told

# What a file system answers that cannot give this file one more name there: then it is copied.
NO_LINK = names.NO_LINKS | {errno.EXDEV}


def link(folder_fd: int, leaf: str, opened: int, path: str) -> None:
    """Give an open file, which `leaf` should name, a name more; MediumError (errno in NO_LINK) where it can have none.

    It is the open file that counts: another process may have taken the store, and put a file of its own under the name.
    """
    with _folder_of(path) as (new_fd, new_leaf):
        with told("link", path):
            try:
                os.link(leaf, new_leaf, src_dir_fd=folder_fd, dst_dir_fd=new_fd, follow_symlinks=False)
            except FileExistsError:
                if not names.is_named(opened, new_leaf, new_fd, path):  # over a network it may be made, and fail, too
                    raise
            if names.is_named(opened, new_leaf, new_fd, path):
                return
            os.unlink(new_leaf, dir_fd=new_fd)
        raise _gone(path)


def copy(folder_fd: int, leaf: str, opened: int, path: str) -> None:
    """Put a synced copy of an open file, which `leaf` must name, at a free path."""
    with _folder_of(path) as (new_fd, new_leaf):
        if names.exists(new_leaf, new_fd):
            raise MediumError("copy", path, FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST)))
        if not names.is_named(opened, leaf, folder_fd, path):
            raise _gone(path)
        names.copy_synced(folder_fd, leaf, new_fd, new_leaf, path)


def take_in(path: str, folder_fd: int, leaf: str, wanted: Callable[[bytes, int], bool]) -> int | None:
    """Make a file one that was never used, at a free name in another folder, and give it open; None = it was not taken.

    It is left, or goes, where somebody else may have it: it has one name more, or is open or mapped anywhere, or was
    given another mode or owner. Those would see what is written next; a file that is removed stays theirs.

    Asked twice, before and after its old name is gone, durably: who found the file by that name, and had to wait for an
    answer, has it open then, or has made a link of it. (Asked once, a backup that walks folders by their descriptors
    met other bytes: seen.) A power loss in between leaves a hidden file, which the next opening removes.

    Args:
        path: where it is; its folder is no symbolic link.
        folder_fd: of the other folder, which has CHECK, by whose mode and owner a file is told to be as it was made.
        leaf: the name there.
        wanted: tells by the first sector and the size of a file whether it is to be taken.
    """
    hidden, fd, moved = names.half(leaf), -1, False
    try:
        with _folder_of(path, follow=False) as (old_fd, old_leaf):
            fd = os.open(old_leaf, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=old_fd)
            if not (wanted(_first_sector(fd, path), os.fstat(fd).st_size) and _is_as_made(fd, folder_fd)):
                return None
            with _alone(fd) as alone:
                if not alone():
                    return None
                os.rename(old_leaf, hidden, src_dir_fd=old_fd, dst_dir_fd=folder_fd)
                moved = True
                if not alone():
                    return None
            fileio.sync_folder(old_fd, os.path.dirname(path))
            with _alone(fd) as alone:
                # By that name still: the file in its old place may have been another one by the time of the rename.
                if not (alone() and names.is_named(fd, hidden, folder_fd, path)):
                    return None
                _empty(fd, path)
                if alone() and not names.exists(leaf, folder_fd):
                    os.rename(hidden, leaf, src_dir_fd=folder_fd, dst_dir_fd=folder_fd)
                    moved, taken, fd = False, fd, -1
                    return taken
    except (OSError, MediumError):
        pass  # no links, no leases, no such file: whoever wanted it taken removes it
    finally:
        if moved:
            _remove(hidden, folder_fd)
        if fd >= 0:
            os.close(fd)
    return None


def _empty(fd: int, path: str) -> None:
    """Overwrite a file's first page with zeros, durably, past the page cache.

    Durably: else a power loss could leave the old beginning under the new name. Past the cache, whose pages may be
    on their way to somebody who was sent the file (sendfile, splice) and has closed it: they keep what they hold.
    """
    flags = fcntl.fcntl(fd, fcntl.F_GETFL)
    with mmap.mmap(-1, PAGE) as zeros, memoryview(zeros) as page:
        fcntl.fcntl(fd, fcntl.F_SETFL, flags | os.O_DIRECT)
        try:
            fileio.write_all(fd, page, 0, path, PAGE)
        finally:
            fcntl.fcntl(fd, fcntl.F_SETFL, flags)
    fileio.sync_file(fd, path)


def _is_as_made(fd: int, folder_fd: int) -> bool:
    """Tell whether a file has the mode and owner of the store's own, and nobody's attributes."""
    found, own = os.fstat(fd), os.stat(CHECK_NAME, dir_fd=folder_fd)
    attributes = [name for name in os.listxattr(fd) if not name.startswith("security.")]
    same = (found.st_mode, found.st_uid, found.st_gid) == (own.st_mode, own.st_uid, own.st_gid)
    return same and not attributes


@contextmanager
def _alone(fd: int) -> Iterator[Callable[[], bool]]:
    """Give what tells whether nobody else has a file, by name, open or mapped, or tried to open it since.

    That is what a write lease says. Whoever tries waits meanwhile, and the kernel tells this process: by SIGIO, which
    would end it, unless told how.
    """

    def alone() -> bool:
        return os.fstat(fd).st_nlink == 1 and fcntl.fcntl(fd, fcntl.F_GETLEASE) == fcntl.F_WRLCK

    if not hasattr(fcntl, "F_SETLEASE") or os.fstat(fd).st_nlink != 1:
        yield lambda: False  # who reads a linked copy is not to wait, or to be told to come again
        return
    fcntl.fcntl(fd, fcntl.F_SETSIG, SIGURG)
    fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_WRLCK)
    try:
        yield alone
    finally:
        fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_UNLCK)  # a forked child's copy of the descriptor would keep it


def _remove(leaf: str, folder_fd: int) -> None:
    try:
        os.unlink(leaf, dir_fd=folder_fd)
    except OSError:
        pass  # the next opening removes it


def sync(path: str) -> None:
    """Make the names in the folder of a path durable; where that fails, the path is removed as far as it can be."""
    with _folder_of(path) as (fd, leaf):
        try:
            fileio.sync_folder(fd, os.path.dirname(path))
        except MediumError:
            try:
                os.unlink(leaf, dir_fd=fd)
            except OSError:
                pass  # the failed sync is the error to see
            raise


def write_synced(path: str, data: bytes) -> None:
    """Put a file there, whole or not at all, and make it and its name durable."""
    with _folder_of(path) as (folder_fd, leaf):
        half = names.half(leaf)
        with told("creation", path):
            fd = os.open(half, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o666, dir_fd=folder_fd)
            try:
                fileio.write_all(fd, memoryview(data), 0, path)
                fileio.sync_file(fd, path)
                os.rename(half, leaf, src_dir_fd=folder_fd, dst_dir_fd=folder_fd)
            except BaseException:
                os.unlink(half, dir_fd=folder_fd)
                raise
            finally:
                os.close(fd)
        fileio.sync_folder(folder_fd, os.path.dirname(path))


def remove_below(folder: str, leaves: Collection[str], doomed: Callable[[bytes], bool], *, lister: str) -> int:
    """Remove regular files of these names, in a folder and below it, whose first sector is doomed; give how many.

    No symbolic link is followed; what is gone, or may not be looked at, is left out. `lister`: the name of the file
    that lists them, which goes before the first of them: a crash in between leaves files that nothing lists, never a
    list of files that are missing, which would be called damage.
    """
    removed = 0
    halves = [names.half(leaf) for leaf in leaves]
    for where, _, files, fd in _walk(folder):
        for leaf in [leaf for leaf in (*leaves, *halves) if leaf in files]:
            path = os.path.join(where, leaf)
            if doomed(_head(fd, leaf, path)):
                if leaf in leaves and lister in files:
                    _unlink(fd, lister, os.path.join(where, lister))
                removed += _unlink(fd, leaf, path) and leaf in leaves
    return removed


def _unlink(folder_fd: int, leaf: str, path: str) -> bool:
    """Remove a name; tell whether it was there."""
    with told("removal", path):
        try:
            os.unlink(leaf, dir_fd=folder_fd)
        except FileNotFoundError:
            return False
    return True


def leads_to(path: str, folder_fd: int, storage: Storage = "buffered") -> bool:
    """Tell whether a path leads to an open folder; of one that may not be looked at, that is believed."""
    try:
        found, own = os.stat(path), fileio.status(folder_fd, path, storage)
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError:
        return True  # no permission, or a server that does not answer: that says nothing of where it is
    return own.is_of(found)


def folders_in(folder: str) -> list[str]:
    """Give the sorted names of the folders in a folder, no symbolic links; none where it may not be looked at."""
    try:
        with os.scandir(folder) as entries:
            return sorted(entry.name for entry in entries if entry.is_dir(follow_symlinks=False))
    except OSError:
        return []


def _walk(folder: str) -> Iterator[tuple[str, list[str], list[str], int]]:
    try:
        yield from os.fwalk(folder, follow_symlinks=False)
    except FileNotFoundError:
        return  # the folder, or one below it, was removed meanwhile


def _head(folder_fd: int, leaf: str, path: str) -> bytes:
    try:
        fd = os.open(leaf, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=folder_fd)
    except OSError:
        return b""
    try:
        return _first_sector(fd, path)
    except MediumError:
        return b""
    finally:
        os.close(fd)


def _first_sector(fd: int, path: str) -> bytes:
    room = memoryview(bytearray(RECORD_BYTES))
    return bytes(room[: fileio.read_up_to(fd, room, 0, path)])


def _gone(path: str) -> StoreGoneError:
    text = "the file in the store was removed or replaced meanwhile; open the store anew"
    return StoreGoneError("link", path, FileNotFoundError(errno.ENOENT, text))


@contextmanager
def _folder_of(path: str, *, follow: bool = True) -> Iterator[tuple[int, str]]:
    """Give a descriptor of a path's folder, which may be a symbolic link if `follow`, and the last part of the path."""
    folder, leaf = os.path.split(path)
    with told("open", folder):
        fd = os.open(folder, names.FOLDER_FLAGS | (0 if follow else os.O_NOFOLLOW))
    try:
        yield fd, leaf
    finally:
        os.close(fd)
