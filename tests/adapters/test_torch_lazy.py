"""Lazy capture under training loops: every hook that torch has, and who owns which memory."""

from __future__ import annotations

import copy
import gc
import warnings

import numpy as np
import pytest

import pccheck
from pccheck.errors import ChangedError, DeadlineError, MediumError, UsageError
from pccheck.storage.directory import Directory
from pccheck.testing.faults import FOREVER, Fault, FaultyVolume, Script
from pccheck.testing.throttle import Rate, ThrottledVolume

torch = pytest.importorskip("torch")
pccheck_torch = pytest.importorskip("pccheck_torch")
from pccheck_torch.lazy import NOBODY, Attachment  # noqa: E402
from torch import nn  # noqa: E402

CHUNK = 4096
WAIT_S = 60.0
SLOW = 512 << 10  # bytes per second: a state of 20 chunks takes 160 ms, thousands of times longer than a step


@pytest.fixture(autouse=True)
def one_thread():
    torch.manual_seed(0)
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def slow(directory, rate=SLOW, **options):
    """Open a store on slow storage, with a pool of two chunks: a capture takes as long as its writes."""
    volume = ThrottledVolume(Directory(str(directory), create=True, write=True), total=Rate.steady(rate))
    return pccheck.Checkpointer(volume, **{"chunk_bytes": CHUNK, "buffer_bytes": 2 * CHUNK, **options})


def make_model():
    return nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 1))


def make_loss(model):
    return model(torch.randn(8, 32)).square().mean()


def states(model, *optimizers):
    return {"model": model.state_dict(), "optimizers": [o.state_dict() for o in optimizers]}


def assert_same(found, expected, path=""):
    if isinstance(expected, torch.Tensor):
        assert torch.equal(found, expected), f"{path} is of another step"
    elif isinstance(expected, dict):
        assert found.keys() == expected.keys(), path
        for key, value in expected.items():
            assert_same(found[key], value, f"{path}/{key}")
    elif isinstance(expected, (list, tuple)):
        assert len(found) == len(expected), path
        for i, (a, b) in enumerate(zip(found, expected, strict=True)):
            assert_same(a, b, f"{path}/{i}")
    else:
        assert found == expected, path


class Run:
    """One save with something done at once after it; what is restored must be what was saved."""

    def __init__(self, ck, model, *optimizers):
        self.ck, self.model, self.optimizers = ck, model, optimizers

    def __call__(self, action, step=1):
        state = states(self.model, *self.optimizers)
        expected = copy.deepcopy(state)
        save = self.ck.save(step, state)
        action()
        assert save.durable.result(WAIT_S) == step
        assert_same(self.ck.restore(step, branch=False).state, expected)
        return save


def warm(model, optimizer):
    """Make a step, so that the optimizer has its state."""
    make_loss(model).backward()
    optimizer.step()
    make_loss(model).backward()


@pytest.fixture
def gates(monkeypatch):
    """Give the owners whose gates were passed, in order."""
    passed, gate = [], Attachment.gate

    def noting(self, owner):
        passed.append(owner)
        gate(self, owner)

    monkeypatch.setattr(Attachment, "gate", noting)
    return passed


def weights(model):
    return torch.cat([p.detach().flatten() for p in model.parameters()])


# -- the table of hooks -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["foreach", "fused", "single"])
def test_a_step_waits_and_what_is_restored_is_of_one_step(tmp_path, gates, kind):
    model = make_model()
    options = {"foreach": kind == "foreach", "fused": kind == "fused"}
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, **options)
    warm(model, optimizer)
    with slow(tmp_path) as ck, pccheck_torch.attach(ck, optimizer):
        before = weights(model)
        Run(ck, model, optimizer)(optimizer.step)
        assert not torch.equal(weights(model), before)
        assert gates == [0]
        assert ck.stats().fence_wait_s > 0


def test_without_the_gate_the_same_is_torn(tmp_path):
    """What the tests here would see if the hook did nothing: parts of two steps."""
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    warm(model, optimizer)
    with slow(tmp_path) as ck, pccheck_torch.attach(ck, optimizer) as attachment:
        for handle in attachment._handles:
            handle.remove()
        with pytest.raises(AssertionError, match="is of another step"):
            Run(ck, model, optimizer)(optimizer.step)


