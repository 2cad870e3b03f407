"""Arrays and keys as numbers: what they are called, and how they are made again (imports jax, pccheck.leaves)."""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pccheck.errors import FormatError, UnsupportedLeafError
from pccheck.leaves import LeafSpec, dense_strides

KIND = "jax"
_struct: Any = jax.ShapeDtypeStruct  # without types
_config: Any = jax.config
_iinfo: Any = jnp.iinfo
_finfo: Any = jnp.finfo
BITS = "uint32"  # what the data of PRNG keys are made of


def _dtypes() -> dict[str, np.dtype[Any]]:
    """Give the dtypes that this jax has, by name."""
    found: dict[str, np.dtype[Any]] = {}
    for value in vars(jnp).values():
        try:
            dtype = value.dtype if isinstance(value, type(jnp.float32)) else None
        except AttributeError:
            dtype = None
        if isinstance(dtype, np.dtype):
            found[dtype.name] = dtype
    return found


DTYPES = _dtypes()


# -- what they are ---------------------------------------------------------------------------------------------------


def is_key(value: Any) -> bool:
    """Tell whether an array, or what stands for one, is of PRNG keys (`jax.random.key`)."""
    return bool(jnp.issubdtype(value.dtype, jax.dtypes.prng_key))


def numbers_of(value: Any) -> Any:
    """Give the array of numbers that a leaf is: of keys their data, which have one axis more."""
    return jax.random.key_data(value) if is_key(value) else value


def spec_of(value: Any) -> LeafSpec:
    """Give the spec of a whole array, or of what stands for one."""
    extra: dict[str, Any] = {}
    if is_key(value):
        dtype, shape = np.dtype(BITS), tuple(value.shape) + _data_shape(value.dtype)
        impl = impl_of(value.dtype)
        name, extra = f"key<{impl}>", {"impl": impl, "bits": BITS}
    else:
        dtype, shape = np.dtype(value.dtype), tuple(value.shape)
        name = dtype.name
        if getattr(value, "weak_type", False):
            extra = {"weak": True}
    return LeafSpec(kind=KIND, dtype=name, shape=shape, nbytes=math.prod(shape) * dtype.itemsize, extra=extra)


@functools.lru_cache(maxsize=64)
def impl_of(dtype: Any) -> str:
    """Give the name of the PRNG that keys of a dtype are of, such as "threefry2x32"."""
    found: list[str] = []
    jax.eval_shape(lambda key: found.append(str(jax.random.key_impl(key))), _struct((), dtype))
    return found[0]


@functools.lru_cache(maxsize=64)
def _data_shape(dtype: Any) -> tuple[int, ...]:
    """Give the shape of the data of one key."""
    return tuple(jax.eval_shape(jax.random.key_data, _struct((), dtype)).shape)


def assert_storable(value: Any) -> None:
    """Raise UnsupportedLeafError (path "") for what has no bytes, or none any more."""
    if isinstance(value, jax.core.Tracer):
        raise refused(value, "it is a tracer: save outside of jit, grad and vmap")
    if not isinstance(value, jax.Array):
        raise refused(value, "it may be changed while it is saved; store ref[...] of it")
    if value.is_deleted():
        raise refused(value, "it was deleted: donated to a jitted function? save what that function returned")
    if not is_key(value) and np.dtype(value.dtype).name not in DTYPES:
        raise refused(value, f"pccheck knows no dtype {value.dtype}")


def refused(value: Any, reason: str) -> UnsupportedLeafError:
    """Give the error that says why a leaf cannot be stored or restored."""
    told = f"{type(value).__module__}.{type(value).__qualname__}"
    dtype = getattr(value, "dtype", None)
    return UnsupportedLeafError("", told if dtype is None else f"{told} of {dtype}", reason)


