"""Boxes: how ranks divide arrays, and what a set of boxes leaves out or has twice, against masks of every element."""

from __future__ import annotations

import math

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from pccheck.state.boxes import Box, divide, holes_and_overlaps, part_of, rows

quick = settings(deadline=None, derandomize=True, database=None)
SHAPES = st.lists(st.integers(0, 6), max_size=4).map(tuple)
ITEMSIZES = st.sampled_from([1, 2, 4, 8])


@st.composite
def boxes_in(draw, shape):
    offsets = [draw(st.integers(0, n)) for n in shape]
    sizes = [draw(st.integers(0, n - o)) for o, n in zip(offsets, shape, strict=True)]
    return Box(tuple(offsets), tuple(sizes))


@st.composite
def shapes_and_boxes(draw):
    shape = draw(st.lists(st.integers(1, 5), max_size=3).map(tuple))
    return shape, draw(st.lists(boxes_in(shape), max_size=6))


def counted(shape, boxes):
    """How often each element is in one of the boxes."""
    count = np.zeros(shape, int)
    for box in boxes:
        count[tuple(slice(o, o + n) for o, n in zip(box.offsets, box.sizes, strict=True))] += 1
    return count


@quick
@given(st.lists(st.tuples(SHAPES, ITEMSIZES), max_size=12), st.integers(1, 9))
def test_divided_arrays_are_covered_once_and_shares_are_even_within_a_row(arrays, world):
    shapes = [(shape, math.prod(shape) * size) for shape, size in arrays]
    parts = divide(shapes, world)
    assert len(parts) == world
    written = [0] * world
    for i, (shape, nbytes) in enumerate(shapes):
        mine = [part[i] for part in parts]
        assert all(box.fits(shape) for box in mine if box is not None)
        if nbytes:
            assert (counted(shape, [box for box in mine if box is not None]) == 1).all()
        else:
            assert sum(box is not None for box in mine) == 1, "an array without bytes is in one place, too"
        for rank, box in enumerate(mine):
            written[rank] += 0 if box is None or not nbytes else box.elements * (nbytes // math.prod(shape))
    total = sum(written)
    row = max((nbytes // (shape[0] if shape else 1) for shape, nbytes in shapes if nbytes), default=0)
    assert total == sum(nbytes for _, nbytes in shapes)
    assert all(abs(share - total / world) <= row + 1 for share in written)


def test_a_known_division():
    whole, first, second = Box((0, 0), (4, 2)), Box((0, 0), (2, 2)), Box((2, 0), (2, 2))
    assert divide([((4, 2), 64)], 2) == [[first], [second]]
    assert divide([((4, 2), 64), ((4, 2), 64)], 2) == [[whole, None], [None, whole]]
    assert divide([((), 8), ((3,), 24)], 2) == [[Box((), ()), Box((0,), (1,))], [None, Box((1,), (2,))]]


@quick
@given(SHAPES.filter(lambda s: len(s) and s[0] > 1), st.integers(1, 7))
def test_parts_of_a_box_cover_it_once(shape, count):
    parts = [part_of(Box.whole(shape), i, count) for i in range(count)]
    assert (counted(shape, parts) == 1).all()
    assert max(p.sizes[0] for p in parts) - min(p.sizes[0] for p in parts) <= 1


@quick
@given(shapes_and_boxes())
def test_holes_and_overlaps_are_those_of_a_mask(given_):
    shape, boxes = given_
    count = counted(shape, boxes)
    assert holes_and_overlaps(shape, boxes) == (bool((count == 0).any()), bool((count > 1).any()))


@quick
@given(shapes_and_boxes().filter(lambda g: len(g[1]) > 1))
def test_what_two_boxes_share_is_what_masks_share(given_):
    shape, (a, b, *_) = given_
    both = (counted(shape, [a]) > 0) & (counted(shape, [b]) > 0)
    common = a.common(b)
    shared = counted(shape, [] if common is None else [common]) > 0
    assert (shared == both).all()
    assert common is None or (common.fits(shape) and common.elements)


def test_small_facts():
    assert Box.whole((2, 3)) == Box((0, 0), (2, 3))
    assert rows(Box((5, 1), (4, 2)), 1, 3) == Box((6, 1), (2, 2))
    assert Box((1, 2), (3, 4)).ends == (4, 6)
    assert not Box((0,), (4,)).fits((3,))
    assert not Box((-1,), (2,)).fits((3,))
    assert not Box((0,), (1,)).fits((3, 3))
    assert Box((), ()).fits(())
    assert Box((), ()).elements == 1
