"""NumPy dtypes as text and JSON, and the names that all frameworks share (floor 1: imports errors)."""

from __future__ import annotations

import re
from typing import Any

import ml_dtypes
import numpy as np

from pccheck.errors import FormatError

# What may be given to np.dtype(): its own parser also takes commas, "O" and names of classes.
_STR = re.compile(r"[<>|](?:[biufc][0-9]{1,2}|[SUV][0-9]{1,9}|[mM]8(?:\[[0-9]{0,9}[a-zA-Zμ]{1,7}\])?)")
_MAX_NESTING = 16
_MAX_FIELDS = 10_000


def _ml_dtypes() -> dict[str, np.dtype[Any]]:
    found = {}
    for name, value in vars(ml_dtypes).items():
        if isinstance(value, type) and issubclass(value, np.generic):
            found[np.dtype(value).name] = np.dtype(value)
            found.setdefault(name, np.dtype(value))
    return found


_ML = _ml_dtypes()
_SHARED: tuple[str, ...] = ("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")
_SHARED += ("float16", "float32", "float64", "complex64", "complex128")
_COMMON = {name: np.dtype(name) for name in _SHARED} | _ML


def named(name: str) -> np.dtype[Any] | None:
    """Give the dtype, in native byte order, of a name that all frameworks share ("float32", "bfloat16"), or None."""
    return _COMMON.get(name)


def encode(dtype: np.dtype[Any]) -> tuple[str, dict[str, Any]]:
    """Give a dtype as text, and what a structured one needs besides; ValueError says why one cannot be stored."""
    if dtype.hasobject:
        raise ValueError("its elements are Python objects; store a list, or an array of numbers")
    if dtype.names is not None:
        return "struct", {"struct": _fields(dtype, 0)}
    return _name(dtype), {}


def decode(name: str, extra: dict[str, Any]) -> np.dtype[Any]:
    """Give the dtype back; raises FormatError for anything that `encode` does not write."""
    if name != "struct":
        return _simple(name)
    return _structured(extra.get("struct"), 0)


def common_name(name: str) -> str | None:
    """Give the shared name of a dtype that `encode` wrote; None for one that NumPy alone has."""
    if name in _ML:
        return name
    try:
        dtype = _simple(name)
    except FormatError:
        return None
    return dtype.name if dtype.isnative and dtype.name in _COMMON else None


def _name(dtype: np.dtype[Any]) -> str:
    if dtype.name in _ML and _ML[dtype.name] == dtype:  # `None == float64` is True in NumPy
        return dtype.name
    if not _STR.fullmatch(dtype.str) or np.dtype(dtype.str) != dtype:
        raise ValueError(f"dtype {dtype} is none that pccheck knows; view or convert it")
    return dtype.str


def _simple(name: str) -> np.dtype[Any]:
    if name in _ML:
        return _ML[name]
    if not _STR.fullmatch(name):
        raise FormatError(f"{name[:80]!r} is no dtype")
    try:
        return np.dtype(name)
    except (TypeError, ValueError, OverflowError) as error:
        raise FormatError(f"{name[:80]!r} is no dtype here: {error}") from None


def _fields(dtype: np.dtype[Any], depth: int) -> Any:
    """A simple dtype is its name, a subarray [dtype, shape], a structured one an object."""
    if depth == _MAX_NESTING:
        raise ValueError(f"its dtype is nested more than {_MAX_NESTING} deep")
    if dtype.subdtype is not None:
        base, shape = dtype.subdtype
        return [_fields(base, depth + 1), list(shape)]
    if dtype.names is None or dtype.fields is None:
        return _name(dtype)
    if any(len(dtype.fields[n]) > 2 for n in dtype.names):
        raise ValueError("its dtype has titles; they cannot be stored")
    if len(dtype.names) > _MAX_FIELDS:
        raise ValueError(f"its dtype has more than {_MAX_FIELDS} fields")
    for name in dtype.names:
        try:
            name.encode()
        except UnicodeEncodeError:
            raise ValueError(f"its field {name!r} is no Unicode text") from None
    return {
        "names": list(dtype.names),
        "formats": [_fields(dtype.fields[n][0], depth + 1) for n in dtype.names],
        "offsets": [dtype.fields[n][1] for n in dtype.names],
        "itemsize": dtype.itemsize,
        "aligned": dtype.isalignedstruct,
    }


def _structured(fields: Any, depth: int) -> np.dtype[Any]:
    if depth == _MAX_NESTING:
        raise FormatError("a dtype is nested too deeply")
    if isinstance(fields, str):
        return _simple(fields)
    try:
        if isinstance(fields, list):
            base, shape = fields
            return np.dtype((_structured(base, depth + 1), tuple(map(_whole, shape))))
        return np.dtype(
            {
                "names": [str(n) for n in fields["names"]],
                "formats": [_structured(f, depth + 1) for f in fields["formats"]],
                "offsets": list(map(_whole, fields["offsets"])),
                "itemsize": _whole(fields["itemsize"]),
            },
            align=fields["aligned"] is True,
        )
    except (TypeError, ValueError, KeyError, OverflowError, AttributeError) as error:
        raise FormatError(f"{fields!r:.200} is no structured dtype: {error}") from None


def _whole(number: Any) -> int:
    if type(number) is not int or not 0 <= number < 1 << 31:
        raise FormatError(f"{number!r:.80} is no length")
    return number
