"""Tensor subclasses that are stored by their parts, as their user registered them (imports torch, pccheck.errors).

A file names a class by its registered name only. Nothing is imported for it: a class that this program has not
registered is an error that says so.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from pccheck.errors import FormatError, UnsupportedLeafError, UsageError

T = TypeVar("T", bound=Tensor)
Flatten = Callable[[Any], tuple[Mapping[str, Tensor], Any]]
Unflatten = Callable[[dict[str, Tensor], Any], Any]
MAX_DEPTH = 20


@dataclass(frozen=True)
class Registered:
    """How tensors of one class are taken apart and made again."""

    cls: type[Tensor]
    name: str
    flatten: Flatten
    unflatten: Callable[[dict[str, Tensor], Any, tuple[int, ...], tuple[int, ...]], Any]


_lock = threading.Lock()
_by_class: dict[type, Registered] = {}
_by_name: dict[str, Registered] = {}


def register(cls: type[T], flatten: Callable[[T], tuple[Mapping[str, Tensor], Any]], unflatten: Unflatten) -> None:
    """Have tensors of a subclass stored by their parts, in this program; the same must be registered to restore them.

    Args:
        cls: the class, exactly; tensors of its subclasses are refused until they are registered, too.
        flatten: gives dense tensors by name, and a context of None, bool, int, float, str, list, tuple, dict, and
            torch's dtype, device and Size.
        unflatten: makes the tensor of those parts and that context; whatever a file holds comes here, so it must check.

    Raises:
        UsageError: it is no subclass of Tensor, or it, or another of the same name, is registered already.

    Thread-safe.
    """
    _enter(cls, flatten, lambda parts, context, size, stride: unflatten(parts, context))


def register_flattenable(cls: type[T]) -> None:
    """Have tensors of a subclass stored as its own `__tensor_flatten__` and `__tensor_unflatten__` say (torchao).

    Raises:
        UsageError: it lacks these methods; and as `register` does.

    Thread-safe.
    """
    take_apart, make = getattr(cls, "__tensor_flatten__", None), getattr(cls, "__tensor_unflatten__", None)
    if take_apart is None or make is None:
        raise UsageError(f"{cls.__qualname__} has no __tensor_flatten__ and __tensor_unflatten__; use register()")

    def flatten(value: Any) -> tuple[Mapping[str, Tensor], Any]:
        names, context = take_apart(value)
        return {name: getattr(value, name) for name in names}, context

    def unflatten(parts: dict[str, Tensor], context: Any, size: tuple[int, ...], stride: tuple[int, ...]) -> Any:
        return make(parts, context, torch.Size(size), stride)

    _enter(cls, flatten, unflatten)


def _enter(cls: type[Tensor], flatten: Flatten, unflatten: Callable[..., Any]) -> None:
    if not (isinstance(cls, type) and issubclass(cls, Tensor)) or cls in (Tensor, torch.nn.Parameter):
        raise UsageError(f"{cls!r} is no subclass of torch.Tensor")
    if not callable(flatten) or not callable(unflatten):
        raise UsageError("flatten and unflatten must be functions")
    name = f"{cls.__module__}.{cls.__qualname__}"
    with _lock:
        if name in _by_name:
            raise UsageError(f"{name} is registered already")
        _by_class[cls] = _by_name[name] = Registered(cls, name, flatten, unflatten)


def of_class(cls: type) -> Registered | None:
    """Give how tensors of exactly this class are stored; None if it was not registered."""
    return _by_class.get(cls)


def of_name(name: object) -> Registered:
    """Give how the class of this name is made; UnsupportedLeafError where this program has not registered it."""
    found = _by_name.get(name) if isinstance(name, str) else None
    if found is None:
        raise UnsupportedLeafError(
            "", str(name)[:200],
            "this class is not registered here; call pccheck_torch.register() for it, as the program that saved it did",
        )  # fmt: skip
    return found


# -- contexts as JSON ------------------------------------------------------------------------------------------------


def encode(value: Any, depth: int = 0) -> Any:
    """Give a context as JSON from which `decode` makes the same; UsageError for what it cannot hold."""
    kind = type(value)
    if depth > MAX_DEPTH:
        raise UsageError("its context is nested too deeply")
    if kind is float:
        return value if math.isfinite(value) else {"float": repr(value)}
    if kind is int:
        return value if abs(value) < 1 << 53 else {"int": str(value)}
    if value is None or kind in (bool, str):
        return value
    if kind is list:
        return [encode(v, depth + 1) for v in value]
    if kind in (tuple, torch.Size):
        return {"tuple" if kind is tuple else "size": [encode(v, depth + 1) for v in value]}
    if kind is dict:
        return {"dict": [[encode(k, depth + 1), encode(v, depth + 1)] for k, v in value.items()]}
    if kind in (torch.dtype, torch.device):
        return {kind.__name__: str(value)}
    raise UsageError(f"its context holds a {kind.__module__}.{kind.__qualname__}")


def decode(told: Any, depth: int = 0) -> Any:
    """Undo `encode`; FormatError for what it never gives."""
    if depth <= MAX_DEPTH:
        if told is None or type(told) in (bool, int, float, str):
            return told
        if type(told) is list:
            return [decode(v, depth + 1) for v in told]
        if type(told) is dict and len(told) == 1:
            ((tag, inside),) = told.items()
            make = _MAKERS.get(tag)
            try:
                if make is not None:
                    return make(inside, depth + 1)
            except (TypeError, ValueError, RuntimeError, KeyError, AttributeError):
                pass
    raise FormatError(f"{told!r:.80} is no context of a registered class")


def _dtype(told: str) -> torch.dtype:
    found = getattr(torch, told.removeprefix("torch."), None)
    if not isinstance(found, torch.dtype):
        raise ValueError(told)
    return found


_MAKERS: dict[str, Callable[[Any, int], Any]] = {
    "float": lambda told, depth: {"inf": math.inf, "-inf": -math.inf, "nan": math.nan}[str(told)],
    "int": lambda told, depth: int(str(told)[:1000]),
    "tuple": lambda told, depth: tuple(decode(v, depth) for v in told),
    "size": lambda told, depth: torch.Size([decode(v, depth) for v in told]),
    "dict": lambda told, depth: {decode(k, depth): decode(v, depth) for k, v in told},
    "dtype": lambda told, depth: _dtype(told),
    "device": lambda told, depth: torch.device(told),
}
