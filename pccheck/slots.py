"""The slot files of one store (floor 2: imports floors 0 and 1)."""

from __future__ import annotations

import threading
from collections.abc import Iterable

from pccheck import format
from pccheck.errors import CapacityError, MediumError
from pccheck.format import Record
from pccheck.medium import Medium
from pccheck.volume import Volume


class Slots:
    """Open slot files by number. Reads are thread-safe; the store serialises what makes, replaces or removes files."""

    def __init__(self, volume: Volume, media: dict[int, Medium]) -> None:
        self._volume, self._media = volume, media
        self._lock = threading.Lock()
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

    def create(self, count: int) -> list[int]:
        """Make new slots and make their names durable; after an error none of them is left."""
        made: dict[int, Medium] = {}
        try:
            for slot in range(format.MAX_SLOTS):
                if len(made) == count:
                    break
                if slot not in self._media:
                    made[slot] = self._volume.create(format.slot_name(slot), self.slot_bytes or format.PAYLOAD_OFFSET)
            if made:
                self._volume.sync_names()
        except BaseException:
            for slot, medium in made.items():
                medium.close()
                self._volume.remove(format.slot_name(slot))
            raise
        with self._lock:
            self._media.update(made)
        return list(made)

    def replace(self, slot: int) -> bool:
        """Give a slot a new file: the old one has another name, whose owner keeps whole bytes for ever.

        Tells whether there is room; without it the slot is gone, and whoever needs it next meets the cause.
        """
        size = max(self.slot_bytes, self[slot].size())
        self.remove([slot])
        try:
            medium = self._volume.create(format.slot_name(slot), size)
            self._volume.sync_names()
        except (CapacityError, MediumError):
            return False
        with self._lock:
            self._media[slot] = medium
        return True

    def remove(self, slots: Iterable[int]) -> None:
        """Remove slot files; that is not durable, and need not be: a free slot that comes back is a free slot."""
        for slot in slots:
            with self._lock:
                medium = self._media.pop(slot)
            self._volume.remove(format.slot_name(slot))
            medium.close()

    def write_manifest(self, record: Record, manifest: bytes) -> None:
        """Write the manifest behind the payload."""
        padded = manifest.ljust(format.padded(len(manifest)), b"\0")
        self[record.slot].write_from(memoryview(padded), record.manifest_offset)

    def write_record(self, record: Record) -> None:
        """Write a slot's record."""
        page = format.pack_record(record).ljust(format.PAGE, b"\0")
        self[record.slot].write_from(memoryview(page), 0)

    def close(self) -> None:
        """Close all files."""
        for medium in self._media.values():
            medium.close()
