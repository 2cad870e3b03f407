"""Devices: copies through streams and events, on the simulated device, whose streams run as late as they are told."""

from __future__ import annotations

import ctypes
import gc
import struct
import threading
import weakref

import pytest

torch = pytest.importorskip("torch")

from pccheck_torch import kind  # noqa: E402
from pccheck_torch.devices.simulated import SimulatedDevice, SimulatedTensor  # noqa: E402
from pccheck_torch.devices.streams import byte_view  # noqa: E402

from pccheck.devices import Run  # noqa: E402
from pccheck.errors import UnsupportedLeafError  # noqa: E402
from pccheck.leaves import DeviceBytes  # noqa: E402


@pytest.fixture
def device():
    """Give a simulated device."""
    with SimulatedDevice(timeout_s=20) as made:
        yield made


class Buffer:
    """A host buffer, as a pipeline's pool has them."""

    def __init__(self, nbytes):
        self.memory = (ctypes.c_uint8 * nbytes)()
        self.address, self.nbytes = ctypes.addressof(self.memory), nbytes

    def __bytes__(self):
        return bytes(self.memory)


def capture(device, buffer, *runs):
    return device.device.begin().copy(buffer.address, buffer.nbytes, runs)


# -- streams ---------------------------------------------------------------------------------------------------------


def test_what_is_queued_runs_in_order_and_later(device):
    done = []
    device.compute.pace = "held"
    for i in range(3):
        device.queue(lambda i=i: done.append(i))
    event = device.compute.record()
    device.queue(lambda: done.append(3))
    assert not event.wait(0.01)
    assert done == []
    device.compute.pace = "now"
    assert event.wait(20)
    assert done[:3] == [0, 1, 2]
    device.synchronize()
    assert done == [0, 1, 2, 3]


def test_a_stream_that_runs_when_needed_does_no_more_than_that(device):
    done = []
    device.compute.pace = "when_needed"
    device.queue(lambda: done.append(1))
    first = device.compute.record()
    device.queue(lambda: done.append(2))
    assert not first.wait(0)  # a look, not a need
    assert done == []
    device.copies.wait(first)
    device.copies.queue(lambda: done.append("copy"))
    assert device.copies.record().wait(20)
    assert done == [1, "copy"]


def test_an_error_on_a_stream_is_told_to_who_waits():
    with pytest.raises(RuntimeError, match="failed"):
        with SimulatedDevice() as device:
            device.queue(lambda: 1 / 0)
            with pytest.raises(RuntimeError, match="compute failed"):
                device.synchronize()


def test_a_wait_for_a_stream_that_does_not_come_there_ends():
    device = SimulatedDevice(timeout_s=0.05)
    device.compute.pace = "held"
    device.queue(lambda: None)
    with pytest.raises(TimeoutError):
        device.compute.synchronize()
    device.copies.wait(device.compute.record())
    with pytest.raises(RuntimeError, match="copies failed"):
        device.copies.record().wait(20)
    with pytest.raises(RuntimeError):
        device.close()
    assert not {device.compute._thread, device.copies._thread} & set(threading.enumerate())


def test_a_closed_stream_takes_nothing(device):
    device.close()
    with pytest.raises(RuntimeError, match="closed"):
        device.queue(lambda: None)


# -- captures --------------------------------------------------------------------------------------------------------


def test_runs_are_copied_to_their_places_and_nowhere_else(device):
    a, b = torch.arange(10, dtype=torch.int16), torch.arange(8, dtype=torch.uint8).reshape(2, 4).t() + 100
    buffer = Buffer(64)
    ctypes.memset(buffer.address, 255, 64)
    assert capture(device, buffer, Run(a, 4, 8, 16), Run(b, 1, 3, 1), Run(a, 0, 2, 62)).wait(20)
    memory = b.as_strided((8,), (1,)).numpy().tobytes()
    expected = bytearray(b"\xff" * 64)
    expected[16:24] = a.numpy().tobytes()[4:12]
    expected[1:4] = memory[1:4]
    expected[62:64] = b"\0\0"
    assert bytes(buffer) == bytes(expected)


