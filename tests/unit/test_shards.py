"""Shard: one rank's part of a global array, of any kind, wherever an array may stand."""

from __future__ import annotations

import copy

import numpy as np
import pytest

import pccheck
from pccheck.errors import FormatError, UnsupportedLeafError, UsageError
from pccheck.leaves import LeafSpec
from pccheck.state.boxes import Box
from pccheck.state.kinds import kind_of
from pccheck.state.planner import Planner
from pccheck.state.shards import Shard, ShardKind
from tests.unit.captured import stored_by


def prepared(state, planner=None):
    return (planner or Planner(kind_of, 4096)).prepare(state, step=1)


def test_it_is_public_and_cannot_be_changed():
    assert pccheck.Shard is Shard
    part = Shard(np.arange(6).reshape(2, 3), shape=[4, 3], offsets=np.array([2, 0]))
    assert (part.shape, part.offsets, part.box) == ((4, 3), (2, 0), Box((2, 0), (2, 3)))
    for change in (lambda: setattr(part, "shape", (9, 9)), lambda: delattr(part, "array")):
        with pytest.raises(AttributeError):
            change()
    twin = copy.copy(part)
    assert (twin.array is part.array, twin.shape, twin.offsets) == (True, part.shape, part.offsets)
    assert repr(part) == "<Shard (2, 0)+(2, 3) of (4, 3): numpy.ndarray>"


@pytest.mark.parametrize(
    ("array", "shape", "offsets"),
    [
        (np.zeros((2, 3)), (4, 3), (3, 0)),
        (np.zeros((2, 3)), (4, 3), (0,)),
        (np.zeros((2, 3)), (4, 3, 1), (0, 0, 0)),
        (np.zeros(2), (4,), (-1,)),
        (np.zeros(2), (4,), (0.5,)),
        (np.zeros(2), 4, (0,)),
        ([1, 2], (4,), (0,)),
        (3, (4,), (0,)),
        (Shard(np.zeros(2), shape=(4,), offsets=(0,)), (4,), (0,)),
    ],
)
def test_what_is_no_part_is_refused(array, shape, offsets):
    with pytest.raises(UsageError):
        Shard(array, shape=shape, offsets=offsets)


def test_it_is_stored_as_the_part_that_it_is():
    local = np.arange(6, dtype="<f4").reshape(2, 3)
    state = {
        "w": Shard(local, shape=(8, 3), offsets=(4, 0)),
        "empty": Shard(np.zeros((0, 3)), shape=(8, 3), offsets=(8, 0)),
    }
    found = prepared(state)
    assert local.ctypes.data in set(map(int, found.addresses)), "in place"
    entry, data = stored_by(found)["w"]
    assert (entry.kind, entry.dtype, entry.shape, entry.box) == ("numpy", "<f4", (8, 3), ((4, 0), (2, 3)))
    assert data == local.tobytes()
    assert entry.spec() == LeafSpec(kind="numpy", dtype="<f4", shape=(8, 3), nbytes=24, box=Box((4, 0), (2, 3)))
    assert stored_by(found)["empty"][0].box == ((8, 0), (0, 3))


@pytest.mark.parametrize("order", [(1, 0, 2), (2, 1, 0), (0, 2, 1)])
def test_what_is_not_in_c_order_is_stored_so(order):
    local = np.arange(24, dtype="<i2").reshape(2, 3, 4).transpose(order)
    whole = tuple(2 * n for n in local.shape)
    found = prepared({"w": Shard(local, shape=whole, offsets=(0, 0, 0))})
    entry, data = stored_by(found)["w"]
    assert data == local.tobytes()
    assert "stride" not in entry.extra
    assert found.stable, "a copy"


def test_ties_and_moves_are_followed():
    planner, sizes = Planner(kind_of, 4096), []
    a, b = np.arange(100.0), np.ones(100)
    for x, y in ((a, b), (a, a), (b, a)):
        state = {"x": Shard(x, shape=(200,), offsets=(0,)), "y": Shard(y, shape=(200,), offsets=(0,)), "z": x}
        found = prepared(state, planner)
        stored = stored_by(found)
        assert (stored["x"][1], stored["y"][1], stored["z"][1]) == (x.tobytes(), y.tobytes(), x.tobytes())
        sizes.append(len(found.layout.pieces))
    assert sizes == [3, 2, 3]


