"""Arrays in the memory of a small device of our own, which copies on a thread of its own, later than it was told."""

from __future__ import annotations

import ctypes
import queue
import threading
import weakref

import numpy as np

from pccheck.devices import DeviceBytes
from pccheck.leaves import LeafKind, LeafSpec
from tests.unit.tables import TableWith


class Done:
    """A copy that was queued."""

    def __init__(self):
        self.event, self.error = threading.Event(), None

    def wait(self, timeout_s):
        if not self.event.wait(timeout_s):
            return False
        if self.error is not None:
            raise self.error
        return True


class Capture:
    def __init__(self, device):
        self.device, self.ended = device, 0

    def copy(self, address, nbytes, runs):
        if self.device.refuses is not None:
            raise self.device.refuses
        copies = []
        for run in runs:
            assert 0 <= run.place <= run.place + run.length <= nbytes
            assert 0 <= run.first <= run.first + run.length <= run.source.memory.nbytes
            copies.append((address + run.place, run.source.memory.ctypes.data + run.first, run.length))
        done = Done()
        self.device.work.put((copies, done, [run.source for run in runs]))
        return done

    def order(self, timeout_s):
        return True

    def end(self):
        self.ended += 1
        if self.device.end_fails is not None:
            raise self.device.end_fails


def run(work, open_):
    while (task := work.get()) is not None:
        copies, done, _ = task
        open_.wait(60)
        for target, source, length in copies:
            ctypes.memmove(target, source, length)
        done.event.set()
        del task, copies, done, _  # they hold the device


class Device:
    """Copies in order, on one thread, not before `open` is set."""

    def __init__(self, name="dev", *, room=True):
        self.name, self.room = name, room
        self.captures, self.refuses, self.end_fails = [], None, None
        self.open, self.work = threading.Event(), queue.SimpleQueue()
        self.open.set()
        threading.Thread(target=run, args=(self.work, self.open), daemon=True).start()
        weakref.finalize(self, self.work.put, None)

    def begin(self):
        self.captures.append(Capture(self))
        return self.captures[-1]

    def shadow(self, sources):
        return [Memory(self, source.memory.copy()) for source in sources] if self.room else None

    def register(self, address, nbytes): ...

    def unregister(self, address, nbytes): ...


class Memory:
    """Bytes on a device."""

    def __init__(self, device, memory):
        self.device, self.memory = device, memory


class DeviceArray:
    """An array on a device; `lazy`: its bytes are made when they are asked for."""

    def __init__(self, device, array, *, lazy=False):
        self.array = np.ascontiguousarray(array)
        self.shape, self.dtype, self.lazy = self.array.shape, self.array.dtype, lazy
        self.on = Memory(device, self.array.reshape(-1).view(np.uint8))


class DeviceKind(LeafKind):
    name = "dev"

    def __init__(self):
        self.asked = 0  # how often a leaf alone was asked for its bytes

    def recognises(self, value):
        return isinstance(value, DeviceArray)

    def describe(self, value):
        return LeafSpec(kind="dev", dtype=value.dtype.str, shape=value.shape, nbytes=value.array.nbytes)

    def fingerprint(self, values):
        return [(v.dtype, v.shape, v.on.device, v.lazy) for v in values]

    def addresses(self, values):
        return [v.array.ctypes.data for v in values]

    def host_bytes(self, value):
        self.asked += 1
        alias = (value.array.ctypes.data, value.dtype.str, value.shape)
        source = Memory(value.on.device, value.on.memory.copy()) if value.lazy else value.on
        return DeviceBytes(
            device=value.on.device, source=source, nbytes=value.array.nbytes, alias=alias, stable=value.lazy
        )

    def sources(self, values):
        return [v.on for v in values]

    def build(self, spec, data):
        raise NotImplementedError

    def like(self, value):
        return None

    def convert(self, value, like):
        return value


class Table(TableWith):
    """The kinds of pccheck, and this one."""

    def __init__(self):
        super().__init__(DeviceKind())