def test_gradient_accumulation_waits_once_per_step(tmp_path, gates):
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    warm(model, optimizer)

    def three_batches():
        for _ in range(3):
            make_loss(model).backward()
        assert gates == []
        optimizer.step()

    with slow(tmp_path) as ck, pccheck_torch.attach(ck, optimizer):
        Run(ck, model, optimizer)(three_batches)
        assert gates == [0]


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("finite", [True, False])
def test_grad_scaler(tmp_path, gates, finite, fused):
    """With inf no step is made: unfused the hook is not called, fused the kernel skips; the parameters stay."""
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=fused)
    warm(model, optimizer)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)

    def step():
        optimizer.zero_grad()
        scaler.scale(make_loss(model)).backward()
        if not finite:
            next(model.parameters()).grad.fill_(float("inf"))
        scaler.step(optimizer)
        scaler.update()

    with slow(tmp_path) as ck, pccheck_torch.attach(ck, optimizer):
        before = weights(model)
        Run(ck, model, optimizer)(step)
        assert torch.equal(weights(model), before) == (not finite)
        assert gates == ([0] if finite or fused else [])


def test_a_gate_that_raises_leaves_the_parameters(tmp_path, monkeypatch):
    """Storage that hangs: the deadline is told in the step, before anything was changed; it can be repeated."""
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    warm(model, optimizer)
    with slow(tmp_path) as ck, pccheck_torch.attach(ck, optimizer):
        fence = ck._flight.fence
        with monkeypatch.context() as patch:
            patch.setattr(ck._flight, "fence", lambda timeout_s, owner: fence(0.001, owner))
            state = copy.deepcopy(states(model, optimizer))
            ck.save(1, states(model, optimizer))
            with pytest.raises(DeadlineError):
                optimizer.step()
            assert_same(states(model, optimizer), state)
        optimizer.step()
        ck.wait(WAIT_S)
        assert_same(ck.restore().state, state)


def test_a_save_that_failed_is_no_reason_not_to_step(tmp_path):
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    warm(model, optimizer)
    script = Script()
    volume = FaultyVolume(Directory(str(tmp_path), create=True, write=True), script)
    ck = pccheck.Checkpointer(volume, chunk_bytes=CHUNK)
    with pccheck_torch.attach(ck, optimizer):
        ck.save(1, states(model, optimizer)).durable.result(WAIT_S)
        script.arm(Fault("write", times=FOREVER))
        failed = ck.save(2, states(model, optimizer))
        before = weights(model)
        optimizer.step()
        assert not torch.equal(weights(model), before)
        assert isinstance(failed.durable.exception(WAIT_S), MediumError)
        with pytest.raises(MediumError):
            ck.wait(WAIT_S)
        script.arm()
        ck.close()
        optimizer.step()  # nothing is captured any more


def test_a_subclass_that_calls_super_passes_the_gate_twice(tmp_path, gates):
    class Clipped(torch.optim.AdamW):
        def step(self, closure=None):
            nn.utils.clip_grad_norm_(self.param_groups[0]["params"], 1.0)
            return super().step(closure)

    model = make_model()
    optimizer = Clipped(model.parameters(), lr=0.1)
    warm(model, optimizer)
    with slow(tmp_path) as ck, pccheck_torch.attach(ck, optimizer):
        Run(ck, model, optimizer)(optimizer.step)
        assert gates == [0, 0]


def test_lbfgs_with_its_closure(tmp_path, gates):
    """Its state has lists of tensors, and grows from step to step."""
    model = make_model()
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3, history_size=4)
    batch = torch.randn(8, 32)

    def closure():
        optimizer.zero_grad()
        loss = model(batch).square().mean()
        loss.backward()
        return loss

    optimizer.step(closure)
    with slow(tmp_path) as ck, pccheck_torch.attach(ck, optimizer):
        for step in (1, 2):
            before = weights(model)
            Run(ck, model, optimizer)(lambda: optimizer.step(closure), step)
            assert not torch.equal(weights(model), before)
        assert gates == [0, 0]


