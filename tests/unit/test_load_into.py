"""Restored states into live ones: in place, after all of it was found to fit, and never by halves."""

from __future__ import annotations

import collections
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import pccheck
from pccheck import Restored, Shard
from pccheck.errors import MismatchError, UsageError
from pccheck.testing.compare import difference


class Moments(NamedTuple):
    m: Any
    v: Any
    count: int


@dataclass
class Position:
    epoch: int
    order: Any


@dataclass(frozen=True)
class Settings:
    lr: float
    betas: tuple[float, float]
    mask: Any


def restored(state: Any) -> Restored:
    return Restored(step=1, counter=1, state=state, metadata={})


def live(fill: float, *, lr: float = 0.1, step: int = 0) -> dict[str, Any]:
    return {
        "model": collections.OrderedDict(w=np.full((3, 4), fill), b=np.full(4, fill, "<f4")),
        "groups": [{"lr": lr, "betas": (0.9, 0.99 * lr), "params": [0, 1], "name": "all", "none": None}],
        "moments": Moments(np.full(3, fill), [np.full(2, fill)], step),
        "position": Position(step, np.arange(3) + step),
        "settings": Settings(lr, (lr, 2 * lr), np.full(2, fill)),
        "scalar": np.float32(fill),
        "step": step,
    }


def arrays_of(state: Any) -> list[np.ndarray]:
    model, moments = state["model"], state["moments"]
    return [model["w"], model["b"], moments.m, moments.v[0], state["position"].order, state["settings"].mask]


def test_arrays_stay_where_they_are_and_values_are_replaced() -> None:
    target, source = live(0.0), live(7.0, lr=0.5, step=9)
    arrays, containers = arrays_of(target), [target["model"], target["groups"], target["groups"][0], target["position"]]
    assert restored(source).load_into(target) == ()
    assert difference(target, live(7.0, lr=0.5, step=9)) is None
    assert all(a is b for a, b in zip(arrays, arrays_of(target), strict=True))
    now = [target["model"], target["groups"], target["groups"][0], target["position"]]
    assert all(a is b for a, b in zip(containers, now, strict=True)), "mutable containers are those of the target"
    assert type(target["settings"]) is Settings
    assert type(target["moments"]) is Moments
    for array in arrays_of(source):
        assert not any(np.shares_memory(array, own) for own in arrays)


def test_what_a_restore_gives_without_like_goes_into_the_classes_of_the_target(tmp_path: Path) -> None:
    target = live(0.0)
    with pccheck.Checkpointer(tmp_path) as ck:
        ck.save(5, live(3.0, step=4)).durable.result()
        back = ck.restore()
        assert back is not None
        assert back.load_into(target) == ()
    assert difference(target, live(3.0, step=4)) is None


def test_equal_values_in_immutable_places_are_no_difference() -> None:
    target = (np.zeros(2), (1, "a", float("nan"), np.float32(2)), Settings(0.1, (1.0, 2.0), np.zeros(2)))
    source = (np.ones(2), (1, "a", float("nan"), np.float32(2)), Settings(0.1, (1.0, 2.0), np.ones(2)))
    assert restored(source).load_into(target) == ()
    assert target[0].tolist() == target[2].mask.tolist() == [1, 1]


def test_values_with_nothing_mutable_above_them_must_be_equal() -> None:
    target = (np.zeros(2), (1, np.int8(5)), Settings(0.1, (1.0, 2.0), np.zeros(2)))
    source = (np.ones(2), (2, np.int8(6)), Settings(0.1, (1.0, -2.0), np.ones(2)))
    with pytest.raises(MismatchError) as caught:
        restored(source).load_into(target)
    assert [(m.path, m.problem) for m in caught.value.mismatches] == [
        ("1/0", "value"),
        ("1/1", "value"),
        ("2/betas/1", "value"),
    ]
    assert target[0].tolist() == [0, 0]
    assert len(restored(source).load_into(target, partial=True)) == 3
    assert target[0].tolist() == target[2].mask.tolist() == [1, 1]


def read_only() -> np.ndarray:
    array = np.zeros(2)
    array.flags.writeable = False
    return array