@pytest.mark.parametrize("dtype", [torch.bool, torch.bfloat16, torch.float8_e8m0fnu, torch.complex128, torch.uint64])
def test_bytes_of_every_dtype_can_be_seen(dtype):
    raw = torch.arange(1, 65, dtype=torch.uint8) % (2 if dtype is torch.bool else 255)
    whole = raw.view(dtype)
    part = whole[1:]
    assert byte_view(part, 3, 5).tolist() == raw[dtype.itemsize + 3 : dtype.itemsize + 8].tolist()
    assert byte_view(whole[0], 0, dtype.itemsize).tolist() == raw[: dtype.itemsize].tolist()


def test_a_capture_comes_after_what_was_queued_before_it_and_before_what_it_is_ordered_to(device):
    tensor, buffer = torch.zeros(4), Buffer(16)
    device.compute.pace = "when_needed"
    device.queue(lambda: tensor.fill_(1))
    taken = device.device.begin()
    device.queue(lambda: None)
    ticket = taken.copy(buffer.address, 16, [Run(tensor, 0, 16, 0)])
    device.copies.pace = "when_needed"
    assert taken.order(20)
    device.queue(lambda: tensor.fill_(2))  # the next step
    device.compute.pace = "now"
    device.compute.synchronize()
    assert tensor.tolist() == [2] * 4
    assert ticket.wait(20)
    assert bytes(buffer) == torch.ones(4).numpy().tobytes()


def test_ordering_after_a_capture_without_copies_changes_nothing(device):
    taken = device.device.begin()
    assert taken.order(0.0)
    device.synchronize()


def test_sources_live_until_they_were_copied_and_no_longer(device):
    tensor, buffer = torch.ones(4), Buffer(16)
    gone = weakref.ref(tensor.untyped_storage())
    device.copies.pace = "held"
    taken = device.device.begin()
    ticket = taken.copy(buffer.address, 16, [Run(tensor, 0, 16, 0)])
    memory = tensor.data_ptr()
    del tensor
    taken.end()
    taken.end()
    gc.collect()
    assert torch.frombuffer((ctypes.c_float * 4).from_address(memory), dtype=torch.float32).tolist() == [1] * 4
    device.copies.pace = "now"
    assert ticket.wait(20)
    assert bytes(buffer) == torch.ones(4).numpy().tobytes()
    del taken, ticket
    device.copies.synchronize()
    device.device.retire()
    gc.collect()
    assert gone() is None
    assert len(device.device._late) == 0


def test_a_ticket_tells_when_time_is_up_and_what_failed(device):
    buffer = Buffer(8)
    device.copies.pace = "held"
    ticket = capture(device, buffer, Run(torch.ones(2), 0, 8, 0))
    assert not ticket.wait(0.01)
    device.copies.pace = "now"
    assert ticket.wait(20)
    device.copies.queue(lambda: 1 / 0)
    with pytest.raises(RuntimeError, match="failed"):
        capture(device, buffer, Run(torch.ones(2), 0, 8, 0)).wait(20)
    with pytest.raises(RuntimeError):
        device.close()


def test_a_shadow_is_of_the_moment_and_only_where_there_is_room(device):
    sources = [torch.arange(6.0).reshape(2, 3).t(), torch.ones(3, dtype=torch.float8_e5m2), torch.ones(2) > 0]
    device.compute.pace = "held"
    device.queue(lambda: sources[0].add_(1))
    shadows = device.device.shadow(sources)
    device.queue(lambda: sources[0].fill_(-1))
    device.compute.pace = "now"
    device.synchronize()
    assert shadows[0].tolist() == (torch.arange(6.0).reshape(2, 3).t() + 1).tolist()
    assert [s.stride() for s in shadows] == [s.stride() for s in sources]
    assert shadows[1].view(torch.uint8).tolist() == sources[1].view(torch.uint8).tolist()
    assert shadows[2].tolist() == [True, True]
    device.free = int((24 + 3 + 2) * 1.1)
    assert device.device.shadow(sources) is None
    device.free += 1
    assert device.device.shadow(sources) is not None


def test_host_memory_is_registered_in_pieces_and_refusals_are_no_error(device):
    mib = 1 << 20
    device.device.register(4096, 600 * mib)
    assert device.pinned == {4096: 256 * mib, 4096 + 256 * mib: 256 * mib, 4096 + 512 * mib: 88 * mib}
    assert device.device.registered_bytes == 600 * mib
    refused = SimulatedDevice()
    refused.register = lambda address, nbytes: address > 0 and False
    refused.device.register(4096, 600 * mib)
    assert refused.device.registered_bytes == 0
    refused.device.unregister(4096, 600 * mib)
    refused.close()
    device.device.unregister(4096, 600 * mib)
    assert device.pinned == {}
    assert device.device.registered_bytes == 0