@pytest.mark.parametrize("place", ["closure", "hook"])
def test_a_save_within_a_step_gets_what_it_is_about_to_change_by_value(tmp_path, place):
    """The gate was passed by then: nothing else would keep the step from changing what is being captured."""
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    warm(model, optimizer)
    with slow(tmp_path) as ck, pccheck_torch.attach(ck, optimizer) as attachment:
        expected = {}

        def save(*_):
            expected.update(copy.deepcopy(states(model, optimizer)))
            ck.save(1, states(model, optimizer))
            return make_loss(model)

        if place == "closure":
            optimizer.step(save)
        else:
            handle = optimizer.register_step_pre_hook(lambda *_: save() and None)
            optimizer.step()
            handle.remove()
        ck.wait(WAIT_S)
        assert_same(ck.restore(1, branch=False).state, expected)
        assert max(owners(attachment, *model.parameters())) == 0, "between steps they are the optimizer's again"
        Run(ck, model, optimizer)(optimizer.step, 2)


def test_a_step_that_raises_leaves_saves_by_value(tmp_path):
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    warm(model, optimizer)
    with slow(tmp_path) as ck, pccheck_torch.attach(ck, optimizer) as attachment:
        with pytest.raises(ZeroDivisionError):
            optimizer.step(lambda: 1 / 0)
        assert set(owners(attachment, *model.parameters())) == {NOBODY}
        Run(ck, model, optimizer)(optimizer.step)
        assert max(owners(attachment, *model.parameters())) == 0


def test_a_step_wrapped_by_a_scheduler(tmp_path, gates):
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    warm(model, optimizer)
    scheduler.step()
    with slow(tmp_path) as ck, pccheck_torch.attach(ck, optimizer):
        rate = optimizer.param_groups[0]["lr"]
        Run(ck, model, optimizer)(lambda: (optimizer.step(), scheduler.step()))
        assert optimizer.param_groups[0]["lr"] == rate / 2
        assert gates == [0]


def test_optimizers_in_backward(tmp_path, gates):
    """One optimizer per parameter, stepped within backward: each waits for its own."""
    model = make_model()
    optimizers = {p: torch.optim.AdamW([p], lr=0.1) for p in model.parameters()}

    def update(parameter):
        optimizers[parameter].step()
        optimizers[parameter].zero_grad()

    for p in optimizers:
        p.register_post_accumulate_grad_hook(update)
    make_loss(model).backward()
    with slow(tmp_path) as ck, pccheck_torch.attach(ck, *optimizers.values()):
        Run(ck, model, *optimizers.values())(lambda: make_loss(model).backward())
        assert sorted(gates) == list(range(len(optimizers)))


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_compiled_step(tmp_path, gates, backend):
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=torch.tensor(0.1))
    warm(model, optimizer)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with slow(tmp_path) as ck, pccheck_torch.attach(ck, optimizer):
            step = torch.compile(lambda: optimizer.step(), backend=backend)
            for i in range(3):
                before = weights(model)
                Run(ck, model, optimizer)(step, i)
                assert not torch.equal(weights(model), before)
            assert gates == [0, 0, 0]
            assert ck._flight.snapshots.guard._stepping == frozenset(), "the end of the step was seen, too"
    torch._dynamo.reset()


def test_a_full_graph_refuses_the_hook_and_takes_an_explicit_fence(tmp_path):
    """fullgraph=True leaves no place for a hook: torch says so before anything is changed; `ck.fence()` does it."""
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    warm(model, optimizer)

    def update(parameters, gradients):
        for p, g in zip(parameters, gradients, strict=True):
            p.sub_(g, alpha=0.1)

    with warnings.catch_warnings(), slow(tmp_path) as ck, pccheck_torch.attach(ck, optimizer):
        warnings.simplefilter("ignore")
        before = weights(model)
        with pytest.raises(torch._dynamo.exc.Unsupported):
            torch.compile(lambda: optimizer.step(), backend="eager", fullgraph=True)()
        assert torch.equal(weights(model), before)
        whole = torch.compile(update, backend="eager", fullgraph=True)
        live = [p.detach() for p in model.parameters()]
        gradients = [p.grad for p in model.parameters()]

        def step():
            assert ck.fence() > 0
            whole(live, gradients)

        Run(ck, model, optimizer)(step)
        assert not torch.equal(weights(model), before)
    torch._dynamo.reset()


def test_get_state_dict_of_a_fresh_optimizer_steps_it(tmp_path, gates):
    from torch.distributed.checkpoint.state_dict import get_state_dict

    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    with slow(tmp_path) as ck, pccheck_torch.attach(ck, optimizer):
        save = ck.save(1, states(model, optimizer))
        expected = copy.deepcopy(states(model, optimizer))
        get_state_dict(model, optimizer)
        assert gates == [0]
        save.durable.result(WAIT_S)
        assert_same(ck.restore().state, expected)


