"""The mapped CHECK file and its 64-bit words (floor 1: imports floor 0, forks, fileio)."""

from __future__ import annotations

import importlib
import mmap
import os
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import final

from pccheck.errors import ClosedError, FormatError, UsageError
from pccheck.format import CHECK_BYTES
from pccheck.storage import fileio, forks
from pccheck.storage.fileio import Storage

# One lock for the process, not one per page: two pages of one CHECK must exclude each other. A forked child that
# inherits it locked is turned away before it would wait for it.
_words = threading.RLock()  # a signal handler's thread may have it, amid a save to another store


@dataclass(frozen=True)
class Atomics:
    """The extension's 64-bit atomics on a writable buffer."""

    load: Callable[[object, int], int]
    store: Callable[[object, int, int], None]
    swap: Callable[[object, int, int, int], bool]


def atomics() -> Atomics | None:
    """Give the extension's atomics, None where it was not built."""
    try:
        native = importlib.import_module("pccheck._native")
        return Atomics(native.load64, native.store64, native.cas64)
    except (ImportError, AttributeError):  # without the extension a checkout's folder of C files is what is imported
        return None


@final
class FilePage:
    """CHECK, open and, where the file system can, mapped. Thread-safe.

    Args:
        fd: descriptor of a regular file of at least CHECK_BYTES, taken over.
        path: for messages.
        write: whether it was opened for writing; else changes raise UsageError.
        native: the extension's atomics; None = words change under a lock that holds within this process.
        storage: how files are written there, see `pccheck.storage.filesystem`; "buffered" where nothing is known.
        mapped: False = read and write without a mapping, as on file systems that cannot map a shared file.
    """

    def __init__(
        self, fd: int, path: str, *, write: bool, native: Atomics | None, storage: Storage = "buffered",
        mapped: bool = True,
    ) -> None:  # fmt: skip
        self.path, self._storage = path, storage
        self._fd = fd
        self._closes = forks.closer(self, fd)
        self._write = write
        self._pid = os.getpid()
        self._map: mmap.mmap | None = None
        if mapped and write:  # a reader has no use for a mapping, and one can be cut short under it: SIGBUS
            try:
                self._map = mmap.mmap(fd, CHECK_BYTES)
            except OSError:
                pass  # some network and FUSE file systems: the words then change by pread and pwrite
        self._native = native if self._map is not None else None
        self.atomic = self._native is not None
        forks.enter(self)

    def __repr__(self) -> str:
        how = "mapped" if self._map else "not mapped"
        return f"<CHECK page {self.path} {how}{', atomic' if self.atomic else ''}{' closed' if self._fd < 0 else ''}>"

    def load(self, offset: int) -> int:
        """Give the 64-bit number at `offset`."""
        self._check_word(offset)
        if self._native:
            return self._native.load(self._whole_map(), offset)
        return int.from_bytes(self.read(offset, 8), "little")

    def store(self, offset: int, value: int) -> None:
        """Set the 64-bit number at `offset`."""
        self._check_word(offset, value)
        self._check_writable()
        if self._native:
            self._native.store(self._whole_map(), offset, value)
        else:
            with _words:
                self.write(offset, value.to_bytes(8, "little"))

    def compare_and_swap(self, offset: int, expected: int, value: int) -> bool:
        """Set the number at `offset` to `value` if it is `expected`; tell whether it was."""
        self._check_word(offset, expected, value)
        self._check_writable()
        if self._native:
            return self._native.swap(self._whole_map(), offset, expected, value)
        with _words:
            if int.from_bytes(self.read(offset, 8), "little") != expected:
                return False
            self.write(offset, value.to_bytes(8, "little"))
            return True

    def read(self, offset: int, length: int) -> bytes:
        """Give bytes of the page."""
        fd = self._open_fd()
        _check_range(offset, length)
        if self._map is not None:
            return self._whole_map()[offset : offset + length]
        room = bytearray(length)
        got = fileio.read_up_to(fd, memoryview(room), offset, self.path)
        if got < length:
            raise fileio.ends_early(self.path, offset, length, got)
        return bytes(room)

    def write(self, offset: int, data: bytes) -> None:
        """Set bytes of the page."""
        fd = self._open_fd()
        self._check_writable()
        _check_range(offset, len(data))
        if self._map is not None:
            self._whole_map()[offset : offset + len(data)] = data
        else:
            fileio.write_all(fd, memoryview(data), offset, self.path)

    def sync(self) -> None:
        """Make the page durable. Never tried again; the next change writes its part of the page anew."""
        fd = self._open_fd()
        if self._map is not None and not hasattr(os, "fdatasync"):
            self._map.flush()
        fileio.sync_file(fd, self.path)

    def links(self) -> int:
        """Give how many names the file has; 0 after it was removed."""
        return self._status().links

    def close(self) -> None:
        """Unmap and close; later calls raise ClosedError."""
        forks.check_owner(self._pid, self.path)
        with forks.held_off():
            self.forget()

    def forget(self) -> None:
        """Let go of the file in a forked child."""
        self._fd, self._map = -1, None
        self._closes()

    def _open_fd(self) -> int:
        return forks.check_open(self._fd, self._pid, self.path)

    def _status(self) -> fileio.Status:
        return fileio.status(self._open_fd(), self.path, self._storage)

    def _whole_map(self) -> mmap.mmap:
        # Touching a mapped page that the file no longer has is SIGBUS, which nothing could turn into an error.
        if self._status().size < CHECK_BYTES:
            raise FormatError(f"{self.path} was cut short while it was open; close the store and open it again")
        mapped = self._map
        if mapped is None:
            raise ClosedError(f"{self.path} was closed before this call")
        return mapped

    def _check_writable(self) -> None:
        if not self._write:
            raise UsageError(f"{self.path} was opened for reading; open the store with write=True to change it")

    @staticmethod
    def _check_word(offset: int, *values: int) -> None:
        _check_range(offset, 8)
        if offset % 8:
            raise ValueError(f"a word lies at a multiple of 8, not at {offset}")
        if not all(0 <= v < 1 << 64 for v in values):
            raise ValueError(f"{values} are not all 64-bit numbers")


def _check_range(offset: int, length: int) -> None:
    if offset < 0 or length < 0 or offset + length > CHECK_BYTES:
        raise ValueError(f"bytes {offset}..{offset + length} are not inside the page of {CHECK_BYTES}")
