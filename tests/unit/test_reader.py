"""Reading slots: what is whole comes back, what is not is named, and nothing hostile costs more than its size."""

from __future__ import annotations

import errno
import os
import resource
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from pccheck import format
from pccheck.errors import ContentError, DamagedError, FormatError, MediumError, ReusedError
from pccheck.format import Record, SlotState
from pccheck.reading import chunks, reader
from pccheck.reading.reads import read_wanted
from pccheck.state.fit import Want
from pccheck.state.manifest import Manifest
from pccheck.storage.directory import Directory
from pccheck.storage.medium import Medium
from pccheck.testing.slotfiles import slot_file

ARRAYS = {
    "model/w": np.arange(3000, dtype="<f4"),
    "model/b": np.arange(7, dtype="<i8"),
    "empty": np.zeros((0, 3), "<f8"),
    "optimizer/m": np.random.default_rng(1).standard_normal((50, 61)),
}
STATE = {
    "model": {"w": ARRAYS["model/w"], "b": ARRAYS["model/b"]},
    "empty": ARRAYS["empty"],
    "optimizer": {"m": ARRAYS["optimizer/m"], "lr": 0.1},
}


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Directory]:
    (tmp_path / "store").mkdir()
    volume = Directory(tmp_path / "store", create=False, write=True)
    yield volume
    volume.close()


def put(volume: Directory, data: bytes | bytearray, name: str = "slot-000.pcc") -> Medium:
    Path(volume.path, name).write_bytes(data)
    return volume.open(name)


def opened(volume: Directory, data: bytes | bytearray) -> tuple[Medium, Record, Manifest]:
    medium = put(volume, data)
    record = reader.read_record(medium)
    assert record is not None
    return medium, record, reader.read_manifest(medium, record)


def leaf(payload: memoryview, manifest: Manifest, index: int) -> np.ndarray[Any, Any]:
    entry = manifest.leaves[index]
    raw = payload[entry.offset : entry.offset + entry.nbytes]
    return np.frombuffer(raw, entry.dtype).reshape(entry.shape)


def leaves_of(medium: Medium, manifest: Manifest, *indices: int) -> list[memoryview]:
    wants = [Want(index, None, manifest.leaves[index].spec()) for index in indices]
    read, _ = read_wanted(medium, manifest, wants, threads=4)
    return [read(index) for index in indices]


def flip(data: bytearray, at: int) -> bytearray:
    changed = bytearray(data)
    changed[at] ^= 1
    return changed


# -- what is whole ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("chunk_bytes", [4096, 8192, 65536, 1 << 20])
@pytest.mark.parametrize("threads", [1, 4])
def test_payload_comes_back(folder: Directory, chunk_bytes: int, threads: int) -> None:
    medium, record, manifest = opened(folder, slot_file(STATE, chunk_bytes=chunk_bytes))
    assert record.identity == (1, 1, 10)
    payload = reader.read_payload(medium, manifest, threads=threads, fresh=True)
    assert len(payload) == manifest.data_bytes
    for index, array in enumerate(ARRAYS.values()):
        np.testing.assert_array_equal(leaf(payload, manifest, index), array)
    assert reader.verify(medium, record, manifest, threads=threads) == []


@pytest.mark.parametrize("native", [False, True])
def test_both_paths_find_the_same(folder: Directory, native: bool) -> None:
    data = slot_file(STATE)
    medium, _, manifest = opened(folder, data)
    room = chunks.allocate(9 * 4096, "test")
    assert chunks.read_chunks(medium, manifest.chunks, room, 0, 4, native=native) == []
    assert bytes(room[:12000]) == ARRAYS["model/w"].tobytes()
    broken = flip(flip(data, manifest.chunks[1].offset), manifest.chunks[7].offset + 4095)
    medium = put(folder, broken[: manifest.chunks[8].offset])
    bad = chunks.read_chunks(medium, manifest.chunks, room, 0, 4, native=native)
    assert [(index, error == 0) for index, error in bad] == [(1, True), (7, True), (8, False)]


def test_payload_is_writable_and_private(folder: Directory) -> None:
    medium, record, manifest = opened(folder, slot_file(STATE))
    payload = reader.read_payload(medium, manifest)
    payload[:] = bytes(len(payload))
    assert reader.verify(medium, record, manifest) == []