def test_a_cached_plan_sees_another_place_shape_kind_or_dtype():
    torch = pytest.importorskip("torch")
    planner = Planner(kind_of, 4096)
    a = np.arange(100.0)
    for shard, expected in (
        (Shard(a, shape=(200,), offsets=(0,)), ("numpy", "<f8", (200,), ((0,), (100,)))),
        (Shard(a, shape=(200,), offsets=(100,)), ("numpy", "<f8", (200,), ((100,), (100,)))),
        (Shard(a, shape=(300,), offsets=(100,)), ("numpy", "<f8", (300,), ((100,), (100,)))),
        (Shard(a.astype("<f4"), shape=(300,), offsets=(100,)), ("numpy", "<f4", (300,), ((100,), (100,)))),
        (Shard(a[:7], shape=(300,), offsets=(100,)), ("numpy", "<f8", (300,), ((100,), (7,)))),
        (Shard(torch.ones(7), shape=(300,), offsets=(100,)), ("torch", "float32", (300,), ((100,), (7,)))),
    ):
        entry, data = stored_by(prepared({"s": shard}, planner))["s"]
        assert (entry.kind, entry.dtype, entry.shape, entry.box) == expected
        assert len(data) == entry.nbytes


def test_what_its_array_refuses_is_refused_with_the_path():
    with pytest.raises(UnsupportedLeafError, match="model/w"):
        prepared({"model": {"w": Shard(np.array([object()]), shape=(2,), offsets=(0,))}})
    array = np.zeros(4)
    part = Shard(array, shape=(6,), offsets=(2,))
    array.resize(5, refcheck=False)
    with pytest.raises(UnsupportedLeafError, match="does not lie within"):
        prepared({"w": part})


def test_like_asks_for_its_part_and_gets_a_shard_back():
    template = Shard(np.zeros((2, 3), "<f4"), shape=(8, 3), offsets=(6, 0))
    kind, spec = kind_of.like(template)
    assert isinstance(kind, ShardKind)
    assert spec == LeafSpec(kind="numpy", dtype="<f4", shape=(8, 3), nbytes=24, box=Box((6, 0), (2, 3)))
    data = bytearray(np.arange(6, dtype="<f4").tobytes())
    back = kind.convert(kind.build(spec, memoryview(data)), template)
    assert type(back) is Shard
    assert (back.shape, back.offsets) == ((8, 3), (6, 0))
    assert (back.array == np.arange(6).reshape(2, 3)).all()
    kind.assign(template, back)
    assert (template.array == back.array).all()
    with pytest.raises(FormatError):
        kind.build(spec, memoryview(data)[:8])
    assert kind_of.like(Shard(np.zeros(2), shape=(2,), offsets=(0,)))[1].box == Box.whole((2,))


def test_like_may_be_abstract():
    class Abstract:
        shape, dtype = (2, 3), np.dtype("<f4")

    kind, spec = kind_of.like(Shard(Abstract(), shape=(8, 3), offsets=(0, 0)))
    assert (kind.name, spec.shape, spec.box) == ("numpy", (8, 3), Box((0, 0), (2, 3)))
    assert kind_of(Shard(Abstract(), shape=(8, 3), offsets=(0, 0))) is None
    with pytest.raises(UnsupportedLeafError):
        prepared({"w": Shard(Abstract(), shape=(8, 3), offsets=(0, 0))})


def test_a_part_that_is_all_of_its_array_comes_back_as_the_array(tmp_path):
    a = np.arange(12.0).reshape(3, 4)
    with pccheck.Checkpointer(tmp_path) as ck:
        ck.save(0, {"w": Shard(a, shape=(3, 4), offsets=(0, 0))})
        ck.wait()
        restored = ck.restore()
    assert type(restored.state["w"]) is np.ndarray
    assert np.array_equal(restored.state["w"], a)
