"""Every kind of leaf and tree that Orbax's users save, through Orbax's own args; and what stock Orbax makes of it."""

from __future__ import annotations

import collections
import dataclasses
import gc

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pccheck_orbax
import pytest
from flax import nnx
from flax.training import train_state
from jax.sharding import NamedSharding, PartitionSpec

from tests.adapters import orbax_shared

pytestmark = pytest.mark.filterwarnings("ignore")  # Orbax and flax warn of themselves

ARGS = {
    "Standard": (ocp.args.StandardSave, ocp.args.StandardRestore),
    "PyTree": (ocp.args.PyTreeSave, ocp.args.PyTreeRestore),
}
DTYPES = (
    "float32", "float16", "bfloat16", "bool", "complex64", "int8", "uint8", "int16", "uint16", "int32", "uint32",
    "int4", "uint4", "int2", "uint2", "float8_e4m3fn", "float8_e5m2", "float8_e4m3b11fnuz", "float8_e4m3fnuz",
    "float8_e5m2fnuz", "float8_e8m0fnu", "float4_e2m1fn",
)  # fmt: skip
STRUCTURED = np.array([(1, 2.5), (3, 4.5)], [("a", "<i4"), ("b", "<f8")])
OTHERS = {
    "scalar array": jnp.float32(2.5),
    "numpy": np.arange(6.0).reshape(2, 3),
    "numpy 0-d": np.array(7),
    "numpy F-order": np.asfortranarray(np.arange(6.0).reshape(2, 3)),
    "numpy str": np.array(["ab", "c"]),
    "numpy datetime": np.array(["2031-05-17"], "M8[D]"),
    "numpy structured": STRUCTURED,
    "numpy empty": np.zeros((2, 0), np.float64),
    "np.float32": np.float32(1.5),
    "np.int64": np.int64(5),
    "np.bool_": np.bool_(True),
    "int": 3,
    "big int": 2**70,
    "float": 2.5,
    "bool": True,
    "complex": 1 + 2j,
    "str": "text",
    "bytes": b"\x00\xff",
    "None": None,
    "empty dict": {},
    "empty list": [],
    "empty tuple": (),
    "key": jax.random.key(3),
    "keys": jax.random.split(jax.random.key(3, impl="rbg"), 4),
    "raw key": jax.random.PRNGKey(3),
}
# What a stock manager does not save, or not as it was: in save() or, worse, in the background.
WORSE = {
    "uint4": "fails", "uint2": "fails", "empty": "fails", "numpy empty": "fails", "numpy str": "fails",
    "numpy datetime": "fails", "numpy structured": "fails", "big int": "fails", "complex": "fails", "bytes": "fails",
}  # fmt: skip


def leaves():
    made = {name: jnp.asarray(np.array([0, 1, 1, 0, 1, 1]).reshape(2, 3), name) for name in DTYPES}
    return {**made, "empty": jnp.zeros((0, 3), jnp.bfloat16), **OTHERS}


def manager(root, **kwargs):
    return ocp.CheckpointManager(root, handler_registry=pccheck_orbax.registry(), **kwargs)


def around(root, item, args="Standard", target=None, **kwargs):
    """Save and restore, by managers of ours."""
    save, restore = ARGS[args]
    with manager(root) as made:
        made.save(1, args=save(item))
    with manager(root) as made:
        return made.restore(1, args=restore(target, **kwargs))


def stock(root, item, args="Standard", target=None):
    save, restore = ARGS[args]
    # With folders made in the background, a save that fails leaves threads that wait 300 s, also at exit.
    folders_first = ocp.AsyncOptions(create_directories_asynchronously=False)
    options = ocp.CheckpointManagerOptions(async_options=folders_first)
    with ocp.CheckpointManager(root, options=options) as made:
        made.save(1, args=save(item))
        made.wait_until_finished()
        return made.restore(1, args=restore(target))


def assert_same(got, expected):
    if isinstance(expected, jax.Array):
        assert isinstance(got, jax.Array)
        assert (got.dtype, got.shape) == (expected.dtype, expected.shape)
        if jnp.issubdtype(expected.dtype, jax.dtypes.prng_key):
            got, expected = jax.random.key_data(got), jax.random.key_data(expected)
        assert np.asarray(got).tobytes() == np.asarray(expected).tobytes()
    elif isinstance(expected, (np.ndarray, np.generic)):
        assert type(got) is type(expected)
        assert (got.dtype, got.shape) == (expected.dtype, expected.shape)
        assert got.tobytes() == expected.tobytes()
    else:
        assert type(got) is type(expected)
        assert got == expected


