"""A linked folder: one file per process and the list of them, which makes it one checkpoint (floor 2: imports members
and below).

Each file was linked there by a store of links, or is a copy of such a file; the list says what must be in each. So the
folder can be moved, copied and deleted by anyone, and a file of another save in it is found.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import closing, contextmanager
from typing import final

import msgspec

from pccheck import format
from pccheck.errors import ContentError, FormatError, MediumError, RanksError, UsageError
from pccheck.format import Record, SlotState
from pccheck.reading.members import RankFile
from pccheck.reading.reader import read_manifest, read_record
from pccheck.storage.directory import Directory
from pccheck.storage.medium import Medium

LIST_NAME = "pccheck.json"
MAX_RANKS = 1 << 20
MAX_LIST_BYTES = 1 << 28


def rank_name(rank: int) -> str:
    """Give the name of a process's file in a linked folder: "rank-00000.pcc"."""
    if type(rank) is not int or not 0 <= rank < MAX_RANKS:
        raise UsageError(f"rank={rank!r} is not allowed: it must be a whole number from 0 to {MAX_RANKS - 1}")
    return f"rank-{rank:05d}.pcc"


class Listed(msgspec.Struct, frozen=True):
    """What the list says of one process's file; the identity and digest of what must be in it."""

    file: str
    store_id: str
    incarnation: int
    counter: int
    manifest_digest: str

    @classmethod
    def of(cls, rank: int, record: Record) -> Listed:
        """Say it of a record."""
        return cls(
            rank_name(rank), record.store_id.hex(), record.incarnation, record.counter, record.manifest_digest.hex()
        )


class FolderList(msgspec.Struct, frozen=True):
    """The list of a linked folder, `pccheck.json`."""

    version: int
    step: int
    ranks: tuple[Listed, ...]

    def lists(self, rank: int, record: Record) -> bool:
        """Tell whether a process's file with this record is the one that is listed."""
        return record.step == self.step and Listed.of(rank, record) == self.ranks[rank]

    def encode(self) -> bytes:
        """Give the bytes of the file."""
        return msgspec.json.format(msgspec.json.encode(self), indent=1) + b"\n"


def is_linked(folder: str | os.PathLike[str]) -> bool:
    """Tell whether a path is a finished linked folder."""
    where = os.fspath(folder)
    return os.path.isdir(where) and os.path.isfile(os.path.join(where, LIST_NAME))


def read_list(folder: str | os.PathLike[str]) -> FolderList:
    """Give the list of a linked folder.

    Raises:
        UsageError: it was never finished, or is no linked folder.
        FormatError: what its list says cannot be.
        MediumError: it cannot be read.
    """
    with closing(Directory(folder, create=False, write=False)) as volume:
        if LIST_NAME not in volume.names():
            files = [name for name in volume.names() if name.endswith(".pcc")]
            what = f"its {LIST_NAME} is missing: it was never finished" if files else f"it holds no {LIST_NAME}"
            raise UsageError(f"{volume.path} is not a whole linked checkpoint: {what}")
        with closing(volume.open(LIST_NAME)) as medium:
            size = medium.size()
            if size > MAX_LIST_BYTES:
                raise _damaged(medium.path, f"it has {size:,} bytes; {MAX_LIST_BYTES:,} are the most")
            data = bytearray(size)
            medium.read_into(memoryview(data), 0)
    try:
        found = msgspec.json.decode(data, type=FolderList)
    except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
        raise _damaged(medium.path, str(error)) from None
    if found.version != format.VERSION:
        raise FormatError(f"{medium.path} is of format version {found.version}; this release reads {format.VERSION}")
    if not found.ranks or len(found.ranks) > MAX_RANKS:
        raise _damaged(medium.path, f"it lists {len(found.ranks)} files; 1 to {MAX_RANKS} can be")
    if any(listed.file != rank_name(rank) for rank, listed in enumerate(found.ranks)):
        raise _damaged(medium.path, f"it lists other files than {rank_name(0)}, {rank_name(1)} and so on")
    return found


