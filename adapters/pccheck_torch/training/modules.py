"""A model's state without a new state dict per save (imports torch, pccheck.errors).

`state_dict()` of 3,000 parameters takes 5 ms, and gives tensors that go on showing the old memory when a parameter is
given another. So it is made once; before each save it is proved, by C functions alone, that the modules hold the same
tensors under the same names, and that each still has the memory that the state dict shows.
"""

from __future__ import annotations

import collections
import operator
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, final

import torch
from torch import Tensor
from torch.nn import Module, Parameter
from torch.nn.parallel import DataParallel, DistributedDataParallel

from pccheck import dlpack
from pccheck.leaves import StoredLeaf
from pccheck_torch.leaves.dense import dtype_name
from pccheck_torch.leaves.fingerprints import MemoryFingerprint
from pccheck_torch.training.sections import KIND, Problems, Section, as_stored, is_dtensor, names, place

_dtype = operator.attrgetter("dtype")
_local, _spec = operator.attrgetter("_local_tensor"), operator.attrgetter("_spec")
_tables = operator.attrgetter("_parameters", "_buffers", "_modules")
_PLAIN = frozenset({Tensor, Parameter})
_COMPILED = "_orig_mod"  # what torch.compile puts into the names of what it wraps


@final
class ModuleSection(Section):
    """The state of a module, under the names that it has without DataParallel, DDP and torch.compile around it."""

    def __init__(self, module: Module) -> None:
        self._module = unwrapped(module)
        self._watch: _Watch | None = None
        self._state: dict[str, Any] = {}
        self._own: tuple[str, ...] = ()

    def tree(self) -> Any:
        """Give what `state_dict()` would give now."""
        if self._watch is None or not self._watch.holds():
            self._watch = None
            live = self._module.state_dict(keep_vars=True)
            self._state = self._named(_detached(live))
            shared = [isinstance(value, Parameter) for value in live.values()]
            self._own = tuple(place(name) for name, same in zip(self._state, shared, strict=True) if not same)
            if _is_plain(self._module, live):
                self._watch = _Watch(self._module, live, self._state)
        if self._watch is not None:
            self._state.update(self._watch.extra_states())
        return self._state

    def check(self, stored: Any, path: str, found: Problems) -> None:
        """Report every parameter and buffer that is missing, unexpected, or has another shape or dtype."""
        if not isinstance(stored, Mapping):
            found.differs(path, "type", "dict", type(stored).__name__)
            return
        live = self.tree()
        for name in names(path, live, stored, found):
            tensor = live[name]
            lazy = torch.nn.parameter.is_lazy(tensor)  # it takes its shape from what is loaded
            if isinstance(tensor, Tensor) and not lazy and not name.endswith("_extra_state"):
                found.leaf(f"{path}/{name}", tensor, stored[name])

    def asked(self, stored: Any) -> Any:
        """Ask for the part of each DTensor that is here, and for all of the rest."""
        if not isinstance(stored, collections.OrderedDict) and type(stored) is not dict:
            return as_stored(stored)
        asked: Any = as_stored(stored)
        live = self.tree()
        for name, leaf in stored.items():
            tensor = live.get(name)
            if isinstance(leaf, StoredLeaf) and is_dtensor(tensor) and _fits(tensor, leaf):
                asked[name] = tensor
        return asked

    def load(self, stored: Any) -> None:
        """Copy what fits into the parameters and buffers, as `load_state_dict` does, its hooks included."""
        if not isinstance(stored, Mapping):
            return
        found, live = Problems(), self.tree()
        self.check(stored, "", found)
        bad = {m.path.removeprefix("/") for m in found.found}
        given: Any = collections.OrderedDict()
        for name, wrapped in zip(live, self._wrapped_names(live), strict=True):
            if name in stored and name not in bad:
                given[wrapped] = _for_live(live[name], stored[name])
        metadata = getattr(stored, "_metadata", None)
        if metadata is not None:
            back = self._renamed_modules()
            given._metadata = collections.OrderedDict((back.get(name, name), m) for name, m in metadata.items())
        self._module.load_state_dict(given, strict=not bad)

    def own(self) -> Iterable[str]:
        """Give the buffers, and whatever else is no parameter."""
        if not self._state:
            self.tree()
        return self._own

    # -- names ------------------------------------------------------------------------------------------------------

    def _named(self, state: Any) -> Any:
        """Give a state dict with the names that modules have without `torch.compile` around some of them."""
        if not any(_is_compiled(m) for m in self._module.modules()):
            return state
        made: Any = collections.OrderedDict((_without_compile(name), value) for name, value in state.items())
        metadata = getattr(state, "_metadata", {})
        made._metadata = collections.OrderedDict((_without_compile(name), m) for name, m in metadata.items())
        return made

    def _wrapped_names(self, live: Mapping[str, Any]) -> list[str]:
        if not any(_is_compiled(m) for m in self._module.modules()):
            return list(live)
        return list(self._module.state_dict(keep_vars=True))

    def _renamed_modules(self) -> dict[str, str]:
        every = [name for name, _ in self._module.named_modules(remove_duplicate=False)]
        return {_without_compile(name): name for name in every}


