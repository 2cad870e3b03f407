"""TrainingState: what it saves is what `state_dict()` gives, now; what it loads is all, exact, in place, or nothing."""

from __future__ import annotations

import collections
import copy
import dataclasses
import functools
import random
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import torch.distributed as dist  # noqa: E402
from pccheck_torch.training.sections import as_stored  # noqa: E402
from pccheck_torch.training.state import TrainingState  # noqa: E402
from torch import nn  # noqa: E402
from torch.nn.utils import parametrizations  # noqa: E402

import pccheck  # noqa: E402
from pccheck.errors import MismatchError, UnsupportedLeafError, UsageError  # noqa: E402
from pccheck.leaves import Box, LeafSpec, StoredLeaf  # noqa: E402


def same(one, other):
    """Tell whether two trees are alike: containers, keys and their order, types, bits."""
    if isinstance(one, torch.Tensor) or isinstance(other, torch.Tensor):
        return (
            isinstance(one, torch.Tensor)
            and isinstance(other, torch.Tensor)
            and (type(one), one.dtype, one.shape, one.requires_grad)
            == (type(other), other.dtype, other.shape, other.requires_grad)
            and bool((one == other).all())
        )
    if type(one) is not type(other):
        return False
    if isinstance(one, dict):
        attributes = collections.OrderedDict in (type(one), type(other))
        return (
            list(one) == list(other)
            and all(same(one[k], other[k]) for k in one)
            and (not attributes or same(vars(one), vars(other)))
        )
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, np.ndarray):
        return one.dtype == other.dtype and np.array_equal(one, other)
    return one == other


def restored(tree, step=7):
    """What a Checkpointer would give, with memory of its own."""
    return pccheck.Restored(step=step, counter=1, state=copy.deepcopy(tree), metadata={})


# -- what is saved is what state_dict() gives -------------------------------------------------------------------------


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.head = nn.Embedding(5, 3), nn.Linear(3, 5, bias=False)
        self.head.weight = self.embedding.weight


class Buffers(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))
        self.register_buffer("kept", torch.zeros(3))
        self.register_buffer("cache", torch.zeros(4), persistent=False)
        self.register_buffer("nothing", None)
        self.register_parameter("bias", None)


class Extra(nn.Linear):
    def get_extra_state(self):
        return {"amax": self.weight.max().item()}

    def set_extra_state(self, state):
        self.amax = state["amax"]


class OwnWay(nn.Linear):
    def _save_to_state_dict(self, destination, prefix, keep_vars):
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[f"{prefix}scale"] = torch.tensor(2.0)


class OwnDict(nn.Linear):
    def state_dict(self, *args, **kwargs):
        return {"only": self.weight.detach() * 2}


def with_hooks():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))

    def shorten(module, state, prefix, metadata):
        state[f"{prefix}w"] = state.pop(f"{prefix}weight") + 1

    model[1]._register_state_dict_hook(shorten)
    return model


def with_pre_hook():
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))

    def before(module, prefix, keep_vars):
        module.running_mean = module.weight.detach() * 2  # replaced by every state_dict()

    model[1].register_state_dict_pre_hook(before)
    return model


def shared():
    part = nn.Linear(2, 2)
    return nn.ModuleDict({"one": part, "two": nn.Sequential(part, nn.ReLU())})


def compiled_inside():
    return nn.Sequential(nn.Linear(2, 2), torch.compile(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))))


ZOO = {
    "linear": lambda: nn.Linear(2, 3),
    "tied": Tied,
    "batch norm": lambda: nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.Dropout()),
    "buffers": Buffers,
    "extra state": lambda: nn.Sequential(Extra(2, 2), nn.Linear(2, 2)),
    "own save": lambda: nn.Sequential(OwnWay(2, 2)),
    "own state_dict": lambda: OwnDict(2, 2),
    "hooks": with_hooks,
    "pre-hook": with_pre_hook,
    "shared": shared,
    "lists": lambda: nn.ParameterList([nn.Parameter(torch.ones(1)), nn.Parameter(torch.zeros(2), False)]),
    "parametrized": lambda: parametrizations.weight_norm(nn.Linear(3, 2)),
    "spectral": lambda: parametrizations.spectral_norm(nn.Linear(3, 2)),
    "recurrent": lambda: nn.LSTM(2, 3, num_layers=2),
    "attention": lambda: nn.TransformerEncoderLayer(4, 2, 8),
    "strided": lambda: nn.Conv2d(2, 2, 2).to(memory_format=torch.channels_last),
    "empty": nn.Identity,
    "meta": lambda: nn.Linear(2, 2, device="meta"),
}


@pytest.mark.parametrize("make", ZOO.values(), ids=ZOO)
def test_the_tree_is_what_state_dict_gives(make):
    model = make()
    state = TrainingState(model=model, rng=False)
    for change in range(3):
        expected, tree = model.state_dict(), state.__pccheck_state__()["model"]
        if any(p.is_meta for p in model.parameters()):
            assert [(k, v.shape, v.device) for k, v in tree.items()] == [
                (k, v.shape, v.device) for k, v in expected.items()
            ]
            continue
        assert same(tree, expected), f"{tree} instead of {expected}"
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(change + 1)  # in place, as an optimizer does
            for buffer in model.buffers():
                buffer.add_(1)


