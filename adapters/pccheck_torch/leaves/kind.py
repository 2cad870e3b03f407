"""PyTorch's tensors and what belongs to them as leaves of a checkpoint (imports torch, pccheck.leaves, pccheck.errors).

Each form of leaf has a room of its own: `dense` tensors, leaves of several `parts` (sparse tensors, registered classes,
generators), DTensors (`sharded`), and what has no bytes (`plain`). Here it is told which one a leaf belongs to.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Hashable, Sequence
from typing import Any, TypeGuard, final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import Parameter

from pccheck.leaves import DeviceBytes, HostBytes, LeafKind, LeafSpec
from pccheck_torch.devices.streams import OnDevice
from pccheck_torch.leaves import assigning, dense, parts, plain, sharded
from pccheck_torch.leaves.dense import DTYPES, QUANTIZED
from pccheck_torch.leaves.fingerprints import DenseFingerprint

__all__ = ["DTYPES", "QUANTIZED", "TorchKind"]

_SMALL = (torch.Size, torch.dtype, torch.device)
_data_ptr = Tensor.data_ptr


@final
class TorchKind(LeafKind):
    """Tensors, parameters, DTensors, sparse and meta tensors, registered subclasses, and torch's small types.

    Stateless, thread-safe.
    """

    name = dense.KIND

    def recognises(self, value: object) -> bool:
        """Tell whether it is a tensor (`describe` may still refuse it), a generator, or a torch.Size and the like."""
        return isinstance(value, (Tensor, torch.Generator, *_SMALL))

    def describe(self, value: Any) -> LeafSpec:
        """Give the spec; raises UnsupportedLeafError, which says why a tensor cannot be stored and what to do."""
        if dense.is_plain(value):
            return dense.describe(value)
        if sharded.is_dtensor_class(type(value)):
            return sharded.describe(value)
        if parts.has_parts(value):
            return parts.describe(value)
        if plain.is_meta(value):
            return plain.describe_meta(value)
        if _is_on_device(value):
            return dense.describe(value.__pccheck_memory__()[1])
        if isinstance(value, Tensor):
            raise dense.refused(value, _why_not(value))
        return plain.describe(value)

    def fingerprint(self, values: Sequence[Any]) -> object:
        """Give all that a plan depends on, of dense tensors and DTensors together, of others one by one."""
        return _Fingerprint(values)

    def unchanged(self, values: Sequence[Any], fingerprint: Any) -> bool:
        """Tell whether all of that is still so; may raise where it is not."""
        return bool(fingerprint.fits(values))

    def held_at(self, values: Sequence[Any], fingerprint: Any) -> tuple[object, Sequence[int]] | None:
        """Give where the first element of each leaf lies if all of that is still so, else None; nothing is held."""
        if not fingerprint.all_dense:
            return super().held_at(values, fingerprint)
        found = fingerprint.dense_addresses(values)
        return None if found is None else (None, _allocated(found))

    def addresses(self, values: Sequence[Any]) -> Sequence[int]:
        """Give where the first element of each leaf lies; raises for a tensor whose storage was freed."""
        if dense.TENSORS.issuperset(map(type, values)):
            try:
                found = np.fromiter(map(_data_ptr, values), np.uint64, len(values))
            except RuntimeError:  # a sparse tensor has no storage of its own
                found = np.fromiter(map(_address, values), np.uint64, len(values))
        else:
            found = _addresses(values)
        return _allocated(found)

    def divisible(self, spec: LeafSpec) -> bool:
        """Tell whether the bytes are the elements alone, in C order."""
        return not spec.extra.keys() & {"stride", "value", "parts"}

    def host_bytes(self, value: Any) -> HostBytes | DeviceBytes:
        """Give a dense tensor's own memory, in the host's or a device's; copies of all else, and of other devices."""
        if dense.is_plain(value):
            return dense.bytes_of(value)
        if sharded.is_dtensor_class(type(value)):
            return sharded.bytes_of(value)
        if parts.has_parts(value):
            return parts.host_bytes(value)
        if _is_on_device(value):
            return _device_bytes(value)
        return HostBytes(address=0, nbytes=0, keep=value, stable=True)

    def sources(self, values: Sequence[Any]) -> Sequence[Any]:
        """Give the tensor that a device copies from, of each leaf."""
        if dense.TENSORS.issuperset(map(type, values)):
            return values
        found = [None if sharded.is_dtensor_class(type(v)) else _memory(v) for v in values]
        rest = iter(sharded.memories([v for v, memory in zip(values, found, strict=True) if memory is None]))
        return [next(rest) if memory is None else memory for memory in found]

    def build(self, spec: LeafSpec, data: memoryview) -> Any:
        """Give the leaf over `data`; raises FormatError where the spec is impossible.

        Raises UnsupportedLeafError where a class is not registered here, or a generator's device not there.
        """
        if plain.is_small(spec):
            return plain.build(spec)
        if parts.is_of_parts(spec):
            return parts.build(spec, data)
        if "value" in spec.extra:
            return plain.build_meta(spec)
        return dense.build(spec, data)

    def like(self, value: object) -> LeafSpec | None:
        """Give what a leaf asks for: of a tensor dtype and shape, whatever its device, "meta" included."""
        if not self.recognises(value):
            return None
        if isinstance(value, _SMALL):
            return plain.describe(value)
        if parts.has_parts(value):
            return parts.asked(value)
        assert isinstance(value, Tensor)
        if sharded.is_dtensor_class(type(value)):
            return sharded.asked(value)
        on_device = _is_on_device(value)
        if not on_device and (type(value) not in dense.TENSORS or value.layout != torch.strided or value.is_nested):
            raise dense.refused(value, _why_not(value))
        return dense.spec_of(value, {})

    def convert(self, value: Any, like: Any) -> Any:
        """Give the leaf on the device of `like` and in its memory order, as what `like` is, with its requires_grad."""
        if sharded.is_dtensor_class(type(like)):
            return sharded.convert(_with_values(value, like), like)
        if _is_on_device(like):
            return like.__pccheck_restore__(_with_values(value, like).detach())
        if not isinstance(value, Tensor) or not dense.is_plain(like):
            return _other(value, like)
        moved = dense.placed(_with_values(value, like), like)
        return _with_gradient_of(moved, like, changed=moved is not value)

    def placement(self, like: Any) -> Hashable | None:
        """Give type, device, memory order and gradient of a tensor, and of a DTensor its mesh and placements."""
        if isinstance(like, _SMALL) or not isinstance(like, Tensor) or _is_on_device(like):
            return None
        told = (type(like), isinstance(like, Parameter), like.requires_grad and like.is_leaf)
        if sharded.is_dtensor_class(type(like)):
            return (*told, *sharded.placement(like))
        if like.layout is not torch.strided or like.is_nested:
            return (*told, like.device)
        return (*told, like.device, like.stride())

    def assign(self, target: Any, value: Any) -> None:
        """Copy a restored leaf into a live one in place; raises UnsupportedLeafError for what cannot be changed."""
        assigning.assign(target, value)

    def assignable(self, target: Any) -> bool:
        """Tell whether a live leaf has values of its own that can be changed in place."""
        return assigning.is_assignable(target)

    def common_dtype(self, spec: LeafSpec) -> str | None:
        """Give the dtype's name; None for leaves that are no plain array."""
        return None if spec.extra.keys() & {"value", "parts"} else spec.dtype


