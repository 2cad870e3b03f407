"""Holds a live state dict against what a checkpoint has, before anything is read or touched (imports torch, pccheck).

Keys, shapes and dtypes must agree; Python values need not, since they are what is loaded. The state dict says where
tensors are to go and which parts of them (DTensor), the checkpoint has everything else.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, final

from torch import Tensor

from pccheck.errors import MismatchError
from pccheck.leaves import StoredLeaf
from pccheck_torch.leaves.dense import dtype_name
from pccheck_torch.outlines import Keys, replaced


@dataclass(frozen=True)
class Difference:
    """One place in which a checkpoint and a state dict differ.

    Args:
        path: where, as pccheck writes paths; for a place that only the state dict has, its keys joined by "/".
        problem: "missing" in the checkpoint, "unused" of it, or another "kind" (tensor or not), "shape", "dtype".
        expected: what the state dict has; "" where it has nothing.
        found: what the checkpoint has; "" where it has nothing.
    """

    path: str
    problem: Literal["missing", "unused", "kind", "shape", "dtype"]
    expected: str = ""
    found: str = ""

    def __str__(self) -> str:
        if self.problem == "missing":
            return f"{self.path}: not in the checkpoint; the state dict has {self.expected}"
        if self.problem == "unused":
            return f"{self.path}: the checkpoint has {self.found}, the state dict has nothing there"
        return f"{self.path}: {self.problem} is {self.found} in the checkpoint, {self.expected} in the state dict"


class StateDictError(MismatchError):
    """The checkpoint does not fit the state dict: `mismatches` lists every place that differs. Nothing was loaded."""

    def __init__(self, step: int, differences: Sequence[Difference]) -> None:
        super().__init__(differences)
        lines = "\n".join(f"  {d}" for d in differences[:1000])
        self.args = (
            f"the checkpoint of step {step} does not fit the state dict in {len(differences)} place(s); nothing was "
            f"loaded:\n{lines}\n"
            "Give a state dict with the same keys (an optimizer's has state once it was stepped, or from "
            "torch.distributed.checkpoint.state_dict.get_state_dict); or LoadPlanner(strict=False) to leave unused "
            "keys of the checkpoint, allow_partial_load=True to keep what it lacks.",
        )


Get = Callable[[Keys], Any]
Make = Callable[[Get], Any]


@final
@dataclass
class Fit:
    """What to read, and how to load it.

    Args:
        tensors: by the keys in the checkpoint's tree, the live tensors to load into.
        as_saved: keys in that tree of other leaves, which come back as they were saved.
        differences: every place that differs.
        load: puts what was read into the state dict; `load(get)` asks `get(keys)` for values other than live tensors.
    """

    tensors: dict[Keys, Tensor] = field(default_factory=dict)
    as_saved: dict[Keys, StoredLeaf] = field(default_factory=dict)
    differences: list[Difference] = field(default_factory=list)
    load: Make = field(default=lambda get: None)


def fit(target: dict[str, Any], stored: Any) -> Fit:
    """Hold a state dict against a checkpoint's outline."""
    fitting = _Fitting()
    fitting.found.load = fitting.node(target, stored, (), "")
    return fitting.found


