"""jax.Arrays as leaves of a checkpoint (imports jax, pccheck.leaves).

On the CPU backend their memory is read in place. A bare address does not protect it: an array that is donated to a
jitted function gives its memory away while it is read. What protects it is something exported from it (see `holding`),
which makes XLA put the result elsewhere; `hold` keeps that of each array until it was captured, so that `save()` need
not wait. On accelerators there is no such thing: see `devices`.
"""

from __future__ import annotations

import operator
from collections.abc import Hashable, Sequence
from dataclasses import replace
from typing import Any, final

import jax
import numpy as np

from pccheck.leaves import Box, DeviceBytes, HostBytes, LeafKind, LeafSpec
from pccheck_jax import arrays, devices, holding, placing
from pccheck_jax.places import NOWHERE, Share, are_on_host, are_single, different, is_on_host, shares

_avals, _shardings = operator.attrgetter("aval"), operator.attrgetter("sharding")
_pointer = operator.methodcaller("unsafe_buffer_pointer")
_MUTABLE: tuple[type, ...] = (jax.Ref,) if hasattr(jax, "Ref") else ()


@final
class JaxKind(LeafKind):
    """Arrays of any dtype and sharding, and PRNG keys. Thread-safe.

    Args:
        as_device: read the CPU backend's memory as if it were that of an accelerator, which is how that is tested.
        number: which part it answers for of leaves of several parts; `part` makes those after the first.
    """

    name = arrays.KIND

    def __init__(self, *, as_device: bool = False, number: int = 0) -> None:
        self._as_device, self._number = as_device, number
        self._parts: dict[int, JaxKind] = {0: self}

    def recognises(self, value: object) -> bool:
        """Tell whether it is a jax.Array, keys and tracers included (`describe` refuses tracers, and Refs)."""
        return isinstance(value, (jax.Array, *_MUTABLE))

    def parts(self, value: Any) -> int:
        """Give how many different boxes of it this process stores; raises as `describe` does."""
        arrays.assert_storable(value)
        return len(_shares(value))

    def part(self, number: int) -> LeafKind:
        """Give the kind for the n-th of these boxes."""
        return self._parts.get(number) or self._parts.setdefault(
            number, JaxKind(as_device=self._as_device, number=number)
        )

    def describe(self, value: Any) -> LeafSpec:
        """Give the spec; raises UnsupportedLeafError for a deleted array, a tracer, a Ref, and unknown dtypes."""
        return self._described(value)[1]

    def fingerprint(self, values: Sequence[Any]) -> object:
        """Give dtype, shape, weak type and sharding of all."""
        return _Fingerprint(values)

    def unchanged(self, values: Sequence[Any], fingerprint: Any) -> bool:
        """Tell whether all of that is still so."""
        return bool(fingerprint.fits(values))

    def hold(self, values: Sequence[Any]) -> object:
        """Give what makes donation of all harmless; waits until all values are computed.

        Raises ValueError where one of them cannot be read in place (its layout is not C order).
        """
        if self._as_device:
            return None
        if not are_on_host(values):  # donated memory of accelerators is protected by captures and shadows
            values = [value for value in values if is_on_host(value.sharding)]
        return holding.hold(self._locals(values))[0]

    def held_at(self, values: Sequence[Any], fingerprint: Any) -> tuple[object, Sequence[int]] | None:
        """Give that and where each begins in memory, if they are unchanged."""
        if not fingerprint.fits(values):
            return None
        if self._as_device or not fingerprint.is_on_host:
            return self.hold(values), self.addresses(values)
        local = self._locals(values)
        kept, found = holding.hold(local, fingerprint.by_capsule)
        return kept, self._starts(values, local, _pointers(local) if found is None else found)

    def addresses(self, values: Sequence[Any]) -> Sequence[int]:
        """Give where the part that is stored of each begins in memory; raises for deleted arrays."""
        local = self._locals(values)
        return self._starts(values, local, _pointers(local))

    def host_bytes(self, value: Any) -> HostBytes | DeviceBytes:
        """Give the memory of an array on the CPU backend, or a device's; of keys, and of odd layouts, a copy."""
        share, spec = self._described(value)
        if not spec.nbytes:
            return HostBytes(address=0, nbytes=0, keep=None, stable=True)
        is_key = arrays.is_key(value)
        if not is_key and (self._as_device or not is_on_host(value.sharding)):
            return self._on_device(value, share, spec)
        local = arrays.numbers_of(value).addressable_data(share.shard)
        view = np.asarray(local)
        mine = view if share.rows is None else view[slice(*share.rows)]
        place, first = mine.ctypes.data, _first_byte(local, share)
        if view.flags.c_contiguous and not is_key and place == local.unsafe_buffer_pointer() + first:
            alias = (place, spec.dtype, mine.shape)
            return HostBytes(address=place, nbytes=spec.nbytes, keep=value, alias=alias, stable=True)
        own = np.ascontiguousarray(mine)
        return HostBytes(address=own.ctypes.data, nbytes=spec.nbytes, keep=own, stable=True)

    def sources(self, values: Sequence[Any]) -> Sequence[Any]:
        """Give what the device copies from: the local array of each, and which of its rows."""
        found = [(value, self._share(value)) for value in values]
        return [devices.Source(value.addressable_data(share.shard), share.rows) for value, share in found]

    def build(self, spec: LeafSpec, data: memoryview) -> Any:
        """Give the array over `data`, uncommitted, on the CPU backend; NumPy's array where the program has none."""
        return arrays.build(spec, data)

    def like(self, value: object) -> LeafSpec | None:
        """Give what an array or a jax.ShapeDtypeStruct asks for: all of it; `boxes` says what of it is needed here."""
        if not isinstance(value, (jax.Array, jax.ShapeDtypeStruct)):
            return None
        return arrays.spec_of(value)

    def convert(self, value: Any, like: Any) -> Any:
        """Give the leaf where `like` lies, with its dtype; on the default device for one that says nothing."""
        return placing.convert(value, like)

    def boxes(self, like: Any) -> Sequence[Box] | None:
        """Give the boxes that the devices of this process hold of a leaf over several devices."""
        return placing.boxes(like)

    def join(self, values: Sequence[Any], like: Any) -> Any:
        """Give an array over several devices."""
        return placing.join(values, like)

    def casts(self, spec: LeafSpec, like: Any) -> bool:
        """Tell whether it is no key, nor complex where `like` is real."""
        return placing.casts(spec, like)

    def placement(self, like: Any) -> Hashable | None:
        """Give sharding, dtype and weak type."""
        return placing.placement(like)

    def holds_number(self, spec: LeafSpec, number: bool | int | float | complex) -> bool:
        """Tell whether an array without axes may stand for it: what a jitted step makes of a Python number."""
        return not spec.shape and arrays.holds(spec.dtype, number)

    def assignable(self, target: Any) -> bool:
        """Never: arrays of jax do not change."""
        return False

    def common_dtype(self, spec: LeafSpec) -> str | None:
        """Give the dtype's name; of keys that of their data."""
        return str(spec.extra["bits"]) if "impl" in spec.extra else spec.dtype

    def adopt(self, spec: LeafSpec, dtype: str) -> LeafSpec | None:
        """Give the spec of another kind's leaf; None for a dtype that jax does not have."""
        return super().adopt(spec, dtype) if dtype in arrays.DTYPES else None

    def _described(self, value: Any) -> tuple[Share, LeafSpec]:
        arrays.assert_storable(value)
        spec, share = arrays.spec_of(value), self._share(value)
        if share.shard == NOWHERE and not value.shape:
            raise arrays.refused(
                value, "it has no axes, and lies on devices of other processes only; leave it out here"
            )
        if share.box is None:
            return share, spec
        itemsize = spec.nbytes // max(1, _elements(spec.shape))
        box = _with_axes(share.box, spec.shape)
        return share, replace(spec, nbytes=box.elements * itemsize, box=box)

    def _on_device(self, value: Any, share: Share, spec: LeafSpec) -> DeviceBytes:
        local = value.addressable_data(share.shard)
        try:
            place = self.addresses([value])[0]
        except RuntimeError:  # not every backend tells addresses; then no two leaves are known to be tied
            alias = None
        else:
            alias = (int(place), spec.dtype, spec.local_shape)
        source = devices.Source(local, share.rows)
        return DeviceBytes(device=devices.device_of(local), source=source, nbytes=spec.nbytes, alias=alias)

    def _share(self, value: Any) -> Share:
        return _shares(value)[self._number]

    def _locals(self, values: Sequence[Any]) -> Sequence[Any]:
        if are_single(values):
            return values
        return [value.addressable_data(self._share(value).shard) for value in values]

    def _starts(self, values: Sequence[Any], local: Sequence[Any], addresses: Sequence[int]) -> Sequence[int]:
        """Give where the stored rows of each begin, whose local arrays lie at these addresses."""
        if local is values:
            return addresses
        firsts = [_first_byte(one, self._share(value)) for value, one in zip(values, local, strict=True)]
        return addresses + np.array(firsts, np.uint64)  # type: ignore[return-value]


