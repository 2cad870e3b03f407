"""How slots become free again: let go, failed, or not needed any more (floor 2: imports floors 0 and 1, store).

What may be let go is decided by retention; what each verb decides is decided under `books.lock`, what it does to files
is done outside of it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import final

from pccheck.errors import CapacityError, MediumError
from pccheck.events import Event, Released
from pccheck.format import Record, SlotState
from pccheck.store import retention
from pccheck.store.books import Books
from pccheck.store.ledger import State
from pccheck.store.slots import Slots


@final
class Releasing:
    """Frees the slots of one open store. `fail` and `recycle` are thread-safe; the others need `books.files_lock`.

    Args:
        books: shared with the store.
        slots: shared with the store.
        keep: verified checkpoints to hold.
        wanted: slots to hold.
        store_id: of this store.
        world: number of ranks.
        notify: hears of `Released`.
    """

    def __init__(
        self, books: Books, slots: Slots, *, keep: int, wanted: int, store_id: bytes, world: int,
        notify: Callable[[Event], None],
    ) -> None:  # fmt: skip
        self._books, self._slots, self._notify = books, slots, notify
        self._keep, self._wanted, self._store_id, self._world = keep, wanted, store_id, world
        # Quarantined slots whose file is to be removed once its writers have ended; guarded by `files_lock`.
        self._dead: dict[int, Callable[[], bool]] = {}

    def free(self) -> bool:
        """Free what retention says, and tell whether that was anything; under `files_lock`."""
        with self._books.lock:
            slots = retention.releasable(
                self._books.ledger.entries(), keep=self._keep, agreed=self._books.agreed, world=self._world
            )
            freed = {slot: self._books.ledger[slot].record for slot in slots}
        for slot, record in freed.items():
            here = not self._slots.is_shared(slot) or self._renewed(slot)
            with self._books.lock:
                self._books.ledger.release(slot)
                if not here:
                    self._books.ledger.retire(slot)
            if record is not None:
                self._notify(Released(step=record.step, counter=record.counter, slot=slot))
        return bool(freed)

    def _renewed(self, slot: int) -> bool:
        """Put a new file in the place of one that others have, and tell whether there is one.

        A store of links makes none before a save needs it: until then somebody may have deleted an older step.
        """
        if self._keep:
            return self._slots.replace(slot)
        self._slots.remove(slot)
        return False

    def recycle(self, path: str) -> bool:
        """Make a free slot of a file that was linked out of this store; False = not, or no slot is wanted."""
        with self._books.lock:
            self._books.check.assert_mine()
            usable = sum(e.state is not State.QUARANTINED for e in self._books.ledger.entries())
        slot = self._slots.take_in(path, self._store_id) if usable < self._wanted else None
        if slot is not None:
            with self._books.lock:
                self._books.ledger.add(slot)
        return slot is not None

    def trim(self, wanted: int | None = None) -> None:
        """Remove free slots beyond `wanted` (None = as many as are to be held).

        They were added for readers, pins, quarantine or agreement, and are not needed any more.
        """
        wanted = self._wanted if wanted is None else wanted
        with self._books.lock:
            usable = [e for e in self._books.ledger.entries() if e.state is not State.QUARANTINED]
            spare = [e.slot for e in usable if e.state is State.FREE][::-1][: max(0, len(usable) - wanted)]
            for slot in spare:
                self._books.ledger.retire(slot)
        while spare:
            try:
                self._slots.remove(spare[-1])
            except BaseException:
                with self._books.lock:
                    for slot in spare:
                        self._books.ledger.add(slot)
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
        entry = next((e for e in self._books.entries() if e.counter == record.counter), None)
        if entry is None or entry.state is not State.FILLING:
            return  # sealed: it is durable by its record, and the word may name it; retention frees it in its time
        if reachable:
            try:
                self._slots.write_record(replace(record, state=SlotState.WITHDRAWN))
            except (MediumError, CapacityError):
                quarantine = True
        with self._books.lock:
            if quarantine:
                self._books.ledger.quarantine(record.slot)
            else:
                self._books.ledger.fail(record.slot)
        self._slots[record.slot].unlock()
        if quarantine:
            with self._books.files_lock:
                self._dead[record.slot] = ended
                try:
                    self.bury()
                except MediumError:
                    pass  # the next save, which needs a slot in its place, tries again and meets the cause

    def bury(self) -> None:
        """Remove the files of quarantined slots that nobody writes to any more.

        Else a disk whose syncs go on failing would lose the space of one slot more with every save.
        """
        for slot in [slot for slot, ended in self._dead.items() if ended()]:
            self._slots.remove(slot)
            with self._books.lock:
                self._books.ledger.retire(slot)
            del self._dead[slot]