def test_memory_that_was_freed_and_given_to_its_parameter_again_is_noticed():
    """As where offloading frees what a parameter had: the allocator gives the same memory again for most sizes."""
    for size in (48, 64, 96, 128, 192, 256, 384, 512):
        model = nn.Linear(size, size, bias=False)
        state = TrainingState(model=model, rng=False)
        state.__pccheck_state__()
        at = model.weight.data_ptr()
        model.weight.untyped_storage().resize_(0)
        made = [torch.full((size, size), 3.0)]
        while made[-1].data_ptr() != at and len(made) < 20:
            made.append(torch.full((size, size), 3.0))
        model.weight.data = made[-1]
        shown = state.__pccheck_state__()["model"]["weight"]
        assert shown.data_ptr() == made[-1].data_ptr(), size
        assert torch.equal(shown, made[-1])


def test_nothing_is_made_anew_while_nothing_was_replaced():
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    optimizer = stepped(torch.optim.AdamW(model.parameters()))
    state = TrainingState(model=model, optimizer=optimizer)
    first = state.__pccheck_state__()
    stepped(optimizer)
    second = state.__pccheck_state__()
    assert second["model"] is first["model"]
    assert second["optimizer"]["state"] is first["optimizer"]["state"]


# -- the stale handle: what was reallocated is noticed ----------------------------------------------------------------


def stepped(optimizer):
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = torch.full_like(parameter, 0.5)
    optimizer.step()
    return optimizer


def replaced_data(model):
    model[0].weight.data = model[0].weight.data * 2


def same_place_other_shape(model):
    model[0].weight.data = model[0].weight.data.t()


def same_place_other_dtype(model):
    model[0].weight.data = model[0].weight.data.view(torch.int32)


def replaced_parameter(model):
    model[0].weight = nn.Parameter(torch.full((2, 2), 9.0))


def replaced_buffer(model):
    model[1].running_mean = torch.full((2,), 9.0)


def replaced_module(model):
    model[0] = nn.Linear(2, 2)


def appended_module(model):
    model.append(nn.Linear(2, 2))


def removed_module(model):
    del model[2]


def renamed_parameter(model):
    weight = model[2].bias
    del model[2].bias
    model[2].register_parameter("shift", weight)


def other_dtype(model):
    model.to(torch.bfloat16)


def set_to(model):
    with torch.no_grad():
        model[0].weight.set_(torch.full((2, 2), 9.0))


def swapped(model):
    torch.utils.swap_tensors(model[0].weight, nn.Parameter(torch.full((2, 2), 9.0)))


def frozen(model):
    model[0].weight.requires_grad_(False)


def no_longer_persistent(model):
    model[1].register_buffer("running_var", torch.ones(2), persistent=False)


def added_buffer(model):
    model[2].register_buffer("late", torch.ones(1))


def hooked(model):
    model[2].register_state_dict_post_hook(lambda m, state, prefix, meta: state.__delitem__(f"{prefix}bias"))


def pre_hooked(model):
    def before(module, prefix, keep_vars):
        module.bias = nn.Parameter(module.bias.detach() + 0)

    model[2].register_state_dict_pre_hook(before)


def parametrized(model):
    parametrizations.weight_norm(model[2])


CHANGES = [
    replaced_data, same_place_other_shape, same_place_other_dtype, replaced_parameter, replaced_buffer, replaced_module,
    appended_module, removed_module, renamed_parameter, other_dtype, set_to, swapped, frozen, no_longer_persistent,
    added_buffer, hooked, pre_hooked, parametrized,
]  # fmt: skip


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_a_model_that_was_changed_is_not_saved_as_it_was(change):
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.Linear(2, 2))
    if change is same_place_other_dtype:
        model.requires_grad_(False)
    state = TrainingState(model=model, rng=False)
    state.__pccheck_state__()
    change(model)
    for _ in range(2):
        expected = model.state_dict()
        tree = state.__pccheck_state__()["model"]
        assert same(tree, expected)
        if change is not pre_hooked:  # which replaces it in every state_dict()
            assert [t.data_ptr() for t in tree.values()] == [t.data_ptr() for t in expected.values()]
        elif change is pre_hooked:
            assert tree["2.bias"].data_ptr() == model[2].bias.data_ptr()


def loaded(model, optimizer):
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))


def other_state(model, optimizer):
    optimizer.state[model[0].weight]["exp_avg"] = torch.full((2, 2), 3.0)


def other_inner_dict(model, optimizer):
    optimizer.state[model[0].weight] = {**optimizer.state[model[0].weight], "exp_avg": torch.full((2, 2), 3.0)}


def state_data(model, optimizer):
    optimizer.state[model[0].weight]["exp_avg"].data = torch.full((2, 2), 3.0)


def more_parameters(model, optimizer):
    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(3))], "lr": 0.5})


def other_parameter(model, optimizer):
    new = nn.Parameter(torch.ones(2, 2))
    optimizer.state[new] = optimizer.state.pop(model[0].weight)
    optimizer.param_groups[0]["params"][0] = new


def cleared(model, optimizer):
    optimizer.state.clear()


def other_rate(model, optimizer):
    optimizer.param_groups[0]["lr"] = torch.tensor(0.25)


def hooked_optimizer(model, optimizer):
    optimizer.register_state_dict_post_hook(lambda o, state: {**state, "more": 1})


