"""Trees of flax, nnx and optax through a plain Checkpointer: with `like` as they were, without it plain containers."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import numpy as np
import pytest

jax = pytest.importorskip("jax")
flax = pytest.importorskip("flax")
optax = pytest.importorskip("optax")

import jax.numpy as jnp  # noqa: E402
from flax import linen, nnx, struct  # noqa: E402
from flax.core import FrozenDict, freeze  # noqa: E402
from flax.training.train_state import TrainState  # noqa: E402
from pccheck_jax import containers  # noqa: E402

import pccheck  # noqa: E402
from pccheck.errors import MismatchError, UnsupportedLeafError  # noqa: E402
from tests.adapters.jax_trees import assert_same, bits, mesh, ramp, spread, through  # noqa: E402


class Net(linen.Module):
    @linen.compact
    def __call__(self, x):
        x = linen.Dense(4)(x)
        x = linen.BatchNorm(use_running_average=False)(x)
        return linen.Dense(2)(x)


class Model(nnx.Module):
    def __init__(self, rngs):
        self.inner = nnx.Linear(3, 4, rngs=rngs)
        self.norm = nnx.BatchNorm(4, rngs=rngs)
        self.drop = nnx.Dropout(0.1, rngs=rngs)
        self.layers = nnx.List([nnx.Linear(4, 4, rngs=rngs) for _ in range(2)])
        self.name = "static"

    def __call__(self, x):
        x = self.drop(self.norm(self.inner(x)))
        for layer in self.layers:
            x = layer(x)
        return x


@struct.dataclass
class Mine:
    weights: Any
    name: str = struct.field(pytree_node=False, default="static")


@jax.tree_util.register_pytree_with_keys_class
class Keyed:
    def __init__(self, a, b, note=""):
        self.a, self.b, self.note = a, b, note

    def tree_flatten_with_keys(self):
        key = jax.tree_util.GetAttrKey
        return ((key("a"), self.a), (key("b"), self.b)), self.note

    @classmethod
    def tree_unflatten(cls, note, children):
        return cls(*children, note)


@jax.tree_util.register_pytree_node_class
class Bare:
    """Registered without keys."""

    def __init__(self, *items):
        self.items = items

    def tree_flatten(self):
        return self.items, None

    @classmethod
    def tree_unflatten(cls, _, children):
        return cls(*children)


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Registered:
    data: Any
    fixed: str = dataclasses.field(metadata={"static": True}, default="s")


class Pair(NamedTuple):
    a: Any
    b: Any


def train_state():
    net = Net()
    variables = net.init(jax.random.key(0), jnp.ones((1, 3)))
    transform = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(optax.cosine_decay_schedule(1e-3, 100)))
    return TrainState.create(apply_fn=net.apply, params=variables["params"], tx=transform)


def trees():
    model = Model(nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param)
    masked = optax.masked(optax.sgd(0.1, momentum=0.9), {"a": True, "b": False})
    params = {"a": ramp(3), "b": ramp(2, 2)}
    injected = optax.inject_hyperparams(optax.adam)(learning_rate=0.1)
    return {
        "train_state": train_state(),
        "linen variables": Net().init(jax.random.key(1), jnp.ones((2, 3))),
        "frozen": freeze({"params": {"w": ramp(3), "deep": {"b": ramp(2)}}, "empty": {}}),
        "nnx state": nnx.state(model),
        "nnx split": nnx.split(model)[1],
        "nnx pure dict": nnx.to_pure_dict(nnx.state(model)),
        "nnx module": model,
        "nnx optimizer": optimizer,
        "nnx rngs": nnx.Rngs(params=1, dropout=2),
        "optax": [masked.init(params), injected.init(params), optax.lamb(0.1).init(params)],
        "multi": optax.multi_transform({"x": optax.adam(1e-3), "y": optax.sgd(0.1)}, {"a": "x", "b": "y"}).init(params),
        "struct": Mine({"w": ramp(3)}, "another"),
        "mine": {"keyed": Keyed(ramp(2), {"x": 3}, "note"), "bare": Bare(ramp(1), [ramp(2)]), "r": Registered(ramp(4))},
        "python": Pair({"x": [ramp(2), (None, 3)]}, optax.EmptyState()),
        "partial": jax.tree_util.Partial(jnp.add, ramp(3)),
    }  # fmt: skip


TREES = list(trees())


@pytest.mark.parametrize("name", TREES)
def test_like_brings_structure_and_types_back(tmp_path, name):
    tree = trees()[name]
    other = jax.tree.map(lambda x: jnp.zeros_like(x) if isinstance(x, jax.Array) and _is_number(x) else x, tree)
    restored = through(tmp_path, tree, like=other)
    assert type(restored) is type(tree)
    assert_same(restored, tree)


@pytest.mark.parametrize("name", TREES)
def test_abstract_trees_bring_them_back_too(tmp_path, name):
    tree = trees()[name]
    if name in ("python", "train_state", "mine"):  # Python's own numbers are no arrays that eval_shape may make of them
        tree = jax.tree.map(jnp.asarray, tree)
    like = jax.eval_shape(lambda: jax.tree.map(lambda x: x + 0 if _is_number(x) else x, tree))
    assert any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(like))
    restored = through(tmp_path, tree, like=like)
    assert type(restored) is type(tree)
    assert_same(restored, tree)


@pytest.mark.parametrize("name", TREES)
def test_without_like_plain_containers_come_back(tmp_path, name):
    tree = trees()[name]
    restored = through(tmp_path, {"state": tree})["state"]
    assert _is_plain(restored)
    assert sorted(map(repr, map(bits, _leaves(restored)))) == sorted(map(repr, map(bits, _leaves(tree))))


def _is_number(leaf):
    return not jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def _leaves(tree):
    return [leaf for leaf in jax.tree.leaves(tree) if isinstance(leaf, (jax.Array, int, float))]


def _is_plain(value):
    if isinstance(value, dict):
        return type(value) is dict and all(map(_is_plain, value.values()))
    if isinstance(value, (list, tuple)):
        return all(map(_is_plain, value))  # namedtuples are made of name and fields
    return value is None or isinstance(value, (jax.Array, int, float, str))


def test_nnx_eval_shape_is_a_like(tmp_path):
    model = Model(nnx.Rngs(3))
    abstract = nnx.eval_shape(lambda: Model(nnx.Rngs(0)))
    restored = through(tmp_path / "module", model, like=abstract)
    assert isinstance(restored, Model)
    assert restored.name == "static"
    assert_same(nnx.state(restored), nnx.state(model))
    x = jnp.ones((2, 3))
    assert bits(restored(x)) == bits(model(x))
    graph, state = nnx.split(abstract)
    merged = nnx.merge(graph, through(tmp_path / "state", nnx.state(model), like=state))
    assert_same(nnx.state(merged), nnx.state(model))


def test_paths_are_the_names_that_people_know(tmp_path):
    state = {"model": Model(nnx.Rngs(0)), "train": train_state(), "keyed": Keyed(1, 2), "bare": Bare(3)}
    with pccheck.Checkpointer(tmp_path) as ck:
        ck.save(1, state).durable.result(60)
    with pccheck.open(tmp_path) as view:
        paths = set(view)
        assert bits(view["train/params/Dense_0/kernel"]) == bits(state["train"].params["Dense_0"]["kernel"])
    assert {
        "model/layers/0/kernel/value",
        "model/drop/rngs/count/value",
        "train/opt_state/1/0/mu/Dense_0/bias",
    } <= paths
    assert not [path for path in paths if "_pytree" in path]


def test_a_step_after_a_restore_is_the_same_step(tmp_path):
    def step(state, x):
        def loss(params):
            return (state.apply_fn({"params": params}, x, mutable=["batch_stats"])[0] ** 2).sum()

        return state.apply_gradients(grads=jax.grad(loss)(state.params))

    x, state = jnp.linspace(0, 1, 12).reshape(4, 3), train_state()
    for _ in range(3):
        state = step(state, x)
    restored = through(tmp_path, state, like=train_state())
    assert isinstance(restored, TrainState)
    assert restored.step == state.step == 3
    assert_same(jax.tree.leaves(step(restored, x)), jax.tree.leaves(step(state, x)))


def test_static_fields_are_those_of_like(tmp_path):
    restored = through(tmp_path, Mine(ramp(3), "saved"), like=Mine(jnp.zeros(3), "asked"))
    assert restored.name == "asked"
    assert bits(restored.weights) == bits(ramp(3))


def test_int_keys_stay_ints_and_odd_ones_survive(tmp_path):
    numbered = nnx.State({0: {"kernel": nnx.Param(ramp(2))}, 10: nnx.Param(ramp(1)), 9: nnx.Param(ramp(3))})
    odd = nnx.State({"a.b": nnx.Param(ramp(1)), "a/b": nnx.Param(ramp(3)), "": nnx.Param(ramp(2))})
    state = {"numbered": numbered, "odd": odd}
    restored = through(tmp_path / "plain", state)
    assert set(restored["numbered"]) == {0, 9, 10}
    assert set(restored["odd"]) == {"a.b", "a/b", ""}
    assert bits(restored["numbered"][0]["kernel"]["value"]) == bits(ramp(2))
    assert_same(through(tmp_path / "like", state, like=state), state)


def test_every_difference_is_told_by_path(tmp_path):
    saved = train_state()
    other = saved.replace(params={**saved.params, "Dense_9": {"bias": ramp(2)}})
    other.params["Dense_0"] = {**other.params["Dense_0"], "bias": jnp.zeros(5)}
    with pytest.raises(MismatchError) as error:
        through(tmp_path, saved, like=other)
    found = {(m.path, m.problem) for m in error.value.mismatches}
    assert found == {("params/Dense_0/bias", "shape"), ("params/Dense_9/bias", "missing")}
    with pytest.raises(MismatchError):
        through(tmp_path / "b", {"a": Mine(ramp(2))}, like={"a": ramp(2)})
    with pytest.raises(MismatchError):
        through(tmp_path / "c", {"a": ramp(2)}, like={"a": Mine(ramp(2))})


def test_places_may_be_left_out(tmp_path):
    saved = train_state()
    like = saved.replace(opt_state=..., params={**saved.params, "Dense_0": ...})
    restored = through(tmp_path, saved, like=like)
    assert restored.opt_state is ...
    assert restored.params["Dense_0"] is ...
    assert bits(restored.params["Dense_1"]["kernel"]) == bits(saved.params["Dense_1"]["kernel"])


def test_plain_containers_and_registered_ones_fit_each_other(tmp_path):
    plain = {"weights": {"w": ramp(3)}}
    restored = through(tmp_path / "a", plain, like=Mine({"w": jnp.zeros(3)}))
    assert isinstance(restored, Mine)
    assert bits(restored.weights["w"]) == bits(ramp(3))
    frozen = freeze({"a": {"b": ramp(2)}})
    assert_same(through(tmp_path / "c", {"a": {"b": ramp(2)}}, like=frozen), frozen)


def test_what_is_no_container_of_jax():
    for value in (
        {}, [], (), None, optax.EmptyState(), Pair(1, 2), "text", b"bytes", 3, 2.5, ramp(2), jax.random.key(0),
        jax.ShapeDtypeStruct((2,), jnp.float32), np.ones(2), np.float32(1), object(), dict, Mine, slice(1), ...,
    ):  # fmt: skip
        assert not containers.recognises(value), value
    for value in (Mine(1), FrozenDict({}), nnx.State({}), nnx.Param(ramp(1)), Model(nnx.Rngs(0)), Bare(), Keyed(1, 2)):
        assert containers.recognises(value), value


def node(*keys):
    class Node:
        pass

    children = [(key, n) for n, key in enumerate(keys)]
    jax.tree_util.register_pytree_with_keys(Node, lambda _: (children, None), lambda *_: Node())
    return Node()


KEY, NAME = jax.tree_util.DictKey, jax.tree_util.GetAttrKey


@pytest.mark.parametrize(
    ("keys", "reason"),
    [
        ([KEY("x"), KEY("x")], "differ as text"),
        ([KEY("x"), NAME("x")], "differ as text"),
        ([KEY(1), KEY("1")], "differ as text"),
        ([KEY([1, 2]), KEY("x")], "cannot be one of a dict"),
    ],
)
def test_keys_that_cannot_be_told_apart_or_be_keys_are_refused_with_the_path(tmp_path, keys, reason):
    with pccheck.Checkpointer(tmp_path) as ck, pytest.raises(UnsupportedLeafError, match=reason) as caught:
        ck.save(1, {"deep": {"bad": node(*keys)}})
    assert caught.value.path == "deep/bad"


def test_keys_keep_their_types():
    for keys in ((1, 0), (True, False), (1.0, 0.0), (None, "x"), (("a", (1, None)), b"c")):  # 1, True and 1.0 are equal
        opened = containers.open(node(*map(KEY, keys)))[0]
        assert list(map(repr, opened)) == list(map(repr, keys))


@pytest.mark.parametrize("far", [False, True])
def test_a_module_that_contains_itself_is_refused(tmp_path, far):
    model = nnx.Linear(2, 2, rngs=nnx.Rngs(0))
    model.me = nnx.Linear(2, 2, rngs=nnx.Rngs(0)) if far else model
    model.me.me = model
    with pccheck.Checkpointer(tmp_path) as ck, pytest.raises(UnsupportedLeafError, match="contains itself"):
        ck.save(1, {"model": model})


def test_live_arrays_of_jax_cannot_be_loaded_into_and_the_error_says_what_can(tmp_path):
    model = nnx.Linear(2, 2, rngs=nnx.Rngs(0))
    for state in ({"w": jnp.ones(3)}, nnx.state(model), (model,)):
        with pccheck.Checkpointer(tmp_path) as ck:
            ck.save(1, state).durable.result(60)
            with pytest.raises(MismatchError, match=r"cannot be written \(use restore\(like=") as told:
                ck.restore(like=state).load_into(state)
            assert {one.problem for one in told.value.mismatches} == {"kind"}
            assert_same(ck.restore(like=state).state, state)


def test_sharded_trees_come_back_in_their_shardings(tmp_path):
    where = mesh(2, 4)
    state = train_state()
    state = state.replace(params=jax.tree.map(lambda x: spread(x, where), state.params))
    state = state.replace(opt_state=jax.tree.map(lambda x: spread(x, where), state.opt_state))
    restored = through(tmp_path, state, like=state)
    assert_same(restored, state)
    assert [x.sharding for x in jax.tree.leaves(restored.params)] == [x.sharding for x in jax.tree.leaves(state.params)]
