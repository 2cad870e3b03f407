"""Tells whether two states are the same to the last bit, and where not (beside: imports floor 0)."""

from __future__ import annotations

import collections
import dataclasses
import struct
from typing import Any

import numpy as np

from pccheck.state import paths
from pccheck.state.tree import type_name


def same(a: object, b: object, *, by_field: bool = False) -> bool:
    """Tell whether two states are the same: types, order of keys, dtypes, shapes, and every bit of every number.

    Args:
        a: one state.
        b: another.
        by_field: let a namedtuple or dataclass equal a namedtuple of the same name and fields, or a dict of these
            fields, as one restored without `like` is.
    """
    return difference(a, b, by_field=by_field) is None


def difference(a: Any, b: Any, *, by_field: bool = False) -> str | None:
    """Give the first place in which two states differ, and how; None if they are the same."""
    return _Comparison(by_field).differs(a, b, "")


class _Comparison:
    def __init__(self, by_field: bool) -> None:
        self.by_field = by_field

    def differs(self, a: Any, b: Any, path: str) -> str | None:
        if self.by_field and _is_record(a) and type(a) is not type(b):
            return self._by_field(a, b, path)
        if type(a) is not type(b):
            return f"{path or 'root'}: {type_name(a)} is not {type_name(b)}"
        if isinstance(a, dict):
            return self._mappings(a, b, path)
        if _is_record(a):
            return self._rows(_values(a), _values(b), path)
        if type(a) in (list, tuple):
            return self._rows(a, b, path)
        told = _told(a), _told(b)
        return None if told[0] == told[1] else f"{path or 'root'}: {told[0]!r:.200} is not {told[1]!r:.200}"

    def _mappings(self, a: Any, b: Any, path: str) -> str | None:
        keys = [list(map(_told, m)) for m in (a, b)]
        if keys[0] != keys[1]:
            return f"{path or 'root'}: keys {list(a)!r:.200} are not {list(b)!r:.200}"
        if isinstance(a, collections.defaultdict) and a.default_factory is not b.default_factory:
            return f"{path or 'root'}: default_factory {a.default_factory} is not {b.default_factory}"
        for (key, x), y in zip(a.items(), b.values(), strict=True):
            found = self.differs(x, y, f"{path}/{paths.component(key)}")
            if found:
                return found
        if isinstance(a, collections.OrderedDict):
            return self.differs(vars(a), vars(b), f"{path}/@")
        return None

    def _rows(self, a: Any, b: Any, path: str) -> str | None:
        if len(a) != len(b):
            return f"{path or 'root'}: {len(a)} items are not {len(b)}"
        found = (self.differs(x, y, f"{path}/{i}") for i, (x, y) in enumerate(zip(a, b, strict=True)))
        return next((f for f in found if f), None)

    def _by_field(self, a: Any, b: Any, path: str) -> str | None:
        names = _names(a)
        if isinstance(b, dict):
            other = tuple(b), tuple(b.values()), type(a).__name__
        elif _is_record(b):
            other = _names(b), tuple(_values(b)), type(b).__name__
        else:
            return f"{path or 'root'}: {type_name(b)} has no fields {names}"
        if other[0] != names or other[2] != type(a).__name__:
            return f"{path or 'root'}: {type_name(a)}{names} is not {other[2]}{other[0]}"
        return self._rows(_values(a), other[1], path)


def _is_record(value: object) -> bool:
    named = isinstance(value, tuple) and hasattr(value, "_fields")
    return named or (dataclasses.is_dataclass(value) and not isinstance(value, type))


def _names(value: Any) -> tuple[str, ...]:
    if isinstance(value, tuple):
        return tuple(getattr(value, "_fields", ()))
    return tuple(f.name for f in dataclasses.fields(value))


def _values(value: Any) -> list[Any]:
    return list(value) if isinstance(value, tuple) else [getattr(value, name) for name in _names(value)]


def _told(value: Any) -> Any:
    """Give something of built-in types that is equal exactly for values that are the same."""
    if isinstance(value, (np.ndarray, np.generic)):
        return (type_name(value), repr(value.dtype), value.shape, _bits(np.array(value, order="C")))
    if isinstance(value, float):
        return (type_name(value), struct.pack(">d", value))
    if isinstance(value, complex):
        return (type_name(value), struct.pack(">dd", value.real, value.imag))
    if type(value) is tuple:
        return ("tuple", *map(_told, value))
    if type_name(value).split(".")[0] == "torch" and hasattr(value, "untyped_storage"):
        return _told_of_tensor(value)
    return (type_name(value), value)


def _bits(array: np.ndarray[Any, Any]) -> bytes:
    if array.dtype in (np.longdouble, np.clongdouble) and np.finfo(np.longdouble).nmant == 63:
        # 80 bits, and 48 of whatever was there
        return np.frombuffer(array.tobytes(), np.uint8).reshape(-1, 16)[:, :10].tobytes()
    return array.tobytes()


def _told_of_tensor(value: Any) -> Any:
    """By methods alone, as the core imports no framework; of elements as bytes, so that every dtype can be compared."""
    whole = value.detach().resolve_conj().resolve_neg()
    size = value.element_size()
    storage = bytes(whole.untyped_storage())
    places = np.zeros(tuple(whole.shape), np.int64) + whole.storage_offset()
    for axis, stride in enumerate(whole.stride()):
        shape = [1] * places.ndim
        shape[axis] = places.shape[axis]
        places += (np.arange(places.shape[axis]) * stride).reshape(shape)
    data = np.frombuffer(storage, np.uint8)
    found = data[places.reshape(-1, 1) * size + np.arange(size)].tobytes() if places.size else b""
    return (type_name(value), str(value.dtype), tuple(value.shape), str(value.device), value.requires_grad, found)
