"""What a TrainingState is made of: sections, saved, checked and loaded (imports torch, pccheck's public names)."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any, final

import numpy as np
import torch
from torch import Tensor

import pccheck
from pccheck.errors import UsageError
from pccheck.leaves import StoredLeaf
from pccheck_torch.leaves.dense import DTYPES, dtype_name
from pccheck_torch.leaves.kind import TorchKind
from pccheck_torch.leaves.sharded import is_dtensor_class
from pccheck_torch.outlines import replaced

KIND = TorchKind()
_PLAIN_NAME = re.compile(r"[A-Za-z_][\w.\-]*|\d+\.[\w.\-]+", re.ASCII)
LIVE = "the live state"
_RELEASES = ("_", "verbose")  # attributes that come and go with releases of torch: no reason to refuse a checkpoint


class Section(ABC):
    """One part of a training state: a model, an optimizer, ...

    What is `stored` of it may be a part of an outline, whose leaves are `StoredLeaf`s, or of a restored state.
    """

    @abstractmethod
    def tree(self) -> Any:
        """Give what is to be saved, as it is now."""

    @abstractmethod
    def check(self, stored: Any, path: str, found: Problems) -> None:
        """Report everything that would keep `load` from loading all of `stored`; change nothing."""

    def asked(self, stored: Any) -> Any:
        """Give what stands for this section in `like`: what is stored of it is given, with StoredLeafs."""
        return as_stored(stored)

    @abstractmethod
    def load(self, stored: Any) -> None:
        """Load what fits, in place."""

    def own(self) -> Iterable[str]:
        """Give the paths in `tree()` at which ranks differ though the rest is the same on all; "" = all of it."""
        return ()


def place(name: object, below: str = "") -> str:
    """Give the path of what lies `below` a key or index; "" (all there is) for a name that is not written as it is."""
    if isinstance(name, str) and not _PLAIN_NAME.fullmatch(name):
        return ""
    return f"{name}/{below}" if below else str(name)


@final
class Problems:
    """Collects where a checkpoint and the live state differ."""

    def __init__(self) -> None:
        self.found: list[pccheck.Mismatch] = []

    def missing(self, path: str, expected: object) -> None:
        """The live state has something that the checkpoint lacks."""
        self.found.append(pccheck.Mismatch(path, "missing", told(expected), "", LIVE))

    def unexpected(self, path: str, stored: object) -> None:
        """The checkpoint has something that the live state lacks; each leaf below is named."""
        if isinstance(stored, Mapping) and stored:
            for key, child in stored.items():
                self.unexpected(f"{path}/{key}", child)
        else:
            self.found.append(pccheck.Mismatch(path, "unexpected", "", told(stored), LIVE))

    def differs(self, path: str, problem: Any, expected: object, stored: object) -> None:
        """Both have it, but another one."""
        self.found.append(pccheck.Mismatch(path, problem, str(expected), str(stored), LIVE))

    def leaf(self, path: str, live: Tensor | np.ndarray[Any, Any], stored: object) -> None:
        """Hold an array against a stored leaf."""
        kind, facts = ("torch" if isinstance(live, Tensor) else "numpy"), facts_of(stored)
        shape, dtype = tuple(live.shape), dtype_name(live.dtype) if isinstance(live, Tensor) else str(live.dtype)
        if isinstance(stored, StoredLeaf) and "struct" in stored.spec.extra and getattr(live.dtype, "names", None):
            dtype = stored.spec.dtype  # which fields it has is held against when it was restored
        if facts is None or facts[0] != kind:
            self.differs(path, "kind", told(live), told(stored))
        elif _is_meta(live) and not _is_meta(stored):
            self.differs(
                path, "kind", f"{told(live)} on device meta, which is given memory by to_empty()", told(stored)
            )
        elif _is_meta(stored) and not _is_meta(live):
            self.differs(path, "kind", told(live), f"{told(stored)} of device meta, without values")
        elif facts[1] != shape:
            self.differs(path, "shape", shape, facts[1])
        elif facts[2] != dtype:
            self.differs(path, "dtype", dtype, facts[2])


def _is_meta(value: object) -> bool:
    """Tell whether it is a tensor, live, stored or restored, without values: loading from or into it does nothing."""
    if isinstance(value, StoredLeaf):
        return value.spec.kind == "torch" and "value" in value.spec.extra
    return isinstance(value, Tensor) and value.device.type == "meta"


def facts_of(stored: object) -> tuple[str, tuple[int, ...], str] | None:
    """Give kind, shape and dtype of an array, stored or restored; None for anything else."""
    if isinstance(stored, StoredLeaf):
        spec = stored.spec
        dtype = str(np.dtype(spec.dtype)) if spec.kind == "numpy" and "struct" not in spec.extra else spec.dtype
        return spec.kind, tuple(spec.shape), dtype
    if isinstance(stored, Tensor):
        return "torch", tuple(stored.shape), dtype_name(stored.dtype)
    if isinstance(stored, np.ndarray):
        return "numpy", tuple(stored.shape), str(stored.dtype)
    return None


def told(value: object) -> str:
    """Tell what something is, in a word or two."""
    facts = facts_of(value)
    return type(value).__name__ if facts is None else f"{facts[0]} {facts[2]}{list(facts[1])}"


def as_stored(stored: Any) -> Any:
    """Ask for all of a stored part: what ranks store in boxes, whole."""
    return replaced(stored, lambda _, leaf: whole(leaf))


def whole(leaf: StoredLeaf) -> Any:
    """Ask for a leaf as it was saved, but all of it where ranks stored parts."""
    spec = leaf.spec
    if spec.box is None:
        return leaf
    if spec.kind == "torch" and spec.dtype in DTYPES:
        return torch.empty(spec.shape, dtype=DTYPES[spec.dtype], device="meta")
    if spec.kind == "numpy" and "struct" not in spec.extra:
        return np.broadcast_to(np.empty((), np.dtype(spec.dtype)), spec.shape)
    return StoredLeaf(leaf.path, replace(spec, box=None))


def is_dtensor(value: object) -> bool:
    """Tell whether it is a DTensor."""
    cls: Any = type(value)
    return is_dtensor_class(cls)


@final
class Stateful(Section):
    """Anything with `state_dict` and `load_state_dict`, which alone knows what it can load.

    Args:
        thing: a scheduler, a scaler, a loader, ...
        keys: hold the names at the top of its state against those stored: for things that load with `dict.update`.
    """

    def __init__(self, thing: Any, *, keys: bool = False) -> None:
        self._thing, self._keys = thing, keys

    def tree(self) -> Any:
        """Give what is to be saved, as it is now."""
        return self._thing.state_dict()

    def check(self, stored: Any, path: str, found: Problems) -> None:
        """Report what would keep it from being loaded."""
        live = self._thing.state_dict()
        if isinstance(live, Mapping) != isinstance(stored, Mapping):
            found.differs(path, "type", type(live).__name__, type(stored).__name__)
        elif self._keys:
            names(path, live, stored, found, ignored=lambda name: str(name).startswith(_RELEASES))

    def load(self, stored: Any) -> None:
        """Load all of it, or nothing: what lacks a part of its state cannot go on."""
        found = Problems()
        self.check(stored, "", found)
        if not found.found:
            self._thing.load_state_dict(stored)


def is_stateful(thing: object) -> bool:
    """Tell whether a thing has `state_dict` and `load_state_dict`."""
    return callable(getattr(thing, "state_dict", None)) and callable(getattr(thing, "load_state_dict", None))


def names(
    path: str,
    live: Mapping[Any, Any],
    stored: Mapping[Any, Any],
    found: Problems,
    *,
    ignored: Callable[[Any], bool] = lambda name: False,
) -> list[Any]:
    """Report the names that only one of two has; give those that both have, in the order of the live one."""
    for name, value in live.items():
        if name not in stored and not ignored(name):
            found.missing(f"{path}/{name}", value)
    for name, value in stored.items():
        if name not in live and not ignored(name):
            found.unexpected(f"{path}/{name}", value)
    return [name for name in live if name in stored]


@final
class Group(Section):
    """Several sections under names, or in a list."""

    def __init__(self, sections: Mapping[str, Section] | list[Section]) -> None:
        self._listed = isinstance(sections, list)
        self._sections: dict[Any, Section] = dict(enumerate(sections)) if isinstance(sections, list) else {**sections}

    def tree(self) -> Any:
        """Give what is to be saved, as it is now."""
        trees = {name: section.tree() for name, section in self._sections.items()}
        return list(trees.values()) if self._listed else trees

    def check(self, stored: Any, path: str, found: Problems) -> None:
        """Report what would keep it from being loaded."""
        parts = self._parts(stored)
        if parts is None:
            found.differs(path, "type", "list" if self._listed else "dict", told(stored))
            return
        live = {name: None if name in parts else section.tree() for name, section in self._sections.items()}
        for name in names(path, live, parts, found):
            self._sections[name].check(parts[name], f"{path}/{name}", found)

    def asked(self, stored: Any) -> Any:
        """Ask for what each section asks for."""
        parts = self._parts(stored)
        if parts is None:
            return as_stored(stored)
        asked = {
            name: self._sections[name].asked(part) if name in self._sections else as_stored(part)
            for name, part in parts.items()
        }
        return list(asked.values()) if self._listed else asked

    def load(self, stored: Any) -> None:
        """Load what fits, in place."""
        parts = self._parts(stored) or {}
        for name, section in self._sections.items():
            if name in parts:
                section.load(parts[name])

    def own(self) -> Iterable[str]:
        """Give what each section has of its own."""
        return {place(name, path) for name, section in self._sections.items() for path in section.own()}

    def _parts(self, stored: Any) -> dict[Any, Any] | None:
        if self._listed:
            return dict(enumerate(stored)) if isinstance(stored, (list, tuple)) else None
        return dict(stored) if isinstance(stored, Mapping) else None


def grouped(value: Any, make: Callable[[Any], Section], *, lists: bool = False) -> Section:
    """Give the section of a thing, or of a dict (or list) of things."""
    if isinstance(value, Mapping):
        return Group({_name(name): make(thing) for name, thing in value.items()})
    if lists and isinstance(value, (list, tuple)):
        return Group([make(thing) for thing in value])
    return make(value)


def _name(name: object) -> str:
    if not isinstance(name, str) or not name:
        raise UsageError(f"a part of the training state is called {name!r}; names are texts")
    return name
