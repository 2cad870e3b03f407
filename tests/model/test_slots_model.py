"""Model check: every interleaving of N saves over the real ledger and retention, with failures and restarts.

Breadth first over all reachable states (counters replaced by their rank, so that the states are finitely many).
"""

from dataclasses import replace

import pytest

from pccheck.format import Record, SlotState
from pccheck.store.ledger import Ledger, State
from pccheck.store.retention import releasable


def build(state) -> Ledger:
    ledger = Ledger()
    ledger._entries = {e.slot: e for e in state}
    return ledger


def fresh(slots: int):
    ledger = Ledger()
    for slot in range(slots):
        ledger.add(slot)
    return tuple(ledger.entries())


def canonical(entries, agreed):
    """The same state with counters replaced by their rank."""
    counters = sorted({e.counter for e in entries if e.record} | {agreed} - {0})
    rank = {c: i + 1 for i, c in enumerate(counters)} | {0: 0}
    state = tuple(
        replace(e, record=e.record and replace(e.record, counter=rank[e.counter], step=rank[e.counter]))
        for e in entries
    )
    return state, rank[agreed]


def record(slot, counter, state):
    return Record(store_id=bytes(16), slot=slot, state=state, incarnation=1, counter=counter, step=counter)


def steps(state, agreed, in_flight, keep, crashes):
    """All next states: (name, entries, agreed)."""
    newest = max([agreed, *(e.counter for e in state if e.record)])
    running = [e for e in state if e.state is State.FILLING]
    unpublished = [e for e in state if e.state is State.SEALED and e.counter > agreed]
    if len(running) + len(unpublished) < in_flight:
        free = [e.slot for e in state if e.state is State.FREE]
        ledger = build(state)
        for unverified in [None, *(e for e in ledger.whole() if not e.verified)]:  # as Store._make_room
            if free:
                break
            if unverified is not None:
                ledger.mark(unverified.slot, verified=True)
            for slot in releasable(ledger.entries(), keep=keep, agreed=agreed):
                ledger.release(slot)
            free = [e.slot for e in ledger.entries() if e.state is State.FREE]
        assert free, f"no slot for a save: {state}"
        ledger.reserve(free[0], record(free[0], newest + 1, SlotState.FILLING))
        yield "reserve", ledger.entries(), agreed
    for e in running:
        ledger = build(state)
        ledger.seal(e.slot, record(e.slot, e.counter, SlotState.SEALED))
        # publish and release at once: what lies between changes no slot
        won = e.counter > agreed
        if won:
            ledger.publish(e.slot)
        now = e.counter if won else agreed
        for slot in releasable(ledger.entries(), keep=keep, agreed=now):
            ledger.release(slot)
        yield "commit", ledger.entries(), now
        ledger = build(state)
        ledger.fail(e.slot)
        yield "fail", ledger.entries(), agreed
    if crashes:
        ledger = Ledger()
        whole = [e for e in state if e.state in (State.SEALED, State.PUBLISHED)]
        for e in state:
            ledger.add(e.slot)
        for e in whole:
            ledger.adopt(e.slot, e.record, abandoned=False)
        if whole:
            ledger.publish(max(whole, key=lambda e: e.counter).slot)
        yield "crash", ledger.entries(), max([0, *(e.counter for e in whole)])


@pytest.mark.parametrize("in_flight", [1, 2, 3])
@pytest.mark.parametrize("keep", [1, 2])
def test_all_interleavings(in_flight, keep):
    """A save always gets a slot of the N + keep; once committed there is always a whole one; the newest only grows."""
    start = canonical(fresh(in_flight + keep), 0)
    seen, todo = {start}, [start]
    while todo:
        state, agreed = todo.pop()
        for _name, entries, now in steps(state, agreed, in_flight, keep, crashes=True):
            whole = [e for e in entries if e.whole]
            assert now >= agreed
            assert not now or any(e.counter == now and e.state is State.PUBLISHED for e in whole)
            assert sum(e.state is State.PUBLISHED for e in entries) <= 1
            before = {e.counter for e in state if e.whole and e.verified}
            after = {e.counter for e in whole if e.verified}
            if _name in ("commit", "reserve"):  # whatever was freed, `keep` verified ones (or all there are) stay
                assert len(after) >= min(keep, len(before))
            nxt = canonical(entries, now)
            if nxt not in seen:
                seen.add(nxt)
                todo.append(nxt)
    assert len(seen) > 5