@pytest.fixture(scope="module", params=ARGS)
def saved(request, tmp_path_factory):
    """All leaves in one step, and what it gives back: without a target, and with the tree itself as one."""
    root, tree = tmp_path_factory.mktemp("leaves"), leaves()
    plain = around(root, tree, request.param)
    with manager(root) as reader:
        like = reader.restore(1, args=ARGS[request.param][1](tree))
        described = reader.item_metadata(1)
    return plain, like, described


@pytest.mark.parametrize("name", [*DTYPES, "empty", *OTHERS])
def test_a_leaf_comes_back_as_it_was(saved, name):
    plain, like, described = saved
    expected = leaves()[name]
    assert_same(plain[name], expected)
    assert_same(like[name], expected)
    if isinstance(expected, (jax.Array, np.ndarray)) and name != "key":
        shape = jax.random.key_data(expected).shape if name == "keys" else expected.shape
        assert described[name].shape == shape


@pytest.mark.parametrize("name", WORSE)
def test_stock_orbax_does_worse(tmp_path, name):
    """Should this fail, Orbax has learnt it: take the row out."""
    with pytest.raises((ValueError, TypeError, OverflowError)):
        stock(tmp_path, {"leaf": leaves()[name]})


@pytest.mark.parametrize(
    ("args", "name", "becomes"),
    [("PyTree", "np.float32", float), ("PyTree", "np.int64", int), ("Standard", "np.float32", np.ndarray)],
)
def test_stock_orbax_changes_numpy_scalars(tmp_path, args, name, becomes):
    assert type(stock(tmp_path, {"leaf": leaves()[name]}, args)["leaf"]) is becomes


def test_numpy_leaves_are_copied_in_save(tmp_path):
    array = np.zeros(100_000)
    with manager(tmp_path) as made:
        made.save(1, args=ocp.args.StandardSave({"x": array}))
        array[:] = 9.0
        made.wait_until_finished()
        assert (made.restore(1)["x"] == 0).all()


def test_donation_right_after_save(tmp_path):
    step = jax.jit(lambda x: x + 1, donate_argnums=0)
    x = jnp.zeros(200_000)
    with manager(tmp_path, options=ocp.CheckpointManagerOptions(max_to_keep=3)) as made:
        for n in range(1, 4):
            x = step(x)
            made.save(n, args=ocp.args.StandardSave({"x": x}))
        made.wait_until_finished()
        assert [float(made.restore(n)["x"].max()) for n in (1, 2, 3)] == [1.0, 2.0, 3.0]


# -- targets ---------------------------------------------------------------------------------------------------------

TARGETS = [
    ("array, int", jnp.int32(5), 0, 5),
    ("int, abstract", 5, jax.ShapeDtypeStruct((), jnp.int32), np.array(5, np.int32)),
    ("int, array", 5, jnp.int32(0), jnp.int32(5)),
    ("int, float", 5, 0.0, 5.0),
    ("float, int", 5.5, 0, 5),
    ("numpy, abstract", np.arange(3), jax.ShapeDtypeStruct((3,), jnp.int32), np.arange(3, dtype=np.int32)),
    ("numpy, array", np.arange(3), jnp.zeros(3), jnp.arange(3.0)),
    ("array, numpy", jnp.arange(3), np.zeros(3), np.arange(3.0)),
    ("numpy, numpy cast", np.arange(3), np.zeros(3, np.float32), np.arange(3, dtype=np.float32)),
    ("array, array cast", jnp.arange(3.0), jnp.zeros(3, jnp.bfloat16), jnp.arange(3, dtype=jnp.bfloat16)),
    ("numpy scalar, float", np.float32(1.5), 0.0, 1.5),
    ("key, its numbers", jax.random.key(3), jax.ShapeDtypeStruct((2,), jnp.uint32), jax.random.key(3)),
    ("key, numpy", jax.random.key(3), np.zeros(2, np.uint32), np.array([0, 3], np.uint32)),
]
BETTER = [
    ("int, numpy scalar", 5, np.int64(0), np.int64(5)),
    ("numpy scalar, itself", np.float32(1.5), np.float32(0), np.float32(1.5)),
    ("complex, itself", 1 + 2j, 0j, 1 + 2j),
    ("placeholder", jnp.ones(3), ..., ...),
]


@pytest.mark.parametrize(("name", "leaf", "target", "expected"), TARGETS, ids=[t[0] for t in TARGETS])
def test_a_target_converts_as_stock_orbax_does(tmp_path, name, leaf, target, expected):
    theirs = stock(tmp_path / "theirs", {"x": leaf}, target={"x": target})["x"]
    ours = around(tmp_path / "ours", {"x": leaf}, target={"x": target})["x"]
    assert_same(ours, expected)
    assert_same(theirs, expected)