@pytest.mark.parametrize(
    "change",
    [
        loaded, other_state, other_inner_dict, state_data, more_parameters, other_parameter, cleared, other_rate,
        hooked_optimizer,
    ],
    ids=lambda change: change.__name__,
)  # fmt: skip
def test_an_optimizer_that_was_changed_is_not_saved_as_it_was(change):
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    optimizer = stepped(torch.optim.AdamW(model.parameters()))
    state = TrainingState(model=model, optimizer=optimizer, rng=False)
    state.__pccheck_state__()
    change(model, optimizer)
    assert same(state.__pccheck_state__()["optimizer"], optimizer.state_dict())
    if change is not hooked_optimizer:
        stepped(optimizer)
        assert same(state.__pccheck_state__()["optimizer"], optimizer.state_dict())


def test_an_optimizer_that_has_not_stepped_grows_a_state():
    model = nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    state = TrainingState(optimizer=optimizer, rng=False)
    assert state.__pccheck_state__() == {"optimizer": optimizer.state_dict()}
    stepped(optimizer)
    assert same(state.__pccheck_state__()["optimizer"], optimizer.state_dict())


# -- wrappers leave no trace in the names -----------------------------------------------------------------------------


@pytest.fixture
def alone():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def small():
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)))


def test_ddp_leaves_no_trace(alone):
    model = small()
    wrapped = nn.parallel.DistributedDataParallel(model)
    state = TrainingState(model=wrapped, rng=False)
    wrapped(torch.ones(4, 2)).sum().backward()
    assert same(state.__pccheck_state__()["model"], model.state_dict())
    other = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)))
    TrainingState(model=other, rng=False).load(restored(state.__pccheck_state__()))
    assert same(other.state_dict(), model.state_dict())


@pytest.mark.filterwarnings("ignore:.*")  # of the compiler
def test_compile_leaves_no_trace():
    plain, outside, inside = small(), small(), small()
    inside[1] = torch.compile(inside[1], backend="eager")
    inside(torch.ones(4, 2))
    outside = torch.compile(outside, backend="eager")
    for model in (outside, inside):
        state = TrainingState(model=model, rng=False)
        tree = state.__pccheck_state__()["model"]
        assert list(tree) == list(plain.state_dict())
        assert list(tree._metadata) == list(plain.state_dict()._metadata)
        assert state.__pccheck_state__()["model"] is tree
        assert TrainingState(model=plain, rng=False).load(restored({"model": tree})) == 8
        assert same(plain.state_dict(), tree)
        with torch.no_grad():
            plain[1][0].weight.add_(1)
        state.load(restored({"model": plain.state_dict()}))
        assert same(state.__pccheck_state__()["model"], plain.state_dict())
        with torch.no_grad():
            plain[1][0].weight.sub_(1)


def test_fsdp_shards_are_followed(alone):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model = small()
    del model[1][1]
    fully_shard(model[1], mesh=init_device_mesh("cpu", (1,)))
    fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
    optimizer = torch.optim.AdamW(model.parameters())
    state = TrainingState(model=model, optimizer=optimizer)
    for _ in range(3):
        tree, expected = state.__pccheck_state__(), model.state_dict()
        assert list(tree["model"]) == list(expected)
        for name, value in expected.items():
            assert value.to_local().data_ptr() == tree["model"][name].to_local().data_ptr()
        assert state.__pccheck_state__()["model"] is tree["model"]
        model(torch.ones(4, 2)).sum().backward()
        optimizer.step()
    saved = restored(state.__pccheck_state__())
    before = [p.to_local().data_ptr() for p in model.parameters()]
    stepped(optimizer)
    assert not same(model.state_dict()["0.weight"].to_local(), saved.state["model"]["0.weight"].to_local())
    assert state.load(saved) == 8
    assert [p.to_local().data_ptr() for p in model.parameters()] == before
    for name, value in model.state_dict().items():
        assert same(value.to_local(), saved.state["model"][name].to_local())
    whole = {name: value.full_tensor().clone() for name, value in saved.state["model"].items()}
    state.load(restored({**saved.state, "model": whole}))


# -- loading ----------------------------------------------------------------------------------------------------------


class Trainer:
    """A run with everything in it that a run can have."""

    def __init__(self, seed=0):
        torch.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed)
        self.model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 1))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1)
        self.scheduler = torch.optim.lr_scheduler.OneCycleLR(self.optimizer, max_lr=0.2, total_steps=40)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=2)
        self.ema = torch.optim.swa_utils.AveragedModel(self.model)
        self.losses = np.full(40, np.nan)
        self.noise = torch.Generator().manual_seed(seed)
        self.dice = np.random.default_rng(seed)
        self.state = TrainingState(
            model=self.model, optimizer=self.optimizer, scheduler=self.scheduler, scaler=self.scaler, ema=self.ema,
            losses=self.losses, noise=self.noise, dice=self.dice, tokens=0, history={"best": [1.0]},
        )  # fmt: skip

    def step(self, step):
        x = torch.randn(6, 4) + random.random() + np.random.random() + self.dice.random()
        loss = self.model(x + torch.rand(6, 4, generator=self.noise)).square().mean()
        self.optimizer.zero_grad()
        self.scaler.scale(loss).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.scheduler.step()
        self.ema.update_parameters(self.model)
        self.losses[step] = loss.item()
        self.state.extras["tokens"] += 24
        self.state.extras["history"]["best"].append(loss.item())

    def parameters(self):
        return [*self.model.parameters(), *self.model.buffers(), *self.ema.parameters()]