def test_buffers_that_forward_changes_are_saved_by_value(tmp_path):
    """BatchNorm's statistics change in forward, before any gate, and do not even count it in `_version`."""
    model = nn.Sequential(nn.Linear(32, 64), nn.BatchNorm1d(64), nn.Linear(64, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    warm(model, optimizer)

    with slow(tmp_path) as ck, pccheck_torch.attach(ck, optimizer):
        before = model[1].running_mean.clone()
        save = Run(ck, model, optimizer)(lambda: make_loss(model))
        assert not torch.equal(model[1].running_mean, before)
        assert ck.stats().fence_wait_s == 0, "nobody waited: forward changes nothing that is captured lazily"
        assert save.captured.done()


def test_everything_that_no_optimizer_has_is_saved_by_value(tmp_path):
    """EMA, RNG, 0-d counters, scalar parameters, a learning rate that is a tensor, NumPy arrays, Python values."""
    model = make_model()
    model.scale = nn.Parameter(torch.ones(()))
    optimizer = torch.optim.AdamW([*model.parameters()], lr=torch.tensor(0.1))
    warm(model, optimizer)
    extra = {"ema": torch.arange(5000.0), "array": np.arange(100), "rng": torch.get_rng_state(), "n": [1, 2.5]}
    with slow(tmp_path) as ck, pccheck_torch.attach(ck, optimizer):
        state = {**states(model, optimizer), **extra}
        expected = copy.deepcopy(state)
        save = ck.save(1, state)
        with torch.no_grad():
            model.scale.fill_(7)
            extra["ema"].mul_(0)
            extra["array"].fill(0)
            extra["rng"].fill_(0)
            extra["n"].append(3)
            optimizer.param_groups[0]["lr"].fill_(9)
            for s in optimizer.state.values():
                s["step"].fill_(77)
        save.durable.result(WAIT_S)
        assert_same(ck.restore().state["ema"], expected["ema"])
        restored = ck.restore().state
        assert np.array_equal(restored.pop("array"), expected.pop("array"))
        assert_same(restored, expected)


def test_what_nobody_owns_and_is_large_is_waited_for(tmp_path, monkeypatch):
    """More than may be copied aside: the smallest are, and `save()` waits for the capture of the rest."""
    monkeypatch.setattr("pccheck.saving.snapshot.BY_VALUE_BYTES", 8 * CHUNK)
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    warm(model, optimizer)
    ema = torch.arange(10 * CHUNK // 4).float()
    with slow(tmp_path, rate=4 << 20) as ck, pccheck_torch.attach(ck, optimizer):
        state = {"ema": ema, **states(model, optimizer)}
        expected = copy.deepcopy(state)
        save = ck.save(1, state)
        ema.zero_()
        for s in optimizer.state.values():
            s["step"].fill_(77)
        optimizer.step()
        save.durable.result(WAIT_S)
        assert_same(ck.restore().state, expected)


def test_several_optimizers_wait_for_their_own_only(tmp_path, gates):
    """A GAN: the one whose tensors come first steps while the other's are still being captured."""
    first, second = make_model(), make_model()
    one, two = torch.optim.AdamW(first.parameters(), lr=0.1), torch.optim.AdamW(second.parameters(), lr=0.1)
    for model, optimizer in ((first, one), (second, two)):
        warm(model, optimizer)
        model.zero_grad()
        make_loss(model).backward()
    state = {"first": states(first, one), "second": states(second, two)}
    expected = copy.deepcopy(state)
    with slow(tmp_path) as ck, pccheck_torch.attach(ck, one, two):
        save = ck.save(1, state)
        before = weights(first)
        one.step()
        assert not torch.equal(weights(first), before)
        assert not save.captured.done(), "the second optimizer's tensors are still being captured"
        two.step()
        assert save.captured.result(WAIT_S) == 1
        assert gates == [0, 1]
        save.durable.result(WAIT_S)
        assert_same(ck.restore().state, expected)


def test_fused_adamw_counts_no_version_and_is_seen_all_the_same(tmp_path):
    """`_version` tells of no change that a fused step makes; digests do. Without a gate, debug names what changed."""
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)
    warm(model, optimizer)
    versions = [p._version for p in model.parameters()]
    with slow(tmp_path) as ck, pccheck_torch.attach(ck, optimizer, debug=True) as attachment:
        for handle in attachment._handles:
            handle.remove()
        ck.save(1, states(model, optimizer))
        optimizer.step()
        assert [p._version for p in model.parameters()] == versions
        with pytest.raises(ChangedError) as caught:
            ck.fence()
        assert caught.value.step == 1
        assert "model/0.weight" in caught.value.paths
        assert "optimizers/0/state/0/exp_avg" in caught.value.paths
        assert not any("step" in path for path in caught.value.paths), "those were saved by value"
        ck.fence()  # told once


# -- debug ------------------------------------------------------------------------------------------------------------


def test_debug_has_nothing_to_say_of_a_right_loop(tmp_path):
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    with pccheck.Checkpointer(tmp_path, debug_captures=True) as ck, pccheck_torch.attach(ck, optimizer):
        for step in range(5):
            warm(model, optimizer)
            ck.save(step, states(model, optimizer))
        ck.wait(WAIT_S)


def test_debug_sees_at_the_next_save_what_no_fence_was_reached_for(tmp_path):
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    warm(model, optimizer)
    with pccheck.Checkpointer(tmp_path) as ck, pccheck_torch.attach(ck, optimizer, debug=True):
        ck.save(1, states(model, optimizer))
        with torch.no_grad():
            model[2].weight[3, 3] += 1
        with pytest.raises(ChangedError, match=r"step 1.*model/2\.weight"):
            ck.save(2, states(model, optimizer))
        assert ck.latest() in (None, 1, 2)
        ck.wait(WAIT_S)
        assert ck.latest() == 2, "the save that told of it was made"


def test_debug_takes_wait_and_restore_for_fences(tmp_path):
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    warm(model, optimizer)
    with pccheck.Checkpointer(tmp_path) as ck, pccheck_torch.attach(ck, optimizer, debug=True):
        state = pccheck_torch.TrainingState(model=model, optimizer=optimizer)
        for step, waits in enumerate((ck.wait, lambda: state.restore(ck), ck.wait)):
            ck.save(step, state)
            waits()
            with torch.no_grad():
                model[0].weight.add_(1)


@pytest.mark.parametrize("how", ["wait", "close"])
def test_debug_tells_at_the_end_what_no_fence_was_reached_for(tmp_path, how):
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    ck = pccheck.Checkpointer(tmp_path)
    pccheck_torch.attach(ck, optimizer, debug=True)
    ck.save(1, model.state_dict())
    with torch.no_grad():
        model[2].weight[3, 3] += 1
    with pytest.raises(ChangedError, match=r"step 1.*2\.weight"):
        getattr(ck, how)()
    ck.close()


def test_debug_warns_where_training_must_go_on(tmp_path):
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    warm(model, optimizer)
    with pccheck.Checkpointer(tmp_path, on_error="warn") as ck, pccheck_torch.attach(ck, optimizer, debug=True):
        ck.save(1, states(model, optimizer))
        with torch.no_grad():
            model[0].bias[0] += 1
        with pytest.warns(RuntimeWarning, match=r"model/0\.bias"):
            optimizer.step()


# -- ownership --------------------------------------------------------------------------------------------------------


def owners(attachment, *values):
    return list(attachment.owners("torch", values))


@pytest.fixture
def ck(tmp_path):
    with pccheck.Checkpointer(tmp_path / "ck", chunk_bytes=CHUNK) as ck:
        yield ck


def test_only_what_provably_belongs_to_an_optimizer_is_owned(ck):
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    warm(model, optimizer)
    weight = model[0].weight
    with pccheck_torch.attach(ck, optimizer) as attached:
        moment = optimizer.state[weight]["exp_avg"]
        assert owners(attached, weight, weight.detach(), moment, moment[3:5]) == [0, 0, 0, 0]
        assert owners(attached, torch.ones(5), weight.grad, optimizer.state[weight]["step"]) == [NOBODY] * 3
        assert owners(attached, weight.detach()[0, :1], torch.Size([3]), torch.float32) == [NOBODY] * 3
        assert owners(attached, torch.empty(2, 2, device="meta"), torch.eye(2).to_sparse()) == [NOBODY] * 2
        assert list(attached.owners("numpy", [weight.detach().numpy()])) == [NOBODY]


def test_a_leaf_that_reaches_beyond_owned_memory_is_nobodys(ck):
    """A parameter that is a part of a larger buffer: the buffer is not owned, its other rows change at any time."""
    whole = torch.zeros(10, 8)
    part, gaps = nn.Parameter(whole[2:5]), nn.Parameter(whole[6:, :4])
    optimizer = torch.optim.SGD([part, gaps], lr=0.1)
    with pccheck_torch.attach(ck, optimizer) as attached:
        assert owners(attached, part, whole[2:5], whole[3:4]) == [0, 0, 0]
        assert owners(attached, whole, whole[2:6], whole[1:3], gaps, whole[6:7]) == [NOBODY] * 5


def test_what_two_optimizers_have_both_wait_for(tmp_path):
    model = make_model()
    one = torch.optim.SGD(model.parameters(), lr=0.1)
    two = torch.optim.SGD([model[0].weight], lr=0.1)
    for stepping in (one, two):
        make_loss(model).backward()
        with slow(tmp_path / str(id(stepping))) as ck, pccheck_torch.attach(ck, one, two) as attached:
            shared, own = owners(attached, model[0].weight, model[2].weight)
            assert own == 0
            assert shared not in (NOBODY, 0, 1)
            Run(ck, model, one, two)(stepping.step)
            assert ck.stats().fence_wait_s > 0


def test_constants_are_captured_lazily_and_never_waited_for(tmp_path):
    frozen = nn.Sequential(nn.Linear(64, 256), nn.BatchNorm1d(256)).eval().requires_grad_(False)
    table = torch.randn(3000)
    head = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(head.parameters(), lr=0.1)
    with slow(tmp_path) as ck, pccheck_torch.attach(ck, optimizer, constant=[frozen, table]) as attached:
        assert owners(attached, frozen[0].weight, frozen[1].running_mean, table, head.weight) == [1, 1, 1, 0]
        state = {"head": head.state_dict(), "frozen": frozen.state_dict(), "table": table}
        expected = copy.deepcopy(state)
        head(torch.ones(1, 4)).sum().backward()
        save = ck.save(1, state)
        optimizer.step()
        assert not save.captured.done()
        save.durable.result(WAIT_S)
        assert_same(ck.restore().state, expected)


def test_a_constant_that_an_optimizer_has_is_refused(ck):
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(UsageError, match="constant"):
        pccheck_torch.attach(ck, optimizer, constant=[model[0].weight])
    pccheck_torch.attach(ck, optimizer).detach()


def test_the_version_changes_with_whatever_may_make_owned_memory_anybodys(ck):
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    with pccheck_torch.attach(ck, optimizer) as attached:

        def changed():
            attached.owners("torch", [])
            before = attached.version()
            assert attached.version() == before
            return lambda: attached.version() != before

        check = changed()
        warm(model, optimizer)
        assert check(), "state appeared"
        check = changed()
        optimizer.load_state_dict(optimizer.state_dict())
        assert check(), "state was loaded"
        check = changed()
        optimizer.state[model[0].weight]["exp_avg"] = torch.zeros_like(model[0].weight)
        gc.collect()
        assert check(), "a moment was freed: its memory may be anybody's"
        check = changed()
        optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(3))]})
        assert check(), "a group was added"
        check = changed()
        optimizer.param_groups[0]["params"][0] = nn.Parameter(torch.zeros(64, 32))
        assert check(), "a parameter was replaced"
        check = changed()
        optimizer.step()
        assert not check(), "a step changes values only"


