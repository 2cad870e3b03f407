"""Everything that only a GPU can show, as one script of a few minutes: `pytest -s tests/gpu` on a machine with one.

Figures (stall of each mode, effect of pinned memory, speed of the gate) are printed and not judged.
"""

from __future__ import annotations

import contextlib
import gc
import time

import pytest

torch = pytest.importorskip("torch")

import pccheck_torch  # noqa: E402
from pccheck_torch import kind  # noqa: E402
from pccheck_torch.devices.cuda import CudaQueues, cuda_device  # noqa: E402
from pccheck_torch.devices.streams import StreamDevice  # noqa: E402
from pccheck_torch.leaves.kind import DTYPES, QUANTIZED  # noqa: E402

import pccheck  # noqa: E402
from pccheck.errors import ChangedError  # noqa: E402
from pccheck.leaves import DeviceBytes, HostBytes  # noqa: E402

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.filterwarnings("ignore:.*(ComplexHalf|[Ss]parse|lr_scheduler).*"),
]
Parameter = torch.nn.Parameter
MIB = 1 << 20
_SIZES = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}


def bits(tensor):
    """Give a tensor's elements as whole numbers, on the host."""
    return tensor.detach().resolve_conj().resolve_neg().cpu().contiguous().view(_SIZES[tensor.element_size()])


def same(a, b):
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(bits(a), bits(b))


def sleep(milliseconds):
    """Keep the current stream busy, for about so long."""
    cycles_per_ms = getattr(torch.cuda.get_device_properties(0), "clock_rate", 1_500_000)  # kHz
    torch.cuda._sleep(int(milliseconds * cycles_per_ms))


@contextlib.contextmanager
def checkpointer(path, **options):
    options = {"chunk_bytes": MIB, **options}
    with pccheck.Checkpointer(path, **options) as ck:
        yield ck


# -- leaves ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", sorted(set(DTYPES) - QUANTIZED))
def test_every_dtype_and_layout_comes_back(name, tmp_path):
    dtype = DTYPES[name]
    raw = torch.randint(0, 2 if dtype is torch.bool else 256, (240 * dtype.itemsize,), dtype=torch.int16)
    base = raw.to(torch.uint8).view(dtype).view(2, 3, 4, 10)
    there = base.cuda()
    state = {
        "whole": there, "channels_last": there.to("cpu").permute(0, 3, 1, 2).cuda(), "gaps": there[:, ::2, :, 1::3],
        "expanded": there[:1].expand(5, -1, -1, -1), "0-d": there[0, 0, 0, 0], "empty": there[:0], "tail": there[1:],
        "tied": there, "host": base,
    }  # fmt: skip
    with checkpointer(tmp_path) as ck:
        for step in range(3):  # by a plan, and by a cached one
            ck.save(step, state)
            ck.wait()
        back, like = ck.restore().state, ck.restore(like=state).state
    for key, value in state.items():
        assert same(back[key], value), key
        assert back[key].device.type == "cpu"
        assert same(like[key], value), key
        assert like[key].device == value.device
    assert like["tied"] is like["whole"]
    assert like["channels_last"].stride() == state["channels_last"].stride()


def test_lazy_conjugates_parameters_sparse_tensors_and_generators_come_back(tmp_path):
    z = torch.tensor([1 + 2j, 3 - 1j], device="cuda")
    g = torch.Generator("cuda").manual_seed(5)
    torch.rand(3, device="cuda", generator=g)
    state = {
        "conj": z.conj(), "neg": z.conj().imag, "p": Parameter(torch.ones(3, device="cuda")),
        "coo": torch.eye(4, device="cuda").to_sparse(), "csr": torch.eye(4, device="cuda").to_sparse_csr(), "g": g,
        "rng": torch.cuda.get_rng_state(),
    }  # fmt: skip
    with checkpointer(tmp_path) as ck:
        ck.save(1, state)
        ck.wait()
        back, like = ck.restore().state, ck.restore(like=state).state
    assert same(back["conj"], state["conj"])
    assert same(back["neg"], state["neg"])
    assert type(like["p"]) is Parameter
    assert like["p"].is_cuda
    for key in ("coo", "csr"):
        assert torch.equal(back[key].to_dense(), torch.eye(4))
        assert like[key].is_cuda
        assert torch.equal(like[key].to_dense().cpu(), torch.eye(4))
    assert torch.equal(torch.rand(4, device="cuda", generator=back["g"]), torch.rand(4, device="cuda", generator=g))
    assert torch.equal(back["rng"], state["rng"])


