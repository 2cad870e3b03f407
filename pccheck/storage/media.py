"""The medium of one regular file: direct, mapped or buffered (floor 1: imports floor 0, forks, fileio).

| medium   | for                            | writes                          | reads                |
|----------|--------------------------------|---------------------------------|----------------------|
| direct   | ext4, xfs                      | O_DIRECT                        | past the page cache  |
| mapped   | tmpfs; ext4, xfs over DAX      | by store, or write              | through the cache    |
| buffered | everything else                | through the page cache          | through the cache    |
"""

from __future__ import annotations

import fcntl
import mmap
import os
import threading
from typing import final

import numpy as np

from pccheck.errors import MediumError
from pccheck.storage import fileio, forks
from pccheck.storage.fileio import PAGE, Storage

BOUNCE_BYTES = 1 << 20


def address_of(data: memoryview) -> int:
    """Give where in memory the bytes of a contiguous, non-empty buffer begin."""
    return int(np.frombuffer(data, np.uint8).__array_interface__["data"][0])


@final
class FileMedium:
    """One open regular file. Thread-safe as the Medium protocol says.

    On a direct medium whole, aligned pages go straight to the device. Unaligned memory goes through an aligned bounce
    buffer; a page written in part is read, patched and written back under a lock, so writes of different bytes of one
    page through one medium do not lose each other, and a file that is written past its end ends on a whole page.

    Args:
        fd: descriptor of the file, taken over.
        path: for messages.
        storage: how it is written, see `pccheck.storage.filesystem`.
        write: whether it was opened for writing.
    """

    def __init__(self, fd: int, path: str, *, storage: Storage, write: bool) -> None:
        self.path = path
        self.storage = storage
        self._fd = fd
        self._closes = forks.closer(self, fd)
        self._write = write
        self._pid = os.getpid()
        self._lock = threading.RLock()  # guards the mapping, and pages that are patched
        self._map: mmap.mmap | None = None
        self._sync_error: MediumError | None = None
        if storage == "direct" and not _set_direct(fd):
            self.storage = "buffered"
        self._unit = PAGE if self.storage == "direct" else 1
        forks.enter(self)

    def __repr__(self) -> str:
        return f"<FileMedium {self.path} {self.storage}{' closed' if self._fd < 0 else ''}>"

    @property
    def alignment(self) -> int:
        """What offset, length and address of I/O on `fileno()` must be multiples of."""
        return self._unit

    def size(self) -> int:
        """Give the size in bytes."""
        return self._status().size

    def links(self) -> int:
        """Give how many names the file has; 0 after its last name was removed."""
        return self._status().links

    def allocate(self, size: int) -> None:
        """Make the file at least `size` bytes (whole pages on a direct medium), its space really taken.

        Raises CapacityError where there is no room; then nothing was taken.
        """
        fileio.allocate(self._open_fd(), -(-size // self._unit) * self._unit, self.path)

    def read_into(self, buffer: memoryview, offset: int) -> None:
        """Fill `buffer` from `offset`; raises MediumError where the file ends sooner."""
        fd, room = self._open_fd(), buffer.cast("B")
        if not room.nbytes:
            return
        if self._is_aligned(room, offset):
            got = fileio.read_up_to(fd, room, offset, self.path, self._unit)
        else:
            got = self._read_through_bounce(fd, room, offset)
        if got < room.nbytes:
            raise fileio.ends_early(self.path, offset, room.nbytes, got)

    def write_from(self, buffer: memoryview, offset: int) -> None:
        """Write all of `buffer` at `offset`; not durable before `sync`."""
        fd, data = self._open_fd(), buffer.cast("B")
        if not data.nbytes:
            return
        if self._is_aligned(data, offset):
            fileio.write_all(fd, data, offset, self.path, self._unit)
            return
        done = 0
        while done < data.nbytes:
            at = offset + done
            if at % PAGE or data.nbytes - done < PAGE:
                count = min(PAGE - at % PAGE, data.nbytes - done)
                self._patch_page(fd, data[done : done + count], at)
            else:
                count = min(BOUNCE_BYTES, (data.nbytes - done) // PAGE * PAGE)
                bounce = pages(count)
                bounce[:] = data[done : done + count]
                fileio.write_all(fd, bounce, at, self.path, PAGE)
            done += count

    def sync(self) -> None:
        """Make what was written durable. Never tried again: after a failure every later call fails with the same error.

        The kernel reports a lost page once and then calls it clean, so a second fdatasync would succeed over lost data.
        """
        fd = self._open_fd()
        if self._sync_error is not None:
            raise self._sync_error
        try:
            if self._map is not None and not hasattr(os, "fdatasync"):
                self._map.flush()
            fileio.sync_file(fd, self.path)
        except MediumError as error:
            self._sync_error = error
            raise

    def drop_cache(self) -> None:
        """Make later reads of synced bytes go past the page cache; nothing to do on direct and mapped media."""
        fd = self._open_fd()
        if self.storage == "buffered" and hasattr(os, "posix_fadvise"):
            try:
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            except OSError:
                pass  # advice: without it reads are as the file system does them

    def fileno(self) -> int | None:
        """Give the descriptor, still owned by the medium."""
        return self._open_fd()

    def mapping(self) -> memoryview | None:
        """Give all bytes of a mapped medium, writable; None for others and where it was opened for reading.

        After `allocate` a new call gives the larger mapping; the older one stays valid until its last view ends.
        """
        fd = self._open_fd()
        if self.storage != "mapped" or not self._write:
            return None
        size = self.size()
        if not size:
            return None
        fileio.allocate(fd, size, self.path)  # a store into a hole for which there is no room would be SIGBUS
        with self._lock:
            if self._map is None or len(self._map) < size:
                try:
                    self._map = mmap.mmap(fd, size)
                except OSError as error:
                    raise MediumError("mapping", self.path, error) from error
            return memoryview(self._map)[:size]

    def lock_shared(self) -> bool:
        """Keep the writer from giving this slot away; False = it is being refilled. True where locks are missing."""
        return self._flock(fcntl.LOCK_SH)

    def lock_exclusive(self) -> bool:
        """Keep readers from locking this slot; False = one has. Never waits. True where locks are missing."""
        return self._flock(fcntl.LOCK_EX)

    def unlock(self) -> None:
        """Give the lock of this open file back; nothing happens without one."""
        self._flock(fcntl.LOCK_UN)

    def close(self) -> None:
        """Close; views of the mapping stay valid, later calls raise ClosedError."""
        forks.check_owner(self._pid, self.path)
        with forks.held_off():
            self.forget()

    def forget(self) -> None:
        """Let go of the file in a forked child."""
        self._fd, self._map = -1, None
        self._closes()

    def _open_fd(self) -> int:
        return forks.check_open(self._fd, self._pid, self.path)

    def _flock(self, how: int) -> bool:
        return fileio.try_lock(self._open_fd(), how, self.path, self.storage)

    def _status(self) -> fileio.Status:
        return fileio.status(self._open_fd(), self.path, self.storage)

    def _is_aligned(self, data: memoryview, offset: int) -> bool:
        if self._unit == 1:
            return True
        return not (offset % PAGE or data.nbytes % PAGE or address_of(data) % PAGE)

    def _read_through_bounce(self, fd: int, room: memoryview, offset: int) -> int:
        bounce, done = pages(min(BOUNCE_BYTES, room.nbytes + 2 * PAGE)), 0
        while done < room.nbytes:
            skip = (offset + done) % PAGE
            span = min(len(bounce), -(-(skip + room.nbytes - done) // PAGE) * PAGE)
            got = fileio.read_up_to(fd, bounce[:span], offset + done - skip, self.path, PAGE)
            count = min(got - skip, room.nbytes - done)
            if count <= 0:
                break
            room[done : done + count] = bounce[skip : skip + count]
            done += count
            if got < span:
                break
        return done

    def _patch_page(self, fd: int, data: memoryview, offset: int) -> None:
        skip = offset % PAGE
        page = pages(PAGE)
        with self._lock:
            fileio.read_up_to(fd, page, offset - skip, self.path, PAGE)  # beyond the end it stays zeros
            page[skip : skip + data.nbytes] = data
            fileio.write_all(fd, page, offset - skip, self.path, PAGE)


def pages(length: int) -> memoryview:
    """Give page-aligned zeros, freed with their last view."""
    return memoryview(mmap.mmap(-1, -(-length // PAGE) * PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))


def _set_direct(fd: int) -> bool:
    try:
        fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) | os.O_DIRECT)
    except (OSError, AttributeError):
        return False
    return True
