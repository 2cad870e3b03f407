"""Dense CPU tensors as leaves of a checkpoint (imports torch, pccheck.leaves, pccheck.errors)."""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from itertools import compress
from typing import Any, final

import numpy as np
import torch
from torch import Tensor
from torch.nn import Parameter

from pccheck.errors import FormatError, UnsupportedLeafError
from pccheck.leaves import HostBytes, LeafKind, LeafSpec, dense_strides, is_dense

DTYPES = {str(d).removeprefix("torch."): d for d in vars(torch).values() if isinstance(d, torch.dtype)}
QUANTIZED = frozenset({"qint8", "quint8", "qint32", "quint4x2", "quint2x4"})
# Copies are made by elements of the same size that every kernel knows: not all dtypes can be copied as themselves.
_SAME_SIZE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}
_TENSORS = frozenset({Tensor, Parameter})

_data_ptr, _size = Tensor.data_ptr, Tensor.size
_is_contiguous, _is_neg = Tensor.is_contiguous, Tensor.is_neg
_dtype, _is_cpu = operator.attrgetter("dtype"), operator.attrgetter("is_cpu")
_requires_grad, _is_leaf = operator.attrgetter("requires_grad"), operator.attrgetter("is_leaf")


@final
class TorchKind(LeafKind):
    """`torch.Tensor` and `torch.nn.Parameter` (exactly), dense, on the CPU; also torch.Size, dtype and device.

    Stateless, thread-safe.
    """

    name = "torch"

    def recognises(self, value: object) -> bool:
        """Tell whether it is a tensor, subclasses included (which `describe` refuses), or a torch.Size and the like."""
        return isinstance(value, (Tensor, torch.Size, torch.dtype, torch.device))

    def describe(self, value: Any) -> LeafSpec:
        """Give the spec; raises UnsupportedLeafError for tensors that are not dense, not on the CPU, or subclasses."""
        if not isinstance(value, Tensor):
            return _describe_plain(value)
        reason = _why_not(value)
        if reason:
            raise UnsupportedLeafError("", _type_name(value), reason)
        extra: dict[str, Any] = {}
        if type(value) is Parameter:
            extra = {"parameter": True, "requires_grad": value.requires_grad}
        elif value.requires_grad and value.is_leaf:
            extra = {"requires_grad": True}
        if _is_permuted(value):
            extra["stride"] = list(value.stride())
        return _spec(value, extra)

    def fingerprint(self, values: Sequence[Any]) -> object:
        """Give size, dtype, strides, laziness and gradient of all tensors, and what is plain."""
        return _Fingerprint(values)

    def unchanged(self, values: Sequence[Any], fingerprint: Any) -> bool:
        """Tell whether all of that is still so; raises for tensors that are not strided."""
        return bool(fingerprint.fits(values))

    def addresses(self, values: Sequence[Any]) -> Sequence[int]:
        """Give where the first element of each tensor lies; raises for one whose storage was freed."""
        found = np.fromiter(map(_data_ptr, values), np.uint64, len(values))
        if not found.all():
            raise ValueError("the storage of a tensor was freed")
        return found  # type: ignore[return-value]

    def host_bytes(self, value: Any) -> HostBytes:
        """Give a tensor's own memory where it is dense, else that of a copy in C order."""
        if not isinstance(value, Tensor) or not value.numel():
            return HostBytes(address=0, nbytes=0, keep=value, stable=True)
        nbytes = value.numel() * value.element_size()
        in_c_order, lazy = value.is_contiguous(), (value.is_conj(), value.is_neg())
        strides = None if in_c_order else value.stride()
        alias = (value.data_ptr(), value.dtype, value.size(), strides, lazy)
        if not any(lazy) and (in_c_order or _is_permuted(value)):
            return HostBytes(address=value.data_ptr(), nbytes=nbytes, keep=value, alias=alias)
        own = value.detach().resolve_conj().resolve_neg().view(_SAME_SIZE[value.element_size()])
        own = own.clone(memory_format=torch.contiguous_format)
        return HostBytes(address=own.data_ptr(), nbytes=nbytes, keep=own, alias=alias, stable=True)

    def build(self, spec: LeafSpec, data: memoryview) -> Any:
        """Give the tensor over `data`; raises FormatError for a dtype that this torch does not have."""
        if spec.dtype in _PLAIN:
            return _build_plain(spec)
        dtype = DTYPES.get(spec.dtype)
        if dtype is None or spec.dtype in QUANTIZED:
            raise FormatError(f"torch {torch.__version__} has no dense tensors of dtype {spec.dtype[:80]!r}")
        if math.prod(spec.shape) * dtype.itemsize != spec.nbytes or data.nbytes != spec.nbytes:
            raise FormatError(f"{data.nbytes} bytes do not make a tensor of shape {spec.shape} and dtype {dtype}")
        strides = dense_strides(spec)
        try:
            if not spec.nbytes:
                tensor = torch.empty(spec.shape, dtype=dtype)
            else:
                tensor = torch.frombuffer(data, dtype=dtype)
                tensor = tensor.view(spec.shape) if strides is None else tensor.as_strided(spec.shape, strides)
            gradient = spec.extra.get("requires_grad") is True
            if spec.extra.get("parameter") is True:
                return Parameter(tensor, requires_grad=gradient)
            return tensor.requires_grad_() if gradient else tensor
        except (RuntimeError, ValueError, TypeError, OverflowError) as error:
            raise FormatError(f"no tensor of shape {spec.shape} and dtype {dtype}: {error}") from None

    def like(self, value: object) -> LeafSpec | None:
        """Give what a tensor asks for, on whatever device it is, "meta" included."""
        if not isinstance(value, Tensor):
            return _describe_plain(value) if self.recognises(value) else None
        if type(value) not in _TENSORS or value.layout != torch.strided or value.is_nested:
            reason = "only dense tensors and parameters can be restored into, no subclasses"
            raise UnsupportedLeafError("", _type_name(value), reason)
        return _spec(value, {})

    def convert(self, value: Any, like: Any) -> Any:
        """Give the tensor on the device of `like`, as a Parameter where that is one, with its requires_grad."""
        if not isinstance(value, Tensor):
            return value
        if like.device.type != "meta":
            value = value.to(like.device)
        gradient = like.requires_grad and like.is_leaf
        if type(value) is type(like) and value.requires_grad == gradient:
            return value
        if type(like) is Parameter:
            return Parameter(value.detach(), requires_grad=gradient)
        return value.detach().requires_grad_(gradient)


