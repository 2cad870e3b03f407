"""Snapshots of leaves on a device are of one moment: both orders hold, and each one's removal is caught.

A real AdamW runs on the simulated device: what a step does is queued, and done as late as the test says.
"""

from __future__ import annotations

import copy

import pytest

torch = pytest.importorskip("torch")

import pccheck_torch  # noqa: E402
from pccheck_torch.devices.simulated import SimulatedDevice  # noqa: E402
from pccheck_torch.devices.streams import StreamDevice  # noqa: E402

import pccheck  # noqa: E402
from pccheck.testing.simulated import SimulatedVolume  # noqa: E402

SHAPES = [(64, 32), (300,), (7, 11), (2048,)]


class Queued(torch.optim.Optimizer):
    """An optimizer whose steps are queued on a device, as those of CUDA tensors are."""

    def __init__(self, device, inner):
        self.device, self.inner = device, inner
        super().__init__([p for g in inner.param_groups for p in g["params"]], {})
        self.state = inner.state

    def step(self, closure=None):
        self.device.queue(self.inner.step)


def gradients(parameters, step):
    for i, p in enumerate(parameters):
        p.grad = torch.full_like(p, float((step * 7 + i) % 5 - 2))


class Training:
    """Parameters and an AdamW on a simulated device, and what both must be after each step."""

    def __init__(self, device):
        torch.manual_seed(0)
        self.device = device
        self.parameters = [torch.nn.Parameter(torch.randn(shape)) for shape in SHAPES]
        self.reference = [torch.nn.Parameter(p.detach().clone()) for p in self.parameters]
        self.inner = torch.optim.AdamW(self.parameters, lr=0.1)
        self.of_reference = torch.optim.AdamW(self.reference, lr=0.1)
        self.optimizer = Queued(device, self.inner)
        self.count, self.expected = 0, {}
        self.step()  # makes the moments
        device.synchronize()

    def queue_backward(self):
        self.device.queue(lambda step=self.count: gradients(self.parameters, step))

    def step(self):
        self.queue_backward()
        self.optimizer.step()
        gradients(self.reference, self.count)
        self.of_reference.step()
        self.count += 1
        self.expected[self.count] = copy.deepcopy(self.leaves(self.reference, self.of_reference))

    @staticmethod
    def leaves(parameters, optimizer):
        moments = [{k: v for k, v in optimizer.state[p].items() if k != "step"} for p in parameters]
        return {"parameters": [p.detach() for p in parameters], "moments": moments}

    def state(self, *, counters=True):
        found = self.leaves(self.parameters, self.inner)
        hold = self.device.hold
        state = {
            "parameters": list(map(hold, found["parameters"])),
            "moments": [{k: hold(v) for k, v in m.items()} for m in found["moments"]],
        }
        if counters:  # of one element: changed by a step like the others, but captured by value
            state["counters"] = [hold(self.inner.state[p]["step"]) for p in self.parameters]
        return state

    def is_whole(self, restored):
        """Tell whether what was restored is the state after its step, and after no other."""
        state, expected = restored.state, self.expected[restored.step]
        same = all(torch.equal(a, b) for a, b in zip(state["parameters"], expected["parameters"], strict=True))
        for mine, wanted in zip(state["moments"], expected["moments"], strict=True):
            same &= all(torch.equal(mine[k], wanted[k]) for k in wanted)
        return same and all(float(c) == restored.step for c in state.get("counters", []))


MODES = ["copy", "lazy", "device", "auto"]


@pytest.mark.parametrize("mode", MODES)
def test_200_rounds_of_save_and_step_at_once_are_each_of_one_step(mode):
    """In memory, where 200 checkpoints cost no syncs; so through the portable pipeline."""
    rounds, volume = 200, SimulatedVolume()
    assert whole_rounds(volume, mode, rounds) == rounds


@pytest.mark.parametrize("mode", MODES)
def test_rounds_through_native_threads_and_a_real_folder_are_each_of_one_step(mode, tmp_path):
    assert whole_rounds(tmp_path, mode, 20) == 20


def whole_rounds(directory, mode, rounds):
    """Save right after a step and step at once, again and again; count the checkpoints that are of their step alone."""
    with SimulatedDevice() as device:
        training = Training(device)
        device.compute.pace = "when_needed"
        with pccheck.Checkpointer(directory, in_flight=2, keep=rounds, chunk_bytes=4096, snapshot=mode) as ck:
            attachment = pccheck_torch.attach(ck, training.optimizer) if mode in ("lazy", "auto") else None
            for _ in range(rounds):
                ck.save(training.count, training.state())
                training.step()
            ck.wait()
            assert len(ck.steps()) == rounds
            if attachment is not None:
                attachment.detach()
            return sum(training.is_whole(ck.restore(step=step, branch=False)) for step in ck.steps())


