"""What happens to checkpoints after their commit: pins, deletion, restores, branches (floor 2: imports below)."""

from __future__ import annotations

from dataclasses import replace

from pccheck import format
from pccheck.errors import ContentError, StepNotFoundError, UsageError
from pccheck.format import Record, SlotState
from pccheck.reading.reader import read_record
from pccheck.storage.volume import Volume
from pccheck.store.books import Books
from pccheck.store.ledger import Entry, State
from pccheck.store.slots import Slots


class History:
    """The verbs on durable checkpoints of one open store. Thread-safe.

    Args:
        volume: where the files are.
        books: shared with the store.
        slots: shared with the store.
        linking: it is a store of links, which has no history.
    """

    def __init__(self, volume: Volume, books: Books, slots: Slots, *, linking: bool = False) -> None:
        self._volume, self._books, self._slots, self._linking = volume, books, slots, linking

    def assert_here(self) -> None:
        """Raise UsageError in a store of links: what was saved lives in other folders, and is nothing to this store."""
        if self._linking:
            raise UsageError(
                f"{self._volume.path} is a store of links (keep=0): each of its checkpoints lives in the folder that "
                "it was linked into. Read it there, by pccheck.links.load or pccheck.open; delete it by its folder"
            )

    def pin(self, step: int) -> None:
        """Keep the newest checkpoint of a step until it is unpinned: a second name holds its bytes."""
        self.assert_here()
        with self._books.files_lock:
            record = next((r for r in self._books.durable() if r.step == step), None)
            if record is None:
                raise StepNotFoundError(step, [r.step for r in self._books.durable()], self._volume.path)
            if all(r.identity != record.identity for r in self._books.kept().values()):
                self._link_kept(record)

    def keep_record(self, record: Record) -> None:
        """Pin a sealed checkpoint."""
        with self._books.files_lock:
            self._link_kept(record)

    def _link_kept(self, record: Record) -> None:
        name = format.kept_name(record.step, record.counter)
        self._volume.link(format.slot_name(record.slot), name)
        if not self._is_kept(name, record):  # something else had that name: a damaged one, or another store's
            self._volume.remove(name)
            self._volume.link(format.slot_name(record.slot), name)
        self._volume.sync_names(format.KEPT_FOLDER)
        self._volume.sync_names()
        with self._books.lock:
            self._books.pins[name] = record

    def _is_kept(self, name: str, record: Record) -> bool:
        medium = self._volume.open(name)
        try:
            found = read_record(medium)
        except ContentError:
            return False
        finally:
            medium.close()
        return found is not None and found.identity == record.identity

    def unpin(self, step: int) -> None:
        """Let go of the pinned checkpoints of a step: `keep` alone decides on what is still in a slot."""
        self.assert_here()
        with self._books.files_lock:
            kept = self._books.kept()
            if not self._remove_kept([n for n, r in kept.items() if r.step == step]):
                raise StepNotFoundError(
                    step, [r.step for r in kept.values()], f"{self._volume.path}/{format.KEPT_FOLDER}"
                )

    def _remove_kept(self, names: list[str]) -> bool:
        for name in names:
            self._volume.remove(name)
            with self._books.lock:
                self._books.pins.pop(name, None)
        if names:
            self._volume.sync_names(format.KEPT_FOLDER)
        return bool(names)

    def delete(self, step: int) -> None:
        """Remove every checkpoint of a step, pinned ones included, durably; the word moves off it first."""
        self.assert_here()
        with self._books.files_lock:
            durable = self._books.durable_entries()
            doomed = {e.slot: e.record for e in durable if e.record and e.record.step == step}
            names = [n for n, r in self._books.kept().items() if r.step == step]
            if not names and not doomed:
                raise StepNotFoundError(step, [r.step for r in self._books.durable()], self._volume.path)
            self._take_away(doomed, names)

    def withdraw(self, counter: int) -> None:
        """Take a sealed checkpoint back, durably: some rank does not hold it, so it must never be restored."""
        with self._books.files_lock:
            entries = [e for e in self._books.entries() if e.state in (State.SEALED, State.PUBLISHED)]
            doomed = {e.slot: e.record for e in entries if e.record and e.counter == counter}
            self._take_away(doomed, [n for n, r in self._books.kept().items() if r.counter == counter])

    def _take_away(self, doomed: dict[int, Record], names: list[str]) -> None:
        with self._books.lock:  # whoever took the store may hold newer checkpoints in the very files of these slots
            self._books.check.assert_mine()
        self._move_off(doomed)
        self._remove_kept(names)
        for slot, record in doomed.items():
            self._slots.write_record(replace(record, state=SlotState.WITHDRAWN))
            self._slots[slot].sync()
            with self._books.lock:
                self._books.ledger.release(slot)

    def _move_off(self, doomed: dict[int, Record]) -> None:
        """Move the words off checkpoints that are to go, to the newest durable one that stays."""
        books = self._books
        with books.lock:
            published = books.ledger.published
            if not (published and published.slot in doomed) and books.agreed not in {
                r.counter for r in doomed.values()
            }:
                return
            left = next((e for e in books.ledger.durable(books.agreed) if e.slot not in doomed), None)
            word = left.record.word if left and left.record else format.NO_WORD
            if published and published.slot in doomed:
                books.check.point_at(word)
                if left is None:
                    books.ledger.demote()
                else:
                    books.ledger.publish(left.slot)
            books.agreed = format.word_counter(word)
            books.check.point_peer_at(word)
        books.check.sync()

    def restored(
        self, record: Record, *, in_slot: bool, damaged: frozenset[int], branch: bool, whole: bool = True,
        newer_elsewhere: bool = False,
    ) -> None:  # fmt: skip
        """Note what a restore found: go on from `record`, do not count what it passed over, free what it left behind.

        Args:
            record: the checkpoint whose digests were all checked.
            in_slot: it was read from its slot (which may have been free, but not yet overwritten), not from kept/.
            damaged: counters that were passed over.
            branch: newer checkpoints are abandoned, durably and before anything is freed.
            whole: every byte of that slot was verified.
            newer_elsewhere: newer checkpoints are there, perhaps not in this store.
        """
        books = self._books
        with books.files_lock:
            with books.lock:
                books.check.assert_mine()
                for entry in books.ledger.whole():
                    if entry.counter in damaged:
                        books.ledger.mark(entry.slot, damaged=True)
                if in_slot and books.ledger[record.slot].state is State.FREE:
                    books.ledger.adopt(record.slot, record, abandoned=False)
                if in_slot and books.ledger[record.slot].state in (State.SEALED, State.PUBLISHED):
                    books.ledger.mark(record.slot, verified=books.ledger[record.slot].verified or whole)
            newer = newer_elsewhere or any(r.counter > record.counter for r in books.durable())
            if branch and (record.counter in books.check.abandoned or newer):
                self._branch_from(record.counter)
            if branch or damaged:
                self._point_at(next(iter(books.whole()), None))
            books.base = record.counter

    def _branch_from(self, counter: int) -> None:
        """Abandon what is newer than a checkpoint, and that one no longer, should an earlier roll-back have done so."""
        check, newest = self._books.check, self._books.next_counter - 1
        newer = check.abandoned.adding(counter + 1, newest) if newest > counter else check.abandoned
        check.abandon(newer.without(counter))
        with self._books.lock:
            for entry in self._books.ledger.in_state(State.SEALED, State.PUBLISHED):
                self._books.ledger.mark(entry.slot, abandoned=entry.counter in check.abandoned)

    def _point_at(self, entry: Entry | None) -> None:
        """Set the word to a sealed checkpoint, or to none; durable before anything else happens."""
        word = entry.record.word if entry and entry.record else format.NO_WORD
        with self._books.lock:
            if word == self._books.check.word:
                return
            self._books.check.point_at(word)
            self._books.check.point_peer_at(word)
            self._books.agreed = format.word_counter(word)
            if entry is None:
                self._books.ledger.demote()
            else:
                self._books.ledger.publish(entry.slot)
        self._books.check.sync()
