"""Which checkpoint all ranks hold when they open their stores, and go on from (floor 0: imports errors).

Pure: from what each rank holds and sees to one decision, which every rank works out for itself from the same facts.

A checkpoint is complete if the stores of all ranks of *its own* incarnation and world hold it; the greatest complete
one is restored. The minimum of what is newest on each rank is wrong: of {5, 7} and {5, 6} one rank lacks it. What is
newer, or incomplete, is withdrawn by everyone before the first save, and counters and incarnations go on above all that
were ever seen: so no checkpoint is ever put together from two lives of a job.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import msgspec

from pccheck.errors import NoValidCheckpointError, RanksError, named_ranks

FLAT = -1  # stands for the rank of a store that is the root itself: a job of one rank


class Sealed(NamedTuple):
    """One sealed checkpoint of a store; `counter` grows with every save of a job, in all of its lives."""

    incarnation: int
    counter: int
    step: int
    world: int


class Holding(msgspec.Struct, frozen=True):
    """What one store holds.

    Args:
        rank: by the folder's name; FLAT = the root is the store.
        store_id: tells it from a store of the same name elsewhere; "" = unknown.
        sealed: its own rank's sealed checkpoints, kept ones too.
        abandoned: ranges of counters that roll-backs left behind.
        incarnation: the greatest it has seen; 0 = it was never opened.
        counter: the greatest it has used.
        agreed: the greatest counter that all ranks were known to hold (PEER_ADDR).
    """

    rank: int
    store_id: str = ""
    sealed: tuple[Sealed, ...] = ()
    abandoned: tuple[tuple[int, int], ...] = ()
    incarnation: int = 0
    counter: int = 0
    agreed: int = 0


class Seen(msgspec.Struct, frozen=True):
    """What one rank holds itself, and what it sees of the other stores under its root."""

    own: Holding
    others: tuple[Holding, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Opening:
    """What the ranks go on from.

    Args:
        incarnation: of this life of the job.
        next_counter: the first counter to use.
        complete: what can be restored, newest first.
        newest: the first of these; None = there is none.
        abandoned: what roll-backs left behind, as any rank knows it.
        lost: a counter that was agreed and that ranks do not hold any more; 0 = none.
        lost_reason: what became of it.
        held: `complete`, and what was abandoned whole.
    """

    incarnation: int
    next_counter: int
    complete: tuple[Sealed, ...] = ()
    abandoned: tuple[tuple[int, int], ...] = ()
    lost: int = 0
    lost_reason: str = ""
    held: frozenset[Sealed] = field(default=frozenset(), repr=False)

    @property
    def newest(self) -> Sealed | None:
        """The checkpoint to restore."""
        return self.complete[0] if self.complete else None

    def holds(self, sealed: Sealed) -> bool:
        """Tell whether a checkpoint is one that can be restored, or one that was abandoned whole."""
        return sealed in self.held


def decide(seen: Sequence[Seen], where: str) -> Opening:
    """Give what all ranks go on from.

    Args:
        seen: what each rank of the new world holds and sees, by rank.
        where: names the root in errors.

    Raises:
        RanksError: ranks lost their store, or do not see those that a change of world size needs; names them.
        NoValidCheckpointError: a checkpoint was agreed, and none is complete any more.
    """
    stores = _authorities(seen)
    everything = [h for s in seen for h in (s.own, *s.others)]
    members = _members(stores)
    held, abandoned = _held(members), _abandoned(seen)
    complete = [s for s in held if not within(s.counter, abandoned)]
    newest = complete[0] if complete else None
    newer = [s for s in members if not within(s.counter, abandoned) and s.counter > (newest.counter if newest else 0)]
    _assert_no_store_lost(stores, newer, members, where)
    alone = len(seen) == 1  # then what its own store lost, which nobody else's opening depends on, a restore tells
    words = [h.agreed for r, h in stores.items() if not (alone and r == FLAT)]
    agreed = max((word for word in words if not within(word, abandoned)), default=0)
    lost = agreed if agreed > (newest.counter if newest else 0) else 0
    reason = _why_lost(lost, newer, members) if lost else ""
    if lost and newest is None:
        raise NoValidCheckpointError(where, [reason])
    if newest is not None and newest.world != len(seen):
        _assert_in_sight(seen, stores, newest, where)
    return Opening(
        incarnation=1 + max(h.incarnation for h in everything), next_counter=1 + max(h.counter for h in everything),
        complete=tuple(complete), abandoned=abandoned, lost=lost, lost_reason=reason, held=frozenset(held),
    )  # fmt: skip


def restorable(seen: Sequence[Seen]) -> tuple[list[Sealed], tuple[tuple[int, int], ...]]:
    """Give what all ranks of its world hold, newest first, and the ranges of counters that roll-backs left behind."""
    return _held(_members(_authorities(seen))), _abandoned(seen)


def _held(members: Mapping[Sealed, set[int]]) -> list[Sealed]:
    held = [sealed for sealed, ranks in members.items() if len(ranks) == sealed.world]
    return sorted(held, key=lambda s: (-s.counter, -s.incarnation))


def _abandoned(seen: Sequence[Seen]) -> tuple[tuple[int, int], ...]:
    return union(r for s in seen for h in (s.own, *s.others) for r in h.abandoned)


def _authorities(seen: Sequence[Seen]) -> dict[int, Holding]:
    """Give what counts of each store: its own rank's word where it is open, else that of the first one to see it."""
    stores = {s.own.rank: s.own for s in seen}
    for one in seen:
        for other in one.others:
            stores.setdefault(other.rank, other)
    return stores


