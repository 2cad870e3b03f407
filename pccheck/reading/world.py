"""Which checkpoints the stores of all ranks hold together (floor 2: imports restoring, listing, places and below).

A job's root holds `rank-00000/`, `rank-00001/`, ..., one store for each rank, or is itself a store (world 1), or both,
where a job went from many ranks to one. A *world checkpoint* is complete if the stores of ranks 0..world-1 all hold a
sealed record of it; what only some ranks hold was never committed, or is of a store that is gone.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, final

from pccheck.reading.listing import Listing
from pccheck.reading.places import Place, rank_stores
from pccheck.reading.restoring import Candidate, candidates

_LOOKS = 10


class WorldIdentity(NamedTuple):
    """What tells one checkpoint of a world from all others.

    Args:
        incarnation: which opening of the stores made it.
        counter: its place in the order of all checkpoints.
        step: the caller's label.
        world: number of ranks that it was saved by.
    """

    incarnation: int
    counter: int
    step: int
    world: int


@final
@dataclass(frozen=True, kw_only=True)
class RankStore:
    """One look at one store under a root.

    Args:
        rank: by the folder's name; 0 for a root that is itself a store.
        path: the folder.
        listing: what it holds; `listing.check` are the facts of its CHECK.
    """

    rank: int
    path: str
    listing: Listing = field(repr=False)


class Member(NamedTuple):
    """One rank's part of a world checkpoint: in which store, and under which names."""

    store: str
    candidate: Candidate


@final
@dataclass(frozen=True, kw_only=True)
class WorldCheckpoint:
    """One checkpoint as far as the stores of its ranks hold it.

    Args:
        identity: which one.
        members: by rank, where the sealed record of it is.
        abandoned: some store's CHECK says that a roll-back left it behind.
    """

    identity: WorldIdentity
    members: Mapping[int, Member] = field(repr=False)
    abandoned: bool = False

    @property
    def missing(self) -> tuple[int, ...]:
        """The ranks whose stores do not hold it (the first 1,000 of them)."""
        missing = (rank for rank in range(self.identity.world) if rank not in self.members)
        return tuple(itertools.islice(missing, 1000))

    @property
    def complete(self) -> bool:
        """Whether all ranks hold it."""
        return len(self.members) == self.identity.world


@final
@dataclass(frozen=True, kw_only=True)
class WorldListing:
    """One look at all stores under a root.

    Args:
        path: the root.
        stores: one for each folder that is a store.
        checkpoints: all that some rank holds, complete or not, abandoned or not, newest first.
    """

    path: str
    stores: tuple[RankStore, ...]
    checkpoints: tuple[WorldCheckpoint, ...]


def look_at_world(root: str | os.PathLike[str]) -> WorldListing:
    """List all sealed checkpoints of all ranks' stores under a root, without a lock and without writing.

    Ranks may be saving meanwhile: while none is found complete and something moves, it looks again, at most 10 times.

    Without any store it gives an empty listing. Raises MediumError where a folder cannot be read.
    """
    where, previous = os.path.abspath(os.fspath(root)), None
    for _ in range(_LOOKS):
        stores = tuple(RankStore(rank=rank, path=path, listing=_look(path)) for rank, path in rank_stores(where))
        found = WorldListing(path=where, stores=stores, checkpoints=_checkpoints(stores))
        if any(c.complete for c in found.checkpoints) or found == previous:
            break
        previous = found
    return found


def world_candidates(root: str | os.PathLike[str]) -> list[WorldCheckpoint]:
    """Give the checkpoints that all their ranks hold and that no roll-back abandoned, newest first.

    Raises as `look_at_world` does.
    """
    return [c for c in look_at_world(root).checkpoints if c.complete and not c.abandoned]


def find_member(stores: Sequence[tuple[int, str]], rank: int, identity: WorldIdentity) -> Member | None:
    """Give where one rank's part of a checkpoint is now, of the stores of `rank_stores`; None where none holds it.

    Raises MediumError where the store cannot be read.
    """
    for at, path in stores:
        if at == rank:
            found = _members(RankStore(rank=rank, path=path, listing=_look(path))).get(identity)
            if found is not None:
                return found
    return None


def _look(path: str) -> Listing:
    place = Place.of_store(path)
    try:
        return place.look()
    finally:
        place.close()


def _members(store: RankStore) -> dict[WorldIdentity, Member]:
    """Give what a store holds of its own rank: the record of another one is of a store that was copied here."""
    found = {}
    for candidate in candidates(store.listing):
        record = candidate.record
        if record.rank == store.rank:
            found[WorldIdentity(*record.identity, record.world)] = Member(store.path, candidate)
    return found


def _checkpoints(stores: tuple[RankStore, ...]) -> tuple[WorldCheckpoint, ...]:
    members: dict[WorldIdentity, dict[int, Member]] = {}
    for store in stores:
        for identity, member in _members(store).items():
            members.setdefault(identity, {}).setdefault(store.rank, member)
    left = [store.listing.check.abandoned for store in stores if store.listing.check is not None]
    found = [
        WorldCheckpoint(identity=identity, members=held, abandoned=any(identity.counter in a for a in left))
        for identity, held in members.items()
    ]
    return tuple(sorted(found, key=lambda c: (c.identity.counter, c.identity.incarnation), reverse=True))
