"""The defects of the paper's published artifact (D1 to D20), each as a test that the same mistake here would fail."""

from __future__ import annotations

import os
import random
import re
import resource
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest

import pccheck
from pccheck import format, reader
from pccheck.checkpage import FilePage, atomics
from pccheck.directory import Directory
from pccheck.errors import CapacityError, FormatError, MediumError
from pccheck.plan import lay_out
from pccheck.testing.faults import Fault, FaultyVolume, Script
from pccheck.testing.throttle import Rate, ThrottledVolume
from tests.faults.helpers import CHUNK, WAIT_S, Gate, make_state, pool_of, records, run_python, slot_files, step_of

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30


class Word:
    """Watches the word in CHECK from outside, as the disk has it."""

    def __init__(self, directory: Path) -> None:
        self._path = directory / "CHECK"

    def __call__(self) -> tuple[int, int]:
        with self._path.open("rb") as f:
            f.seek(format.CHECK_ADDR_OFFSET)
            word = int.from_bytes(f.read(8), "little")
        return format.word_counter(word), format.word_slot(word)


def test_d1_the_word_is_durable_before_its_predecessor_is_freed(tmp_path):
    """D1: after the swap nothing was synced, yet the old slot was freed: a power loss left no valid checkpoint."""
    script = Script()
    volume = FaultyVolume(Directory(str(tmp_path), create=True, write=True), script)
    freed = []
    with pccheck.Checkpointer(volume, in_flight=1, chunk_bytes=CHUNK) as ck:
        ck.save(0, make_state(0)).durable.result(WAIT_S)
        store, books = ck._store, ck._store.books
        release = books.ledger.release

        def watched(slot):
            freed.append((slot, [o for o, _ in script.operations].count("check_sync")))
            release(slot)

        books.ledger.release = watched
        before = script.count("check_sync")
        ck.save(1, make_state(1)).durable.result(WAIT_S)
        assert [count for _, count in freed] == [before + 1], "one sync of CHECK stands before the release"
        order = [o for o, path in script.operations if o in ("sync", "check_sync")][-4:]
        assert order == ["sync", "sync", "sync", "check_sync"], "filling, data, record, word"
        assert store.books.agreed == 2


def test_d2_the_word_means_the_same_in_every_process(tmp_path):
    """D2: the pointer was a virtual address, of no use to the next process."""
    with pccheck.Checkpointer(tmp_path, in_flight=2, chunk_bytes=CHUNK) as ck:
        for step in range(5):
            ck.save(step, make_state(step)).durable.result(WAIT_S)
    counter, slot = Word(tmp_path)()
    assert counter == 5
    assert records(tmp_path)[tmp_path / format.slot_name(slot)].counter == counter
    moved = tmp_path.rename(tmp_path.with_name("moved"))  # neither the place nor the process matters
    done = run_python("import sys, pccheck; print(pccheck.open(sys.argv[1]).restore().step)", moved)
    assert done.stdout == "4\n", done.stderr


def test_d3_a_restart_destroys_nothing(tmp_path):
    """D3: opening truncated the file, and there was no way to load."""
    for start in range(0, 12, 3):
        with pccheck.Checkpointer(tmp_path, in_flight=2, chunk_bytes=CHUNK) as ck:
            restored = ck.restore()
            assert restored is None if start == 0 else step_of(restored.state) == start - 1
            for step in range(start, start + 3):
                ck.save(step, make_state(step))
    for _ in range(3):  # opening alone, also without a restore or a save
        pccheck.Checkpointer(tmp_path, in_flight=2, chunk_bytes=CHUNK).close()
    assert step_of(pccheck.open(tmp_path).restore().state) == 11


