"""Dense tensors: what they are, where their bytes lie, and how they are made again (imports torch, pccheck.leaves)."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from pccheck.errors import FormatError, UnsupportedLeafError
from pccheck.leaves import DeviceBytes, HostBytes, LeafSpec, dense_strides, is_dense
from pccheck_torch.devices.cuda import cuda_device
from pccheck_torch.devices.streams import SAME_SIZE

KIND = "torch"
DTYPES = {str(d).removeprefix("torch."): d for d in vars(torch).values() if isinstance(d, torch.dtype)}
QUANTIZED = frozenset({"qint8", "quint8", "qint32", "quint4x2", "quint2x4"})
TENSORS = frozenset({Tensor, Parameter})


def is_plain(value: object) -> bool:
    """Tell whether it is a strided tensor with values, of no subclass: what `describe` may still refuse."""
    return (
        type(value) in TENSORS
        and value.layout is torch.strided  # type: ignore[attr-defined]
        and value.device.type != "meta"  # type: ignore[attr-defined]
    )


def describe(value: Tensor) -> LeafSpec:
    """Give the spec of a strided tensor; raises UnsupportedLeafError for one that has no whole memory of its own."""
    assert_dense(value)
    extra = gradient_of(value)
    if is_permuted(value):
        extra["stride"] = list(value.stride())
    return spec_of(value, extra)


def spec_of(value: Tensor, extra: dict[str, Any]) -> LeafSpec:
    """Give the spec that a tensor's dtype and shape make."""
    nbytes = value.numel() * value.element_size()
    return LeafSpec(kind=KIND, dtype=dtype_name(value.dtype), shape=tuple(value.shape), nbytes=nbytes, extra=extra)


def dtype_name(dtype: torch.dtype) -> str:
    """Give the name by which a dtype is stored, such as "float32"."""
    return str(dtype).removeprefix("torch.")


def gradient_of(value: Tensor) -> dict[str, Any]:
    """Give what is stored of a tensor being a Parameter, or a leaf that wants a gradient."""
    if isinstance(value, Parameter):
        return {"parameter": True, "requires_grad": value.requires_grad}
    return {"requires_grad": True} if value.requires_grad and value.is_leaf else {}


def with_gradient(value: Tensor, extra: dict[str, Any]) -> Tensor:
    """Undo `gradient_of`; a file's word is checked by torch, which raises RuntimeError."""
    wanted = extra.get("requires_grad") is True
    if extra.get("parameter") is True:
        return Parameter(value, requires_grad=wanted)
    return value.requires_grad_() if wanted else value


def assert_dense(value: Tensor) -> None:
    """Raise UnsupportedLeafError, which tells why a tensor cannot be stored, and what to do."""
    reason = _why_not(value)
    if reason:
        raise refused(value, reason)


def _why_not(value: Tensor) -> str:
    if value.is_nested:
        return "nested tensors are not stored; store .unbind() as a list"
    if value.is_quantized:
        return "quantized tensors are not stored (torch gives them up); store .int_repr(), scale and zero point"
    try:
        if value.numel() and value.device.type in ("cpu", "cuda") and not value.data_ptr():
            return "its storage was freed; save while the values are there"
    except RuntimeError:  # wrapped by a transform such as vmap
        return "it has no memory of its own; save outside of function transforms"
    end = value.storage_offset() + sum((n - 1) * s for n, s in zip(value.shape, value.stride(), strict=True)) + 1
    if value.numel() and end * value.element_size() > value.untyped_storage().nbytes():
        return "it reaches out of its storage, which was made smaller"
    return ""


def is_permuted(value: Tensor) -> bool:
    """Tell whether a tensor is dense with its axes in another order than C (channels_last, a transpose)."""
    if value.is_contiguous() or value.is_conj() or value.is_neg():
        return False
    return is_dense(value.shape, value.stride())


def type_name(value: object) -> str:
    """Give the name of a leaf's type, for messages."""
    cls = type(value)
    name = f"{cls.__module__}.{cls.__qualname__}"
    try:
        return f"{name} of {value.dtype}" if isinstance(value, Tensor) else name
    except Exception:  # a subclass may refuse any question
        return name


def refused(value: object, reason: str) -> UnsupportedLeafError:
    """Give the error that says why a leaf cannot be stored or changed."""
    return UnsupportedLeafError("", type_name(value), reason)


