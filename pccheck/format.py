"""The bytes on disk: the only teller of every offset and field (floor 0: imports errors).

docs/format.md tells the same for people; tests/unit/test_format.py holds the two against each other.
All numbers are little-endian; nothing on disk is an address, a path to follow or code.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, replace
from enum import IntEnum

import xxhash

from pccheck.errors import FormatError

VERSION = 1
PAGE = 4096
SECTOR = 512
CHECK_NAME = "CHECK"
KEPT_FOLDER = "kept"

# -- the word: CHECK_ADDR and PEER_ADDR ------------------------------------------------------------------------------

SLOT_BITS = 16
COUNTER_BITS = 48
MAX_SLOTS = 1 << SLOT_BITS
MAX_COUNTER = (1 << COUNTER_BITS) - 1
NO_WORD = 0  # counters begin at 1, so no checkpoint has this word


def pack_word(counter: int, slot: int) -> int:
    """Give the 64-bit word that names a checkpoint: `counter << 16 | slot`."""
    if not (0 < counter <= MAX_COUNTER and 0 <= slot < MAX_SLOTS):
        raise ValueError(f"no word for counter {counter}, slot {slot}")
    return counter << SLOT_BITS | slot


def word_counter(word: int) -> int:
    """Give the counter that a word names; 0 for no checkpoint."""
    return word >> SLOT_BITS


def word_slot(word: int) -> int:
    """Give the slot that a word names."""
    return word & (MAX_SLOTS - 1)


# -- names ----------------------------------------------------------------------------------------------------------


def slot_name(slot: int) -> str:
    """Give the file name of a slot."""
    return f"slot-{slot:03d}.pcc"


def parse_slot_name(name: str) -> int | None:
    """Give the slot that a file name stands for, None if it is not one."""
    digits = name[5:-4]
    if not (name.startswith("slot-") and name.endswith(".pcc") and digits.isdecimal() and digits.isascii()):
        return None
    slot = int(digits)
    return slot if slot < MAX_SLOTS and slot_name(slot) == name else None


def kept_name(step: int, counter: int) -> str:
    """Give the name of a pinned checkpoint, relative to the store."""
    return f"{KEPT_FOLDER}/{step}-c{counter}.pcc"


# -- CHECK ----------------------------------------------------------------------------------------------------------
# Every part of CHECK lies in a sector (or page) of its own, so that a torn write of one cannot hurt another.

CHECK_BYTES = 64 * 1024
CHECK_MAGIC = b"PCCCHECK"
ENDIAN_TAG = 0x01020304
SUPERBLOCK_OFFSET = 0
CHECK_ADDR_OFFSET = 4096  # these five 64-bit numbers are mapped and changed in place
PEER_ADDR_OFFSET = 4104
INCARNATION_OFFSET = 4112
LAST_COUNTER_OFFSET = 4120
LINKS_OFFSET = 4128  # 1 = a store of links: what its slots hold is a checkpoint only where it was linked to
ABANDONED_OFFSETS = (8192, 12288)  # two copies, written one after the other: the newer one that validates counts
HOLDER_OFFSET = 16384

_SUPERBLOCK = struct.Struct("<8sII16s")  # magic, version, endianness, store id; then XXH3-64 of these
_ABANDONED_HEAD = struct.Struct("<8sQII")  # magic, sequence, ranges, zero
_RANGE = struct.Struct("<QQ")
_ABANDONED_MAGIC = b"PCCABAND"
_HOLDER_HEAD = struct.Struct("<8sI")
_HOLDER_MAGIC = b"PCCHOLDR"
_SUM = struct.Struct("<Q")
MAX_ABANDONED_RANGES = 200


def _sum(data: bytes) -> bytes:
    return _SUM.pack(xxhash.xxh3_64_intdigest(data))


def pack_superblock(store_id: bytes) -> bytes:
    """Give the first sector of CHECK."""
    body = _SUPERBLOCK.pack(CHECK_MAGIC, VERSION, ENDIAN_TAG, store_id)
    return (body + _sum(body)).ljust(SECTOR, b"\0")


def unpack_superblock(data: bytes) -> bytes:
    """Give the store id out of CHECK's first sector; raises FormatError if it does not validate."""
    body, tail = data[: _SUPERBLOCK.size], data[_SUPERBLOCK.size : _SUPERBLOCK.size + _SUM.size]
    if len(tail) < _SUM.size or body[:8] != CHECK_MAGIC:
        raise FormatError("CHECK does not begin with the magic of a pccheck store")
    if _sum(body) != tail:
        raise FormatError("the superblock of CHECK fails its checksum")
    _, version, endian, store_id = _SUPERBLOCK.unpack(body)
    if version != VERSION or endian != ENDIAN_TAG:
        raise FormatError(f"CHECK is of format version {version}; this release reads version {VERSION}")
    return bytes(store_id)


