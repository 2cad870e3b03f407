"""A volume, its media and its CHECK page on a SimulatedDisk (beside: imports floors 0 and 1).

Whatever writes through a Volume can run on it unchanged: pccheck's own store, or a backend of yours.
"""

from __future__ import annotations

import errno
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import final

from pccheck import format
from pccheck.errors import CapacityError, StoreGoneError
from pccheck.storage.medium import Medium
from pccheck.testing.disk import Op, SimulatedDisk, folder_of
from pccheck.testing.simulated_medium import Session, SimulatedMedium


@final
@dataclass(eq=False)
class SimulatedVolume:
    """A Volume on a SimulatedDisk: one opening of the store by one process. Thread-safe.

    Args:
        disk: what it works on; several volumes on one disk are several processes.
        path: for messages.
        links: whether files can have names outside of the store.
    """

    disk: SimulatedDisk = field(default_factory=SimulatedDisk)
    path: str = "simulated"
    links: bool = True

    def __post_init__(self) -> None:
        self.session = Session(self.disk, self.path)
        self._renamed: dict[str, set[str]] = {}  # folder -> names changed in this session and not synced by it

    def point(self, name: str) -> None:
        """Record that this thread reached a named point of the commit; give it as the store's `at` hook."""
        self.session.point(name)

    def names(self, folder: str = "") -> list[str]:
        """Give the sorted names in a folder."""
        with self.disk.lock:
            return sorted(n.rpartition("/")[2] for n in self.disk.names if folder_of(n) == folder)

    def create(self, name: str, size: int) -> SimulatedMedium:
        """Make a file of zeros and open it."""
        with self.disk.lock:
            if name in self.disk.names:
                raise self.session.error("create", name, errno.EEXIST)
            if size > self.free_bytes():
                raise CapacityError(f"{self.path}/{name}", size, self.free_bytes())
            inode = max(self.disk.files, default=0) + 1
            self.session.do(Op(kind="create", name=name, inode=inode, value=size, session=self.session.number))
            self._rename(name)
            return SimulatedMedium(self.session, name, inode, writable=True)

    def open(self, name: str, *, write: bool = False) -> SimulatedMedium:
        """Open a file that is there."""
        with self.disk.lock:
            inode = self.disk.names.get(name)
            if inode is None:
                raise self.session.error("open", name, errno.ENOENT)
            return SimulatedMedium(self.session, name, inode, writable=write)

    def link(self, name: str, new_name: str) -> None:
        """Give a file a second name."""
        with self.disk.lock:
            inode = self.disk.names.get(name)
            if inode is None:
                raise self.session.error("link", name, errno.ENOENT)
            if new_name not in self.disk.names:
                self.session.do(Op(kind="link", name=new_name, inode=inode, session=self.session.number))
                self._rename(new_name)

    def link_out(self, name: str, medium: Medium, path: str) -> None:
        """Give an open file a name in another folder of the disk: the path's last two parts."""
        path = _outside(path)
        with self.disk.lock:
            if path in self.disk.names:
                raise self.session.error("link", path, errno.EEXIST)
            if not self.is_named(name, medium):
                raise StoreGoneError("link", f"{self.path}/{name}", FileNotFoundError(errno.ENOENT, "it is gone"))
            if not self.links:
                raise self.session.error("link", path, errno.EPERM)
            self.link(name, path)

    def copy_out(self, name: str, medium: Medium, path: str) -> None:
        """Put a synced copy of an open file at such a path: under another name first."""
        path = _outside(path)
        half, size = f"{path}.half", medium.size()
        data = bytearray(size)
        medium.read_into(memoryview(data), 0)
        with self.disk.lock:
            self.remove(half)
        target = self.create(half, size)
        target.write_from(memoryview(data), 0)
        target.sync()
        with self.disk.lock:
            self.link(half, path)
            self.remove(half)

    def take_in(self, path: str, name: str, wanted: Callable[[bytes, int], bool]) -> SimulatedMedium | None:
        """Make a file at such a path one that was never used; who else has it open is not asked."""
        path, hidden = _outside(path), f".{name}.half"
        with self.disk.lock:
            inode = self.disk.names.get(path)
            if inode is None or list(self.disk.names.values()).count(inode) > 1:
                return None
            file = self.disk.files[inode]
            if not wanted(file.read(0, format.SECTOR), file.size):
                return None
            self.link(path, hidden)
            self.remove(path)
        self.sync_names(folder_of(path))
        emptied = SimulatedMedium(self.session, hidden, inode, writable=True)
        emptied.write_from(memoryview(bytes(format.PAGE)), 0)
        emptied.sync()
        with self.disk.lock:
            self.link(hidden, name)
            self.remove(hidden)
        return SimulatedMedium(self.session, name, inode, writable=True)

    def sync_out(self, path: str) -> None:
        """Make the names in the folder of such a path durable."""
        self.sync_names(folder_of(_outside(path)))

    def remove(self, name: str) -> None:
        """Remove a name."""
        with self.disk.lock:
            if name in self.disk.names:
                self.session.do(Op(kind="remove", name=name, session=self.session.number))
                self._rename(name)

    def is_named(self, name: str, medium: Medium) -> bool:
        """Tell whether a name leads to this very file."""
        with self.disk.lock:
            return isinstance(medium, SimulatedMedium) and self.disk.names.get(name) == medium.inode

    def sync_names(self, folder: str = "") -> None:
        """Make the names of a folder durable."""
        with self.disk.lock:
            changed = self._renamed.pop(folder, set())
            self.session.sync("names", folder, -1, set(range(len(changed))), b"")

    def check_page(self, *, create: bool) -> SimulatedCheckPage:
        """Open CHECK, made of zeros where it is missing."""
        with self.disk.lock:
            if format.CHECK_NAME not in self.disk.names:
                if not create:
                    raise self.session.error("open", format.CHECK_NAME, errno.ENOENT)
                self.create(format.CHECK_NAME, format.CHECK_BYTES)
            medium = self.open(format.CHECK_NAME, write=create)
            if medium.size() < format.CHECK_BYTES:
                if not create:
                    raise self.session.error("map", format.CHECK_NAME, errno.EINVAL)
                medium.allocate(format.CHECK_BYTES)
            return SimulatedCheckPage(medium)

    def lock(self) -> bool:
        """Take the one writer lock."""
        with self.disk.lock:
            if self.disk.locks and self.disk.writer not in (None, self):
                return False
            self.disk.writer = self
            return True

    def unlock(self) -> None:
        """Give the lock back."""
        with self.disk.lock:
            if self.disk.writer is self:
                self.disk.writer = None

    def free_bytes(self) -> int:
        """Give the bytes that a new file could take."""
        with self.disk.lock:
            return self.disk.free_bytes()

    def close(self) -> None:
        """Give the lock back; later calls are errors."""
        self.unlock()
        self.session.closed = True

    def _rename(self, name: str) -> None:
        self._renamed.setdefault(folder_of(name), set()).add(name)