def test_dense_memory_is_read_in_place_and_all_else_from_a_copy_on_the_device():
    t = torch.ones(4, 6, device="cuda")
    for value, stable in ((t, False), (t.t(), False), (t[:, ::2], True), (t[:1].expand(3, 6), True)):
        found = kind.host_bytes(value)
        assert isinstance(found, DeviceBytes)
        assert found.device is cuda_device(t.device.index)
        assert found.stable is stable
        assert found.source.is_cuda
    assert isinstance(kind.host_bytes(t.cpu()), HostBytes)


def test_a_moved_or_changed_tensor_is_noticed(tmp_path):
    with checkpointer(tmp_path) as ck:
        for step, t in enumerate(
            [
                torch.ones(30, device="cuda"), torch.full((30,), 2.0, device="cuda"), torch.ones(30),
                torch.ones(30, device="cuda", dtype=torch.float64), torch.ones(5, 6, device="cuda"),
                torch.ones(6, 5, device="cuda").t(), torch.ones(30, device="cuda"),
            ]
        ):  # fmt: skip
            ck.save(step, {"t": t, "n": step})
            ck.wait()
            assert same(ck.restore().state["t"], t)


def test_live_state_is_filled_in_place(tmp_path):
    torch.manual_seed(0)
    saved = torch.nn.Conv2d(3, 8, 3).cuda().to(memory_format=torch.channels_last)
    live = torch.nn.Conv2d(3, 8, 3).cuda().to(memory_format=torch.channels_last)
    where = [p.data_ptr() for p in live.parameters()]
    with checkpointer(tmp_path) as ck:
        ck.save(1, dict(saved.state_dict()))
        ck.wait()
        ck.restore().load_into(dict(live.state_dict()))
    assert all(torch.equal(a, b) for a, b in zip(saved.parameters(), live.parameters(), strict=True))
    assert where == [p.data_ptr() for p in live.parameters()]
    assert live.weight.is_contiguous(memory_format=torch.channels_last)


# -- one step, and only one ------------------------------------------------------------------------------------------


class Training:
    """A model and an optimizer on the GPU, and copies of both after each step."""

    def __init__(self, width=256, **how):
        torch.manual_seed(0)
        self.model = torch.nn.Sequential(
            *(torch.nn.Linear(width, width) for _ in range(4)), torch.nn.BatchNorm1d(width)
        )
        self.model.cuda()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2, **how)
        self.inputs = torch.randn(32, width, device="cuda")
        self.count, self.expected = 0, {}
        self.step()

    def backward(self):
        self.optimizer.zero_grad(set_to_none=False)
        self.model(self.inputs).square().mean().backward()

    def step(self):
        self.backward()
        self.optimizer.step()
        self.count += 1

    def note(self):
        """Copy the state, in order with everything else, so that a checkpoint of this moment can be judged."""
        self.expected[self.count] = [t.detach().clone() for t in self.tensors()]

    def tensors(self):
        moments = [v for s in self.optimizer.state.values() for v in s.values()]
        return [*self.model.state_dict().values(), *moments]

    def state(self):
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict(), "step": self.count}

    def is_whole(self, restored):
        state = restored.state
        moments = [v for s in state["optimizer"]["state"].values() for v in s.values()]
        found = [*state["model"].values(), *moments]
        return state["step"] == restored.step and all(
            same(a, b.cpu()) for a, b in zip(found, self.expected.pop(restored.step), strict=True)
        )


