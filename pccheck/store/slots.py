"""The slot files of one store (floor 2: imports floors 0 and 1)."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice

from pccheck import format
from pccheck.errors import CapacityError, ContentError, MediumError, UsageError
from pccheck.format import Record
from pccheck.storage import outside
from pccheck.storage.media import pages
from pccheck.storage.medium import Medium
from pccheck.storage.volume import TakesIn, Volume


def record_page(record: Record) -> bytes:
    """Give the first page of a slot."""
    return format.pack_record(record).ljust(format.PAGE, b"\0")


class Slots:
    """Open slot files by number. Reads are thread-safe; the store serialises what makes, replaces or removes files.

    Args:
        volume: where they are.
        media: those that are open.
        durable_names: whether their names are made durable when they are made, or, in a store of links, where that
            would hold up a save, before the first link.
    """

    def __init__(self, volume: Volume, media: dict[int, Medium], *, durable_names: bool) -> None:
        self._volume, self._media, self._durable_names = volume, media, durable_names
        self._lock = threading.Lock()
        self._left: dict[int, Medium] = {}  # made by a `create` that failed, and could not be removed: used next time
        self._coming: set[int] = set()  # slots whose files are being made or taken in: nobody else's meanwhile
        self._out: set[int] = set()  # slots whose file was given a name outside of the store, be it gone by now
        self._rooms: list[memoryview] = []  # page-aligned memory that nobody writes from now
        self.slot_bytes = 0  # what `allocate` and `create` reached for every slot

    def __getitem__(self, slot: int) -> Medium:
        with self._lock:
            return self._media[slot]

    def _own(self) -> list[Medium]:
        """Give the files that are the store's alone: others are not made larger, but replaced by larger ones."""
        with self._lock:
            return [medium for slot, medium in self._media.items() if slot not in self._out]

    def allocate(self, slot_bytes: int) -> None:
        """Make every slot at least this large; raises CapacityError."""
        for medium in self._own():
            medium.allocate(slot_bytes)
        self.slot_bytes = max(self.slot_bytes, slot_bytes)

    def missing_bytes(self, slot_bytes: int, count: int) -> int:
        """Give the space that `allocate(slot_bytes)` and then `create(count)` take."""
        size = max(slot_bytes, self.slot_bytes)
        return sum(max(0, slot_bytes - medium.size()) for medium in self._own()) + count * size

    def create(self, count: int) -> list[int]:
        """Make new slots, and their names durable where that matters; after an error none of them is left."""
        if not count:
            return []
        with self._numbers(count) as slots:
            return self._make(slots, self.slot_bytes or format.PAYLOAD_OFFSET)

    @contextmanager
    def _numbers(self, count: int) -> Iterator[list[int]]:
        """Give numbers for new slots, which nobody else is given meanwhile."""
        with self._lock:
            slots = self._unused(count)
            self._coming.update(slots)
        try:
            yield slots
        finally:
            with self._lock:
                self._coming.difference_update(slots)

    def _unused(self, count: int) -> list[int]:
        # A name that is there and not ours: a Ctrl-C came between making that file and noting it. It is left alone
        # here; the next opening takes it for the free slot that it is.
        there = {format.parse_slot_name(name) for name in self._volume.names()} - set(self._left)
        taken = there | self._coming | self._media.keys()
        return list(islice((slot for slot in range(format.MAX_SLOTS) if slot not in taken), count))

    def take_in(self, path: str, store_id: bytes) -> int | None:
        """Make a slot of a file that was linked out of this store, and has its slots' size; None = it was not taken.

        Thread-safe; syncs, and so takes a while. The slot is then one that was never used.
        """

        def wanted(head: bytes, size: int) -> bool:
            try:
                record = format.unpack_record(head)
            except ContentError:
                return False
            mine = record is not None and record.store_id == store_id and record.is_linked
            return mine and 0 < self.slot_bytes <= size < self.slot_bytes + format.PAGE

        if not isinstance(self._volume, TakesIn):
            return None
        with self._numbers(1) as [slot]:
            medium = self._volume.take_in(path, format.slot_name(slot), wanted)
            if medium is not None:
                with self._lock:
                    self._media[slot] = medium
        return None if medium is None else slot

    def _make(self, slots: list[int], size: int) -> list[int]:
        made: dict[int, Medium] = {}
        try:
            for slot in slots:
                if slot in self._left:
                    made[slot] = self._left.pop(slot)
                    made[slot].allocate(size)
                else:
                    made[slot] = self._volume.create(format.slot_name(slot), size)
            if made and self._durable_names:
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

    def link(self, record: Record, path: str) -> None:
        """Give a sealed slot's file a name outside of the store, or put a synced copy there where it can have none.

        Not durable before `sync_link`. Raises UsageError for a path in the store, MediumError where it is taken.
        """
        name, medium = format.slot_name(record.slot), self[record.slot]
        if os.path.dirname(path) == self._volume.path:
            raise UsageError(f"link={path!r} is not allowed: a checkpoint is linked into a folder of its own")
        if not self._durable_names:
            self._volume.sync_names()  # else a crash could leave the link, and nothing that knows its counter
        with self._lock:
            self._out.add(record.slot)  # first: a link may be made by a call that fails
        try:
            self._volume.link_out(name, medium, path)
        except MediumError as error:
            if error.errno not in outside.NO_LINK:
                raise
            with self._lock:
                self._out.discard(record.slot)
            self._volume.copy_out(name, medium, path)

    def sync_link(self, path: str) -> None:
        """Make the name that `link` made durable."""
        self._volume.sync_out(path)

    def is_shared(self, slot: int) -> bool:
        """Tell whether others may have a slot's file: it has another name, or had one outside of the store."""
        return slot in self._out or self[slot].links() > 1

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
            self._out.discard(slot)
        medium.close()

    def forget(self, slot: int) -> None:
        """Close a slot whose file has lost its name; whatever has that name by now is not touched."""
        with self._lock:
            self._out.discard(slot)
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
        self._write(record.slot, manifest, record.manifest_offset)

    def write_record(self, record: Record) -> None:
        """Write a slot's record."""
        self._write(record.slot, format.pack_record(record), 0)

    def _write(self, slot: int, data: bytes, offset: int) -> None:
        """Write whole pages, with zeros behind the data.

        From memory that is kept: a direct medium takes no other than aligned memory, and new memory costs a fault per
        page, which for the manifest of 3,000 leaves was a sixth of what the committer does (measured).
        """
        size = format.padded(len(data))
        with self._lock:
            room = self._rooms.pop() if self._rooms else pages(size)
        if len(room) < size:
            room = pages(size)
        room[: len(data)] = data
        room[len(data) : size] = bytes(size - len(data))
        self[slot].write_from(room[:size], offset)
        with self._lock:
            self._rooms.append(room)

    def close(self) -> None:
        """Close all files."""
        for medium in (*self._media.values(), *self._left.values()):
            medium.close()