def test_a_moment_that_is_replaced_is_owned_at_its_new_place(tmp_path):
    """The stale handle: an optimizer that makes new tensors in each step, and one that was given others by hand."""
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    warm(model, optimizer)
    with slow(tmp_path, rate=4 << 20) as ck, pccheck_torch.attach(ck, optimizer):
        run = Run(ck, model, optimizer)
        run(optimizer.step, 1)
        for s in optimizer.state.values():
            s["exp_avg"] = s["exp_avg"] * 2
        run(optimizer.step, 2)
        model[0].weight.data = model[0].weight.data.clone()
        run(optimizer.step, 3)


def test_loading_waits_too(tmp_path):
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    warm(model, optimizer)
    other = copy.deepcopy(optimizer.state_dict())
    with slow(tmp_path) as ck, pccheck_torch.attach(ck, optimizer):
        Run(ck, model, optimizer)(lambda: optimizer.load_state_dict(other))
        assert ck.stats().fence_wait_s > 0
        Run(ck, model, optimizer)(optimizer.step, 2)


@pytest.fixture
def one_rank():
    import torch.distributed as dist

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_shards_of_fsdp2_are_owned(tmp_path, one_rank):
    """Parameters and moments are DTensors: what counts is the memory of their local parts."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model = fully_shard(make_model(), mesh=init_device_mesh("cpu", (1,)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    warm(model, optimizer)
    weight = model[0].weight
    with slow(tmp_path) as ck, pccheck_torch.attach(ck, optimizer) as attached:
        moment = optimizer.state[weight]["exp_avg"]
        assert owners(attached, weight, moment, weight.to_local(), weight.grad) == [0, 0, 0, NOBODY]
        assert owners(attached, pccheck.Shard(weight.to_local(), shape=(64, 32), offsets=(0, 0))) == [0]
        state = {"w": weight, "m": moment}
        expected = {name: t.to_local().detach().clone() for name, t in state.items()}
        save = ck.save(1, state)
        optimizer.step()
        save.durable.result(WAIT_S)
        restored = ck.restore().state
        for name, value in expected.items():
            assert not torch.equal(state[name].to_local(), value)
            found = restored[name]
            assert torch.equal(found.array if isinstance(found, pccheck.Shard) else found, value)


# -- attaching and detaching ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("snapshot", ["copy", "lazy", "auto"])
def test_attaching_makes_lazy_and_detaching_undoes_it(tmp_path, gates, snapshot):
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    warm(model, optimizer)
    heard = []
    with slow(tmp_path, snapshot=snapshot, observer=heard.append) as ck:
        with pccheck_torch.attach(ck, optimizer) as attached:
            assert not ck.save(1, states(model, optimizer)).captured.done()
            optimizer.step()
            ck.wait(WAIT_S)
        hooks = len(optimizer._optimizer_step_pre_hooks)
        assert hooks == 0
        attached.detach()
        if snapshot == "copy":
            assert ck.save(2, states(model, optimizer)).captured.done()
        optimizer.step()
        assert gates == [0]
        pccheck_torch.attach(ck, optimizer).detach()
    picked = [e for e in heard if isinstance(e, pccheck.events.SnapshotPicked)]
    assert [e.mode for e in picked[:1]] == ([] if snapshot == "lazy" else ["lazy"])


def test_detaching_waits_for_what_is_captured(tmp_path):
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    warm(model, optimizer)
    with slow(tmp_path) as ck:
        attached = pccheck_torch.attach(ck, optimizer)
        Run(ck, model, optimizer)(lambda: (attached.detach(), optimizer.step()))


class Wrapper(torch.optim.Optimizer):
    """Holds another optimizer, and passes on what it is asked, as those of training frameworks do."""

    def __init__(self, inner):
        self.inner, self.param_groups, self.state = inner, inner.param_groups, inner.state

    def step(self, closure=None):
        return self.inner.step(closure)


def test_a_wrapper_whose_hooks_never_run_is_refused(tmp_path):
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    warm(model, optimizer)
    with slow(tmp_path) as ck:
        wrapper = Wrapper(optimizer)
        with pytest.raises(UsageError, match="attach the optimizer that it holds"):
            pccheck_torch.attach(ck, wrapper)
        with pccheck_torch.attach(ck, wrapper.inner):
            Run(ck, model, optimizer)(wrapper.step)


def test_an_attachment_that_fails_leaves_nothing(tmp_path, monkeypatch):
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    warm(model, optimizer)
    with slow(tmp_path) as ck:
        with monkeypatch.context() as patch:
            patch.setattr(optimizer, "register_load_state_dict_pre_hook", lambda hook: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                pccheck_torch.attach(ck, optimizer)
        assert ck.save(1, states(model, optimizer)).captured.done(), "copied, as the options say"
        pccheck_torch.attach(ck, optimizer).detach()


def test_what_cannot_be_attached_is_told(ck, tmp_path):
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for arguments, message in (
        ((), "needs an optimizer"),
        ((optimizer, optimizer), "twice"),
        ((model,), "no torch.optim.Optimizer"),
    ):
        with pytest.raises(UsageError, match=message):
            pccheck_torch.attach(ck, *arguments)
    with pytest.raises(UsageError, match="constant= takes"):
        pccheck_torch.attach(ck, optimizer, constant=[3])
    with pccheck_torch.attach(ck, optimizer), pytest.raises(UsageError, match="already"):
        pccheck_torch.attach(ck, optimizer)
    with (
        pccheck.Checkpointer(tmp_path / "device", snapshot="device") as other,
        pytest.raises(UsageError, match="'lazy', or 'auto'"),
    ):
        pccheck_torch.attach(other, optimizer)
    assert not optimizer._optimizer_step_pre_hooks
    ck.close()
    with pytest.raises(pccheck.errors.ClosedError):
        pccheck_torch.attach(ck, optimizer)


def test_training_goes_on_after_the_checkpointer_was_closed(tmp_path):
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    ck = pccheck.Checkpointer(tmp_path)
    attached = pccheck_torch.attach(ck, optimizer)
    warm(model, optimizer)
    ck.save(1, states(model, optimizer))
    ck.close()
    optimizer.step()
    attached.detach()
    optimizer.step()
    assert not optimizer._optimizer_step_pre_hooks


# -- 200 rounds -------------------------------------------------------------------------------------------------------

ROUNDS = 200


def train(ck, model, optimizer, scheduler, data, rounds, told=None):
    """Train, save right after each step, and go on at once; with `told`, keep what each step's state is."""
    for k in range(1, rounds + 1):
        optimizer.zero_grad()
        model(data[k % len(data)]).square().mean().backward()
        optimizer.step()
        scheduler.step()
        state = {**states(model, optimizer), "scheduler": scheduler.state_dict(), "k": k}
        if told is not None:
            told[k] = copy.deepcopy(state)
        if ck is not None:
            ck.save(k, state)