@pytest.mark.parametrize(("name", "leaf", "target", "expected"), BETTER, ids=[t[0] for t in BETTER])
def test_a_target_that_stock_orbax_refuses(tmp_path, name, leaf, target, expected):
    assert_same(around(tmp_path / "ours", {"x": leaf, "y": 1}, target={"x": target, "y": 0})["x"], expected)
    with pytest.raises(ValueError):
        stock(tmp_path / "theirs", {"x": leaf, "y": 1}, target={"x": target, "y": 0})


def test_a_step_counter_that_became_an_array(tmp_path):
    """flax's TrainState begins with the int 0, and holds an array after the first jitted step."""
    state = train_state.TrainState.create(apply_fn=len, params={"w": jnp.ones((2, 3))}, tx=optax.adamw(1e-3))
    trained = jax.jit(lambda s: s.apply_gradients(grads=s.params))(state)
    got = around(tmp_path, trained, target=state)
    assert (type(got), got.step, type(got.step)) == (train_state.TrainState, 1, int)
    assert type(got.opt_state) is type(state.opt_state)
    assert type(got.opt_state[0]) is type(state.opt_state[0])
    assert (got.params["w"] == trained.params["w"]).all()
    abstract = jax.eval_shape(lambda: trained)
    with manager(tmp_path) as made:
        exact = made.restore(1, args=ocp.args.StandardRestore(abstract))
    jax.tree.map(assert_same, exact, trained)
    assert exact.tx is state.tx


# -- trees -----------------------------------------------------------------------------------------------------------


class Pair(collections.namedtuple("Pair", "first second")):
    pass


@flax.struct.dataclass
class Model:
    w: jax.Array
    size: int = flax.struct.field(pytree_node=False, default=3)


@dataclasses.dataclass
class Plain:
    x: object


def trees():
    w = jnp.arange(3.0)
    linear = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
    value = lambda v: {"value": v[...]}  # noqa: E731
    parts = {"bias": value(linear.bias), "kernel": value(linear.kernel)}
    return {
        "odd keys": ({"a.b": w, "a/b": w + 1, "": w + 2}, {"a.b": w, "a/b": w + 1, "": w + 2}),
        "int keys": ({1: w, 2: {3: w}}, {1: w, 2: {3: w}}),
        "list": ([w, [w]], [w, [w]]),
        "tuple": ({"t": (w, 1)}, {"t": (w, 1)}),
        "namedtuple": ({"p": Pair(w, 2)}, {"p": {"first": w, "second": 2}}),
        "optax": (optax.adam(0.1).init({"w": w}), None),
        "empty state": ({"e": optax.EmptyState(), "w": w}, {"e": None, "w": w}),
        "flax.struct": (Model(w, 7), {"w": w}),
        "nnx.State": (nnx.state(linear), parts),
        "nnx.Module": (linear, parts),
    }


@pytest.mark.parametrize("name", [*trees()])
def test_a_tree_comes_back_in_plain_containers_or_in_its_own(tmp_path, name):
    tree, plain = trees()[name]
    got = around(tmp_path, tree)
    if plain is not None:
        jax.tree.map(assert_same, got, plain)
    with manager(tmp_path) as made:
        back = made.restore(1, args=ocp.args.StandardRestore(tree))
        described = made.item_metadata(1)
        again = made.restore(1, args=ocp.args.StandardRestore(described))
    assert type(back) is type(tree)
    jax.tree.map(assert_same, back, tree)
    assert jax.tree.structure(back) == jax.tree.structure(tree)
    jax.tree.map(assert_same, again, got)


def test_a_plain_dataclass_is_stored_by_field(tmp_path):
    """Orbax takes it for a leaf, and refuses it."""
    item = {"d": Plain(jnp.ones(2))}
    assert (around(tmp_path / "a", item)["d"]["x"] == 1).all()
    back = around(tmp_path / "b", item, target={"d": Plain(jnp.zeros(2))})
    assert type(back["d"]) is Plain
    assert (back["d"].x == 1).all()
    with pytest.raises(ValueError):
        stock(tmp_path / "c", item)


def test_orbax_compares_keys_and_so_do_we(tmp_path):
    """A list fits a tuple, a dict a NamedTuple or a flax dataclass: also where classes changed since."""
    w = jnp.arange(3.0)
    item = {"l": [w], "p": {"first": w, "second": w}, "m": {"w": w}}
    like = {"l": (w * 0,), "p": Pair(w * 0, w * 0), "m": Model(w * 0, 5)}
    for get, root in ((around, tmp_path / "ours"), (stock, tmp_path / "theirs")):
        got = get(root, item, target=like)
        assert (type(got["l"]), type(got["p"]), got["m"].size) == (tuple, Pair, 5)
        assert all((leaf == w).all() for leaf in jax.tree.leaves(got))