@pytest.mark.parametrize("point", ["record-synced", "sealed", "written"])
def test_d4_no_aba_however_three_commits_interleave(tmp_path, point):
    """D4: 7 reads A(5); 6 commits to B and A is freed; 8 takes A, commits A(8); 7's swap from A then went through."""
    gate = Gate()
    gate.hold(point, 2)
    with pccheck.Checkpointer(tmp_path, in_flight=3, keep=1, chunk_bytes=CHUNK, _at=gate) as ck:
        word = Word(tmp_path)
        ck.save(5, make_state(5)).durable.result(WAIT_S)  # counter 1, slot A
        five = word()
        held = ck.save(7, make_state(7))  # counter 2: stops before it is published
        gate.reached(point, 2)
        seen, saves = [five], []
        for step in (6, 8, 9, 10):  # counters 3 and more: A is freed and taken again while 7 still waits
            saves.append(ck.save(step, make_state(step)))
            assert saves[-1].durable.result(WAIT_S) == step
            seen.append(word())
        assert any(slot == five[1] for _, slot in seen[1:]), "the slot that the word named at first was used again"
        newest = word()
        gate.let_go(point, 2)
        assert held.durable.result(WAIT_S) == 7
        assert held.outcome == "superseded"
        assert word() == newest, "the word never goes back"
        counters = [counter for counter, _ in seen]
        assert counters == sorted(counters)
        assert step_of(ck.restore().state) == 10
        assert ck.steps() == [10]
        ck.save(11, make_state(11)).durable.result(WAIT_S)
        assert len(slot_files(tmp_path)) == 4


def test_d4_every_order_of_three_publications(tmp_path):
    """D4: all six orders in which three sealed checkpoints can reach the swap: the greatest counter wins each time."""
    from itertools import permutations

    for number, order in enumerate(permutations((1, 2, 3))):
        gate = Gate()
        arrived: dict[int, int] = {}
        with pccheck.Checkpointer(tmp_path / str(number), in_flight=3, keep=1, chunk_bytes=CHUNK) as ck:
            ck.save(0, make_state(0)).durable.result(WAIT_S)
            ck._flight._at = gate
            for nth in (1, 2, 3):
                gate.hold("record-synced", nth)
            saves = []
            for nth in (1, 2, 3):
                saves.append(ck.save(nth, make_state(nth)))
                gate.reached("record-synced", nth)
                arrived[nth] = nth
            best = 0
            for nth in order:
                gate.let_go("record-synced", nth)
                saves[nth - 1].durable.result(WAIT_S)
                assert saves[nth - 1].outcome == ("committed" if nth > best else "superseded")
                best = max(best, nth)
                assert Word(tmp_path / str(number))()[0] == best + 1
            assert ck.steps() == [3]
            assert step_of(ck.restore().state) == 3


@pytest.mark.parametrize("native", [True, False], ids=["native", "portable"])
def test_d5_the_swap_is_of_64_bits(tmp_path, native):
    """D5: the swap was 4 bytes wide: it compared and wrote half the pointer."""
    if native and atomics() is None:
        pytest.skip("the extension was not built")
    page = page_at(tmp_path / "page", native=native)
    at, low = format.CHECK_ADDR_OFFSET, 0x1234_5678
    values = [low, low | 1 << 32, low | 1 << 63, 0xFFFF_FFFF, 1 << 32, (1 << 64) - 1, 1 << 31]
    for stored in values:
        for expected in values:
            page.store(at, stored)
            page.store(at + 8, 77)
            assert page.compare_and_swap(at, expected, 0xABCD_EF01_2345_6789) == (expected == stored)
            assert page.load(at) == (0xABCD_EF01_2345_6789 if expected == stored else stored)
            assert page.load(at + 8) == 77
    page.close()


def page_at(path: Path, *, native: bool) -> FilePage:
    path.write_bytes(bytes(format.CHECK_BYTES))
    return FilePage(os.open(path, os.O_RDWR), str(path), write=True, native=atomics() if native else None)


def test_d5_counters_beyond_32_bits(tmp_path):
    """D5, D13: a store whose counters have passed 2^31, 2^32 and 2^40 goes on in order, over restarts."""
    for big in ((1 << 16) - 2, (1 << 31) - 2, (1 << 32) - 2, (1 << 40) - 2):
        with pccheck.Checkpointer(tmp_path, in_flight=2, chunk_bytes=CHUNK) as ck:
            ck._store.books.next_counter = big
            for step in range(4):
                save = ck.save(step, make_state(step))
                assert save.durable.result(WAIT_S) == step
                assert (save.counter, save.outcome) == (big + step, "committed")
                assert Word(tmp_path)()[0] == big + step
        with pccheck.Checkpointer(tmp_path, in_flight=2, chunk_bytes=CHUNK) as ck:
            restored = ck.restore()
            assert (restored.counter, step_of(restored.state)) == (big + 3, 3)
            assert ck.save(9, make_state(9)).counter == big + 4


