"""Lazy capture off a device whose streams run late: what the device's order does, and what debug sees there."""

from __future__ import annotations

import pytest

import pccheck

torch = pytest.importorskip("torch")
pccheck_torch = pytest.importorskip("pccheck_torch")
from pccheck_torch.devices.simulated import SimulatedDevice  # noqa: E402
from pccheck_torch.devices.streams import CaptureOnStream  # noqa: E402

CHUNK = 16384
WAIT_S = 60.0


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


class Training:
    """SGD on a device: each step is queued, as kernels are."""

    def __init__(self, device):
        self.device = device
        self.parameter = torch.zeros(10_000, requires_grad=True)
        self.optimizer = torch.optim.SGD([self.parameter], lr=1.0)
        self.leaf = device.hold(self.parameter.detach())

    def _step(self):
        self.parameter.grad = torch.full_like(self.parameter, -1.0)
        self.optimizer.step()

    def step(self):
        """Add 1 to every element, later."""
        self.device.queue(self._step)

    def attach(self, ck):
        """Attach; the hook would run where the step runs, in the device's thread: the program calls the gate itself."""
        attached = pccheck_torch.attach(ck, self.optimizer)
        self.optimizer._optimizer_step_pre_hooks.clear()
        return attached


@pytest.mark.parametrize("orders", [True, False])
def test_it_is_the_order_on_the_device_that_keeps_the_step_behind_the_copies(tmp_path, monkeypatch, orders):
    """The gate waits on the host only until copies are queued: without the order on the device that is not enough."""
    if not orders:
        monkeypatch.setattr(CaptureOnStream, "order", lambda self, timeout_s: True)
    with SimulatedDevice() as device:
        training = Training(device)
        with pccheck.Checkpointer(tmp_path, chunk_bytes=CHUNK) as ck:
            attached = training.attach(ck)
            training.step()
            device.synchronize()
            device.copies.pace = "held"
            save = ck.save(1, {"w": training.leaf})
            attached.gate(0)
            assert not save.captured.done()
            training.step()
            if not orders:
                device.compute.synchronize()
            device.copies.pace = "now"
            save.durable.result(WAIT_S)
            found = set(ck.restore().state["w"].unique().tolist())
            assert found == ({1.0} if orders else {2.0})


def test_debug_names_a_leaf_that_changed_on_the_device(tmp_path):
    with SimulatedDevice() as device:
        training = Training(device)
        with pccheck.Checkpointer(tmp_path, chunk_bytes=CHUNK, debug_captures=True) as ck:
            attached = training.attach(ck)
            ck.save(1, {"w": training.leaf})
            attached.gate(0)
            training.step()
            ck.save(2, {"w": training.leaf})
            training.step()
            with pytest.raises(pccheck.errors.ChangedError, match=r"step 2 .*: w"):
                attached.gate(0)
