"""Planning: exact bytes, ties, cached plans that are never stale, refusals before anything else."""

from __future__ import annotations

import gc
import itertools
import threading
import weakref
from collections import OrderedDict

import ml_dtypes
import numpy as np
import pytest
import xxhash

from pccheck import format
from pccheck.errors import UnsupportedLeafError, UsageError
from pccheck.state import manifest
from pccheck.state.assembly import assemble
from pccheck.state.forms import SMALL_BYTES
from pccheck.state.kinds import kind_of
from pccheck.state.planner import Planner
from pccheck.testing.compare import difference, same
from tests.unit.captured import space_of


def planner(chunk_bytes=4096):
    return Planner(kind_of, chunk_bytes)


def encoded(prepared, **changes):
    space = space_of(prepared)
    digests = b"".join(
        xxhash.xxh3_128_digest(bytes(space[c.start : c.start + c.data_bytes]).ljust(c.stored_bytes, b"\0"))
        for c in prepared.layout.chunks
    )
    about = {"counter": 1, "incarnation": 1, "rank": 0, "world": 1, "base": 0, "digests": digests} | changes
    return prepared.encode_manifest(**about)


def restored(prepared, **how):
    found = manifest.decode(encoded(prepared))
    space = space_of(prepared)

    def read(index):
        entry = found.leaves[index]
        return memoryview(space)[entry.offset : entry.offset + entry.nbytes]

    return assemble(found, read, kind_of, **how)[0]


def example():
    return {
        "w": np.arange(5000, dtype="<f4"), "f": np.asfortranarray(np.arange(12).reshape(3, 4)), "lr": 0.1, "step": 7,
        "nested": [np.zeros((0, 3)), (np.float32(1.5), b"x" * 10_000, "é" * 10_000)], "view": np.arange(10)[::2],
    }  # fmt: skip


def test_what_was_prepared_comes_back():
    state = example()
    assert difference(restored(planner().prepare(state, step=1)), state) is None


def test_a_leaf_may_be_the_whole_state():
    for state in (np.arange(3), 3, "x" * 5000, {}, None):
        assert difference(restored(planner().prepare(state, step=1)), state) is None


def test_dense_arrays_are_not_copied_and_others_are_ours():
    state = example()
    prepared = planner().prepare(state, step=1)
    addresses = set(map(int, prepared.addresses))
    assert state["w"].ctypes.data in addresses
    assert state["f"].ctypes.data in addresses
    assert state["view"].ctypes.data not in addresses
    assert not prepared.stable
    assert planner().prepare({"a": np.arange(10)[::2], "b": "x" * 9000, "n": np.zeros(0)}, step=1).stable


def test_the_manifest_fits_the_room_that_was_told():
    prepared = planner().prepare(example(), step=-(2**63), metadata={"a": "x" * 60_000})
    huge = encoded(
        prepared, counter=2**48, incarnation=2**63 - 1, rank=2**31 - 2, world=2**31 - 1, base=2**48,
        link="\x01" * 4096, writer="\x01" * 1000,
    )  # fmt: skip
    assert len(huge) <= prepared.manifest_room
    assert prepared.manifest_room % format.PAGE == 0
    assert manifest.decode(huge).link == "\x01" * 4096


def test_longer_numbers_need_no_more_room():
    p = planner()
    small = p.prepare({"values": [1] * 500, "w": np.zeros(3)}, step=1)
    large = p.prepare({"values": [2**53] * 500, "w": np.zeros(3)}, step=10**15)
    assert len(encoded(large)) <= small.manifest_room


def test_texts_that_are_too_long_and_wrong_digests_are_refused():
    prepared = planner().prepare(example(), step=1)
    for wrong in ({"link": "x" * 4097}, {"writer": "x" * 1001}, {"digests": b"x"}):
        with pytest.raises(UsageError):
            encoded(prepared, **wrong)
    assert manifest.decode(encoded(prepared, writer="\udcff")).writer == "\\udcff"


# -- ties ------------------------------------------------------------------------------------------------------------