@dataclass(frozen=True, kw_only=True)
class Abandoned:
    """The counters that roll-backs left behind, as `(low, high)` ranges, both ends included, sorted, disjoint."""

    sequence: int = 0
    ranges: tuple[tuple[int, int], ...] = ()

    def __contains__(self, counter: int) -> bool:
        return any(low <= counter <= high for low, high in self.ranges)

    def adding(self, low: int, high: int) -> Abandoned:
        """Give the set with `low..high` added: ranges that touch are joined."""
        joined: list[tuple[int, int]] = []
        for a, b in sorted((*self.ranges, (low, high))):
            if joined and a <= joined[-1][1] + 1:
                joined[-1] = (joined[-1][0], max(b, joined[-1][1]))
            else:
                joined.append((a, b))
        return replace(self, sequence=self.sequence + 1, ranges=tuple(joined))

    def without(self, counter: int) -> Abandoned:
        """Give the set without one counter: a run went on from that checkpoint after all."""
        ranges: list[tuple[int, int]] = []
        for low, high in self.ranges:
            if low <= counter <= high:
                ranges += [(a, b) for a, b in ((low, counter - 1), (counter + 1, high)) if a <= b]
            else:
                ranges.append((low, high))
        return replace(self, sequence=self.sequence + 1, ranges=tuple(ranges))

    def pruned(self, counters: frozenset[int]) -> Abandoned:
        """Give the set without the ranges that hold none of `counters`: nothing is left there to be left out."""
        kept = tuple(r for r in self.ranges if any(r[0] <= c <= r[1] for c in counters))
        return replace(self, ranges=kept)


def pack_abandoned(abandoned: Abandoned) -> bytes:
    """Give one page that holds the abandoned ranges."""
    if len(abandoned.ranges) > MAX_ABANDONED_RANGES:
        raise FormatError(
            f"{len(abandoned.ranges)} abandoned branches are pinned, at most {MAX_ABANDONED_RANGES} can be; unpin some"
        )
    body = _ABANDONED_HEAD.pack(_ABANDONED_MAGIC, abandoned.sequence, len(abandoned.ranges), 0)
    body += b"".join(_RANGE.pack(*r) for r in abandoned.ranges)
    return (body + _sum(body)).ljust(PAGE, b"\0")


def unpack_abandoned(page: bytes) -> Abandoned | None:
    """Give the abandoned ranges of one page, None if it does not validate."""
    if len(page) < PAGE or page[:8] != _ABANDONED_MAGIC:
        return None
    _, sequence, count, _ = _ABANDONED_HEAD.unpack_from(page)
    end = _ABANDONED_HEAD.size + count * _RANGE.size
    if count > MAX_ABANDONED_RANGES or _sum(page[:end]) != page[end : end + _SUM.size]:
        return None
    ranges = tuple(_RANGE.iter_unpack(page[_ABANDONED_HEAD.size : end]))
    return Abandoned(sequence=sequence, ranges=tuple((a, b) for a, b in ranges))


def newest_abandoned(pages: tuple[bytes, bytes]) -> Abandoned:
    """Give the newer of the two copies that validates; the empty set if neither does."""
    found = [a for a in map(unpack_abandoned, pages) if a is not None]
    return max(found, key=lambda a: a.sequence, default=Abandoned())


def pack_holder(text: str) -> bytes:
    """Give the sector that tells people who holds the lock."""
    raw = text.encode()[: SECTOR - _HOLDER_HEAD.size - _SUM.size]
    body = _HOLDER_HEAD.pack(_HOLDER_MAGIC, len(raw)) + raw
    return (body + _sum(body)).ljust(SECTOR, b"\0")


def unpack_holder(data: bytes) -> str | None:
    """Give the text of the holder sector, None if it does not validate."""
    if len(data) < SECTOR or data[:8] != _HOLDER_MAGIC:
        return None
    _, length = _HOLDER_HEAD.unpack_from(data)
    end = _HOLDER_HEAD.size + length
    if end + _SUM.size > SECTOR or _sum(data[:end]) != data[end : end + _SUM.size]:
        return None
    return data[_HOLDER_HEAD.size : end].decode("utf-8", "replace")


# -- the record of a slot --------------------------------------------------------------------------------------------

RECORD_MAGIC = b"PCCSLOT\0"
RECORD_BYTES = SECTOR  # one sector, so that no crash leaves it torn
PAYLOAD_OFFSET = 64 * 1024
CHUNK_ALIGN = 64 * 1024  # chunks begin at multiples of this
LEAF_ALIGN = 64
DIGEST_XXH3_128 = 1
DIGEST_BYTES = 16


class SlotState(IntEnum):
    """What a slot's record says of the slot."""

    FILLING = 1
    SEALED = 2
    WITHDRAWN = 3


