"""What torch has besides tensors with values: Size, dtype, device, tensors on "meta" (imports torch, pccheck.leaves).

They have no bytes: all of them is in the manifest, as "value", which readers without torch get as plain Python.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from pccheck.errors import FormatError
from pccheck.leaves import LeafSpec, is_dense
from pccheck_torch.leaves import dense

_CLASSES = {"torch.Size": torch.Size, "torch.dtype": torch.dtype, "torch.device": torch.device}


def describe(value: Any) -> LeafSpec:
    """Give the spec of a Size, dtype or device; UnsupportedLeafError for subclasses."""
    name = next((n for n, cls in _CLASSES.items() if type(value) is cls), None)
    if name is None:
        raise dense.refused(value, "subclasses are not stored")
    told = list(value) if name == "torch.Size" else str(value)
    return LeafSpec(kind=dense.KIND, dtype=name, shape=(), nbytes=0, extra={"value": told})


def is_small(spec: LeafSpec) -> bool:
    """Tell whether a spec is of a Size, dtype or device."""
    return spec.dtype in _CLASSES


def build(spec: LeafSpec) -> Any:
    """Give the Size, dtype or device; FormatError where the file says what cannot be."""
    told = spec.extra.get("value")
    if spec.dtype == "torch.Size" and isinstance(told, list) and all(type(n) is int and 0 <= n < 1 << 63 for n in told):
        return torch.Size(told)
    if spec.dtype == "torch.dtype" and isinstance(told, str) and told.removeprefix("torch.") in dense.DTYPES:
        return dense.DTYPES[told.removeprefix("torch.")]
    if spec.dtype == "torch.device" and isinstance(told, str):
        try:
            return torch.device(told)
        except RuntimeError:
            pass
    raise FormatError(f"{told!r:.80} is no {spec.dtype}")


def is_meta(value: object) -> bool:
    """Tell whether it is a strided tensor without values."""
    return (
        type(value) in dense.TENSORS
        and value.device.type == "meta"  # type: ignore[attr-defined]
        and value.layout is torch.strided  # type: ignore[attr-defined]
    )


def describe_meta(value: Tensor) -> LeafSpec:
    """Give the spec of a tensor on "meta": dtype and shape, no bytes."""
    if value.is_quantized or value.is_nested:
        raise dense.refused(value, "quantized and nested tensors are not stored")
    dtype, shape = dense.dtype_name(value.dtype), tuple(value.shape)
    extra = {**dense.gradient_of(value), "value": {"device": "meta", "dtype": dtype, "shape": list(shape)}}
    if not value.is_contiguous() and is_dense(shape, value.stride()):
        extra["order"] = list(value.stride())
    return LeafSpec(kind=dense.KIND, dtype=dtype, shape=shape, nbytes=0, extra=extra)


def build_meta(spec: LeafSpec) -> Tensor:
    """Give the tensor on "meta"; FormatError where the file says what cannot be."""
    dtype, strides = dense.dtype_of(spec.dtype), spec.extra.get("order")
    try:
        if strides is None:
            made = torch.empty(spec.shape, dtype=dtype, device="meta")
        else:
            made = torch.empty_strided(spec.shape, strides, dtype=dtype, device="meta")
        return dense.with_gradient(made, spec.extra)
    except (RuntimeError, TypeError, ValueError, OverflowError) as error:
        raise FormatError(f"no tensor of shape {spec.shape} and dtype {dtype}: {error}") from None
