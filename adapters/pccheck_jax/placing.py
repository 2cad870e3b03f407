"""Gives restored leaves the place, dtype and form of others: `like` (imports jax, this package)."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Sharding, SingleDeviceSharding

from pccheck.leaves import Box, LeafSpec
from pccheck_jax import arrays, places


def sharding_of(like: Any) -> Sharding | None:
    """Give where a leaf of `like` is to lie; None = uncommitted, on the default device."""
    if isinstance(like, jax.Array) and not like.committed:
        return None
    return places.concrete(getattr(like, "sharding", None))


def boxes(like: Any) -> list[Box] | None:
    """Give the box that each device of this process holds; None for what lies on one device, or on none in particular.

    Raises UnsupportedLeafError where a sharding is over an abstract mesh, and no mesh of its axes was set.
    """
    sharding = sharding_of(like)
    if sharding is None:
        told = getattr(like, "sharding", None)
        if told is not None and not isinstance(like, jax.Array):
            raise arrays.refused(
                like, f"its sharding {told} is over an abstract mesh; restore under jax.set_mesh(...) of a real one"
            )
        return None
    if places.is_single(sharding) and sharding.is_fully_addressable:
        return None
    shape = tuple(like.shape)
    rest = arrays.spec_of(like).shape[len(shape) :]  # of keys: the axis of their data
    return [
        Box(box.offsets + (0,) * len(rest), box.sizes + tuple(rest)) for _, box in places.local_boxes(sharding, shape)
    ]


def convert(value: Any, like: Any) -> Any:
    """Give a restored leaf on the device of `like`, or on the default one, with its dtype and weak type.

    Where `like` is a Python number, it is one of its class; where one was stored, it is taken as an array.
    """
    if isinstance(like, (int, float, complex)):
        return type(like)(numbers(value).item())
    if arrays.is_key(like):
        return arrays.wrap(_key_data(value, like), _impl(like), sharding_of(like))
    host = cast(numbers(value), np.dtype(like.dtype))
    where = sharding_of(like)
    return arrays.weak_as(arrays.put(host, where), like)


def join(values: Sequence[Any], like: Any) -> Any:
    """Give an array over all devices of `like` out of the local array for each device of this process."""
    sharding, shape = sharding_of(like), tuple(like.shape)
    assert sharding is not None, "only arrays that have one are joined"
    where = [
        SingleDeviceSharding(device, memory_kind=sharding.memory_kind)
        for device, _ in places.local_boxes(sharding, shape)
    ]
    if arrays.is_key(like):
        made = [arrays.wrap(_key_data(value, like), _impl(like), at) for value, at in zip(values, where, strict=True)]
        return jax.make_array_from_single_device_arrays(shape, sharding, made, dtype=like.dtype)
    dtype = np.dtype(like.dtype)
    made = [
        arrays.weak_as(arrays.put(cast(numbers(value), dtype), at), like)
        for value, at in zip(values, where, strict=True)
    ]
    return jax.make_array_from_single_device_arrays(shape, sharding, made, dtype=dtype)


def casts(spec: LeafSpec, like: Any) -> bool:
    """Tell whether stored numbers may become those of `like`: all but keys, and complex numbers only complex ones."""
    if arrays.is_key(like) or "impl" in spec.extra:
        return False
    stored, wanted = arrays.DTYPES.get(spec.dtype), np.dtype(like.dtype)
    return stored is not None and (stored.kind != "c" or wanted.kind == "c")


def placement(like: Any) -> Hashable | None:
    """Give what is equal for leaves of which `convert` and `join` make the same."""
    if isinstance(like, (int, float, complex)):
        return None
    impl = _impl(like) if arrays.is_key(like) else ""
    return sharding_of(like), str(like.dtype), bool(getattr(like, "weak_type", False)), impl, tuple(like.shape)


def numbers(value: Any) -> np.ndarray[Any, Any]:
    """Give the numbers of a restored leaf in host memory, without a copy."""
    return value if isinstance(value, np.ndarray) else np.asarray(value)


def cast(host: np.ndarray[Any, Any], dtype: np.dtype[Any]) -> np.ndarray[Any, Any]:
    """Give numbers as another dtype, rounded as NumPy rounds; what does not fit becomes what it becomes there."""
    if host.dtype == dtype:
        return host
    with np.errstate(all="ignore"):
        return host.astype(dtype)


def _key_data(value: Any, like: Any) -> np.ndarray[Any, Any]:
    if isinstance(value, np.ndarray):
        return value
    if not arrays.is_key(value) or str(jax.random.key_impl(value)) != _impl(like):
        raise arrays.refused(like, f"a {value.dtype} was restored")
    return np.asarray(jax.random.key_data(value))


def _impl(like: Any) -> str:
    return str(arrays.spec_of(like).extra["impl"])
