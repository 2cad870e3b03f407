"""Restoring into `like`: its classes come back, and one report names every place that differs."""

from __future__ import annotations

import collections
import dataclasses
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
import pytest

from pccheck.errors import MismatchError, UsageError
from pccheck.state import manifest
from pccheck.state.assembly import assemble, fit_of
from pccheck.state.fit import Mismatch
from pccheck.state.kinds import kind_of
from pccheck.state.planner import Planner
from pccheck.testing.compare import difference, same
from tests.unit.captured import space_of


class Point(NamedTuple):
    x: Any
    y: Any


@dataclasses.dataclass(frozen=True, slots=True)
class Frozen:
    a: Any
    b: Any = 5


@dataclasses.dataclass
class Open:
    a: Any
    b: Any = dataclasses.field(init=False, default=1)

    def __post_init__(self):
        self.note = "made by the constructor"


def restored(state, like, partial=False):
    """Save a state and restore it into `like`: (state, mismatches, indices of the leaves that were read)."""
    prepared = Planner(kind_of, 4096).prepare(state, step=1)
    space = space_of(prepared)
    digests = bytes(16 * len(prepared.layout.chunks))
    data = prepared.encode_manifest(counter=1, incarnation=1, rank=0, world=1, base=0, digests=digests)
    found, read = manifest.decode(data), []

    def reader(index):
        read.append(found.leaves[index].path)
        entry = found.leaves[index]
        return memoryview(space)[entry.offset : entry.offset + entry.nbytes]

    wants = fit_of(found, like, kind_of).wants
    assert all(found.leaves[w.index].nbytes == w.spec.nbytes for w in wants)
    return *assemble(found, reader, kind_of, like=like, partial=partial), read


STATE = {
    "w": np.arange(6, dtype="<f4").reshape(2, 3), "p": Point(np.ones(2), 3), "f": Frozen(np.zeros(1), "t"),
    "l": [1, 2.0, None], "t": (True, "x", b"y"), "o": collections.OrderedDict(b=1, a=2), "s": np.float32(2),
    "long": "é" * 5000, "raw": b"x" * 5000, 3: {"c": 1j},
}  # fmt: skip


def zeros_like(value):
    if isinstance(value, np.ndarray):
        return np.zeros_like(value)
    if isinstance(value, np.generic):
        return type(value)(0)
    if isinstance(value, dict):
        return type(value)((k, zeros_like(v)) for k, v in value.items())
    if isinstance(value, Point):
        return Point(*map(zeros_like, value))
    if isinstance(value, Frozen):
        return Frozen(zeros_like(value.a), zeros_like(value.b))
    if isinstance(value, (list, tuple)):
        return type(value)(map(zeros_like, value))
    return None if value is None else type(value)()


def test_the_classes_of_like_and_the_values_of_the_checkpoint_come_back():
    back, mismatches, _ = restored(STATE, zeros_like(STATE))
    assert mismatches == ()
    assert difference(back, STATE) is None, "Point and Frozen themselves, not what is made in their place"


def test_like_decides_the_container_where_the_content_is_the_same():
    state = {"d": {"a": 1, "b": 2}, "p": Point(1, 2), "o": collections.OrderedDict(x=1)}
    Other = collections.namedtuple("Other", "y x")
    like = {
        "o": {"x": 0}, "d": collections.OrderedDict(b=0, a=0), "p": Other(0, 0),
    }  # fmt: skip
    back, _, _ = restored(state, like)
    assert list(back) == ["o", "d", "p"]
    assert same(back, {"o": {"x": 1}, "d": collections.OrderedDict(b=2, a=1), "p": Other(2, 1)})
    back, _, _ = restored({"d": {"a": 1}}, {"d": collections.defaultdict(list, a=0)})
    assert same(back, {"d": collections.defaultdict(list, a=1)})
    back, _, _ = restored([Point(1, 2)], [Point(0, 0)._replace(x=0)])
    assert type(back[0]) is Point