def unwrapped(module: Module) -> Module:
    """Give the module that DataParallel, DistributedDataParallel or `torch.compile` was put around."""
    while True:
        if isinstance(module, (DataParallel, DistributedDataParallel)):
            module = module.module
        elif _is_compiled(module):
            module = getattr(module, _COMPILED)
        else:
            return module


def _is_compiled(module: Module) -> bool:
    """Tell whether it is an OptimizedModule, without importing the compiler."""
    return type(module).__name__ == "OptimizedModule" and _COMPILED in module._modules


def _without_compile(name: str) -> str:
    return ".".join(part for part in name.split(".") if part != _COMPILED)


def _detached(live: Any) -> Any:
    """Give what `state_dict()` gives, of what it gives with `keep_vars=True`."""
    made = type(live)((name, v.detach() if _has_values(v) else v) for name, v in live.items())
    if hasattr(live, "_metadata"):
        made._metadata = live._metadata
    return made


def _has_values(value: Any) -> bool:
    """Tell whether it is a tensor, and none of a lazy module that has not seen a batch yet."""
    return isinstance(value, Tensor) and not torch.nn.parameter.is_lazy(value)


def _fits(tensor: Any, leaf: StoredLeaf) -> bool:
    spec = leaf.spec
    return (spec.kind, spec.dtype, spec.shape) == (KIND.name, dtype_name(tensor.dtype), tuple(tensor.shape))


def _for_live(live: Any, value: Any) -> Any:
    """Give a restored value as `load_state_dict` takes it for a live one: a DTensor for a DTensor."""
    if not is_dtensor(live) or not isinstance(value, Tensor) or is_dtensor(value):
        return value
    made = torch.empty_like(live)
    KIND.assign(made, value.detach())
    return made


# -- whether a state dict is still right ------------------------------------------------------------------------------


def _is_plain(module: Module, live: Mapping[str, Any]) -> bool:
    """Tell whether a state dict is made of the modules' tables alone, so that watching these is enough."""
    for m in module.modules():
        cls = type(m)
        if (
            cls.state_dict is not Module.state_dict
            or cls._save_to_state_dict is not Module._save_to_state_dict
            or m._state_dict_hooks
            or not vars(m).keys().isdisjoint({"state_dict", "_save_to_state_dict", "get_extra_state"})
            or not all(isinstance(table, dict) for table in _tables(m))
        ):
            return False
    return all(_is_watchable(v) for name, v in live.items() if not name.endswith("_extra_state"))


def _is_watchable(value: Any) -> bool:
    if is_dtensor(value):
        value = _local(value)
    return type(value) in _PLAIN and value.layout is torch.strided and value.device.type != "meta"