def bytes_of(value: Tensor, keep: object | None = None, *, c_order: bool = False) -> HostBytes | DeviceBytes:
    """Give a tensor's own memory where it is dense, else that of a copy in C order.

    Args:
        value: a tensor that `describe` accepts.
        keep: the leaf that the tensor is the memory of; None = itself.
        c_order: copy it, too, where it is dense in another order than C.
    """
    if not value.numel():
        return HostBytes(address=0, nbytes=0, keep=value, stable=True)
    nbytes, leaf = value.numel() * value.element_size(), value if keep is None else keep
    if not (value.is_cpu or value.is_cuda):  # a device that pccheck has no streams for: copied through torch, by value
        own = value.detach().cpu()
        own = in_c_order_copy(own) if c_order else in_memory_order(own)
        return HostBytes(address=own.data_ptr(), nbytes=nbytes, keep=own, stable=True)
    contiguous, lazy = value.is_contiguous(), (value.is_conj(), value.is_neg())
    alias = (value.data_ptr(), value.dtype, value.size(), None if contiguous else value.stride(), lazy)
    in_place = not any(lazy) and (contiguous or (not c_order and is_permuted(value)))
    own = value if in_place else in_c_order_copy(value)
    if value.is_cuda:
        device = cuda_device(value.device.index)
        return DeviceBytes(device=device, source=own, nbytes=nbytes, alias=alias, stable=not in_place)
    keep = leaf if in_place else own
    return HostBytes(address=own.data_ptr(), nbytes=nbytes, keep=keep, alias=alias, stable=not in_place)


def in_c_order_copy(value: Tensor) -> Tensor:
    """Give a copy in C order, on the same device, with nothing lazy about it."""
    whole = value.detach().resolve_conj().resolve_neg().view(SAME_SIZE[value.element_size()])
    return whole.clone(memory_format=torch.contiguous_format)


def in_memory_order(value: Tensor) -> Tensor:
    """Give a tensor whose memory is the stored bytes: itself where it is dense, else a copy in C order."""
    if value.is_conj() or value.is_neg() or not (value.is_contiguous() or is_permuted(value)):
        return in_c_order_copy(value)
    return value


def build(spec: LeafSpec, data: memoryview) -> Tensor:
    """Give the tensor over `data`; raises FormatError for a dtype that this torch does not have."""
    dtype = dtype_of(spec.dtype)
    shape = spec.local_shape
    if math.prod(shape) * dtype.itemsize != spec.nbytes or data.nbytes != spec.nbytes:
        raise FormatError(f"{data.nbytes} bytes do not make a tensor of shape {shape} and dtype {dtype}")
    strides = dense_strides(spec)
    try:
        if not spec.nbytes:
            tensor = torch.empty(shape, dtype=dtype, device="cpu")
        else:
            tensor = torch.frombuffer(data, dtype=dtype)
            tensor = tensor.view(shape) if strides is None else tensor.as_strided(shape, strides)
        return with_gradient(tensor, spec.extra)
    except (RuntimeError, ValueError, TypeError, OverflowError) as error:
        raise FormatError(f"no tensor of shape {shape} and dtype {dtype}: {error}") from None


def dtype_of(name: object) -> torch.dtype:
    """Give the dtype of this name; FormatError where this torch has none."""
    dtype = DTYPES.get(name) if isinstance(name, str) else None
    if dtype is None or name in QUANTIZED:
        raise FormatError(f"torch {torch.__version__} has no dense tensors of dtype {str(name)[:80]!r}")
    return dtype


def placed(value: Tensor, like: Tensor) -> Tensor:
    """Give a tensor's values on the device of another and with its strides, where these are dense."""
    device = value.device if like.device.type == "meta" else like.device
    if like.shape == value.shape and like.stride() != value.stride() and _has_order(like):
        made = torch.empty_strided(like.shape, like.stride(), dtype=value.dtype, device=device)
        copy_into(made, value)
        return made
    return value if device == value.device else value.to(device)


def _has_order(like: Tensor) -> bool:
    return like.numel() > 0 and is_dense(like.shape, like.stride())


def copy_into(target: Tensor, value: Tensor) -> None:
    """Copy values into a tensor of the same dtype and shape, whatever its strides, device and gradient."""
    same_size = SAME_SIZE[value.element_size()]
    with torch.no_grad():
        if target.is_conj() or target.is_neg():
            target.copy_(value)
        else:
            target.detach().view(same_size).copy_(value.detach().resolve_conj().resolve_neg().view(same_size))