def test_tied_arrays_are_stored_once_and_come_back_tied():
    a, thin = np.arange(1000.0), np.arange(100)[::3]
    state = {"a": a, "b": {"tied": a}, "view": a[:], "part": a[10:], "thin": thin, "thin2": thin, "z": np.zeros(0)}
    prepared = planner().prepare(state, step=1)
    assert prepared.layout.data_bytes < 3 * a.nbytes
    found = manifest.decode(encoded(prepared))
    assert [e.path for e in found.leaves] == ["a", "b/tied", "view", "part", "thin", "thin2", "z"]
    back = restored(prepared)
    assert back["a"] is back["b"]["tied"] is back["view"]
    assert back["thin"] is back["thin2"]
    assert not np.shares_memory(back["a"], back["part"])
    assert difference(back, state) is None


def test_ties_that_appear_or_vanish_are_seen_through_a_cached_plan():
    a, b, c = np.arange(9.0), np.arange(9.0), np.arange(9.0)
    p = planner()
    sizes = []
    for state in (
        {"x": a, "y": b, "z": c},
        {"x": a, "y": a, "z": c},
        {"x": c, "y": a, "z": a},
        {"x": b, "y": c, "z": a},
    ):
        prepared = p.prepare(state, step=1)
        back = restored(prepared)
        assert difference(back, state) is None
        assert [back[i] is back[j] for i, j in ("xy", "yz")] == [state[i] is state[j] for i, j in ("xy", "yz")]
        sizes.append(len(prepared.layout.pieces))
    assert sizes == [3, 2, 2, 3]


# -- the cached plan -------------------------------------------------------------------------------------------------


def changed_values(state):
    return {
        **state,
        "w": state["w"] + 1,
        "lr": -0.0,
        "step": 8,
        "nested": [state["nested"][0], (np.float32(2.5), b"y" * 10_000, "ö" * 10_000)],
    }


def test_an_unchanged_structure_keeps_its_layout_and_shows_new_values():
    p, state = planner(), example()
    first = p.prepare(state, step=1)
    later = changed_values(state)
    second = p.prepare(later, step=2, metadata={"loss": 0.5})
    assert second.layout is first.layout
    assert difference(restored(second), later) is None
    found = manifest.decode(encoded(second))
    assert (found.step, found.metadata) == (2, {"loss": 0.5})
    assert difference(restored(p.prepare(state, step=3)), state) is None


BASE = {"a": np.zeros((4, 6), "<f4"), "b": [1, 2.0, "s", None], "c": {1: b"x", "k": np.float32(1)}}
STALE = {
    "dtype": {**BASE, "a": np.zeros((4, 6), "<i4")},
    "byte order": {**BASE, "a": np.zeros((4, 6), ">f4")},
    "shape": {**BASE, "a": np.zeros((6, 4), "<f4")},
    "smaller shape": {**BASE, "a": np.zeros((4, 5), "<f4")},
    "memory order": {**BASE, "a": np.zeros((6, 4), "<f4").T},
    "strides": {**BASE, "a": np.zeros((4, 12), "<f4")[:, ::2]},
    "array to scalar": {**BASE, "a": np.float32(0)},
    "array to value": {**BASE, "a": 0},
    "scalar's dtype": {**BASE, "c": {1: b"x", "k": np.float64(1)}},
    "scalar's other dtype": {**BASE, "c": {1: b"x", "k": ml_dtypes.bfloat16(1)}},
    "int to bool": {**BASE, "b": [True, 2.0, "s", None]},
    "int to float": {**BASE, "b": [1.0, 2.0, "s", None]},
    "list to tuple": {**BASE, "b": (1, 2.0, "s", None)},
    "longer list": {**BASE, "b": [1, 2.0, "s", None, None]},
    "key type": {**BASE, "c": {True: b"x", "k": np.float32(1)}},
    "key float": {**BASE, "c": {1.0: b"x", "k": np.float32(1)}},
    "key name": {**BASE, "c": {1: b"x", "K": np.float32(1)}},
    "key order": {"b": BASE["b"], "a": BASE["a"], "c": BASE["c"]},
    "key more": {**BASE, "d": None},
    "str that got long": {**BASE, "b": [1, 2.0, "s" * (SMALL_BYTES + 1), None]},
    "bytes that got long": {**BASE, "c": {1: b"x" * (SMALL_BYTES + 1), "k": np.float32(1)}},
    "nothing": {},
}


SAME_LEAVES = {
    "int to bool",
    "int to float",
    "list to tuple",
    "longer list",
    "key type",
    "key float",
    "key order",
    "key more",
}