class _Fingerprint:
    """What tells two rows of leaves of the same types apart, but for addresses. Keeps none of them alive."""

    def __init__(self, values: Sequence[Any]) -> None:
        numbers = range(len(values))
        self._dense = [i for i in numbers if dense.is_plain(values[i])]
        self._sharded = [i for i in numbers if sharded.is_dtensor_class(type(values[i]))]
        taken = {*self._dense, *self._sharded}
        others = [i for i in numbers if i not in taken]
        self._others = {i: _told(values[i]) for i in others}
        self.all_dense = len(self._dense) == len(values)
        self._pick_dense, self._pick_sharded = _picker(self._dense), _picker(self._sharded)
        self._of_dense = DenseFingerprint(self._pick_dense(values))
        self._of_dtensors = sharded.Fingerprint(self._pick_sharded(values)) if self._sharded else None

    def dense_addresses(self, values: Sequence[Any]) -> NDArray[np.uint64] | None:
        return self._of_dense.addresses(values if self.all_dense else self._pick_dense(values))

    def fits(self, values: Sequence[Any]) -> bool:
        return (
            self.dense_addresses(values) is not None
            and (self._of_dtensors is None or self._of_dtensors.fits(self._pick_sharded(values)))
            and all(_told(values[i]) == told for i, told in self._others.items())
        )


