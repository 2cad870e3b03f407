"""The files in which ranks hold their parts of a checkpoint (floor 2: imports world, gathering and below)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field
from typing import Protocol, final

from pccheck.errors import ReusedError
from pccheck.format import Record
from pccheck.reading.gathering import Copying, Gathered, Place, gather
from pccheck.reading.places import Place as Folder
from pccheck.reading.places import rank_stores
from pccheck.reading.reader import confirm, opened, read_manifest, under_any
from pccheck.reading.world import Member, WorldIdentity, find_member
from pccheck.state.manifest import Manifest
from pccheck.storage.medium import Medium


@final
@dataclass(frozen=True, kw_only=True)
class RankFile:
    """One rank's part of a checkpoint.

    Args:
        store: the folder.
        name: the file that its manifest was read from.
        copies: other files that hold the same, should that one be damaged.
        record: its record.
        manifest: its manifest.
    """

    store: str
    name: str
    copies: tuple[str, ...]
    record: Record
    manifest: Manifest = field(repr=False)

    def gather(self, places: Sequence[Place], copyings: Sequence[Copying], threads: int) -> Gathered:
        """Read what is wanted of it; errors as in `gathering.gather`, of the first file where no copy verifies."""

        def read(name: str) -> Gathered:
            with _opened(self.store, name, self.record) as medium:
                return gather(medium, self.manifest, places, copyings, threads=threads)

        return under_any((self.name, *self.copies), read)


class Files(Protocol):
    """The files of all ranks of one checkpoint. Thread-safe.

    Args:
        where: names them in errors.
        step: the caller's label.
        counter: its place in the order of all checkpoints, as rank 0 has it.
        world: how many ranks there are.
    """

    where: str
    step: int
    counter: int
    world: int

    def open(self, rank: int) -> RankFile:
        """Give a rank's file; raises ReusedError, FormatError, DamagedError or MediumError."""


@final
class StoreFiles:
    """What the stores under a job's root hold of one checkpoint.

    Args:
        root: the job's folder.
        identity: which checkpoint.
    """

    def __init__(self, root: str, identity: WorldIdentity) -> None:
        self.where, self.identity = root, identity
        self.step, self.counter, self.world = identity.step, identity.counter, identity.world
        self._stores = rank_stores(root)

    def open(self, rank: int) -> RankFile:
        """Give a rank's file; ReusedError where its store does not hold the checkpoint (any more)."""
        member = find_member(self._stores, rank, self.identity)
        if member is None:
            raise ReusedError(
                f"rank {rank} does not hold step {self.step}, counter {self.counter} under {self.where} any more"
            )
        return open_member(member)


def open_member(member: Member) -> RankFile:
    """Read the manifest of one rank's part under the first of its names that gives it, or raise the first error."""
    record, names = member.candidate.record, member.candidate.names

    def read(name: str) -> RankFile:
        with _opened(member.store, name, record) as medium:
            manifest = read_manifest(medium, record)
        copies = names[names.index(name) + 1 :]
        return RankFile(store=member.store, name=name, copies=copies, record=record, manifest=manifest)

    return under_any(names, read)


@contextmanager
def held(members: Iterable[Member]) -> Iterator[None]:
    """Lock the files of all ranks against their writers, which else win every race against a reader of many files.

    Raises ReusedError where one is being given to a newer checkpoint; MediumError.
    """
    with ExitStack() as stack:
        for member in members:
            with closing(Folder.of_store(member.store)) as folder:
                medium = stack.enter_context(opened(folder.open, member.candidate.names[0]))
            if not medium.lock_shared():
                raise ReusedError(f"{medium.path} is being given to a newer checkpoint; look again")
            confirm(medium, member.candidate.record)
        yield


@contextmanager
def _opened(store: str, name: str, record: Record) -> Iterator[Medium]:
    """Open a file that is to hold this checkpoint still; the folder is open only as long: there may be thousands."""
    with closing(Folder.of_store(store)) as folder, opened(folder.open, name) as medium:
        confirm(medium, record)
        yield medium
