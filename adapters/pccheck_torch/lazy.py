"""Lazy capture under a training loop: optimizers wait for captures of their tensors (imports torch, pccheck's public).

`save()` returns at once, and the copying goes on during the next forward and backward pass, which change no parameter
and no moment. What does change is copied by value within `save()`: everything that no attached optimizer owns.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from types import TracebackType
from typing import Any, Self, final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import Module, Parameter
from torch.optim import Optimizer

import pccheck
from pccheck.errors import ClosedError, ForkedError, UsageError
from pccheck.leaves import is_dense

NOBODY = -1
_PLAIN = frozenset({Tensor, Parameter})
_data_ptr, _numel, _element_size = Tensor.data_ptr, Tensor.numel, Tensor.element_size


def attach(
    ck: pccheck.Checkpointer,
    *optimizers: Optimizer,
    constant: Iterable[Tensor | Module] = (),
    debug: bool = False,
) -> Attachment:
    """Have a Checkpointer capture lazily: `save()` returns at once, `optimizer.step()` waits for what it will change.

    The parameters and the state of the optimizers (tensors of more than one element) are captured while training goes
    on, until the step of their optimizer, which waits for the rest of *its* tensors. Everything else (buffers, `step`
    counters, EMA, what no optimizer has) is copied within `save()`. A Checkpointer of snapshot="copy", the default,
    becomes lazy by this; with "auto", lazy is one of the modes that compete.

    The step hook does not run where torch leaves it out: under `torch.compile(..., fullgraph=True)` (which refuses it),
    at the replay of a CUDA graph, and in wrappers that are no `torch.optim.Optimizer`. There, and before anything but
    a step changes parameters or moments in place (`model.load_state_dict`, weight surgery), call `ck.fence()`. Before a
    CUDA graph is captured call `ck.wait()`: a graph can wait for no event from outside.

    Args:
        ck: the Checkpointer; one attachment at a time.
        optimizers: all that change what is saved; what others change is copied within `save()`, as if it had none.
        constant: tensors, and modules with all their parameters and buffers, that nobody changes: captured lazily and
            never waited for.
        debug: digest what is captured lazily at `save()` and again at the gate, and name what changed in between, as
            `debug_captures=True` does.

    Raises:
        UsageError: no optimizer, one twice, one of another type, a `constant` tensor that an optimizer has; a
            Checkpointer of snapshot="device", or one that has an attachment.
    """
    return Attachment(ck, optimizers, tuple(constant), debug)


@final
class Attachment:
    """Optimizers that wait for a Checkpointer's captures; made by `attach`. Thread-safe.

    As a context manager it detaches at the end of its block. It is the Checkpointer's `Guard`: owners 0, 1, ... are the
    optimizers, the next is "constant", and further ones stand for several that have the same memory.
    """

    def __init__(
        self,
        ck: pccheck.Checkpointer,
        optimizers: Sequence[Optimizer],
        constant: Sequence[Tensor | Module],
        debug: bool,
    ) -> None:
        _check(optimizers, constant)
        self._ck, self._optimizers, self._constant = ck, tuple(optimizers), tuple(constant)
        self._constants = len(self._optimizers)  # the owner of what nobody changes
        self._changes = 0  # grows with whatever may make owned memory anybody's
        self._watched: list[weakref.ref[Tensor]] = []
        self._sets: dict[frozenset[int], int] = {frozenset({n}): n for n in range(self._constants + 1)}
        self._waits: list[tuple[int, ...]] = [(n,) for n in range(self._constants)]  # for whom each gate waits
        table = self._table()
        if any(self._constants in s and len(s) > 1 for s in self._sets):
            raise UsageError("a tensor given as constant= is a parameter or state of an optimizer, which changes it")
        del table
        ck.guarded_by(self, debug=debug)
        self._handles = [h for n, o in enumerate(self._optimizers) for h in self._hooks(n, o)]

    def __repr__(self) -> str:
        return f"<Attachment of {len(self._optimizers)} optimizer(s) to {self._ck!r}>"

    def _hooks(self, owner: int, optimizer: Optimizer) -> Iterator[Any]:
        gate = torch.compiler.disable(lambda *_: self.gate(owner))  # type: ignore[no-untyped-call]
        yield optimizer.register_step_pre_hook(gate)
        yield optimizer.register_load_state_dict_pre_hook(gate)
        yield optimizer.register_load_state_dict_post_hook(lambda _: self._note_change())

    def gate(self, owner: int) -> None:
        """Wait until no capture reads the tensors of optimizer number `owner` any more.

        Raises DeadlineError where storage hangs (the step is not made, and can be made again); the failure of a save is
        no reason not to step. Where the Checkpointer is closed, nothing is captured.
        """
        try:
            for number in self._waits[owner]:
                self._ck.fence(owner=number)
        except (ClosedError, ForkedError):
            return

    def detach(self) -> None:
        """Wait for running captures and undo `attach`: the Checkpointer is again what its options say. Idempotent."""
        if not self._handles:
            return
        try:
            self._ck.fence()
            self._ck.guarded_by(None)
        except (ClosedError, ForkedError):
            pass
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.detach()

    # -- the Guard ---------------------------------------------------------------------------------------------------

    def version(self) -> object:
        """Give what changes when an owned tensor is freed, loaded, added or taken away."""
        shape = [(len(o.state), *map(_group_id, o.param_groups)) for o in self._optimizers]
        return self._changes, tuple(shape)

    def owners(self, kind: str, values: Sequence[Any]) -> Sequence[int]:
        """Give the owner of each leaf: whose memory it lies in, all of it; -1 for what is not provably somebody's."""
        found = np.full(len(values), NOBODY, np.int64)
        if kind != "torch":
            return found  # type: ignore[return-value]
        leaves = [(i, t) for i, t in enumerate(map(_local, values)) if t is not None and t.numel() > 1]
        table = self._table()
        if leaves:
            starts, ends = _extents([t for _, t in leaves])
            found[[i for i, _ in leaves]] = table.owners(starts, ends)
        return found  # type: ignore[return-value]

    def _note_change(self, _: object = None) -> None:
        self._changes += 1  # two at once may count as one: it is another number than before all the same

    def _table(self) -> _Table:
        """Say whose memory is what, now; what dies of it changes the version."""
        owned: list[list[Tensor]] = [_provable(_tensors_of(o)) for o in self._optimizers]
        owned.append(_provable(chain.from_iterable(map(_tensors_in, self._constant))))
        # Without this, memory that was owned could be freed, given to another tensor, and be taken for owned still.
        self._watched = [weakref.ref(t, self._note_change) for t in chain.from_iterable(owned)]
        table = _Table(owned, self._sets)
        self._waits = [tuple(n for s, n in self._sets.items() if owner in s) for owner in range(self._constants)]
        return table


