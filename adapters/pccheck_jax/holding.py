"""Keeps arrays of the CPU backend from being donated while they are read (imports jax, pccheck.holding).

What makes donation harmless is something exported from the memory: a buffer, and a DLPack capsule for the dtypes that
buffers have no name for, such as bfloat16. Both wait until the array is computed.
"""

from __future__ import annotations

import operator
import sys
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from pccheck import holding

_dtypes = operator.attrgetter("dtype")
_view, _did_copy = operator.itemgetter(0), operator.itemgetter(1)
_in_c_order = operator.attrgetter("flags.c_contiguous")
_public_capsule = operator.methodcaller("__dlpack__")
_exported: Any = memoryview


def unnamed(dtypes: Iterable[Any]) -> list[int]:
    """Give at which places there are dtypes that the buffer protocol has no name for."""
    return [n for n, dtype in enumerate(dtypes) if getattr(dtype, "isbuiltin", 0) != 1]


def hold(values: Sequence[Any], by_capsule: Sequence[int] | None = None) -> tuple[object, Sequence[int] | None]:
    """Give what keeps the memory of arrays of one device each as it is, and where it begins; None = ask them.

    Raises ValueError where one of them cannot be read in place, and what JAX raises for deleted ones.

    Args:
        values: the arrays, in host memory.
        by_capsule: what `unnamed` gives of their dtypes, where that is known.
    """
    if not values:
        return None, None
    if not holding.NATIVE:
        return _views(values), None
    if by_capsule is None:
        by_capsule = unnamed(map(_dtypes, values))
    try:
        return holding.hold(_exporters(values, by_capsule))  # type: ignore[return-value]
    except (BufferError, RuntimeError, TypeError, ValueError):  # a dtype that DLPack lacks; or NumPy says what is wrong
        return _views(values), None


def _exporters(values: Sequence[Any], by_capsule: Sequence[int]) -> Sequence[Any]:
    if not by_capsule:
        return values
    found = list(values)
    # What `__dlpack__` calls, after 3 us of Python for each array.
    quick = getattr(sys.modules.get(type(values[0]).__module__), "buffer_to_dlpack_managed_tensor", _public_capsule)
    for n in by_capsule:
        found[n] = quick(found[n])
    return found


def _views(values: Sequence[Any]) -> Sequence[object]:
    """Give a view of each; ValueError where that takes a copy, or is not in C order."""
    try:
        return list(map(_exported, values))
    except (BufferError, ValueError, TypeError):
        pass
    views = _numpy_views(values)
    if not all(map(_in_c_order, views)):
        raise ValueError("an array is not laid out in C order")
    return views


def _numpy_views(values: Sequence[Any]) -> list[Any]:
    quick = getattr(type(values[0]), "_single_device_array_to_np_array_did_copy", None)
    if quick is None:
        return list(map(np.asarray, values))
    found = list(map(quick, values))  # what np.asarray calls, after 3 us of Python for each array
    if any(map(_did_copy, found)):
        raise ValueError("an array has no memory that can be read in place")
    return list(map(_view, found))
