"""A state taken apart and put together: exact types, unambiguous paths, refusals that name the place."""

from __future__ import annotations

import collections
import dataclasses
import enum
import math
import struct
import sys
from typing import Any, NamedTuple

import msgspec
import pytest

from pccheck.errors import FormatError, UnsupportedLeafError
from pccheck.state import apart, nodes, paths, tree
from pccheck.testing.compare import difference, same


class Point(NamedTuple):
    x: Any
    y: Any


class Empty(NamedTuple):
    pass


@dataclasses.dataclass
class Config:
    rate: float
    _hidden: int = 3


@dataclasses.dataclass(frozen=True, slots=True)
class Slotted:
    a: Any
    b: Any = None


class Marker:
    """A leaf of the tests."""


def is_marker(value):
    return isinstance(value, Marker)


def round_trip(state):
    skeleton, leaves, _ = tree.flatten(state, is_marker)
    data = msgspec.json.encode(skeleton)
    decoded = msgspec.json.decode(data, type=nodes.Node)
    tree.check(decoded, range(len(leaves)))
    return tree.unflatten(decoded, leaves)


def with_attributes():
    ordered = collections.OrderedDict([("b", 1), ("a", 2)])
    ordered._metadata = collections.OrderedDict([("", {"version": 1})])
    return ordered


def moved():
    ordered = collections.OrderedDict(a=1, b=2, c=3)
    ordered.move_to_end("a")
    return ordered


NANS = [
    struct.unpack(">d", bytes.fromhex(bits))[0] for bits in ("7ff8000000000000", "fff8000000000001", "7ff0000000000009")
]
VALUES = [
    None, True, False, 0, -1, 2**53, 2**53 + 1, -(2**63), 2**70, -(10**400), 1 << 40_000,
    0.0, -0.0, 0.1, 5e-324, 1.7976931348623157e308, math.inf, -math.inf, *NANS,
    0j, complex(-0.0, math.nan), complex(math.inf, -0.0),
    "", "plain", "a.b/c~0\0\n", "😀", "\ud800 lone", "7ff", b"", b"\0\xff", "nan",
    {}, [], (), collections.OrderedDict(),
]  # fmt: skip


@pytest.mark.parametrize("value", VALUES, ids=lambda v: type(v).__name__)
def test_small_values_come_back_exactly(value):
    for state in (value, {"k": value}, [value], (value, [value])):
        assert difference(round_trip(state), state) is None


CONTAINERS = [
    {"a.b": 1, "a": {"b": 2}, "": 3, "x/y": 4, "x": {"y": 5}, "\0": 6, "😀": 7, "\ud800": 8},
    {0: "int", "0": "str", 1.5: "float", None: "none", b"0": "bytes", (0, "0", (True,)): "tuple", (): "empty", 2j: 1},
    {True: "bool"},
    {1: "int"},
    {-0.0: "negative zero"},
    {2**80: 1},
    with_attributes(),
    moved(),
    collections.defaultdict(list, {"a": [1]}),
    collections.defaultdict(None, a=1),
    collections.Counter("mississippi"),
    [[], [[]], (), ((),), {}, [{}]],
]


@pytest.mark.parametrize("state", CONTAINERS, ids=lambda s: f"{type(s).__name__}-{len(s)}")
def test_containers_come_back_exactly(state):
    assert difference(round_trip(state), state) is None


def test_the_order_of_keys_is_kept():
    state = {k: i for i, k in enumerate(["z", "a", 5, "m", -1])}
    assert list(round_trip(state)) == ["z", "a", 5, "m", -1]


def test_leaves_come_back_where_they_were():
    a, b = Marker(), Marker()
    back = round_trip({"x": [a, (b, 1)], 3: Point(a, {"q": b})})
    assert back["x"][0] is a
    assert back["x"][1][0] is b
    assert back[3].x is a
    assert back[3].y["q"] is b


def test_records_come_back_by_field_as_namedtuples():
    state = {"p": Point(1, [2]), "e": Empty(), "s": Slotted(1, (2,))}
    back = round_trip(state)
    assert same(state, back, by_field=True)
    assert not same(state, back)
    assert type(back["p"]).__name__ == "Point"
    assert type(back["p"]) is type(round_trip(state)["p"]), "the same class each time, so that trees compare equal"
    assert back["p"].x == 1


def test_fields_that_no_namedtuple_can_have_come_back_as_a_dict():
    assert same(round_trip(Config(0.5)), {"rate": 0.5, "_hidden": 3})