@final
class _Table:
    """Disjoint intervals of addresses, and who owns each.

    Args:
        owned: the tensors of each owner, dense.
        sets: the numbers of owners, and of several that share memory; those that are not there yet are added.
    """

    def __init__(self, owned: Sequence[Sequence[Tensor]], sets: dict[frozenset[int], int]) -> None:
        starts, ends = _extents(list(chain.from_iterable(owned)))
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


def _check(optimizers: Sequence[object], constant: Sequence[object]) -> None:
    if not optimizers:
        raise UsageError("attach() needs an optimizer: it is before its step that captures are waited for")
    for optimizer in optimizers:
        if not isinstance(optimizer, Optimizer):
            raise UsageError(
                f"{type(optimizer).__qualname__} is no torch.optim.Optimizer, and has no hook before its step; "
                "attach the optimizers that it holds, or use snapshot='lazy' and call ck.fence() before it steps"
            )
    if len(set(map(id, optimizers))) < len(optimizers):
        raise UsageError("attach() was given the same optimizer twice")
    for value in constant:
        if not isinstance(value, (Tensor, Module)):
            raise UsageError(f"constant= takes tensors and modules, not {type(value).__qualname__}")


def _group_id(group: Mapping[str, Any]) -> int:
    return hash(tuple(map(id, group["params"])))


def _tensors_of(optimizer: Optimizer) -> Iterator[Tensor]:
    """Give the tensors that only a step of this optimizer changes: parameters, and state at any depth.

    Not what else is in its groups: a learning rate is changed by schedulers and by users.
    """
    for group in optimizer.param_groups:
        yield from group["params"]
    for state in optimizer.state.values():
        yield from _tensors_in(state)


def _tensors_in(value: object) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Module):
        yield from value.parameters()
        yield from value.buffers()
    elif isinstance(value, Mapping):
        for part in value.values():
            yield from _tensors_in(part)
    elif isinstance(value, (list, tuple)):
        for part in value:
            yield from _tensors_in(part)


def _provable(tensors: Iterable[Tensor]) -> list[Tensor]:
    """Give the memory of those whose extent is known: of more than one element, dense, each once."""
    found = {id(t): t for t in map(_local, tensors) if t is not None and t.numel() > 1}
    return [t for t in found.values() if t.is_contiguous() or is_dense(t.shape, t.stride())]


def _local(value: object) -> Tensor | None:
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


def _extents(tensors: Sequence[Tensor]) -> tuple[NDArray[np.uint64], NDArray[np.uint64]]:
    """Give where the memory of each tensor begins and ends."""
    n = len(tensors)
    starts = np.fromiter(map(_data_ptr, tensors), np.uint64, n)
    sizes = np.fromiter(map(_numel, tensors), np.uint64, n) * np.fromiter(map(_element_size, tensors), np.uint64, n)
    return starts, starts + sizes
