"""Leaves on devices, captured by a Checkpointer: orders instead of waits, shadows, and pinned pools."""

from __future__ import annotations

import threading

import numpy as np
import pytest

import pccheck
from pccheck import events, format
from pccheck.errors import ChangedError
from pccheck.saving import pipelines
from pccheck.saving.ordering import OrderedFiller
from pccheck.state.filling import DeviceFiller, DeviceLayout, OnDevice
from pccheck.state.plan import lay_out
from pccheck.state.planner import Planner
from tests.faults.helpers import CHUNK, WAIT_S, records
from tests.unit.device_arrays import Device, DeviceArray, Memory, Table


def open_with(device_kinds, directory, **options):
    ck = pccheck.Checkpointer(directory, **{"chunk_bytes": CHUNK, **options})
    ck._planner = Planner(device_kinds, CHUNK)
    return ck


def payload(directory):
    """Give the data of the one checkpoint: what these arrays hold cannot be restored by any kind."""
    (file,) = records(directory)
    data = np.fromfile(file, np.uint8)[format.PAYLOAD_OFFSET :]
    chunks = [data[start : start + CHUNK] for start in range(0, len(data), format.CHUNK_ALIGN)]
    return np.concatenate(chunks).view(np.int64)


def filled(value, chunks=4):
    return np.full(chunks * CHUNK // 8, value, np.int64)


class Ordering(Device):
    """A device that notes what is put behind its copies, and the memory that it was told of."""

    def __init__(self, name="dev", *, room=True):
        super().__init__(name, room=room)
        self.ordered, self.pinned = 0, []

    def begin(self):
        capture = super().begin()

        def order(timeout_s):
            self.ordered += 1
            return True

        capture.order = order
        return capture

    def register(self, address, nbytes):
        self.pinned.append((address, nbytes))

    def unregister(self, address, nbytes):
        self.pinned.remove((address, nbytes))


class Owner:
    """A guard whose owner 0 has these arrays."""

    def __init__(self, *mine):
        self.mine = mine

    def version(self):
        return 0

    def owners(self, kind, values):
        return [0 if any(v is m for m in self.mine) else -1 for v in values]


def test_an_order_waits_until_its_chunks_are_queued_and_not_until_they_are_copied():
    device = Ordering()
    device.open.clear()  # nothing is copied
    layout = lay_out([3 * CHUNK], CHUNK)
    source = Memory(device, np.zeros(3 * CHUNK, np.uint8))
    filler = OrderedFiller(DeviceFiller(DeviceLayout(layout, [OnDevice(0, device, 0)]), {0: source}))
    filler.begin()
    buffer = np.empty(3 * CHUNK, np.uint8)
    assert not filler.order(1, 0.01)
    filler.fill(0, buffer.ctypes.data, CHUNK)
    assert filler.order(1, WAIT_S)
    assert device.ordered == 1
    assert not filler.order(3, 0.01)
    passed = threading.Event()
    threading.Thread(target=lambda: filler.order(3, WAIT_S) and passed.set()).start()
    filler.fill(1, buffer.ctypes.data + CHUNK, CHUNK)
    assert not passed.wait(0.02)
    ticket = filler.fill(2, buffer.ctypes.data + 2 * CHUNK, CHUNK)
    assert passed.wait(WAIT_S)
    filler.end()
    assert filler.order(3, WAIT_S), "after the end, too: the copies may still run"
    assert device.ordered == 3
    device.open.set()
    assert ticket.wait(WAIT_S)


def test_a_job_that_failed_keeps_nobody_waiting():
    device = Ordering()
    layout = lay_out([2 * CHUNK], CHUNK)
    filler = OrderedFiller(
        DeviceFiller(DeviceLayout(layout, [OnDevice(0, device, 0)]), {0: Memory(device, np.zeros(2 * CHUNK, np.uint8))})
    )
    filler.begin()
    filler.end()
    assert filler.order(2, WAIT_S)


@pytest.mark.parametrize("pipeline", ["auto", "portable"])  # auto: native where it was built
def test_a_fence_orders_and_does_not_wait(tmp_path, pipeline):
    """Leaves on a device that is late: the fence returns once their copies are queued, though none was made."""
    device = Ordering()
    array, host = DeviceArray(device, filled(1)), filled(2)
    with open_with(Table(), tmp_path, pipeline=pipeline, buffer_bytes=16 * CHUNK) as ck:
        ck.guarded_by(Owner(array))
        device.open.clear()
        save = ck.save(1, {"a": array, "h": host})
        host[:] = -1
        ck.fence(WAIT_S, owner=0)
        assert device.ordered == 1
        assert not save.captured.done()
        device.open.set()
        save.durable.result(WAIT_S)
        found = payload(tmp_path)
        assert (found == 1).sum() >= 4 * CHUNK // 8
        assert -1 not in found[: 8 * CHUNK // 8]


@pytest.mark.parametrize("snapshot", ["copy", "device"])
@pytest.mark.parametrize("room", [True, False])
def test_shadows_on_the_device(tmp_path, snapshot, room):
    """Device mode copies within the device, and without room there waits as copy mode does."""
    device = Ordering(room=room)
    array, heard = DeviceArray(device, filled(1)), []
    with open_with(Table(), tmp_path, snapshot=snapshot, observer=heard.append) as ck:
        save = ck.save(1, {"a": array})
        assert save.captured.done()
        array.array[:] = -1
        save.durable.result(WAIT_S)
        found = payload(tmp_path)
        assert (found[: 4 * CHUNK // 8] == 1).all()
    told = [e.mode for e in heard if isinstance(e, events.SnapshotPicked)]
    assert told == (["copy"] if snapshot == "device" and not room else [])


@pytest.mark.parametrize("room", [True, False])
def test_what_nobody_owns_on_a_device_is_copied_there_or_waited_for(tmp_path, room):
    device = Ordering(room=room)
    mine, other = DeviceArray(device, filled(1)), DeviceArray(device, filled(2))
    with open_with(Table(), tmp_path) as ck:
        ck.guarded_by(Owner(mine))
        save = ck.save(1, {"other": other, "mine": mine})
        other.array[:] = -1
        save.durable.result(WAIT_S)
        found = payload(tmp_path)
        assert (found[: 4 * CHUNK // 8] == 2).all()
        assert (found[4 * CHUNK // 8 : 8 * CHUNK // 8] == 1).all()


def test_debug_digests_what_lies_on_a_device(tmp_path):
    device = Ordering()
    mine, other = DeviceArray(device, filled(1)), DeviceArray(device, filled(2))
    with open_with(Table(), tmp_path, debug_captures=True) as ck:
        ck.guarded_by(Owner(mine))
        ck.save(1, {"mine": mine, "other": other})
        ck.fence(WAIT_S, owner=0)
        ck.save(2, {"mine": mine, "other": other})
        mine.array[3] = 0
        with pytest.raises(ChangedError, match="mine"):
            ck.fence(WAIT_S, owner=0)


def test_the_pool_is_made_known_to_devices_in_pieces_and_forgotten_before_it_goes(tmp_path, monkeypatch):
    monkeypatch.setattr(pipelines, "REGISTER_BYTES", 6 * CHUNK)
    device = Ordering()
    with open_with(Table(), tmp_path, in_flight=1) as ck:
        ck.save(0, {"h": filled(0)}).durable.result(WAIT_S)
        assert device.pinned == [], "no leaf lies there"
        ck.save(1, {"a": DeviceArray(device, filled(1))}).durable.result(WAIT_S)
        address, nbytes = ck._flight.pipelines.current.memory
        assert sum(n for _, n in device.pinned) == nbytes
        assert min(a for a, _ in device.pinned) == address
        assert max(n for _, n in device.pinned) <= 6 * CHUNK
        before = list(device.pinned)
        ck.save(2, {"a": DeviceArray(device, filled(1))}).durable.result(WAIT_S)
        assert device.pinned == before
        ck.save(3, {"a": DeviceArray(device, filled(1, chunks=40))}).durable.result(WAIT_S)
        address, nbytes = ck._flight.pipelines.current.memory
        assert nbytes > sum(n for _, n in before), "a larger pool took its place"
        assert sum(n for _, n in device.pinned) == nbytes
    assert device.pinned == []