def torn(tmp_path, *, event, gate, late, mode="lazy", rounds=3):
    """Count the rounds whose checkpoint is not the state after its step."""
    bad = 0
    with pytest.MonkeyPatch.context() as patch, SimulatedDevice() as device:
        training = Training(device)
        if not event:
            patch.setattr(StreamDevice, "after_program", lambda self, side: None)
        with pccheck.Checkpointer(tmp_path, keep=1, chunk_bytes=1 << 14, snapshot=mode) as ck:
            attachment = pccheck_torch.attach(ck, training.optimizer) if mode == "lazy" else None
            if not gate:
                patch.setattr(pccheck_torch.lazy.Attachment, "gate", lambda self, owner: None)
            device.compute.pace = "when_needed" if late == "compute" else "now"
            for _ in range(rounds):
                training.step()
                if late == "copies":
                    device.compute.synchronize()
                    device.copies.pace = "held"
                step = training.count
                ck.save(step, training.state(counters=False))
                training.step()
                if late == "copies" and not gate:
                    device.compute.synchronize()  # the next step is done before anything was copied
                device.copies.pace = "now"
                ck.wait()
                found = ck.restore(branch=False)
                assert found.step == step
                bad += not training.is_whole(found)
            if attachment is not None:
                attachment.detach()
    return bad


@pytest.mark.parametrize("late", ["copies", "compute"])
@pytest.mark.parametrize("gate", [True, False])
@pytest.mark.parametrize("event", [True, False])
def test_the_event_and_the_gate_are_both_needed(event, gate, late, tmp_path):
    """Which of the two is needed depends on which side is late; without it every snapshot is torn, with it none."""
    expected = 3 if (late == "copies" and not gate) or (late == "compute" and not event) else 0
    assert torn(tmp_path, event=event, gate=gate, late=late) == expected


@pytest.mark.parametrize("mode", ["copy", "device"])
def test_the_event_is_needed_in_every_mode(mode, tmp_path):
    assert torn(tmp_path / "a", event=True, gate=True, late="compute", mode=mode) == 0
    assert torn(tmp_path / "b", event=False, gate=True, late="compute", mode=mode) == 3


def test_the_gate_orders_the_device_and_does_not_block_the_program(tmp_path):
    """All copies are queued but none was made: the step is queued behind them, and `step()` has returned."""
    with SimulatedDevice() as device:
        training = Training(device)
        with pccheck.Checkpointer(tmp_path, chunk_bytes=1 << 14) as ck:
            with pccheck_torch.attach(ck, training.optimizer):
                device.copies.pace = "held"
                ck.save(training.count, training.state(counters=False))
                training.step()
                assert not device.compute.record().wait(0.05)
                device.copies.pace = "now"
                device.synchronize()
                ck.wait()
                assert training.is_whole(ck.restore())


def test_a_pool_smaller_than_the_state_makes_the_gate_wait_for_buffers(tmp_path):
    with SimulatedDevice(copy_lag_s=0.001) as device:
        training = Training(device)
        with pccheck.Checkpointer(tmp_path, chunk_bytes=4096, buffer_bytes=8192, keep=20) as ck:
            with pccheck_torch.attach(ck, training.optimizer):
                steps = []
                for _ in range(10):
                    steps.append(training.count)
                    ck.save(training.count, training.state())
                    training.step()
                ck.wait()
            for step in steps:
                assert training.is_whole(ck.restore(step=step, branch=False))


def test_a_state_in_host_memory_and_on_two_devices_is_of_one_step(tmp_path):
    with SimulatedDevice("simulated:0") as one, SimulatedDevice("simulated:1") as two:
        one.compute.pace = two.compute.pace = "when_needed"
        a, b, host = torch.zeros(3000), torch.zeros(500), torch.zeros(100)
        with pccheck.Checkpointer(tmp_path, chunk_bytes=4096, keep=20) as ck:
            for step in range(1, 11):
                one.queue(lambda step=step: a.fill_(step))
                two.queue(lambda step=step: b.fill_(step))
                host.fill_(step)
                ck.save(step, {"a": one.hold(a), "h": host, "b": two.hold(b), "tied": one.hold(a), "n": step})
            ck.wait()
            for step in range(1, 11):
                state = ck.restore(step=step, branch=False).state
                assert {float(state[k].min()) for k in "ahb"} == {float(state[k].max()) for k in "ahb"} == {float(step)}
                assert state["tied"] is state["a"]


def test_a_device_that_fails_fails_the_save_and_no_other(tmp_path):
    with pytest.raises(RuntimeError):
        with SimulatedDevice() as device, pccheck.Checkpointer(tmp_path, chunk_bytes=4096, on_error="warn") as ck:
            tensor = torch.ones(3000)
            ck.save(1, [device.hold(tensor)])
            ck.wait()
            device.copies.queue(lambda: 1 / 0)
            failed = ck.save(2, [device.hold(tensor)])
            with pytest.warns(RuntimeWarning, match="failed"):
                ck.wait()
            assert failed.outcome == "failed"
            assert ck.restore(branch=False).step == 1
            ck.save(3, [tensor]).durable.result(30)
            assert ck.restore(branch=False).step == 3
