"""Proves on every save, within microseconds, that tensors are as they were planned (imports torch, pccheck.dlpack).

What DLPack tells of tensors (device, dtype, shape, strides, and where they lie) is asked of all of them in one native
call, which is also what finds tensors that have no strides; with it go the questions that are asked of every tensor, as
long as that is in the processor's cache. Where that call cannot be had, all is asked by `map` of C functions.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any, final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import Parameter

from pccheck import dlpack

_size, _data_ptr = Tensor.size, Tensor.data_ptr
_is_contiguous = Tensor.is_contiguous
_dtype, _device = operator.attrgetter("dtype"), operator.attrgetter("device")
_layout, _is_nested = operator.attrgetter("layout"), operator.attrgetter("is_nested")
_QUESTIONS: dict[str, Callable[[Tensor], bool]] = {
    "requires_grad": operator.attrgetter("requires_grad"),
    "is_neg": Tensor.is_neg,
}


def _storage(tensor: Tensor) -> int:
    """Give where torch keeps what it has of a tensor's memory, which tells its address."""
    return int(getattr(tensor.untyped_storage(), "_cdata", 0))


@final
class DenseFingerprint:
    """What tells two rows of strided tensors of the same types apart, but for addresses. Keeps none of them alive."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._memory = MemoryFingerprint(tensors, tuple(_QUESTIONS))
        # The rest is asked of few, so that what is rare costs nothing.
        self._complex = [i for i, t in enumerate(tensors) if t.is_complex()]
        # Of a parameter it is not stored whether it is a leaf of the graph.
        self._wanting = [i for i, t in enumerate(tensors) if t.requires_grad and not isinstance(t, Parameter)]
        self._rare = self._told_of_few(tensors)

    def _told_of_few(self, tensors: Sequence[Tensor]) -> list[Any]:
        return [[tensors[i].is_conj() for i in self._complex], [tensors[i].is_leaf for i in self._wanting]]

    def addresses(self, tensors: Sequence[Tensor]) -> NDArray[np.uint64] | None:
        """Give where the first element of each tensor lies if all of that is still so, else None.

        0 stands for a tensor without memory. Raises for tensors that are not strided.
        """
        found = self._memory.addresses(tensors)  # first: of what it refuses nothing else can be asked
        return None if found is None or self._told_of_few(tensors) != self._rare else found


@final
class MemoryFingerprint:
    """Device, dtype, shape and strides of strided tensors, and answers to some of _QUESTIONS. Keeps none alive."""

    def __init__(self, tensors: Sequence[Tensor], questions: tuple[str, ...] = ()) -> None:
        told = dlpack.described(Tensor, tensors, questions, _storage)
        self._told: dlpack.Description | _Words = told or _Words(tensors, questions)
        # Not asked of few alone: DLPack has one name for all integers of one byte, and none for what some stand for.
        asked = [i for i, t in enumerate(tensors) if t.element_size() == 1]
        self._bytes = asked, [tensors[i].dtype for i in asked]

    def addresses(self, tensors: Sequence[Tensor]) -> NDArray[np.uint64] | None:
        """Give where the first element of each tensor lies if all of that is still so, else None; raises as above."""
        found = self._told.addresses(tensors)
        asked, dtypes = self._bytes
        return None if found is None or [tensors[i].dtype for i in asked] != dtypes else found


@final
class _Words:
    """The same in torch's own words, asked tensor by tensor."""

    def __init__(self, tensors: Sequence[Tensor], questions: tuple[str, ...]) -> None:
        self._sizes, self._dtypes = list(map(_size, tensors)), list(map(_dtype, tensors))
        self._contiguous, self._devices = list(map(_is_contiguous, tensors)), list(map(_device, tensors))
        self._strided = [i for i, t in enumerate(tensors) if not t.is_contiguous()]
        self._strides = [tensors[i].stride() for i in self._strided]
        self._answers = {name: list(map(_QUESTIONS[name], tensors)) for name in questions}

    def addresses(self, tensors: Sequence[Tensor]) -> NDArray[np.uint64] | None:
        unchanged = (
            list(map(_layout, tensors)).count(torch.strided) == len(tensors)
            and not any(map(_is_nested, tensors))
            and not any(map(operator.ne, map(_size, tensors), self._sizes))
            and list(map(_dtype, tensors)) == self._dtypes
            and list(map(_device, tensors)) == self._devices
            and list(map(_is_contiguous, tensors)) == self._contiguous
            and [tensors[i].stride() for i in self._strided] == self._strides
            and all(list(map(_QUESTIONS[name], tensors)) == told for name, told in self._answers.items())
        )
        return np.fromiter(map(_data_ptr, tensors), np.uint64, len(tensors)) if unchanged else None
