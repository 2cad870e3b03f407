"""NumPy's arrays and scalars as leaves (floor 1: imports floor 0 and the native extension).

dtypes are written as NumPy's own `dtype.str` ("<f4", ">i8", "<M8[ns]", "<U5"), those of ml_dtypes by name ("bfloat16"),
structured ones as "struct" with their fields as JSON in `extra`. Nothing that a file says is evaluated.
"""

from __future__ import annotations

import math
import operator
import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, final

import numpy as np

from pccheck.errors import FormatError, UnsupportedLeafError
from pccheck.leaves import HostBytes, LeafKind, LeafSpec, dense_strides, is_dense
from pccheck.state import numpy_dtypes

try:
    from pccheck._native import buffer_addresses
except ImportError:  # built without a compiler
    buffer_addresses = None  # type: ignore[assignment]

_ADDRESS = operator.attrgetter("ctypes.data")
_FACTS = operator.attrgetter("dtype", "shape", "strides")


@final
class NumpyKind(LeafKind):
    """`numpy.ndarray` (exactly) and NumPy scalars, ml_dtypes included. Stateless, thread-safe."""

    name = "numpy"

    def recognises(self, value: object) -> bool:
        """Tell whether it is an array or scalar of NumPy, subclasses included (which `describe` refuses)."""
        return isinstance(value, (np.ndarray, np.generic))

    def describe(self, value: Any) -> LeafSpec:
        """Give the spec; raises UnsupportedLeafError for object arrays and subclasses of ndarray."""
        if isinstance(value, np.ndarray) and type(value) is not np.ndarray and type(value) is not np.memmap:
            raise _refused(
                value,
                "a subclass of ndarray would come back as a plain array; store its parts, such as .data and .mask",
            )
        try:
            dtype, extra = numpy_dtypes.encode(value.dtype)
        except ValueError as error:
            raise _refused(value, str(error)) from None
        if isinstance(value, np.generic):
            extra["scalar"] = True
        elif _is_permuted(value):
            extra["stride"] = [s // value.itemsize for s in value.strides]
        return LeafSpec(kind=self.name, dtype=dtype, shape=value.shape, nbytes=value.nbytes, extra=extra)

    def fingerprint(self, values: Sequence[Any]) -> object:
        """Give dtype, shape and strides of all."""
        return list(map(_FACTS, values))

    def unchanged(self, values: Sequence[Any], fingerprint: Any) -> bool:
        """Tell whether dtype, shape and strides of all are these."""
        return not any(map(operator.ne, map(_FACTS, values), fingerprint))

    def addresses(self, values: Sequence[Any]) -> Sequence[int]:
        """Give where the memory of each array begins."""
        if buffer_addresses is not None:
            try:
                return np.frombuffer(buffer_addresses(values), np.uint64)  # type: ignore[return-value]
            except (BufferError, ValueError):  # an array that is not in C order
                pass
        return np.fromiter(map(_ADDRESS, values), np.uint64, len(values))  # type: ignore[return-value]

    def host_bytes(self, value: Any) -> HostBytes:
        """Give an array's own memory where it is dense, else that of a copy in C order; of a scalar always a copy."""
        if isinstance(value, np.generic):
            own = np.frombuffer(bytearray(_scalar_bytes(value)), np.uint8)
            return HostBytes(address=own.ctypes.data, nbytes=own.nbytes, keep=own, stable=True)
        alias = (value.ctypes.data, value.dtype, value.shape, value.strides) if value.nbytes else None
        if value.flags.c_contiguous or _is_permuted(value):
            return HostBytes(address=value.ctypes.data, nbytes=value.nbytes, keep=value, alias=alias)
        own = np.array(value, order="C", copy=True, subok=False)
        return HostBytes(address=own.ctypes.data, nbytes=own.nbytes, keep=own, alias=alias, stable=True)

    def build(self, spec: LeafSpec, data: memoryview) -> Any:
        """Give the array over `data`, or the scalar."""
        dtype = numpy_dtypes.decode(spec.dtype, spec.extra)
        shape = spec.local_shape
        if math.prod(shape) * dtype.itemsize != spec.nbytes or data.nbytes != spec.nbytes:
            raise FormatError(f"{data.nbytes} bytes do not make an array of shape {shape} and dtype {spec.dtype}")
        strides = dense_strides(spec)
        try:
            array = np.ndarray(
                shape, dtype, data, strides=None if strides is None else [s * dtype.itemsize for s in strides]
            )
        except (ValueError, TypeError, OverflowError) as error:
            raise FormatError(f"no array of shape {shape} and dtype {spec.dtype}: {error}") from None
        if spec.extra.get("scalar") is not True or shape:
            return array
        try:
            return scalar_of(array)
        except UnicodeDecodeError as error:
            raise FormatError(f"a string is not UTF-32: {error.reason}") from None

    def like(self, value: object) -> LeafSpec | None:
        """Give what an array, a scalar, or anything with a `shape` and a NumPy `dtype` asks for."""
        if self.recognises(value):
            return self.describe(value)
        shape, dtype = getattr(value, "shape", None), getattr(value, "dtype", None)
        if not isinstance(shape, tuple) or not isinstance(dtype, (np.dtype, type)):
            return None
        try:
            name, extra = numpy_dtypes.encode(np.dtype(dtype))
            shape = tuple(map(operator.index, shape))
        except (TypeError, ValueError):
            return None
        nbytes = math.prod(shape) * np.dtype(dtype).itemsize
        return LeafSpec(kind=self.name, dtype=name, shape=shape, nbytes=nbytes, extra=extra)

    def convert(self, value: Any, like: Any) -> Any:
        """Give a scalar where `like` is one, an array where it is none."""
        if isinstance(like, np.generic):
            return scalar_of(value) if isinstance(value, np.ndarray) else value
        return np.array(value) if isinstance(value, np.generic) else value

    def assign(self, target: Any, value: Any) -> None:
        """Copy into an array that may be written; raises UnsupportedLeafError for one that may not, and for scalars."""
        if not self.assignable(target):
            raise UnsupportedLeafError("", type(target).__name__, "it cannot be written")
        np.copyto(target, value, casting="no")

    def assignable(self, target: Any) -> bool:
        """Tell whether it is an array that may be written."""
        return isinstance(target, np.ndarray) and target.flags.writeable

    def common_dtype(self, spec: LeafSpec) -> str | None:
        """Give "float32" for "<f4" and so on; None for dtypes that NumPy alone has."""
        return numpy_dtypes.common_name(spec.dtype)

    def adopt(self, spec: LeafSpec, dtype: str) -> LeafSpec | None:
        """Give a NumPy spec for another kind's leaf; raw void ("|V1") for a dtype that NumPy does not have."""
        count = math.prod(spec.local_shape)
        found = numpy_dtypes.named(dtype)
        if found is None:
            itemsize = spec.nbytes // count if count else 1
            if itemsize * count != spec.nbytes:
                return None
            found = np.dtype((np.void, itemsize))
        name, _ = numpy_dtypes.encode(found)
        extra = {"stride": spec.extra["stride"]} if "stride" in spec.extra else {}
        return replace(spec, kind=self.name, dtype=name, extra=extra)


def as_numpy(spec: LeafSpec, data: memoryview) -> Any:
    """Give a leaf whose own kind is not installed: an array; plain Python for a small thing of its framework; a dict of
    arrays, by name, for a leaf that is stored in parts.

    Raises FormatError where the bytes do not make what the spec says.
    """
    if "value" in spec.extra:
        value = spec.extra["value"]
        return tuple(value) if isinstance(value, list) else value
    if "parts" in spec.extra:
        return _parts(spec.extra["parts"], data)
    bits = spec.extra.get("bits")  # what the elements are made of, where NumPy has no such dtype (keys of a PRNG)
    found = _NUMPY.adopt(spec, bits if isinstance(bits, str) else spec.dtype)
    if found is None:
        raise FormatError(f"{spec.nbytes} bytes do not make an array of shape {spec.shape}")
    return _NUMPY.build(found, data)


def _parts(parts: Any, data: memoryview) -> dict[str, Any]:
    """Give the arrays that a leaf is made of; each lies within its bytes."""
    found = {}
    try:
        for name, dtype, shape, offset, nbytes in ([p[k] for k in _PART_FIELDS] for p in parts):
            numbers = (offset, nbytes, *shape)
            if not all(type(n) is int and n >= 0 for n in numbers) or offset + nbytes > data.nbytes:
                raise FormatError(f"part {name!r:.80} reaches out of its leaf")
            spec = LeafSpec(kind="", dtype=str(dtype), shape=tuple(shape), nbytes=nbytes)
            found[str(name)] = as_numpy(spec, data[offset : offset + nbytes])
    except (TypeError, KeyError) as error:
        raise FormatError(f"{parts!r:.200} are no parts of a leaf: {error!r}") from None
    return found


_NUMPY = NumpyKind()
_PART_FIELDS = ("name", "dtype", "shape", "offset", "nbytes")


def _scalar_bytes(value: np.generic) -> bytes:
    if isinstance(value, np.bytes_):
        return bytes(value)
    if isinstance(value, np.str_):  # an array would turn "" into "\0", and str() drops NULs
        return str.encode(value, f"utf-32-{sys.byteorder[0]}e", "surrogatepass")
    return np.array(value).tobytes()


def scalar_of(array: np.ndarray[Any, Any]) -> Any:
    """Give the NumPy scalar that a 0-d array holds; unlike `array[()]`, strings keep NULs at their end."""
    if array.dtype.kind == "S":
        return np.bytes_(array.tobytes())
    if array.dtype.kind == "U":
        order = "utf-32-be" if array.dtype.str[0] == ">" else "utf-32-le"
        return np.str_(array.tobytes().decode(order, "surrogatepass"))
    return array[()]


def _is_permuted(value: np.ndarray[Any, Any]) -> bool:
    """Tell whether an array is dense, but with its axes in another order than C (as Fortran's)."""
    if value.flags.c_contiguous or not value.nbytes:
        return False
    size = value.itemsize
    return not any(s % size for s in value.strides) and is_dense(value.shape, [s // size for s in value.strides])


def _refused(value: object, reason: str) -> UnsupportedLeafError:
    cls = type(value)
    dtype = getattr(value, "dtype", None)
    return UnsupportedLeafError("", f"{cls.__module__}.{cls.__qualname__} of dtype {dtype}", reason)