def test_large_payload_begins_on_a_huge_page(folder: Directory) -> None:
    array = np.arange(700_000, dtype="<u8")
    medium, _, manifest = opened(folder, slot_file({"x": array}, chunk_bytes=1 << 20))
    payload = reader.read_payload(medium, manifest)
    view = leaf(payload, manifest, 0)
    assert view.ctypes.data % (2 << 20) == 0
    np.testing.assert_array_equal(view, array)


def test_a_checkpoint_without_data(folder: Directory) -> None:
    medium, record, manifest = opened(folder, slot_file({"empty": np.zeros(0)}))
    assert manifest.chunks == []
    assert bytes(reader.read_payload(medium, manifest)) == b""
    assert bytes(leaves_of(medium, manifest, 0)[0]) == b""
    assert reader.verify(medium, record, manifest) == []


def test_single_leaves_read_only_their_chunks(folder: Directory) -> None:
    data = slot_file(STATE)
    medium, _, manifest = opened(folder, data)
    last = manifest.chunks[-1]
    medium = put(folder, flip(data, last.offset))  # damage in the last leaf only
    for index in (0, 1, 2):
        found = leaves_of(medium, manifest, index)[0]
        assert bytes(found) == list(ARRAYS.values())[index].tobytes()
    several = leaves_of(medium, manifest, 1, 0, 1)
    assert [len(part) for part in several] == [56, 12000, 56]
    with pytest.raises(DamagedError) as caught:
        leaves_of(medium, manifest, 3)
    assert caught.value.leaves == ("optimizer/m",)


def test_a_small_leaf_does_not_keep_its_chunk_alive(folder: Directory) -> None:
    medium, _, manifest = opened(folder, slot_file({"big": np.ones(1 << 16), "small": np.ones(2)}, chunk_bytes=1 << 20))
    small = leaves_of(medium, manifest, 1)[0]
    assert len(np.frombuffer(small.obj, np.uint8)) < 1 << 16


# -- records ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [0, 100, 512, 70_000])
def test_zeros_were_never_used(folder: Directory, size: int) -> None:
    assert reader.read_record(put(folder, bytes(size))) is None


@pytest.mark.parametrize("data", [b"x", b"PCCSLOT\0", b"\x89PNG" * 200, b"\x80\x04." + bytes(5000)])
def test_other_files_are_refused(folder: Directory, data: bytes) -> None:
    with pytest.raises(FormatError, match=r"slot-000\.pcc"):
        reader.read_record(put(folder, data))


@pytest.mark.parametrize("state", [SlotState.FILLING, SlotState.WITHDRAWN])
def test_only_sealed_records_have_a_manifest(folder: Directory, state: SlotState) -> None:
    medium = put(folder, slot_file(STATE, state=state))
    record = reader.read_record(medium)
    assert record is not None
    assert record.state == state
    with pytest.raises(FormatError, match="no checkpoint"):
        reader.read_manifest(medium, record)


# -- damage ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("place", range(9))
def test_every_chunk_is_checked_and_damage_is_named(folder: Directory, place: int) -> None:
    data = slot_file(STATE)
    _, _, manifest = opened(folder, data)
    assert len(manifest.chunks) == 9
    chunk = manifest.chunks[place]
    medium, record, manifest = opened(folder, flip(data, chunk.offset + 5))
    with pytest.raises(DamagedError) as caught:
        reader.read_payload(medium, manifest)
    error = caught.value
    assert (error.offset, error.length) == (chunk.offset, chunk.stored)
    assert error.path.endswith("slot-000.pcc")
    assert set(error.leaves) == {
        entry.path
        for entry in manifest.leaves
        if entry.nbytes and entry.offset < chunk.start + chunk.data and chunk.start < entry.offset + entry.nbytes
    }
    found = reader.verify(medium, record, manifest)
    assert [(d.offset, d.length, d.leaves) for d in found] == [(error.offset, error.length, error.leaves)]


def test_padding_is_covered_by_the_digest(folder: Directory) -> None:
    data = slot_file({"x": np.ones(3)})
    medium, record, manifest = opened(folder, flip(data, format.PAYLOAD_OFFSET + 4095))
    assert len(reader.verify(medium, record, manifest)) == 1


def test_verify_finds_all_damage_and_counts_all_bytes(folder: Directory) -> None:
    data = slot_file(STATE)
    _, _, manifest = opened(folder, data)
    for index in (0, 3, 8):
        data = flip(data, manifest.chunks[index].offset)
    medium, record, manifest = opened(folder, data)
    seen: list[int] = []
    damages = reader.verify(medium, record, manifest, seen.append, threads=2)
    assert [d.offset for d in damages] == [manifest.chunks[i].offset for i in (0, 3, 8)]
    assert sum(seen) == sum(chunk.stored for chunk in manifest.chunks)
    assert len(seen) > 1


