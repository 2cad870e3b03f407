"""A coordinator over a folder that all ranks can write to: one small file of each (floor 2: imports below).

It needs of the file system that a rename is atomic and, some time later, seen by all, as over NFS; no locks, no
ordering, and nothing survives that must. A file that cannot be read, or that an earlier job left, is no blob; whoever
reads the blobs tells old ones by what they say.
"""

from __future__ import annotations

import errno
import os
import secrets
from typing import final

from pccheck import arguments
from pccheck.errors import CoordinatorLostError, ForkedError, RanksError
from pccheck.options import check_whole_number
from pccheck.storage import whole

MAX_BLOB = 16 << 20  # bytes that are read of a file at most
_TRIES = 3
_STALE = frozenset({errno.ESTALE, errno.EINTR, errno.EAGAIN})


@final
class SharedDirectory:
    """Ranks agree through small files in one folder that all of them share. Thread-safe.

    Args:
        path: the folder, made where it is missing; it may be the checkpoints' own.
        rank: of this process, 0..world - 1.
        world: number of ranks, at least 1.

    Raises:
        OptionError: rank or world is out of range.
        CoordinatorLostError: the folder cannot be used.
    """

    def __init__(self, path: str | os.PathLike[str], *, rank: int, world: int) -> None:
        check_whole_number("world", world, 1, 1 << 20)
        check_whole_number("rank", rank, 0, world - 1)
        self.path, self.rank, self.world = arguments.path(path, "path"), rank, world
        self._mine: bytes | None = None
        self._pid = os.getpid()
        self._temporary = f"{self._file(rank, hidden=True)}.{secrets.token_hex(8)}"
        try:
            whole.make_folder(self.path)
        except OSError as error:
            raise self._lost("made", error) from error

    def publish(self, blob: bytes) -> None:
        """Put this rank's file there, whole or not at all.

        Raises CoordinatorLostError where that fails, RanksError where another process acts as this rank.
        """
        self._assert_own_process()
        for attempt in range(_TRIES):
            try:
                there = self._read(self.rank)
                if self._mine is not None and there is not None and there != self._mine:
                    raise RanksError(
                        f"another process acts as rank {self.rank} in {self.path}: give each process a rank of its "
                        "own, and end those that an earlier start left over",
                        [self.rank],
                    )
                whole.replace_whole(self._file(self.rank), self._temporary, blob)
            except OSError as error:
                if error.errno not in _STALE or attempt == _TRIES - 1:
                    raise self._lost("written to", error) from error
            else:
                self._mine = blob
                return

    def read(self) -> list[bytes | None]:
        """Give what is in the files of all ranks; raises CoordinatorLostError where the folder is gone."""
        blobs = [self._read(rank) for rank in range(self.world)]
        if self._mine is not None and blobs[self.rank] is None and not os.path.isdir(self.path):
            raise self._lost("found", FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT)))
        return blobs

    def _read(self, rank: int) -> bytes | None:
        return whole.read_whole(self._file(rank), MAX_BLOB)

    def close(self) -> None:
        """Take this rank's file away, if it is still this process's. Idempotent."""
        if self._pid == os.getpid() and self._mine is not None and self._read(self.rank) == self._mine:
            whole.remove(self._file(self.rank))
        self._mine = None

    def _file(self, rank: int, *, hidden: bool = False) -> str:
        return os.path.join(self.path, f"{'.' if hidden else ''}rank-{rank:05d}.told")

    def _assert_own_process(self) -> None:
        if self._pid != os.getpid():
            raise ForkedError(f"rank {self.rank} in {self.path} is process {self._pid}, not its forked child")

    def _lost(self, what: str, error: OSError) -> CoordinatorLostError:
        return CoordinatorLostError(f"{self.path} cannot be {what}: {error.strerror or error}", [])

    def __repr__(self) -> str:
        return f"SharedDirectory({self.path!r}, rank={self.rank}, world={self.world})"