@pytest.mark.parametrize("change", STALE)
def test_a_changed_structure_is_never_saved_by_a_stale_plan(change):
    p = planner()
    before = p.prepare(BASE, step=1)
    after = p.prepare(STALE[change], step=2)
    assert difference(restored(after), STALE[change]) is None
    assert (before.layout is after.layout) is (change in SAME_LEAVES)
    assert difference(restored(p.prepare(BASE, step=3)), BASE) is None


@pytest.mark.parametrize("moved", list(itertools.product([(), ("a",), ("b", "a")], repeat=2)))
def test_an_ordered_dict_is_stored_in_its_own_order_through_a_cached_plan(moved):
    plan = planner()
    for step, keys in enumerate([*moved, *moved]):
        state = [OrderedDict((key, np.full(3, n + 10 * m)) for n, key in enumerate("abc")) for m in range(2)]
        for key in keys:
            state[1].move_to_end(key)
        assert difference(restored(plan.prepare(state, step=step)), state) is None


def test_a_list_that_grows_leaves_the_layout_alone():
    p, losses = planner(), []
    arrays = {f"w{i}": np.zeros(i) for i in range(10)}
    layouts = []
    for step in range(5):
        losses.append(step / 3)
        state = {"losses": losses, "model": {**arrays, "w3": np.full(3, step)}, "step": [step] * step}
        prepared = p.prepare(state, step=step)
        assert difference(restored(prepared), state) is None
        layouts.append(prepared.layout)
    assert all(layout is layouts[0] for layout in layouts)


@pytest.mark.parametrize(
    ("before", "after"),
    [(0.0, -0.0), (-0.0, 0.0), (0j, -0j), (1.0, float("nan")), (1, 2), ("a", "b"), (b"a", b"b"), (2**53, 2**60)],
)
def test_values_that_compare_equal_are_told_apart(before, after):
    p = planner()
    for value in (before, after, before):
        state = {"v": value, "k": {value: 1}, "t": ({(value,): 2},)}
        assert difference(restored(p.prepare(state, step=1)), state) is None


def test_an_array_that_moved_is_read_where_it_is_now():
    p = planner()
    held = []
    for value in range(20):
        array = np.full(3000, value, "<i4")
        prepared = p.prepare({"a": array}, step=value)
        assert int(prepared.addresses[0]) == array.ctypes.data
        assert difference(restored(prepared), {"a": array}) is None
        held.append(array if value % 3 else None)


def test_the_plan_keeps_no_leaf_alive():
    p = planner()
    array = np.zeros(1000)
    gone = weakref.ref(array)
    prepared = p.prepare({"a": array, "b": [array[::2]]}, step=1)
    del array
    gc.collect()
    assert gone() is not None, "what is prepared keeps it"
    prepared.keep = None
    gc.collect()
    assert gone() is None, "its plan does not"
    again = np.ones(1000)
    assert same(restored(p.prepare({"a": again, "b": [again[::2]]}, step=2)), {"a": again, "b": [again[::2]]})


def test_one_planner_serves_many_threads():
    p, wrong = planner(), []

    def save(n):
        for i in range(30):
            state = {"n": n, "a": np.full(100 + n % 2, i, "<i8"), "i": i}
            if not same(restored(p.prepare(state, step=i)), state):
                wrong.append((n, i))

    threads = [threading.Thread(target=save, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not wrong


# -- refusals --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cached", [False, True])
@pytest.mark.parametrize(
    "bad", [np.array([object()]), {1}, np.ma.masked_array([1]), lambda: 0], ids=lambda b: type(b).__name__
)
def test_what_cannot_be_stored_is_refused_with_its_path(bad, cached):
    p = planner()
    if cached:
        p.prepare({"m": {"ok": np.zeros(3), "a/b": [1, np.zeros(1)]}}, step=0)
    with pytest.raises(UnsupportedLeafError) as caught:
        p.prepare({"m": {"ok": np.zeros(3), "a/b": [1, bad]}}, step=1)
    assert caught.value.path == "m/a~1b/1"
    good = {"m": {"ok": np.ones(3), "a/b": [1, np.zeros(1)]}}
    assert same(restored(p.prepare(good, step=2)), good), "and the next save goes on"


def test_a_refusal_of_the_root_names_it():
    with pytest.raises(UnsupportedLeafError, match="the state itself"):
        planner().prepare(np.array([object()]), step=1)


def test_wrong_metadata_is_refused():
    with pytest.raises(UsageError, match=r"metadata\['x'\]"):
        planner().prepare({}, step=1, metadata={"x": object()})
