"""Python numbers and 0-d JAX arrays stand for each other in `like`: a TrainState's step is an int, then an array."""

from __future__ import annotations

import math

import numpy as np
import pytest

jax = pytest.importorskip("jax")

import jax.numpy as jnp  # noqa: E402
from jax.sharding import NamedSharding, PartitionSpec  # noqa: E402
from pccheck_jax import arrays  # noqa: E402

from pccheck.errors import MismatchError  # noqa: E402
from tests.adapters.jax_trees import bits, mesh, through  # noqa: E402

NUMBERS = [True, -7, 0.1, float("nan"), -math.inf, 1 - 2j]


@pytest.mark.parametrize("number", NUMBERS)
def test_either_becomes_the_other(tmp_path, number):
    array = jnp.asarray(number)
    for form in (array, jnp.asarray(number, array.dtype), jax.ShapeDtypeStruct((), array.dtype)):
        made = through(tmp_path / f"a{type(form).__name__}{form.weak_type}", {"step": number}, like={"step": form})
        wanted = jnp.asarray(number) if form.weak_type else jnp.asarray(number, array.dtype)
        assert bits(made["step"]) == bits(wanted)
    back = through(tmp_path / "back", {"step": array}, like={"step": type(number)()})["step"]
    assert (type(back), bits(jnp.asarray(back))) == (type(number), bits(array))
    same = through(tmp_path / "same", {"step": number}, like={"step": type(number)()})["step"]
    assert type(same) is type(number)


def test_tied_arrays_become_numbers_each(tmp_path):
    step = jnp.asarray(5, jnp.int32)
    like = {"a": 0, "b": jnp.zeros((), jnp.int32)}
    state = through(tmp_path / "ckpt", {"a": step, "b": step}, like=like)
    assert type(state["a"]) is int
    assert state["a"] == 5
    assert bits(state["b"]) == bits(step)


def test_a_number_goes_where_like_lies(tmp_path):
    device = jax.devices()[3]
    everywhere = NamedSharding(mesh(4), PartitionSpec())
    for n, sharding in enumerate((jax.sharding.SingleDeviceSharding(device), everywhere)):
        like = jax.ShapeDtypeStruct((), jnp.int32, sharding=sharding)
        made = through(tmp_path / f"to{n}", [9], like=[like])[0]
        assert made.sharding == sharding
        assert made.dtype == jnp.int32
        assert int(made) == 9
        back = through(tmp_path / f"from{n}", [made], like=[0])[0]
        assert type(back) is int
        assert back == 9


@pytest.mark.parametrize("name", sorted(arrays.DTYPES))
def test_whole_numbers_stay_in_range(name):
    dtype = arrays.DTYPES[name]
    if not jnp.issubdtype(dtype, jnp.integer):
        assert not arrays.holds(name, 1)
        return
    low, high = int(jnp.iinfo(dtype).min), int(jnp.iinfo(dtype).max)
    assert arrays.holds(name, low)
    assert arrays.holds(name, high)
    assert not arrays.holds(name, low - 1)
    assert not arrays.holds(name, high + 1)
    assert not arrays.holds(name, True)
    assert not arrays.holds(name, 1.0)


@pytest.mark.parametrize(
    ("saved", "asked", "problem"),
    [
        (300, jnp.zeros((), jnp.int8), "value"),
        (-1, jnp.zeros((), jnp.uint32), "value"),
        (1e300, jnp.zeros((), jnp.float32), "value"),
        (1.5, jnp.zeros((), jnp.int32), "kind"),
        (1, jnp.zeros((), jnp.float32), "kind"),
        (True, jnp.zeros((), jnp.int32), "kind"),
        (1, jnp.zeros((1,), jnp.int32), "kind"),
        ("1", jnp.zeros((), jnp.int32), "kind"),
        (1, jax.random.key(0), "kind"),
        (jnp.zeros((), jnp.float32), 0, "kind"),
        (jnp.zeros((), jnp.int32), 0.0, "kind"),
        (jnp.zeros((), jnp.int32), False, "kind"),
        (jnp.zeros((1,), jnp.int32), 0, "kind"),
        (np.int32(1), 0, "kind"),
        (1, np.int32(1), "kind"),
    ],
)
def test_what_would_lose_something_is_refused(tmp_path, saved, asked, problem):
    with pytest.raises(MismatchError) as caught:
        through(tmp_path, {"x": saved}, like={"x": asked})
    (found,) = caught.value.mismatches
    assert (found.path, found.problem) == ("x", problem)
    if problem == "value":
        assert str(saved) in str(found)


def test_a_train_state_before_and_after_a_jitted_step(tmp_path):
    optax = pytest.importorskip("optax")
    train_state = pytest.importorskip("flax.training.train_state")

    def make():
        params = {"w": jnp.ones((2, 3))}
        return train_state.TrainState.create(apply_fn=jnp.dot, params=params, tx=optax.adam(1e-2))

    @jax.jit
    def train_step(state):
        return state.apply_gradients(grads=jax.tree.map(jnp.ones_like, state.params))

    new = make()
    assert type(new.step) is int
    stepped = train_step(train_step(new))
    for n, saved in enumerate((new, stepped)):
        for m, like in enumerate((new, stepped, jax.eval_shape(make))):
            state = through(tmp_path / f"{n}{m}", {"train": saved, "epoch": 3}, like={"train": like, "epoch": 0})
            assert state["epoch"] == 3
            assert isinstance(state["train"], train_state.TrainState)
            assert int(state["train"].step) == int(saved.step)
            assert isinstance(state["train"].step, int) == (like is new)
            assert int(train_step(state["train"]).step) == int(saved.step) + 1