def test_d6_what_a_reserved_slot_held_is_not_rewritten_under_those_who_read_it(tmp_path):
    """D6: a slot's metadata was changed in place while others decided by it: here each save has a record of its own."""
    gate = Gate()
    gate.hold("filling", 2)
    with pccheck.Checkpointer(tmp_path, in_flight=2, chunk_bytes=CHUNK, _at=gate) as ck:
        ck.save(0, make_state(0)).durable.result(WAIT_S)
        before = [e for e in ck._store.books.entries() if e.counter == 1]
        late = threading.Thread(target=ck.save, args=(1, make_state(1)))
        late.start()
        gate.reached("filling", 2)
        assert [e for e in ck._store.books.entries() if e.counter == 1] == before
        with pytest.raises(AttributeError):
            before[0].record.counter = 99
        gate.let_go("filling", 2)
        late.join(WAIT_S)


def test_d7_nothing_is_committed_before_all_chunks_are_written(tmp_path):
    """D7: the last chunk's thread committed without waiting for the writes of the others."""
    release, slowed, stalled = threading.Event(), [], threading.Event()
    directory = Directory(str(tmp_path), create=True, write=True)

    class Slow:
        """Holds back the write of one chunk in the middle."""

        def __init__(self, inner, at):
            self.inner, self.at = inner, at
            self.path, self.alignment = inner.path, 1

        def __getattr__(self, name):
            return getattr(self.inner, name)

        def fileno(self):
            return None

        def mapping(self):
            return None

        def write_from(self, data, offset):
            if slowed and offset == self.at:
                stalled.set()
                assert release.wait(WAIT_S)
            self.inner.write_from(data, offset)

    class SlowVolume:
        def __init__(self):
            self.path = directory.path

        def __getattr__(self, name):
            return getattr(directory, name)

        def create(self, name, size):
            return Slow(directory.create(name, size), format.PAYLOAD_OFFSET + 65536)

        def open(self, name, *, write=False):
            return Slow(directory.open(name, write=write), format.PAYLOAD_OFFSET + 65536)

    with pccheck.Checkpointer(SlowVolume(), in_flight=2, writers=3, chunk_bytes=CHUNK) as ck:
        ck.save(0, make_state(0, 6 * CHUNK)).durable.result(WAIT_S)
        slowed.append(True)
        save = ck.save(1, make_state(1, 6 * CHUNK))
        assert stalled.wait(WAIT_S)
        with pytest.raises(TimeoutError):
            save.durable.result(0.2)
        assert (save.outcome, Word(tmp_path)()[0], ck.latest()) == (None, 1, 0)
        assert step_of(pccheck.open(tmp_path).restore().state) == 0
        release.set()
        assert save.durable.result(WAIT_S) == 1
        assert step_of(ck.restore().state) == 1


def test_d7_the_slot_of_a_failed_save_is_not_given_away_while_its_chunks_are_written(tmp_path):
    """D7: one chunk fails while another is still being written: the next save must not get that slot before it ends."""
    release, writing = threading.Event(), threading.Event()
    script = Script()
    directory = FaultyVolume(Directory(str(tmp_path), create=True, write=True), script)
    slots_of: dict[int, str] = {}

    class Slow:
        def __init__(self, inner):
            self.inner, self.path, self.alignment = inner, inner.path, 1

        def __getattr__(self, name):
            return getattr(self.inner, name)

        def write_from(self, data, offset):
            if armed and offset == format.PAYLOAD_OFFSET:
                slots_of[0] = self.path
                writing.set()
                assert release.wait(WAIT_S)
            if armed and offset == format.PAYLOAD_OFFSET + 65536:
                assert writing.wait(WAIT_S)
                raise MediumError("write", self.path, OSError(28, "full"), offset)
            self.inner.write_from(data, offset)

    class SlowVolume:
        path = directory.path

        def __getattr__(self, name):
            return getattr(directory, name)

        def create(self, name, size):
            return Slow(directory.create(name, size))

        def open(self, name, *, write=False):
            return Slow(directory.open(name, write=write))

    armed: list[bool] = []
    with pccheck.Checkpointer(SlowVolume(), in_flight=2, writers=2, chunk_bytes=CHUNK) as ck:
        ck.save(0, make_state(0, 4 * CHUNK)).durable.result(WAIT_S)
        armed.append(True)
        failing = ck.save(1, make_state(1, 4 * CHUNK))
        assert writing.wait(WAIT_S)
        time.sleep(0.05)
        assert not failing.durable.done(), "it has failed, but a write to its slot still runs"
        victim = os.path.basename(slots_of[0])
        states = {format.slot_name(e.slot): e.state.value for e in ck._store.books.entries()}
        assert states[victim] == "filling"
        armed.clear()
        release.set()
        assert isinstance(failing.durable.exception(WAIT_S), MediumError)
        with pytest.raises(MediumError):
            ck.wait(WAIT_S)
        for step in (2, 3):
            ck.save(step, make_state(step, 4 * CHUNK)).durable.result(WAIT_S)
        assert step_of(ck.restore().state) == 3