MODES = ["copy", "lazy", "device", "auto"]


@pytest.mark.parametrize("how", [{}, {"fused": True}, {"foreach": False}], ids=["foreach", "fused", "single"])
@pytest.mark.parametrize("mode", MODES)
def test_200_rounds_of_save_and_step_at_once_are_each_of_one_step(mode, how, tmp_path):
    training, whole, rounds = Training(**how), 0, 200 if not how else 40
    with checkpointer(tmp_path, in_flight=2, keep=12, snapshot=mode) as ck:
        attached = pccheck_torch.attach(ck, training.optimizer) if mode in ("lazy", "auto") else None
        for round_ in range(rounds):
            training.note()
            ck.save(training.count, training.state())
            training.step()
            if round_ % 10 == 9:
                ck.wait()
                whole += sum(training.is_whole(ck.restore(step=s, branch=False)) for s in ck.steps()[-10:])
        if attached is not None:
            attached.detach()
    assert whole == rounds


def slow_copies(milliseconds):
    """Let the next copies off the device come late."""
    with torch.cuda.stream(cuda_device(0).queues.side()._stream):
        sleep(milliseconds)


@pytest.mark.parametrize("event", [True, False])
@pytest.mark.parametrize("mode", ["copy", "lazy", "device"])
def test_without_the_event_a_step_that_still_runs_is_torn(mode, event, tmp_path, monkeypatch):
    if not event:
        monkeypatch.setattr(StreamDevice, "after_program", lambda self, side: None)
    training, whole = Training(), []
    with checkpointer(tmp_path, snapshot=mode) as ck:
        attached = pccheck_torch.attach(ck, training.optimizer) if mode == "lazy" else None
        ck.save(0, training.state())  # pins the pool, which may wait for the device
        ck.wait()
        for _ in range(3):
            training.backward()
            torch.cuda.synchronize()
            sleep(300)  # the step's kernels wait behind this
            training.optimizer.step()
            training.count += 1
            training.note()
            ck.save(training.count, training.state())
            ck.wait()
            whole.append(training.is_whole(ck.restore(branch=False)))
        if attached is not None:
            attached.detach()
    assert whole == [event] * 3


@pytest.mark.parametrize("gate", [True, False])
def test_without_the_gate_the_next_step_is_in_the_checkpoint(gate, tmp_path, monkeypatch):
    training, whole, blocked = Training(), [], []
    # Without counters and buffers, which save() would wait for.
    with checkpointer(tmp_path) as ck, pccheck_torch.attach(ck, training.optimizer):
        if not gate:
            monkeypatch.setattr(pccheck_torch.lazy.Attachment, "gate", lambda self, owner: None)
        parameters = list(training.model.parameters())
        ck.save(0, [p.detach() for p in parameters])  # pins the pool, which may wait for the device
        ck.wait()
        for _ in range(3):
            expected = [p.detach().clone() for p in parameters]
            torch.cuda.synchronize()
            slow_copies(300)
            ck.save(training.count, [p.detach() for p in parameters])
            training.backward()
            began = time.perf_counter()
            training.optimizer.step()
            blocked.append(time.perf_counter() - began)
            training.count += 1
            ck.wait()
            found = ck.restore(branch=False).state
            whole.append(all(same(a, b) for a, b in zip(found, expected, strict=True)))
    assert whole == [gate] * 3
    print(f"\nstep() behind copies that take 300 ms, gate={gate}: blocked {max(blocked) * 1e3:.1f} ms on the host")


