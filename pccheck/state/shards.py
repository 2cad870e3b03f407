"""Arrays that are parts of global ones, declared by who holds them (floor 0: imports errors, leaves, boxes).

A `Shard` stands in a state wherever an array may. Its kind is that of the array inside, seen through `ShardKind`.
"""

from __future__ import annotations

import ctypes
import operator
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, final

import numpy as np

from pccheck.devices import DeviceBytes
from pccheck.errors import UnsupportedLeafError, UsageError
from pccheck.leaves import HostBytes, LeafKind, LeafSpec, dense_strides
from pccheck.state.boxes import Box

_array, _facts = operator.attrgetter("array"), operator.attrgetter("shape", "offsets")


@final
class Shard:
    """One rank's part of a global array: `array` is its elements from `offsets` on. Immutable, thread-safe.

    In a state it is stored as that part. In `like` it asks for that part, whatever parts were stored, and comes back as
    a Shard around an array of its own; without `like`, the whole global array comes back.

    Args:
        array: the local array: NumPy, torch, JAX, or abstract ones in `like`.
        shape: the global array's shape.
        offsets: where in it the local array's first element is, one number per axis.

    Raises:
        UsageError: the local array does not lie within a global one of this shape.
    """

    __slots__ = ("array", "offsets", "shape")

    array: Any
    shape: tuple[int, ...]
    offsets: tuple[int, ...]

    def __init__(self, array: Any, *, shape: Sequence[int], offsets: Sequence[int]) -> None:
        local = getattr(array, "shape", None)
        if isinstance(array, Shard) or not isinstance(local, Sequence):
            raise UsageError(f"a Shard is made of an array, not of a {type(array).__name__}")
        try:
            place, whole = tuple(map(operator.index, offsets)), tuple(map(operator.index, shape))
        except TypeError:
            raise UsageError(f"shape={shape!r} and offsets={offsets!r} must be sequences of whole numbers") from None
        if not Box(place, tuple(local)).fits(whole):
            raise UsageError(
                f"an array of shape {tuple(local)} at offsets {place} does not lie within shape {whole}; give the "
                "global shape, and where in it the first element of this array is"
            )
        for name, value in (("array", array), ("shape", whole), ("offsets", place)):
            object.__setattr__(self, name, value)

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"a Shard cannot be changed; make another to set its {name}")

    def __delattr__(self, name: str) -> None:
        raise AttributeError(f"a Shard cannot be changed; it keeps its {name}")

    def __reduce__(self) -> tuple[Any, ...]:
        return _remade, (self.array, self.shape, self.offsets)

    @property
    def box(self) -> Box:
        """The part of the global array that it is."""
        return Box(self.offsets, tuple(self.array.shape))

    def __repr__(self) -> str:
        kind = type(self.array)
        return f"<Shard {self.offsets}+{self.box.sizes} of {self.shape}: {kind.__module__}.{kind.__qualname__}>"


def _remade(array: Any, shape: tuple[int, ...], offsets: tuple[int, ...]) -> Shard:
    return Shard(array, shape=shape, offsets=offsets)