def test_a_resumed_run_is_the_same_to_the_bit(tmp_path):
    alone = Trainer()
    for step in range(12):
        alone.step(step)
    first = Trainer()
    with pccheck.Checkpointer(tmp_path) as ck:
        assert first.state.restore(ck) == 0
        for step in range(5):
            first.step(step)
            ck.save(step, first.state)
        first.step(5)  # is lost
    second = Trainer(seed=9)
    places, losses = [(id(p), p.data_ptr()) for p in second.parameters()], second.losses
    with pccheck.Checkpointer(tmp_path) as ck:
        start = second.state.restore(ck)
    assert start == 5
    for step in range(start, 12):
        second.step(step)
    assert [(id(p), p.data_ptr()) for p in second.parameters()] == places
    assert second.state.extras["losses"] is losses
    one, other = alone.state.__pccheck_state__(), second.state.__pccheck_state__()
    assert np.array_equal(one["extras"].pop("losses"), other["extras"].pop("losses"), equal_nan=True)
    assert np.array_equal(one["rng"]["numpy"][1], other["rng"]["numpy"][1])
    del one["rng"]["numpy"], other["rng"]["numpy"]
    assert same(one, other)


def test_a_fresh_optimizer_gets_its_state():
    """`dcp.load` into a fresh optimizer's state dict loads nothing of it, and says nothing."""
    trained = nn.Linear(2, 2)
    optimizer = stepped(stepped(torch.optim.AdamW(trained.parameters())))
    saved = restored(TrainingState(model=trained, optimizer=optimizer, rng=False).__pccheck_state__())
    model = nn.Linear(2, 2)
    fresh = torch.optim.AdamW(model.parameters())
    parameters = list(model.parameters())
    TrainingState(model=model, optimizer=fresh, rng=False).load(saved)
    assert same(fresh.state_dict(), optimizer.state_dict())
    assert all(map(lambda a, b: a is b, fresh.param_groups[0]["params"], parameters))
    stepped(fresh)
    assert torch.equal(model.weight, next(iter(stepped(optimizer).param_groups))["params"][0])
    assert saved.state["optimizer"]["state"][0]["step"] == 2, "what was restored is not what trains on"


def test_an_optimizer_with_state_keeps_its_tensors():
    model = nn.Linear(2, 2)
    optimizer = stepped(torch.optim.AdamW(model.parameters()))
    state = TrainingState(model=model, optimizer=optimizer, rng=False)
    saved = restored(state.__pccheck_state__())
    stepped(optimizer)
    moments = [t for inner in optimizer.state.values() for t in inner.values()]
    state.load(saved)
    after = [t for inner in optimizer.state.values() for t in inner.values()]
    assert all(map(lambda a, b: a is b, moments, after))
    assert same(optimizer.state_dict(), saved.state["optimizer"])


def test_state_of_another_dtype_than_its_parameter_stays_so():
    """`Optimizer.load_state_dict` alone would round the moments to the parameter's bfloat16."""
    model = nn.Linear(2, 2, dtype=torch.bfloat16)
    optimizer = stepped(torch.optim.AdamW(model.parameters()))
    for inner in optimizer.state.values():
        inner["master"] = torch.full((2,), 1 / 3)
        inner["history"] = [torch.full((2,), 1 / 3), 5]
    saved = restored(TrainingState(optimizer=optimizer, rng=False).__pccheck_state__())
    fresh = torch.optim.AdamW(nn.Linear(2, 2, dtype=torch.bfloat16).parameters())
    TrainingState(optimizer=fresh, rng=False).load(saved)
    assert same(fresh.state_dict()["state"][0]["master"], torch.full((2,), 1 / 3))


def gan(bias=True):
    torch.manual_seed(1)
    return {"G": nn.Linear(2, 2), "D": nn.Linear(2, 2, bias=bias)}


@pytest.mark.parametrize("listed", [False, True])
def test_several_models_and_optimizers(listed, tmp_path):
    def make():
        models = gan()
        optimizers = {k: torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9) for k, m in models.items()}
        schedulers = {k: torch.optim.lr_scheduler.StepLR(o, 1) for k, o in optimizers.items()}
        given = list(optimizers.values()) if listed else optimizers
        return models, optimizers, schedulers, TrainingState(model=models, optimizer=given, scheduler=schedulers)

    models, optimizers, schedulers, state = make()
    for name in models:
        stepped(optimizers[name])
        schedulers[name].step()
    with pccheck.Checkpointer(tmp_path) as ck:
        ck.save(0, state)
        ck.wait()
        new_models, new_optimizers, new_schedulers, new = make()
        assert new.restore(ck) == 1
    for name in models:
        assert same(new_models[name].state_dict(), models[name].state_dict())
        assert same(new_optimizers[name].state_dict(), optimizers[name].state_dict())
        assert new_schedulers[name].state_dict() == schedulers[name].state_dict()


