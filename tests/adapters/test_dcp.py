"""pccheck's DCP backend in one process: round trips, strictness, names, other planners, failures."""

from __future__ import annotations

import copy
import threading
from collections import OrderedDict, namedtuple
from dataclasses import dataclass

import numpy as np
import pccheck_torch
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from pccheck_torch.dcp import Backend, LoadPlanner, Reader, SavePlanner, StateDictError, Writer
from pccheck_torch.dcp.names import flat, nested
from torch.distributed.checkpoint import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict_from_keys
from torch.distributed.checkpoint.state_dict_saver import AsyncSaveResponse

import pccheck
from pccheck.errors import (
    ClosedError,
    DamagedError,
    NoValidCheckpointError,
    OptionError,
    StepNotFoundError,
    UnsupportedLeafError,
    UsageError,
)

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is (disabled|unavailable)")
WAIT_S = 60


@pytest.fixture
def ck(tmp_path):
    with pccheck.Checkpointer(tmp_path / "job", in_flight=3, keep=4, chunk_bytes=1 << 16) as checkpointer:
        yield checkpointer


@pytest.fixture
def one_rank():
    """A process group of one rank, so that DCP takes its distributed way."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def trained(seed=0, steps=2):
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(10, 7), torch.nn.BatchNorm1d(7), torch.nn.Linear(7, 3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, betas=(0.8, 0.95))
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(4, 10)).square().sum().backward()
        optimizer.step()
    return model, optimizer


def state_of(model, optimizer, **more):
    return {"model": model.state_dict(), "optimizer": optimizer.state_dict(), **more}


def same(a, b):
    if isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict):
        return isinstance(b, dict) and list(a) == list(b) and all(same(a[k], b[k]) for k in a)
    if isinstance(a, (list, tuple)):
        return type(a) is type(b) and len(a) == len(b) and all(map(same, a, b))
    return type(a) is type(b) and a == b


def copied(state):
    """Give a state with tensors of its own."""
    if isinstance(state, torch.Tensor):
        return state.detach().clone()
    if isinstance(state, dict):
        return {key: copied(value) for key, value in state.items()}
    return type(state)(map(copied, state)) if type(state) in (list, tuple) else copy.deepcopy(state)


Point = namedtuple("Point", "x y")


@dataclass
class Progress:
    seen: int
    ema: torch.Tensor


OBJECTS = {
    "array": np.arange(3, dtype=np.int16), "size": torch.Size((2, 3)), "dtype": torch.bfloat16, "none": None,
    "point": Point(1, 2.5), "progress": Progress(7, torch.ones(2)), "blob": b"\0" * 5000, "rng": torch.get_rng_state(),
}  # fmt: skip
OTHERS = {
    "array": np.zeros(3, dtype=np.int16), "size": None, "dtype": torch.int8, "none": 5,
    "point": Point(0, 0), "progress": Progress(0, torch.zeros(2)), "blob": None,
    "rng": torch.zeros_like(torch.get_rng_state()),
}  # fmt: skip
MORE = {"epoch": 3, "lrs": [0.1, 0.2], "seen": (1, (2, None)), "name": "run", "big": 1 << 80, "text": "x" * 5000}
EMPTY = {"epoch": 0, "lrs": [], "seen": None, "name": 0, "big": 0, "text": ""}


# -- round trips -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["async", "sync", "plain"])
def test_a_whole_training_state_comes_back(ck, how):
    saved = state_of(*trained(), **MORE)
    if how == "async":
        dcp.async_save(saved, storage_writer=Writer(ck, 7), planner=SavePlanner()).result(WAIT_S)
    elif how == "sync":
        dcp.save(saved, storage_writer=Writer(ck, 7), planner=SavePlanner())
    else:
        ck.save(7, saved)
        ck.wait(WAIT_S)
    target = state_of(*trained(seed=1), **EMPTY)
    live = target["model"]["0.weight"], target["optimizer"]["state"][0]["exp_avg"]
    dcp.load(target, storage_reader=Reader(ck.path), planner=LoadPlanner())
    assert same(target, copied(saved))
    assert target["optimizer"]["param_groups"][0]["betas"] == (0.8, 0.95)
    assert target["model"]["0.weight"] is live[0], "loaded in place"
    assert target["optimizer"]["state"][0]["exp_avg"] is live[1], "loaded in place"
    assert same(copied(ck.restore(7, like=saved).state), copied(saved)), "and pccheck reads it, too"


def test_stateful_objects_are_asked_and_given(ck):
    model, optimizer = trained()
    dcp.save({"model": model, "optimizer": optimizer}, storage_writer=Writer(ck, 1), planner=SavePlanner())
    other, its = trained(seed=1)
    dcp.load({"model": other, "optimizer": its}, storage_reader=Reader(ck), planner=LoadPlanner())
    assert same(copied(state_of(other, its)), copied(state_of(model, optimizer)))


def test_collectives_can_be_done_without(ck, one_rank):
    saved = {"w": torch.arange(6.0)}
    dcp.save(saved, storage_writer=Writer(ck, 1), planner=SavePlanner(), use_collectives=False)
    started = dcp.async_save(saved, storage_writer=Writer(ck, 2), planner=SavePlanner(), use_collectives=False)
    started.result(WAIT_S)
    dcp.save(saved, storage_writer=Writer(ck, 3), planner=SavePlanner(), no_dist=True)
    dcp.save(saved, storage_writer=Writer(ck, 4), planner=SavePlanner())
    assert ck.steps() == [1, 2, 3, 4]
    for step in ck.steps():
        for no_dist in (False, True):
            target = {"w": torch.zeros(6)}
            dcp.load(target, storage_reader=Reader(ck.path, step), planner=LoadPlanner(), no_dist=no_dist)
            assert same(target, saved)


def test_in_lazy_mode_staging_completion_is_the_capture(tmp_path):
    with pccheck.Checkpointer(tmp_path, snapshot="lazy") as ck:
        started = dcp.async_save({"w": torch.ones(1000)}, storage_writer=Writer(ck, 1), planner=SavePlanner())
        assert isinstance(started, AsyncSaveResponse)
        started.staging_completion.result(WAIT_S)
        started.upload_completion.result(WAIT_S)
        assert ck.latest() == 1


def test_objects_keep_their_types(ck):
    dcp.save({"o": OBJECTS}, storage_writer=Writer(ck, 1), planner=SavePlanner())
    target = {"o": copied(OTHERS)}
    ema = target["o"]["progress"].ema
    dcp.load(target, storage_reader=Reader(ck), planner=LoadPlanner())
    found = target["o"]
    assert found.keys() == OBJECTS.keys()
    assert found["array"].tolist() == [0, 1, 2]
    assert found["array"].dtype == np.int16
    assert type(found["point"]) is Point
    assert found["progress"].seen == 7
    assert found["progress"].ema is ema, "a tensor in a dataclass is loaded in place"
    assert ema.tolist() == [1, 1]
    for name in ("size", "dtype", "none", "point", "blob", "rng"):
        assert same(found[name], OBJECTS[name]), name


def test_attached_optimizers_wait_for_the_capture(tmp_path):
    """Each step of the optimizer comes at once after a save; what is loaded is of one step all the same."""
    weights = [torch.nn.Parameter(torch.zeros(50_000)) for _ in range(4)]
    optimizer = torch.optim.SGD(weights, lr=1.0)
    with Backend(tmp_path, in_flight=3, keep=20, chunk_bytes=1 << 16) as backend:
        with pccheck_torch.attach(backend.checkpointer, optimizer):
            for step in range(20):
                backend.async_save({"model": dict(enumerate(weights)), "step": step}, step)
                for weight in weights:
                    weight.grad = torch.full_like(weight, -1.0)
                optimizer.step()
            backend.wait(WAIT_S)
        for step in range(20):
            target = {"model": {i: torch.nn.Parameter(torch.zeros(50_000)) for i in range(4)}, "step": -1}
            dcp.load(target, storage_reader=Reader(tmp_path, step), planner=LoadPlanner())
            assert target["step"] == step
            assert {v for t in target["model"].values() for v in t.unique().tolist()} == {step}


def test_a_meta_tensor_of_the_target_is_replaced(ck):
    dcp.save({"w": torch.arange(4.0)}, storage_writer=Writer(ck, 1), planner=SavePlanner())
    target = {"w": torch.empty(4, device="meta")}
    dcp.load(target, storage_reader=Reader(ck), planner=LoadPlanner())
    assert target["w"].tolist() == [0, 1, 2, 3]


# -- strictness --------------------------------------------------------------------------------------------------------


def test_stock_load_into_a_fresh_optimizer_loads_nothing_silently(tmp_path):
    saved = state_of(*trained())
    dcp.save(saved, checkpoint_id=tmp_path)
    model, optimizer = trained(steps=0)
    target = state_of(model, optimizer)
    dcp.load(target, checkpoint_id=tmp_path)
    assert target["optimizer"]["state"] == {}


def test_our_load_into_a_fresh_optimizer_says_what_would_be_lost(ck):
    dcp.save(state_of(*trained()), storage_writer=Writer(ck, 1), planner=SavePlanner())
    model, optimizer = trained(seed=1, steps=0)
    target, before = state_of(model, optimizer), copied(state_of(model, optimizer))
    with pytest.raises(CheckpointException, match=r"optimizer/state/0/exp_avg: the checkpoint has float32\[7, 10\]"):
        dcp.load(target, storage_reader=Reader(ck), planner=LoadPlanner())
    assert same(copied(target), before), "nothing was touched"
    with Backend(ck) as backend:
        with pytest.raises(StateDictError, match="get_state_dict") as caught:
            backend.load(target)
        assert {d.problem for d in caught.value.mismatches} == {"unused"}
        assert len(caught.value.mismatches) == 6 * 3
        assert backend.load(target, strict=False).step == 1
    assert not same(copied(target["model"]), before["model"])


def test_one_error_names_every_difference(ck):
    dcp.save(
        {"a": torch.zeros(3), "b": torch.zeros(2, 2), "c": {"x": torch.zeros(1)}, "d": 1, "e": [{"f": 1}, {"f": 2}]},
        storage_writer=Writer(ck, 1), planner=SavePlanner(),
    )  # fmt: skip
    target = {
        "a": torch.ones(4),
        "b": torch.ones(2, 2, dtype=torch.float64),
        "c": {"y": torch.ones(1)},
        "d": {"z": torch.ones(1)},
        "e": [{"f": 0}],
    }
    with Backend(ck) as backend, pytest.raises(StateDictError) as caught:
        backend.load(target)
    assert sorted((d.path, d.problem) for d in caught.value.mismatches) == [
        ("a", "shape"), ("b", "dtype"), ("c/x", "unused"), ("c/y", "missing"), ("d", "kind"), ("e/1/f", "unused"),
    ]  # fmt: skip
    assert target["a"].tolist() == [1] * 4
    assert target["e"] == [{"f": 0}]


def test_what_the_checkpoint_lacks_can_be_kept(ck):
    dcp.save({"a": torch.zeros(3), "n": 1}, storage_writer=Writer(ck, 1), planner=SavePlanner())
    target = {"a": torch.ones(3), "m": {"b": torch.ones(1)}, "n": 5}
    with Backend(ck) as backend:
        with pytest.raises(StateDictError, match=r"m/b: not in the checkpoint; the state dict has float32\[1\]"):
            backend.load(target, strict=False)
        backend.load(target, allow_partial_load=True)
    assert target["a"].tolist() == [0] * 3
    assert target["m"]["b"].tolist() == [1]
    assert target["n"] == 1


# -- names -------------------------------------------------------------------------------------------------------------

AWKWARD = {
    "a.b": torch.zeros(1), "a": {"b": torch.ones(1), 0: torch.full((1,), 2.0), "0": torch.full((1,), 3.0)},
    "n": {1: 5, "1": "one"}, "x/y": [torch.zeros(2), (1, 2), {"k": None}], "t": (torch.ones(2), 1), "empty": {},
}  # fmt: skip


def test_stock_refuses_keys_that_it_cannot_tell_apart(tmp_path):
    with pytest.raises(CheckpointException, match=r"duplicated flatten key a\.b"):
        dcp.save(AWKWARD, checkpoint_id=tmp_path)


def test_stock_puts_the_value_of_an_int_key_elsewhere(tmp_path):
    dcp.save({"s": {1: 5}}, checkpoint_id=tmp_path)
    target = {"s": {1: 0}}
    dcp.load(target, checkpoint_id=tmp_path)
    assert target == {"s": {1: 0, "1": 5}}


def test_our_keys_stay_what_they_are(ck):
    dcp.save(AWKWARD, storage_writer=Writer(ck, 1), planner=SavePlanner())
    target = copied(AWKWARD)
    for tensor in (target["a.b"], *target["a"].values(), target["x/y"][0], target["t"][0]):
        tensor.fill_(9)
    target["n"] = {1: 0, "1": ""}
    dcp.load(target, storage_reader=Reader(ck), planner=LoadPlanner())
    assert same(target, AWKWARD)
    names = Reader(ck).read_metadata().state_dict_metadata
    assert "a.b" not in names, "stands for two places"
    assert {"x/y.0", "x/y.1", "x/y.2.k", "t"} <= names.keys()


@pytest.mark.parametrize(
    "state",
    [
        {"m": {"l.0": torch.zeros(1)}, "o": {"state": {0: {"s": torch.zeros(())}}, "param_groups": [{"params": [0]}]}},
        {"l": [1, [2, [torch.zeros(1)]]], "p": [[1], [2]], "q": [], "r": [[], {}], "s": [(torch.zeros(1),)]},
        {"d": OrderedDict(a=1), "t": (1, {"x": 2}), "n": None, "e": {}, "f": {"g": {}}},
    ],
)  # fmt: skip
def test_values_are_named_as_dcp_names_them(state):
    values, mappings = flatten_state_dict(state)
    found = list(flat(state))
    assert [leaf.fqn for leaf in found] == list(values)
    assert {leaf.fqn: leaf.mapping for leaf in found} == mappings
    assert all(leaf.value is values[leaf.fqn] for leaf in found)


def test_values_are_put_together_again():
    mappings = {("a", "b"): 1, ("a", "c", 1): 2, ("a", "c", 0, "d"): 3, ("x",): 4}
    assert nested(mappings) == {"a": {"b": 1, "c": [{"d": 3}, 2]}, "x": 4}


# -- other planners ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["async", "sync"])
@pytest.mark.parametrize("planner", [DefaultSavePlanner, lambda: DefaultSavePlanner(flatten_state_dict=False)])
def test_stock_planners_save_and_load_through_us(ck, how, planner):
    flattens = planner is DefaultSavePlanner
    saved = state_of(*trained(), **MORE) if flattens else {"w": torch.arange(4.0), "n": (1, 2)}
    if how == "async":
        dcp.async_save(saved, storage_writer=Writer(ck, 1), planner=planner()).result(WAIT_S)
    else:
        dcp.save(saved, storage_writer=Writer(ck, 1), planner=planner())
    target = state_of(*trained(seed=1), **EMPTY) if flattens else {"w": torch.zeros(4), "n": 0}
    dcp.load(target, storage_reader=Reader(ck), planner=DefaultLoadPlanner(flattens, flattens))
    assert same(copied(target), copied(saved))
    again = state_of(*trained(seed=1), **EMPTY) if flattens else {"w": torch.zeros(4), "n": 0}
    dcp.load(again, storage_reader=Reader(ck), planner=LoadPlanner())
    assert same(copied(again), copied(saved)), "int keys that DCP made text find their place"


def test_stock_load_planner_loads_a_part_and_casts_as_ever(ck):
    dcp.save({"a": torch.arange(4.0), "b": torch.ones(2)}, storage_writer=Writer(ck, 1), planner=SavePlanner())
    target = {"a": torch.zeros(4, dtype=torch.float64)}
    dcp.load(target, storage_reader=Reader(ck))
    assert target["a"].tolist() == [0, 1, 2, 3]
    with pytest.raises(CheckpointException, match="Missing key in checkpoint state_dict: c"):
        dcp.load({"c": torch.zeros(4)}, storage_reader=Reader(ck))
    assert same(_load_state_dict_from_keys(storage_reader=Reader(ck)), {"a": torch.arange(4.0), "b": torch.ones(2)})


class Doubling(DefaultSavePlanner):
    """Saves other tensors than the state holds."""

    def transform_object(self, write_item, object):
        found = super().transform_object(write_item, object)
        return found * 2 if isinstance(found, torch.Tensor) else found


class Leaving(DefaultSavePlanner):
    """Leaves a key out."""

    def set_up_planner(self, state_dict, storage_meta=None, is_coordinator=False):
        super().set_up_planner({k: v for k, v in state_dict.items() if k != "b"}, storage_meta, is_coordinator)


def test_a_planner_that_changes_tensors_is_asked_for_them(ck):
    dcp.save({"w": torch.arange(4.0)}, storage_writer=Writer(ck, 1), planner=Doubling())
    assert ck.restore().state["w"].tolist() == [0, 2, 4, 6]
    with pytest.raises(CheckpointException, match="makes bytes of its own of 'n'"):
        dcp.save({"w": torch.arange(4.0), "n": 1}, storage_writer=Writer(ck, 2), planner=Doubling())
    assert ck.steps() == [1]


def test_a_planner_that_leaves_keys_out_must_stage_by_other_means(ck):
    state = {"a": torch.zeros(2), "b": torch.ones(2)}
    dcp.save(state, storage_writer=Writer(ck, 1), planner=Leaving())
    assert list(ck.restore().state) == ["a"]
    started = dcp.async_save(state, storage_writer=Writer(ck, 2), planner=Leaving())
    with pytest.raises(CheckpointException, match="in 'b': the plan leaves it out"):
        started.result(WAIT_S)
    stager = dcp.staging.DefaultStager(dcp.staging.StagingOptions(False, False, False, False))
    dcp.async_save(state, storage_writer=Writer(ck, 3), planner=Leaving(), async_stager=stager).result(WAIT_S)
    stager.close()
    assert list(ck.restore(3).state) == ["a"]


def test_our_planners_refuse_other_storage(ck, tmp_path):
    with pytest.raises(CheckpointException, match=r"SavePlanner plans for pccheck_torch\.dcp\.Writer only"):
        dcp.save({"w": torch.zeros(1)}, checkpoint_id=tmp_path / "x", planner=SavePlanner())
    dcp.save({"w": torch.zeros(1)}, checkpoint_id=tmp_path / "x")
    with pytest.raises(CheckpointException, match=r"LoadPlanner plans for pccheck_torch\.dcp\.Reader only"):
        dcp.load({"w": torch.zeros(1)}, checkpoint_id=tmp_path / "x", planner=LoadPlanner())


class OwnBytes(DefaultLoadPlanner):
    def load_bytes(self, read_item, value):
        raise AssertionError("never called")


def test_a_load_planner_that_unpickles_is_refused(ck):
    dcp.save({"n": 1}, storage_writer=Writer(ck, 1), planner=SavePlanner())
    with pytest.raises(CheckpointException, match="OwnBytes unpickles 'n' itself"):
        dcp.load({"n": 0}, storage_reader=Reader(ck), planner=OwnBytes())


# -- several in flight, failures ---------------------------------------------------------------------------------------


def test_saves_overtake_each_other(tmp_path):
    """The first save is held where its data is written, until the second is durable; in_flight=2 must not care."""
    there, go = threading.Event(), threading.Event()

    def at(point):
        if point == "data-synced" and not there.is_set():
            there.set()
            assert go.wait(WAIT_S)

    weights = torch.zeros(1000)
    ck = pccheck.Checkpointer(tmp_path, in_flight=2, keep=2, _at=at)
    with ck, Backend(ck) as backend:
        first = backend.async_save({"w": weights}, 1).upload_completion
        assert there.wait(WAIT_S)
        weights.fill_(2)
        backend.async_save({"w": weights}, 2).upload_completion.result(WAIT_S)
        assert not first.done()
        target = {"w": torch.zeros(1000)}
        dcp.load(target, storage_reader=Reader(tmp_path), planner=LoadPlanner())
        assert target["w"].unique().tolist() == [2], "the newest that is durable"
        go.set()
        first.result(WAIT_S)
        assert backend.load(target).step == 2
        weights.fill_(3)
        backend.save({"w": weights}, 3)
        assert backend.load(target).step == 3
        assert target["w"].unique().tolist() == [3]


def test_a_lane_is_not_used_before_it_is_idle(tmp_path):
    held, go, order = threading.Event(), threading.Event(), []

    def at(point):
        if point == "data-synced" and not held.is_set():
            held.set()
            assert go.wait(WAIT_S)

    with pccheck.Checkpointer(tmp_path, in_flight=2, keep=3, _at=at) as ck, Backend(ck) as backend:
        first = backend.async_save({"w": torch.zeros(4)}, 1).upload_completion
        assert held.wait(WAIT_S)
        first.add_done_callback(lambda _: order.append("first ended"))
        backend.async_save({"w": torch.zeros(4)}, 2).upload_completion.result(WAIT_S)
        threading.Timer(0.2, go.set).start()
        with backend._next_lane(3) as (lane, saving):
            order.append("third began")
            saving.end(None)
        assert lane is backend._lanes[0]
        assert order == ["first ended", "third began"]


def test_failures_are_told_once(tmp_path):
    with Backend(tmp_path) as backend:
        with pytest.raises(UnsupportedLeafError):
            backend.async_save({"oops": object()}, 1)
        backend.wait(WAIT_S)
        with pytest.raises(UnsupportedLeafError, match="oops"):
            backend.save({"oops": object()}, 2)
        backend.save({"w": torch.zeros(1)}, 3)
        assert backend.checkpointer.steps() == [3]
    with pytest.raises(ClosedError):
        backend.wait()
    backend.close()


def test_a_skipped_save_fails_its_future(tmp_path):
    held, go = threading.Event(), threading.Event()

    def at(point):
        if point == "data-synced":
            held.set()
            assert go.wait(WAIT_S)

    with pccheck.Checkpointer(tmp_path, in_flight=1, _at=at) as ck:
        first = dcp.async_save({"w": torch.zeros(4)}, storage_writer=Writer(ck, 1), planner=SavePlanner())
        assert held.wait(WAIT_S)
        skipped = dcp.async_save(
            {"w": torch.zeros(4)}, storage_writer=Writer(ck, 2, when_full="skip"), planner=SavePlanner()
        )
        with pytest.raises(CheckpointException, match="save of step 2 was skipped"):
            skipped.result(WAIT_S)
        go.set()
        first.result(WAIT_S)
        ck.raise_errors()  # the futures told


def test_options_are_of_one_or_the_other(ck):
    with pytest.raises(OptionError, match="keep=3 is not allowed: keep must be left to the Checkpointer"):
        Backend(ck, keep=3)
    with pytest.raises(OptionError, match="in_flight"):
        Backend(ck, in_flight=2)


def damage(path, counter):
    """Flip a byte of the payload of a checkpoint."""
    entry = next(c for c in pccheck.open(path).checkpoints if c.counter == counter)
    with (path / entry.name).open("r+b") as file:
        file.seek(65536 + 10)
        byte = file.read(1)
        file.seek(65536 + 10)
        file.write(bytes([byte[0] ^ 1]))


def test_what_does_not_verify_is_passed_over(tmp_path):
    target = {"w": torch.zeros(1000), "n": 0}
    with Backend(tmp_path, keep=3) as backend:
        assert backend.load(target) is None, "an empty directory"
        for step in (1, 2, 3):
            backend.save({"w": torch.full((1000,), float(step)), "n": step}, step, metadata={"loss": step})
        counters = {e.step: e.counter for e in pccheck.open(tmp_path).checkpoints}
        damage(tmp_path, counters[3])
        with pytest.raises(DamagedError):
            backend.load(target, 3)
        assert target["n"] == 0
        assert target["w"].unique().tolist() == [0]
        loaded = backend.load(target)
        assert (loaded.step, loaded.metadata, target["n"]) == (2, {"loss": 2}, 2)
        assert target["w"].unique().tolist() == [2]
        assert [s.step for s in loaded.skipped] == [3]
        with pytest.raises(StepNotFoundError):
            backend.load(target, 9)


def test_nothing_that_verifies_is_an_error(tmp_path):
    target = {"w": torch.zeros(1000)}
    with Backend(tmp_path) as backend:
        backend.save({"w": torch.ones(1000)}, 1)
        damage(tmp_path, pccheck.open(tmp_path).checkpoints[0].counter)
        with pytest.raises(NoValidCheckpointError):
            backend.load(target)
    with pytest.raises(CheckpointException, match="is damaged"):
        dcp.load(target, storage_reader=Reader(tmp_path), planner=LoadPlanner())
    assert target["w"].unique().tolist() == [0]
    with pytest.raises(UsageError, match="make a Reader"):
        dcp.load(target, storage_reader=Reader(tmp_path), planner=LoadPlanner(), checkpoint_id="x")


def test_an_empty_directory_has_nothing_to_load(ck):
    with pytest.raises(CheckpointException, match="holds no checkpoint that all of its ranks hold"):
        dcp.load({"w": torch.zeros(1)}, storage_reader=Reader(ck), planner=LoadPlanner())
    with pytest.raises(UsageError, match="give this reader to dcp"):
        _ = Reader(ck).outline
