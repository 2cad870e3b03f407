"""A medium in memory, for tests and for tiers of memory (floor 1: imports floor 0, fileio, forks, media)."""

from __future__ import annotations

import os
from typing import final

from pccheck.errors import CapacityError, ClosedError
from pccheck.storage import fileio, forks
from pccheck.storage.media import pages


@final
class MemoryMedium:
    """Bytes in memory, of a fixed size; `sync` has nothing to do. Thread-safe for different ranges.

    Args:
        size: bytes.
        path: a name for messages.
    """

    def __init__(self, size: int, path: str = "memory") -> None:
        self.path = path
        self.storage = "memory"
        self._pid = os.getpid()
        self._bytes: memoryview | None = pages(max(size, 1))[:size]

    def __repr__(self) -> str:
        return f"<MemoryMedium {self.path}{' closed' if self._bytes is None else ''}>"

    @property
    def alignment(self) -> int:
        """Always 1."""
        return 1

    def size(self) -> int:
        """Give the size in bytes."""
        return self._open().nbytes

    def links(self) -> int:
        """Always 1: it lives as long as it is open."""
        self._open()
        return 1

    def allocate(self, size: int) -> None:
        """Raise CapacityError unless `size` bytes are there."""
        have = self._open().nbytes
        if size > have:
            raise CapacityError(self.path, size - have, 0)

    def read_into(self, buffer: memoryview, offset: int) -> None:
        """Fill `buffer` from `offset`; raises MediumError beyond the end."""
        room, have = buffer.cast("B"), self._open()
        part = have[offset : offset + room.nbytes]
        if part.nbytes < room.nbytes:
            raise fileio.ends_early(self.path, offset, room.nbytes, part.nbytes)
        room[:] = part

    def write_from(self, buffer: memoryview, offset: int) -> None:
        """Write all of `buffer` at `offset`; raises CapacityError beyond the end."""
        data = buffer.cast("B")
        self.allocate(offset + data.nbytes)
        self._open()[offset : offset + data.nbytes] = data

    def sync(self) -> None:
        """Nothing to do: memory does not outlive the process."""
        self._open()

    def drop_cache(self) -> None:
        """Nothing to do."""
        self._open()

    def fileno(self) -> int | None:
        """None: there is no file."""
        self._open()
        return None

    def mapping(self) -> memoryview | None:
        """Give all bytes, writable."""
        return self._open()

    def lock_shared(self) -> bool:
        """Always true: nobody else can open it."""
        self._open()
        return True

    def lock_exclusive(self) -> bool:
        """Always true: nobody else can open it."""
        self._open()
        return True

    def unlock(self) -> None:
        """Nothing to do."""
        self._open()

    def close(self) -> None:
        """Let go of the bytes; views stay valid, later calls raise ClosedError."""
        forks.check_owner(self._pid, self.path)
        self._bytes = None

    def _open(self) -> memoryview:
        forks.check_owner(self._pid, self.path)
        if self._bytes is None:
            raise ClosedError(f"{self.path} was closed before this call")
        return self._bytes
