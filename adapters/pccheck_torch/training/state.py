"""All that the next training step depends on, as one object (imports torch and pccheck's public names)."""

from __future__ import annotations

import functools
import inspect
import types
import warnings
from collections.abc import Mapping, MutableMapping
from typing import Any, Never, final

from torch import Tensor
from torch.nn import Module
from torch.optim import Optimizer

import pccheck
from pccheck.errors import MismatchError, UnsupportedLeafError, UsageError
from pccheck_torch.training.modules import ModuleSection
from pccheck_torch.training.optimizers import OptimizerSection
from pccheck_torch.training.sections import Problems, Section, Stateful, as_stored, grouped, is_stateful, place
from pccheck_torch.training.values import GENERATORS, Extras, Generator, Plain, Randomness

# What may refuse a checkpoint only when it is asked to load it comes first, so that nothing else was touched then; and
# the random generators come last, since loading might draw from them.
_LOADED = ("loader", "scheduler", "scaler", "extras", "ema", "model", "optimizer", "rng")
_NEVER = (functools.partial, set, frozenset, types.ModuleType, types.GeneratorType)  # is saved, beside functions


@final
class TrainingState:
    """Model, optimizer, schedule, random generators, data position: one state to save, one to load. Not thread-safe.

        state = pccheck_torch.TrainingState(model=model, optimizer=optimizer, scheduler=scheduler, loader=loader)
        start = state.restore(ck)                      # 0 where there is no checkpoint yet
        for step in range(start, steps):
            ...
            ck.save(step, state)

    What is saved is a tree of dicts that is of use without this class as well: `restored.state["model"]` is what
    `model.state_dict()` gave, `["optimizer"]` and the others likewise, `["rng"]` holds "python", "numpy", "torch" and
    "cuda". DDP, DataParallel and `torch.compile` around a model leave no trace in the names.

    No state dict is made anew while nothing was added, replaced or reallocated; whatever was is noticed. (So the memory
    that `model.to(...)` gives up is held until the next save.)

    Args:
        model: a module, or a dict of them.
        optimizer: an optimizer (or anything with `state_dict` and `load_state_dict`), or a list or dict of them.
        scheduler: a learning rate scheduler, or a list or dict of them.
        scaler: a GradScaler.
        ema: a module such as AveragedModel, anything with `state_dict` and `load_state_dict`, or a tree of tensors.
        loader: what knows the position in the data: a ResumableLoader, torchdata's StatefulDataLoader, or anything else
            with `state_dict` and `load_state_dict`.
        rng: whether the random generators of Python, NumPy, torch and CUDA are part of it.
        extras: anything else: modules, optimizers, things with `state_dict` and `load_state_dict`, `torch.Generator`
            and `numpy.random.Generator`, or plain values and trees of them, arrays included. Plain values are kept in
            `state.extras`, where they are read and set: `state.extras["tokens"] += n`; what is added to or deleted from
            it later counts as well. Loading fills arrays, lists, dicts and dataclasses in place, and puts other values
            there; a namedtuple or dataclass comes back as its own class where one stands there already.

    Raises:
        UsageError: something is of a type that cannot be its part, or was given without a name.
        UnsupportedLeafError: an extra is a function, a class, a module of Python or a set, which are never stored.
    """

    # So that `state.tokens = 1` is an error.
    __slots__ = ("__weakref__", "_ema", "_extras", "_made", "mismatches", "skipped")

    def __init__(
        self,
        *unnamed: Never,
        model: Module | Mapping[str, Module] | None = None,
        optimizer: Any = None,
        scheduler: Any = None,
        scaler: Any = None,
        ema: Any = None,
        loader: Any = None,
        rng: bool = True,
        **extras: Any,
    ) -> None:
        if unnamed:
            raise UsageError("a TrainingState takes its parts by name: TrainingState(model=model, optimizer=optimizer)")
        for name, value in extras.items():
            _assert_storable(name, value)
        self._extras: dict[str, Any] = extras
        self.mismatches: tuple[pccheck.Mismatch, ...] = ()
        self.skipped: tuple[pccheck.Skipped, ...] = ()
        self._ema = {"ema": ema}
        made: dict[str, Section | None] = {
            "model": None if model is None else grouped(model, _module),
            "optimizer": None if optimizer is None else grouped(optimizer, _optimizer, lists=True),
            "scheduler": None if scheduler is None else grouped(scheduler, _keyed, lists=True),
            "scaler": None if scaler is None else _keyed(scaler),
            "ema": None if ema is None else _any(self._ema, "ema"),
            "rng": Randomness() if rng else None,
            "loader": None if loader is None else _stateful(loader),
            "extras": Extras(extras, _any),
        }
        self._made: dict[str, Section] = {name: s for name, s in made.items() if s is not None}

    @property
    def extras(self) -> dict[str, Any]:
        """The extras by name, to be read and set; what is added here is saved as well."""
        return self._extras

    @property
    def _sections(self) -> dict[str, Section]:
        """Give what there is; a state that never had extras has none to miss."""
        return {name: section for name, section in self._made.items() if name != "extras" or self._extras}

    @property
    def __pccheck_own__(self) -> tuple[str, ...]:
        """Give the paths at which ranks differ, also where `replicated` says that all is the same.

        Generators, the data position, and the buffers of models: DDP broadcasts these *before* each forward pass, so
        that after it BatchNorm's running statistics are each rank's own (seen: a mixture of both ranks was restored).
        """
        sections = self._sections.items()
        return ("rng", "loader", *(place(name, path) for name, section in sections for path in section.own()))

    def __pccheck_state__(self) -> dict[str, Any]:
        """Give the tree that `Checkpointer.save` saves."""
        return {name: section.tree() for name, section in self._sections.items()}

    def restore(self, ck: pccheck.Checkpointer, step: int | None = None, *, partial: bool = False) -> int:
        """Restore the newest checkpoint, or that of `step`, and load it: give the step to go on with.

        With several ranks each reads only the parts that it holds (of DTensors, of their optimizer state).

        Args:
            ck: where to restore from.
            step: None = the newest; an older one starts a branch, as in `Checkpointer.restore`.
            partial: as in `load`.

        Raises as `Checkpointer.restore` does; MismatchError before anything was read or changed.
        """
        return self._load(ck.restore(step, like=_Asked(self, partial), partial=partial), partial)

    def load(self, restored: pccheck.Restored | None, *, partial: bool = False) -> int:
        """Load a restored checkpoint: give the step to go on with, 0 where there was none.

        Models are filled in place, optimizers through their `load_state_dict`, the random generators last. What `ck`
        still captures must be waited for first (`ck.fence()`), which `ck.restore()` has done. What the restore passed
        over, since it is damaged, is warned about and left in `self.skipped`.

        Args:
            restored: what `Checkpointer.restore` gave.
            partial: load what fits, and leave what does not to `self.mismatches`: of models and of optimizer states
                part by part; a scheduler, scaler, generator or extra as a whole.

        Raises:
            MismatchError: lists everything missing, unexpected, or of another shape or dtype; nothing was changed.
        """
        return self._load(restored, partial)

    def _load(self, restored: pccheck.Restored | None, partial: bool) -> int:
        """Load; called by the methods that the user calls, whose line a warning is to name."""
        self.mismatches = self.skipped = ()
        if restored is None:
            return 0
        self.skipped = tuple(restored.skipped)
        stored = restored.state
        self.mismatches = tuple(self._check(stored))
        if self.mismatches and not partial:
            raise MismatchError(self.mismatches)
        if self.skipped:  # who is given a number only would never look
            told = "; ".join(map(str, self.skipped[:3]))
            warnings.warn(f"step {restored.step} was loaded; passed over: {told}", RuntimeWarning, stacklevel=3)
        sections = self._sections
        for name in _LOADED:
            if name in sections and isinstance(stored, Mapping) and name in stored:
                sections[name].load(stored[name])
        return restored.step + 1

    def _check(self, stored: Any) -> list[pccheck.Mismatch]:
        found = Problems()
        if not isinstance(stored, Mapping):
            found.differs("", "type", "the tree of a TrainingState", type(stored).__name__)
            return found.found
        sections = self._sections
        for name, section in sections.items():
            if name in stored:
                section.check(stored[name], name, found)
            else:
                found.missing(name, section.tree())
        for name in stored:
            if name not in sections:
                found.unexpected(name, stored[name])
        return found.found

    def _asked(self, stored: Any, *, partial: bool) -> Any:
        problems = self._check(stored)
        if problems and not partial:
            raise MismatchError(problems)
        if not isinstance(stored, Mapping):
            return as_stored(stored)
        sections = self._sections
        return {
            name: sections[name].asked(part) if name in sections else as_stored(part) for name, part in stored.items()
        }

    def __repr__(self) -> str:
        return f"<TrainingState of {', '.join(self._sections) or 'nothing'}>"


