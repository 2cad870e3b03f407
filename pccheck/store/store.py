"""One store opened for writing: reserve, seal, publish, release (floor 2: imports floors 0, 1, 2).

What each verb decides is decided under `books.lock`, what it does to files is done outside of it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

from pccheck import format
from pccheck.errors import CapacityError, ContentError, MediumError, StoreGoneError, StoreTaken, UsageError
from pccheck.events import Event, Grew, Released
from pccheck.format import MAX_COUNTER, Record, SlotState
from pccheck.storage.medium import Medium
from pccheck.storage.volume import Volume
from pccheck.store import retention
from pccheck.store.books import Books
from pccheck.store.check import Check
from pccheck.store.coordination import Coordinator
from pccheck.store.history import History
from pccheck.store.ledger import Entry, State
from pccheck.store.opening import open_for_writing
from pccheck.store.slots import Slots


class Store:
    """The checkpoints of one directory, for one writer. Thread-safe.

    Args:
        volume: where the files are; the store owns and closes it.
        in_flight: slots to fill at once.
        keep: verified checkpoints to hold.
        coordinator: how ranks agree.
        lock_timeout_s: how long to wait for the lock of a dead holder.
        verify: checks all digests of the checkpoint in a medium; raises ContentError or MediumError.
        notify: hears of `Released` and `Grew`.
    """

    def __init__(
        self,
        volume: Volume,
        *,
        in_flight: int,
        keep: int,
        coordinator: Coordinator,
        lock_timeout_s: float,
        verify: Callable[[Medium, Record], None],
        notify: Callable[[Event], None],
    ) -> None:
        opened = open_for_writing(volume, coordinator, lock_timeout_s=lock_timeout_s)
        self.path, self.damaged = volume.path, tuple(opened.damaged)
        check = Check(
            opened.check, volume.path, incarnation=opened.incarnation, word=opened.word, abandoned=opened.abandoned,
            mirrored=coordinator.world == 1,
        )  # fmt: skip
        self._volume, self._coordinator, self._verify, self._notify = volume, coordinator, verify, notify
        self._store_id, self._wanted, self._keep = opened.store_id, in_flight + keep, keep
        self.slots = Slots(volume, opened.media)
        self.books = Books(check, opened.ledger, opened.kept, opened.next_counter)
        # Quarantined slots whose file is to be removed once its writers have ended; guarded by `files_lock`.
        self._dead: dict[int, Callable[[], bool]] = {}
        self.history = History(volume, self.books, self.slots)

    # -- reserve --------------------------------------------------------------------------------------------------

    def next_counter(self) -> int:
        """Use up one counter."""
        with self.books.lock:
            counter = self.books.next_counter
            if counter > MAX_COUNTER:
                raise UsageError(f"{self.path} has used all of its {MAX_COUNTER:,} counters; use another directory")
            self.books.next_counter += 1
            self.books.check.use_counter(counter)
        return counter

    def ensure(self, slot_bytes: int) -> None:
        """Make all slots, of at least this size, so that a full disk is met here and not in a later save.

        Raises CapacityError; no checkpoint is harmed by that.
        """
        with self.books.lock:
            usable = len(self.books.ledger) - len(self.books.ledger.in_state(State.QUARANTINED))
            if slot_bytes <= self.slots.slot_bytes and usable >= self._wanted:
                return
        with self.books.files_lock:
            with self.books.lock:
                self.books.check.assert_mine()
            self._bury()
            missing = max(0, self._wanted - usable)
            needed, free = self.slots.missing_bytes(slot_bytes, missing), self._volume.free_bytes()
            if needed > free > 0:  # all or nothing: half of it would be taken from others and serve nobody; 0 = unknown
                raise CapacityError(self.path, needed, free)
            self.slots.allocate(slot_bytes)
            self._add(missing)

    def reserve(self, counter: int, step: int) -> Record:
        """Take a free slot for a checkpoint and give its "filling" record, to be made durable before any payload."""
        read: set[int] = set()  # slots that readers have locked
        while True:
            if not self.books.check.links():  # whoever opens the store now has another CHECK, and all of these slots
                raise self._gone("reserve")
            record = self._take(counter, step, read)
            if record is None:
                self._make_room()
            elif not self._is_here(record.slot):
                self._renew(record.slot, forget=True)  # a checkpoint in that file could not be found by its name
            elif self.slots[record.slot].links() > 1:
                self._renew(record.slot, forget=False)  # a pinned one whose record is damaged: its bytes stay
            elif self.slots[record.slot].lock_exclusive():
                return record
            else:
                read.add(record.slot)
                with self.books.lock:
                    self.books.ledger.fail(record.slot)

    def _is_here(self, slot: int) -> bool:
        return self._volume.is_named(format.slot_name(slot), self.slots[slot])

    def _gone(self, operation: str) -> StoreGoneError:
        text = "the files of the store were removed or moved away while it was open; open it anew"
        return StoreGoneError(operation, self.path, FileNotFoundError(2, text))

    def _renew(self, slot: int, *, forget: bool) -> None:
        """Use another file for a slot: the one that is open has lost its name, or has another one."""
        with self.books.files_lock:
            with self.books.lock:
                self.books.ledger.fail(slot)
            if forget:
                self.slots.forget(slot)
            if forget or not self.slots.replace(slot):
                with self.books.lock:
                    self.books.ledger.retire(slot)

    def _take(self, counter: int, step: int, read: set[int]) -> Record | None:
        with self.books.lock:
            self.books.check.assert_mine()
            slot = next((e.slot for e in self.books.ledger.in_state(State.FREE) if e.slot not in read), None)
            if slot is None:
                return None
            record = Record(
                store_id=self._store_id, slot=slot, state=SlotState.FILLING, incarnation=self.books.check.incarnation,
                counter=counter, step=step, base=self.books.base, rank=self._coordinator.rank,
                world=self._coordinator.world, time_ns=time.time_ns(),
            )  # fmt: skip
            self.books.ledger.reserve(slot, record)
            return record

    def _make_room(self) -> None:
        """Free a slot, or take one more: whatever is not known to be superseded by something verified is held."""
        with self.books.files_lock:
            if self._free_slots():
                return
            self._settle_word()
            if self._free_slots():
                return
            # What another process left is verified, the newest first, before any of it is overwritten.
            for entry in self.books.whole():
                if not entry.verified and self._verified(entry) and self._free_slots():
                    return
            self._add(1)
            self._notify(Grew(step=0, counter=0, slots=len(self.books.entries())))

    def _settle_word(self) -> None:
        """Make the word durable whose sync failed in an earlier save: until then all that is newer needs a slot.

        It is put there anew first, because after a failed sync the kernel calls the page clean.
        """
        check = self.books.check
        with self.books.lock:
            counter = format.word_counter(check.word)
            if self._coordinator.world > 1 or counter <= self.books.agreed:
                return
            check.point_at(check.word)
        check.sync()
        with self.books.lock:
            self.books.agreed = max(self.books.agreed, counter)

    def _add(self, count: int) -> None:
        made = self.slots.create(max(0, count))
        with self.books.lock:
            for slot in made:
                self.books.ledger.add(slot)

    def _whole(self) -> list[Entry]:
        with self.books.lock:
            return self.books.ledger.whole()

    def _verified(self, entry: Entry) -> bool:
        assert entry.record is not None
        try:
            self._verify(self.slots[entry.slot], entry.record)
        except (ContentError, MediumError):
            return False  # it does not count, and stays where it is
        with self.books.lock:
            self.books.ledger.mark(entry.slot, verified=True)
        return True

    # -- seal and publish: called by `commit`, in its order --------------------------------------------------------

    def seal(self, record: Record) -> None:
        """Note that data and record are durable."""
        with self.books.lock:
            self.books.ledger.seal(record.slot, record)
        self.slots[record.slot].unlock()

    def publish(self, record: Record) -> bool:
        """Move the word to a sealed checkpoint unless it names a newer one; tell whether it moved."""
        with self.books.lock:
            moved = self.books.check.move(record)
            if moved:
                self.books.ledger.publish(record.slot)
        return moved

    def sync_word(self, record: Record) -> None:
        """Make the word durable, and see that the files still have names."""
        self.books.check.sync()
        with self.books.files_lock:  # a newer checkpoint may have been published meanwhile, and this slot given away
            held = any(e.record and e.record.identity == record.identity for e in self.books.entries())
            here = self.books.check.links() and (not held or self._is_here(record.slot))
        if not here:
            raise self._gone("publish")

    # -- release ----------------------------------------------------------------------------------------------------

    def release(self, agreed: int = 0) -> None:
        """Free what retention says, now that every rank holds the checkpoint `agreed` (0 = no news)."""
        try:
            with self.books.lock:
                self.books.check.assert_mine()
                self.books.agreed = max(self.books.agreed, agreed)
        except StoreTaken:
            return  # whoever took the store may use any of these slots; what was committed before that is durable
        with self.books.files_lock:
            self._free_slots()
            self._bury()
            self._trim()

    def _free_slots(self) -> bool:
        with self.books.lock:
            slots = retention.releasable(self.books.ledger.entries(), keep=self._keep, agreed=self.books.agreed)
            freed = {slot: self.books.ledger[slot].record for slot in slots}
        for slot, record in freed.items():
            here = self.slots[slot].links() <= 1 or self.slots.replace(slot)
            with self.books.lock:
                self.books.ledger.release(slot)
                if not here:
                    self.books.ledger.retire(slot)
            if record is not None:
                self._notify(Released(step=record.step, counter=record.counter, slot=slot))
        return bool(freed)

    def _trim(self) -> None:
        """Remove free slots that were added for readers, pins or quarantine and are not needed any more."""
        with self.books.lock:
            usable = [e for e in self.books.ledger.entries() if e.state is not State.QUARANTINED]
            spare = [e.slot for e in usable if e.state is State.FREE][::-1][: max(0, len(usable) - self._wanted)]
            for slot in spare:
                self.books.ledger.retire(slot)
        while spare:
            try:
                self.slots.remove(spare[-1])
            except BaseException:
                with self.books.lock:
                    for slot in spare:
                        self.books.ledger.add(slot)
                raise
            spare.pop()

    def fail(
        self, record: Record, *, quarantine: bool, reachable: bool, ended: Callable[[], bool] = lambda: True
    ) -> None:
        """Take back a save that failed.

        Args:
            record: what it reserved.
            quarantine: what the file holds is unknown (a sync failed, a writer did not end): never use it again.
            reachable: whether it makes sense to write to the file; its record is then withdrawn at best effort.
            ended: tells whether nobody writes to the file any more; from then on a quarantined one is removed.
        """
        entry = next((e for e in self.books.entries() if e.counter == record.counter), None)
        if entry is None or entry.state is not State.FILLING:
            return  # sealed: it is durable by its record, and the word may name it; retention frees it in its time
        if reachable:
            try:
                self.slots.write_record(replace(record, state=SlotState.WITHDRAWN))
            except (MediumError, CapacityError):
                quarantine = True
        with self.books.lock:
            if quarantine:
                self.books.ledger.quarantine(record.slot)
            else:
                self.books.ledger.fail(record.slot)
        self.slots[record.slot].unlock()
        if quarantine:
            with self.books.files_lock:
                self._dead[record.slot] = ended
                try:
                    self._bury()
                except MediumError:
                    pass  # the next save, which needs a slot in its place, tries again and meets the cause

    def _bury(self) -> None:
        """Remove the files of quarantined slots that nobody writes to any more.

        Else a disk whose syncs go on failing would lose the space of one slot more with every save.
        """
        for slot in [slot for slot, ended in self._dead.items() if ended()]:
            self.slots.remove(slot)
            with self.books.lock:
                self.books.ledger.retire(slot)
            del self._dead[slot]

    def close(self) -> None:
        """Close every file and give the lock back."""
        self._coordinator.close()
        self.slots.close()
        self.books.check.close()
        self._volume.close()