def test_everything_that_differs_is_one_report_and_nothing_is_touched():
    trained = Trainer()
    trained.step(0)
    saved = restored(trained.state.__pccheck_state__())
    del saved.state["model"]["0.bias"]
    saved.state["model"]["4.weight"] = torch.ones(1)
    saved.state["model"]["3.weight"] = torch.ones(1, 9)
    saved.state["model"]["1.running_mean"] = torch.ones(8, dtype=torch.float64)
    saved.state["optimizer"]["param_groups"].append({"params": []})
    saved.state["scheduler"]["gamma"] = saved.state["scheduler"].pop("total_steps")
    saved.state["scaler"] = {}
    saved.state["extras"]["losses"] = np.zeros(3)
    saved.state["extras"]["more"] = {"a": 1, "b": torch.zeros(2)}
    del saved.state["rng"]["torch"]
    live = Trainer()
    before = copy.deepcopy(live.state.__pccheck_state__())
    with pytest.raises(MismatchError) as caught:
        live.state.load(saved)
    problems = {(m.path, m.problem) for m in caught.value.mismatches}
    scaler = {(f"scaler/{name}", "missing") for name in before["scaler"] if not name.startswith("_")}
    assert problems == scaler | {
        ("model/0.bias", "missing"), ("model/4.weight", "unexpected"), ("model/3.weight", "shape"),
        ("model/1.running_mean", "dtype"), ("optimizer/param_groups", "value"), ("scheduler/gamma", "unexpected"),
        ("scheduler/total_steps", "missing"), ("extras/losses", "shape"), ("extras/more/a", "unexpected"),
        ("extras/more/b", "unexpected"), ("rng/torch", "missing"),
    }  # fmt: skip
    assert "3.weight: shape is (1, 9) in the checkpoint, (1, 8) in the live state" in str(caught.value)
    after = live.state.__pccheck_state__()
    for tree in (before, after):
        tree["rng"]["numpy"] = list(map(str, tree["rng"]["numpy"]))
        tree["extras"]["losses"] = str(tree["extras"]["losses"])
    assert same(after, before)


def test_what_fits_can_be_loaded_alone():
    trained = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 3))
    optimizer = stepped(torch.optim.AdamW(trained.parameters()))
    saved = restored(TrainingState(model=trained, optimizer=optimizer, rng=False).__pccheck_state__())
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 4))
    state = TrainingState(model=model, rng=False)
    kept = model[1].weight.clone()
    assert state.load(saved, partial=True) == 8
    assert same(model[0].state_dict(), trained[0].state_dict())
    assert torch.equal(model[1].weight, kept)
    paths = {m.path for m in state.mismatches if m.path.startswith("model")}
    assert paths == {"model/1.weight", "model/1.bias"}
    state.load(restored({"model": model.state_dict()}))
    assert state.mismatches == ()


def test_state_of_live_parameters_is_held_against_the_checkpoint():
    model = nn.Linear(2, 2)
    optimizer = stepped(torch.optim.AdamW(model.parameters()))
    state = TrainingState(optimizer=optimizer, rng=False)
    saved = restored(state.__pccheck_state__())
    inner = saved.state["optimizer"]["state"][0]
    inner["exp_avg"], inner["more"] = torch.zeros(3), inner.pop("exp_avg_sq")
    with pytest.raises(MismatchError) as caught:
        state.load(saved)
    assert {(m.path, m.problem) for m in caught.value.mismatches} == {
        ("optimizer/state/0/exp_avg", "shape"), ("optimizer/state/0/exp_avg_sq", "missing"),
        ("optimizer/state/0/more", "unexpected"),
    }  # fmt: skip


def test_a_report_is_in_the_order_of_the_states_and_tells_what_is_there():
    models = {name: nn.Linear(1, 1) for name in "dbca"}
    saved = restored(TrainingState(model=models, rng=False).__pccheck_state__())
    with pytest.raises(MismatchError) as caught:
        TrainingState(model={name: nn.Linear(1, 1) for name in "zyxw"}, rng=False).load(saved)
    found = [(m.path, m.problem, m.expected) for m in caught.value.mismatches]
    assert found[:4] == [(f"model/{name}", "missing", "OrderedDict") for name in "zyxw"]
    assert [path for path, *_ in found[4:]] == [
        f"model/{name}/{part}" for name in "dbca" for part in ("weight", "bias")
    ]


def test_a_mismatch_is_found_before_anything_is_read(tmp_path):
    with pccheck.Checkpointer(tmp_path) as ck:
        ck.save(0, TrainingState(model=nn.Linear(2, 2)))
        ck.wait()
        model = nn.Linear(3, 2)
        before = copy.deepcopy(model.state_dict())
        with pytest.raises(MismatchError, match=r"model/weight: shape"):
            TrainingState(model=model, scaler=torch.amp.GradScaler("cpu")).restore(ck)
        assert same(model.state_dict(), before)
        state = TrainingState(model=model)
        assert state.restore(ck, partial=True) == 1
        assert [m.path for m in state.mismatches] == ["model/weight"]


def test_extras_are_filled_in_place_or_put_anew():
    array, tensor, mapping, losses = np.zeros(2), torch.zeros(2), {"a": torch.zeros(1)}, [1.0]
    inner = mapping["a"]
    state = TrainingState(rng=False, array=array, tensor=tensor, mapping=mapping, losses=losses, tokens=3)
    saved = restored(state.__pccheck_state__())
    saved.state["extras"] |= {"array": np.ones(2), "tensor": torch.ones(2), "losses": [2.0, 3.0], "tokens": 4}
    saved.state["extras"]["mapping"] = {"a": torch.ones(1), "b": torch.ones(5)}
    state.load(saved)
    assert (array.sum(), tensor.sum(), inner.item(), losses) == (2, 2, 1, [2.0, 3.0])
    assert (list(mapping), mapping["a"] is inner, state.extras["tokens"]) == (["a", "b"], True, 4)


class Position(NamedTuple):
    shard: int
    seen: object


@dataclasses.dataclass
class Progress:
    best: float
    history: list


@dataclasses.dataclass(frozen=True)
class Frozen:
    a: int
    inner: Position


