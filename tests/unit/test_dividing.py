"""Replicated leaves: each rank stores its part, all parts together are the array, and ties stay ties."""

from __future__ import annotations

import collections
from dataclasses import replace
from typing import final

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pccheck.errors import OptionError, UsageError
from pccheck.leaves import LeafKind
from pccheck.state import manifest
from pccheck.state.dividing import Replicated
from pccheck.state.kinds import kind_of
from pccheck.state.numpy_leaves import NumpyKind
from pccheck.state.planner import Planner
from pccheck.state.shards import Shard
from tests.unit.captured import stored_by

CHUNK = 4096


def saved(state, world, replicated, planners=None):
    planners = planners or [Planner(kind_of, CHUNK, rank=r, world=world, replicated=replicated) for r in range(world)]
    prepared = [p.prepare(state, step=1) for p in planners]
    assert len({p.plan_digest for p in prepared}) == 1
    return [stored_by(p) for p in prepared]


def together(ranks, path, dtype):
    """Put an array together from what the ranks stored; every element must come from exactly one."""
    shape = ranks[0][path][0].shape
    whole, count = np.zeros(shape, dtype), np.zeros(shape, int)
    for stored in ranks:
        entry, data = stored[path]
        assert entry.shape == shape
        offsets, sizes = entry.box
        strides = entry.extra.get("stride")
        order = None if strides is None else [s * whole.itemsize for s in strides]
        part = np.ndarray(sizes, dtype, data, strides=order)
        where = tuple(slice(o, o + n) for o, n in zip(offsets, sizes, strict=True))
        whole[where] = part
        count[where] += 1
    assert (count == 1).all(), "each element is stored once"
    return whole


def test_all_ranks_together_store_each_array_once():
    state = {
        "w": np.arange(7000, dtype="<f4").reshape(100, 70), "row": np.ones((1, 50)), "thin": np.arange(40.0)[::2],
        "f": np.asfortranarray(np.arange(120.0).reshape(10, 12)), "few": np.arange(3, dtype="<i2"),
        "lr": 0.1, "scalar": np.float32(2), "zero_d": np.array(5.0), "none": np.zeros((3, 0)), "text": "x" * 9000,
    }  # fmt: skip
    ranks = saved(state, 4, True)
    for path in ("w", "row", "thin", "f", "few"):
        assert (together(ranks, path, state[path].dtype) == state[path]).all(), path
    for stored in ranks:
        assert all(stored[path][0].box is None for path in ("scalar", "zero_d", "none", "text")), "each rank's own"
        assert stored["text"][1] == b"x" * 9000
    sizes = [sum(len(data) for path, (_, data) in stored.items() if path in ("w", "thin", "few")) for stored in ranks]
    assert max(sizes) - min(sizes) <= 2 * 280 + state["f"].nbytes
    assert len({stored["f"][0].nbytes for stored in ranks}) == 2, "what is not in C order is whole, on one rank"
    assert "stride" not in next(s for s in ranks if not s["f"][0].nbytes)["f"][0].extra


def test_only_what_lies_under_the_paths_is_divided():
    a, b = np.arange(1000.0), np.arange(500.0)
    state = {"model": {"a": a}, "model2": {"a": a.copy()}, "opt": [b.copy(), {"m": b}], "other": b.copy()}
    ranks = saved(state, 2, ["model", "opt/1"])
    divided = {path for path, (entry, _) in ranks[0].items() if entry.box is not None}
    assert divided == {"model/a", "opt/1/m"}
    assert len(ranks[1]["model2/a"][1]) == a.nbytes


def test_what_a_state_calls_each_ranks_own_is_never_divided():
    state = {"model": np.arange(600.0), "rng": {"torch": np.arange(50, dtype="<u1")}, "rng2": np.ones(60)}
    planner = Planner(kind_of, CHUNK, rank=1, world=2, replicated=True)

    def divided(**how):
        return {path for path, (entry, _) in stored_by(planner.prepare(state, step=1, **how)).items() if entry.box}

    assert divided(own=("rng",)) == {"model", "rng2"}
    assert divided() == {"model", "rng/torch", "rng2"}, "another answer makes another plan"
    assert divided(own=("rng", "model")) == {"rng2"}


def test_alone_nothing_is_divided():
    alone = Planner(kind_of, CHUNK, replicated=True).prepare({"a": np.arange(9.0)}, step=1)
    assert stored_by(alone)["a"][0].box is None


@pytest.mark.parametrize("world", [1, 2])
def test_a_path_that_names_nothing_is_an_error_at_the_first_save(world):
    planner = Planner(kind_of, CHUNK, world=world, replicated=["model", "optimiser"])
    with pytest.raises(UsageError, match=r"nothing at 'optimiser'; at its root it has model, optimizer"):
        planner.prepare({"model": np.ones(4), "optimizer": {}}, step=1)
    planner = Planner(kind_of, CHUNK, world=world, replicated=["model", "optimizer"])
    planner.prepare({"model": np.ones(4), "optimizer": {}}, step=1)  # empty as yet, but there
    planner.prepare({"model": np.ones(4)}, step=2)  # and later it may go


