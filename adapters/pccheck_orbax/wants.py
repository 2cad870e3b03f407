"""How one stored leaf becomes what a target asks for (may import pccheck, Orbax, JAX).

Orbax converts freely between arrays, NumPy arrays and Python numbers, and casts: a step that was saved as a Python int
and has become an int32 array since is the common case. The core restores a leaf as its kind; the rest is done here.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeAlias, final

import jax
import numpy as np
import orbax.checkpoint as ocp
from jax.sharding import NamedSharding

import pccheck
from pccheck.leaves import StoredLeaf
from pccheck_orbax.metadata import StoredArray, dtype_of
from pccheck_orbax.shardings import with_devices

Form: TypeAlias = Literal["stored", "number", "numpy", "jax", "other"]
_NUMBERS = (bool, int, float, complex)
_TEXTS = ("str", "bytes")


@final
@dataclass(frozen=True, kw_only=True)
class Ask:
    """What a leaf of a target asks for."""

    form: Form
    shape: tuple[int, ...] | None = None
    dtype: Any = None
    sharding: Any = None
    cls: Any = None  # of a number; np.generic for a NumPy scalar
    strict: bool = True


AS_STORED = Ask(form="stored")


@final
@dataclass(frozen=True)
class Wanted:
    """What to give the core as `like`, and what makes of its value what was asked for."""

    like: Any
    post: Callable[[Any], Any] = lambda value: value


def ask_of(target: Any) -> Ask:
    """Give what a leaf of a target asks for."""
    if isinstance(target, StoredArray) and target.is_as_given():
        return AS_STORED
    if isinstance(target, ocp.metadata.ArrayMetadata) and not isinstance(target, ocp.metadata.ScalarMetadata):
        return Ask(form="jax", shape=tuple(target.shape), dtype=target.dtype, sharding=with_devices(target.sharding))
    if isinstance(target, ocp.metadata.Metadata):
        return AS_STORED
    cls = target if isinstance(target, type) else type(target)
    if cls in _NUMBERS:
        return Ask(form="number", cls=cls)
    if isinstance(target, (np.ndarray, np.generic)):
        generic = np.generic if isinstance(target, np.generic) else None
        return Ask(form="numpy", shape=target.shape, dtype=target.dtype, cls=generic)
    if not isinstance(target, type) and hasattr(target, "shape") and hasattr(target, "dtype"):
        sharding = with_devices(getattr(target, "sharding", None))
        return Ask(form="jax", shape=tuple(target.shape), dtype=target.dtype, sharding=sharding)
    return Ask(form="other")


def with_args(ask: Ask, args: Any) -> Ask:
    """Give what is asked for where `ocp.RestoreArgs` stand beside the leaf."""
    if args is None:
        return ask
    kind = args.restore_type
    if isinstance(args, ocp.ArrayRestoreArgs) or (isinstance(kind, type) and issubclass(kind, jax.Array)):
        sharding = with_devices(getattr(args, "sharding", None))
        mesh, axes = getattr(args, "mesh", None), getattr(args, "mesh_axes", None)
        if sharding is None and mesh is not None and axes is not None:
            sharding = NamedSharding(mesh, axes)
        shape = getattr(args, "global_shape", None) or (ask.shape if ask.form == "jax" else None)
        return replace(
            ask, form="jax", shape=shape, dtype=args.dtype, sharding=ask.sharding if sharding is None else sharding,
            strict=ask.strict and getattr(args, "strict", True),
        )  # fmt: skip
    if kind in _NUMBERS:
        return Ask(form="number", cls=kind)
    if isinstance(kind, type) and issubclass(kind, np.ndarray):
        return Ask(form="numpy", dtype=args.dtype)
    if args.dtype is not None and ask.form in ("numpy", "jax"):
        return replace(ask, dtype=args.dtype)
    return ask


def wanted(ask: Ask, target: Any, stored: Any, path: str) -> Wanted | pccheck.Mismatch:
    """Give how a stored leaf, or value, becomes what is asked for; or why it cannot."""
    if ask.form == "stored":
        return Wanted(stored)
    if isinstance(stored, StoredLeaf) and stored.spec.kind not in _TEXTS:
        return _of_array(ask, target, stored, path)
    if type(stored) in _NUMBERS:
        return _of_number(ask, target, stored, path)
    return Wanted(stored if target in (str, bytes) else target)


def _of_array(ask: Ask, target: Any, stored: StoredLeaf, path: str) -> Wanted | pccheck.Mismatch:
    spec, dtype = stored.spec, dtype_of(stored)
    if ask.form == "other":
        return Wanted(target)
    if dtype is not None and _loses(dtype, ask):
        return _unreal(path, ask, dtype)
    if ask.form == "number":
        if math.prod(spec.shape) != 1:
            return pccheck.Mismatch(path, "kind", ask.cls.__name__, shown(stored))
        return Wanted(stored, lambda value: ask.cls(np.asarray(value).item()))
    if dtype is None or (ask.dtype is not None and jax.numpy.issubdtype(ask.dtype, jax.dtypes.extended)):
        return Wanted(target if ask.shape is not None else stored)  # keys, records: the core says what differs
    if "impl" in spec.extra:
        return _of_key(ask, target, stored)
    shape = spec.shape if ask.shape is None else ask.shape
    if shape != spec.shape and (ask.strict or len(shape) != len(spec.shape)):
        return pccheck.Mismatch(path, "shape", str(shape), str(spec.shape))
    to = dtype if ask.dtype is None else ask.dtype
    if shape != spec.shape:
        return Wanted(_standin(spec.shape, dtype), lambda value: _placed(_resized(value, shape), ask, to, spec.kind))
    if ask.form == "jax" and (spec.kind == "jax" or ask.sharding is not None):
        return Wanted(abstract(shape, to, ask.sharding))
    like = stored if spec.kind == "numpy" else _standin(shape, dtype)
    return Wanted(like, lambda value: _as_numpy(value, to, ask.cls))


def _of_key(ask: Ask, target: Any, stored: StoredLeaf) -> Wanted:
    """Give a key where its numbers are asked for: Orbax describes keys as arrays of uint32, with more axes."""
    spec = stored.spec
    if ask.shape not in (None, spec.shape) or ask.dtype not in (None, np.uint32):
        return Wanted(target)
    if ask.form == "numpy":
        return Wanted(stored, lambda value: np.asarray(jax.random.key_data(value)))
    key = jax.eval_shape(lambda: jax.random.key(0, impl=spec.extra["impl"]))
    axes = len(jax.eval_shape(jax.random.key_data, key).shape)
    sharding = ask.sharding
    if ask.shape is not None and isinstance(sharding, NamedSharding):  # of the numbers, which have more axes
        over = jax.sharding.PartitionSpec(*sharding.spec[: len(spec.shape) - axes])  # type: ignore[no-untyped-call]
        sharding = NamedSharding(sharding.mesh, over, memory_kind=sharding.memory_kind)
    return Wanted(abstract(spec.shape[: len(spec.shape) - axes], key.dtype, sharding))


def _of_number(ask: Ask, target: Any, stored: Any, path: str) -> Wanted | pccheck.Mismatch:
    if ask.form == "other":
        return Wanted(target)
    if isinstance(stored, complex) and _loses(np.dtype(complex), ask):
        return _unreal(path, ask, "complex")
    if ask.form == "number":
        return Wanted(stored, ask.cls)
    if ask.shape not in (None, ()):
        return pccheck.Mismatch(path, "shape", str(ask.shape), "()")
    return Wanted(stored, lambda value: _placed(np.asarray(value), ask, ask.dtype, type(stored).__name__))


def _loses(dtype: Any, ask: Ask) -> bool:
    """Tell whether complex numbers are to become real ones: NumPy would drop the imaginary parts."""
    if not jax.numpy.issubdtype(dtype, np.complexfloating):
        return False
    if ask.form == "number":
        return ask.cls is not complex
    return ask.dtype is not None and not jax.numpy.issubdtype(ask.dtype, np.complexfloating)


def _unreal(path: str, ask: Ask, found: Any) -> pccheck.Mismatch:
    if ask.form == "number":
        return pccheck.Mismatch(path, "type", ask.cls.__name__, str(found))
    return pccheck.Mismatch(path, "dtype", str(ask.dtype), str(found))


def _placed(value: Any, ask: Ask, dtype: Any, kind: str) -> Any:
    """Give a NumPy array in the dtype and place that was asked for."""
    value = np.asarray(value, dtype)
    if ask.form == "numpy" or (ask.sharding is None and kind != "jax"):
        return value[()] if ask.cls is np.generic else value
    return jax.device_put(value, ask.sharding)


def _as_numpy(value: Any, dtype: Any, cls: Any) -> Any:
    value = np.asarray(value)
    if value.dtype != dtype:
        value = value.astype(dtype)
    return value[()] if cls is np.generic else value


def _resized(value: Any, shape: tuple[int, ...]) -> Any:
    """Cut or pad with zeros at the end of each axis, as Orbax does where it is not strict."""
    made = np.zeros(shape, value.dtype)
    common = tuple(slice(0, min(have, want)) for have, want in zip(value.shape, shape, strict=True))
    made[common] = value[common]
    return made


def abstract(shape: tuple[int, ...], dtype: Any, sharding: Any = None) -> Any:
    """Give JAX's description of an array."""
    return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)  # type: ignore[no-untyped-call]


def _standin(shape: tuple[int, ...], dtype: Any) -> Any:
    """Give an array of this shape and dtype that takes no memory."""
    return np.broadcast_to(np.zeros((), dtype), shape)


def shown(stored: StoredLeaf) -> str:
    """Give how messages speak of a stored leaf."""
    return f"{stored.spec.kind} {stored.spec.dtype}{list(stored.spec.shape)}"
