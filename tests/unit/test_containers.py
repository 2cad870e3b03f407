"""Containers that an adapter opens: stored by key, given back as `like` has them; and what is left out by `...`."""

from __future__ import annotations

import collections
import sys
from importlib.metadata import EntryPoint
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
import pytest

from pccheck.containers import ContainerKind
from pccheck.errors import MismatchError, PccheckError, UnsupportedLeafError, UsageError
from pccheck.state import kinds, manifest, nodes
from pccheck.state.assembly import assemble
from pccheck.state.assigning import Assigning
from pccheck.state.kinds import Kinds
from pccheck.state.planner import Planner
from pccheck.testing.compare import difference
from tests.unit.captured import space_of
from tests.unit.split_arrays import Bag, BagKind, Known, Layer, Table

W, B = np.arange(6.0).reshape(2, 3), np.ones(3, "f4")


def stored(state, table=None):
    """Give the manifest and what reads its leaves."""
    ready = Planner(table or Table(), 4096).prepare(state, step=1)
    space, digests = space_of(ready), bytes(16 * len(ready.layout.chunks))
    found = manifest.decode(ready.encode_manifest(counter=1, incarnation=1, rank=0, world=1, base=0, digests=digests))
    read = []

    def reader(index):
        read.append(found.leaves[index].path)
        return memoryview(space)[found.leaves[index].offset :][: found.leaves[index].nbytes]

    return found, reader, read


def back(state, like=None, partial=False, table=None):
    found, reader, read = stored(state, table)
    how = {} if like is None else {"like": like, "partial": partial}
    return (*assemble(found, reader, table or Table(), **how), read)


# -- storing -----------------------------------------------------------------------------------------------------------


def test_a_dataclass_is_stored_by_field_and_any_other_as_a_dict():
    found, _, _ = stored({"l": Layer(W, 3, "static"), "b": Bag("static", w=B, n=None), "k": Known(1)})
    layer, bag, known = (node for _, node in found.tree.items)
    assert layer == nodes.Data("Layer", ["weight", "bias"], [nodes.Leaf(0), 3])
    assert bag == nodes.Dict([("w", nodes.Leaf(1)), ("n", None)])
    assert known == nodes.Data("Known", ["a", "name"], [1, "stored"]), "any other dataclass has all of its fields"
    assert [e.path for e in found.leaves] == ["l/weight", "b/w"]
    assert b"static" not in manifest.encode(found)


def test_keys_may_be_what_keys_of_a_dict_may_be():
    keys = [0, "0", True, None, b"x", 1.5, ("a", 1)]
    state = Bag()
    state.items = {key: n for n, key in enumerate(keys)}
    found, _, _ = back(state)
    assert list(found.items()) == list(state.items.items())
    assert [type(key) for key in found] == list(map(type, keys))


def test_without_like_plain_containers_come_back():
    found, _, _ = back([Layer(W, Bag(x=B)), Bag()])
    assert (type(found[0]).__name__, found[0]._fields) == ("Layer", ("weight", "bias"))
    assert difference(found[0].bias, {"x": B}) is None
    assert found[1] == {}


class Odd(ContainerKind):
    """Opens bags as it is told to."""

    def __init__(self, keys, children):
        self.keys, self.children = keys, children

    def recognises(self, value):
        return isinstance(value, Bag)

    def open(self, value):
        if isinstance(self.keys, Exception):
            raise self.keys
        return self.keys, self.children

    def close(self, like, children):
        raise AssertionError


@pytest.mark.parametrize(
    ("keys", "children", "told"),
    [
        (("a", "a"), (1, 2), "it opens as 2 values"),
        (("a",), (1, 2), "it opens as 2 values"),
        (([],), (1,), "it opens as 1 values"),
        ((frozenset(),), (1,), "a key of it cannot be stored"),
        ((1, True), (1, 2), "it opens as 2 values"),
        (UnsupportedLeafError("", "Bag", "not today"), (), "not today"),
        (("a",), ({1},), "a set has no order"),
    ],
)
def test_what_opens_strangely_is_refused_with_its_path(keys, children, told):
    table = Table()
    table.bags = Odd(keys, children)
    planner = Planner(table, 4096)
    with pytest.raises(UnsupportedLeafError, match=told) as caught:
        planner.prepare({"m": [Bag()]}, step=1)
    assert caught.value.path == ("m/0/a" if children == ({1},) else "m/0")