def test_extras_keep_their_classes(tmp_path):
    def made(n):
        frozen = Frozen(n, Position(n, np.full(2, n)))
        return TrainingState(
            position=Position(n, torch.full((2,), n)), progress=Progress(float(n), [frozen]), rng=False
        )

    with pccheck.Checkpointer(tmp_path) as ck:
        ck.save(1, made(7))
        ck.wait()
        state = made(0)
        progress, seen = state.extras["progress"], state.extras["position"].seen
        assert state.restore(ck) == 2
        assert state.extras["progress"] is progress, "what can change is filled in place"
        assert type(state.extras["position"]) is Position
        assert state.extras["position"].seen is seen
        assert (state.extras["position"].shard, seen.tolist()) == (7, [7, 7])
        frozen = progress.history[0]
        assert (type(frozen), type(frozen.inner)) == (Frozen, Position)
        assert (progress.best, frozen.a, frozen.inner.shard, frozen.inner.seen.tolist()) == (7.0, 7, 7, [7, 7])


def test_extras_of_every_kind_come_back(tmp_path):
    values = {
        "size": torch.Size([2, 3]), "dtype": torch.float8_e5m2, "table": np.zeros(2, [("a", "<f4"), ("b", ">i2")]),
        "big": np.arange(3, dtype=">f8"), "number": np.float64(2), "text": "x" * 9000, "none": None, "empty": (),
    }  # fmt: skip
    values["table"]["b"] = 7
    with pccheck.Checkpointer(tmp_path) as ck:
        ck.save(1, TrainingState(rng=False, **values))
        ck.wait()
        live = {**values, "size": torch.Size([1]), "table": np.zeros_like(values["table"]), "big": np.zeros(3, ">f8")}
        state = TrainingState(rng=False, **live)
        assert state.restore(ck) == 2
        for name, value in values.items():
            assert type(state.extras[name]) is type(value)
            assert np.array_equal(state.extras[name], value), name
        assert state.extras["table"] is live["table"]
        live["table"] = np.zeros(2, [("a", "<f4"), ("c", ">i2")])
        with pytest.raises(MismatchError, match="extras/table: dtype"):
            TrainingState(rng=False, **live).restore(ck)


def test_a_lazy_module_takes_its_shapes_from_the_checkpoint(tmp_path):
    with pccheck.Checkpointer(tmp_path) as ck:
        state = TrainingState(model=nn.LazyLinear(3), rng=False)
        with pytest.raises(UnsupportedLeafError, match=r"model/weight.* no shape yet"):
            ck.save(1, state)
        model = nn.Linear(4, 3)
        ck.save(1, TrainingState(model=model, rng=False))
        ck.wait()
        assert state.restore(ck) == 2
        assert same(state.__pccheck_state__()["model"], model.state_dict())


def test_extras_of_other_fields_are_reported(tmp_path):
    with pccheck.Checkpointer(tmp_path) as ck:
        ck.save(1, TrainingState(nested={"p": [Progress(1.0, [])]}, position=Position(1, 2), rng=False))
        ck.wait()
        state = TrainingState(nested={"p": [Position(1, 2)]}, position=Progress(1.0, []), rng=False)
        with pytest.raises(MismatchError) as caught:
            state.restore(ck)
        assert {(m.path, m.problem) for m in caught.value.mismatches} == {
            ("extras/nested/p/0", "type"), ("extras/position", "type"),
        }  # fmt: skip
        assert state.restore(ck, partial=True) == 2
        assert state.extras == {"nested": {"p": [Position(1, 2)]}, "position": Progress(1.0, [])}


def test_extras_are_what_stands_there_when_it_is_saved(tmp_path):
    generator = torch.Generator().manual_seed(1)
    state = TrainingState(rng=False, gone=1, generator=torch.Generator().manual_seed(2))
    state.extras["tokens"] = 5
    state.extras["generator"] = generator
    del state.extras["gone"]
    with pccheck.Checkpointer(tmp_path) as ck:
        ck.save(1, state)
        ck.wait()
        stored = ck.restore().state
        assert list(stored["extras"]) == ["generator", "tokens"]
        assert stored["extras"]["tokens"] == 5
        assert torch.equal(stored["extras"]["generator"], generator.get_state())
        fresh = TrainingState(rng=False)
        with pytest.raises(MismatchError, match="extras/tokens"):
            fresh.restore(ck)
        fresh.extras.update(tokens=0, generator=torch.Generator())
        assert fresh.restore(ck) == 2
        assert fresh.extras["tokens"] == 5
        assert torch.equal(fresh.extras["generator"].get_state(), generator.get_state())
    with pytest.raises(AttributeError):
        state.extras = {}
    state.extras[3] = 1
    with pytest.raises(UsageError, match="names are texts"):
        state.__pccheck_state__()


def test_generators_are_each_ranks_own_wherever_they_stand(tmp_path):
    """Divided among the ranks, as what is replicated is, their states would come back as a mixture."""

    def made(rank):
        generators = {"one": torch.Generator(), "other/one": np.random.Generator(np.random.MT19937(rank))}
        state = TrainingState(model=nn.Linear(64, 64), table=torch.ones(640), **generators)
        state.extras["one"].manual_seed(rank)
        return state

    def save(rank):
        one = pccheck.SharedDirectory(tmp_path / "ranks", rank=rank, world=2)
        with pccheck.Checkpointer(tmp_path / "ck", coordinator=one, replicated=True) as ck:
            ck.save(1, states[rank])
            ck.wait(60)
            fresh = made(5 + rank)
            assert fresh.restore(ck) == 2
            return fresh

    states = [made(0), made(1)]
    with ThreadPoolExecutor(2) as pool:
        for rank, found in enumerate(pool.map(save, (0, 1))):
            for name in ("one", "other/one"):
                expected, got = states[rank].extras[name], found.extras[name]
                if isinstance(expected, torch.Generator):
                    assert torch.equal(expected.get_state(), got.get_state())
                else:
                    assert expected.random() == got.random()
    assert "extras/table" not in states[0].__pccheck_own__