def test_a_dataclass_keeps_what_is_no_field_and_its_constructor_is_not_called():
    like = Open(0)
    like.note = "mine"
    back, _, _ = restored([Open(7)], [like])
    assert (back[0].a, back[0].b, back[0].note) == (7, 1, "mine")
    assert like.a == 0, "`like` itself is left alone"


def test_what_an_ordered_dict_carries_is_of_the_checkpoint():
    state, like = collections.OrderedDict(a=1), collections.OrderedDict(a=0)
    state._metadata, like._metadata = {"version": 1, "w": np.arange(3)}, {"version": 2}
    back, _, _ = restored(state, like)
    assert same(back, state)


def test_arrays_follow_like_in_kind_only():
    class Abstract:
        shape, dtype = (2, 3), np.dtype("<f4")

    for like in (np.empty((2, 3), "<f4"), Abstract(), np.empty((3, 2), "<f4").T):
        back, _, _ = restored({"w": STATE["w"]}, {"w": like})
        assert difference(back["w"], STATE["w"]) is None
    back, _, _ = restored([np.float32(2), np.array(3.0)], [np.array(0, "<f4"), np.float64(0)])
    assert (type(back[0]), type(back[1])) == (np.ndarray, np.float64)


LIKES = {
    "missing": ({"a": 1}, {"a": 1, "b/c": np.zeros((2, 3), "<f4"), "n": [1, {}]}, [
        ("b~1c", "missing", "numpy <f4[2, 3]", ""), ("n/0", "missing", "int", ""), ("n/1", "missing", "dict", ""),
    ]),
    "unexpected": ({"a": 1, "x": {"y": np.zeros(2), "z": [b"q", ()]}}, {"a": 1}, [
        ("x/y", "unexpected", "", "numpy <f8[2]"), ("x/z/0", "unexpected", "", "bytes"),
        ("x/z/1", "unexpected", "", "tuple"),
    ]),
    "shorter": ([1, 2, 3], [1], [("1", "unexpected", "", "int"), ("2", "unexpected", "", "int")]),
    "longer": ((1,), (1, 2), [("1", "missing", "int", "")]),
    "shape": ({"a": np.zeros((2, 3))}, {"a": np.zeros((3, 2))}, [("a", "shape", "(3, 2)", "(2, 3)")]),
    "dtype": ([np.zeros(2, "<f4")], [np.zeros(2, "<f2")], [("0", "dtype", "<f2 (numpy)", "<f4 (numpy)")]),
    "byte order": ([np.zeros(2, "<f4")], [np.zeros(2, ">f4")], [("0", "dtype", ">f4 (numpy)", "<f4 (numpy)")]),
    "bfloat16": ([np.zeros(2, ml_dtypes.bfloat16)], [np.zeros(2, "<f2")], [
        ("0", "dtype", "<f2 (numpy)", "bfloat16 (numpy)"),
    ]),
    "fields": ([np.zeros(2, [("a", "<f4")])], [np.zeros(2, [("b", "<f4")])], [
        ("0", "dtype", "struct (numpy)", "struct (numpy)"),
    ]),
    "array for value": ([1.0], [np.float64(1)], [("0", "kind", "numpy <f8[]", "float")]),
    "value for array": ([np.float64(1)], [1.0], [("0", "kind", "float", "numpy <f8[]")]),
    "array for container": ([{}], [np.zeros(1)], [("0", "kind", "numpy <f8[1]", "dict")]),
    "container for array": ([np.zeros(1)], [[]], [("0", "type", "list", "numpy <f8[1]")]),
    "int for bool": ([True], [1], [("0", "type", "int", "bool")]),
    "none for int": ([None], [1], [("0", "type", "int", "NoneType")]),
    "list for tuple": ([(1,)], [[1]], [("0", "type", "list", "tuple")]),
    "tuple for namedtuple": ([Point(1, 2)], [(1, 2)], [("0", "type", "tuple", "namedtuple")]),
    "value for container": ([[1]], [1], [("0", "type", "int", "list")]),
    "key type": ({1: 2}, {True: 2}, [("<True>", "missing", "int", ""), ("1", "unexpected", "", "int")]),
    "key text": ({1: 2}, {"1": 2}, [('"1"', "missing", "int", ""), ("1", "unexpected", "", "int")]),
    "field": ([Point(1, 2)], [Frozen(1)], [
        ("0/a", "missing", "int", ""), ("0/b", "missing", "int", ""),
        ("0/x", "unexpected", "", "int"), ("0/y", "unexpected", "", "int"),
    ]),
    "long text": (["x" * 5000, b"x" * 5000], [b"", ""], [
        ("0", "kind", "bytes", "str"), ("1", "kind", "str", "bytes"),
    ]),
    "long text for array": (["x" * 5000], [np.zeros(5000, "u1")], [("0", "kind", "numpy |u1[5000]", "str")]),
    "root": (1, "x", [("", "type", "str", "int")]),
}  # fmt: skip


