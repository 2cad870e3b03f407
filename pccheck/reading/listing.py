"""What a store's folder holds as it stands, without a lock and without writing (floor 2: imports floor 1 and below)."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from pccheck import format
from pccheck.errors import ContentError, FormatError, MediumError
from pccheck.format import Abandoned, Record, SlotState
from pccheck.reading.reader import read_record
from pccheck.storage.medium import Medium
from pccheck.storage.volume import Volume

_LOOKS = 100  # on a busy machine ten in a row were seen to come too late


@dataclass(frozen=True, kw_only=True)
class CheckFacts:
    """What CHECK says.

    Args:
        problem: None, or why CHECK cannot be believed.
        damaged: whether the problem is damage; a CHECK that is missing or was never written is none.
        store_id: 16 bytes, None where CHECK cannot be believed.
        word: CHECK_ADDR.
        peer_word: PEER_ADDR.
        incarnation: of the last writer.
        last_counter: last counter given out, as far as the last writer noted it.
        abandoned: counters that roll-backs left behind.
        holder: text about the last writer, None where none is noted.
        links: it is a store of links: no slot of it is a checkpoint, but what was linked elsewhere.
    """

    problem: str | None = None
    damaged: bool = False
    store_id: bytes | None = None
    word: int = format.NO_WORD
    peer_word: int = format.NO_WORD
    incarnation: int = 0
    last_counter: int = 0
    abandoned: Abandoned = field(default_factory=Abandoned)
    holder: str | None = None
    links: bool = False


@dataclass(frozen=True, kw_only=True)
class SlotFile:
    """One slot file, or one kept checkpoint.

    Args:
        name: relative to the store.
        file_bytes: size of the file.
        links: names that the file has.
        record: None where the slot was never used or the record cannot be believed.
        problem: why it cannot be believed.
        abandoned: left behind by a roll-back.
        linked: it was made to be linked elsewhere; here it is no checkpoint.
    """

    name: str
    file_bytes: int = 0
    links: int = 1
    record: Record | None = None
    problem: str | None = None
    abandoned: bool = False
    linked: bool = False

    @property
    def sealed(self) -> bool:
        """Whether the record says that a whole checkpoint is here."""
        return self.whole and not self.linked

    @property
    def whole(self) -> bool:
        """Whether the record says that the file is whole, be it linked elsewhere or a checkpoint here."""
        return self.record is not None and self.record.state == SlotState.SEALED and self.problem is None

    @property
    def kept(self) -> bool:
        """Whether this is a kept checkpoint's own name."""
        return self.name.startswith(f"{format.KEPT_FOLDER}/")


@dataclass(frozen=True, kw_only=True)
class Listing:
    """One look at a store.

    Args:
        check: what CHECK says; None for a single slot file.
        files: every slot and kept checkpoint.
        moving: a writer was faster at every look, so that a checkpoint may be there that was not seen.
    """

    check: CheckFacts | None
    files: tuple[SlotFile, ...]
    moving: bool = False


def list_store(volume: Volume) -> Listing:
    """Look at every slot and kept checkpoint of a store.

    A writer may be at work: while no record is sealed but one is being filled, or the word has moved, it looks again
    (at most 100 times), since a checkpoint may have moved behind the reader's back from a slot not yet read to one
    already read.
    """
    previous: tuple[SlotFile, ...] | None = None
    for _ in range(_LOOKS):
        check = read_check(volume)
        files = tuple(_files(volume, check))
        lost = _lost(check, files)
        if lost is not None and read_check(volume).word != check.word:
            continue
        filling = any(f.record is not None and f.record.state == SlotState.FILLING for f in files)
        if not filling or files == previous or any(f.sealed for f in files):
            if lost is not None:
                files = tuple(
                    sorted((*(f for f in files if f.name != lost.name), lost), key=lambda f: (f.kept, f.name))
                )
            return Listing(check=check, files=files)
        previous = files
    return Listing(check=check, files=files, moving=not any(f.sealed for f in files))


def _lost(check: CheckFacts, files: tuple[SlotFile, ...]) -> SlotFile | None:
    """Give the slot that CHECK_ADDR names and that does not hold what it names: no crash leaves a store like that."""
    if check.problem is not None or check.word == format.NO_WORD:
        return None
    counter, name = format.word_counter(check.word), format.slot_name(format.word_slot(check.word))
    file = next((f for f in files if f.name == name), None)
    if file is None:
        return SlotFile(
            name=name, links=0, problem=f"CHECK_ADDR names counter {counter} in it, but the file is missing"
        )
    if file.problem is not None or (file.sealed and file.record is not None and file.record.counter == counter):
        return None
    return replace(file, record=None, problem=f"CHECK_ADDR names counter {counter} in it, but its record is gone")


