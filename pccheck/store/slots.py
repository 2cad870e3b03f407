"""The slot files of one store (floor 2: imports floors 0 and 1)."""

from __future__ import annotations

import threading
from itertools import islice

from pccheck import format
from pccheck.errors import CapacityError, MediumError
from pccheck.format import Record
from pccheck.storage.medium import Medium
from pccheck.storage.volume import Volume


def record_page(record: Record) -> bytes:
    """Give the first page of a slot."""
    return format.pack_record(record).ljust(format.PAGE, b"\0")


class Slots:
    """Open slot files by number. Reads are thread-safe; the store serialises what makes, replaces or removes files."""

    def __init__(self, volume: Volume, media: dict[int, Medium]) -> None:
        self._volume, self._media = volume, media
        self._lock = threading.Lock()
        self._left: dict[int, Medium] = {}  # made by a `create` that failed, and could not be removed: used next time
        self.slot_bytes = 0  # what `allocate` and `create` reached for every slot

    def __getitem__(self, slot: int) -> Medium:
        with self._lock:
            return self._media[slot]

    def allocate(self, slot_bytes: int) -> None:
        """Make every slot at least this large; raises CapacityError."""
        with self._lock:
            media = list(self._media.values())
        for medium in media:
            medium.allocate(slot_bytes)
        self.slot_bytes = max(self.slot_bytes, slot_bytes)

    def missing_bytes(self, slot_bytes: int, count: int) -> int:
        """Give the space that `allocate(slot_bytes)` and then `create(count)` take."""
        with self._lock:
            media = list(self._media.values())
        size = max(slot_bytes, self.slot_bytes)
        return sum(max(0, slot_bytes - medium.size()) for medium in media) + count * size

    def create(self, count: int) -> list[int]:
        """Make new slots and make their names durable; after an error none of them is left."""
        if not count:
            return []
        # A name that is there and not ours: a Ctrl-C came between making that file and noting it. It is left alone
        # here; the next opening takes it for the free slot that it is.
        there = {format.parse_slot_name(name) for name in self._volume.names()} - set(self._left)
        free = (slot for slot in range(format.MAX_SLOTS) if slot not in self._media and slot not in there)
        return self._make(list(islice(free, count)), self.slot_bytes or format.PAYLOAD_OFFSET)

    def _make(self, slots: list[int], size: int) -> list[int]:
        made: dict[int, Medium] = {}
        try:
            for slot in slots:
                if slot in self._left:
                    made[slot] = self._left.pop(slot)
                    made[slot].allocate(size)
                else:
                    made[slot] = self._volume.create(format.slot_name(slot), size)
            if made:
                self._volume.sync_names()
        except BaseException:
            for slot, medium in made.items():
                try:
                    self._remove_name(slot, medium)
                    medium.close()
                except MediumError:
                    self._left[slot] = medium  # the error under way is the one to see
            raise
        with self._lock:
            self._media.update(made)
        return slots

    def replace(self, slot: int) -> bool:
        """Give a slot a new file: the old one has another name, whose owner keeps whole bytes for ever.

        Tells whether there is room; without it the slot is gone, and whoever needs it next meets the cause.
        """
        size = max(self.slot_bytes, self[slot].size())
        self.remove(slot)
        try:
            self._make([slot], size)
        except (CapacityError, MediumError):
            return False
        return True

    def remove(self, slot: int) -> None:
        """Remove a slot file; that is not durable, and need not be: a free slot that comes back is a free slot.

        Raises MediumError; the slot is then as it was.
        """
        medium = self[slot]
        self._remove_name(slot, medium)
        with self._lock:
            del self._media[slot]
        medium.close()

    def forget(self, slot: int) -> None:
        """Close a slot whose file has lost its name; whatever has that name by now is not touched."""
        with self._lock:
            self._media.pop(slot).close()

    def _remove_name(self, slot: int, medium: Medium) -> None:
        links = medium.links()
        try:
            self._volume.remove(format.slot_name(slot))
        except MediumError:
            if medium.links() >= links:  # over a network a removal may be done, and fail all the same
                raise

    def write_manifest(self, record: Record, manifest: bytes) -> None:
        """Write the manifest behind the payload."""
        padded = manifest.ljust(format.padded(len(manifest)), b"\0")
        self[record.slot].write_from(memoryview(padded), record.manifest_offset)

    def write_record(self, record: Record) -> None:
        """Write a slot's record."""
        self[record.slot].write_from(memoryview(record_page(record)), 0)

    def close(self) -> None:
        """Close all files."""
        for medium in (*self._media.values(), *self._left.values()):
            medium.close()
