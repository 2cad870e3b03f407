"""Proves on every save, within microseconds, that tensors are as they were planned (imports torch).

The question is put to all tensors at once by the check that `torch.compile` makes before it runs compiled code: one
call compares type, dtype, device, layout, laziness, gradient, sizes and strides, six times as fast as one `map` for
each of these. It is no public name of torch, so it is tried out before it is used, and what it calls changed is asked
again in public words: it is sensitive to inference mode and autocast, and to the same tensor standing twice.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any, final

import torch
from torch import Tensor
from torch.nn import Parameter

Check = Callable[..., bool]

_size = Tensor.size
_is_contiguous, _is_neg = Tensor.is_contiguous, Tensor.is_neg
_dtype, _device = operator.attrgetter("dtype"), operator.attrgetter("device")
_layout, _is_nested = operator.attrgetter("layout"), operator.attrgetter("is_nested")
_requires_grad = operator.attrgetter("requires_grad")


@final
class DenseFingerprint:
    """What tells two rows of strided tensors of the same types apart, but for addresses. Keeps none of them alive."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._check = _checker(tensors)
        self._sizes, self._dtypes = list(map(_size, tensors)), list(map(_dtype, tensors))
        self._contiguous, self._gradient = list(map(_is_contiguous, tensors)), list(map(_requires_grad, tensors))
        self._negative, self._devices = list(map(_is_neg, tensors)), list(map(_device, tensors))
        # The rest is asked of few, so that what is rare costs nothing.
        self._strided = [i for i, t in enumerate(tensors) if not t.is_contiguous()]
        self._complex = [i for i, t in enumerate(tensors) if t.is_complex()]
        # Of a parameter it is not stored whether it is a leaf of the graph.
        self._wanting = [i for i, t in enumerate(tensors) if t.requires_grad and not isinstance(t, Parameter)]
        self._leaves, self._rare = self._are_leaves(tensors), self._told_of_few(tensors)

    def _are_leaves(self, tensors: Sequence[Tensor]) -> list[bool]:
        return [tensors[i].is_leaf for i in self._wanting]

    def _told_of_few(self, tensors: Sequence[Tensor]) -> list[Any]:
        return [[tensors[i].stride() for i in self._strided], [tensors[i].is_conj() for i in self._complex]]

    def fits(self, tensors: Sequence[Tensor]) -> bool:
        """Tell whether all of that is still so; raises for tensors that are not strided."""
        if self._check is not None and _are_strided(tensors) and self._check(*tensors):
            return self._are_leaves(tensors) == self._leaves
        if not self._asked_one_by_one(tensors):
            return False
        self._check = _checker(tensors)  # made in another mode of torch than the one that it is asked in now
        return True

    def _asked_one_by_one(self, tensors: Sequence[Tensor]) -> bool:
        return (
            _are_strided(tensors)
            and not any(map(operator.ne, map(_size, tensors), self._sizes))
            and list(map(_dtype, tensors)) == self._dtypes
            and list(map(_device, tensors)) == self._devices
            and list(map(_is_contiguous, tensors)) == self._contiguous
            and list(map(_requires_grad, tensors)) == self._gradient
            and list(map(_is_neg, tensors)) == self._negative
            and self._told_of_few(tensors) == self._rare
            and self._are_leaves(tensors) == self._leaves
        )


def _are_strided(tensors: Sequence[Tensor]) -> bool:
    """Tell whether all have strides: of others the C++ code of the check asks what ends the process (seen)."""
    return list(map(_layout, tensors)).count(torch.strided) == len(tensors) and not any(map(_is_nested, tensors))


def _checker(tensors: Sequence[Tensor]) -> Check | None:
    """Give torch's own check of these tensors; None where it is not to be trusted, or says no to them themselves."""
    if not tensors or not can_check_at_once() or not _are_strided(tensors):
        return None
    try:
        check = _check_of(*tensors)
        return check if check(*tensors) is True else None
    except (RuntimeError, TypeError):
        return None


def _check_of(*tensors: Tensor) -> Check:
    from torch._C._dynamo.guards import TensorGuards

    # Both keywords are needed: without any, the C++ code follows a null pointer.
    return TensorGuards(*tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None).check


@functools.cache
def can_check_at_once() -> bool:
    """Tell whether this torch has the check, and it notices each change that a plan depends on."""
    try:
        return all(_notices(*pair) for pair in _changes())
    except Exception:  # it is private: a torch that lacks it, or gives it other arguments, is asked in public words
        return False


def _notices(before: Tensor, after: Tensor) -> bool:
    return _check_of(before)(before) is True and _check_of(before)(after) is False


def _changes() -> list[tuple[Tensor, Tensor]]:
    with torch.inference_mode(False), torch.no_grad(), torch.device("cpu"):
        plain, z = torch.zeros(4, 6), torch.zeros(2, 3, dtype=torch.complex64)
        wide = torch.zeros(2, 3, 2, 2)
        return [
            (plain, plain.int()),
            (plain, plain.view(torch.int32)),
            (plain, plain.reshape(6, 4)),
            (plain, plain.reshape(24)),
            (plain, plain.reshape(4, 6, 1)),
            (plain, torch.zeros(6, 4).t()),
            (plain, torch.zeros(4, 12)[:, ::2]),
            (wide, wide.to(memory_format=torch.channels_last)),
            (plain, torch.zeros(4, 6).requires_grad_()),
            (plain, torch._neg_view(plain)),
            (plain, plain.to("meta")),
            (plain, torch.nn.Parameter(torch.zeros(4, 6), requires_grad=False)),
            (z, z.conj()),
        ]