def test_a_container_within_itself_is_refused():
    bag = Bag()
    bag.items["me"] = [bag]
    with pytest.raises(UnsupportedLeafError, match="contains itself"):
        Planner(Table(), 4096).prepare({"b": bag}, step=1)


class Pair(NamedTuple):
    a: Any
    b: Any


def test_what_the_core_knows_is_never_asked_for():
    class Greedy(Odd):
        def recognises(self, value):
            assert not isinstance(value, (dict, list, tuple, int, str)), "Python's own"
            return False

    table = Table()
    table.bags = Greedy((), ())
    state = {"l": [1, (2,)], "o": collections.OrderedDict(a=1), "p": Pair(1, "x"), "d": Known(W)}
    found, _, _ = back(state, state, table=table)
    assert difference(found, state) is None


# -- again and again ---------------------------------------------------------------------------------------------------


def test_each_container_is_opened_once_per_later_save():
    table = Table()
    planner = Planner(table, 4096)
    state = {"l": [Layer(W, B), Layer(W, Bag(x=1.5))], "b": Bag("s", deep=Bag(y=W)), "n": 3}
    first = planner.prepare(state, step=1)
    table.bags.opened = 0
    state["l"][1].bias.items["x"] = 2.5
    again = planner.prepare(state, step=2)
    assert again.layout is first.layout
    assert table.bags.opened == 5
    state["l"][1].bias.items["z"] = 1
    assert "z" in repr(manifest.decode(_encoded(planner.prepare(state, step=3))).tree)
    state["b"].items = {"other": state["b"].items["deep"]}
    assert "other" in repr(manifest.decode(_encoded(planner.prepare(state, step=4))).tree)
    del state["l"][0].weight
    with pytest.raises(AttributeError):
        planner.prepare(state, step=5)


def _encoded(ready):
    digests = bytes(16 * len(ready.layout.chunks))
    return ready.encode_manifest(counter=1, incarnation=1, rank=0, world=1, base=0, digests=digests)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (Bag(a=1), Bag(b=1)), (Bag(a=1), Bag(a=1, b=1)), (Bag(a=1), Bag()), (Bag(a=1), Bag(a=W)),
        (Bag(a=[1]), Bag(a=[])),
        ([Bag(a=1), Bag(a=1, b=2)], [Bag(a=1, b=2), Bag(a=1)]), (Bag(a=1), {"a": 1}), (Layer(1, 2), Known(1)),
        (Layer(1, 2), [1, 2]), (Bag(a=Layer(W, 1)), Bag(a=Layer(1, W))),
    ],
)  # fmt: skip
def test_one_planner_never_mixes_them(one, other):
    planner, table = Planner(Table(), 4096), Table()
    for state in (one, other, one, one):
        found = manifest.decode(_encoded(planner.prepare(state, step=1)))
        expected, _, _ = stored(state, table)
        assert found.tree == expected.tree


def test_keys_that_are_equal_are_told_apart():
    planner = Planner(Table(), 4096)
    for keys in ([1, "a"], [True, "a"], [1.0, "a"], [0.0, (1,)], [-0.0, (1,)], [-0.0, (True,)]):
        bag = Bag()
        bag.items = dict.fromkeys(keys, 5)
        tree = manifest.decode(_encoded(planner.prepare(bag, step=1))).tree
        assert tree == nodes.Dict([(nodes.encode_key(key), 5) for key in keys])


class Fresh(BagKind):
    """Gives other objects each time: the same leaves, seen anew."""

    def open(self, value):
        keys, children = super().open(value)
        return keys, [child[:] if isinstance(child, np.ndarray) else child for child in children]


def test_children_may_be_made_anew_each_time():
    table = Table()
    table.bags = Fresh()
    planner = Planner(table, 4096)
    state = {"b": Bag(x=W, n=1, y=B), "w": W}
    first = planner.prepare(state, step=1)
    assert planner.prepare(state, step=2).layout is first.layout
    assert space_of(first)[: W.nbytes] == W.tobytes()


# -- like --------------------------------------------------------------------------------------------------------------


def test_with_like_its_containers_and_static_fields_come_back():
    state = {"l": Layer(W, Bag("saved", x=B)), "n": [Bag(z=1)]}
    like = {"l": Layer(np.zeros((2, 3)), Bag("like", x=np.zeros(3, "f4")), "mine"), "n": [Bag("t", z=0)]}
    found, mismatches, _ = back(state, like)
    assert not mismatches
    assert type(found["l"]) is Layer
    assert (found["l"].name, found["l"].bias.static, found["n"][0].static) == ("mine", "like", "t")
    assert (found["l"].weight == W).all()
    assert (found["l"].bias.items["x"] == B).all()
    assert found["n"][0].items["z"] == 1