def test_a_part_of_a_train_state(tmp_path):
    """What evaluators do: the parameters alone, out of a whole training state."""
    state = train_state.TrainState.create(apply_fn=len, params={"w": jnp.ones((2, 3))}, tx=optax.adamw(1e-3))
    want = {"params": {"w": jax.ShapeDtypeStruct((2, 3), jnp.float32)}}
    got = around(tmp_path, state, "PyTree", target=want, partial_restore=True)
    assert set(got) == {"params"}
    assert (got["params"]["w"] == 1).all()


# -- shardings -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def mesh():
    if len(jax.devices()) < 8:
        pytest.skip("needs 8 devices: JAX was started before XLA_FLAGS was set")
    return jax.make_mesh((4, 2), ("x", "y"), axis_types=(jax.sharding.AxisType.Auto,) * 2)


def test_arrays_come_back_spread_as_they_were(tmp_path, mesh):
    on = NamedSharding(mesh, PartitionSpec("x", "y"))
    array = jax.device_put(jnp.arange(64.0).reshape(8, 8), on)
    item = {"a": array, "b": jnp.ones(3), "r": jax.device_put(jnp.ones(4), NamedSharding(mesh, PartitionSpec()))}
    got = around(tmp_path, item)
    theirs = stock(tmp_path / "theirs", item)
    for name in item:
        assert got[name].sharding.is_equivalent_to(item[name].sharding, item[name].ndim), name
        assert theirs[name].sharding.is_equivalent_to(item[name].sharding, item[name].ndim), name
        assert (np.asarray(got[name]) == np.asarray(item[name])).all()
    with manager(tmp_path) as made:
        abstract = {name: jax.ShapeDtypeStruct(x.shape, jnp.bfloat16) for name, x in item.items()}
        cast = made.restore(1, args=ocp.args.StandardRestore(abstract))
        assert cast["a"].sharding.is_equivalent_to(on, 2)
        assert cast["a"].dtype == jnp.bfloat16
        described = made.item_metadata(1)
        assert described["a"].sharding == ocp.metadata.NamedShardingMetadata.from_jax_sharding(on)
        assert made.restore(1, args=ocp.args.StandardRestore(described))["a"].sharding.is_equivalent_to(on, 2)


def test_keys_are_spread_too(tmp_path, mesh):
    on = NamedSharding(mesh, PartitionSpec("x"))
    keys = jax.device_put(jax.random.split(jax.random.key(1), 8), on)
    numbers = ocp.utils.to_shape_dtype_struct(jax.random.split(jax.random.key(2), 8))
    spread = jax.ShapeDtypeStruct(numbers.shape, numbers.dtype, sharding=NamedSharding(mesh, PartitionSpec("y", None)))
    assert_same(around(tmp_path, {"k": keys})["k"], keys)
    with manager(tmp_path) as made:
        assert made.restore(1)["k"].sharding.is_equivalent_to(on, 1)
        for like, spec in ((numbers, None), (spread, PartitionSpec("y")), (keys, PartitionSpec("x"))):
            got = made.restore(1, args=ocp.args.StandardRestore({"k": like}))["k"]
            assert_same(got, keys)
            if spec is not None:
                assert got.sharding.is_equivalent_to(NamedSharding(mesh, spec), 1)


@pytest.mark.parametrize("spec", [PartitionSpec(), PartitionSpec("y"), PartitionSpec(None, ("x", "y"))])
def test_any_sharding_becomes_any_other(tmp_path, mesh, spec):
    numbers = np.arange(64.0, dtype=np.float32).reshape(8, 8)
    array = jax.device_put(numbers, NamedSharding(mesh, PartitionSpec("x", "y")))
    to = NamedSharding(mesh, spec)
    got = around(tmp_path, {"a": array}, target={"a": jax.ShapeDtypeStruct((8, 8), jnp.float32, sharding=to)})["a"]
    assert got.sharding == to
    assert (np.asarray(got) == numbers).all()
    with manager(tmp_path) as made:
        how = ocp.checkpoint_utils.construct_restore_args({"a": got})
        assert made.restore(1, args=ocp.args.PyTreeRestore(restore_args=how))["a"].sharding == to
        assert made.restore(1, args=ocp.args.StandardRestore({"a": np.zeros((8, 8), np.int32)}))["a"][7, 7] == 63


def test_a_fallback_sharding(tmp_path, mesh):
    to = NamedSharding(mesh, PartitionSpec("x"))
    got = around(tmp_path, {"a": jnp.arange(8.0)}, fallback_sharding=to)["a"]
    assert got.sharding == to


def test_nothing_of_a_save_is_kept_alive(tmp_path):
    with manager(tmp_path) as made:
        before = len(jax.live_arrays())
        for step in range(3):
            made.save(step, args=ocp.args.StandardSave({"x": jnp.full(1000, step)}))
        made.wait_until_finished()
        gc.collect()
        assert len(jax.live_arrays()) <= before + 2
    assert orbax_shared.held(tmp_path) == 3
