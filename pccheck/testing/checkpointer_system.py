"""pccheck itself as a System for the crash explorer (beside the floors: imports checkpointer, listing, reader)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, final

from pccheck import format
from pccheck.checkpointer import Checkpointer
from pccheck.errors import ContentError, MediumError
from pccheck.format import SlotState
from pccheck.reading import reader
from pccheck.reading.listing import SlotFile, list_store
from pccheck.testing.disk import SyncInfo
from pccheck.testing.simulated import SimulatedVolume
from pccheck.testing.system import System


@final
class CheckpointerSystem(System):
    """pccheck's Checkpointer, its reader and its audit.

    Args:
        options: keyword arguments of Checkpointer; chunks of 4 KiB and the portable pipeline are the defaults here.
    """

    def __init__(self, **options: Any) -> None:
        self.options = {"chunk_bytes": format.PAGE, "pipeline": "portable", "exit_timeout_s": 10.0, **options}
        self.at: Callable[[str], None] | None = None  # called at each named point too: where scenarios hold saves back

    def open(self, volume: SimulatedVolume) -> AbstractContextManager[Any]:
        """Open a Checkpointer on the simulated volume."""

        def at(point: str) -> None:
            volume.point(point)
            if self.at is not None:
                self.at(point)

        return Checkpointer(volume, _at=at, **self.options)

    def audit(self, volume: SimulatedVolume) -> list[str]:
        """Hold records against digests (I2) and the word against both (I3)."""
        listing = list_store(volume)
        assert listing.check is not None
        faults = [f"I2: CHECK is damaged: {listing.check.problem}"] if listing.check.damaged else []
        whole = set()
        for file in listing.files:
            if file.problem is not None:
                faults.append(f"I2: {file.name}: {file.problem}")
            elif file.sealed and (reason := damage_in(volume, file)):
                faults.append(
                    f"I2: {file.name} is sealed (counter {file.record and file.record.counter}), but {reason}"
                )
            elif file.sealed and not file.kept and file.record is not None:
                whole.add(file.record.word)
        for word_name, word in (("CHECK_ADDR", listing.check.word), ("PEER_ADDR", listing.check.peer_word)):
            if word != format.NO_WORD and word not in whole:
                place = f"counter {format.word_counter(word)} in slot {format.word_slot(word)}"
                faults.append(f"I3: {word_name} names {place}, which is no whole checkpoint")
        return faults

    def extents(self, name: str, head: bytes, size: int) -> Sequence[tuple[int, int]]:
        """All of CHECK; of a slot everything that a sealed record speaks for, else nothing."""
        if name == format.CHECK_NAME:
            return ((0, size),)
        try:
            record = format.unpack_record(head)
            if record is None or record.state is not SlotState.SEALED:
                return ()
            format.check_geometry(record, size)
        except ContentError:
            return ()
        return ((format.PAYLOAD_OFFSET, record.manifest_offset + record.manifest_bytes),)

    def identity(self, name: str, head: bytes) -> bytes:
        """Leave the time and the checksum over it out of a record."""
        if name == format.CHECK_NAME or head[:8] != format.RECORD_MAGIC:
            return head
        try:
            record = format.unpack_record(head)
        except ContentError:
            return head
        return repr((record, "time")).replace(f"time_ns={record.time_ns}", "").encode() if record else head

    def classify(self, info: SyncInfo) -> str:
        """Name a sync by what it makes durable.

        In the commit: "filling", "data", "record", "word"; of new or removed names: "names", "names of kept". At
        opening: "adopted" (what another process wrote and may not have synced), "names adopted", "names of kept
        adopted", "superblock", "opening" (the words). Else: "abandoned" (a roll-back), "pointed" (the word set back),
        "withdrawn".
        """
        if info.kind == "names":
            return f"names{' of ' + info.name if info.name else ''}" + ("" if info.wrote else " adopted")
        if info.kind == "check":
            return "word" if info.point == "published" else _part_of_check(info.wrote)
        if not info.wrote:
            return "adopted"
        record = format.unpack_record(info.head) if 0 in info.wrote else None
        if record is None:
            return "data"
        return {SlotState.FILLING: "filling", SlotState.SEALED: "record"}.get(record.state, "withdrawn")


def _part_of_check(wrote: frozenset[int]) -> str:
    if any(offset // format.SECTOR in wrote for offset in format.ABANDONED_OFFSETS):
        return "abandoned"
    if format.HOLDER_OFFSET // format.SECTOR in wrote:
        return "opening"
    return "pointed" if format.CHECK_ADDR_OFFSET // format.SECTOR in wrote else "superblock"


def damage_in(volume: SimulatedVolume, file: SlotFile) -> str:
    """Say what is damaged in a file that calls itself sealed; nothing where it is whole."""
    assert file.record is not None
    medium = volume.open(file.name)
    try:
        damages = reader.verify(medium, file.record, reader.read_manifest(medium, file.record), threads=1)
        return "; ".join(map(str, damages))
    except (ContentError, MediumError) as error:
        return str(error)
    finally:
        medium.close()
