"""What may be freed: the most dangerous decision, as one pure function (floor 0: imports ledger)."""

from __future__ import annotations

from collections.abc import Iterable

from pccheck.store.ledger import Entry, State


def releasable(entries: Iterable[Entry], *, keep: int, agreed: int, world: int = 1) -> list[int]:
    """Give the slots that may be freed, the least wanted first: damaged, abandoned, then the oldest.

    Only SEALED slots ever are: not what the word names, not what is being filled. Of the checkpoints that can be
    restored, the newest are held until `keep` *verified* ones are among them, so that an unverified one never stands
    in for a verified one, and is itself held while it may still be needed. What is not known to be on all ranks is
    held and counts for nothing. What a job of another number of ranks left is held until this one has agreed on a
    checkpoint of its own. A pinned checkpoint is no matter here: its name under kept/ holds its bytes. In a store of
    links nothing is held that is sealed: it counts as sealed only once its link is durable, and lives by that.

    Args:
        entries: all slots.
        keep: how many verified checkpoints to hold; 0 = a store of links.
        agreed: the newest counter that all ranks hold (with one rank: the newest published); it and whatever is
            newer is held; 0 = none yet, which holds everything that is not damaged or abandoned.
        world: number of ranks of this job.
    """
    entries = list(entries)
    sealed = [e for e in entries if e.state is State.SEALED]
    if not keep:
        return [e.slot for e in sealed]
    held: set[int] = set()
    verified = 0
    newest = next((e.record for e in entries if e.whole and e.counter == agreed), None)
    settled = newest is not None and newest.world == world  # this world has agreed on a checkpoint of its own
    for entry in sorted((e for e in entries if e.whole), key=lambda e: -e.counter):
        if entry.pending:
            held.add(entry.slot)
            continue
        other_world = settled and entry.record is not None and entry.record.world != world
        if agreed and entry.counter < agreed and (verified >= keep or other_world):
            continue
        held.add(entry.slot)
        verified += entry.verified
    free = [e for e in sealed if e.slot not in held]
    return [e.slot for e in sorted(free, key=lambda e: (not e.damaged, not e.abandoned, e.counter))]