def test_d8_every_byte_of_a_slot_is_within_what_is_synced(tmp_path):
    """D8: the last 16 KiB of each slot were outside the synced range. Here the file is synced, after the last write."""
    script = Script()
    volume = FaultyVolume(Directory(str(tmp_path), create=True, write=True), script)
    with pccheck.Checkpointer(volume, in_flight=1, chunk_bytes=CHUNK) as ck:
        for step, nbytes in enumerate((100, CHUNK, 5 * CHUNK + 64, 3 * CHUNK)):
            del script.operations[:]
            ck.save(step, make_state(step, nbytes)).durable.result(WAIT_S)
            slot = next(path for o, path in script.operations if o == "write")
            done = [o for o, path in script.operations if path == slot and o in ("write", "sync")]
            text = "".join("w" if o == "write" else "s" for o in done)
            assert re.fullmatch("ws(w+)sws", text), text  # filling; chunks and manifest; record


def test_d9_d10_the_record_and_peer_address_mean_one_thing(tmp_path):
    """D9, D10: one field had two meanings; there was no magic, version, length, step, dtype, shape or checksum."""
    with pccheck.Checkpointer(tmp_path, chunk_bytes=CHUNK) as ck:
        assert Word(tmp_path)() == (0, 0)
        ck.save(7, make_state(7)).durable.result(WAIT_S)
        data = (tmp_path / "CHECK").read_bytes()
        word, peer = (
            int.from_bytes(data[o : o + 8], "little") for o in (format.CHECK_ADDR_OFFSET, format.PEER_ADDR_OFFSET)
        )
        assert word == peer
        file = tmp_path / format.slot_name(format.word_slot(word))
        sector = bytearray(file.read_bytes()[:512])
        record = format.unpack_record(bytes(sector))
        assert (record.step, record.counter, record.slot) == (7, 1, format.word_slot(word))
        for at in range(0, 512, 7):
            torn = sector.copy()
            torn[at] ^= 0xFF
            with pytest.raises(FormatError):
                format.unpack_record(bytes(torn))
        medium = Directory(str(tmp_path), create=False, write=False).open(file.name)
        leaves = reader.read_manifest(medium, record).leaves
        medium.close()
        assert {(leaf.path, leaf.dtype, leaf.shape) for leaf in leaves} == {
            ("w", "<i8", (3 * CHUNK // 16,)),
            ("m/v", "<i8", (3 * CHUNK // 16,)),
        }


def test_d11_every_dtype_comes_back_as_it_was(tmp_path):
    """D11: everything became float32: 2^24 + 1, int64, float64, bool, bfloat16 and strings did not survive."""
    import ml_dtypes

    state = {
        "odd": np.array([(1 << 24) + 1, (1 << 53) + 1, -(1 << 63)], np.int64),
        "f64": np.array([0.1, -0.0, np.inf, np.nan, 5e-324]),
        "bits": np.arange(65536, dtype=np.uint16).view(ml_dtypes.bfloat16),
        "half": np.arange(65536, dtype=np.uint16).view(np.float16),
        "bool": np.array([True, False]), "c": np.array([1 + 2j], np.complex64),
        "plain": ["text", None, 1 << 80, 0.1, b"bytes", True, (1, 2)],
    }  # fmt: skip
    with pccheck.Checkpointer(tmp_path, chunk_bytes=CHUNK) as ck:
        ck.save(1, state)
        ck.wait(WAIT_S)
        back = ck.restore().state
    assert back["plain"] == state["plain"]
    assert [type(x) for x in back["plain"]] == [type(x) for x in state["plain"]]
    for name in state.keys() - {"plain"}:
        assert back[name].dtype == state[name].dtype
        assert back[name].tobytes() == state[name].tobytes(), name


@pytest.mark.parametrize("pipeline", ["auto", "portable"])
def test_d12_remainders_of_every_size_around_chunk_borders(fast_path, pipeline):
    """D12: the remainder of a chunk was not saved, or the copy ran past its end into the next."""
    sizes = sorted({max(0, base + delta) for base in (0, 64, 128, 512, CHUNK, 2 * CHUNK, 3 * CHUNK, 65536)
                    for delta in (-65, -64, -63, -8, -2, -1, 0, 1, 2, 7, 63, 64, 65)})  # fmt: skip
    chance = np.random.default_rng(12)
    with pccheck.Checkpointer(fast_path / "s", chunk_bytes=CHUNK, in_flight=2, pipeline=pipeline) as ck:
        for step, size in enumerate(sizes):
            before, after = np.full(3, 0xAA, np.uint8), np.full(5, 0xBB, np.uint8)
            state = {"first": before, "odd": chance.integers(0, 256, size, np.uint8), "last": after}
            ck.save(step, state).durable.result(WAIT_S)
            with pccheck.open(fast_path / "s") as view:
                restored = view.restore()
            assert restored.step == step
            for name, array in state.items():
                assert restored.state[name].tobytes() == array.tobytes(), (size, name)


def test_d12_many_leaves_of_odd_sizes(fast_path):
    """D12: hundreds of leaves of 0 to 9,000 bytes, so that borders of leaves and chunks fall in every way."""
    chance = random.Random(12)
    with pccheck.Checkpointer(fast_path / "s", chunk_bytes=CHUNK) as ck:
        for step in range(5):
            sizes = chance.choices((0, 1, 3, 63, 64, 65, 1000, 4095, 4097, 9000), k=200)
            state = {str(i): np.frombuffer(chance.randbytes(size), np.uint8) for i, size in enumerate(sizes)}
            ck.save(step, state)
            ck.wait(WAIT_S)
            back = ck.restore().state
            assert all(back[k].tobytes() == v.tobytes() for k, v in state.items())


def test_d13_offsets_beyond_32_bits(tmp_path):
    """D13: sizes and offsets were of 32 bits. A layout of 27 GiB, and real chunks at such places in a sparse file."""
    layout = lay_out([20 * GIB, 100, 7 * GIB], GIB)
    assert layout.data_bytes > 27 * GIB
    assert layout.chunks[-1].file_offset > 26 * GIB
    assert all(b.file_offset > a.file_offset for a, b in zip(layout.chunks, layout.chunks[1:], strict=False))
    assert sum(chunk.data_bytes for chunk in layout.chunks) == layout.data_bytes
    volume = Directory(str(tmp_path), create=True, write=True)
    with (tmp_path / "slot-000.pcc").open("wb") as f:
        f.truncate(40 * GIB)
    medium = volume.open("slot-000.pcc", write=True)
    for offset in ((1 << 31) - CHUNK, 1 << 31, (1 << 32) - CHUNK, 1 << 32, 5 * GIB + 65536, 39 * GIB):
        data = np.full(CHUNK, offset >> 20 & 0xFF, np.uint8)
        medium.write_from(memoryview(data), offset)
        room = np.zeros(CHUNK, np.uint8)
        medium.read_into(memoryview(room), offset)
        assert np.array_equal(room, data)
        assert not pread(tmp_path / "slot-000.pcc", offset & 0xFFFF_FFFF, CHUNK).strip(b"\0") or offset < 1 << 32
    medium.close()
    volume.close()


def pread(path: Path, offset: int, length: int) -> bytes:
    with path.open("rb") as f:
        f.seek(offset)
        return f.read(length)


@pytest.mark.parametrize("pipeline", ["native", "portable"])
def test_d13_a_pipeline_writes_beyond_32_bits(tmp_path, pipeline):
    """D13: chunks whose place in the file lies beyond 4 GiB are written there, by both pipelines."""
    from pccheck.pipeline.choose import make_pipeline
    from pccheck.plan import Chunk, Layout, Piece

    if pipeline == "native":
        pytest.importorskip("pccheck._native")
    volume = Directory(str(tmp_path), create=True, write=True)
    with (tmp_path / "slot-000.pcc").open("wb") as f:
        f.truncate(9 * GIB)
    medium = volume.open("slot-000.pcc", write=True)
    source = np.arange(2 * CHUNK // 8, dtype=np.uint64)
    places = (format.PAYLOAD_OFFSET + 4 * GIB, format.PAYLOAD_OFFSET + 8 * GIB)
    layout = Layout((Piece(0, 2 * CHUNK),), CHUNK)
    chunks = tuple(Chunk(i * CHUNK, CHUNK, place, CHUNK) for i, place in enumerate(places))
    vars(layout)["chunks"] = chunks  # as they would lie in a checkpoint of 8 GiB
    threads = make_pipeline(pipeline, 2 * CHUNK, CHUNK, 2)
    job = threads.submit(layout, np.array([source.ctypes.data], np.uint64), source, medium)
    assert job.wait_written(WAIT_S)
    threads.close()
    for i, place in enumerate(places):
        assert pread(tmp_path / "slot-000.pcc", place, CHUNK) == source.tobytes()[i * CHUNK : (i + 1) * CHUNK]
        assert not pread(tmp_path / "slot-000.pcc", place & 0xFFFF_FFFF, CHUNK).strip(b"\0")
    medium.close()
    volume.close()


def test_d13_a_size_that_cannot_be_is_refused_with_numbers(tmp_path):
    """D13: the region had a fixed size that nobody checked. Here the disk is asked, for all slots, before anything."""
    huge = np.broadcast_to(np.zeros(1, np.uint8), (1 << 46,))  # 64 TiB that take one byte of memory
    with pccheck.Checkpointer(tmp_path) as ck:
        with pytest.raises((CapacityError, MemoryError)) as caught:
            ck.save(1, {"w": huge})
        assert "70,36" in str(caught.value) or isinstance(caught.value, MemoryError)
        ck.save(2, {"w": np.ones(10)}).durable.result(WAIT_S)
        assert ck.latest() == 2


@pytest.mark.filterwarnings("ignore:a save failed")
def test_d14_buffers_of_superseded_failed_and_cancelled_saves_come_back(tmp_path):
    """D14: a stale chunk kept its buffer, the pool drained, and the trainer span for ever."""
    script, gate = Script(), Gate()
    volume = FaultyVolume(Directory(str(tmp_path), create=True, write=True), script)
    with pccheck.Checkpointer(
        volume,
        in_flight=3,
        chunk_bytes=CHUNK,
        buffer_bytes=4 * CHUNK,
        on_error="warn",
        write_timeout_s=WAIT_S,
        _at=gate,
    ) as ck:
        ck.save(0, make_state(0, 8 * CHUNK)).durable.result(WAIT_S)
        gate.hold("record-synced", 2)
        stale = ck.save(1, make_state(1, 8 * CHUNK))
        gate.reached("record-synced", 2)
        ck.save(2, make_state(2, 8 * CHUNK)).durable.result(WAIT_S)
        gate.let_go("record-synced", 2)
        stale.durable.result(WAIT_S)
        assert stale.outcome == "superseded"
        for nth in range(1, 13):  # every write and sync of a save in turn, its last chunks included
            for operation in ("write", "sync"):
                script.arm(Fault(operation, nth, errno=28))
                ck.save(100 + nth, make_state(nth, 8 * CHUNK)).durable.exception(WAIT_S)
                script.arm()
                ck.wait(WAIT_S)
                assert pool_of(ck) == (4, 4), (operation, nth)
        assert ck.stats().failed >= 12
        assert ck.save(200, make_state(200, 8 * CHUNK)).durable.result(WAIT_S) == 200


@pytest.mark.parametrize("waits", ["save", "fence", "wait", "idle"])
def test_d15_waiting_takes_no_processor_time(tmp_path, waits):
    """D15: threads span on a free slot, a free buffer, a start flag. Here all of them sleep."""
    volume = ThrottledVolume(
        Directory(str(tmp_path), create=True, write=True), total=Rate.steady(256 * KIB)
    )  # half a second for a save
    with pccheck.Checkpointer(
        volume, in_flight=1, chunk_bytes=CHUNK, buffer_bytes=2 * CHUNK, snapshot="lazy", writers=2
    ) as ck:
        ck.save(0, {"w": np.zeros(8)}).durable.result(WAIT_S)
        state = {"w": np.zeros(160 * KIB, np.uint8)}
        if waits != "idle":
            ck.save(1, state)
        began, cpu = time.monotonic(), time.process_time()
        if waits == "save":
            ck.save(2, state, when_full="block")  # waits for the place of save 1
        elif waits == "fence":
            ck.fence(WAIT_S)
        elif waits == "wait":
            ck.wait(WAIT_S)
        else:
            time.sleep(0.5)
        waited, used = time.monotonic() - began, time.process_time() - cpu
        assert waited > 0.2
        assert used < waited / 3, f"{used:.3f} s of processor time in {waited:.3f} s of waiting"


def test_d15_no_error_of_a_thread_is_lost_and_none_ends_the_process(tmp_path):
    """D15: `exit(1)` in a helper, errors in threads that never reached the trainer."""
    with pccheck.Checkpointer(tmp_path, in_flight=2, chunk_bytes=CHUNK) as ck:
        for point in ("captured", "written", "data-synced", "sealed", "record-synced", "published", "word-synced",
                      "agreed", "released"):  # fmt: skip

            def at(here, point=point):
                if here == point:
                    raise SystemExit(f"at {point}")

            ck.save(0, make_state(0)).durable.result(WAIT_S)
            ck._flight._at = at
            save = ck.save(1, make_state(1))
            with pytest.raises(SystemExit, match=point):
                save.durable.result(WAIT_S)
            ck._flight._at = lambda point: None
            with pytest.raises(SystemExit, match=point):
                ck.wait(WAIT_S)
            assert ck.save(2, make_state(2)).durable.result(WAIT_S) == 2
            assert step_of(ck.restore().state) == 2
            assert pool_of(ck)[0] == pool_of(ck)[1]
            assert len(slot_files(tmp_path)) == 3


def test_d18_no_thread_is_bound_to_a_core_and_no_core_is_assumed(tmp_path):
    """D18: threads were pinned to a table of 12 cores. Here one core is enough, and affinities stay as they were."""
    done = run_python(
        """
        import os, sys
        os.sched_setaffinity(0, {sorted(os.sched_getaffinity(0))[0]})
        import numpy as np, pccheck
        before = os.sched_getaffinity(0)
        with pccheck.Checkpointer(sys.argv[1], in_flight=3, writers=4) as ck:
            for step in range(6):
                ck.save(step, {"w": np.full(100_000, step)})
            ck.wait(60)
            for task in os.listdir("/proc/self/task"):
                assert os.sched_getaffinity(int(task)) == before
            assert (ck.restore().state["w"] == 5).all()
        """,
        tmp_path,
    )
    assert done.returncode == 0, done.stderr


def test_d19_what_is_saved_can_resume_an_optimizer(tmp_path):
    """D19: parameters and gradients were stored, the moments never. Here training goes on exactly as it would have."""
    torch = pytest.importorskip("torch")

    def fresh():
        torch.manual_seed(1)
        model = torch.nn.Linear(32, 8)
        return model, torch.optim.AdamW(model.parameters(), lr=0.1)

    def train(model, optimizer, steps):
        for step in steps:
            optimizer.zero_grad()
            model(torch.full((4, 32), float(step))).square().sum().backward()
            optimizer.step()

    model, optimizer = fresh()
    train(model, optimizer, range(5))
    with pccheck.Checkpointer(tmp_path, chunk_bytes=CHUNK) as ck:
        ck.save(4, {"model": model.state_dict(), "optimizer": optimizer.state_dict()})
        train(model, optimizer, range(5, 9))
        ck.wait(WAIT_S)
    other, its = fresh()
    restored = pccheck.open(tmp_path).restore()
    other.load_state_dict(restored.state["model"])
    its.load_state_dict(restored.state["optimizer"])
    train(other, its, range(restored.step + 1, 9))
    for a, b in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(a, b)


def test_d20_nothing_is_printed(tmp_path):
    """Prints on the hot path, and helpers that print and exit: the core prints nothing."""
    done = subprocess.run(
        [sys.executable, "-c",
         "import sys, numpy, pccheck\n"
         "with pccheck.Checkpointer(sys.argv[1]) as ck:\n"
         "    ck.save(1, {'w': numpy.ones(10)})\n"
         "    ck.wait(); ck.restore(); ck.pin(1); ck.unpin(1); ck.steps()\n", str(tmp_path)],
        capture_output=True, text=True, timeout=60, check=True,
    )  # fmt: skip
    assert (done.stdout, done.stderr) == ("", "")
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss > 0
