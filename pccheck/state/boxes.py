"""Parts of global arrays: boxes, what they share, and how ranks divide what all have (floor 0: imports nothing)."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Box:
    """An axis-parallel part of a global array: elements `offsets[d]..offsets[d] + sizes[d]` along each axis d.

    Args:
        offsets: one per axis, from 0.
        sizes: one per axis; a box with a size of 0 is empty.
    """

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @classmethod
    def whole(cls, shape: Sequence[int]) -> Box:
        """Give the box that is all of an array of this shape."""
        return cls((0,) * len(shape), tuple(shape))

    @property
    def elements(self) -> int:
        """How many elements lie in it."""
        return math.prod(self.sizes)

    def fits(self, shape: Sequence[int]) -> bool:
        """Tell whether it lies within an array of this shape."""
        same = len(self.offsets) == len(self.sizes) == len(shape)
        return same and all(
            o >= 0 and n >= 0 and o + n <= limit for o, n, limit in zip(self.offsets, self.sizes, shape, strict=True)
        )

    def common(self, other: Box) -> Box | None:
        """Give the box of the elements that both have; None if there are none."""
        offsets = tuple(map(max, self.offsets, other.offsets))
        ends = map(min, self.ends, other.ends)
        sizes = tuple(end - start for start, end in zip(offsets, ends, strict=True))
        return Box(offsets, sizes) if all(n > 0 for n in sizes) else None

    @property
    def ends(self) -> tuple[int, ...]:
        """Where it ends along each axis."""
        return tuple(o + n for o, n in zip(self.offsets, self.sizes, strict=True))


def rows(box: Box, first: int, end: int) -> Box:
    """Give rows `first..end` (along axis 0) of a box of at least one axis."""
    return Box((box.offsets[0] + first, *box.offsets[1:]), (end - first, *box.sizes[1:]))


def part_of(box: Box, index: int, count: int) -> Box:
    """Give part `index` of `count` equal parts of a box, cut along axis 0; without rows to cut, part 0 is all of it.

    The parts of all indices cover the box, each element once (FastPersist, arXiv 2406.13768, section 4.2: a static
    partition, for which ranks need not talk).
    """
    if not box.sizes or box.sizes[0] < 2:
        return box if index == 0 else Box(box.offsets, (0,) * len(box.sizes)) if box.sizes else box
    n = box.sizes[0]
    return rows(box, n * index // count, n * (index + 1) // count)


def divide(shapes: Sequence[tuple[Sequence[int], int]], world: int) -> list[list[Box | None]]:
    """Divide arrays that all ranks have among the ranks, so that each writes nearly the same number of bytes.

    The arrays are thought to lie one after the other; rank r gets the r-th of `world` equal shares of their bytes, with
    borders moved to the nearest row (FastPersist, arXiv 2406.13768, section 4.2). Every rank computes the same.

    Args:
        shapes: shape and bytes of each array.
        world: number of ranks.

    Returns:
        For each rank the box of each array that it writes; None = nothing of it.
    """
    total = sum(nbytes for _, nbytes in shapes)
    borders = [total * r // world for r in range(world + 1)]
    parts: list[list[Box | None]] = [[] for _ in range(world)]
    start = 0
    for shape, nbytes in shapes:
        count = shape[0] if shape else 1
        cuts = [_row_at(border - start, nbytes, count) for border in borders]
        cuts[0], cuts[-1] = 0, count
        for rank, mine in enumerate(parts):
            first, end = cuts[rank], cuts[rank + 1]
            if not nbytes:
                mine.append(Box.whole(shape) if rank == 0 else None)
            elif first == end:
                mine.append(None)
            else:
                mine.append(rows(Box.whole(shape), first, end) if shape else Box.whole(shape))
        start += nbytes
    return parts


def _row_at(byte: int, nbytes: int, count: int) -> int:
    """Give the row border nearest to a byte of an array."""
    if not nbytes:
        return 0
    return min(max((2 * byte * count + nbytes) // (2 * nbytes), 0), count)


def holes_and_overlaps(shape: Sequence[int], boxes: Iterable[Box]) -> tuple[bool, bool]:
    """Tell whether elements of an array are in none of these boxes, and whether some are in several.

    Boxes are compared in pairs, so that the cost is quadratic in their number, and independent of the array's size.
    """
    found = [box for box in boxes if box.elements]
    overlaps = any(a.common(b) for i, a in enumerate(found) for b in found[:i])
    covered = sum(box.elements for box in found)
    if not overlaps:
        return covered < math.prod(shape), False
    left = [Box.whole(shape)]
    for box in found:
        left = [rest for part in left for rest in _without(part, box)]
    return any(part.elements for part in left), True


def _without(box: Box, hole: Box) -> list[Box]:
    """Give boxes that hold what is left of a box when another is cut out."""
    common = box.common(hole)
    if common is None:
        return [box]
    rest, offsets, sizes = [], list(box.offsets), list(box.sizes)
    for axis in range(len(sizes)):
        before = common.offsets[axis] - offsets[axis]
        after = offsets[axis] + sizes[axis] - common.ends[axis]
        for start, length in ((offsets[axis], before), (common.ends[axis], after)):
            if length > 0:
                rest.append(
                    Box((*offsets[:axis], start, *offsets[axis + 1 :]), (*sizes[:axis], length, *sizes[axis + 1 :]))
                )
        offsets[axis], sizes[axis] = common.offsets[axis], common.sizes[axis]
    return rest


def is_dense(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Tell whether strides, in elements, put the elements of this shape side by side, each at its own place."""
    expected = 1
    for stride, n in sorted((s, n) for s, n in zip(strides, shape, strict=True) if n != 1):
        if stride != expected:
            return False
        expected *= n
    return True