DIFFERENCES = {
    "missing": ({"a": 1, "x": {"y": np.zeros(2), "z": []}}, {"a": 1}, [("x/y", "missing"), ("x/z", "missing")]),
    "unexpected": ({"a": 1}, {"a": 1, "x": {"y": np.zeros(2)}}, [("x/y", "unexpected")]),
    "longer": ([1], [1, np.zeros(2)], [("1", "unexpected")]),
    "shorter": ([1, np.zeros(2)], [1], [("1", "missing")]),
    "a field less": (Moments(1, 2, 3), collections.namedtuple("Moments", "m v")(1, 2), [("count", "missing")]),
    "shape": ({"a": np.zeros(2)}, {"a": np.zeros(3)}, [("a", "shape")]),
    "dtype": ({"a": np.zeros(2)}, {"a": np.zeros(2, "<f4")}, [("a", "dtype")]),
    "fields": ({"a": np.zeros(2, "i4,i4")}, {"a": np.zeros(2, "i4,f4")}, [("a", "dtype")]),
    "no array": ({"a": np.zeros(2)}, {"a": 1}, [("a", "kind")]),
    "no value": ({"a": 1}, {"a": np.zeros(2)}, [("a", "type")]),
    "value": ({"a": 1}, {"a": 1.0}, [("a", "type")]),
    "bool": ({"a": 1}, {"a": True}, [("a", "type")]),
    "container": ({"a": [1]}, {"a": (1,)}, [("a", "type")]),
    "dict": ({"a": {"b": 1}}, {"a": [1]}, [("a", "type")]),
    "key": ({"a": {1: 2}}, {"a": {"1": 2}}, [("a/1", "missing"), ('a/"1"', "unexpected")]),
    "read-only": ({"a": read_only()}, {"a": np.ones(2)}, [("a", "kind")]),
    "part": ({"a": np.zeros(2)}, {"a": Shard(np.zeros(1), shape=(2,), offsets=(1,))}, [("a", "part")]),
    "other part": (
        {"a": Shard(np.zeros(1), shape=(2,), offsets=(0,))},
        {"a": Shard(np.zeros(1), shape=(2,), offsets=(1,))},
        [("a", "part")],
    ),
    "scalar": ({"a": np.float32(1)}, {"a": np.float64(1)}, [("a", "dtype")]),
}


@pytest.mark.parametrize("case", DIFFERENCES)
def test_every_difference_is_reported_and_nothing_is_touched(case: str) -> None:
    target, source, expected = DIFFERENCES[case]
    first, holder = np.zeros(3), {"first": np.zeros(3), "n": 1, "rest": target}
    first = holder["first"]
    with pytest.raises(MismatchError, match="does not fit the target") as caught:
        restored({"first": np.ones(3), "n": 2, "rest": source}).load_into(holder)
    assert [(m.path, m.problem) for m in caught.value.mismatches] == [("rest/" + path, what) for path, what in expected]
    assert (first.tolist(), holder["n"]) == ([0, 0, 0], 1)
    found = restored({"first": np.ones(3), "n": 2, "rest": source}).load_into(holder, partial=True)
    assert found == caught.value.mismatches
    assert (first.tolist(), holder["n"]) == ([1, 1, 1], 2)


def test_the_report_is_grouped_by_what_is_wrong() -> None:
    target = {"b": np.zeros(2), "c": np.zeros(1), "a": np.zeros(2), "d": np.zeros(3)}
    with pytest.raises(MismatchError) as caught:
        restored({"b": np.zeros(3), "d": np.zeros(4), "e": 1}).load_into(target)
    lines = str(caught.value).splitlines()
    assert lines[0] == "the checkpoint does not fit the target in 5 place(s):"
    assert lines[1:-1] == [
        " 2 x missing:",
        "  c: not in the checkpoint; the target has numpy <f8[1] there",
        "  a: not in the checkpoint; the target has numpy <f8[2] there",
        " 1 x unexpected:",
        "  e: the checkpoint has int, the target has nothing there",
        " 2 x shape:",
        "  b: shape is (3,) in the checkpoint, (2,) in the target",
        "  d: shape is (4,) in the checkpoint, (3,) in the target",
    ]