def _picker(indices: Sequence[int]) -> Callable[[Sequence[Any]], Sequence[Any]]:
    if len(indices) > 1:
        return operator.itemgetter(*indices)
    return lambda values: [values[i] for i in indices]


def _told(value: Any) -> object:
    """Give what must be equal of a leaf that is neither a dense tensor nor a DTensor."""
    if isinstance(value, _SMALL):
        return str(value)
    if _is_on_device(value):
        device, memory = value.__pccheck_memory__()
        return device, memory.dtype, memory.size(), memory.stride(), dense.gradient_of(memory)
    if parts.has_parts(value):
        return parts.describe(value)
    return plain.describe_meta(value) if plain.is_meta(value) else object()


def _allocated(addresses: NDArray[np.uint64]) -> Sequence[int]:
    if not addresses.all():
        raise ValueError("the storage of a tensor was freed")
    return addresses  # type: ignore[return-value]


def _addresses(values: Sequence[Any]) -> NDArray[np.uint64]:
    """Give the addresses of leaves of any form: of DTensors at once, of others one by one."""
    found = np.zeros(len(values), np.uint64)
    dtensors = [i for i, v in enumerate(values) if sharded.is_dtensor_class(type(v))]
    found[dtensors] = sharded.addresses([values[i] for i in dtensors])
    for i in sorted(set(range(len(values))) - set(dtensors)):
        found[i] = _address(values[i])
    return found


def _address(value: Any) -> int:
    if parts.has_parts(value):
        return parts.address(value)
    return _memory(value).data_ptr()


def _memory(value: Any) -> Tensor:
    memory: Tensor = value.__pccheck_memory__()[1] if _is_on_device(value) else value
    return memory


def _is_on_device(value: object) -> TypeGuard[OnDevice]:
    return hasattr(type(value), "__pccheck_memory__")


def _device_bytes(value: Any) -> HostBytes | DeviceBytes:
    device, memory = value.__pccheck_memory__()
    found = dense.bytes_of(memory)
    if isinstance(found, DeviceBytes) or not found.nbytes:
        return found
    # A copy that the host made would be of some moment between what is queued: only dense memory is taken.
    if found.stable:
        raise dense.refused(value, "it is not dense; store a contiguous copy")
    return DeviceBytes(device=device, source=memory, nbytes=found.nbytes, alias=found.alias)


def _with_values(value: Any, like: object) -> Tensor:
    if not isinstance(value, Tensor) or value.device.type == "meta":
        raise dense.refused(like, "it was saved on device meta, without values")
    return value


def _other(value: Any, like: Any) -> Any:
    """Convert to or from leaves that have no strides: on "meta", sparse, registered, small."""
    if not isinstance(value, Tensor) or not isinstance(like, Tensor):
        return value
    if like.device.type == "meta":
        return _with_gradient_of(value, like, changed=False)
    moved = _with_values(value, like).to(like.device)
    return _with_gradient_of(moved, like, changed=moved is not value)


def _with_gradient_of(value: Tensor, like: Tensor, *, changed: bool) -> Tensor:
    wanted = like.requires_grad and like.is_leaf
    as_parameter = isinstance(like, Parameter)
    as_it_is = isinstance(value, Parameter) == as_parameter and value.requires_grad == wanted
    if as_it_is and (not changed or value.is_leaf):
        return value
    value = value.detach()
    return Parameter(value, requires_grad=wanted) if as_parameter else value.requires_grad_(wanted)


def _why_not(value: Tensor) -> str:
    """Tell why a tensor of no form that is stored is refused."""
    name = type(value).__name__  # a subclass may refuse any question that is put to the tensor itself
    if name == "NestedTensor":
        return "nested tensors are not stored; store .unbind() as a list"
    if name in ("UninitializedParameter", "UninitializedBuffer"):
        return "it has no shape yet; run one batch through its lazy module first"
    if name == "ShardedTensor":
        return "a ShardedTensor is stored by pccheck_torch.dcp only; store DTensors, or its shards as pccheck.Shard"
    if type(value) in dense.TENSORS:
        if value.is_quantized:
            return "quantized tensors are not stored (torch gives them up); store .int_repr(), scale and zero point"
        if value.layout == torch.jagged or value.is_nested:
            return "nested tensors are not stored; store .unbind() as a list"
        return f"layout {value.layout} on device {value.device} is not stored; store .to_dense() of it"
    return (
        "a subclass would come back as a plain tensor; pccheck_torch.register() says by what parts it is stored, "
        "or store those"
    )