def _outside(path: str) -> str:
    return "/".join(path.split("/")[-2:])


@final
class SimulatedCheckPage:
    """A CheckPage on a SimulatedDisk; what is stored may reach the disk at any time from then on. Thread-safe."""

    atomic = True

    def __init__(self, medium: SimulatedMedium) -> None:
        self.medium = medium

    def load(self, offset: int) -> int:
        """Give the 64-bit number at `offset`."""
        return int.from_bytes(self.read(offset, 8), "little")

    def store(self, offset: int, value: int) -> None:
        """Set the 64-bit number at `offset`."""
        with self.medium.held(write=True):
            self.medium.write_pieces(value.to_bytes(8, "little"), offset, format.PAGE)

    def compare_and_swap(self, offset: int, expected: int, value: int) -> bool:
        """Set the number at `offset` to `value` if it is `expected`."""
        with self.medium.held(write=True):
            if self.load(offset) != expected:
                return False
            self.store(offset, value)
            return True

    def read(self, offset: int, length: int) -> bytes:
        """Give bytes of the page."""
        data = bytearray(length)
        self.medium.read_into(memoryview(data), offset)
        return bytes(data)

    def write(self, offset: int, data: bytes) -> None:
        """Set bytes of the page, in two halves."""
        with self.medium.held(write=True):
            half = len(data) // 2 if len(data) > 8 else 0
            for start, end in ((0, half), (half, len(data))):
                self.medium.write_pieces(bytes(data[start:end]), offset + start, format.PAGE)

    def sync(self) -> None:
        """Make the page durable."""
        self.medium.sync_as("check")

    def links(self) -> int:
        """Give how many names CHECK has."""
        return self.medium.links()

    def close(self) -> None:
        """Close."""
        self.medium.close()