@final
class _Asked:
    """Stands for a TrainingState as the `like` of a restore: what is asked for depends on what is stored.

    A fresh optimizer has no state to be asked for, and must get what the checkpoint has.
    """

    def __init__(self, state: TrainingState, partial: bool) -> None:
        self._state, self._partial = state, partial

    def __pccheck_like__(self, stored: Any) -> Any:
        return self._state._asked(stored, partial=self._partial)


def _module(value: Any) -> Section:
    if not isinstance(value, Module):
        hint = "pass the module itself, not its state_dict()" if isinstance(value, Tensor) else "give it as an extra"
        raise UsageError(f"model= takes modules, not a {type(value).__qualname__}; {hint}")
    return ModuleSection(value)


def _optimizer(value: Any) -> Section:
    return OptimizerSection(value) if isinstance(value, Optimizer) else _stateful(value)


def _keyed(value: Any) -> Section:
    _assert_stateful(value)
    return Stateful(value, keys=True)


def _stateful(value: Any) -> Section:
    _assert_stateful(value)
    return Stateful(value)


def _assert_stateful(value: Any) -> None:
    if not is_stateful(value):
        raise UsageError(
            f"a {type(value).__qualname__} has no state_dict and load_state_dict, so that it cannot be a part of a "
            "training state; a DataLoader goes into a pccheck_torch.ResumableLoader, plain values are extras"
        )


def _assert_storable(name: str, value: object) -> None:
    """Refuse what no save could store, where it is given and not hours later."""
    kind: type = type(value)
    if inspect.isclass(value) or inspect.isroutine(value) or issubclass(kind, _NEVER):
        reason = "extras are values, trees of them, arrays, modules, generators, and what has a state_dict"
        raise UnsupportedLeafError(f"extras/{name}", kind.__qualname__, reason)


def _any(holder: MutableMapping[str, Any], name: str) -> Section:
    value = holder[name]
    if isinstance(value, Module):
        return ModuleSection(value)
    if isinstance(value, Optimizer):
        return OptimizerSection(value)
    if is_stateful(value):
        return Stateful(value)
    if isinstance(value, GENERATORS):
        return Generator(value)
    return Plain(holder, name)
