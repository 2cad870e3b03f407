"""A disk in memory that records every operation and remembers what is not yet certain (beside: imports floor 0).

A `SimulatedDisk` knows two views of the same bytes. The *volatile* view is the page cache: what the running process
sees and, after mere process death, the next one. The *durable* view is what the last covering sync made certain. In
between, every 512-byte sector keeps the list of its versions, and every name the list of what it meant: after a power
loss the disk may hold any one of them. `pccheck.testing.images` enumerates those disks; `pccheck.testing.simulated`
has the volume to work on this one.

Assumptions, all on the pessimistic side of what Linux file systems do:
* A sector is written whole or not at all; nothing larger is. Sectors reach the disk in any order or not at all.
* A write is recorded page by page (4 KiB), so that process death may come between two pages of it. A store to the
  mapped CHECK page of more than 8 bytes is recorded in two halves, because it is no single instruction.
* A name is created, linked or removed durably only by `sync_names` of its folder; before that, each name by itself may
  mean anything that it has meant since.
* A file's size is durable after a sync of the file, not before, whatever `create` and `allocate` were told.
* Links are hard links; a removed file keeps its bytes while it is open.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, final

from pccheck.format import SECTOR

ZEROS = bytes(SECTOR)
_serials = itertools.count()
DURABLE = -1  # the sequence number of a version that is certain to be on the disk
OpKind = Literal["write", "sync", "size", "create", "link", "remove", "sync_names", "mark", "point"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Op:
    """One recorded operation; the log is their total order.

    Args:
        kind: what was done.
        name: file name; the folder for "sync_names"; what is marked or reached for "mark" and "point".
        inode: the file, -1 where there is none.
        offset: bytes, where a write begins.
        data: what was written.
        value: size in bytes for "size" and "create", counter for "mark".
        purpose: of a sync, as the system under test classifies it; "" for others.
        dropped: a mutation made a no-op of this sync.
        session: which opening of the volume did it.
    """

    kind: OpKind
    name: str
    inode: int = -1
    offset: int = 0
    data: bytes = b""
    value: int = 0
    purpose: str = ""
    dropped: bool = False
    session: int = 0

    def __str__(self) -> str:
        what = {
            "write": f"write {self.name} at {self.offset}, {len(self.data)} bytes",
            "size": f"allocate {self.name}, {self.value} bytes",
            "create": f"create {self.name}, {self.value} bytes",
            "sync_names": f"sync names of {self.name or 'the store'}/",
            "mark": f"-- {self.name} {self.value}",
            "point": f"-- at {self.name}",
        }.get(self.kind, f"{self.kind} {self.name}")
        return what + (f" [{self.purpose}]" if self.purpose else "") + (" DROPPED" if self.dropped else "")


@dataclass(frozen=True, slots=True, kw_only=True)
class SyncInfo:
    """What is known of a sync when it is called: enough to say which sync of the protocol it is.

    Args:
        kind: "file", "check" or "names".
        name: file name, or the folder.
        point: the last named point that this thread reached in this session, "" for none.
        wrote: sectors that this session wrote since its last sync of the file ("names": how many names it changed).
        head: the file's first sector as it is now.
    """

    kind: Literal["file", "check", "names"]
    name: str
    point: str
    wrote: frozenset[int]
    head: bytes


@dataclass(frozen=True, slots=True)
class FileImage:
    """One file of a disk image: its size in bytes, and its sectors that are not all zeros."""

    size: int
    sectors: Mapping[int, bytes]


@dataclass(frozen=True, slots=True)
class Image:
    """One state of a disk: which names there are, and the files they name."""

    names: Mapping[str, int]
    files: Mapping[int, FileImage]


class FileState:
    """One file: its bytes now, and every version that a sector or the size has had since the last sync."""

    def __init__(self, size: int, sectors: Mapping[int, bytes], *, durable_size: int | None = None) -> None:
        self.sizes = [size if durable_size is None else durable_size, size][(durable_size in (None, size)) :]
        self.sectors = dict(sectors)
        self.pending: dict[int, list[tuple[int, bytes]]] = {}
        self.generation = 0
        self.serial = next(_serials)

    @property
    def size(self) -> int:
        """Bytes of the file as the running process sees it."""
        return self.sizes[-1]

    def write(self, sequence: int, offset: int, data: bytes) -> None:
        """Change bytes; every sector that differs gets one more version."""
        self.generation += 1
        end = offset + len(data)
        for index in range(offset // SECTOR, -(-end // SECTOR)):
            start = index * SECTOR
            old = self.sectors.get(index, ZEROS)
            low, high = max(offset, start), min(end, start + SECTOR)
            new = old[: low - start] + data[low - offset : high - offset] + old[high - start :]
            if new == old:
                continue
            self.pending.setdefault(index, [(DURABLE, old)]).append((sequence, new))
            if new == ZEROS:
                self.sectors.pop(index, None)
            else:
                self.sectors[index] = new
        if end > self.size:
            self.sizes.append(end)

    def resize(self, size: int) -> None:
        """Grow the file."""
        self.generation += 1
        if size > self.size:
            self.sizes.append(size)

    def sync(self) -> None:
        """Make the newest versions the only ones."""
        self.generation += 1
        self.pending.clear()
        self.sizes = [self.size]

    def read(self, offset: int, length: int) -> bytes:
        """Give bytes as they are now."""
        first, last = offset // SECTOR, -(-(offset + length) // SECTOR)
        whole = b"".join([self.sectors.get(i, ZEROS) for i in range(first, last)])
        return whole[offset - first * SECTOR :][:length]


@final
class SimulatedDisk:
    """Files, names and the log of everything done to them. Thread-safe.

    Args:
        image: what is on the disk to begin with, all of it durable; None = an empty store.
        drop: tells of a sync whether to make it a no-op (a mutation), after the fact that it was called is recorded.
        classify: gives the purpose of a sync.
        capacity_bytes: what all files together may take.
        locks: whether locks keep anybody out; False = as on a file system without flock.
    """

    def __init__(
        self,
        image: Image | None = None,
        *,
        drop: Callable[[SyncInfo, str], bool] | None = None,
        classify: Callable[[SyncInfo], str] | None = None,
        capacity_bytes: int = 1 << 32,
        locks: bool = True,
    ) -> None:
        self.lock = threading.RLock()
        self.log: list[Op] = []
        self.names: dict[str, int] = dict(image.names) if image else {}
        self.pending_names: dict[str, list[int | None]] = {}
        self.files = {i: FileState(f.size, f.sectors) for i, f in image.files.items()} if image else {}
        self.writer: object = None
        self.slot_locks: dict[int, dict[int, str]] = {}  # inode -> open file -> "shared" or "exclusive"
        self.capacity_bytes, self.locks = capacity_bytes, locks
        self.sessions = 0
        self.drop, self.classify = drop, classify

    @classmethod
    def replay(cls, log: Sequence[Op], image: Image | None = None, **options: Any) -> SimulatedDisk:
        """Give the disk as a process that died after these operations leaves it: unsynced is still unsynced."""
        disk = cls(image, **options)
        for op in log:
            disk.apply(op)
        disk.sessions = max((op.session for op in log), default=0)
        return disk

    def apply(self, op: Op) -> None:
        """Do one operation and append it to the log."""
        with self.lock:
            sequence = len(self.log)
            self.log.append(op)
            if op.kind == "write":
                self.files[op.inode].write(sequence, op.offset, op.data)
            elif op.kind == "size":
                self.files[op.inode].resize(op.value)
            elif op.kind == "create":
                self.files[op.inode] = FileState(op.value, {}, durable_size=0)
                self._name(op.name, op.inode)
            elif op.kind == "link":
                self._name(op.name, op.inode)
            elif op.kind == "remove":
                self._name(op.name, None)
            elif op.dropped:
                pass
            elif op.kind == "sync":
                self.files[op.inode].sync()
            elif op.kind == "sync_names":
                for name in [n for n in self.pending_names if folder_of(n) == op.name]:
                    del self.pending_names[name]

    def _name(self, name: str, inode: int | None) -> None:
        self.pending_names.setdefault(name, [self.names.get(name)]).append(inode)
        if inode is None:
            self.names.pop(name, None)
        else:
            self.names[name] = inode

    def mark(self, what: str, value: int = 0) -> None:
        """Record something that is no operation of the disk: a promise made to the user, a point reached."""
        self.apply(Op(kind="mark", name=what, value=value))

    def free_bytes(self) -> int:
        """Give the bytes that no named file takes."""
        with self.lock:
            return max(0, self.capacity_bytes - sum(self.files[i].size for i in set(self.names.values())))

    def image(self) -> Image:
        """Give the volatile view: what the next process sees when this one dies now."""
        with self.lock:
            return Image(dict(self.names), {i: FileImage(f.size, dict(f.sectors)) for i, f in self.files.items()})


def folder_of(name: str) -> str:
    """Give the folder that a name lies in, "" for the store itself."""
    return name.rpartition("/")[0]