@dataclass(frozen=True, kw_only=True)
class Record:
    """The first sector of a slot file. (incarnation, counter, step) is the identity of the checkpoint."""

    store_id: bytes
    slot: int
    state: SlotState
    incarnation: int
    counter: int
    step: int
    base: int = 0  # the counter that this run had restored; 0 = none
    rank: int = 0
    world: int = 1
    payload_bytes: int = 0  # from PAYLOAD_OFFSET to the manifest, a multiple of PAGE
    manifest_offset: int = 0  # in the file
    manifest_bytes: int = 0
    manifest_digest: bytes = bytes(DIGEST_BYTES)
    digest_algorithm: int = DIGEST_XXH3_128
    link_digest: bytes = bytes(DIGEST_BYTES)  # XXH3-128 of the path it was linked to; zeros = not linked
    time_ns: int = 0  # Unix time of the record

    @property
    def word(self) -> int:
        """The word that names this checkpoint."""
        return pack_word(self.counter, self.slot)

    @property
    def identity(self) -> tuple[int, int, int]:
        """(incarnation, counter, step)."""
        return (self.incarnation, self.counter, self.step)

    @property
    def is_linked(self) -> bool:
        """Whether it is a checkpoint where it was linked to only, and not as a slot of its store."""
        return self.link_digest != bytes(DIGEST_BYTES)


# magic, version, state, store id, slot, rank, world, digest algorithm, incarnation, counter, step, base,
# payload bytes, manifest offset, manifest bytes, manifest digest, link digest, time; XXH3-64 in the last 8 bytes
_RECORD = struct.Struct("<8sII16sIIIIQQqQQQQ16s16sq")
_RECORD_SUM_OFFSET = RECORD_BYTES - _SUM.size
assert _RECORD.size <= _RECORD_SUM_OFFSET
assert PAYLOAD_OFFSET % CHUNK_ALIGN == 0


def pack_record(record: Record) -> bytes:
    """Give the sector of a record, checksum included."""
    body = _RECORD.pack(
        RECORD_MAGIC, VERSION, record.state, record.store_id, record.slot, record.rank, record.world,
        record.digest_algorithm, record.incarnation, record.counter, record.step, record.base, record.payload_bytes,
        record.manifest_offset, record.manifest_bytes, record.manifest_digest, record.link_digest, record.time_ns,
    ).ljust(_RECORD_SUM_OFFSET, b"\0")  # fmt: skip
    return body + _sum(body)


def unpack_record(data: bytes) -> Record | None:
    """Give the record of a slot's first sector; None for a slot never used; FormatError for anything else.

    What the numbers claim is checked against each other here and against the file in `check_geometry`.
    """
    data = bytes(data[:RECORD_BYTES])
    if len(data) < RECORD_BYTES:
        raise FormatError(f"the file ends after {len(data)} bytes, inside its record")
    if not data.strip(b"\0"):
        return None
    if data[:8] != RECORD_MAGIC:
        raise FormatError("the file does not begin with the magic of a pccheck slot")
    if _sum(data[:_RECORD_SUM_OFFSET]) != data[_RECORD_SUM_OFFSET:]:
        raise FormatError("the record fails its checksum")
    (_, version, state, store_id, slot, rank, world, algorithm, incarnation, counter, step, base, payload_bytes,
     manifest_offset, manifest_bytes, manifest_digest, link_digest, time_ns) = _RECORD.unpack_from(data)  # fmt: skip
    if version != VERSION or algorithm != DIGEST_XXH3_128:
        raise FormatError(f"the record is of format version {version}, digest {algorithm}, not of {VERSION}, 1")
    if state not in tuple(SlotState) or not 0 < counter <= MAX_COUNTER or slot >= MAX_SLOTS or rank >= world:
        raise FormatError("the record names an impossible state, counter, slot or rank")
    return Record(
        store_id=store_id, slot=slot, state=SlotState(state), incarnation=incarnation, counter=counter, step=step,
        base=base, rank=rank, world=world, payload_bytes=payload_bytes, manifest_offset=manifest_offset,
        manifest_bytes=manifest_bytes, manifest_digest=manifest_digest, digest_algorithm=algorithm,
        link_digest=link_digest, time_ns=time_ns,
    )  # fmt: skip


def check_geometry(record: Record, file_bytes: int) -> None:
    """Raise FormatError unless payload and manifest of a sealed record lie in a file of this size."""
    if (
        record.payload_bytes % PAGE
        or record.manifest_offset != PAYLOAD_OFFSET + record.payload_bytes
        or record.manifest_offset + record.manifest_bytes > file_bytes
    ):
        raise FormatError(
            f"the record claims a manifest at bytes {record.manifest_offset}.."
            f"{record.manifest_offset + record.manifest_bytes}, the file has {file_bytes}"
        )


def padded(length: int, align: int = PAGE) -> int:
    """Give the least multiple of `align` that is at least `length`."""
    return -(-length // align) * align
