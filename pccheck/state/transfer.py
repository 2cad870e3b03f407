"""Copies the part that a stored box and a wanted box share, whatever piece of the stored bytes is at hand (floor 0:
imports boxes).

A stored box lies in a file in C order, cut into chunks at any byte. A run of consecutive elements of an array of n axes
is made of at most 2n - 1 boxes, so that any chunk is copied by a few strided copies, however narrow the wanted box is.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, final

import numpy as np

from pccheck.state.boxes import Box

_UNITS = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}


def slabs(shape: Sequence[int], first: int, end: int) -> Iterator[Box]:
    """Give the boxes that elements `first..end` (in C order) of an array make, in order; each is contiguous."""
    if first >= end:
        return
    if not shape:
        yield Box((), ())
        return
    row, rest = math.prod(shape[1:]), tuple(shape[1:])
    top, before = divmod(first, row)
    bottom, after = divmod(end, row)
    if top == bottom:
        yield from _under(top, slabs(rest, before, after))
        return
    if before:
        yield from _under(top, slabs(rest, before, row))
        top += 1
    if top < bottom:
        yield Box((top, *(0 for _ in rest)), (bottom - top, *rest))
    yield from _under(bottom, slabs(rest, 0, after))


def _under(index: int, boxes: Iterator[Box]) -> Iterator[Box]:
    return (Box((index, *box.offsets), (1, *box.sizes)) for box in boxes)


@final
class Transfer:
    """Copies what a stored box has of a wanted box. Thread-safe: pieces of the stored bytes may come at once.

    Args:
        stored: the box that was stored.
        wanted: the box that `destination` is, in C order; it must share elements with the stored one.
        itemsize: bytes per element, at least 1.
        destination: writable bytes.
        order: the axes in which the stored bytes are in C order; None = 0, 1, 2, ...
    """

    def __init__(
        self, stored: Box, wanted: Box, itemsize: int, destination: memoryview, order: Sequence[int] | None = None
    ) -> None:
        common = stored.common(wanted)
        assert common is not None, "there is something to copy"
        unit = math.gcd(itemsize, 8)
        unit_count = itemsize // unit
        axes = tuple(range(len(stored.sizes))) if order is None else tuple(order)
        source, whole = [stored.sizes[a] for a in axes], [wanted.sizes[a] for a in axes]
        start = [common.offsets[a] - stored.offsets[a] for a in axes]
        into = [common.offsets[a] - wanted.offsets[a] for a in axes]
        size = [common.sizes[a] for a in axes]
        self._unit = unit
        # An element is units along one more axis, of which all are always wanted.
        for numbers, n in ((source, unit_count), (whole, unit_count), (start, 0), (into, 0), (size, unit_count)):
            numbers.append(n)
        self._target: np.ndarray[Any, Any]
        if order is None:
            _merge_axes(source, whole, start, into, size)
            self._target = np.ndarray(whole, _UNITS[unit], destination)
        else:
            in_order: np.ndarray[Any, Any] = np.ndarray((*wanted.sizes, unit_count), _UNITS[unit], destination)
            self._target = in_order.transpose((*axes, len(axes)))
        self._source = tuple(source)
        self._common = Box(tuple(start), tuple(size))
        self._shift = tuple(to - at for to, at in zip(into, start, strict=True))

    def needs(self, first: int, end: int) -> bool:
        """Tell whether any of the stored bytes `first..end` is wanted."""
        unit = self._unit
        return any(slab.common(self._common) for slab in slabs(self._source, first // unit, (end + unit - 1) // unit))

    def take(self, first: int, data: memoryview) -> None:
        """Copy what is wanted of the stored bytes from `first` on, which `data` holds."""
        unit = self._unit
        have: np.ndarray[Any, Any] = np.frombuffer(data, _UNITS[unit])
        at = first // unit
        begin = at
        for slab in slabs(self._source, at, at + len(have)):
            part = have[at - begin : at - begin + slab.elements].reshape(slab.sizes)
            at += slab.elements
            common = slab.common(self._common)
            if common is None:
                continue
            where = tuple(
                slice(o + s, o + s + n) for o, s, n in zip(common.offsets, self._shift, common.sizes, strict=True)
            )
            inside = tuple(
                slice(o - b, o - b + n) for o, b, n in zip(common.offsets, slab.offsets, common.sizes, strict=True)
            )
            self._target[where] = part[inside]


def _merge_axes(source: list[int], whole: list[int], start: list[int], into: list[int], size: list[int]) -> None:
    """Make one axis of two wherever the inner one is wanted and stored whole: fewer and longer runs."""
    for axis in range(len(source) - 1, 0, -1):
        if source[axis] == whole[axis] == size[axis]:
            n = source[axis]
            for numbers in (source, whole, start, into, size):
                numbers[axis - 1] *= n
                del numbers[axis]


def overlapping(boxes: Sequence[Box]) -> tuple[int, int] | None:
    """Give two of these boxes (by their place in the list) that share an element; None if there are none.

    They are swept along the axis that tells most of them apart, so that a grid of n boxes costs about n * sqrt(n).
    """
    found = [i for i, box in enumerate(boxes) if box.elements]
    if len(found) < 2 or not boxes[found[0]].sizes:
        return (found[0], found[1]) if len(found) > 1 else None
    axis = max(range(len(boxes[found[0]].sizes)), key=lambda a: len({boxes[i].offsets[a] for i in found}))
    found.sort(key=lambda i: boxes[i].offsets[axis])
    open_: list[int] = []
    for i in found:
        start = boxes[i].offsets[axis]
        open_ = [j for j in open_ if boxes[j].ends[axis] > start]
        for j in open_:
            if boxes[i].common(boxes[j]) is not None:
                return min(i, j), max(i, j)
        open_.append(i)
    return None