def test_children_are_found_by_key_in_whatever_was_stored():
    for saved in (
        {"b": 2, "a": 1}, collections.OrderedDict(b=2, a=1), Bag(b=2, a=1), Pair(1, 2), collections.Counter(a=1, b=2),
    ):  # fmt: skip
        found, _, _ = back([saved], [Bag("s", a=0, b=0)])
        assert (found[0].static, found[0].items) == ("s", {"a": 1, "b": 2})
    for saved in ([1, 2], 1, "x" * 5000, W):
        with pytest.raises(MismatchError, match="0: type is"):
            back([saved], [Bag("s", a=0, b=0)])


def test_every_difference_is_reported_by_path():
    state = {"l": Layer(W, Bag(x=B, y=[1], gone=W)), "n": 1}
    like = {"l": Layer(np.zeros((3, 3)), Bag(x=np.zeros(3, "f4"), y=[1, 2], new=Bag(p=1, q=Bag()))), "n": 2}
    with pytest.raises(MismatchError) as caught:
        back(state, like)
    assert {(m.path, m.problem) for m in caught.value.mismatches} == {
        ("l/weight", "shape"), ("l/bias/y/1", "missing"), ("l/bias/new/p", "missing"), ("l/bias/new/q", "missing"),
        ("l/bias/gone", "unexpected"),
    }  # fmt: skip
    found, mismatches, read = back(state, like, partial=True)
    assert len(mismatches) == 5
    assert read == ["l/bias/x"]
    assert (found["l"].bias.items["x"] == B).all()
    assert found["l"].weight is like["l"].weight
    assert found["l"].bias.items["new"].items["p"] == 1


def test_a_placeholder_leaves_out_what_is_there():
    state = {"l": Layer(W, Bag(x=B)), "n": [1, W], "m": {"a": B}}
    like = {"l": Layer(..., Bag(x=...)), "n": [..., np.zeros((2, 3))], "m": ..., "not there": ...}
    found, mismatches, read = back(state, like)
    assert not mismatches
    assert read == ["n/1"]
    assert found["l"].weight is found["l"].bias.items["x"] is found["n"][0] is found["m"] is found["not there"] is ...
    assert (found["n"][1] == W).all()
    assert back(state, ...)[0] is ...


def test_a_placeholder_is_no_value_to_save():
    with pytest.raises(UnsupportedLeafError, match="ellipsis"):
        Planner(Table(), 4096).prepare({"a": ...}, step=1)


# -- in place ----------------------------------------------------------------------------------------------------------


def test_arrays_in_containers_are_written_where_they_are():
    for value in (back([Layer(W, Bag(x=B, n=5))])[0], [Layer(W, Bag(x=B, n=5))]):
        w, x = np.zeros((2, 3)), np.zeros(3, "f4")
        target = [Layer(w, Bag("mine", x=x, n=1), "mine")]
        found = Assigning(Table(), target, value)
        assert not found.mismatches
        found.carry_out()
        assert (w == W).all()
        assert (x == B).all()
        assert target[0].weight is w
        assert target[0].bias.items["x"] is x
        assert (target[0].bias.items["n"], target[0].bias.static, target[0].name) == (5, "mine", "mine")


def test_a_container_is_kept_where_nothing_in_it_is_replaced():
    bag = Bag("mine", x=np.zeros(3, "f4"), n=5)
    target = {"b": bag}
    Assigning(Table(), target, {"b": {"x": B, "n": 5}}).carry_out()
    assert target["b"] is bag
    assert (bag.items["x"] == B).all()


def test_what_does_not_fit_in_place_is_reported():
    target = Bag(x=np.zeros(3, "f4"), n=1, more=[1], bag=Bag())
    found = Assigning(Table(), target, {"x": B, "n": 2, "other": 1, "bag": 3})
    assert {(m.path, m.problem) for m in found.mismatches} == {
        ("n", "value"), ("more/0", "missing"), ("other", "unexpected"), ("bag", "type"),
    }  # fmt: skip
    assert target.items["n"] == 1


# -- finding them ------------------------------------------------------------------------------------------------------


