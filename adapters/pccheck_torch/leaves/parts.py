"""Leaves stored as several dense tensors one after the other: sparse tensors, registered classes, generators.

Imports torch and pccheck.leaves. A spec's "parts" name each, with dtype, shape and place, so that readers without torch
give a dict of arrays.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pccheck.errors import FormatError, UnsupportedLeafError, UsageError
from pccheck.leaves import HostBytes, LeafSpec
from pccheck_torch.leaves import dense, registering

GENERATOR = "torch.Generator"
_ALIGN = 64
_MAX_PARTS = 1024
_LAYOUTS: dict[torch.layout, tuple[str, tuple[str, ...]]] = {
    torch.sparse_coo: ("sparse_coo", ("_indices", "_values")),
    torch.sparse_csr: ("sparse_csr", ("crow_indices", "col_indices", "values")),
    torch.sparse_bsr: ("sparse_bsr", ("crow_indices", "col_indices", "values")),
    torch.sparse_csc: ("sparse_csc", ("ccol_indices", "row_indices", "values")),
    torch.sparse_bsc: ("sparse_bsc", ("ccol_indices", "row_indices", "values")),
}
_BY_NAME = {name: (layout, methods) for layout, (name, methods) in _LAYOUTS.items()}


@dataclass(frozen=True)
class _Taken:
    """A leaf taken apart: dense tensors by name, and what else the spec says."""

    parts: dict[str, Tensor]
    dtype: str
    shape: tuple[int, ...]
    extra: dict[str, Any]


def has_parts(value: object) -> bool:
    """Tell whether it is a leaf that is stored by parts."""
    if type(value) in dense.TENSORS:
        return value.layout in _LAYOUTS and value.device.type != "meta"  # type: ignore[attr-defined]
    return isinstance(value, torch.Generator) or registering.of_class(type(value)) is not None


def is_of_parts(spec: LeafSpec) -> bool:
    """Tell whether a spec is of such a leaf."""
    return "parts" in spec.extra


def describe(value: Any) -> LeafSpec:
    """Give the spec; UnsupportedLeafError where a part cannot be stored, or a registered class says what it may not."""
    return _described(_take_apart(value))


def _described(taken: _Taken) -> LeafSpec:
    at = 0
    table: list[dict[str, Any]] = []
    for name, part in taken.parts.items():
        nbytes = part.numel() * part.element_size()
        dtype = dense.dtype_name(part.dtype)
        table.append({"name": name, "dtype": dtype, "shape": list(part.shape), "offset": at, "nbytes": nbytes})
        at = -(-(at + nbytes) // _ALIGN) * _ALIGN
    nbytes = max((row["offset"] + row["nbytes"] for row in table), default=0)
    extra = {**taken.extra, "parts": table}
    return LeafSpec(kind=dense.KIND, dtype=taken.dtype, shape=taken.shape, nbytes=nbytes, extra=extra)


def asked(value: Any) -> LeafSpec:
    """Give what such a leaf in `like` asks for: its form, dtype and shape, not the sizes of its parts."""
    registered = registering.of_class(type(value))
    if registered is not None:
        dtype, shape = registered.name, tuple(value.shape)
    elif isinstance(value, torch.Generator):
        dtype, shape = GENERATOR, ()
    else:
        dtype, shape = _sparse_dtype(value), tuple(value.shape)
    return LeafSpec(kind=dense.KIND, dtype=dtype, shape=shape, nbytes=0)


def address(value: object) -> int:
    """Give what is equal for the same leaf: its parts may be made anew whenever it is asked for them."""
    return id(value)


def host_bytes(value: Any) -> HostBytes:
    """Give a copy of all parts, each at a multiple of 64 bytes."""
    taken = _take_apart(value)
    spec = _described(taken)
    own = torch.zeros(spec.nbytes, dtype=torch.uint8, device="cpu")
    for part, row in zip(taken.parts.values(), spec.extra["parts"], strict=True):
        if row["nbytes"]:
            whole = dense.in_c_order_copy(part).view(-1).view(torch.uint8)
            own[row["offset"] : row["offset"] + row["nbytes"]].copy_(whole)
    return HostBytes(address=own.data_ptr(), nbytes=spec.nbytes, keep=own, alias=(address(value),), stable=True)


def _take_apart(value: Any) -> _Taken:
    if isinstance(value, torch.Generator):
        extra = {"class": GENERATOR, "device": str(value.device)}
        return _Taken({"state": value.get_state()}, GENERATOR, (), extra)
    registered = registering.of_class(type(value))
    if registered is not None:
        return _registered(value, registered)
    if value.is_quantized:
        dense.assert_dense(value)
    name, methods = _LAYOUTS[value.layout]
    plain = value.detach()
    extra = {"layout": name, **dense.gradient_of(value)}
    if value.layout is torch.sparse_coo:
        extra["coalesced"] = value.is_coalesced()
    parts = {m.lstrip("_"): getattr(plain, m)() for m in methods}
    return _Taken(parts, _sparse_dtype(value), tuple(value.shape), extra)


def _registered(value: Any, how: registering.Registered) -> _Taken:
    with torch.no_grad():
        parts, context = how.flatten(value)
    if not isinstance(parts, Mapping) or not all(type(n) is str and len(n) <= 200 for n in parts):
        raise dense.refused(value, "its flatten must give a dict of names and tensors")
    if len(parts) > _MAX_PARTS:
        raise dense.refused(value, f"its flatten gave {len(parts)} parts, more than {_MAX_PARTS}")
    for name, part in parts.items():
        if not dense.is_plain(part):
            reason = f"its part {name!r:.200} is a {dense.type_name(part)}, no dense tensor; flatten that, too"
            raise dense.refused(value, reason)
        dense.assert_dense(part)
    try:
        told = registering.encode(context)
    except UsageError as error:
        raise dense.refused(value, f"{error}; see pccheck_torch.register()") from None
    extra = {"class": how.name, "context": told, **dense.gradient_of(value)}
    if value.layout is torch.strided:
        extra["strides"] = list(value.stride())
    return _Taken(dict(parts), how.name, tuple(value.shape), extra)


def _sparse_dtype(value: Tensor) -> str:
    """Give layout and dtype as one word, by which leaves of other layouts or dtypes do not fit."""
    return f"{_LAYOUTS[value.layout][0]}[{dense.dtype_name(value.dtype)}]"


# -- making them again -----------------------------------------------------------------------------------------------


def build(spec: LeafSpec, data: memoryview) -> Any:
    """Give the leaf; FormatError where the parts do not make one, or its class is not registered here."""
    parts = _cut(spec, data)
    try:
        if spec.extra.get("layout") in _BY_NAME:
            made = _sparse(spec, parts)
        elif spec.extra.get("class") == GENERATOR:
            return _generator(spec, parts)
        else:
            made = _unflattened(spec, parts)
        return dense.with_gradient(made, spec.extra)
    except UnsupportedLeafError:
        raise
    except (RuntimeError, ValueError, TypeError, KeyError, IndexError, OverflowError, AttributeError) as error:
        raise FormatError(f"no {spec.dtype[:200]} of shape {spec.shape}: {error}") from error


def _cut(spec: LeafSpec, data: memoryview) -> dict[str, Tensor]:
    table = spec.extra["parts"]
    if not isinstance(table, list) or len(table) > _MAX_PARTS or data.nbytes != spec.nbytes:
        raise FormatError(f"{data.nbytes} bytes do not make a {spec.dtype[:200]}")
    parts = {}
    for row in table:
        if not isinstance(row, dict) or type(row.get("name")) is not str:
            raise FormatError("a part has no name")
        shape: Any = row.get("shape")
        at: Any = row.get("offset")
        n: Any = row.get("nbytes")
        legal = isinstance(shape, list) and all(type(k) is int and 0 <= k < 1 << 62 for k in (*shape, at, n))
        if not legal or at % _ALIGN or at + n > spec.nbytes:
            raise FormatError(f"part {row['name'][:200]!r} lies outside of its leaf")
        one = LeafSpec(kind=spec.kind, dtype=str(row.get("dtype")), shape=tuple(shape), nbytes=n)
        parts[row["name"]] = dense.build(one, data[at : at + n])
    return parts


def _sparse(spec: LeafSpec, parts: dict[str, Tensor]) -> Tensor:
    layout, methods = _BY_NAME[spec.extra["layout"]]
    components: Any = [parts[m.lstrip("_")] for m in methods]
    if any(c.dtype not in (torch.int64, torch.int32) for c in components[:-1]):
        raise FormatError("its indices are no whole numbers")
    # A file may say anything: torch checks each index, since its kernels trust them.
    if layout is torch.sparse_coo:
        indices, values = components
        made = torch.sparse_coo_tensor(indices, values, spec.shape, device=values.device, check_invariants=True)
        coalesced = spec.extra.get("coalesced") is True
        if coalesced and not _is_sorted(indices, spec.shape):
            raise FormatError("its indices are not in order, though it says that it is coalesced")
        made = made._coalesced_(coalesced)
    else:
        ends, indices, values = components
        about: Any = {"layout": layout, "device": values.device, "check_invariants": True}
        made = torch.sparse_compressed_tensor(ends, indices, values, spec.shape, **about)
    if _sparse_dtype(made) != spec.dtype:
        raise FormatError(f"its parts make a {_sparse_dtype(made)}")
    return made


def _is_sorted(indices: Tensor, shape: tuple[int, ...]) -> bool:
    """Tell whether the columns of indices are in order, no two alike."""
    later = torch.zeros(max(indices.shape[1] - 1, 0), dtype=torch.bool, device=indices.device)
    same = torch.ones_like(later)
    for row in indices:
        later |= same & (row[1:] > row[:-1])
        same &= row[1:] == row[:-1]
    return bool(later.all()) if shape else True


def _generator(spec: LeafSpec, parts: dict[str, Tensor]) -> torch.Generator:
    """Give a new generator with the stored state; UnsupportedLeafError where its device is not there."""
    device = str(spec.extra.get("device"))
    try:
        made = torch.Generator(device=device)
    except RuntimeError:
        raise UnsupportedLeafError("", GENERATOR, f"it is of device {device[:80]!r}, which is not there") from None
    if parts["state"].dim() != 1:
        raise FormatError(f"a state of shape {tuple(parts['state'].shape)} is no generator's")
    made.set_state(parts["state"].clone())
    return made


def _unflattened(spec: LeafSpec, parts: dict[str, Tensor]) -> Tensor:
    how = registering.of_name(spec.extra.get("class"))
    context = registering.decode(spec.extra.get("context"))
    strides = spec.extra.get("strides")
    if strides is None:
        strides = [math.prod(spec.shape[i + 1 :]) for i in range(len(spec.shape))]
    with torch.no_grad():
        made = how.unflatten(parts, context, spec.shape, tuple(strides))
    if type(made) is not how.cls or tuple(made.shape) != spec.shape:
        raise FormatError(f"its unflatten gave a {dense.type_name(made)}, not what was saved")
    assert isinstance(made, Tensor)
    return made