def _damaged(path: str, reason: str) -> FormatError:
    return FormatError(f"{path} is damaged: {reason}; restore another step, {_MEND.format(os.path.dirname(path))}")


# The list holds nothing that the files' own records do not say.
_MEND = (
    "or have the list made anew: pccheck.links.finish({!r}, world) of as many processes as there are rank-*.pcc files, "
    "all of one save"
)


def list_files(folder: str, world: int) -> FolderList:
    """Make the list of what lies in a linked folder, by the records of all processes' files.

    Raises:
        RanksError: a process's file is missing, not sealed or cut short, or of another step; names all that are.
        MediumError: the folder cannot be read.
    """
    if type(world) is not int or not 0 < world <= MAX_RANKS:
        raise UsageError(f"world={world!r} is not allowed: it must be a whole number from 1 to {MAX_RANKS}")
    listed, problems = [], dict[int, str]()
    step: int | None = None
    with closing(Directory(folder, create=False, write=False)) as volume:
        for rank in range(world):
            try:
                with closing(volume.open(rank_name(rank))) as medium:
                    record = _sealed(medium)
            except (ContentError, MediumError) as error:
                problems[rank] = str(error)
                continue
            step = record.step if step is None else step
            if record.step != step:
                problems[rank] = f"{rank_name(rank)} is of step {record.step}, others of step {step}"
            listed.append(Listed.of(rank, record))
    if problems:
        first = next(iter(problems))
        raise RanksError(f"{folder} holds no whole checkpoint of {world} process(es): {problems[first]}", [*problems])
    assert step is not None, "there is at least one rank"
    return FolderList(format.VERSION, step, tuple(listed))


def _sealed(medium: Medium) -> Record:
    record = read_record(medium)
    if record is None or record.state is not SlotState.SEALED:
        raise FormatError(f"{medium.path} holds no whole checkpoint")
    try:
        format.check_geometry(record, medium.size())
    except FormatError as error:
        raise FormatError(f"{medium.path}: {error}") from None
    return record


@final
class LinkedFiles:
    """The files of a linked folder. Thread-safe; nothing is held open.

    Args:
        folder: where it is.

    Raises as `read_list`.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.where = os.path.abspath(os.fspath(folder))
        self.listed = read_list(self.where)
        self.step, self.world, self.counter = self.listed.step, len(self.listed.ranks), self.listed.ranks[0].counter

    def open(self, rank: int) -> RankFile:
        """Give a process's file; FormatError where it is missing, or holds something else than the list says."""
        with self._opened(rank) as (medium, record):
            manifest = read_manifest(medium, record)
        return RankFile(store=self.where, name=rank_name(rank), copies=(), record=record, manifest=manifest)

    def record(self, rank: int) -> Record:
        """Give the record of a process's file, without its manifest; errors as `open`."""
        with self._opened(rank) as (_, record):
            return record

    @contextmanager
    def _opened(self, rank: int) -> Iterator[tuple[Medium, Record]]:
        name = rank_name(rank)
        with closing(Directory(self.where, create=False, write=False)) as volume:
            try:
                medium = volume.open(name)
            except MediumError as error:
                if isinstance(error.cause, FileNotFoundError):
                    raise FormatError(
                        f"{self.where}: {name} is missing, which {LIST_NAME} lists: copy it there again, or restore "
                        "another step"
                    ) from None
                raise
            with closing(medium):
                yield medium, self._listed(medium, rank)

    def _listed(self, medium: Medium, rank: int) -> Record:
        record = _sealed(medium)
        if not self.listed.lists(rank, record):
            raise FormatError(
                f"{medium.path} holds step {record.step}, counter {record.counter}, which is not what {LIST_NAME} "
                f"lists (step {self.step}): files of several saves were mixed, or the list is damaged; restore another "
                f"step, {_MEND.format(self.where)}"
            )
        return record
