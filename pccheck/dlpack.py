"""Asks many arrays at once where they lie, and whether they are as they were (floor 1: imports the extension).

Arrays that are saved again and again have been driven out of the processor's caches meanwhile: what costs is not the
question but the first look at each of them, so that all is asked in one native call, or without a look. DLPack's C
interface, `__dlpack_c_exchange_api__` of an array class, tells device, dtype, shape, strides and address of an array
without a Python object for any of these.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any, final

import numpy as np
from numpy.typing import NDArray

try:
    from pccheck._native import check_arrays as _check
    from pccheck._native import contents as _contents
    from pccheck._native import describe_arrays as _describe
except ImportError:  # not built: also where `_native` is but a checkout's folder of C files
    NATIVE = False
else:
    NATIVE = True


@final
class Description:
    """What DLPack tells of some arrays, but for their addresses. Immutable; keeps none of them alive.

    Two dtypes of the same size that DLPack has one name for are the same to it (torch's uint4 and uint8).

    Args:
        cls: the class of the arrays, or one that all of their classes inherit from.
        questions: what was asked beside.
        told: what `describe_arrays` gave.
        looks: of each array, an address as `described` takes it.
    """

    __slots__ = ("_cls", "_looks", "_questions", "_told")

    def __init__(self, cls: type, questions: tuple[str, ...], told: bytes, looks: bytes) -> None:
        self._cls, self._questions, self._told, self._looks = cls, questions, told, looks

    def addresses(self, arrays: Sequence[Any]) -> NDArray[np.uint64] | None:
        """Give where the first element of each array lies, 0 for those without memory; None if any has changed.

        Raises TypeError for what is no such array, and what the class raises for one that DLPack cannot describe.
        """
        found = np.empty(len(arrays), np.uint64)
        return found if _check(self._cls, arrays, self._told, found.data, self._questions, self._looks) < 0 else None


def described(
    cls: type, arrays: Sequence[Any], questions: tuple[str, ...] = (), looks_at: Callable[[Any], int] | None = None
) -> Description | None:
    """Describe arrays; None where that takes asking them one by one.

    Args:
        cls: the class of the arrays, or one that all of their classes inherit from.
        arrays: what is described.
        questions: asked along with the rest: names of attributes, and of native methods without arguments, of `cls`
            that are True or False.
        looks_at: gives an address that answering for an array will look at, as long as it is as it is now: so that it
            is fetched early. Whatever it is, it changes no answer.

    So it is without the native extension, for a class that has no such interface, and where one of the arrays cannot
    be described: it has no strides, or a dtype or device that DLPack does not know.
    """
    if not NATIVE:
        return None
    try:
        told = _describe(cls, arrays, questions)
        looks = array("Q", map(looks_at, arrays)) if looks_at else array("Q")
        return Description(cls, questions, told, looks.tobytes())
    except (AttributeError, BufferError, RuntimeError, TypeError, ValueError):
        return None


def contents(containers: Sequence[list[Any] | tuple[Any, ...] | dict[Any, Any]]) -> bytes:
    """Give what is equal for the same objects in the same containers in the same order: items, or keys and values.

    It is by identity, which says something only about objects that are alive. Dicts that are of a subclass are asked
    for their items.
    """
    if NATIVE:
        try:
            return _contents(containers)
        except TypeError:  # an OrderedDict has an order of its own
            pass
    ids: list[int] = []
    for container in containers:
        items = chain.from_iterable(container.items()) if isinstance(container, dict) else container
        ids += (len(container), *map(id, items))
    return array("Q", ids).tobytes()
