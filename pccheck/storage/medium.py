"""The bytes of one slot on one kind of storage (floor 1: imports floor 0)."""

from __future__ import annotations

from typing import Protocol


class Medium(Protocol):
    """One open file of a store. Errors of the operating system become MediumError here and nowhere else.

    Thread-safe: reads and writes of different ranges may run at once.
    """

    path: str  # for messages

    def size(self) -> int:
        """Give the size in bytes."""

    def links(self) -> int:
        """Give how many names the file has; 0 after its last name was removed."""

    def allocate(self, size: int) -> None:
        """Make the file at least `size` bytes, the space really taken; raises CapacityError where it is not there."""

    def read_into(self, buffer: memoryview, offset: int) -> None:
        """Fill `buffer` from `offset`; a file that ends sooner is a MediumError."""

    def write_from(self, buffer: memoryview, offset: int) -> None:
        """Write all of `buffer` at `offset`; interrupted and short writes are continued, EIO and ESTALE retried."""

    def sync(self) -> None:
        """Make what was written durable (fdatasync). Never retried: after a failure the file's content is unknown."""

    def drop_cache(self) -> None:
        """Make later reads go past the page cache where the medium can; else do nothing."""

    def fileno(self) -> int | None:
        """Give the descriptor that native threads may pwrite to, None where there is none."""

    def mapping(self) -> memoryview | None:
        """Give the writable mapped bytes where writing by store is the fast way (tmpfs, DAX), else None."""

    @property
    def alignment(self) -> int:
        """What offset, length and address of fileno() I/O must be multiples of: 4096 for O_DIRECT, else 1."""

    def lock_shared(self) -> bool:
        """Keep the writer from giving this slot away; False = it is being refilled. True where locks are missing."""

    def lock_exclusive(self) -> bool:
        """Keep readers from locking this slot; False = one has. Never waits. True where locks are missing."""

    def unlock(self) -> None:
        """Give the lock of this open file back; nothing happens without one."""

    def close(self) -> None:
        """Close; later calls are errors."""
