"""Public bug reports of other checkpoint libraries, each as a test of its whole kind: corruption and aliasing."""

from __future__ import annotations

import random
import subprocess
import sys

import numpy as np
import pytest

import pccheck
from pccheck import format
from pccheck.errors import NoValidCheckpointError, StoreTaken
from tests.faults.helpers import (
    CHUNK,
    WAIT_S,
    make_state,
    records,
    slot_files,
    step_of,
)

# -- E. corruption ----------------------------------------------------------------------------------------------------


def test_case_24_no_changed_byte_is_ever_handed_out(tmp_path):
    """Case 24: flip, zero or swap any byte, 4 KiB or chunk (a seeded sample): found before a value is returned."""
    store = tmp_path / "s"
    with pccheck.Checkpointer(store, keep=2, in_flight=1, chunk_bytes=CHUNK) as ck:
        for step in (1, 2):
            ck.save(step, make_state(step, 5 * CHUNK)).durable.result(WAIT_S)
    newest, older = sorted(records(store), key=lambda f: -records(store)[f].counter)
    record = records(store)[newest]
    whole, end = newest.read_bytes(), record.manifest_offset + record.manifest_bytes
    chance = random.Random(24)
    used = [(0, 512), *((o, CHUNK) for o in range(format.PAYLOAD_OFFSET, record.manifest_offset, 65536)),
            (record.manifest_offset, record.manifest_bytes)]  # fmt: skip

    def somewhere(length):
        start, room = chance.choice(used)
        return start + chance.randrange(max(1, room - length + 1)), min(length, room)

    def changed(kind):
        data = bytearray(whole)
        if kind == "flip bit":
            at, _ = somewhere(1)
            data[at] ^= 1 << chance.randrange(8)
        elif kind == "zero 4 KiB":
            at, length = somewhere(4096)
            data[at : at + length] = bytes(length)
        elif kind == "random 4 KiB":
            at, length = somewhere(4096)
            data[at : at + length] = chance.randbytes(length)
        elif kind == "swap bytes":
            (a, _), (b, _) = somewhere(1), somewhere(1)
            data[a], data[b] = data[b], data[a]
        elif kind == "swap chunks":
            a, b = chance.sample(used[1:-1], 2)
            data[a[0] : a[0] + CHUNK], data[b[0] : b[0] + CHUNK] = (
                whole[b[0] : b[0] + CHUNK],
                whole[a[0] : a[0] + CHUNK],
            )
        elif kind == "chunk of the older":
            at, _ = chance.choice(used[1:-1])
            data[at : at + CHUNK] = older.read_bytes()[at : at + CHUNK]
        elif kind == "stale tail":
            at = chance.choice(used[1:])[0]
            data[at:end] = older.read_bytes()[at:end]
        return bytes(data)

    found = 0
    kinds = ["flip bit", "zero 4 KiB", "random 4 KiB", "swap bytes", "swap chunks", "chunk of the older", "stale tail"]
    for n in range(350):
        data = changed(kinds[n % len(kinds)])
        newest.write_bytes(data)
        with pccheck.open(store) as view:
            restored = view.restore()
            assert step_of(restored.state) == restored.step
            if data[:512] + data[65536:end] != whole[:512] + whole[65536:end] and restored.step == 1:
                found += 1
                if data[:512].strip(b"\0"):  # a record of zeros is a slot that was never used
                    assert newest.name in restored.skipped[0].name
                with pytest.raises(pccheck.errors.PccheckError):
                    view.restore(2)
            else:
                assert restored.step == 2
                assert data == whole or not _covered(data, whole, used)
    assert found > 300
    newest.write_bytes(whole)


def _covered(data: bytes, whole: bytes, used) -> bool:
    """Whether a byte that a digest covers differs (padding of the record's sector and the manifest's page does not)."""
    return any(data[a : a + n] != whole[a : a + n] for a, n in used)


def test_case_24_whole_slots_that_changed_places(tmp_path):
    """Case 24: swap two slot files, or put one of another store there: neither is taken for this checkpoint."""
    stores = [tmp_path / "a", tmp_path / "b"]
    for number, store in enumerate(stores):
        with pccheck.Checkpointer(store, keep=2, in_flight=1, chunk_bytes=CHUNK) as ck:
            for step in (1, 2):
                ck.save(100 * number + step, make_state(100 * number + step)).durable.result(WAIT_S)
    files = slot_files(stores[0])
    first, second = (f.read_bytes() for f in files[:2])
    files[0].write_bytes(second)
    files[1].write_bytes(first)
    with pccheck.open(stores[0]) as view, pytest.raises(NoValidCheckpointError) as caught:
        view.restore()
    assert "slot" in str(caught.value)
    files[0].write_bytes(first)
    files[1].write_bytes(second)
    newest = max(records(stores[0]), key=lambda f: records(stores[0])[f].counter)
    newest.write_bytes((stores[1] / newest.name).read_bytes())
    with pccheck.open(stores[0]) as view:
        restored = view.restore()
        assert restored.step == 1
        assert "another store" in str(restored.skipped[0])


def test_case_26_what_was_restored_stays_right_while_its_slot_is_overwritten(tmp_path):
    """Case 26: arrays from restore, from `view[...]` and `read` do not change when every slot is filled anew."""
    with pccheck.Checkpointer(tmp_path / "s", in_flight=2, keep=1, chunk_bytes=CHUNK) as ck:
        ck.save(1, make_state(1, 8 * CHUNK)).durable.result(WAIT_S)
        held = ck.restore().state
        view = pccheck.open(tmp_path / "s")
        leaf, also = view["w"], view.checkpoint().read(["m/v"])[0]
        for step in range(2, 12):
            ck.save(step, {"w": held["w"] * step, "m": {"v": held["m"]["v"] + step - 1}, "step": step})
        ck.save(12, held)  # and it may itself be saved, to the same store
        ck.wait(WAIT_S)
        assert step_of(held) == 1
        assert (leaf == 1).all()
        assert np.array_equal(also, make_state(1, 8 * CHUNK)["m"]["v"])
        assert step_of(ck.restore().state) == 1
        assert step_of(ck.restore(12).state) == 1
        view.close()


def test_case_27_two_processes_do_not_write_to_one_directory(tmp_path):
    """Case 27: the second is told who the first is, at once, and the first goes on."""
    with pccheck.Checkpointer(tmp_path, chunk_bytes=CHUNK) as ck:
        ck.save(1, make_state(1)).durable.result(WAIT_S)
        children = [
            subprocess.Popen(
                [sys.executable, "-c", "import sys, pccheck; pccheck.Checkpointer(sys.argv[1])", str(tmp_path)],
                stderr=subprocess.PIPE, text=True,
            )
            for _ in range(2)
        ]  # fmt: skip
        for child in children:
            _, told = child.communicate(timeout=60)
            assert child.returncode == 1
            assert "StoreTaken" in told
            assert "give each rank a directory" not in told or "same parent" in told
        with pytest.raises(StoreTaken):
            pccheck.Checkpointer(tmp_path, lock_timeout_s=0)
        ck.save(2, make_state(2)).durable.result(WAIT_S)
        assert step_of(ck.restore().state) == 2
