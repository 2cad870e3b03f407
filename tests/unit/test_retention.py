"""What may be freed: examples that name each rule, and properties over random ledgers."""

from hypothesis import given
from hypothesis import strategies as st

from pccheck.format import Record, SlotState
from pccheck.store.ledger import Entry, State
from pccheck.store.retention import releasable


def entry(
    counter, state=State.SEALED, verified=True, damaged=False, abandoned=False, pending=False, world=1
) -> Entry:  # fmt: skip
    held = state in (State.SEALED, State.PUBLISHED, State.FILLING)
    record = Record(
        store_id=bytes(16), slot=counter, state=SlotState.SEALED, incarnation=1, counter=counter, step=counter,
        world=world,
    )  # fmt: skip
    return Entry(
        slot=counter, state=state, record=record if held else None, verified=verified, damaged=damaged,
        abandoned=abandoned, pending=pending,
    )  # fmt: skip


def freed(*entries, keep=1, agreed=0, world=1):
    return releasable(entries, keep=keep, agreed=agreed, world=world)


def test_keep_one_frees_all_that_is_older_than_the_word():
    assert freed(entry(5), entry(6), entry(7, State.PUBLISHED), agreed=7) == [5, 6]


def test_keep_two_holds_one_more():
    assert freed(entry(5), entry(6), entry(7, State.PUBLISHED), keep=2, agreed=7) == [5]


def test_a_sealed_one_that_is_not_yet_published_frees_nothing():
    assert freed(entry(7, State.PUBLISHED), entry(8), agreed=7) == []


def test_unverified_ones_do_not_count_and_are_held_while_they_may_be_needed():
    old = [entry(5, verified=False), entry(6, verified=False), entry(7, State.PUBLISHED, verified=False)]
    assert freed(*old, agreed=7) == []
    assert freed(*old, entry(8), agreed=7) == [5, 6]
    assert freed(*old, entry(8), keep=2, agreed=7) == []
    assert freed(*old[:2], entry(7, verified=False), entry(8, State.PUBLISHED), agreed=8) == [5, 6, 7]


def test_damaged_and_abandoned_ones_go_first():
    entries = [entry(4), entry(6, abandoned=True), entry(7, damaged=True), entry(5, State.PUBLISHED)]
    assert freed(*entries, agreed=5) == [7, 6, 4]


def test_nothing_whole_is_freed_before_all_ranks_agreed_on_something():
    assert freed(entry(5), entry(6), agreed=0) == []


def test_what_is_not_known_to_be_on_all_ranks_is_held_and_counts_for_nothing():
    newer = [entry(8, pending=True), entry(9, State.PUBLISHED, pending=True)]
    assert freed(entry(5), entry(6), entry(7), *newer, keep=2, agreed=7) == [5]
    assert freed(entry(4, pending=True), entry(5), entry(7, State.PUBLISHED), agreed=7) == [5]


def test_another_world_is_held_until_this_one_has_agreed():
    old = [entry(5, world=4), entry(6, world=4)]
    assert freed(*old, keep=2, agreed=6, world=2) == []
    assert freed(*old, entry(7, State.PUBLISHED, pending=True, world=2), keep=2, agreed=6, world=2) == []
    assert freed(*old, entry(7, State.PUBLISHED, world=2), keep=2, agreed=7, world=2) == [5, 6]


entries = st.lists(st.integers(1, 30), unique=True, max_size=8).flatmap(
    lambda counters: st.tuples(
        *(st.builds(entry, st.just(c), st.sampled_from(State), *[st.booleans()] * 4) for c in counters)
    )
)  # fmt: skip


@given(entries, st.integers(1, 4), st.integers(0, 30))
def test_what_must_never_be_freed(entries, keep, agreed):
    """Only sealed slots; never the newest `keep` verified ones, what is pending, or not older than the agreement."""
    free = set(releasable(entries, keep=keep, agreed=agreed))
    by_slot = {e.slot: e for e in entries}
    assert all(by_slot[s].state is State.SEALED for s in free)
    whole = sorted((e for e in entries if e.whole), key=lambda e: -e.counter)
    counting = [e.slot for e in whole if e.verified and not e.pending]
    assert not free & set(counting[:keep])
    assert not free & {e.slot for e in whole if e.pending}
    assert all(by_slot[s].counter < agreed for s in free if by_slot[s].whole)
    held = [e for e in whole if e.slot not in free]
    if len(held) < len(whole):  # something whole was freed: then `keep` verified ones stay
        assert sum(e.verified and not e.pending for e in held) >= keep


@given(entries, st.integers(1, 4), st.integers(0, 30))
def test_what_is_worthless_is_freed(entries, keep, agreed):
    """Damaged and abandoned checkpoints never hold a slot that is sealed."""
    free = set(releasable(entries, keep=keep, agreed=agreed))
    worthless = {e.slot for e in entries if e.state is State.SEALED and (e.damaged or e.abandoned)}
    assert worthless <= free