def holds(name: str, number: bool | int | float | complex) -> bool:
    """Tell whether a dtype is of a Python number's class and has it in range; floats are rounded as JAX rounds them."""
    dtype, cls = DTYPES.get(name), type(number)
    if dtype is None or not jnp.issubdtype(dtype, _CLASSES[cls]):
        return False
    if isinstance(number, bool):
        return True
    if isinstance(number, int):
        return int(_iinfo(dtype).min) <= number <= int(_iinfo(dtype).max)
    with np.errstate(all="ignore"):
        cast = complex(np.asarray(number).astype(dtype))
    parts = ((number.real, cast.real), (number.imag, cast.imag))
    limit = float(_finfo(dtype).max)
    return all(
        abs(have) <= limit if math.isfinite(have) else have == made or (math.isnan(have) and math.isnan(made))
        for have, made in parts
    )


_CLASSES = {bool: np.bool_, int: jnp.integer, float: jnp.floating, complex: jnp.complexfloating}


# -- how they are made again -----------------------------------------------------------------------------------------


def build(spec: LeafSpec, data: memoryview) -> Any:
    """Give the array or keys over `data`, in the memory of the CPU backend; NumPy's array where there is none."""
    host = _host_array(spec, data)
    cpu = _cpu()
    if cpu is None:
        return host
    with jax.default_device(cpu):
        if "impl" in spec.extra:
            return wrap(host, spec.extra["impl"])
        return _weak(put(host), wanted=spec.extra.get("weak") is True)


def _host_array(spec: LeafSpec, data: memoryview) -> np.ndarray[Any, Any]:
    name = BITS if "impl" in spec.extra else spec.dtype
    dtype, shape = DTYPES.get(name), spec.local_shape
    if dtype is None:
        raise FormatError(f"{spec.dtype[:80]!r} is no dtype of this jax, {jax.__version__}")
    if math.prod(shape) * dtype.itemsize != spec.nbytes or data.nbytes != spec.nbytes:
        raise FormatError(f"{data.nbytes} bytes do not make an array of shape {shape} and dtype {name}")
    strides = dense_strides(spec)
    try:
        return np.ndarray(
            shape, dtype, data, strides=None if strides is None else [s * dtype.itemsize for s in strides]
        )
    except (ValueError, TypeError, OverflowError) as error:
        raise FormatError(f"no array of shape {shape} and dtype {name}: {error}") from None


def put(host: np.ndarray[Any, Any], where: Any = None) -> Any:
    """Give a NumPy array as a jax.Array; on the CPU without a copy. `where` None = uncommitted, on the default device.

    Whoever has no 64-bit numbers switched on gets them all the same: what was saved comes back, not half of its bits.
    """
    try:
        with _wide(host.dtype):
            return jax.device_put(host, where)
    except (ValueError, TypeError, RuntimeError) as error:
        raise refused(host, f"{error}") from error


def wrap(host: np.ndarray[Any, Any], impl: object, where: Any = None) -> Any:
    """Give keys of their data; UnsupportedLeafError where their PRNG is not known here."""
    try:
        return jax.random.wrap_key_data(put(host, where), impl=str(impl)[:200])
    except (ValueError, TypeError) as error:
        raise UnsupportedLeafError("", f"key<{str(impl)[:80]}>", f"no such keys can be made here: {error}") from error


def weak_as(value: Any, like: Any) -> Any:
    """Give an array as weakly typed as `like`: such a one lets others decide the dtype of what is computed of both."""
    return _weak(value, wanted=bool(getattr(like, "weak_type", False)))


def _weak(value: Any, *, wanted: bool) -> Any:
    if value.weak_type == wanted:
        return value
    if not wanted:
        return value.astype(value.dtype)
    zero = np.zeros((), value.dtype).item()
    with _wide(value.dtype):
        made = jnp.full(value.shape, zero).at[...].set(value)
    return made if made.weak_type and made.dtype == value.dtype else value


@contextlib.contextmanager
def _wide(dtype: Any) -> Iterator[None]:
    if np.dtype(dtype).name not in ("float64", "int64", "uint64", "complex128") or _config.jax_enable_x64:
        yield
        return
    with jax.enable_x64(True):
        yield


def _cpu() -> Any:
    """Give the CPU device on which leaves are restored; None where the program has switched that backend off."""
    default = _config.jax_default_device
    if getattr(default, "platform", None) == "cpu":
        return default
    try:
        return jax.local_devices(backend="cpu")[0]
    except RuntimeError:
        return None