class _Fingerprint:
    """What tells two rows of leaves of the same types apart, but for addresses: six questions to each tensor."""

    def __init__(self, values: Sequence[Any]) -> None:
        self.plain = {i: str(v) for i, v in enumerate(values) if not isinstance(v, Tensor)}
        self.tensors = [i for i, v in enumerate(values) if isinstance(v, Tensor)]
        tensors = [values[i] for i in self.tensors]
        self.sizes, self.dtypes = list(map(_size, tensors)), list(map(_dtype, tensors))
        self.contiguous, self.gradient = list(map(_is_contiguous, tensors)), list(map(_requires_grad, tensors))
        self.negative = list(map(_is_neg, tensors))
        # The rest is asked of few, so that what is rare costs nothing.
        self.strided = [i for i, t in enumerate(tensors) if not t.is_contiguous()]
        self.complex = [i for i, t in enumerate(tensors) if t.is_complex()]
        self.rare = self._rare(tensors)

    def _rare(self, tensors: Sequence[Tensor]) -> list[Any]:
        return [
            [tensors[i].stride() for i in self.strided],
            [tensors[i].is_conj() for i in self.complex],
            list(map(_is_leaf, compress(tensors, self.gradient))),
        ]

    def fits(self, values: Sequence[Any]) -> bool:
        tensors = [values[i] for i in self.tensors] if self.plain else values
        return (
            not any(map(operator.ne, map(_size, tensors), self.sizes))
            and list(map(_dtype, tensors)) == self.dtypes
            and all(map(_is_cpu, tensors))
            and list(map(_is_contiguous, tensors)) == self.contiguous
            and list(map(_requires_grad, tensors)) == self.gradient
            and list(map(_is_neg, tensors)) == self.negative
            and self._rare(tensors) == self.rare
            and all(str(values[i]) == told for i, told in self.plain.items())
        )