@pytest.mark.parametrize(
    "fields", [["class"], ["a b"], ["__class__"], ["1"], [""], ["ﬁ", "fi"], ["lambda: 0"], ["x" * 300]]
)
def test_names_out_of_a_file_never_reach_the_compiler(fields):
    node = nodes.Named("N", fields, [0] * len(fields))
    assert tree.unflatten(node, []) == dict.fromkeys(fields, 0)


def test_shared_containers_become_copies():
    shared = [1]
    back = round_trip({"a": shared, "b": shared})
    assert back["a"] == back["b"]
    assert back["a"] is not back["b"]


# -- paths -----------------------------------------------------------------------------------------------------------


def paths_of(state):
    return tree.flatten(state, is_marker)[2]


def test_paths_read_as_documented():
    m = Marker()
    state = {
        "model": {"layers.0": m, "a/b": m, "~": m},
        "opt": {0: m, "0": m, None: m, (1, "a/b"): m, "": m, '"q': m, "<": m, "@": m, "-3": m, "é": m, "\n": m},
        "seq": [m, (m,)],
        "p": Point(m, Slotted(m)),
    }
    assert paths_of(state) == [
        "model/layers.0", "model/a~1b", "model/~0",
        "opt/0", 'opt/"0"', "opt/<None>", "opt/<(1, 'a~1b')>", 'opt/""', 'opt/""q"', 'opt/"<"', 'opt/"@"', 'opt/"-3"',
        "opt/é", "opt/~{a}",
        "seq/0", "seq/1/0", "p/x", "p/y/a",
    ]  # fmt: skip


def test_attributes_of_an_ordered_dict_have_paths_of_their_own():
    state = collections.OrderedDict([("@_metadata", Marker())])
    state._metadata = [Marker()]
    assert paths_of(state) == ['"@_metadata"', "@_metadata/0"]


def test_the_root_has_the_empty_path():
    assert paths_of(Marker()) == [""]
    assert paths_of({"": Marker()}) == ['""']


def test_many_awkward_keys_have_different_paths():
    texts = ["", "0", "00", "-1", "a", "a/b", "a~1b", "a~0", "~", '"', '"0"', "<None>", "<0>", "@a", "\0", "~{0}", "/"]
    keys = [*texts, 0, -1, None, True, 1.5, -0.5, b"", (), (0,), ("0",), ((),), 2**70, 1j, *NANS, "nan"]
    found = [paths.component(k) for k in keys]
    assert len(set(found)) == len(keys)
    assert not any("/" in f for f in found), "splitting at the slash is always right"


def test_keys_that_cannot_be_told_apart_are_refused():
    state = {float("nan"): Marker(), float("nan"): Marker()}
    with pytest.raises(UnsupportedLeafError, match="told apart"):
        paths_of(state)


# -- refusals --------------------------------------------------------------------------------------------------------


class Level(enum.IntEnum):
    LOW = 1


class Name(str):
    pass


class Mine(dict):
    pass


@dataclasses.dataclass
class DictData(dict):
    a: int = 0


class Scheduler:
    def state_dict(self):
        return {}


class Training:
    def __pccheck_state__(self):
        return {}


REFUSED = [
    ({1, 2}, "sorted"),
    (frozenset(), "sorted"),
    (Level.LOW, r"int\(\.\.\.\)"),
    (Name("x"), "str"),
    (Mine(), "dict"),
    (DictData(), "dict"),
    (bytearray(b"x"), "bytes"),
    (lambda: 0, "no container"),
    (object(), "leave it out"),
    (Scheduler(), r"store its \.state_dict\(\)"),
    (Training(), "give it to save"),
    (collections.deque([1]), "leave it out"),
    (collections.defaultdict(lambda: 0), "default_factory"),
    ({frozenset(): 1}, "key"),
    ({Level.LOW: 1}, "key"),
    ({(1 << 40_000, Name("a")): 1}, "key"),
]


@pytest.mark.parametrize(("value", "reason"), REFUSED, ids=lambda v: str(type(v).__name__))
def test_what_would_not_come_back_is_refused_with_its_path(value, reason):
    with pytest.raises(UnsupportedLeafError, match=reason) as caught:
        tree.flatten({"outer": [0, value]}, is_marker)
    assert caught.value.path == "outer/1"
    assert caught.value.type_name.split(".")[-1] == type(value).__name__
    assert "outer/1" in str(caught.value)


