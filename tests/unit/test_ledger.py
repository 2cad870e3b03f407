"""The life of a slot: every legal event does what the table says, every other one raises and changes nothing."""

from itertools import product

import pytest

from pccheck.format import Record, SlotState
from pccheck.store.ledger import TRANSITIONS, Act, Ledger, LedgerError, State


def record(slot: int, counter: int, state: SlotState = SlotState.FILLING) -> Record:
    return Record(store_id=bytes(16), slot=slot, state=state, incarnation=1, counter=counter, step=counter)


def ledger_in(state: State) -> Ledger:
    """A ledger whose slot 0 is in this state, and whose slot 1 is SEALED."""
    ledger = Ledger()
    for slot in (0, 1):
        ledger.add(slot)
    ledger.reserve(1, record(1, 1))
    ledger.seal(1, record(1, 1, SlotState.SEALED))
    if state is State.FREE:
        return ledger
    ledger.reserve(0, record(0, 2))
    if state is State.QUARANTINED:
        ledger.quarantine(0)
    if state in (State.SEALED, State.PUBLISHED):
        ledger.seal(0, record(0, 2, SlotState.SEALED))
    if state is State.PUBLISHED:
        ledger.publish(0)
    return ledger


ACTS = {
    Act.RESERVE: lambda ledger: ledger.reserve(0, record(0, 9)),
    Act.SEAL: lambda ledger: ledger.seal(0, record(0, 2, SlotState.SEALED)),
    Act.PUBLISH: lambda ledger: ledger.publish(0),
    Act.RELEASE: lambda ledger: ledger.release(0),
    Act.FAIL: lambda ledger: ledger.fail(0),
    Act.QUARANTINE: lambda ledger: ledger.quarantine(0),
    Act.ADOPT: lambda ledger: ledger.adopt(0, record(0, 9, SlotState.SEALED), abandoned=False),
}


@pytest.mark.parametrize(("state", "act"), list(product(State, ACTS)))
def test_every_event_in_every_state(state, act):
    """An event is carried out exactly where the table has it; elsewhere it raises and nothing changes."""
    ledger = ledger_in(state)
    assert ledger[0].state is state
    before = ledger.entries()
    if (state, act) in TRANSITIONS:
        ACTS[act](ledger)
        assert ledger[0].state is TRANSITIONS[state, act]
    else:
        with pytest.raises(LedgerError, match="slot 0"):
            ACTS[act](ledger)
        assert ledger.entries() == before


def test_publishing_demotes_the_one_before():
    """The word names one slot: the one it named before is SEALED again, and may now be released."""
    ledger = ledger_in(State.PUBLISHED)
    ledger.publish(1)
    assert ledger.published.slot == 1
    assert ledger[0].state is State.SEALED
    with pytest.raises(LedgerError):
        ledger.release(1)
    ledger.release(0)


def test_a_counter_is_used_once():
    """Two slots can never hold the same counter."""
    ledger = ledger_in(State.FREE)
    with pytest.raises(LedgerError, match="counter 1"):
        ledger.reserve(0, record(0, 1))
    assert ledger[0].state is State.FREE


def test_only_free_slots_are_retired():
    """A slot that holds something is never struck out; unknown and double slots are errors."""
    ledger = ledger_in(State.SEALED)
    for slot in (0, 1, 7):
        with pytest.raises(LedgerError):
            ledger.retire(slot)
    with pytest.raises(LedgerError):
        ledger.add(0)
    ledger.release(0)
    ledger.retire(0)
    assert len(ledger) == 1


def test_a_released_slot_forgets_what_it_held():
    """Verdicts on a checkpoint do not pass to the next one in its slot."""
    ledger = ledger_in(State.SEALED)
    ledger.mark(0, damaged=True, abandoned=True)
    ledger.release(0)
    ledger.reserve(0, record(0, 9))
    ledger.seal(0, record(0, 9, SlotState.SEALED))
    assert ledger[0].whole
    assert ledger[0].verified