@final
class _Fitting:
    def __init__(self) -> None:
        self.found = Fit()

    def node(self, target: Any, stored: Any, keys: Keys, path: str) -> Make:
        if isinstance(target, Tensor):
            return self._tensor(target, stored, keys, path)
        if isinstance(target, dict):
            if isinstance(stored, Mapping):
                return self._mapping(target, stored, keys, path)
            return self._kinds(target, stored, path)
        if names := _names_of(target):
            return self._fields(target, names, stored, keys, path)
        if isinstance(target, (list, tuple)) and isinstance(stored, (list, tuple)):
            if not (_is_plain(target) and _is_plain(stored)):
                return self._sequence(target, stored, keys, path)
        elif isinstance(target, (list, tuple)) and not _is_plain(target):
            return self._kinds(target, stored, path)
        return self._value(stored, keys)

    def _tensor(self, target: Tensor, stored: Any, keys: Keys, path: str) -> Make:
        if not isinstance(stored, StoredLeaf) or not is_array(stored):
            return self._kinds(target, stored, path)
        spec, dtype = stored.spec, dtype_name(target.dtype)
        if spec.shape != tuple(target.shape):
            self._differs(path, "shape", str(tuple(target.shape)), str(spec.shape))
        elif spec.kind == "torch" and spec.dtype != dtype:
            self._differs(path, "dtype", dtype, spec.dtype)
        else:
            self.found.tensors[keys] = target
            if target.device.type == "meta":
                return lambda get: get(keys)
        return lambda get: target

    def _mapping(self, target: dict[Any, Any], stored: Mapping[Any, Any], keys: Keys, path: str) -> Make:
        left = {_typed(key): key for key in stored}
        parts: list[tuple[Any, Make]] = []
        for key, child in target.items():
            there = left.pop(_typed(key), _NOTHING)
            if there is _NOTHING and type(key) is int and str(key) not in target:
                there = left.pop(_typed(str(key)), _NOTHING)  # DCP's own planners save keys as text
            below = _join(path, key)
            if there is _NOTHING:
                self._missing(child, below)
            else:
                parts.append((key, self.node(child, stored[there], (*keys, there), below)))
        for key in left.values():
            self._unused(stored[key], _join(path, key))

        def make(get: Get) -> Any:
            for key, part in parts:
                target[key] = part(get)
            return target

        return make

    def _sequence(self, target: Any, stored: Sequence[Any], keys: Keys, path: str) -> Make:
        pairs = list(zip(target, stored, strict=False))
        parts = [self.node(child, there, (*keys, i), _join(path, i)) for i, (child, there) in enumerate(pairs)]
        for i in range(len(pairs), len(target)):
            self._missing(target[i], _join(path, i))
        for i in range(len(pairs), len(stored)):
            self._unused(stored[i], _join(path, i))

        def make(get: Get) -> Any:
            values = [part(get) for part in parts] + list(target[len(parts) :])
            if isinstance(target, list):
                target[:] = values
                return target
            return type(target)(values)

        return make

    def _fields(self, target: Any, names: Sequence[str], stored: Any, keys: Keys, path: str) -> Make:
        """A namedtuple or dataclass: the checkpoint has its fields, the class is that of the target."""
        if list(names) != list(_names_of(stored)):
            return self._kinds(target, stored, path)
        parts = [
            (name, self.node(getattr(target, name, None), stored[i], (*keys, i), _join(path, name)))
            for i, name in enumerate(names)
        ]

        def make(get: Get) -> Any:
            values = {name: part(get) for name, part in parts}
            if isinstance(target, tuple):
                return type(target)(**values)
            made = copy.copy(target)
            for name, value in values.items():
                object.__setattr__(made, name, value)
            return made

        return make

    def _value(self, stored: Any, keys: Keys) -> Make:
        """A place without tensors: what the checkpoint has takes it, leaves that must be read and all."""
        for below, leaf in leaves_of(stored, keys):
            self.found.as_saved[below] = leaf
        return lambda get: filled(stored, keys, get)

    # -- differences ------------------------------------------------------------------------------------------------

    def _kinds(self, target: Any, stored: Any, path: str) -> Make:
        self._differs(path, "kind", _told(target), _told(stored))
        return lambda get: target

    def _differs(self, path: str, problem: Any, expected: str, found: str) -> None:
        self.found.differences.append(Difference(path, problem, expected, found))

    def _missing(self, target: Any, path: str) -> None:
        for below, value in _places(target, path):
            self._differs(below, "missing", _told(value), "")

    def _unused(self, stored: Any, path: str) -> None:
        for below, value in _places(stored, path):
            self._differs(below, "unused", "", _told(value))


_NOTHING: Any = object()


def leaves_of(stored: Any, keys: Keys) -> list[tuple[Keys, StoredLeaf]]:
    """Give the leaves in a part of an outline, each with its keys."""
    if isinstance(stored, StoredLeaf):
        return [(keys, stored)]
    return [found for key, child in _children(stored) for found in leaves_of(child, (*keys, key))]


def filled(stored: Any, keys: Keys, get: Get) -> Any:
    """Give a part of an outline with values in place of its leaves; containers are new ones."""
    return replaced(stored, lambda below, _: get(below), keys)


def _children(value: Any) -> list[tuple[Any, Any]]:
    if isinstance(value, Mapping):
        return list(value.items())
    return list(enumerate(value)) if isinstance(value, (list, tuple)) else []


def _is_plain(value: Any) -> bool:
    """Tell whether a list or tuple is one value for DCP: no tensors and no dicts in it."""
    if isinstance(value, (Tensor, Mapping)) or (isinstance(value, StoredLeaf) and is_array(value)):
        return False
    return not isinstance(value, (list, tuple)) or all(map(_is_plain, value))


def is_array(leaf: StoredLeaf) -> bool:
    """Tell whether a stored leaf is an array, and not a long text or a small thing of its framework."""
    return leaf.spec.kind not in ("str", "bytes") and "value" not in leaf.spec.extra


def _typed(key: Any) -> tuple[type, Any]:
    return type(key), key  # 1, 1.0 and True are equal, and three keys


def _names_of(value: Any) -> Sequence[str]:
    """Give the field names of a namedtuple or dataclass; none of anything else."""
    if isinstance(value, tuple):
        return getattr(value, "_fields", ())
    if dataclasses.is_dataclass(value) and not isinstance(value, (type, StoredLeaf)):
        return [field.name for field in dataclasses.fields(value)]
    return ()


def _join(path: str, key: Any) -> str:
    text = f'"{key}"' if isinstance(key, str) and (not key or key.lstrip("-").isdigit()) else str(key)
    return f"{path}/{text}" if path else text


def _places(value: Any, path: str) -> list[tuple[str, Any]]:
    children = [] if isinstance(value, (list, tuple)) and _is_plain(value) else _children(value)
    return [place for key, child in children for place in _places(child, _join(path, key))] or [(path, value)]


def _told(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"{dtype_name(value.dtype)}{list(value.shape)}"
    if isinstance(value, StoredLeaf):
        return f"{value.spec.dtype}{list(value.spec.shape)}" if is_array(value) else value.spec.kind
    return f"{value!r:.40}" if not isinstance(value, (Mapping, list, tuple)) or not value else type(value).__name__
