"""The defects D1 to D10 of the artifact (commit and layout), each as a test that the same mistake here would fail."""

from __future__ import annotations

import os
import re
import threading
import time
from pathlib import Path

import pytest

import pccheck
from pccheck import format
from pccheck.errors import FormatError, MediumError
from pccheck.reading import reader
from pccheck.storage.checkpage import FilePage, atomics
from pccheck.storage.directory import Directory
from pccheck.testing.faults import FaultyVolume, Script
from tests.faults.helpers import CHUNK, WAIT_S, Gate, make_state, records, run_python, slot_files, step_of


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

        def is_named(self, name, medium):
            return directory.is_named(name, medium.inner)

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

        def is_named(self, name, medium):
            return directory.is_named(name, medium.inner)

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