def test_swapped_chunks_are_damage(folder: Directory) -> None:
    data = slot_file(STATE)
    _, _, manifest = opened(folder, data)
    a, b = manifest.chunks[0], manifest.chunks[1]
    first, second = bytes(data[a.offset : a.offset + 4096]), bytes(data[b.offset : b.offset + 4096])
    data[a.offset : a.offset + 4096], data[b.offset : b.offset + 4096] = second, first
    medium, record, manifest = opened(folder, data)
    assert len(reader.verify(medium, record, manifest)) == 2


def test_a_damaged_manifest_is_damage(folder: Directory) -> None:
    data = slot_file(STATE)
    medium = put(folder, data)
    record = reader.read_record(medium)
    assert record is not None
    for at in (record.manifest_offset, record.manifest_offset + record.manifest_bytes - 1):
        medium = put(folder, flip(data, at))
        with pytest.raises(DamagedError, match="manifest"):
            reader.read_manifest(medium, record)


@pytest.mark.parametrize("cut", [1, 4096, 70_000])
def test_a_truncated_file_is_refused_before_anything_is_read(folder: Directory, cut: int) -> None:
    data = slot_file(STATE)
    manifest_bytes = format.unpack_record(bytes(data[:512]))
    assert manifest_bytes is not None
    end = manifest_bytes.manifest_offset + manifest_bytes.manifest_bytes
    medium = put(folder, data[: end - cut])
    record = reader.read_record(medium)
    assert record is not None
    with pytest.raises(FormatError, match="the file has"):
        reader.read_manifest(medium, record)


class Failing:
    """A medium whose reads fail from some byte on; all else is the real one's."""

    def __init__(self, inner: Medium, low: int, high: int) -> None:
        self._inner, self._low, self._high = inner, low, high
        self.path = inner.path

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def fileno(self) -> int | None:
        return None

    def read_into(self, buffer: memoryview, offset: int) -> None:
        if self._low <= offset < self._high:
            raise MediumError("read", self.path, OSError(errno.EIO, "Input/output error"), offset)
        self._inner.read_into(buffer, offset)


def test_an_unreadable_chunk_is_an_error_of_the_medium_and_a_damage_when_verifying(folder: Directory) -> None:
    medium, record, manifest = opened(folder, slot_file(STATE))
    chunk = manifest.chunks[4]
    failing: Any = Failing(medium, chunk.offset, chunk.offset + 1)
    with pytest.raises(MediumError) as caught:
        reader.read_payload(failing, manifest)
    assert caught.value.errno == errno.EIO
    assert caught.value.offset == chunk.offset
    damages = reader.verify(failing, record, manifest)
    assert [d.offset for d in damages] == [chunk.offset]
    assert "errno 5" in damages[0].reason


# -- reuse -----------------------------------------------------------------------------------------------------------


class Reused:
    """A medium whose slot is given to the next checkpoint as soon as anything but its record is read."""

    def __init__(self, inner: Medium, then: bytes, after: int) -> None:
        self._inner, self._then, self._after = inner, then, after
        self.path = inner.path

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def fileno(self) -> int | None:
        return None

    def read_into(self, buffer: memoryview, offset: int) -> None:
        if offset >= self._after:
            Path(self.path).write_bytes(self._then)
        self._inner.read_into(buffer, offset)


@pytest.mark.parametrize("state", [SlotState.FILLING, SlotState.SEALED, SlotState.WITHDRAWN])
def test_a_slot_reused_while_it_is_read_is_no_damage(folder: Directory, state: SlotState) -> None:
    other = bytes(slot_file([v + 1 for v in ARRAYS.values()], counter=5, step=50, state=state))
    medium, record, manifest = opened(folder, slot_file(STATE))
    reused: Any = Reused(medium, other, format.PAYLOAD_OFFSET)
    with pytest.raises(ReusedError):
        reader.read_payload(reused, manifest)
    medium, record, manifest = opened(folder, slot_file(STATE))
    with pytest.raises(ReusedError):
        reader.verify(reused, record, manifest)
    medium, record, manifest = opened(folder, slot_file(STATE))
    with pytest.raises(ReusedError):
        reader.read_manifest(reused, record)