def test_a_change_behind_the_back_of_the_gate_is_named_in_debug_mode(tmp_path):
    training = Training()
    with checkpointer(tmp_path) as ck, pccheck_torch.attach(ck, training.optimizer, debug=True):
        ck.save(training.count, {"model": training.model.state_dict()})
        with torch.no_grad():
            training.model[0].weight.add_(1)
        training.backward()
        with pytest.raises(ChangedError, match=r"0\.weight"):
            training.optimizer.step()


def test_a_graph_that_holds_the_step_needs_the_explicit_fence(tmp_path):
    training = Training(capturable=True)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            training.step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    training.optimizer.zero_grad(set_to_none=False)
    with torch.cuda.graph(graph):
        training.step()
    whole = []
    with checkpointer(tmp_path, keep=12, snapshot="lazy") as ck:
        for step in range(1, 11):
            training.count = step
            training.note()
            ck.save(step, training.state())
            ck.fence()
            graph.replay()
        ck.wait()
        for step in ck.steps():
            whole.append(training.is_whole(ck.restore(step=step, branch=False)))
    assert whole == [True] * 10


def test_a_scaler_that_skips_and_one_that_steps(tmp_path):
    training, scaler = Training(), torch.amp.GradScaler("cuda", init_scale=2.0**40, growth_interval=2)
    whole, scales = [], []
    with checkpointer(tmp_path, keep=40) as ck, pccheck_torch.attach(ck, training.optimizer):
        for step in range(1, 31):
            training.count = step
            training.note()
            ck.save(step, {**training.state(), "scaler": scaler.state_dict()})
            scales.append(scaler.get_scale())
            training.optimizer.zero_grad()
            with torch.autocast("cuda", dtype=torch.float16):
                loss = training.model(training.inputs).square().mean()
            scaler.scale(loss).backward()
            scaler.step(training.optimizer)
            scaler.update()
        ck.wait()
        for step in ck.steps():
            found = ck.restore(step=step, branch=False)
            assert found.state["scaler"]["scale"] == scales[step - 1]
            whole.append(training.is_whole(found))
    assert whole == [True] * 30
    assert len(set(scales)) > 1, "no step was skipped"


def test_a_save_on_another_stream_comes_after_what_that_stream_was_given(tmp_path):
    tensor, stream = torch.zeros(1 << 18, device="cuda"), torch.cuda.Stream()
    torch.cuda.synchronize()
    with checkpointer(tmp_path) as ck:
        for step in range(1, 4):
            with torch.cuda.stream(stream):
                sleep(100)
                tensor.fill_(step)
                ck.save(step, [tensor])
            ck.wait()
            assert float(ck.restore().state[0].min()) == float(ck.restore().state[0].max()) == step


def test_memory_of_a_temporary_is_not_given_away_before_it_was_copied(tmp_path):
    base = torch.ones(512, 1024, device="cuda")
    with checkpointer(tmp_path, snapshot="lazy") as ck:
        for step in range(1, 6):
            base.fill_(step)
            slow_copies(50)
            ck.save(step, [base[:, ::2]])  # a copy on the device, which only the capture holds
            gc.collect()
            for _ in range(4):
                torch.full((512, 512), -1.0, device="cuda")  # what the allocator would give that memory to
            ck.fence()
            ck.wait()
            assert bool((ck.restore().state[0] == step).all())


# -- memory and speed ------------------------------------------------------------------------------------------------


