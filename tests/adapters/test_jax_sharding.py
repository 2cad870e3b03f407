"""Arrays over several devices: stored box by box, restored to any mesh and partition, reading only what is needed."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest

jax = pytest.importorskip("jax")

import jax.numpy as jnp  # noqa: E402
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec  # noqa: E402
from pccheck_jax import kind, places  # noqa: E402

import pccheck  # noqa: E402
from pccheck.errors import PccheckError, UnsupportedLeafError  # noqa: E402
from pccheck.leaves import Box  # noqa: E402
from tests.adapters.jax_trees import assert_same, bits, mesh, ramp, spread, through  # noqa: E402

P = PartitionSpec
SPECS = [(), ("x",), ("y", "x"), (None, "y"), (("x", "y"),), (None, ("y", "x"))]
SHAPES = [(1, 1), (1, 3), (2, 2), (2, 4), (3,), (8,), (6, 1)]


def arrays(where, shape=(120, 24)):
    made = {"".join(map(str, spec)) or "all": spread(ramp(*shape), where, *_known(spec, where)) for spec in SPECS}
    made["half"] = spread(ramp(*shape, dtype=jnp.bfloat16), where, "x")
    made["nibbles"] = spread(ramp(*shape).astype(jnp.int4), where, "x")
    made["keys"] = spread(jax.random.split(jax.random.key(5), shape[0]), where, "x")
    made["scalar"] = spread(jnp.float32(3), where)
    made["nothing"] = spread(jnp.zeros((0, 24)), where)
    made["one device"] = jax.device_put(ramp(7), jax.devices()[1])
    return made


def _known(spec, where):
    """Leave out the axes that a mesh does not have."""

    def known(name):
        if isinstance(name, tuple):
            return tuple(n for n in name if n in where.axis_names) or None
        return name if name in where.axis_names else None

    return [known(name) for name in spec]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_saved_under_eight_devices_restored_to_any_mesh(tmp_path, shape):
    saved, like = arrays(mesh(2, 4)), arrays(mesh(*shape))
    zeros = jax.tree.map(lambda x: x if "key" in str(x.dtype) else jax.device_put(jnp.zeros_like(x), x.sharding), like)
    abstract = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), like)
    with pccheck.Checkpointer(tmp_path) as ck:
        ck.save(1, saved).durable.result(60)
        for asked in (zeros, abstract):
            restored = ck.restore(like=asked).state
            assert_same(restored, saved)
            assert {k: v.sharding for k, v in restored.items()} == {k: v.sharding for k, v in like.items()}


def test_to_numpy_to_one_device_and_to_nothing_in_particular(tmp_path):
    saved = arrays(mesh(2, 4))
    with pccheck.Checkpointer(tmp_path) as ck:
        ck.save(1, saved).durable.result(60)
        plain = ck.restore().state
        assert_same(plain, saved)
        assert all(len(leaf.devices()) == 1 and not leaf.committed for leaf in plain.values())
        unplaced = ck.restore(like=jax.eval_shape(lambda: saved)).state
        assert_same(unplaced, saved)
        assert not any(leaf.committed for leaf in unplaced.values())
        numbers = {k: np.empty(v.shape, v.dtype) for k, v in saved.items() if "key" not in str(v.dtype)}
        restored = ck.restore(like=numbers, partial=True).state
        assert {k: v.tobytes() for k, v in restored.items()} == {k: np.asarray(saved[k]).tobytes() for k in numbers}


@pytest.mark.parametrize("devices", [1, 3])
def test_a_process_with_fewer_devices_restores_all(tmp_path, devices):
    saved = arrays(mesh(2, 4))
    with pccheck.Checkpointer(tmp_path) as ck:
        ck.save(1, saved).durable.result(60)
    program = f"""