class _Fingerprint:
    """What tells two rows of arrays apart, but for addresses. Keeps none of them alive.

    What follows from dtypes and shardings alone is found once: `is_on_host` = all lie in host memory;
    `by_capsule` = what `holding.unnamed` gives.
    """

    def __init__(self, values: Sequence[Any]) -> None:
        self._told, self._where = list(map(_avals, values)), list(map(_shardings, values))
        self.is_on_host = all(map(is_on_host, different(self._where)))
        self.by_capsule = holding.unnamed(aval.dtype for aval in self._told)

    def fits(self, values: Sequence[Any]) -> bool:
        told, where = list(map(_avals, values)), list(map(_shardings, values))
        same = all(map(operator.is_, told, self._told)) and all(map(operator.is_, where, self._where))
        if not same:
            if told != self._told or where != self._where:
                return False
            self._told, self._where = told, where  # the same step's results are described by the same objects
        return True


def _shares(value: Any) -> tuple[Share, ...]:
    return shares(value.sharding, tuple(value.shape))


def _elements(shape: tuple[int, ...]) -> int:
    return int(np.prod(shape, dtype=np.int64))


def _pointers(values: Sequence[Any]) -> Sequence[int]:
    return np.fromiter(map(_pointer, values), np.uint64, len(values))  # type: ignore[return-value]


def _first_byte(local: Any, share: Share) -> int:
    """Give where what is stored of a local array begins in it; rows are of arrays that have elements."""
    return share.rows[0] * (local.nbytes // local.shape[0]) if share.rows else 0


def _with_axes(box: Box, shape: tuple[int, ...]) -> Box:
    """Give a box of keys as one of their data, which have more axes."""
    rest = shape[len(box.sizes) :]
    return Box(box.offsets + (0,) * len(rest), box.sizes + rest)
