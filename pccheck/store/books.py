"""The books of one open store: ledger, word, pins, and what all ranks hold (floor 2: imports floors 0 and 1, check).

Two locks. `lock` guards the ledger and the word and is never held over I/O, so that `save()` never waits behind a
disk. `files_lock` serialises whatever makes, replaces or removes files and decides what is freed.
"""

from __future__ import annotations

import threading

from pccheck.format import Record
from pccheck.store.check import Check
from pccheck.store.ledger import Entry, Ledger


class Books:
    """What the store and its history share. Whatever is not a method is read and changed under `lock` only.

    Args:
        check: the open CHECK.
        ledger: the slots.
        kept: pinned checkpoints by file name.
        next_counter: the first counter to use.
        agreed: the newest counter that all ranks hold.
    """

    def __init__(
        self, check: Check, ledger: Ledger, kept: dict[str, Record], *, next_counter: int, agreed: int
    ) -> None:
        self.check, self.ledger, self.pins, self.next_counter = check, ledger, kept, next_counter
        self.agreed = agreed  # the newest counter whose word is durable, on all ranks
        self.base = 0  # the counter that this run restored
        # No code takes one twice. A signal handler might, and is to meet an error and no deadlock: what waits for or
        # changes anything asks first whether its thread has one of these `turns`.
        self.lock, self.files_lock = threading.RLock(), threading.RLock()
        self.turns = (threading.Condition(self.lock), threading.Condition(self.files_lock))

    def entries(self) -> list[Entry]:
        """Give a copy of the ledger."""
        with self.lock:
            return self.ledger.entries()

    def whole(self) -> list[Entry]:
        """Give what can be restored from slots, newest first."""
        with self.lock:
            return self.ledger.whole()

    def durable_entries(self) -> list[Entry]:
        """Give what is durable on all ranks and can be restored from slots, newest first."""
        with self.lock:
            return self.ledger.durable(self.agreed)

    def published(self) -> Entry | None:
        """Give the slot that the word names."""
        with self.lock:
            return self.ledger.published

    def kept(self) -> dict[str, Record]:
        """Give the pinned checkpoints by file name, abandoned ones included."""
        with self.lock:
            return dict(self.pins)

    def durable(self) -> list[Record]:
        """Give what is durable and restorable, newest first; a pinned checkpoint that is also in a slot comes once."""
        found = [e.record for e in self.durable_entries() if e.record]
        pending = {e.counter for e in self.entries() if e.pending}  # pinned by keep_every before all ranks hold them
        kept = [r for r in self.kept().values() if r.counter not in self.check.abandoned]
        found += [r for r in kept if r.counter not in pending]
        return sorted({r.identity: r for r in found}.values(), key=lambda r: -r.counter)