class Registered(ContainerKind):
    """Opens what was registered, and counts how often it is asked."""

    def __init__(self):
        self.classes, self.asked = [], 0

    def recognises(self, value):
        self.asked += 1
        return type(value) in self.classes

    def open(self, value):
        return tuple(vars(value)), list(vars(value).values())

    def close(self, like, children):
        raise AssertionError


class Plain:
    def __init__(self, **items):
        vars(self).update(items)


@pytest.fixture
def adapter(monkeypatch):
    """An adapter of a module that is not loaded yet."""
    module, kind = ModuleType("pccheck_test_adapter"), Registered()
    module.kind, module.wrong = kind, 5
    monkeypatch.setitem(sys.modules, module.__name__, module)
    entries = [("framework_of_the_test", "pccheck_test_adapter:kind")]

    def entry_points(*, group):
        return [EntryPoint(name, value, group) for name, value in entries] if group == kinds.CONTAINERS else []

    monkeypatch.setattr(kinds, "entry_points", entry_points)
    kind.entries = entries
    return kind


def test_an_adapter_is_asked_once_its_framework_is_loaded(adapter, monkeypatch):
    table = Kinds()
    adapter.classes = [Plain, Known]
    assert table.container(Plain()) is None
    assert adapter.asked == 0
    with pytest.raises(UnsupportedLeafError, match="Plain"):
        Planner(table, 4096).prepare({"p": Plain(a=1)}, step=1)
    monkeypatch.setitem(sys.modules, "framework_of_the_test", ModuleType("framework_of_the_test"))
    for _ in range(3):
        assert table.container(Plain()) is adapter
        assert table.container(Known(1)) is adapter
    assert adapter.asked == 2, "it is remembered by class"
    Planner(table, 4096).prepare({"p": Plain(a=1), "k": Known(1)}, step=1)


def test_what_is_registered_later_is_found(adapter, monkeypatch):
    monkeypatch.setitem(sys.modules, "framework_of_the_test", ModuleType("framework_of_the_test"))
    table = Kinds()
    with pytest.raises(UnsupportedLeafError, match="Plain"):
        Planner(table, 4096).prepare({"p": Plain(a=1)}, step=1)
    adapter.classes.append(Plain)
    Planner(table, 4096).prepare({"p": Plain(a=1)}, step=1)


def test_leaves_are_not_asked_about_again(adapter, monkeypatch):
    monkeypatch.setitem(sys.modules, "framework_of_the_test", ModuleType("framework_of_the_test"))
    table = Kinds()
    state = {"a": [np.ones(n) for n in range(100)], "k": [Known(n) for n in range(5)], "v": [1, "x", 2.5] * 50}
    found, reader, _ = stored(state, table)
    assert adapter.asked <= 12, "dataclasses alone may be registered later"
    adapter.asked = 0
    assemble(found, reader, table, like=state)
    assert adapter.asked == 5


def test_an_adapter_that_is_none_or_cannot_be_loaded(adapter, monkeypatch):
    monkeypatch.setitem(sys.modules, "framework_of_the_test", ModuleType("framework_of_the_test"))
    adapter.entries[:] = [("framework_of_the_test", "pccheck_test_adapter:wrong")]
    with pytest.raises(PccheckError, match="no ContainerKind"):
        Kinds().container(Plain())
    adapter.entries[:] = [("framework_of_the_test", "no_such_module_at_all:kind")]
    assert Kinds().container(Plain()) is None


def test_an_abstract_leaf_is_asked_of_the_kind_of_its_module(monkeypatch):
    """Such as jax.ShapeDtypeStruct, which can never be saved, and which NumPy would take for its own."""
    table = Kinds()
    known = Table().kind
    abstract = type("Abstract", (), {"__module__": "alien.deep", "shape": (2, 3), "dtype": np.dtype("f4")})()
    table._named["alien"] = known
    known.like = lambda value: Table().kind.like(value) if isinstance(value, Bag) else known.told
    known.told = manifest.LeafEntry("", "split", "float32", (2, 3), 0, 24).spec()
    known.recognises = lambda value: False
    assert table.like(abstract) == (known, known.told)
    known.told = None
    assert table.like(abstract)[0].name == "numpy"


def test_what_can_be_no_leaf_is_a_usage_error():
    with pytest.raises(UsageError, match="Plain at a/b"):
        back({"a": Bag(b=W)}, {"a": Bag(b=Plain())})