def test_a_buffer_that_came_after_a_save_is_each_ranks_own_in_the_next(tmp_path):
    """What differs must be asked for once the tree is made: before, the section knows of the last save's buffers."""

    def save(rank):
        one = pccheck.SharedDirectory(tmp_path / "ranks", rank=rank, world=2)
        model = nn.Linear(4, 4)
        state = TrainingState(model=model, rng=False)
        with pccheck.Checkpointer(tmp_path / "ck", coordinator=one, replicated=["model"]) as ck:
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.fill_(1.0)
            ck.save(1, state).durable.result(60)
            model.register_buffer("late", torch.full((4096,), rank + 1.0))
            ck.save(2, state).durable.result(60)
            model.late.zero_()
            assert state.restore(ck) == 3
            return model.late

    with ThreadPoolExecutor(2) as pool:
        for rank, late in enumerate(pool.map(save, (0, 1))):
            assert torch.equal(late, torch.full((4096,), rank + 1.0)), rank


def test_what_ranks_store_in_boxes_is_asked_for_whole_in_any_container():
    Pair = collections.namedtuple("Pair", "first second")
    box = Box((2, 0), (2, 3))
    part = StoredLeaf("x", LeafSpec(kind="torch", dtype="float32", shape=(4, 3), nbytes=24, box=box))
    ordered = collections.OrderedDict(x=part)
    ordered._metadata = {"version": 2}
    stored = {
        "named": Pair(part, 1), "default": collections.defaultdict(list, x=part), "ordered": ordered,
        "sequences": [(part, None)],
    }  # fmt: skip
    asked = as_stored(stored)
    assert asked["named"].second == 1
    assert type(asked["named"]) is Pair
    assert asked["default"].default_factory is list
    assert asked["ordered"]._metadata == {"version": 2}
    for leaf in (asked["named"].first, asked["default"]["x"], asked["ordered"]["x"], asked["sequences"][0][0]):
        assert (leaf.shape, leaf.dtype, leaf.device.type) == ((4, 3), torch.float32, "meta")


def test_buffers_are_each_ranks_own_where_the_model_is_replicated(tmp_path):
    """DDP broadcasts buffers before each forward pass: after it they differ, and a mixture was restored (seen)."""

    def made(rank):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 96), nn.BatchNorm1d(96), nn.Linear(96, 96), nn.BatchNorm1d(96))
        model(torch.full((4, 8), rank + 1.0) * torch.arange(4.0)[:, None])
        return TrainingState(model={"net": model}, ema=torch.optim.swa_utils.AveragedModel(model)), model

    def save(rank):
        one = pccheck.SharedDirectory(tmp_path / "ranks", rank=rank, world=2)
        with pccheck.Checkpointer(tmp_path / "ck", coordinator=one, replicated=["model", "ema"]) as ck:
            ck.save(1, states[rank][0])
            ck.wait(60)
            fresh, model = made(5)
            assert fresh.restore(ck) == 2
            return model

    states = [made(0), made(1)]
    with ThreadPoolExecutor(2) as pool:
        for rank, model in enumerate(pool.map(save, (0, 1))):
            for name, tensor in states[rank][1].state_dict().items():
                assert torch.equal(tensor, model.state_dict()[name]), (rank, name)
    own = states[0][0].__pccheck_own__
    assert "model/net/1.running_mean" in own
    assert "model/net/0.weight" not in own
    assert "ema/n_averaged" in own
    with pccheck.open(tmp_path / "ck" / "rank-00000") as one_rank:
        assert any(isinstance(one_rank[p], pccheck.Shard) for p in one_rank), "parameters are divided all the same"


def test_a_part_that_does_not_fit_is_left_alone_as_a_whole():
    optimizer = torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=0.1)

    def made(enabled, generator, listed):
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2)
        scaler = torch.amp.GradScaler("cpu", enabled=enabled)
        return TrainingState(
            scaler=scaler, scheduler=[schedule] if listed else schedule, generator=generator, rng=False, tokens=1
        )

    saved = restored(made(False, np.random.Generator(np.random.MT19937(1)), True).__pccheck_state__())
    saved.state["extras"]["tokens"] = 9
    generator = np.random.default_rng(3)
    state = made(True, generator, False)
    before = copy.deepcopy(state.__pccheck_state__())
    with pytest.raises(MismatchError):
        state.load(saved)
    assert state.load(saved, partial=True) == 8
    assert {m.path.split("/")[0] for m in state.mismatches} == {"scaler", "scheduler", "extras"}
    before["extras"]["tokens"] = 9
    assert same(state.__pccheck_state__(), before)


def test_another_optimizer_is_a_mismatch():
    model = nn.Linear(2, 2)
    adam = torch.optim.AdamW(model.parameters())
    saved = restored(TrainingState(optimizer=stepped(adam), rng=False).__pccheck_state__())
    state = TrainingState(optimizer=torch.optim.SGD(model.parameters(), lr=0.1), rng=False)
    with pytest.raises(MismatchError, match=r"param_groups/0: type is .*betas.* SGD with .*momentum"):
        state.load(saved)
    assert state.load(saved, partial=True) == 8
    stepped(state._made["optimizer"]._optimizer)
    # options that one side alone has are of another release, or of a scheduler
    newer = restored(saved.state)
    newer.state["optimizer"]["param_groups"][0] |= {"initial_lr": 0.1, "of_a_later_release": 1}
    assert TrainingState(optimizer=adam, rng=False).load(newer) == 8