@pytest.mark.parametrize("case", LIKES)
def test_every_difference_is_reported_by_path(case):
    state, like, expected = LIKES[case]
    with pytest.raises(MismatchError) as caught:
        restored(state, like)
    assert [(m.path, m.problem, m.expected, m.found) for m in caught.value.mismatches] == expected
    assert all(str(m) in str(caught.value) for m in caught.value.mismatches)
    _, mismatches, _ = restored(state, like, partial=True)
    assert mismatches == caught.value.mismatches


def test_one_report_lists_all_and_nothing_is_read_before():
    state = {"a": np.zeros(2), "b": np.zeros(3), "c": 1, "d": np.zeros(1)}
    like = {"a": np.zeros(3), "b": np.zeros(3, "i4"), "c": 1.0, "e": 0}
    with pytest.raises(MismatchError) as caught:
        restored(state, like)
    assert [(m.path, m.problem) for m in caught.value.mismatches] == [
        ("a", "shape"), ("b", "dtype"), ("c", "type"), ("e", "missing"), ("d", "unexpected"),
    ]  # fmt: skip
    back, _, read = restored(state, like, partial=True)
    assert read == []
    assert same(back, like), "what does not fit stays as `like` has it"


def test_partial_restores_what_fits_and_reads_no_more():
    kept = np.full(4, 9.0)
    back, mismatches, read = restored(
        {"a": np.arange(3.0), "b": np.arange(2.0), "n": 1}, {"a": np.zeros(3), "b": kept, "n": 0}, partial=True
    )
    assert read == ["a"]
    assert back["a"].tolist() == [0, 1, 2]
    assert back["b"] is kept
    assert back["n"] == 1
    assert [str(m) for m in mismatches] == ["b: shape is (2,) in the checkpoint, (4,) in `like`"]


def test_mismatches_read_well():
    assert str(Mismatch("a/b", "missing", "int", "")) == "a/b: not in the checkpoint; `like` has int there"
    assert (
        str(Mismatch("", "unexpected", "", "int"))
        == "the state itself: the checkpoint has int, `like` has nothing there"
    )


def test_tied_arrays_are_read_once_and_stay_tied():
    a = np.arange(5.0)
    back, _, read = restored({"x": a, "y": a}, {"x": np.zeros(5), "y": np.zeros(5)})
    assert back["x"] is back["y"]
    assert read == ["x"]


def test_what_can_be_no_leaf_is_a_usage_error():
    with pytest.raises(UsageError, match="a set at a"):
        restored({"a": 1}, {"a": {1}})
    loop: Any = [1]
    loop[0] = loop
    with pytest.raises(MismatchError):
        restored([1], loop)
    with pytest.raises(MismatchError):
        restored([1], [1, loop])
