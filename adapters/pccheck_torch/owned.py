"""Whose memory is what: which optimizer's a tensor's bytes provably are (imports torch, pccheck's public names)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import Module, Parameter
from torch.optim import Optimizer

import pccheck
from pccheck.leaves import is_dense

NOBODY = -1
_PLAIN = frozenset({Tensor, Parameter})
_data_ptr, _numel, _element_size = Tensor.data_ptr, Tensor.numel, Tensor.element_size


@final
class Table:
    """Disjoint intervals of addresses, and who owns each.

    Args:
        owned: the tensors of each owner, dense.
        sets: the numbers of owners, and of several that share memory; those that are not there yet are added.
    """

    def __init__(self, owned: Sequence[Sequence[Tensor]], sets: dict[frozenset[int], int]) -> None:
        starts, ends = extents(list(chain.from_iterable(owned)))
        owner = np.repeat(np.arange(len(owned)), [len(tensors) for tensors in owned])
        order = np.argsort(starts, kind="stable")
        self._starts, self._ends, self._owner = starts[order], ends[order], owner[order]
        if (self._starts[1:] < self._ends[:-1]).any():
            self._split(sets)

    def _split(self, sets: dict[frozenset[int], int]) -> None:
        """Where owned tensors share memory: cut it at every border, each part is owned by all that have it."""
        borders = np.unique(np.concatenate([self._starts, self._ends]))
        parts: list[frozenset[int]] = [frozenset()] * len(borders)
        first, last = np.searchsorted(borders, self._starts), np.searchsorted(borders, self._ends)
        for owner, low, high in zip(self._owner.tolist(), first.tolist(), last.tolist(), strict=True):
            for n in range(low, high):
                parts[n] |= {owner}
        runs: list[tuple[int, int, frozenset[int]]] = []
        for n, part in enumerate(parts):
            if part and runs and runs[-1][2] == part and runs[-1][1] == borders[n]:
                runs[-1] = (runs[-1][0], int(borders[n + 1]), part)
            elif part:
                runs.append((int(borders[n]), int(borders[n + 1]), part))
        for _, _, part in runs:
            sets.setdefault(part, len(sets))
        self._starts = np.array([r[0] for r in runs], np.uint64)
        self._ends = np.array([r[1] for r in runs], np.uint64)
        self._owner = np.array([sets[r[2]] for r in runs], np.int64)

    def owners(self, starts: NDArray[np.uint64], ends: NDArray[np.uint64]) -> NDArray[np.int64]:
        """Give the owner of each run of addresses that lies within one interval, NOBODY for the others."""
        if not len(self._starts):
            return np.full(len(starts), NOBODY, np.int64)
        at = np.searchsorted(self._starts, starts, side="right") - 1
        inside = (at >= 0) & (ends <= self._ends[at])
        return np.where(inside, self._owner[at], NOBODY)


def tensors_of(optimizer: Optimizer) -> Iterator[Tensor]:
    """Give the tensors that only a step of this optimizer changes: parameters, and state at any depth.

    Not what else is in its groups: a learning rate is changed by schedulers and by users.
    """
    for group in optimizer.param_groups:
        yield from group["params"]
    for state in optimizer.state.values():
        yield from tensors_in(state)


def tensors_in(value: object) -> Iterator[Tensor]:
    """Give the tensors in a module, or in any nesting of mappings, lists and tuples."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Module):
        yield from value.parameters()
        yield from value.buffers()
    elif isinstance(value, Mapping):
        for part in value.values():
            yield from tensors_in(part)
    elif isinstance(value, (list, tuple)):
        for part in value:
            yield from tensors_in(part)


def provable(tensors: Iterable[Tensor]) -> list[Tensor]:
    """Give the memory of those whose extent is known: of more than one element, dense, each once."""
    found = {id(t): t for t in map(local, tensors) if t is not None and t.numel() > 1}
    return [t for t in found.values() if t.is_contiguous() or is_dense(t.shape, t.stride())]


def local(value: object) -> Tensor | None:
    """Give the tensor that has the memory of a leaf: itself, or the part of a DTensor or Shard that is here."""
    if isinstance(value, pccheck.Shard):
        value = value.array
    if type(value) not in _PLAIN:
        value = getattr(value, "_local_tensor", None)
        if type(value) not in _PLAIN:
            return None
    assert isinstance(value, Tensor)
    if value.layout is not torch.strided or value.device.type == "meta":
        return None
    return value


def extents(tensors: Sequence[Tensor]) -> tuple[NDArray[np.uint64], NDArray[np.uint64]]:
    """Give where the memory of each tensor begins and ends."""
    n = len(tensors)
    starts = np.fromiter(map(_data_ptr, tensors), np.uint64, n)
    sizes = np.fromiter(map(_numel, tensors), np.uint64, n) * np.fromiter(map(_element_size, tensors), np.uint64, n)
    return starts, starts + sizes
