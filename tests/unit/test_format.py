"""The bytes on disk: round trips, refusals, and the field tables of docs/format.md held against the code."""

from __future__ import annotations

import re
import struct
from dataclasses import replace
from pathlib import Path

import pytest
import xxhash
from hypothesis import example, given
from hypothesis import strategies as st

from pccheck import format
from pccheck.errors import FormatError
from pccheck.format import Abandoned, Record, SlotState

U32, U64, I64 = st.integers(0, 2**32 - 1), st.integers(0, 2**64 - 1), st.integers(-(2**63), 2**63 - 1)
BYTES16 = st.binary(min_size=16, max_size=16)
RECORDS = st.builds(
    Record,
    store_id=BYTES16,
    slot=st.integers(0, format.MAX_SLOTS - 1),
    state=st.sampled_from(SlotState),
    incarnation=U64,
    counter=st.integers(1, format.MAX_COUNTER),
    step=I64,
    base=U64,
    rank=st.just(0),
    world=st.integers(1, 2**32 - 1),
    payload_bytes=U64,
    manifest_offset=U64,
    manifest_bytes=U64,
    manifest_digest=BYTES16,
    link_digest=BYTES16,
    time_ns=I64,
)
RECORD = Record(store_id=b"S" * 16, slot=3, state=SlotState.SEALED, incarnation=2, counter=7, step=70)


def resum(sector: bytearray) -> bytes:
    """Give the sector with a checksum that is right again."""
    sector[504:512] = struct.pack("<Q", xxhash.xxh3_64_intdigest(bytes(sector[:504])))
    return bytes(sector)


# -- words and names -----------------------------------------------------------------------------------------------


@given(st.integers(1, format.MAX_COUNTER), st.integers(0, format.MAX_SLOTS - 1))
def test_word_round_trip(counter: int, slot: int) -> None:
    word = format.pack_word(counter, slot)
    assert 0 < word < 2**64
    assert (format.word_counter(word), format.word_slot(word)) == (counter, slot)


@pytest.mark.parametrize(("counter", "slot"), [(0, 0), (-1, 0), (1 << 48, 0), (1, -1), (1, 1 << 16)])
def test_word_out_of_range_is_refused(counter: int, slot: int) -> None:
    with pytest.raises(ValueError, match="no word"):
        format.pack_word(counter, slot)


def test_words_order_as_counters_do() -> None:
    assert format.pack_word(8, 0) > format.pack_word(7, format.MAX_SLOTS - 1)


@given(st.integers(0, format.MAX_SLOTS - 1))
def test_slot_name_round_trip(slot: int) -> None:
    assert format.parse_slot_name(format.slot_name(slot)) == slot


@pytest.mark.parametrize(
    "name",
    ["slot-1.pcc", "slot-0001.pcc", "slot-065536.pcc", "slot-65536.pcc", "slot-\u0661\u0661\u0661.pcc", "slot--01.pcc",
     "slot-000.pcc.tmp", "Slot-000.pcc", "slot-.pcc", "slot-²²².pcc", "CHECK", "", "slot-000"],
)  # fmt: skip
def test_other_names_are_no_slots(name: str) -> None:
    assert format.parse_slot_name(name) is None


@given(st.text(max_size=20))
def test_any_name_is_judged_without_a_crash(name: str) -> None:
    slot = format.parse_slot_name(name)
    assert slot is None or format.slot_name(slot) == name


def test_kept_name_lies_in_its_folder() -> None:
    assert format.kept_name(-5, 7) == "kept/-5-c7.pcc"


@given(st.integers(0, 1 << 60), st.sampled_from([64, 4096, 65536]))
def test_padded_is_the_least_multiple(length: int, align: int) -> None:
    total = format.padded(length, align)
    assert total % align == 0
    assert length <= total < length + align


# -- CHECK ---------------------------------------------------------------------------------------------------------


@given(BYTES16)
def test_superblock_round_trip(store_id: bytes) -> None:
    sector = format.pack_superblock(store_id)
    assert len(sector) == format.SECTOR
    assert format.unpack_superblock(sector) == store_id


@given(st.integers(0, 39), st.integers(1, 255))
def test_superblock_with_any_byte_changed_is_refused(place: int, flip: int) -> None:
    sector = bytearray(format.pack_superblock(b"x" * 16))
    sector[place] ^= flip
    with pytest.raises(FormatError):
        format.unpack_superblock(bytes(sector))


@pytest.mark.parametrize(("version", "endian"), [(2, format.ENDIAN_TAG), (1, 0x04030201)])
def test_superblock_of_another_version_or_byte_order_is_refused(version: int, endian: int) -> None:
    body = struct.pack("<8sII16s", format.CHECK_MAGIC, version, endian, b"x" * 16)
    body += struct.pack("<Q", xxhash.xxh3_64_intdigest(body))
    with pytest.raises(FormatError, match="version"):
        format.unpack_superblock(body.ljust(512, b"\0"))


@given(st.binary(max_size=600))
@example(b"")
@example(format.CHECK_MAGIC)
def test_superblock_fuzz(data: bytes) -> None:
    with pytest.raises(FormatError):
        format.unpack_superblock(data)


