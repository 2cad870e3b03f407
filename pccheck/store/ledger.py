"""The life of every slot, as one table (floor 0: imports errors, format).

Rule 1: whatever decides what may happen to a slot lives here and in `retention`; `store` only carries it out.
Rule 2: an illegal event raises LedgerError and changes nothing.
Rule 3: at most one slot is PUBLISHED, and it is never released: a newer one must be published first.

    FREE --reserve--> FILLING --seal--> SEALED --publish--> PUBLISHED
     ^                 |   |            |  ^  |                 |
     |<-----fail-------+   |            |  |  +--release-->FREE |
     |                     v            |  +------demote--------+
     |                QUARANTINED <-----+ quarantine
     +--adopt--> SEALED (opening: a record that another process sealed)      FREE, QUARANTINED --retire--> (gone)
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from enum import Enum

from pccheck.errors import PccheckError
from pccheck.format import Record


class State(Enum):
    """Where a slot is in its life."""

    FREE = "free"
    FILLING = "filling"
    SEALED = "sealed"
    PUBLISHED = "published"
    QUARANTINED = "quarantined"


class Act(Enum):
    """What can happen to a slot."""

    RESERVE = "reserve"
    SEAL = "seal"
    PUBLISH = "publish"
    DEMOTE = "demote"
    RELEASE = "release"
    FAIL = "fail"
    QUARANTINE = "quarantine"
    ADOPT = "adopt"


TRANSITIONS: dict[tuple[State, Act], State] = {
    (State.FREE, Act.RESERVE): State.FILLING,
    (State.FREE, Act.ADOPT): State.SEALED,
    (State.FILLING, Act.SEAL): State.SEALED,
    (State.FILLING, Act.FAIL): State.FREE,
    (State.FILLING, Act.QUARANTINE): State.QUARANTINED,
    (State.SEALED, Act.PUBLISH): State.PUBLISHED,
    (State.SEALED, Act.RELEASE): State.FREE,
    (State.SEALED, Act.QUARANTINE): State.QUARANTINED,
    (State.PUBLISHED, Act.DEMOTE): State.SEALED,
}


class LedgerError(PccheckError):
    """An event that the table does not allow: a fault of pccheck, never of the caller."""

    def __init__(self, slot: int, state: State | None, act: str) -> None:
        super().__init__(f"slot {slot} is {state.value if state else 'unknown'}: {act} is illegal; nothing was changed")
        self.slot, self.state, self.act = slot, state, act


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One slot. `record` is what it holds (SEALED, PUBLISHED) or will hold (FILLING).

    Args:
        verified: this process wrote it, or checked all its digests.
        damaged: a restore passed over it.
        abandoned: a roll-back left it behind.
        pending: sealed here, but not (yet) known to be held by all ranks; never so with one rank.
    """

    slot: int
    state: State = State.FREE
    record: Record | None = None
    verified: bool = False
    damaged: bool = False
    abandoned: bool = False
    pending: bool = False

    @property
    def whole(self) -> bool:
        """Whether it counts as a checkpoint that can be restored."""
        return self.state in (State.SEALED, State.PUBLISHED) and not (self.damaged or self.abandoned)

    @property
    def counter(self) -> int:
        """The counter of what it holds, 0 for nothing."""
        return self.record.counter if self.record else 0