@pytest.mark.parametrize("path", ["d/b~1c/0", "t/x", "o/@version", 'd/"0"', "d/<None>"])
def test_any_place_of_a_state_can_be_named(path):
    ordered = collections.OrderedDict(a=np.ones(3))
    ordered.version = {"v": 1}
    fields = collections.namedtuple("fields", "x y")
    state = {"d": {"b/c": [np.ones(8)], "0": 1, None: 2}, "t": fields(np.ones(4), 2), "o": ordered}
    Planner(kind_of, CHUNK, world=2, replicated=[path]).prepare(state, step=1)
    with pytest.raises(UsageError):
        Planner(kind_of, CHUNK, world=2, replicated=[path + "/no"]).prepare(state, step=1)


@pytest.mark.parametrize("wrong", ["model", [1], 3, None, [["model"]]])
def test_what_replicated_may_be(wrong):
    with pytest.raises(OptionError, match="replicated"):
        Planner(kind_of, CHUNK, world=2, replicated=wrong)
    assert "a/b" in Replicated.of(["a"])
    assert "ab" not in Replicated.of(["a"])


def test_tied_leaves_share_one_division_also_where_only_one_is_named():
    a = np.arange(4000.0)
    state = {"model": {"a": a}, "ema": a, "b": {"c": a[:]}}
    ranks = saved(state, 3, ["model"])
    for stored in ranks:
        assert stored["model/a"] == (replace_path(stored["ema"][0], "model/a"), stored["ema"][1])
        assert stored["ema"][0].offset == stored["b/c"][0].offset
    for path in ("model/a", "ema", "b/c"):
        assert (together(ranks, path, a.dtype) == a).all()
    assert sum(len(stored["ema"][1]) for stored in ranks) == a.nbytes


def replace_path(entry, path):
    return manifest.LeafEntry(
        path, entry.kind, entry.dtype, entry.shape, entry.offset, entry.nbytes, entry.extra, entry.box
    )


def test_ties_that_differ_between_ranks_show_in_the_digest():
    a = np.arange(100.0)

    def digest(state, rank=0, world=2, replicated=True):
        return Planner(kind_of, CHUNK, rank=rank, world=world, replicated=replicated).prepare(state, step=1).plan_digest

    base = digest({"a": a, "b": a})
    assert len(base) == 16
    assert digest({"a": a, "b": a, "own": 3}, rank=1) == base, "what is each rank's own does not count"
    for other in (
        digest({"a": a, "b": a.copy()}),
        digest({"a": a, "c": a}),
        digest({"a": a.astype("<f4"), "b": a}),
        digest({"a": a, "b": a}, world=3),
        digest({"a": a[:50], "b": a}),
        digest({"a": a, "b": a}, replicated=False),
    ):
        assert other != base
    shards = [digest({"s": Shard(a, shape=(200,), offsets=(100 * r,))}, rank=r) for r in range(2)]
    # The stages of a pipeline hold different global arrays: that is no disagreement.
    assert shards[0] == shards[1] == digest({"other": Shard(a, shape=(300,), offsets=(0,))})


def test_later_saves_follow_arrays_that_moved_and_changed():
    planners = [Planner(kind_of, CHUNK, rank=r, world=3, replicated=True) for r in range(3)]
    layouts = []
    for step in range(4):
        a, b = np.arange(3000.0) + step, (np.arange(200.0) * step)[::2]
        state = {"a": a, "tied": a, "b": b, "step": step}
        ranks = saved(state, 3, True, planners)
        for path in ("a", "tied", "b"):
            assert (together(ranks, path, a.dtype) == state[path]).all()
        layouts.append([p.prepare(state, step=step).layout for p in planners])
    assert all(now is first for now, first in zip(layouts[-1], layouts[0], strict=True)), "it was planned once"


@settings(deadline=None, derandomize=True, database=None, max_examples=60)
@given(st.lists(st.tuples(st.lists(st.integers(0, 40), max_size=3), st.booleans()), max_size=8), st.integers(1, 5))
def test_any_state_is_stored_once_by_any_world(shapes, world):
    rng = np.random.default_rng(1)
    state = {}
    for i, (shape, fortran) in enumerate(shapes):
        array = rng.random(tuple(shape), np.float32)
        state[f"a{i}"] = np.asfortranarray(array) if fortran else array
    ranks = saved(state, world, True)
    for path, array in state.items():
        if world > 1 and array.ndim and array.nbytes:
            assert (together(ranks, path, array.dtype) == array).all()
        else:
            assert all(stored[path][1] == array.tobytes("A") for stored in ranks)


@final
class PackedKind(LeafKind):
    """Stores something else than rows."""

    name = "packed"
    _inner = NumpyKind()

    def recognises(self, value):
        return isinstance(value, np.ndarray)

    def describe(self, value):
        return replace(self._inner.describe(value), kind="packed")

    def divisible(self, spec):
        return False

    def fingerprint(self, values):
        return self._inner.fingerprint(values)

    def host_bytes(self, value):
        return self._inner.host_bytes(value)

    def build(self, spec, data):
        return self._inner.build(spec, data)

    def like(self, value):
        return None

    def convert(self, value, like):
        return value


def test_what_is_stored_in_another_form_is_each_ranks_own():
    class Table:
        kind = PackedKind()

        def __call__(self, value):
            return self.kind

        def named(self, name):
            return None

        def like(self, value):
            return None

        def container(self, value):
            return None

    for rank in range(2):
        planner = Planner(Table(), CHUNK, rank=rank, world=2, replicated=True)
        assert stored_by(planner.prepare({"a": np.arange(9.0)}, step=1))["a"][0].nbytes == 72