def list_file(volume: Volume, name: str) -> Listing:
    """Look at a single slot file, wherever it was copied; raises MediumError where it cannot be read."""
    with_problem = _look(volume, name, None)
    if with_problem is None:
        volume.open(name).close()  # raises what hindered the look
        with_problem = SlotFile(name=name)
    return Listing(check=None, files=(with_problem,))


def read_check(volume: Volume) -> CheckFacts:
    """Give what CHECK says, by plain reads: nothing is mapped, nothing is repaired."""
    if format.CHECK_NAME not in volume.names():
        return CheckFacts(problem="CHECK is missing; the next writer makes it anew from the records")
    try:
        medium = volume.open(format.CHECK_NAME)
        try:
            data = _whole(medium)
        finally:
            medium.close()
    except (ContentError, MediumError) as error:
        return CheckFacts(problem=str(error), damaged=True)
    if not data.strip(b"\0"):
        return CheckFacts(problem="CHECK was never written")
    data = data.ljust(format.CHECK_BYTES, b"\0")
    pages = [data[o : o + format.PAGE] for o in format.ABANDONED_OFFSETS]
    try:
        store_id = format.unpack_superblock(data[: format.SECTOR])
        if all(page.strip(b"\0") and format.unpack_abandoned(page) is None for page in pages):
            raise FormatError("both copies of the abandoned ranges in CHECK fail their checksum")
    except FormatError as error:
        return CheckFacts(problem=str(error), damaged=True)
    word, peer, incarnation, last, links = struct.unpack_from("<5Q", data, format.CHECK_ADDR_OFFSET)
    return CheckFacts(
        store_id=store_id,
        word=word,
        peer_word=peer,
        incarnation=incarnation,
        last_counter=last,
        abandoned=format.newest_abandoned((pages[0], pages[1])),
        holder=format.unpack_holder(data[format.HOLDER_OFFSET : format.HOLDER_OFFSET + format.SECTOR]),
        links=links == 1,
    )


def _whole(medium: Medium) -> bytes:
    length = min(medium.size(), format.CHECK_BYTES)
    data = bytearray(length)
    if length:
        medium.read_into(memoryview(data), 0)
    return bytes(data)


def _files(volume: Volume, check: CheckFacts) -> Iterator[SlotFile]:
    names = [name for name in volume.names() if format.parse_slot_name(name) is not None]
    problem = None
    try:
        names += [f"{format.KEPT_FOLDER}/{n}" for n in volume.names(format.KEPT_FOLDER) if n.endswith(".pcc")]
    except (ContentError, MediumError) as error:  # the slots are readable all the same
        problem = str(error)
    for name in names:
        file = _look(volume, name, check)
        if file is not None:
            yield file
    if problem is not None:
        yield SlotFile(name=format.KEPT_FOLDER, problem=problem)


def _look(volume: Volume, name: str, check: CheckFacts | None) -> SlotFile | None:
    """Give what is under a name; None if the name went away meanwhile."""
    try:
        medium = volume.open(name)
    except (ContentError, MediumError) as error:  # ContentError: a symbolic link, a folder, a FIFO
        gone = isinstance(error, MediumError) and isinstance(error.cause, FileNotFoundError)
        return None if gone else SlotFile(name=name, problem=str(error))
    size = links = 0
    try:
        size, links = medium.size(), medium.links()
        record = read_record(medium)
    except (ContentError, MediumError) as error:
        return SlotFile(name=name, file_bytes=size, links=links, problem=str(error).removeprefix(f"{medium.path}: "))
    finally:
        medium.close()
    abandoned = record is not None and check is not None and record.counter in check.abandoned
    problem = _misplaced(name, record, check) if record is not None and check is not None else None
    return SlotFile(
        name=name, file_bytes=size, links=links, record=record, problem=problem, abandoned=abandoned,
        linked=check is not None and record is not None and record.is_linked,
    )  # fmt: skip


def _misplaced(name: str, record: Record, check: CheckFacts) -> str | None:
    """Tell why a record cannot have been written under this name: a writer does not adopt it either."""
    if check.store_id not in (None, record.store_id):
        return f"{name} is of another store ({record.store_id.hex()})"
    if format.parse_slot_name(name) not in (None, record.slot):
        return f"{name} holds the record of slot {record.slot}"
    return None