import os
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count={devices}"
import jax, jax.numpy as jnp, numpy as np, pccheck
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
assert len(jax.devices()) == {devices}
where = NamedSharding(Mesh(np.array(jax.devices()), ("z",)), P("z"))
wanted = np.arange(120 * 24).reshape(120, 24).astype(np.float32)
with pccheck.Checkpointer({str(tmp_path)!r}) as ck:
    spread = jax.ShapeDtypeStruct((120, 24), jnp.float32, sharding=where)
    for like in (jnp.zeros((120, 24)), spread, np.zeros(wanted.shape, np.float32)):
        restored = ck.restore(like={{"yx": like}}, partial=True).state["yx"]
        assert np.array_equal(np.asarray(restored), wanted), like
    everything = ck.restore().state
    assert np.array_equal(np.asarray(everything["('x', 'y')"]), wanted)
print("ok")
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert done.stdout.strip() == "ok", done.stderr


def test_each_box_is_stored_once(tmp_path):
    where = mesh(2, 4)
    for spec, boxes in (((), 1), (("x",), 2), ((None, "y"), 4), (("x", "y"), 8), ((("x", "y"),), 8)):
        leaf = spread(ramp(16, 16), where, *spec)
        assert kind.parts(leaf) == boxes
        specs = [kind.part(n).describe(leaf) for n in range(boxes)]
        assert sum(s.nbytes for s in specs) == leaf.nbytes
        if boxes == 1:
            assert specs[0].box is None
        else:
            assert len({s.box for s in specs}) == boxes


def test_boxes_are_read_in_place_shard_by_shard():
    leaf = spread(ramp(16, 16), mesh(2, 2), "x", "y")
    found = [kind.part(n).host_bytes(leaf) for n in range(4)]
    assert {f.address for f in found} == {s.data.unsafe_buffer_pointer() for s in leaf.addressable_shards}
    assert all(f.keep is leaf for f in found)
    assert [int(kind.part(n).addresses([leaf])[0]) for n in range(4)] == [f.address for f in found]


def test_a_plan_follows_the_sharding(tmp_path):
    one, two = spread(ramp(16, 16), mesh(2, 2), "x", "y"), spread(ramp(16, 16) + 1, mesh(2, 4), None, "y")
    with pccheck.Checkpointer(tmp_path, keep=4) as ck:
        for step, leaf in enumerate((one, two, one, jax.device_put(two, jax.devices()[3]))):
            ck.save(step, {"a": leaf, "b": ramp(3)}).durable.result(60)
            assert bits(ck.restore().state["a"]) == bits(leaf)


def test_only_what_is_needed_is_read(tmp_path):
    """A flipped byte in chunks that no device of the asked mesh needs does not matter, and elsewhere it does."""
    where = mesh(4)
    saved = {"a": spread(ramp(4096, 256), where, "x"), "b": spread(-ramp(4096, 256), where, "x")}
    with pccheck.Checkpointer(tmp_path, chunk_bytes=1 << 20) as ck:
        ck.save(1, saved).durable.result(60)
        (slot,) = [f for f in tmp_path.glob("slot-*.pcc") if np.asarray(saved["b"])[2000].tobytes() in f.read_bytes()]
        at = slot.read_bytes().index(np.asarray(saved["b"])[2000].tobytes())
        with slot.open("r+b") as file:
            file.seek(at)
            file.write(b"\xff")
        assert ck.restore(like={"a": saved["a"], "b": ...}, fallback=False).state["b"] is ...
        with pytest.raises(PccheckError):
            ck.restore(like=saved, fallback=False)


def test_tied_sharded_arrays_stay_tied(tmp_path):
    leaf = spread(ramp(16, 16), mesh(2, 2), "x", "y")
    restored = through(tmp_path, {"a": leaf, "b": leaf}, like={"a": leaf, "b": leaf})
    assert restored["a"] is restored["b"]


def test_likes_of_an_abstract_mesh_take_the_mesh_that_was_set(tmp_path):
    where = jax.make_mesh((2, 4), ("x", "y"), axis_types=(AxisType.Explicit,) * 2)
    with jax.set_mesh(where):
        abstract = {"a": jax.eval_shape(lambda: jnp.zeros((16, 16), out_sharding=P("x", "y")))}
        restored = through(tmp_path / "set", {"a": ramp(16, 16)}, like=abstract)["a"]
    assert restored.sharding == NamedSharding(where, P("x", "y"))
    assert bits(restored) == bits(ramp(16, 16))
    with pytest.raises(UnsupportedLeafError, match="set_mesh"):
        through(tmp_path / "none", {"a": ramp(16, 16)}, like=abstract)


