"""One store opened for writing: reserve, seal, publish, release (floor 2: imports floors 0, 1, 2).

What each verb decides is decided under `books.lock`, what it does to files is done outside of it.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from pccheck import format
from pccheck.errors import CapacityError, ContentError, MediumError, StoreGoneError, StoreTaken, UsageError
from pccheck.events import Event, Grew
from pccheck.format import MAX_COUNTER, Record, SlotState
from pccheck.ranks.agreement import Agreement
from pccheck.storage.medium import Medium
from pccheck.storage.volume import Placed, SideFiles, Volume
from pccheck.store.books import Books
from pccheck.store.check import Check
from pccheck.store.history import History
from pccheck.store.ledger import Entry, State
from pccheck.store.neighbours import Neighbours
from pccheck.store.opening import open_for_writing
from pccheck.store.releasing import Releasing
from pccheck.store.settling import Settling
from pccheck.store.slots import Slots


class Store:
    """The checkpoints of one directory, for one writer. Thread-safe.

    Args:
        volume: where the files are; the store owns and closes it.
        in_flight: slots to fill at once.
        keep: verified checkpoints to hold; 0 = a store of links, in which each lives by the link that it was given.
        agreement: with the other ranks; not joined yet; the owner closes it.
        neighbours: the stores beside this one; closed by the store.
        lock_timeout_s: how long to wait for the lock of a dead holder.
        agree_timeout_s: how long to wait for other ranks.
        verify: checks all digests of the checkpoint in a medium; raises ContentError or MediumError.
        notify: hears of `Released` and `Grew`.
    """

    def __init__(
        self,
        volume: Volume,
        *,
        in_flight: int,
        keep: int,
        agreement: Agreement,
        neighbours: Neighbours,
        lock_timeout_s: float,
        agree_timeout_s: float,
        verify: Callable[[Medium, Record], None],
        notify: Callable[[Event], None],
    ) -> None:
        opened = open_for_writing(
            volume, agreement, neighbours, lock_timeout_s=lock_timeout_s, agree_timeout_s=agree_timeout_s,
            linking=keep == 0,
        )  # fmt: skip
        self.opening = opened.opening
        self.path, self.damaged = volume.path, tuple(opened.damaged)
        check = Check(
            opened.check, volume.path, incarnation=opened.opening.incarnation, word=opened.word,
            abandoned=opened.abandoned, mirrored=agreement.world == 1,
        )  # fmt: skip
        self._volume, self._verify, self._notify = volume, verify, notify
        self.side_files = volume if isinstance(volume, SideFiles) else None
        self._placed = volume if isinstance(volume, Placed) else None
        self._agreement, self._neighbours = agreement, neighbours
        self._store_id, self._wanted, self._linking = opened.store_id, in_flight + keep, keep == 0
        self.slots = Slots(volume, opened.media, durable_names=keep > 0)
        self.books = Books(
            check, opened.ledger, opened.kept, next_counter=opened.opening.next_counter, agreed=opened.agreed
        )
        self._releasing = Releasing(
            self.books, self.slots, keep=keep, wanted=self._wanted, store_id=self._store_id, world=agreement.world,
            notify=notify,
        )  # fmt: skip
        self.fail, self.recycle = self._releasing.fail, self._releasing.recycle
        self.history = History(volume, self.books, self.slots, linking=self._linking)
        self.settling = Settling(self.books, self.history, agreement)

    def steps(self) -> list[int]:
        """Give the steps of all that is durable and restorable, newest first.

        What a job of another number of ranks left is there until this one has agreed on a checkpoint of its own.
        """
        self.history.assert_here()
        found = {r.counter: r.step for r in self.books.durable()}
        if self.books.agreed < self.opening.next_counter:
            others = [s for s in self.opening.complete if s.world != self._agreement.world]
            found |= {s.counter: s.step for s in others if s.counter not in self.books.check.abandoned}
        return [found[counter] for counter in sorted(found, reverse=True)]

    # -- reserve --------------------------------------------------------------------------------------------------

    def next_counter(self) -> int:
        """Use up one counter."""
        with self.books.lock:
            counter = self.books.next_counter
            if counter > MAX_COUNTER:
                raise UsageError(f"{self.path} has used all of its {MAX_COUNTER:,} counters; use another directory")
            self.books.next_counter += 1
            self.books.check.use_counter(counter)
        self._agreement.expect(counter)
        return counter

    def ensure(self, slot_bytes: int) -> None:
        """Make all slots, of at least this size, so that a full disk is met here and not in a later save.

        A store of links does so for its first save; later each save makes the slot that it needs, if none is free.
        Raises CapacityError; no checkpoint is harmed by that.
        """
        with self.books.lock:
            usable = len(self.books.ledger) - len(self.books.ledger.in_state(State.QUARANTINED))
            if self._linking and self.slots.slot_bytes:
                usable = self._wanted
            if slot_bytes <= self.slots.slot_bytes and usable >= self._wanted:
                return
        with self.books.files_lock:
            with self.books.lock:
                self.books.check.assert_mine()
            self._releasing.bury()
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
                self._make_room(read)
            elif not self._is_here(record.slot):
                self._renew(record.slot, forget=True)  # a checkpoint in that file could not be found by its name
            elif self.slots.is_shared(record.slot):
                self._renew(record.slot, forget=False)  # pinned but damaged, or linked in vain
            elif self.slots[record.slot].lock_exclusive():
                return record
            else:
                read.add(record.slot)
                with self.books.lock:
                    self.books.ledger.fail(record.slot)

    def _is_here(self, slot: int) -> bool:
        return self._volume.is_named(format.slot_name(slot), self.slots[slot])

    def _gone(self, operation: str) -> StoreGoneError:
        text = "the store or files of it were removed, renamed or moved away while it was open; open it anew"
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
                counter=counter, step=step, base=self.books.base, rank=self._agreement.rank,
                world=self._agreement.world, time_ns=time.time_ns(),
            )  # fmt: skip
            self.books.ledger.reserve(slot, record)
            return record

    def _make_room(self, read: set[int]) -> None:
        """Free a slot, or take one more: whatever is not known to be superseded by something verified is held."""
        with self.books.files_lock:
            with self.books.lock:
                if any(e.slot not in read for e in self.books.ledger.in_state(State.FREE)):
                    return  # somebody has freed one while this waited
            if self._releasing.free():
                return
            self._settle_word()
            if self._releasing.free():
                return
            # What another process left is verified, the newest first, before any of it is overwritten.
            for entry in self.books.whole():
                if not entry.verified and self._verified(entry) and self._releasing.free():
                    return
            self._add(1)
            if not self._linking:
                self._notify(Grew(step=0, counter=0, slots=len(self.books.entries())))

    def _settle_word(self) -> None:
        """Make the word durable whose sync failed in an earlier save: until then all that is newer needs a slot.

        It is put there anew first, because after a failed sync the kernel calls the page clean.
        """
        check = self.books.check
        with self.books.lock:
            counter = format.word_counter(check.word)
            if self._agreement.world > 1 or counter <= self.books.agreed:
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
            self.books.ledger.seal(record.slot, record, pending=self._agreement.world > 1)
        self.slots[record.slot].unlock()

    def publish(self, record: Record) -> bool:
        """Move the word to a sealed checkpoint unless it names a newer one; tell whether it moved.

        In a store of links the word names nothing: the link has published it, and no other one takes its place.
        """
        with self.books.lock:
            if self._linking:
                self.books.check.assert_mine()
                return True
            moved = self.books.check.move(record)
            if moved:
                self.books.ledger.publish(record.slot)
        return moved

    def sync_word(self, record: Record) -> None:
        """Make the word (and the counter) durable, and see that the files still have names, and the path leads there.

        A folder that was renamed under a running job takes on what that saves, and whoever starts again finds another.
        """
        self.books.check.sync()
        with self.books.files_lock:  # a newer checkpoint may have been published meanwhile, and this slot given away
            held = any(e.record and e.record.identity == record.identity for e in self.books.entries())
            here = self.books.check.links() and (not held or self._is_here(record.slot))
        if not here or (self._placed is not None and not self._placed.is_at_path()):
            raise self._gone("publish")

    # -- release ----------------------------------------------------------------------------------------------------

    def release(self, agreed: int = 0) -> None:
        """Free what retention says, now that every rank holds the checkpoint `agreed` (0 = no news).

        In a store of links that is left to `tidy`: nobody is to wait for it.
        """
        if self._linking:
            return
        try:
            with self.books.lock:
                self.books.check.assert_mine()
                self.books.agreed = max(self.books.agreed, agreed)
        except StoreTaken:
            return  # whoever took the store may use any of these slots; what was committed before that is durable
        with self.books.files_lock:
            self._releasing.free()
            self._releasing.bury()
            self._releasing.trim()
        if agreed:
            self._neighbours.clear()

    def tidy(self, wanted: int | None = None) -> None:
        """In a store of links, give up the files of durable checkpoints, and free slots beyond `wanted` (as `trim`).

        What fails is left: whoever needs a slot tries it again, and meets the cause.
        """
        if not self._linking:
            return
        try:
            with self.books.files_lock:
                with self.books.lock:
                    self.books.check.assert_mine()
                self._releasing.free()
                self._releasing.bury()
                self._releasing.trim(wanted)
        except (MediumError, CapacityError, ContentError, StoreTaken):
            pass

    def close(self) -> None:
        """Close every file and give the lock back; a store of links leaves no slots, which would only take space."""
        self.tidy(wanted=0)
        self._neighbours.close()
        self.slots.close()
        self.books.check.close()
        self._volume.close()