def test_views_of_buffers_are_made_once_and_forgotten_with_the_memory(device):
    buffer = Buffer(128)
    view = device.device.host_view(buffer.address, 128)
    assert device.device.host_view(buffer.address, 128) is view
    device.device.unregister(buffer.address, 128)
    assert device.device.host_view(buffer.address, 128) is not view


# -- leaves ----------------------------------------------------------------------------------------------------------


def test_a_leaf_on_a_device_is_told_by_device_and_memory(device):
    memory = torch.arange(6.0).reshape(2, 3)
    leaf = device.hold(memory)
    assert type(leaf) is SimulatedTensor
    found = kind.host_bytes(leaf)
    assert isinstance(found, DeviceBytes)
    assert found.device is device.device
    assert found.source.data_ptr() == memory.data_ptr()
    assert (found.nbytes, found.stable) == (24, False)
    assert list(kind.addresses([leaf])) == [memory.data_ptr()]
    assert kind.sources([leaf])[0].data_ptr() == memory.data_ptr()
    assert kind.host_bytes(device.hold(memory)).alias == found.alias
    spec = kind.describe(leaf)
    assert (spec.dtype, spec.shape, spec.kind) == ("float32", (2, 3), "torch")
    assert kind.like(leaf) == spec
    back = kind.convert(torch.ones(2, 3), leaf)
    assert type(back) is SimulatedTensor
    assert back.owner is device
    kind.assign(leaf, torch.full((2, 3), 5.0))
    device.synchronize()
    assert memory.tolist() == [[5] * 3] * 2


def test_a_change_of_a_leaf_on_a_device_is_seen(device):
    base = torch.zeros(4, 6)
    fingerprint = kind.fingerprint([device.hold(base), torch.ones(2)])
    assert kind.unchanged([device.hold(torch.ones(4, 6)), torch.ones(2)], fingerprint)
    with SimulatedDevice("simulated:1") as other:
        for changed in (
            device.hold(base.int()), device.hold(base.reshape(6, 4)), device.hold(torch.zeros(6, 4).t()),
            other.hold(base),
        ):  # fmt: skip
            assert not kind.unchanged([changed, torch.ones(2)], fingerprint)


def test_only_dense_memory_of_a_device_is_taken(device):
    with pytest.raises(UnsupportedLeafError, match="contiguous"):
        kind.host_bytes(device.hold(torch.zeros(4, 6)[:, ::2]))


def test_a_device_that_pccheck_has_no_streams_for_is_copied_by_value():
    """No such device is here: a tensor stands for one that says so, and is moved by `.cpu()`."""

    class Elsewhere:
        def __init__(self, tensor):
            self.tensor = tensor
            self.is_cpu = self.is_cuda = False

        def __getattr__(self, name):
            return getattr(self.tensor, name)

        def detach(self):
            return self

        def cpu(self):
            return self.tensor.clone()

    from pccheck_torch.leaves import dense

    tensor = torch.arange(6.0).reshape(2, 3)
    for there in (tensor, tensor.t(), tensor[:, ::2]):
        found = dense.bytes_of(Elsewhere(there))
        assert (found.stable, found.alias) == (True, None)
        in_memory = there if dense.is_permuted(there) else there.contiguous()
        expected = in_memory.as_strided((there.numel(),), (1,)).tolist()
        assert list(struct.unpack(f"{there.numel()}f", ctypes.string_at(found.address, found.nbytes))) == expected


def test_a_cuda_event_is_asked_until_time_is_up():
    """torch's event cannot be had here: one that answers as it does stands for it."""
    from pccheck_torch.devices.cuda import CudaEvent

    class Recorded:
        def __init__(self, *answers):
            self.answers = list(answers)

        def query(self):
            answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
            if isinstance(answer, Exception):
                raise answer
            return answer

    assert CudaEvent(Recorded(True)).wait(0.0)
    assert not CudaEvent(Recorded(False)).wait(0.0)
    assert not CudaEvent(Recorded(False)).wait(0.01)
    assert CudaEvent(Recorded(*[False] * 9, True)).wait(20)
    with pytest.raises(RuntimeError, match="illegal address"):
        CudaEvent(Recorded(False, RuntimeError("illegal address"))).wait(20)
