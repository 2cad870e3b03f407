"""A Volume over a real folder (floor 1: imports floor 0, checkpage, fileio, filesystem, forks, media, names, outside).

Every name is opened relative to the folder's descriptor and with O_NOFOLLOW, so that neither a link planted in the
store nor a folder moved meanwhile leads anywhere else. Descriptors are close-on-exec (PEP 446) and closed in forked
children (`pccheck.storage.forks`).
"""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import final

from pccheck.errors import FormatError, MediumError, UsageError
from pccheck.format import CHECK_BYTES, CHECK_NAME, KEPT_FOLDER
from pccheck.storage import fileio, forks, names, outside
from pccheck.storage.checkpage import FilePage, atomics
from pccheck.storage.fileio import Storage
from pccheck.storage.filesystem import storage_of
from pccheck.storage.media import FileMedium
from pccheck.storage.medium import Medium
from pccheck.storage.names import told

_NO_LOCKS_HINT = "this file system has no locks: make sure that one process only writes to this store"
_LOCK_RACES = 8


@final
class Directory:
    """The folder of one store on a real file system. Thread-safe.

    Symbolic links in `path` itself are followed: the user named it. Opened for reading it creates, locks and writes
    nothing, and works on read-only file systems.

    Args:
        path: the folder.
        create: make it, and folders above it, where they are missing; with `write` only.
        write: whether the store may be changed; the folder's own name is then made durable first.

    Raises:
        MediumError: it is missing, not a folder, or may not be used.
    """

    def __init__(self, path: str | os.PathLike[str], *, create: bool, write: bool) -> None:
        if create and not write:
            raise UsageError("create=True needs write=True: a store opened for reading makes nothing")
        self.path = os.path.abspath(os.fsdecode(path))
        self.storage: Storage
        self._write = write
        self._pid = os.getpid()
        self._fd = -1
        self._lock_fd = -1
        with told("open", self.path):
            if create and os.path.exists(self.path) and not os.path.isdir(self.path):
                raise NotADirectoryError(errno.ENOTDIR, "it is a file, and a store is a folder")
            if create:
                os.makedirs(self.path, exist_ok=True)
            with forks.held_off():
                self._fd = os.open(self.path, names.FOLDER_FLAGS)
                self._closes = forks.closer(self, self._fd)
                self._unlocks = self._closes  # what gives the lock back; without one there is nothing more to close
                forks.enter(self)
            self.storage = storage_of(self._fd)
        if write:
            try:
                names.sync_way_to(self.path, os.fstat(self._fd).st_dev)
            except BaseException:
                self.close()
                raise

    def __repr__(self) -> str:
        state = " closed" if self._fd < 0 else " locked" if self._lock_fd >= 0 else ""
        return f"<Directory {self.path} {self.storage}{state}>"

    # -- names -------------------------------------------------------------------------------------------------------

    def names(self, folder: str = "") -> list[str]:
        """Give the sorted names of regular files in the store or in a subfolder; hidden ones are copies under way."""
        try:
            with self._folder(folder) as fd, told("listing", self._where(folder)), os.scandir(fd) as entries:
                return sorted(e.name for e in entries if e.name[0] != "." and e.is_file(follow_symlinks=False))
        except MediumError as error:
            if error.errno == errno.ENOENT and folder:
                return []
            raise

    def create(self, name: str, size: int) -> FileMedium:
        """Make a new allocated file of zeros; what fails leaves nothing behind.

        Raises CapacityError where there is no room, MediumError where the name is taken or the file system failed.
        """
        self._check_writable()
        folder, leaf = names.split(name)
        where = self._where(name)
        with self._folder(folder, make=True) as folder_fd:
            medium = self._open_medium(folder_fd, leaf, where, os.O_RDWR | os.O_CREAT | os.O_EXCL, "creation")
            try:
                medium.allocate(size)
            except BaseException:
                medium.close()
                os.unlink(leaf, dir_fd=folder_fd)
                raise
        return medium

    def open(self, name: str, *, write: bool = False) -> FileMedium:
        """Open a file that is there; FormatError for what is no regular file, MediumError where it cannot be opened."""
        if write:
            self._check_writable()
        folder, leaf = names.split(name)
        with self._folder(folder) as folder_fd:
            return self._open_medium(folder_fd, leaf, self._where(name), os.O_RDWR if write else os.O_RDONLY, "open")

    def link(self, name: str, new_name: str) -> None:
        """Give a file a second name, or where the file system has no links, a synced copy under that name."""
        self._check_writable()
        folder, leaf = names.split(name)
        new_folder, new_leaf = names.split(new_name)
        where = self._where(new_name)
        with self._folder(folder) as fd, self._folder(new_folder, make=True) as new_fd:
            with told("link", self._where(name)):
                names.check_regular(os.lstat(leaf, dir_fd=fd), self._where(name))
            try:
                with told("link", where):
                    os.link(leaf, new_leaf, src_dir_fd=fd, dst_dir_fd=new_fd, follow_symlinks=False)
            except MediumError as error:
                if error.errno == errno.EEXIST:
                    return
                if error.errno not in names.NO_LINKS:
                    raise
                names.copy_synced(fd, leaf, new_fd, new_leaf, where)

    def link_out(self, name: str, medium: Medium, path: str) -> None:
        """Give an open file a name more, at a free path outside of the store; errno in `outside.NO_LINK`: it cannot."""
        self._check_writable()
        outside.link(self._fd, name, self._descriptor(medium), path)

    def copy_out(self, name: str, medium: Medium, path: str) -> None:
        """Put a synced copy of an open file at a free path outside of the store."""
        self._check_writable()
        outside.copy(self._fd, name, self._descriptor(medium), path)

    def take_in(self, path: str, name: str, wanted: Callable[[bytes, int], bool]) -> FileMedium | None:
        """Make a file that is nobody else's one of the store's; only ext4 and xfs tell surely whose a file is."""
        self._check_writable()
        fd = outside.take_in(path, self._fd, name, wanted) if self.storage == "direct" else None
        with forks.held_off():
            return None if fd is None else FileMedium(fd, self._where(name), storage=self.storage, write=True)

    def sync_out(self, path: str) -> None:
        """Make the names in the folder of a path outside of the store durable; where that fails, remove the path."""
        outside.sync(path)

    def remove(self, name: str) -> None:
        """Remove a name; one that is not there is no error, one that is no regular file is a FormatError."""
        self._check_writable()
        folder, leaf = names.split(name)
        where = self._where(name)
        with names.if_there(), self._folder(folder) as fd, told("removal", where):
            names.check_regular(os.lstat(leaf, dir_fd=fd), where)
            os.unlink(leaf, dir_fd=fd)

    def is_named(self, name: str, medium: Medium) -> bool:
        """Tell whether a name leads to this very file."""
        folder, leaf = names.split(name)
        opened, where = self._descriptor(medium), self._where(name)
        if not folder:  # each save asks: the store's own folder is not opened anew
            return names.is_named(opened, leaf, self._open_fd(), where, self.storage)
        with names.if_there(), self._folder(folder) as fd:
            return names.is_named(opened, leaf, fd, where, self.storage)
        return False

    def is_at_path(self) -> bool:
        """Tell whether the store's path, as it was when this was opened, leads to this folder."""
        return outside.leads_to(self.path, self._open_fd(), self.storage)

    def sync_names(self, folder: str = "") -> None:
        """Make the names in a folder durable, and for a subfolder its own name; a missing one has no names to sync."""
        self._check_writable()
        if folder:
            with names.if_there(), self._folder(folder) as fd:
                fileio.sync_folder(fd, self._where(folder))
        fileio.sync_folder(self._open_fd(), self.path)

    def read_side(self, name: str, limit: int) -> bytes | None:
        """Give what a small file beside the checkpoints begins with, at most `limit` bytes; None where it is not."""
        return names.read_side(self._open_fd(), name, self._where(name), limit)

    def replace_side(self, name: str, data: bytes) -> None:
        """Replace such a file whole, or make it: readers find the old one or the new one. Not durable."""
        self._check_writable()
        names.replace_side(self._open_fd(), name, self._where(name), data)

    # -- CHECK, lock, space ------------------------------------------------------------------------------------------

    def check_page(self, *, create: bool) -> FilePage:
        """Open and map CHECK; with `create` make it, all zeros, where it is missing or too short.

        Raises:
            FormatError: it is no regular file, or too short and not to be made.
            MediumError: it is missing and not to be made, or the file system failed.
        """
        if create:
            self._check_writable()
        where = self._where(CHECK_NAME)
        flags = os.O_RDWR if self._write else os.O_RDONLY
        with forks.held_off():
            fd = names.open_regular(self._open_fd(), CHECK_NAME, where, flags | (os.O_CREAT if create else 0), "open")
            try:
                with told("open", where):
                    found = os.fstat(fd).st_size
                if found < CHECK_BYTES and not create:
                    raise FormatError(
                        f"{where} has {found} bytes, not {CHECK_BYTES}: it is no CHECK file or was cut short"
                    )
                if create:
                    # Also where the size is right: a store into a hole of a full disk would be SIGBUS.
                    fileio.allocate(fd, CHECK_BYTES, where)
                    if found < CHECK_BYTES:
                        fileio.write_all(fd, memoryview(bytes(found)), 0, where)
                return FilePage(fd, where, write=self._write, native=atomics(), storage=self.storage)
            except BaseException:
                os.close(fd)
                raise

    def lock(self) -> bool:
        """Take the store's one writer lock; False = another has it. The kernel gives it back when the process ends.

        Raises MediumError (ENOTSUP, ENOLCK, ENOSYS) where there are no locks. Half copies of a dead writer are removed.
        """
        self._check_writable()
        if self._lock_fd >= 0:
            return True
        where = self._where(CHECK_NAME)
        for _ in range(_LOCK_RACES):
            with forks.held_off():
                fd = names.open_regular(self._open_fd(), CHECK_NAME, where, os.O_RDWR | os.O_CREAT, "lock")
                try:
                    with told("lock", where, _NO_LOCKS_HINT):
                        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                        current = names.is_named(fd, CHECK_NAME, self._open_fd(), where, self.storage)
                except BaseException as error:
                    os.close(fd)
                    if isinstance(error, MediumError) and error.errno in (errno.EWOULDBLOCK, errno.EACCES):
                        return False
                    raise
                if current:
                    self._lock_fd = fd
                    self._unlocks = forks.closer(self, fd)
                    break
                os.close(fd)  # CHECK was removed and made anew in between: that lock would exclude nobody
        else:
            return False
        for folder in ("", KEPT_FOLDER):
            with names.if_there(), self._folder(folder) as folder_fd:
                names.remove_half_copies(folder_fd, self._where(folder))
        return True

    def unlock(self) -> None:
        """Give the lock back."""
        self._open_fd()
        with forks.held_off():
            if self._lock_fd >= 0:
                self._lock_fd = -1
                self._unlocks()

    def free_bytes(self) -> int:
        """Give the bytes that a new file could take."""
        return fileio.free_bytes(self._open_fd(), self.path)

    def close(self) -> None:
        """Close the folder and give the lock back; opened files stay open, later calls raise ClosedError."""
        forks.check_owner(self._pid, self.path)
        with forks.held_off():
            self.forget()

    def forget(self) -> None:
        """Let go of folder and lock in a forked child."""
        self._fd = self._lock_fd = -1
        self._unlocks()
        self._closes()

    # -- inside ------------------------------------------------------------------------------------------------------

    def _open_fd(self) -> int:
        return forks.check_open(self._fd, self._pid, self.path)

    def _check_writable(self) -> None:
        self._open_fd()
        if not self._write:
            raise UsageError(f"{self.path} was opened for reading; open it with write=True to change it")

    def _descriptor(self, medium: Medium) -> int:
        opened = medium.fileno()
        if opened is None:
            raise UsageError(f"{medium.path} was not opened through {self.path}")
        return opened

    def _where(self, name: str) -> str:
        return os.path.join(self.path, name) if name else self.path

    @contextmanager
    def _folder(self, folder: str, *, make: bool = False) -> Iterator[int]:
        """Give a descriptor of the store's folder or of a subfolder; every use its own, since listing moves it on."""
        fd = names.open_folder(self._open_fd(), folder, self._where(folder), make=make)
        try:
            yield fd
        finally:
            os.close(fd)

    def _open_medium(self, folder_fd: int, leaf: str, where: str, flags: int, operation: str) -> FileMedium:
        write = flags & os.O_ACCMODE == os.O_RDWR
        with forks.held_off():
            fd = names.open_regular(folder_fd, leaf, where, flags, operation)
            return FileMedium(fd, where, storage=self.storage, write=write)
