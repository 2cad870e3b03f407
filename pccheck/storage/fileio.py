"""Whole reads, writes, syncs and allocation on one descriptor (floor 1: imports floor 0).

The one place where answers of the operating system are judged: what is tried again, what is an error, and which.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import sys
import time
from collections.abc import Callable
from typing import Literal, NamedTuple

from pccheck.errors import CapacityError, MediumError

try:
    from pccheck._native import file_status as _file_status
    from pccheck._native import lock_file as _lock_file
except ImportError:  # not built: also where `_native` is but a checkout's folder of C files
    _AT_ONCE: frozenset[str] = frozenset()
else:
    _AT_ONCE = frozenset({"direct", "mapped"})  # local file systems

PAGE = 4096
RETRIES = 5
FIRST_PAUSE_S = 0.002  # each next one is four times longer: 0.7 s in all
TRANSIENT = frozenset({errno.EIO, errno.ESTALE, errno.EAGAIN})
NO_LOCKS = frozenset({errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOLCK, errno.ENOSYS, errno.EINVAL, errno.EBADF})
NO_ROOM = frozenset({errno.ENOSPC, errno.EDQUOT})
_FILL_BYTES = 1 << 20

Storage = Literal["direct", "mapped", "buffered"]

# -- bytes -----------------------------------------------------------------------------------------------------------


def transfer(operation: str, path: str, offset: int, length: int, step: Callable[[int], int], unit: int = 1) -> int:
    """Call `step(done)` until `length` bytes are done or it gives 0, and give how many were.

    Interrupted and short steps are continued, at the last whole `unit`; EIO, ESTALE and EAGAIN are tried again
    RETRIES times in a row, with pauses, because network storage recovers from them within that time.

    Args:
        operation: "read" or "write", for the error.
        path: for the error.
        offset: where in the file the transfer begins.
        length: bytes to transfer.
        step: transfers some bytes from `done` on and gives how many; raises OSError.
        unit: bytes that a short step must be cut down to; a step that ends the transfer is not cut.

    Raises:
        MediumError: the step failed for good; `offset` is the byte it failed at.
    """
    done = failures = 0
    while done < length:
        try:
            count = step(done)
        except OSError as error:
            if error.errno == errno.EINTR:
                continue
            if error.errno not in TRANSIENT or failures == RETRIES:
                raise MediumError(operation, path, error, offset + done) from error
            time.sleep(FIRST_PAUSE_S * 4**failures)
            failures += 1
            continue
        if count == 0:
            break
        whole = count if done + count >= length else count - count % unit
        if not whole:  # less than a unit: the end of a file for a read; a write is tried again from the unit's start
            if operation == "read":
                return done + count
            if failures == RETRIES:
                break
            failures += 1
            continue
        failures = 0
        done += whole
    return done


def write_all(fd: int, data: memoryview, offset: int, path: str, unit: int = 1) -> None:
    """Write all of `data` at `offset`."""
    done = transfer("write", path, offset, len(data), lambda n: os.pwrite(fd, data[n:], offset + n), unit)
    if done < len(data):  # a write of nothing, or of less than a sector: what a full disk answers
        raise MediumError("write", path, OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)), offset + done)


def read_up_to(fd: int, room: memoryview, offset: int, path: str, unit: int = 1) -> int:
    """Fill `room` from `offset` on as far as the file goes, and give how many bytes that was."""
    return transfer("read", path, offset, len(room), lambda n: os.preadv(fd, [room[n:]], offset + n), unit)


def ends_early(path: str, offset: int, wanted: int, got: int) -> MediumError:
    """Give the error for a file that ends inside what was to be read."""
    reason = f"the file ends {wanted - got} bytes before the end of the {wanted} to be read"
    return MediumError("read", path, OSError(errno.ENODATA, reason), offset + got)


def map_private(fd: int, length: int, path: str) -> memoryview:
    """Map the first `length` bytes, copy-on-write: writable, and never written back.

    The mapping has a duplicate of `fd`, so a lock taken on `fd` lasts until the last view of it is gone.
    """
    try:
        return memoryview(mmap.mmap(fd, length, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE))
    except OSError as error:
        raise MediumError("mapping", path, error) from error


# -- durability ------------------------------------------------------------------------------------------------------


def sync_file(fd: int, path: str) -> None:
    """Make the file's data, size and mapped pages durable.

    On Linux fdatasync covers stores to shared mappings too (msync is the same call for a range), and unlike
    `mmap.flush` it does not keep the interpreter's lock: a flush of 512 MiB was seen to stop all threads for 168 ms.
    """
    try:
        if sys.platform == "darwin":
            fcntl.fcntl(fd, fcntl.F_FULLFSYNC)  # fsync leaves the data in the drive's volatile cache there
        else:
            os.fdatasync(fd)
    except OSError as error:
        raise MediumError("sync", path, error) from error


def sync_folder(fd: int, path: str) -> None:
    """Make the names in a folder durable; file systems that know no sync of folders (EINVAL) have nothing to do."""
    try:
        os.fsync(fd)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise MediumError("sync of names", path, error) from error


# -- status and locks --------------------------------------------------------------------------------------------------


class Status(NamedTuple):
    """What the system says of an open file: its size in bytes, how many names it has, and which it is."""

    size: int
    links: int
    device: int
    inode: int

    def is_of(self, found: os.stat_result) -> bool:
        """Tell whether `found` says something of the same file."""
        return (self.device, self.inode) == (found.st_dev, found.st_ino)


def status(fd: int, path: str, storage: Storage) -> Status:
    """Give what the system says of an open file; raises MediumError.

    One of a local file system is asked without giving up the interpreter, since that answers at once: to get it back
    from a trainer of small operations takes far longer, and keeps that waiting, too.
    """
    try:
        if storage in _AT_ONCE:
            return Status(*_file_status(fd))
        found = os.fstat(fd)
    except OSError as error:
        raise MediumError("status query", path, error) from error
    return Status(found.st_size, found.st_nlink, found.st_dev, found.st_ino)


def try_lock(fd: int, how: int, path: str, storage: Storage) -> bool:
    """Call flock(2) without waiting; False = another has the lock. True where locks are missing; raises MediumError."""
    try:
        if storage in _AT_ONCE:
            _lock_file(fd, how)  # as `status`
        else:
            fcntl.flock(fd, how | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno == errno.EWOULDBLOCK:
            return False
        if error.errno not in NO_LOCKS:
            raise MediumError("lock", path, error) from error
    return True


# -- space -----------------------------------------------------------------------------------------------------------


def free_bytes(fd: int, path: str) -> int:
    """Give the bytes that a new file on the file system of `fd` could take."""
    try:
        stats = os.fstatvfs(fd)
    except OSError as error:
        raise MediumError("free space query", path, error) from error
    return stats.f_bavail * stats.f_frsize


def is_allocated(fd: int, size: int) -> bool:
    """Tell whether the file has `size` bytes and all of them have space."""
    status = os.fstat(fd)
    return status.st_size >= size and status.st_blocks * 512 >= size


def allocate(fd: int, size: int, path: str) -> None:
    """Make the file at least `size` bytes, its space really taken; what fails takes nothing.

    Raises:
        CapacityError: there is no room for it.
        MediumError: the file system failed.
    """
    try:
        if is_allocated(fd, size):
            return
        before = os.fstat(fd)
        needed = size - min(size, before.st_blocks * 512)
        # Asking for more than there is would first fill the file system for everybody else on it.
        stats = os.fstatvfs(fd)
        if stats.f_blocks and needed > stats.f_bfree * stats.f_frsize:
            raise CapacityError(path, needed, free_bytes(fd, path))
        try:
            _take_space(fd, before.st_size, size)
        except OSError as error:
            os.ftruncate(fd, before.st_size)
            if error.errno in NO_ROOM:
                raise CapacityError(path, needed, free_bytes(fd, path)) from error
            raise
    except OSError as error:
        if isinstance(error, MediumError):
            raise
        raise MediumError("allocation", path, error) from error


def _take_space(fd: int, old_size: int, size: int) -> None:
    if hasattr(os, "posix_fallocate"):
        try:
            os.posix_fallocate(fd, 0, size)
            return
        except OSError as error:
            # No fallocate here (NFS before 4.2, ext4 without extents under O_DIRECT): zeros written do the same.
            if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS):
                raise
    # Zeros are written beyond the old end only: what the file held stays untouched.
    start = old_size - old_size % PAGE
    if old_size % PAGE:
        os.ftruncate(fd, start + PAGE)
        start += PAGE
    flags = fcntl.fcntl(fd, fcntl.F_GETFL)
    direct = getattr(os, "O_DIRECT", 0)
    fcntl.fcntl(fd, fcntl.F_SETFL, flags & ~direct)  # the zeros are not page-aligned memory
    try:
        while start < size:
            count = os.pwrite(fd, bytes(min(_FILL_BYTES, size - start)), start)
            if not count:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            start += count
        os.fdatasync(fd) if hasattr(os, "fdatasync") else os.fsync(fd)  # delayed allocation takes the space only now
    finally:
        fcntl.fcntl(fd, fcntl.F_SETFL, flags)