def test_a_slot_whose_record_is_gone_at_the_end_is_reused(folder: Directory) -> None:
    medium, record, _ = opened(folder, slot_file(STATE))
    for then in (bytes(70_000), b"\xff" * 70_000, b""):
        Path(medium.path).write_bytes(then)
        with pytest.raises(ReusedError):
            reader.confirm(medium, record)


# -- hostile files -----------------------------------------------------------------------------------------------------


def edited(**changes: Any) -> Any:
    return lambda manifest: manifest.update(changes)


def chunk_edit(index: int, **changes: Any) -> Any:
    return lambda manifest: manifest["chunks"][index].update(changes)


def leaf_edit(index: int, **changes: Any) -> Any:
    return lambda manifest: manifest["leaves"][index].update(changes)


HOSTILE = {
    "another version": edited(version=2),
    "another step": edited(step=11),
    "another counter": edited(counter=2),
    "another world": edited(world=7),
    "no chunks": edited(chunks=[]),
    "data beyond the chunks": edited(data_bytes=1 << 50),
    "negative data": edited(data_bytes=-1),
    "chunks of nothing": edited(chunk_bytes=0),
    "chunks of 2**60": edited(chunk_bytes=1 << 60),
    "odd chunks": edited(chunk_bytes=4097),
    "chunk elsewhere in space": chunk_edit(1, start=0),
    "chunk too long": chunk_edit(0, stored=1 << 40),
    "chunk with too much data": chunk_edit(0, data=1 << 40),
    "chunk in the record": chunk_edit(0, offset=0),
    "chunk before the file": chunk_edit(0, offset=-65536),
    "chunk past the file": chunk_edit(8, offset=1 << 50),
    "chunk on another": chunk_edit(1, offset=65536),
    "chunk at an odd place": chunk_edit(1, offset=65536 * 2 + 4096),
    "chunk with a codec": chunk_edit(0, codec="zstd"),
    "short digest": chunk_edit(0, digest="00"),
    "no hex digest": chunk_edit(0, digest="z" * 32),
    "leaf past the data": leaf_edit(3, nbytes=1 << 40),
    "leaf before the data": leaf_edit(0, offset=-64),
    "leaf of negative length": leaf_edit(0, nbytes=-1),
    "leaf on another": leaf_edit(1, offset=0),
    "leaf at an odd place": leaf_edit(3, offset=12_225),
    "negative shape": leaf_edit(0, shape=[-1, 3000]),
    "numbers as text": edited(data_bytes="12"),
    "leaves as a number": edited(leaves=3),
    "missing chunks": lambda manifest: manifest.pop("chunks"),
    "missing tree": lambda manifest: manifest.pop("tree"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_manifests_are_refused(folder: Directory, name: str) -> None:
    medium = put(folder, slot_file(STATE, edit=HOSTILE[name]))
    record = reader.read_record(medium)
    assert record is not None
    with pytest.raises(FormatError):
        reader.read_manifest(medium, record)


@pytest.mark.parametrize(
    "text",
    [b"", b"{", b"[" * 100_000, b'{"a":' * 50_000, b"null", b"\xff\xfe", b"\x80\x04\x95.", b'{"version": 1e999}'],
    ids=["nothing", "cut", "deep list", "deep dict", "null", "no text", "pickle", "inf"],
)
def test_manifests_that_are_no_manifest_are_refused(folder: Directory, text: bytes) -> None:
    data = slot_file({"x": np.ones(3)})
    record = format.unpack_record(bytes(data[:512]))
    assert record is not None
    record = replace(record, manifest_bytes=len(text), manifest_digest=xxhash.xxh3_128_digest(text))
    data[:512] = format.pack_record(record)
    medium = put(folder, bytes(data[: record.manifest_offset]) + text)
    with pytest.raises(FormatError):
        reader.read_manifest(medium, record)


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 3000), st.integers(0, 255), st.booleans())
def test_any_byte_of_record_or_manifest_changed(at: int, value: int, resum: bool) -> None:
    """Reading the fuzzed file gives what was stored, or an error of ours; nothing else."""
    data = slot_file({"x": np.arange(100.0), "y": np.ones(3)})
    record = format.unpack_record(bytes(data[:512]))
    assert record is not None
    place = at if at < 512 else record.manifest_offset + (at - 512) % record.manifest_bytes
    data[place] = value
    if resum:
        text = bytes(data[record.manifest_offset : record.manifest_offset + record.manifest_bytes])
        record = replace(record, manifest_digest=xxhash.xxh3_128_digest(text))
        if at >= 512:
            data[:512] = format.pack_record(record)
    medium = Bytes(bytes(data))
    try:
        found = reader.read_record(medium)
        if found is None:
            return
        manifest = reader.read_manifest(medium, found)
        payload = reader.read_payload(medium, manifest)
    except ContentError:
        return
    np.testing.assert_array_equal(np.frombuffer(payload[:800], "<f8"), np.arange(100.0))