def test_casts_reach_every_shard(tmp_path):
    where = NamedSharding(mesh(2, 2), P("x", "y"))
    like = {"a": jax.ShapeDtypeStruct((16, 16), jnp.bfloat16, sharding=where)}
    restored = through(tmp_path, {"a": ramp(16, 16)}, like=like)["a"]
    assert (restored.dtype, restored.sharding) == (jnp.bfloat16, where)
    assert bits(restored) == bits(ramp(16, 16).astype(jnp.bfloat16))


def test_host_memory_over_several_devices(tmp_path):
    where = NamedSharding(mesh(2, 2), P("x", "y"), memory_kind="pinned_host")
    saved = {"a": jax.device_put(ramp(16, 16), where)}
    restored = through(tmp_path, saved, like=saved)
    assert restored["a"].sharding == where
    assert_same(restored, saved)


# -- who stores what, of meshes over several processes ---------------------------------------------------------------


class FakeDevice:
    """A device of some process, as far as a division looks at it."""

    platform = "cpu"

    def __init__(self, number, process):
        self.id, self.process_index = number, process


class FakeSharding:
    """Says where the parts of an array lie, without a backend of several processes."""

    def __init__(self, boxes, me):
        self.boxes, self.me = boxes, me
        self.device_set = set(boxes)

    def devices_indices_map(self, shape):
        return {device: _slices(box) for device, box in self.boxes.items()}

    def addressable_devices_indices_map(self, shape):
        return {d: _slices(box) for d, box in self.boxes.items() if d.process_index == self.me}


def _slices(box):
    return tuple(slice(o, o + n) for o, n in zip(box.offsets, box.sizes, strict=True))


@pytest.mark.parametrize(("processes", "local"), [(1, 4), (2, 2), (2, 3), (4, 2), (3, 1)])
@pytest.mark.parametrize("rows", [1, 2, 5, 12])
@pytest.mark.parametrize("pieces", [1, 2, 3])
def test_all_processes_together_store_every_element_once(processes, local, rows, pieces):
    shape, width = (rows, 6), 6 // pieces
    devices = [FakeDevice(n, n // local) for n in range(processes * local)]
    boxes = {d: Box((0, (n % pieces) * width), (rows, width)) for n, d in enumerate(devices)}
    if len(devices) < pieces:
        pytest.skip("not every piece has a device")
    count = np.zeros(shape, int)
    for me in range(processes):
        for share in places.shares(FakeSharding(boxes, me), shape):
            box = share.box or Box.whole(shape)
            if box.elements:
                held = list(boxes.values())[me * local + share.shard]
                first, end = share.rows or (0, held.sizes[0])
                assert (held.offsets[0] + first, end - first) == (box.offsets[0], box.sizes[0])
                assert held.offsets[1:] == box.offsets[1:]
            count[_slices(box)] += 1
    assert (count == 1).all()


def test_a_process_without_any_part_stores_an_empty_box():
    devices = [FakeDevice(0, 0), FakeDevice(1, 0)]
    boxes = {d: Box((n, 0), (1, 3)) for n, d in enumerate(devices)}
    (share,) = places.shares(FakeSharding(boxes, 1), (2, 3))
    assert share == (places.NOWHERE, Box((0, 0), (0, 0)), None)


def test_meshes_are_told_apart():
    reordered = Mesh(np.array(jax.devices()[:4][::-1]).reshape(2, 2), ("x", "y"))
    leaf = spread(ramp(16, 16), reordered, "x", "y")
    boxes = [kind.part(n).describe(leaf).box for n in range(4)]
    assert [tuple(map(int, np.asarray(leaf.addressable_data(n)).shape)) for n in range(4)] == [b.sizes for b in boxes]
    for n, box in enumerate(boxes):
        assert np.array_equal(np.asarray(leaf.addressable_data(n)), np.asarray(leaf)[_slices(box)])