RANGES = st.lists(st.tuples(st.integers(1, 500), st.integers(0, 20)).map(lambda t: (t[0], t[0] + t[1])), max_size=12)


@given(RANGES)
def test_abandoned_ranges_are_a_sorted_disjoint_union(ranges: list[tuple[int, int]]) -> None:
    abandoned = Abandoned()
    for low, high in ranges:
        abandoned = abandoned.adding(low, high)
    members = {c for low, high in ranges for c in range(low, high + 1)}
    assert {c for c in range(600) if c in abandoned} == members
    assert abandoned.sequence == len(ranges)
    assert all(a[1] + 1 < b[0] for a, b in zip(abandoned.ranges, abandoned.ranges[1:], strict=False))
    assert format.unpack_abandoned(format.pack_abandoned(abandoned)) == abandoned


@given(RANGES, st.frozensets(st.integers(1, 520), max_size=5))
def test_pruning_forgets_only_ranges_without_checkpoints(
    ranges: list[tuple[int, int]], counters: frozenset[int]
) -> None:
    abandoned = Abandoned()
    for low, high in ranges:
        abandoned = abandoned.adding(low, high)
    pruned = abandoned.pruned(counters)
    assert {c for c in counters if c in abandoned} == {c for c in counters if c in pruned}
    assert all(any(low <= c <= high for c in counters) for low, high in pruned.ranges)


def test_too_many_ranges_are_refused() -> None:
    ranges = tuple((3 * i + 1, 3 * i + 1) for i in range(format.MAX_ABANDONED_RANGES))
    page = format.pack_abandoned(Abandoned(sequence=1, ranges=ranges))
    assert len(page) == format.PAGE
    assert format.unpack_abandoned(page) == Abandoned(sequence=1, ranges=ranges)
    with pytest.raises(FormatError, match="unpin"):
        format.pack_abandoned(Abandoned(sequence=1, ranges=(*ranges, (10_000, 10_000))))


@given(st.binary(max_size=200), st.integers(0, 2**32 - 1))
def test_abandoned_fuzz(tail: bytes, count: int) -> None:
    page = struct.pack("<8sQII", b"PCCABAND", 1, count, 0) + tail
    assert format.unpack_abandoned(page) is None  # shorter than a page
    assert format.unpack_abandoned(page.ljust(format.PAGE, b"\xff")) is None


def test_the_newer_copy_that_validates_counts() -> None:
    old, new = Abandoned().adding(5, 6), Abandoned().adding(5, 6).adding(9, 9)
    pages = (format.pack_abandoned(old), format.pack_abandoned(new))
    assert format.newest_abandoned(pages) == format.newest_abandoned(pages[::-1]) == new
    torn = pages[1][:30] + b"\xff" * (format.PAGE - 30)
    assert format.newest_abandoned((pages[0], torn)) == old
    assert format.newest_abandoned((torn, bytes(format.PAGE))) == Abandoned()


@given(st.text(max_size=700))
def test_holder_round_trip(text: str) -> None:
    sector = format.pack_holder(text)
    found = format.unpack_holder(sector)
    assert len(sector) == format.SECTOR
    assert found is not None
    whole = text.encode("utf-8", "replace").decode()
    assert whole.startswith(found.rstrip("\ufffd"))
    if len(text.encode()) <= 490:
        assert found == text


@given(st.binary(max_size=600))
def test_holder_fuzz(data: bytes) -> None:
    assert format.unpack_holder(data) is None
    assert format.unpack_holder(b"PCCHOLDR" + data.ljust(512, b"\xff")) is None


# -- records -------------------------------------------------------------------------------------------------------


@given(RECORDS, st.integers(0, 2**32 - 2))
def test_record_round_trip(record: Record, rank: int) -> None:
    record = replace(record, rank=min(rank, record.world - 1))
    sector = format.pack_record(record)
    assert len(sector) == format.RECORD_BYTES
    assert format.unpack_record(sector) == record
    assert format.unpack_record(sector + b"what follows the sector") == record


def test_record_knows_its_word_and_identity() -> None:
    assert RECORD.word == 7 << 16 | 3
    assert RECORD.identity == (2, 7, 70)


@given(st.integers(0, 511), st.integers(1, 255))
def test_record_with_any_byte_changed_is_refused(place: int, flip: int) -> None:
    sector = bytearray(format.pack_record(RECORD))
    sector[place] ^= flip
    with pytest.raises(FormatError):
        format.unpack_record(bytes(sector))


@given(st.binary(min_size=0, max_size=600))
@example(b"")
@example(format.RECORD_MAGIC)
@example(b"\x80\x04\x95" + b"." * 600)
def test_record_fuzz_raises_format_error_only(data: bytes) -> None:
    if len(data) >= 512 and not data[:512].strip(b"\0"):
        assert format.unpack_record(data) is None
    else:
        with pytest.raises(FormatError):
            format.unpack_record(data)