class Bytes:
    """The least medium: bytes in memory, for reading."""

    path, alignment = "memory", 1

    def __init__(self, data: bytes) -> None:
        self._data = data

    def __getattr__(self, name: str) -> Any:
        raise AssertionError(f"a reader must not need {name}")

    def size(self) -> int:
        return len(self._data)

    def fileno(self) -> int | None:
        return None

    def read_into(self, buffer: memoryview, offset: int) -> None:
        part = self._data[offset : offset + len(buffer)]
        if len(part) < len(buffer):
            raise MediumError("read", self.path, OSError(errno.ENODATA, "the file ends here"), offset)
        buffer[:] = part

    def drop_cache(self) -> None:
        pass


LIMITED = """
import resource, sys
from pccheck.storage.directory import Directory
from pccheck.reading import reader
from pccheck.errors import ContentError
volume = Directory(sys.argv[1], create=False, write=False)
medium = volume.open("slot-000.pcc")
resource.setrlimit(resource.RLIMIT_AS, (int(sys.argv[2]),) * 2)
record = reader.read_record(medium)
manifest = None
try:
    manifest = reader.read_manifest(medium, record)
    print("damages", len(reader.verify(medium, record, manifest)))
except ContentError as error:
    print(type(error).__name__)
"""


def limited(store: str, extra_bytes: int) -> str:
    with open("/proc/self/statm") as file:
        base = int(file.read().split()[0]) * resource.getpagesize()
    command = [sys.executable, "-c", LIMITED, store, str(base + extra_bytes)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_lies_about_lengths_allocate_nothing(folder: Directory) -> None:
    for record in (
        {"manifest_bytes": 1 << 45},
        {"manifest_bytes": 1 << 63, "payload_bytes": 0, "manifest_offset": 65536},
        {"payload_bytes": 1 << 45, "manifest_offset": (1 << 45) + 65536},
    ):
        put(folder, slot_file(STATE, **record)).close()
        assert limited(folder.path, 200 << 20) == "FormatError"
    put(folder, slot_file(STATE, edit=edited(data_bytes=1 << 45, chunk_bytes=1 << 30))).close()
    assert limited(folder.path, 200 << 20) == "FormatError"


def test_a_sparse_file_that_claims_a_huge_manifest(folder: Directory) -> None:
    put(folder, slot_file(STATE, manifest_bytes=1 << 40)).close()
    os.truncate(Path(folder.path, "slot-000.pcc"), 1 << 41)
    assert limited(folder.path, 200 << 20) == "FormatError"


def test_verifying_takes_a_few_chunks_of_memory_not_the_state(folder: Directory) -> None:
    """A gigabyte that is mostly a hole: its digests are wrong, and all of it is read."""
    data = slot_file({"x": np.zeros(1 << 17)}, chunk_bytes=1 << 20)
    chunks_there = 1024

    def many(manifest: dict[str, Any]) -> None:
        one = manifest["chunks"][0]
        manifest["chunks"] = [{**one, "start": i << 20, "offset": 65536 + (i << 20)} for i in range(chunks_there)]
        manifest["data_bytes"] = chunks_there << 20

    payload = chunks_there << 20
    data = slot_file(
        {"x": np.zeros(1 << 17)}, chunk_bytes=1 << 20, edit=many, payload_bytes=payload, manifest_offset=65536 + payload
    )
    record = format.unpack_record(bytes(data[:512]))
    assert record is not None
    text = bytes(data[65536 + (1 << 20) :])
    with open(Path(folder.path, "slot-000.pcc"), "wb") as file:
        file.write(data[:65536])
        file.seek(record.manifest_offset)
        file.write(text)
    assert limited(folder.path, 400 << 20) == "damages 0"  # zeros digest as zeros: the hole is what was stored


def test_memory_that_cannot_be_had_is_a_memory_error() -> None:
    with pytest.raises(MemoryError, match="some file"):
        chunks.allocate(1 << 62, "some file")