def _members(stores: Mapping[int, Holding]) -> dict[Sealed, set[int]]:
    """Give the ranks that hold each checkpoint."""
    members: dict[Sealed, set[int]] = {}
    for rank, holding in stores.items():
        for sealed in holding.sealed:
            if rank in _ranks_of(sealed):
                members.setdefault(sealed, set()).add(rank)
    return members


def _ranks_of(sealed: Sealed) -> Sequence[int]:
    return (FLAT,) if sealed.world == 1 else range(sealed.world)


def _assert_no_store_lost(
    stores: Mapping[int, Holding], newer: Iterable[Sealed], members: Mapping[Sealed, set[int]], where: str
) -> None:
    """Raise RanksError where nobody can tell whether something newer than what is complete was agreed.

    Ranks seal nothing before all of them have opened their stores, durably. So a store that is not there, or was never
    opened, while others hold a part of the same checkpoint, was lost or is out of sight. To go on without it would
    start from scratch, and overwrite the rest.
    """
    for sealed in sorted(newer, key=lambda s: -s.counter):
        lost = [r for r in _ranks_of(sealed) if r not in stores or not stores[r].incarnation]
        if lost:
            raise RanksError(
                f"{where}: the stores of {named_ranks(lost)} are empty or not in sight, but "
                f"{named_ranks(sorted(members[sealed]))} hold step {sealed.step} (counter {sealed.counter}, world size "
                f"{sealed.world}), which may have been committed. Nothing was changed. Bring those folders back, "
                "start with the ranks on the hosts where they were, or use another directory to start afresh.",
                lost,
            )


def _why_lost(counter: int, newer: Iterable[Sealed], members: Mapping[Sealed, set[int]]) -> str:
    for sealed in newer:
        if sealed.counter == counter:
            missing = [r for r in _ranks_of(sealed) if r not in members[sealed]]
            return f"it was committed, but {named_ranks(missing)} hold no whole record of it any more"
    return f"counter {counter} was committed, but no rank holds a whole record of it any more"


def _assert_in_sight(seen: Sequence[Seen], stores: Mapping[int, Holding], newest: Sealed, where: str) -> None:
    """Raise RanksError unless every rank sees all stores of a world of another size: it needs parts of all of them."""
    hidden, blind = set(), []
    for rank, one in enumerate(seen):
        ids = {h.rank: h.store_id for h in (one.own, *one.others)}
        for member in _ranks_of(newest):
            if ids.get(member) not in (stores[member].store_id, ""):
                hidden.add(max(member, 0))
                blind.append(rank)
    if hidden:
        raise RanksError(
            f"{where}: step {newest.step} was saved by {newest.world} rank(s) and is to be restored by {len(seen)}, "
            f"but {named_ranks(sorted(set(blind)))} cannot see the stores of {named_ranks(sorted(hidden))}: put all of "
            "them where every rank can read them, or start with as many ranks as saved it",
            sorted(hidden),
        )


def within(counter: int, ranges: Iterable[tuple[int, int]]) -> bool:
    """Tell whether a counter lies in one of these ranges, both ends included."""
    return any(low <= counter <= high for low, high in ranges)


def union(ranges: Iterable[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    """Give sorted, disjoint ranges that hold the same counters."""
    joined: list[tuple[int, int]] = []
    for low, high in sorted(ranges):
        if joined and low <= joined[-1][1] + 1:
            joined[-1] = (joined[-1][0], max(high, joined[-1][1]))
        else:
            joined.append((low, high))
    return tuple(joined)