def test_moments_of_parameters_in_another_order_are_a_mismatch():
    model = nn.Linear(2, 3)
    saved = restored(
        TrainingState(optimizer=stepped(torch.optim.AdamW(model.parameters())), rng=False).__pccheck_state__()
    )
    optimizer = torch.optim.AdamW(reversed(list(model.parameters())))
    with pytest.raises(MismatchError) as caught:
        TrainingState(optimizer=optimizer, rng=False).load(saved)
    assert {(m.path, m.problem) for m in caught.value.mismatches} == {
        (f"optimizer/state/{n}/{name}", "shape") for n in (0, 1) for name in ("exp_avg", "exp_avg_sq")
    }
    assert not optimizer.state


@pytest.mark.parametrize("stored", ["meta", "cpu"])
def test_values_neither_come_from_meta_nor_vanish_there(tmp_path, stored):
    with pccheck.Checkpointer(tmp_path) as ck:
        ck.save(1, TrainingState(model=nn.Linear(2, 2, device=stored), rng=False))
        ck.wait()
        model = nn.Linear(2, 2, device="cpu" if stored == "meta" else "meta")
        for load in (lambda s: s.restore(ck), lambda s: s.load(ck.restore())):
            with pytest.raises(MismatchError, match=r"model/weight: kind.*device meta"):
                load(TrainingState(model=model, rng=False))
        assert TrainingState(model=nn.Linear(2, 2, device=stored), rng=False).restore(ck) == 2


def test_names_of_releases_of_torch_do_not_matter():
    optimizer = torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=0.1)
    state = TrainingState(scheduler=torch.optim.lr_scheduler.StepLR(optimizer, 2), rng=False)
    saved = restored(state.__pccheck_state__())
    saved.state["scheduler"] |= {"verbose": False, "_later_name": 1}
    assert state.load(saved) == 8


def test_what_is_no_part_is_refused():
    for wrong in ({"model": 3}, {"optimizer": 3}, {"scheduler": 3}, {"scaler": 3}, {"loader": [1]}):
        with pytest.raises(UsageError):
            TrainingState(**wrong)
    with pytest.raises(UsageError, match=r"by name: TrainingState\(model=model"):
        TrainingState(nn.Linear(1, 1))
    with pytest.raises(UsageError, match="names are texts"):
        TrainingState(model={1: nn.Linear(1, 1)})
    with pytest.raises(MismatchError):
        TrainingState(model=nn.Linear(1, 1)).load(restored([1]))


class _Counting:
    """Can be called, and has a state."""

    def __init__(self):
        self.n = 0

    def __call__(self):
        self.n += 1

    def state_dict(self):
        return {"n": self.n}

    def load_state_dict(self, state):
        self.n = state["n"]


def test_an_extra_that_can_never_be_saved_is_refused_where_it_is_given(tmp_path):
    never = [
        lambda: 3, len, nn.Linear(1, 1).forward, functools.partial(int), int, _Counting, random, {1},
    ]  # fmt: skip
    for extra in (*never, (x for x in "")):
        with pytest.raises(UnsupportedLeafError, match="extras/foo") as told:
            TrainingState(foo=extra)
        assert told.value.path == "extras/foo"
    with pccheck.Checkpointer(tmp_path) as ck:  # and a save would refuse all of them
        for extra in never:
            with pytest.raises(UnsupportedLeafError):
                ck.save(0, {"foo": extra})
        fine = {"none": None, "dtype": torch.float32, "counting": _Counting(), "module": nn.Linear(1, 1), "a": {"b": 1}}
        ck.save(1, TrainingState(**fine)).durable.result(60)


def test_without_a_checkpoint_nothing_changes():
    trainer = Trainer()
    before = copy.deepcopy(trainer.state.__pccheck_state__()["model"])
    assert trainer.state.load(None) == 0
    assert same(trainer.state.__pccheck_state__()["model"], before)


def test_what_a_restore_passed_over_is_told(tmp_path):
    model = nn.Linear(4, 4)
    state = TrainingState(model=model)
    with pccheck.Checkpointer(tmp_path, keep=2) as ck:
        for step in (1, 2):
            ck.save(step, state).durable.result(60)
    with pccheck.open(tmp_path) as view:
        newest = tmp_path / view.checkpoint(2).name
    data = bytearray(newest.read_bytes())
    data[1 << 16] ^= 1
    newest.write_bytes(data)
    with pccheck.Checkpointer(tmp_path, keep=2) as ck:
        with pytest.warns(RuntimeWarning, match=r"step 1 was loaded; passed over: .*step 2.*digest") as told:
            assert state.restore(ck) == 2
        with pytest.warns(RuntimeWarning, match="passed over") as loaded:
            assert state.load(ck.restore()) == 2
        assert told[0].filename == loaded[0].filename == __file__, "the caller's line"
        assert "restore an older step" not in str(told[0].message), "that is what was done"
        assert [s.step for s in state.skipped] == [2]
        ck.save(3, state).durable.result(60)
        assert state.restore(ck) == 4
        assert state.skipped == ()
