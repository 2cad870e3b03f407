"""Lazy capture under a training loop: optimizers wait for captures of their tensors (imports torch, pccheck's public).

`save()` returns at once, and the copying goes on during the next forward and backward pass, which change no parameter
and no moment. What does change is copied by value within `save()`: everything that no attached optimizer owns.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from types import TracebackType
from typing import Any, Self, final

import numpy as np
import torch
from torch import Tensor
from torch.nn import Module
from torch.optim import Optimizer

import pccheck
from pccheck import dlpack
from pccheck.errors import ClosedError, ForkedError, UsageError
from pccheck_torch.owned import NOBODY, Table, extents, local, provable, tensors_in, tensors_of


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
        self._stepping: frozenset[int] = frozenset()  # whose gate was passed: what they own changes any moment
        self._watched: list[weakref.ref[Tensor]] = []
        self._sets: dict[frozenset[int], int] = {frozenset({n}): n for n in range(self._constants + 1)}
        self._waits: list[tuple[int, ...]] = [(n,) for n in range(self._constants)]  # for whom each gate waits
        self._table()  # finds who shares memory
        if any(self._constants in s and len(s) > 1 for s in self._sets):
            raise UsageError("a tensor given as constant= is a parameter or state of an optimizer, which changes it")
        self._handles: list[Any] = []
        ck.guarded_by(self, debug=debug)
        try:
            for n, optimizer in enumerate(self._optimizers):
                self._handles.extend(self._hooks(n, optimizer))
        except BaseException:  # a guard without its gates would let snapshots be torn
            self._undo()
            raise

    def __repr__(self) -> str:
        return f"<Attachment of {len(self._optimizers)} optimizer(s) to {self._ck!r}>"

    def _hooks(self, owner: int, optimizer: Optimizer) -> Iterator[Any]:
        gate = torch.compiler.disable(lambda *_: self.gate(owner))  # type: ignore[no-untyped-call]
        enter = torch.compiler.disable(lambda *_: self._enter(owner))  # type: ignore[no-untyped-call]
        leave = torch.compiler.disable(lambda *_: self._leave(owner))  # type: ignore[no-untyped-call]
        yield optimizer.register_step_pre_hook(enter)
        yield optimizer.register_step_post_hook(leave)
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

    def _enter(self, owner: int) -> None:
        """Pass the gate; a save from here on (in a closure, or another hook) gets by value what this step changes.

        A step that raises does not leave: until the next one that does, saves cost more and hold what they should.
        """
        self.gate(owner)
        self._stepping |= {owner}

    def _leave(self, owner: int) -> None:
        self._stepping -= {owner}

    def detach(self) -> None:
        """Wait for running captures and undo `attach`: the Checkpointer is again what its options say. Idempotent."""
        if not self._handles:
            return
        try:
            self._ck.fence()
        except (ClosedError, ForkedError):
            pass
        self._undo()

    def _undo(self) -> None:
        try:
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
        """Give what changes when an owned tensor is freed, loaded, added or taken away, or a step begins or ends."""
        groups = [group["params"] for optimizer in self._optimizers for group in optimizer.param_groups]
        sizes = [(len(optimizer.state), len(optimizer.param_groups)) for optimizer in self._optimizers]
        return self._changes, self._stepping, sizes, dlpack.contents(groups)

    def owners(self, kind: str, values: Sequence[Any]) -> Sequence[int]:
        """Give the owner of each leaf: whose memory it lies in, all of it; -1 for what is not provably somebody's."""
        found = np.full(len(values), NOBODY, np.int64)
        if kind != "torch":
            return found  # type: ignore[return-value]
        leaves = [(i, t) for i, t in enumerate(map(local, values)) if t is not None and t.numel() > 1]
        table = self._table()
        if leaves:
            starts, ends = extents([t for _, t in leaves])
            found[[i for i, _ in leaves]] = table.owners(starts, ends)
        for owners, number in self._sets.items() if self._stepping else ():
            if owners & self._stepping:
                found[found == number] = NOBODY
        return found  # type: ignore[return-value]

    def _note_change(self, _: object = None) -> None:
        self._changes += 1  # two at once may count as one: it is another number than before all the same

    def _table(self) -> Table:
        """Say whose memory is what, now; what dies of it changes the version."""
        owned: list[list[Tensor]] = [provable(tensors_of(o)) for o in self._optimizers]
        owned.append(provable(chain.from_iterable(map(tensors_in, self._constant))))
        # Without this, memory that was owned could be freed, given to another tensor, and be taken for owned still.
        self._watched = [weakref.ref(t, self._note_change) for t in chain.from_iterable(owned)]
        table = Table(owned, self._sets)
        self._waits = [tuple(n for s, n in self._sets.items() if owner in s) for owner in range(self._constants)]
        return table


def _check(optimizers: Sequence[object], constant: Sequence[object]) -> None:
    if not optimizers:
        raise UsageError("attach() needs an optimizer: it is before its step that captures are waited for")
    for optimizer in optimizers:
        if isinstance(optimizer, (list, tuple, dict)):
            raise UsageError("attach() takes optimizers one by one: attach(ck, first, second)")
        if not isinstance(optimizer, Optimizer):
            raise UsageError(
                f"{type(optimizer).__qualname__} is no torch.optim.Optimizer, and has no hook before its step; "
                "attach the optimizers that it holds, or use snapshot='lazy' and call ck.fence() before it steps"
            )
        if not _runs_hooks(optimizer):
            raise UsageError(
                f"a {type(optimizer).__qualname__} does not run the hooks of torch.optim.Optimizer, as wrappers do not "
                "that leave out its __init__; attach the optimizer that it holds"
            )
    if len(set(map(id, optimizers))) < len(optimizers):
        raise UsageError("attach() was given the same optimizer twice")
    for value in constant:
        if not isinstance(value, (Tensor, Module)):
            raise UsageError(f"constant= takes tensors and modules, not {type(value).__qualname__}")


def _runs_hooks(optimizer: Optimizer) -> bool:
    """Tell whether a step runs hooks: `Optimizer.__init__` wraps the step of the class, and marks it so."""
    marked = hasattr(type(torch.optim.SGD([torch.empty(0, device="cpu")], lr=0.0)).step, "hooked")  # in this torch
    return hasattr(optimizer, "_optimizer_step_pre_hooks") and (not marked or hasattr(type(optimizer).step, "hooked"))