def _spec(value: Tensor, extra: dict[str, Any]) -> LeafSpec:
    nbytes = value.numel() * value.element_size()
    dtype = str(value.dtype).removeprefix("torch.")
    return LeafSpec(kind=TorchKind.name, dtype=dtype, shape=tuple(value.shape), nbytes=nbytes, extra=extra)


def _why_not(value: Tensor) -> str:
    """Tell why a tensor cannot be stored, and what to do; "" if it can."""
    if type(value) not in _TENSORS:
        return "a subclass would come back as a plain tensor; store its parts (DTensor: .to_local() or .full_tensor())"
    if value.is_nested:
        return "nested tensors are not stored; store .unbind() as a list"
    if value.is_quantized:
        return "quantized tensors are not stored (torch gives them up); store .int_repr(), scale and zero point"
    if value.layout != torch.strided:
        return f"layout {value.layout} is not stored; store .to_dense(), or its indices and values"
    if value.device.type == "meta":
        return "it is on device meta and has no values; leave it out"
    if not value.is_cpu:
        return f"it is on {value.device}; store .cpu() of it"
    try:
        if value.numel() and not value.data_ptr():
            return "its storage was freed; save while the values are there"
    except RuntimeError:  # wrapped by a transform such as vmap
        return "it has no memory of its own; save outside of function transforms"
    end = value.storage_offset() + sum((n - 1) * s for n, s in zip(value.shape, value.stride(), strict=True)) + 1
    if value.numel() and end * value.element_size() > value.untyped_storage().nbytes():
        return "it reaches out of its storage, which was made smaller"
    return ""


def _is_permuted(value: Tensor) -> bool:
    """Tell whether a tensor is dense with its axes in another order than C (channels_last, a transpose)."""
    if value.is_contiguous() or value.is_conj() or value.is_neg():
        return False
    return is_dense(value.shape, value.stride())


def _type_name(value: object) -> str:
    cls = type(value)
    return f"{cls.__module__}.{cls.__qualname__}" + (f" of {value.dtype}" if isinstance(value, Tensor) else "")


# -- what is no tensor: stored in the manifest -----------------------------------------------------------------------

_PLAIN = {"torch.Size": torch.Size, "torch.dtype": torch.dtype, "torch.device": torch.device}


def _describe_plain(value: Any) -> LeafSpec:
    name = next((n for n, cls in _PLAIN.items() if type(value) is cls), None)
    if name is None:
        raise UnsupportedLeafError("", _type_name(value), "subclasses are not stored")
    told = list(value) if name == "torch.Size" else str(value)
    return LeafSpec(kind=TorchKind.name, dtype=name, shape=(), nbytes=0, extra={"value": told})


def _build_plain(spec: LeafSpec) -> Any:
    told = spec.extra.get("value")
    if spec.dtype == "torch.Size" and isinstance(told, list) and all(type(n) is int and 0 <= n < 1 << 63 for n in told):
        return torch.Size(told)
    if spec.dtype == "torch.dtype" and isinstance(told, str) and told.removeprefix("torch.") in DTYPES:
        return DTYPES[told.removeprefix("torch.")]
    if spec.dtype == "torch.device" and isinstance(told, str):
        try:
            return torch.device(told)
        except RuntimeError:
            pass
    raise FormatError(f"{told!r:.80} is no {spec.dtype}")