@final
class ShardKind(LeafKind):
    """Shards of arrays of one kind. Stateless, thread-safe.

    Args:
        inner: the kind of the arrays inside; its name is the name of this one, and of what is stored.
    """

    def __init__(self, inner: LeafKind) -> None:
        self.inner, self.name = inner, inner.name

    def recognises(self, value: object) -> bool:
        """Tell whether it is a Shard around an array of this kind."""
        return type(value) is Shard and self.inner.recognises(value.array)

    def describe(self, value: Any) -> LeafSpec:
        """Give the spec of the part; raises UnsupportedLeafError for arrays that cannot be parts."""
        return self._part(value, self.inner.describe(value.array))

    def fingerprint(self, values: Sequence[Any]) -> object:
        """Give types, places, and what the kind compares of the arrays inside."""
        arrays = arrays_of(self, values)
        return list(map(type, arrays)), list(map(_facts, values)), self.inner.fingerprint(arrays)

    def unchanged(self, values: Sequence[Any], fingerprint: Any) -> bool:
        """Tell whether all of that is still so."""
        types, facts, known = fingerprint
        arrays = arrays_of(self, values)
        same = list(map(type, arrays)) == types and list(map(_facts, values)) == facts
        return same and self.inner.unchanged(arrays, known)

    def addresses(self, values: Sequence[Any]) -> Sequence[int]:
        """Give where the arrays inside begin."""
        return self.inner.addresses(arrays_of(self, values))

    def hold(self, values: Sequence[Any]) -> object:
        """Give what holds the memory of the arrays inside."""
        return self.inner.hold(arrays_of(self, values))

    def parts(self, value: Any) -> int:
        """Give 1; raises UnsupportedLeafError for arrays of several parts."""
        if self.inner.parts(value.array) > 1:
            raise _refused(value, "it is spread over several devices, and so a global array already; store it as it is")
        return 1

    def host_bytes(self, value: Any) -> HostBytes | DeviceBytes:
        """Give the array's bytes in C order: in place where they lie so, else a copy."""
        spec, found = self.inner.describe(value.array), self.inner.host_bytes(value.array)
        strides = dense_strides(spec)
        if isinstance(found, DeviceBytes):
            if strides is not None:
                raise _refused(value, "it is not in C order in its device's memory; store a Shard of a contiguous copy")
            return found
        if strides is not None:
            return _in_c_order(found, spec.shape, strides)
        return replace(found, keep=value) if found.keep is value.array else found

    def sources(self, values: Sequence[Any]) -> Sequence[Any]:
        """Give the sources of the arrays inside."""
        return self.inner.sources(arrays_of(self, values))

    def build(self, spec: LeafSpec, data: memoryview) -> Any:
        """Give the local array alone."""
        return self.inner.build(replace(spec, shape=spec.local_shape, box=None), data)

    def like(self, value: object) -> LeafSpec | None:
        """Give the spec of the part that a Shard asks for."""
        if type(value) is not Shard:
            return None
        spec = self.inner.like(value.array)
        return None if spec is None else self._part(value, spec)

    def convert(self, value: Any, like: Any) -> Any:
        """Give a Shard around the restored local array."""
        return Shard(self.inner.convert(value, like.array), shape=like.shape, offsets=like.offsets)

    def assign(self, target: Any, value: Any) -> None:
        """Copy a restored Shard's array into a live one's."""
        self.inner.assign(target.array, value.array if type(value) is Shard else value)

    def assignable(self, target: Any) -> bool:
        """Tell whether a live Shard's array can be copied into."""
        return self.inner.assignable(target.array)

    def common_dtype(self, spec: LeafSpec) -> str | None:
        """Give what the kind of the arrays inside says."""
        return self.inner.common_dtype(spec)

    def adopt(self, spec: LeafSpec, dtype: str) -> LeafSpec | None:
        """Give what the kind of the arrays inside says."""
        return self.inner.adopt(spec, dtype)

    def _part(self, value: Shard, spec: LeafSpec) -> LeafSpec:
        box, extra = Box(value.offsets, spec.shape), spec.extra_in_c_order
        if spec.box is not None or not self.inner.divisible(replace(spec, extra=extra)):
            raise _refused(value, "it is no plain array of its own; store it without the Shard")
        if not box.fits(value.shape):  # an array may change its shape in place
            raise _refused(value, f"its array has shape {spec.shape} now, which does not lie within {value.shape}")
        return replace(spec, shape=value.shape, box=box, extra=extra)


def arrays_of(kind: LeafKind, values: Sequence[Any]) -> Sequence[Any]:
    """Give the arrays themselves of leaves of one kind: those inside of Shards."""
    return list(map(_array, values)) if isinstance(kind, ShardKind) else values


def _in_c_order(found: HostBytes, shape: tuple[int, ...], strides: tuple[int, ...]) -> HostBytes:
    memory = np.ctypeslib.as_array((ctypes.c_uint8 * found.nbytes).from_address(found.address))
    size = found.nbytes // int(np.prod(shape))
    lying = np.lib.stride_tricks.as_strided(memory.view((np.void, size)), shape, [s * size for s in strides])
    own = np.array(lying, order="C", copy=True)
    return HostBytes(address=own.ctypes.data, nbytes=own.nbytes, keep=own, alias=found.alias, stable=True)


def _refused(value: Shard, reason: str) -> UnsupportedLeafError:
    cls = type(value.array)
    return UnsupportedLeafError("", f"pccheck.Shard of {cls.__module__}.{cls.__qualname__}", reason)
