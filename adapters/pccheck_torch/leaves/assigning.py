"""Copies restored leaves into live ones, in place (imports torch, this package)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from pccheck_torch.leaves import dense, parts, registering, sharded


def assign(target: Any, value: Any) -> None:
    """Copy a restored leaf into a live one of the same form, dtype and shape, whatever its device and strides.

    Raises UnsupportedLeafError (path "") for what cannot be changed in place, or does not fit after all.
    """
    if isinstance(target, torch.Generator) and isinstance(value, torch.Generator):
        target.set_state(value.get_state())
        return
    if not isinstance(target, Tensor) or not isinstance(value, Tensor):
        if type(target) is not type(value) or target != value:
            raise dense.refused(target, f"it cannot be changed to {value!r:.80} in place")
        return
    if target.dtype != value.dtype:
        raise dense.refused(target, f"a {value.dtype} was restored")
    with torch.inference_mode(target.is_inference()):
        try:
            _assign_tensor(target, value)
        except RuntimeError as error:  # an expanded tensor, say, which has several elements at one place
            raise dense.refused(target, f"it cannot be changed in place: {error}") from error


def is_assignable(target: Any) -> bool:
    """Tell whether a live leaf has values of its own, each at one place of memory that is still there."""
    if isinstance(target, torch.Generator):
        return True
    if not isinstance(target, Tensor):
        return False
    if sharded.is_dtensor_class(type(target)):
        return is_assignable(sharded.locals_of([target])[0])
    how = registering.of_class(type(target))
    if how is not None:
        with torch.no_grad():
            first, again = how.flatten(target)[0], how.flatten(target)[0]
        return all(_is_same_memory(first[n], again[n]) for n in first)
    memory = _memory(target)
    if memory.device.type == "meta" or parts.has_parts(memory):
        return memory.device.type != "meta"
    overlaps = any(stride == 0 and n > 1 for n, stride in zip(memory.shape, memory.stride(), strict=True))
    return not overlaps and (memory.numel() == 0 or memory.untyped_storage().nbytes() > 0)


def _is_same_memory(a: Tensor, b: Tensor) -> bool:
    return not a.numel() or a.data_ptr() == b.data_ptr()


def _assign_tensor(target: Any, value: Tensor) -> None:
    if sharded.is_dtensor_class(type(target)):
        sharded.assign(target, value)
        return
    if target.shape != value.shape:
        raise dense.refused(target, f"a tensor of shape {tuple(value.shape)} was restored")
    if registering.of_class(type(target)) is not None:
        _assign_parts(target, value)
    elif hasattr(type(target), "__pccheck_memory__"):
        device, memory = target.__pccheck_memory__()
        device.queues.current().copy([memory], [_memory(value)])
    elif target.device.type == "meta" or value.device.type == "meta":
        if target.device != value.device:
            raise dense.refused(
                target, f"on {target.device} it has no place for values, or those of {value.device} lack"
            )
    elif parts.has_parts(target):
        _assign_sparse(target, value)
    else:
        dense.copy_into(target, _memory(value))


def _memory(value: Any) -> Tensor:
    memory: Tensor = value.__pccheck_memory__()[1] if hasattr(type(value), "__pccheck_memory__") else value
    return memory.detach()


def _assign_sparse(target: Tensor, value: Tensor) -> None:
    if target.layout != value.layout:
        raise dense.refused(target, f"a tensor of layout {value.layout} was restored")
    with torch.no_grad():
        new = value.detach().to(target.device)
        if target.layout is torch.sparse_coo:  # not through detach(), whose number of elements is its own
            target.copy_(new)._coalesced_(value.is_coalesced())
        else:
            target.resize_as_sparse_(new).copy_(new)


def _assign_parts(target: Any, value: Any) -> None:
    """Copy part by part, where the class gives its own parts and no copies of them."""
    how = registering.of_class(type(target))
    if how is None or type(value) is not type(target):
        raise dense.refused(target, f"a {dense.type_name(value)} was restored")
    with torch.no_grad():
        (mine, about), (new, wanted) = how.flatten(target), how.flatten(value)
    facts = [[(n, p.dtype, p.shape) for n, p in found.items()] for found in (mine, new)]
    if facts[0] != facts[1] or registering.encode(about) != registering.encode(wanted):
        raise dense.refused(target, "what was restored has other parts, or another context")
    if not is_assignable(target):
        raise dense.refused(target, "its flatten gives copies, through which it cannot be changed")
    for name, part in mine.items():
        dense.copy_into(part, new[name])