@given(st.integers(8, 503), st.binary(min_size=1, max_size=32))
def test_record_fuzz_behind_a_right_checksum(place: int, junk: bytes) -> None:
    sector = bytearray(format.pack_record(RECORD))
    junk = junk[: 504 - place]
    sector[place : place + len(junk)] = junk
    try:
        record = format.unpack_record(resum(sector))
    except FormatError:
        return
    assert record is not None
    assert record.rank < record.world
    assert 0 < record.counter <= format.MAX_COUNTER


def test_a_slot_of_zeros_was_never_used() -> None:
    assert format.unpack_record(bytes(512)) is None


@pytest.mark.parametrize(
    ("place", "value"),
    [(8, 2), (12, 0), (12, 4), (32, 1 << 16), (36, 1), (44, 2), (56, 0), (60, 1 << 16)],
    ids=["version", "state 0", "state 4", "slot", "rank", "digest", "counter 0", "counter 2**48"],
)
def test_impossible_fields_are_refused(place: int, value: int) -> None:
    sector = bytearray(format.pack_record(RECORD))
    struct.pack_into("<I", sector, place, value)
    with pytest.raises(FormatError):
        format.unpack_record(resum(sector))


def test_geometry() -> None:
    good = replace(RECORD, payload_bytes=8192, manifest_offset=65536 + 8192, manifest_bytes=100)
    format.check_geometry(good, 65536 + 8192 + 100)
    with pytest.raises(FormatError, match="the file has"):
        format.check_geometry(good, 65536 + 8192 + 99)
    for wrong in (
        replace(good, payload_bytes=8191, manifest_offset=65536 + 8191),
        replace(good, manifest_offset=65536),
        replace(good, manifest_bytes=2**64 - 1),
        replace(good, payload_bytes=2**64 - 4096, manifest_offset=61440),
    ):
        with pytest.raises(FormatError):
            format.check_geometry(wrong, 1 << 30)


# -- docs/format.md ------------------------------------------------------------------------------------------------

DOCUMENT = Path(__file__).parents[2] / "docs" / "format.md"
ROW = re.compile(r"^\| *(\d+) *\| *(\d+) *\| *(\w+) *\| *([^|]*?) *\|", re.MULTILINE)


def table(heading: str) -> list[tuple[int, int, str, str]]:
    """Give (offset, size, type, field) of each row under a heading."""
    section = DOCUMENT.read_text().split(f"\n## {heading}\n")[1].split("\n## ")[0]
    return [(int(o), int(s), kind, name.strip("`")) for o, s, kind, name in ROW.findall(section)]


def number(data: bytes, offset: int, size: int, kind: str) -> object:
    raw = data[offset : offset + size]
    return raw if kind == "bytes" else int.from_bytes(raw, "little", signed=kind.startswith("i"))


def test_the_document_tells_the_record_as_it_is() -> None:
    record = Record(
        store_id=b"0123456789abcdef", slot=11, state=SlotState.WITHDRAWN, incarnation=2**60 + 1, counter=2**47 + 2,
        step=-(2**50) - 3, base=2**46 + 4, rank=12, world=13, payload_bytes=2**55 + 5, manifest_offset=2**56 + 6,
        manifest_bytes=2**57 + 7, manifest_digest=b"MANIFESTMANIFEST", link_digest=b"LINKLINKLINKLINK",
        time_ns=2**61 + 8,
    )  # fmt: skip
    told = {
        "magic": format.RECORD_MAGIC, "version": 1,
        "checksum": xxhash.xxh3_64_intdigest(format.pack_record(record)[:504])
    }  # fmt: skip
    sector, end = format.pack_record(record), 0
    rows = table("The record")
    for offset, size, kind, name in rows:
        assert offset == end, f"{name} leaves a gap"
        end = offset + size
        if name == "zeros":
            assert not any(sector[offset:end])
        else:
            assert number(sector, offset, size, kind) == told.get(name, getattr(record, name, None)), name
    assert end == format.RECORD_BYTES
    assert {name for *_, name in rows} == {*told, "zeros", *record.__dataclass_fields__}


def test_the_document_tells_check_as_it_is() -> None:
    places = {name: (offset, size) for offset, size, _, name in table("CHECK")}
    assert places == {
        "superblock": (format.SUPERBLOCK_OFFSET, 40),
        "CHECK_ADDR": (format.CHECK_ADDR_OFFSET, 8),
        "links": (format.LINKS_OFFSET, 8),
        "PEER_ADDR": (format.PEER_ADDR_OFFSET, 8),
        "incarnation": (format.INCARNATION_OFFSET, 8),
        "last counter": (format.LAST_COUNTER_OFFSET, 8),
        "abandoned, first copy": (format.ABANDONED_OFFSETS[0], format.PAGE),
        "abandoned, second copy": (format.ABANDONED_OFFSETS[1], format.PAGE),
        "holder": (format.HOLDER_OFFSET, format.SECTOR),
    }
    text = DOCUMENT.read_text()
    for constant in (format.CHECK_MAGIC, b"PCCABAND", b"PCCHOLDR", b"PCCSLOT"):
        assert constant.decode() in text
    assert str(format.MAX_ABANDONED_RANGES) in text