class Ledger:
    """The slots of one store. Not thread-safe: the store's lock guards it."""

    def __init__(self) -> None:
        self._entries: dict[int, Entry] = {}

    def __iter__(self) -> Iterable[Entry]:
        return iter(self._entries.values())

    def __len__(self) -> int:
        return len(self._entries)

    def __getitem__(self, slot: int) -> Entry:
        return self._entries[slot]

    def entries(self) -> list[Entry]:
        """Give all entries, by slot."""
        return sorted(self._entries.values(), key=lambda e: e.slot)

    def in_state(self, *states: State) -> list[Entry]:
        """Give the entries in any of these states, by slot."""
        return [e for e in self.entries() if e.state in states]

    @property
    def published(self) -> Entry | None:
        """The slot that the word names."""
        return next(iter(self.in_state(State.PUBLISHED)), None)

    def whole(self) -> list[Entry]:
        """Give what can be restored, newest first."""
        return sorted((e for e in self.entries() if e.whole), key=lambda e: -e.counter)

    def durable(self, agreed: int) -> list[Entry]:
        """Give what can be restored and all ranks hold, the newest of which is `agreed`; newest first."""
        return [e for e in self.whole() if e.counter <= agreed and not e.pending]

    def add(self, slot: int) -> None:
        """Enter a new, free slot."""
        if slot in self._entries:
            raise LedgerError(slot, self._entries[slot].state, "add")
        self._entries[slot] = Entry(slot=slot)

    def retire(self, slot: int) -> None:
        """Strike out a free or quarantined slot whose file is going away."""
        entry = self._entries.get(slot)
        if entry is None or entry.state not in (State.FREE, State.QUARANTINED):
            raise LedgerError(slot, entry.state if entry else None, "retire")
        del self._entries[slot]

    def reserve(self, slot: int, record: Record) -> None:
        """Take a free slot for a checkpoint; its counter must be newer than any the ledger holds."""
        if record.slot != slot or any(e.counter == record.counter for e in self._entries.values()):
            raise LedgerError(slot, self._state(slot), f"reserve for counter {record.counter} of slot {record.slot}")
        self._move(slot, Act.RESERVE, record=record, verified=False, damaged=False, abandoned=False, pending=False)

    def adopt(self, slot: int, record: Record, *, abandoned: bool) -> None:
        """Count a record that another process sealed; it is not verified."""
        self._move(slot, Act.ADOPT, record=record, abandoned=abandoned)

    def seal(self, slot: int, record: Record, *, pending: bool = False) -> None:
        """Note that data and record of a slot are durable: this process wrote it, so it is verified."""
        self._move(slot, Act.SEAL, record=record, verified=True, pending=pending)

    def publish(self, slot: int) -> None:
        """Note that the word names this slot; the one it named before goes back to SEALED."""
        old = self.published
        self._check(slot, Act.PUBLISH)
        if old is not None:
            self._move(old.slot, Act.DEMOTE)
        self._move(slot, Act.PUBLISH)

    def demote(self) -> None:
        """Note that the word names no slot."""
        if (old := self.published) is not None:
            self._move(old.slot, Act.DEMOTE)

    def release(self, slot: int) -> None:
        """Make a sealed slot free."""
        self._move(slot, Act.RELEASE, record=None, verified=False, damaged=False, abandoned=False, pending=False)

    def fail(self, slot: int) -> None:
        """Make the slot of a failed save free: nothing of it counts."""
        self._move(slot, Act.FAIL, record=None)

    def quarantine(self, slot: int) -> None:
        """Never use a slot again: what its file holds is unknown (a failed sync, a writer that does not end)."""
        self._move(slot, Act.QUARANTINE, verified=False)

    def mark(
        self,
        slot: int,
        *,
        verified: bool | None = None,
        damaged: bool | None = None,
        abandoned: bool | None = None,
        pending: bool | None = None,
    ) -> None:
        """Note what was learnt of a sealed or published slot."""
        entry = self._entries.get(slot)
        if entry is None or entry.state not in (State.SEALED, State.PUBLISHED):
            raise LedgerError(slot, entry.state if entry else None, "mark")
        self._entries[slot] = replace(
            entry,
            verified=entry.verified if verified is None else verified,
            damaged=entry.damaged if damaged is None else damaged,
            abandoned=entry.abandoned if abandoned is None else abandoned,
            pending=entry.pending if pending is None else pending,
        )

    def _state(self, slot: int) -> State | None:
        entry = self._entries.get(slot)
        return entry.state if entry else None

    def _check(self, slot: int, act: Act) -> State:
        state = self._state(slot)
        if state is None or (state, act) not in TRANSITIONS:
            raise LedgerError(slot, state, act.value)
        return TRANSITIONS[state, act]

    def _move(self, slot: int, act: Act, **changes: object) -> None:
        new = self._check(slot, act)
        self._entries[slot] = replace(self._entries[slot], state=new, **changes)  # type: ignore[arg-type]