def large(mib):
    return {f"w{i}": torch.randn(MIB, device="cuda") for i in range(mib // 4)}


@pytest.mark.parametrize("mode", ["copy", "lazy", "device"])
def test_memory_on_the_device_is_bounded_and_given_back(mode, tmp_path):
    state = large(256)
    with checkpointer(tmp_path, snapshot=mode, chunk_bytes=16 * MIB) as ck:
        ck.save(0, state)
        ck.wait()
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        for step in range(1, 6):
            ck.save(step, state)
            ck.fence()
        ck.wait()
        peak = torch.cuda.max_memory_allocated() - before
        ck.save(9, {"small": torch.ones(3, device="cuda")})
        ck.wait()
        gc.collect()
        assert torch.cuda.memory_allocated() - before < MIB
    assert peak <= (256 * MIB * 1.1 if mode == "device" else MIB)


def test_without_room_for_a_shadow_copy_takes_its_place(tmp_path, monkeypatch):
    monkeypatch.setattr(CudaQueues, "free_bytes", lambda self: 0)
    heard, state = [], large(64)
    with checkpointer(tmp_path, snapshot="device", observer=heard.append) as ck:
        ck.save(1, state)
        ck.wait()
        back = ck.restore().state
    assert all(same(back[k], v) for k, v in state.items())
    assert any(isinstance(e, pccheck.events.SnapshotPicked) and e.mode == "copy" for e in heard)


def test_what_pinned_memory_brings(tmp_path):
    """Print how fast a capture is with and without cudaHostRegister; it must be right in both."""
    state, nbytes = large(512), 512 * MIB
    figures = {}
    for pinned in (True, False):
        with pytest.MonkeyPatch.context() as patch:
            if not pinned:
                patch.setattr(CudaQueues, "register", lambda self, address, n: False)
            with checkpointer(tmp_path / str(pinned), chunk_bytes=16 * MIB, buffer_bytes=nbytes) as ck:
                ck.save(0, state)
                ck.wait()
                registered = cuda_device(0).registered_bytes
                assert (registered > 0) is pinned
                torch.cuda.synchronize()
                began = time.perf_counter()
                ck.save(1, state)  # copy mode: returns when it was captured
                figures[pinned] = nbytes / (time.perf_counter() - began) / 1e9
                ck.wait()
                back = ck.restore().state
                assert all(same(back[k], v) for k, v in state.items())
        assert cuda_device(0).registered_bytes == 0
    print(f"\ncapture of 512 MiB: {figures[True]:.1f} GB/s pinned, {figures[False]:.1f} GB/s pageable")


def test_a_refused_registration_leaves_no_error_behind(tmp_path):
    queues = CudaQueues(0)
    assert not queues.register(4096, 1 << 20)  # nobody's memory
    torch.ones(3, device="cuda").add_(1)
    torch.cuda.synchronize()


def test_what_each_mode_costs(tmp_path):
    """Print the stall of save() and of the step behind it, for many small and few large tensors."""
    for name, count, elements in (("64 x 4 MiB", 64, MIB), ("3,000 x 87 KiB", 3000, 22272)):
        parameters = [Parameter(torch.randn(elements, device="cuda")) for _ in range(count)]
        optimizer = torch.optim.AdamW(parameters, lr=1e-3)
        for p in parameters:
            p.grad = torch.ones_like(p)
        optimizer.step()
        state = {"p": [p.detach() for p in parameters], "m": optimizer.state_dict()}
        for mode in MODES:
            with checkpointer(tmp_path / f"{count}{mode}", snapshot=mode, chunk_bytes=16 * MIB) as ck:
                attached = pccheck_torch.attach(ck, optimizer) if mode in ("lazy", "auto") else None
                saves, steps = [], []
                for step in range(8):
                    torch.cuda.synchronize()
                    began = time.perf_counter()
                    ck.save(step, state)
                    saved = time.perf_counter()
                    time.sleep(0.05)  # forward and backward
                    gated = time.perf_counter()
                    optimizer.step()
                    torch.cuda.synchronize()
                    steps.append(time.perf_counter() - gated)
                    saves.append(saved - began)
                    ck.wait()
                if attached is not None:
                    attached.detach()
                print(
                    f"\n{name}, {mode:6}: save() {sorted(saves)[4] * 1e3:.1f} ms, the step behind it "
                    f"{sorted(steps)[4] * 1e3:.1f} ms"
                )
                back = ck.restore().state
                assert len(back["p"]) == count
        del parameters, optimizer, state
        torch.cuda.empty_cache()