@final
class _Watch:
    """Tells whether a state dict is what its module would give again.

    Args:
        module: of which `_is_plain` is true.
        live: its `state_dict(keep_vars=True)`.
        state: the state dict to watch: the same in the same order, detached.
    """

    def __init__(self, module: Module, live: Mapping[str, Any], state: Mapping[str, Any]) -> None:
        modules = list(module.modules())
        tables = [table for m in modules for table in _tables(m)]
        besides: list[Any] = [d for m in modules for d in (m._state_dict_hooks, m._state_dict_pre_hooks)]
        besides += [m._non_persistent_buffers_set for m in modules]
        self._empty = [d for d in (*tables, *besides) if not d]
        self._filled = [d for d in (*tables, *besides) if d]
        self._lengths = list(map(len, self._filled))
        self._tables = [table for table in tables if table]
        self._held = [dict(table) for table in self._tables]  # alive: so that identity says it all
        self._contents = dlpack.contents(self._tables)
        self._pre_hooks = list(_pre_hooks(module))
        self._extra = list(_extra(module, live))
        extra = {name for name, _ in self._extra}
        pairs = [(t, s) for (name, t), s in zip(live.items(), state.values(), strict=True) if name not in extra]
        self._extra = [(_without_compile(name), m) for name, m in self._extra]
        self._sharded = [(t, s) for t, s in pairs if is_dtensor(t)]
        plain = [(t, s) for t, s in pairs if not is_dtensor(t)]
        self._live, self._shown = [t for t, _ in plain], [s for _, s in plain]
        self._memory = MemoryFingerprint(self._shown)
        addresses = self._memory.addresses(self._shown)
        assert addresses is not None, "they are as they were a moment ago"
        self._addresses = addresses.tobytes()

    def holds(self) -> bool:
        """Tell whether all is as it was, after having run what `state_dict()` would run first."""
        for hook, module, prefix in self._pre_hooks:
            hook(module, prefix, False)
        return (
            not any(self._empty)
            and list(map(len, self._filled)) == self._lengths
            and dlpack.contents(self._tables) == self._contents
            and self._memory_holds()
            and self._shards_hold()
        )

    def extra_states(self) -> Iterator[tuple[str, Any]]:
        """Give what modules give beside their tensors, as it is now."""
        return ((name, module.get_extra_state()) for name, module in self._extra)

    def _memory_holds(self) -> bool:
        """Tell whether the tensors still have the memory that the state dict shows, and see it alike.

        Both are asked: memory that the state dict shows may have been freed, and given to its parameter again.
        """
        try:
            found = [self._memory.addresses(tensors) for tensors in (self._live, self._shown)]
        except Exception:  # a tensor that is not strided any more: the state dict made anew shows it
            return False
        return all(f is not None and self._addresses == f.tobytes() for f in found)

    def _shards_hold(self) -> bool:
        live, shown = [t for t, _ in self._sharded], [s for _, s in self._sharded]
        mine, theirs = list(map(_local, live)), list(map(_local, shown))
        return (
            list(map(_spec, live)) == list(map(_spec, shown))
            and all(map(Tensor.is_set_to, mine, theirs))
            and list(map(_dtype, mine)) == list(map(_dtype, theirs))
        )


def _pre_hooks(module: Module) -> Iterator[tuple[Any, Module, str]]:
    for name, m in module.named_modules(remove_duplicate=False):
        for hook in m._state_dict_pre_hooks.values():
            yield hook, m, f"{name}." if name else ""


def _extra(module: Module, live: Mapping[str, Any]) -> Iterator[tuple[str, Module]]:
    for name, m in module.named_modules(remove_duplicate=False):
        if type(m).get_extra_state is not Module.get_extra_state:
            key = f"{name}._extra_state" if name else "_extra_state"
            if key in live:
                yield key, m