def make_training():
    torch.manual_seed(7)
    model = nn.Sequential(nn.Linear(32, 48), nn.BatchNorm1d(48), nn.ReLU(), nn.Linear(48, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.999)
    return model, optimizer, scheduler, torch.randn(5, 16, 32)


@pytest.fixture(scope="module")
def twin():
    """The same training without checkpoints: what each step's state is."""
    torch.set_num_threads(1)
    told = {}
    train(None, *make_training(), ROUNDS, told)
    return told


def open_rounds(directory, rounds, **options):
    # 32 KiB at 16 MiB/s take 2 ms, as long as a step, or twice: captures overlap with the steps that follow
    return slow(directory, rate=16 << 20, in_flight=3, keep=rounds, **options)


@pytest.mark.parametrize("mode", ["copy", "lazy", "device", "auto"])
def test_case_2_in_200_rounds_every_leaf_is_of_its_step(fast_path, twin, mode):
    """Case 2: AdamW, saved right after a step, the next one made at once: every checkpoint is of one step, exactly."""
    model, optimizer, scheduler, data = make_training()
    with open_rounds(fast_path, ROUNDS, snapshot=mode) as ck:
        attached = pccheck_torch.attach(ck, optimizer) if mode in ("lazy", "auto") else None
        train(ck, model, optimizer, scheduler, data, ROUNDS)
        ck.wait(WAIT_S)
        if attached is not None:
            attached.detach()
        assert ck.steps() == list(range(1, ROUNDS + 1))
        if mode in ("copy", "lazy"):
            assert ck.stats().fence_wait_s > 0
    with pccheck.open(fast_path) as view:
        for k, expected in twin.items():
            restored = view.restore(k)
            assert restored.state["k"] == k
            assert_same(restored.state, expected)


def test_case_2_is_torn_without_the_gate(fast_path, twin):
    """The same training with the gate taken out: not every checkpoint is of its step, so that the test above bites."""
    model, optimizer, scheduler, data = make_training()
    rounds = 6
    torn = []
    with slow(fast_path, keep=rounds) as ck, pccheck_torch.attach(ck, optimizer) as attached:
        for handle in attached._handles:
            handle.remove()
        train(ck, model, optimizer, scheduler, data, rounds)
        ck.wait(WAIT_S)
        for k in range(1, rounds + 1):
            try:
                assert_same(ck.restore(k, branch=False).state, twin[k])
            except AssertionError:
                torn.append(k)
    assert torn
