"""One open file of a SimulatedDisk, and the session that it belongs to (beside: imports floors 0 and 1)."""

from __future__ import annotations

import errno
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal, final

from pccheck import format
from pccheck.errors import CapacityError, MediumError
from pccheck.format import SECTOR
from pccheck.testing.disk import FileState, Op, OpKind, SimulatedDisk, SyncInfo


@final
class Session:
    """One opening of the store by one process: what it wrote and has not synced, and where its threads are.

    Args:
        disk: what it works on.
        path: for messages.
    """

    def __init__(self, disk: SimulatedDisk, path: str) -> None:
        with disk.lock:
            disk.sessions += 1
            self.number = disk.sessions
        self.disk, self.path, self.closed = disk, path, False
        self.wrote: dict[int, set[int]] = {}  # inode -> sectors written in this session and not synced by it
        self.reads: list[tuple[int, int, int]] = []  # (inode, offset, length) of what was read before it was written
        self._here = threading.local()

    def point(self, name: str) -> None:
        """Record that this thread reached a named point."""
        self._here.point = name
        self.do(Op(kind="point", name=name, session=self.number))

    def sync(
        self, kind: Literal["file", "check", "names"], name: str, inode: int, wrote: set[int], head: bytes
    ) -> None:
        """Record a sync of a file, of CHECK or of names, unless a mutation drops it."""
        point = getattr(self._here, "point", "")
        info = SyncInfo(kind=kind, name=name, point=point, wrote=frozenset(wrote), head=head)
        purpose = self.disk.classify(info) if self.disk.classify else ""
        dropped = self.disk.drop is not None and self.disk.drop(info, purpose)
        what: OpKind = "sync_names" if kind == "names" else "sync"
        self.do(Op(kind=what, name=name, inode=inode, purpose=purpose, dropped=dropped, session=self.number))

    def do(self, op: Op) -> None:
        """Do and record one operation."""
        if self.closed:
            raise self.error(op.kind, op.name, errno.EBADF)
        self.disk.apply(op)

    def error(self, operation: str, name: str, number: int) -> MediumError:
        """Give the error of the operating system as this house's."""
        return MediumError(operation, f"{self.path}/{name}", OSError(number, errno.errorcode[number]))


@final
class SimulatedMedium:
    """A Medium on a SimulatedDisk: one open file. Thread-safe."""

    def __init__(self, session: Session, name: str, inode: int, *, writable: bool) -> None:
        self.path = f"{session.path}/{name}"
        self.session, self.name, self.inode, self.writable = session, name, inode, writable
        self.closed = False

    def size(self) -> int:
        """Give the size in bytes."""
        with self.held() as file:
            return file.size

    def links(self) -> int:
        """Give how many names the file has."""
        with self.held():
            return list(self.session.disk.names.values()).count(self.inode)

    def allocate(self, size: int) -> None:
        """Make the file at least this large."""
        with self.held(write=True) as file:
            missing = size - file.size
            if missing > self.session.disk.free_bytes():
                raise CapacityError(self.path, missing, self.session.disk.free_bytes())
            if missing > 0:
                self._do(Op(kind="size", name=self.name, inode=self.inode, value=size, session=self.session.number))

    def read_into(self, buffer: memoryview, offset: int) -> None:
        """Fill the buffer from `offset`."""
        with self.held() as file:
            if offset + buffer.nbytes > file.size:
                raise MediumError("read", self.path, OSError(errno.EIO, "the file ends sooner"), offset)
            buffer.cast("B")[:] = file.read(offset, buffer.nbytes)
            if self.inode not in self.session.wrote:
                self.session.reads.append((self.inode, offset, buffer.nbytes))

    def write_from(self, buffer: memoryview, offset: int) -> None:
        """Write all of the buffer at `offset`, recorded page by page."""
        with self.held(write=True):
            self.write_pieces(bytes(buffer), offset, format.PAGE)

    def write_pieces(self, data: bytes, offset: int, step: int) -> None:
        """Write `data` as one operation for each aligned piece of `step` bytes."""
        start = 0
        while start < len(data):
            end = min(len(data), start + step - (offset + start) % step)
            here = offset + start
            self._do(
                Op(kind="write", name=self.name, inode=self.inode, offset=here, data=data[start:end],
                   session=self.session.number)
            )  # fmt: skip
            sectors = range(here // SECTOR, -(-(offset + end) // SECTOR))
            self.session.wrote.setdefault(self.inode, set()).update(sectors)
            start = end

    def sync(self) -> None:
        """Make what was written durable."""
        self.sync_as("file")

    def sync_as(self, kind: Literal["file", "check"]) -> None:
        """Sync, recorded as the sync of a file or of CHECK."""
        with self.held() as file:
            wrote = self.session.wrote.get(self.inode, set())
            self.session.sync(kind, self.name, self.inode, set(wrote), file.read(0, SECTOR))
            wrote.clear()

    def drop_cache(self) -> None:
        """Do nothing: the simulated page cache and its disk agree on what was synced, and the rest is in the cache."""

    def fileno(self) -> int | None:
        """Give None: there is no descriptor."""
        return None

    def mapping(self) -> memoryview | None:
        """Give None: bytes are written by `write_from`."""
        return None

    @property
    def alignment(self) -> int:
        """1: any offset and length will do."""
        return 1

    def lock_shared(self) -> bool:
        """Keep the writer from giving this slot away; False while another open file holds it exclusively."""
        return self._lock("shared")

    def lock_exclusive(self) -> bool:
        """Keep readers from locking this slot; False while another open file holds it."""
        return self._lock("exclusive")

    def unlock(self) -> None:
        """Give the lock of this open file back."""
        with self.session.disk.lock:
            self.session.disk.slot_locks.get(self.inode, {}).pop(id(self), None)

    def close(self) -> None:
        """Close, the lock included; later calls are errors."""
        self.unlock()
        self.closed = True

    def _lock(self, mode: Literal["shared", "exclusive"]) -> bool:
        with self.held():
            holders = self.session.disk.slot_locks.setdefault(self.inode, {})
            others = [m for owner, m in holders.items() if owner != id(self)]
            taken = "exclusive" in others or (others and mode == "exclusive")
            if taken and self.session.disk.locks:
                return False
            holders[id(self)] = mode
            return True

    @contextmanager
    def held(self, *, write: bool = False) -> Iterator[FileState]:
        """Give the file's bytes, under the lock of the disk."""
        if self.closed or self.session.closed or (write and not self.writable):
            raise MediumError("use", self.path, OSError(errno.EBADF, "closed, or not open for writing"))
        with self.session.disk.lock:
            yield self.session.disk.files[self.inode]

    def _do(self, op: Op) -> None:
        self.session.disk.apply(op)
