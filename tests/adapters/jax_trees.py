"""What the tests of JAX share: states to save, and what it means for two of them to be the same."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import pccheck


def mesh(*shape, names=("x", "y"), devices=None):
    """Give a mesh of the first devices."""
    found = jax.devices() if devices is None else devices
    return Mesh(np.array(found[: int(np.prod(shape))]).reshape(shape), names[: len(shape)])


def spread(array, where, *spec):
    """Give an array spread over a mesh."""
    return jax.device_put(array, NamedSharding(where, PartitionSpec(*spec)))


def is_key(value):
    return jax.dtypes.issubdtype(value.dtype, jax.dtypes.prng_key)


def bits(value):
    """Give all that makes a leaf, its place apart."""
    if isinstance(value, jax.Array):
        if is_key(value):
            return "key", str(jax.random.key_impl(value)), value.shape, bits(jax.random.key_data(value))
        host = np.asarray(value)
        return "jax", host.dtype, host.shape, value.weak_type, host.tobytes()
    if isinstance(value, (np.ndarray, np.generic)):
        return type(value).__name__, value.dtype, value.shape, value.tobytes()
    return type(value), value


def assert_same(a, b):
    """Two trees of the same structure have the same leaves, bit by bit."""
    one, two = (jax.tree.flatten(tree) for tree in (a, b))
    assert one[1] == two[1]
    assert list(map(bits, one[0])) == list(map(bits, two[0]))


def through(folder, state, **restoring):
    """Save a state and restore it."""
    with pccheck.Checkpointer(folder) as ck:
        ck.save(1, state).durable.result(60)
        return ck.restore(**restoring).state


def ready(*values):
    jax.block_until_ready(values)
    return values


def ramp(*shape, dtype=jnp.float32):
    return jnp.arange(int(np.prod(shape))).reshape(shape).astype(dtype)