def test_an_unset_field_is_refused():
    half = object.__new__(Slotted)
    object.__setattr__(half, "a", 1)
    with pytest.raises(UnsupportedLeafError, match="'b' is not set"):
        tree.flatten([half], is_marker)


@pytest.mark.parametrize("kind", [list, dict, Slotted])
def test_a_cycle_is_refused_with_its_path(kind):
    inner: Any = []
    outer = {list: lambda: [inner], dict: lambda: {"k": inner}, Slotted: lambda: Slotted(inner)}[kind]()
    inner.append(outer)
    with pytest.raises(UnsupportedLeafError, match="contains itself") as caught:
        tree.flatten({"a": outer}, is_marker)
    assert caught.value.path == {list: "a/0/0", dict: "a/k/0", Slotted: "a/a/0"}[kind]


def nested(depth, make=lambda inner: [inner]):
    state: Any = 1
    for _ in range(depth):
        state = make(state)
    return state


@pytest.mark.parametrize(
    "make", [lambda s: [s], lambda s: {"a": s}, lambda s: Point(0, s)], ids=["list", "dict", "named"]
)
def test_depth_is_bounded_alike_when_saving_and_when_loading(make):
    deepest = round_trip(nested(nodes.MAX_DEPTH, make))
    assert same(nested(nodes.MAX_DEPTH, make), deepest, by_field=True)
    with pytest.raises(UnsupportedLeafError, match="nested"):
        tree.flatten(nested(nodes.MAX_DEPTH + 1, make), is_marker)
    with pytest.raises(UnsupportedLeafError, match="nested"):
        tree.flatten(nested(100_000, make), is_marker)
    too_deep = nested(nodes.MAX_DEPTH + 1, lambda inner: nodes.List([inner]))
    with pytest.raises(FormatError, match="nested"):
        tree.check(too_deep, [])


def test_a_stack_that_is_too_short_is_a_refusal():
    def at(depth):
        return tree.flatten(nested(nodes.MAX_DEPTH), is_marker) if depth == 0 else at(depth - 1)

    assert at(sys.getrecursionlimit() // 4)
    with pytest.raises(UnsupportedLeafError, match="stack"):
        at(sys.getrecursionlimit() * 4 // 5)


def test_keys_nested_too_deeply_are_refused():
    with pytest.raises(UnsupportedLeafError, match="key"):
        tree.flatten({nested(5000, lambda k: (k,)): 1}, is_marker)


def test_lists_that_hold_each_other_twice_end(monkeypatch):
    monkeypatch.setattr(apart, "MAX_NODES", 1000)
    state: Any = 0
    for _ in range(60):
        state = [state, state]
    with pytest.raises(UnsupportedLeafError, match="more than 1,000"):
        tree.flatten(state, is_marker)


# -- what a file may claim -------------------------------------------------------------------------------------------

WRONG = [
    nodes.Leaf(1),
    nodes.Leaf(-1),
    nodes.List([nodes.Leaf(0), nodes.Leaf(0)]),
    nodes.Dict([("a", nodes.Leaf(0)), ("a", 1)]),
    nodes.Dict([(1, nodes.Leaf(0)), (True, 1)]),
    nodes.List([nodes.Leaf(0), nodes.Float("1.0.0")]),
    nodes.List([nodes.Leaf(0), nodes.Float("nan:7ff0000000000000")]),
    nodes.List([nodes.Leaf(0), nodes.Float("1" * 400)]),
    nodes.List([nodes.Leaf(0), nodes.Int("zz")]),
    nodes.List([nodes.Leaf(0), nodes.Text(b"\xff")]),
    nodes.List([nodes.Leaf(0), nodes.Named("P", ["x"], [])]),
    nodes.List([nodes.Leaf(0), nodes.Named("P", ["x", "x"], [1, 2])]),
    nodes.List([nodes.Leaf(0), nodes.Ordered([], [(1, 2)])]),
    nodes.List([nodes.Leaf(0), *(nodes.Named(f"P{i}", ["x"], [1]) for i in range(1001))]),
]


@pytest.mark.parametrize("node", WRONG, ids=lambda n: str(n)[:40])
def test_a_wrong_skeleton_is_a_format_error(node):
    with pytest.raises(FormatError):
        tree.check(node, [0])


def test_unflatten_needs_a_value_for_each_leaf():
    with pytest.raises(FormatError, match="leaf 0"):
        tree.unflatten(nodes.Leaf(0), [])