class Stateful:
    def state_dict(self) -> dict[str, Any]:
        return {"w": np.zeros(2)}


def test_an_object_with_a_state_dict_is_told_of_it() -> None:
    with pytest.raises(UsageError, match=r"Stateful at its root, which can be no leaf; pass its \.state_dict\(\)"):
        restored({"w": np.ones(2)}).load_into(Stateful())
    with pytest.raises(UsageError, match=r"which can be no leaf$"):
        restored({"w": np.ones(2)}).load_into({"w": object()})


def test_what_has_no_place_yet_leads_to_load_state_dict() -> None:
    """The target of a restart: its optimizer has not stepped, so that it has no moments to write to."""
    state = {"state": {0: {"exp_avg": np.ones(2)}}, "lr": 0.1}
    with pytest.raises(MismatchError) as caught:
        restored(state).load_into({"state": {}, "lr": 0.2})
    advice = str(caught.value).splitlines()[-1]
    assert advice.index("load_state_dict()") < advice.index("TrainingState") < advice.index("partial=True")
    with pytest.raises(MismatchError) as caught:
        restored(state).load_into({"state": state["state"], "lr": 1})
    assert "load_state_dict" not in str(caught.value)


def test_a_long_report_is_cut_and_its_list_is_not() -> None:
    with pytest.raises(MismatchError, match=r"\.\.\. and 1,000 more") as caught:
        restored({}).load_into({str(i): 0 for i in range(2000)})
    assert len(caught.value.mismatches) == 2000


def test_tied_arrays_of_the_target_are_written_once_and_need_one_source() -> None:
    one, two = np.zeros(2), np.ones(2)
    target = {"a": one, "b": one}
    assert restored({"a": two, "b": two}).load_into(target) == ()
    assert restored({"a": two, "b": two.view()}).load_into(target) == (), "the same memory, seen twice"
    with pytest.raises(MismatchError, match="b: tied is"):
        restored({"a": two, "b": np.full(2, 5.0)}).load_into(target)
    assert one.tolist() == [1, 1]
    apart = {"a": np.zeros(2), "b": np.zeros(2)}
    restored({"a": two, "b": two}).load_into(apart)
    assert apart["a"].tolist() == apart["b"].tolist() == [1, 1]


def test_shards_are_written_where_the_parts_are_the_same() -> None:
    target = {"w": Shard(np.zeros(2), shape=(6,), offsets=(2,))}
    restored({"w": Shard(np.ones(2), shape=(6,), offsets=(2,))}).load_into(target)
    assert target["w"].array.tolist() == [1, 1]


def test_what_can_be_no_leaf_is_a_usage_error() -> None:
    with pytest.raises(UsageError, match="a set at a"):
        restored({"a": 1}).load_into({"a": {1}})
    loop: list[Any] = []
    loop.append(loop)
    deep: Any = [1]
    for _ in range(200):
        deep = [deep]
    with pytest.raises(UsageError, match="levels deep"):
        restored(deep).load_into(loop)


LEAVES = st.sampled_from(["f4", "i8", "U3", "f8"]).flatmap(
    lambda dtype: st.lists(st.integers(0, 3), max_size=2).map(lambda shape: np.zeros(shape, dtype))
)
TREES = st.recursive(
    LEAVES | st.integers() | st.floats(allow_nan=False) | st.text(max_size=3),
    lambda kids: st.lists(kids, max_size=3) | st.dictionaries(st.text(max_size=2), kids, max_size=3) | st.tuples(kids),
    max_leaves=10,
)


def changed(value: Any, rng: np.random.Generator) -> Any:
    """Give the same structure with other values."""
    if isinstance(value, np.ndarray):
        return rng.integers(0, 9, value.shape).astype(value.dtype)
    if isinstance(value, dict):
        return {k: changed(v, rng) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(changed(v, rng) for v in value)
    return value + type(value)(1)


@settings(max_examples=60, deadline=None)
@given(TREES, st.integers(0, 99))
def test_any_state_of_the_same_structure_gets_in(tree: Any, seed: int) -> None:
    target, source = {"root": tree}, {"root": changed(tree, np.random.default_rng(seed))}
    assert restored(source).load_into(target) == ()
    assert difference(target, source) is None
