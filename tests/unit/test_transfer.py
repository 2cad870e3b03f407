"""Copies between boxes, from whatever piece of the stored bytes is at hand, against NumPy's own slicing."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pccheck.state.boxes import Box
from pccheck.state.transfer import Transfer, overlapping, slabs

SHAPES = st.lists(st.integers(1, 5), max_size=4).map(tuple)


@st.composite
def boxes_in(draw: st.DrawFn, shape: tuple[int, ...], least: int = 1) -> Box:
    sizes = tuple(draw(st.integers(min(least, n), n)) for n in shape)
    return Box(tuple(draw(st.integers(0, n - s)) for n, s in zip(shape, sizes, strict=True)), sizes)


def cut(array: np.ndarray, box: Box) -> np.ndarray:
    return array[tuple(slice(o, e) for o, e in zip(box.offsets, box.ends, strict=True))]


@given(SHAPES, st.data())
def test_a_run_of_elements_is_a_few_boxes_in_order(shape: tuple[int, ...], data: st.DataObject) -> None:
    array = np.arange(int(np.prod(shape))).reshape(shape)
    first = data.draw(st.integers(0, array.size))
    end = data.draw(st.integers(first, array.size))
    parts = list(slabs(shape, first, end))
    assert len(parts) <= max(2 * len(shape) - 1, 1)
    found = [n for box in parts for n in cut(array, box).ravel().tolist()]
    assert found == list(range(first, end))


@given(SHAPES, st.sampled_from([1, 2, 3, 4, 6, 8, 12, 16, 24]), st.booleans(), st.data())
def test_any_part_from_any_pieces(shape: tuple[int, ...], itemsize: int, permuted: bool, data: st.DataObject) -> None:
    """A random stored box, cut at random 8-byte borders, its pieces given in random order."""
    rng = np.random.default_rng(7)
    dtype = np.dtype((np.void, itemsize))
    array = np.frombuffer(rng.bytes(int(np.prod(shape)) * itemsize), dtype).reshape(shape)
    stored, wanted = data.draw(boxes_in(shape)), data.draw(boxes_in(shape))
    common = stored.common(wanted)
    if common is None:
        return
    order = data.draw(st.permutations(range(len(shape)))) if permuted else None
    source = cut(array, stored) if order is None else cut(array, stored).transpose(order)
    stored_bytes = np.ascontiguousarray(source).tobytes()
    memory = bytearray(wanted.elements * itemsize)
    room = np.ndarray(wanted.sizes, dtype, memory)
    transfer = Transfer(stored, wanted, itemsize, memoryview(memory), order)
    borders = sorted(
        {0, len(stored_bytes), *(8 * n for n in data.draw(st.lists(st.integers(0, len(stored_bytes) // 8))))}
    )
    pieces = data.draw(st.permutations(list(itertools.pairwise(borders))))
    for first, end in pieces:
        before = bytes(memory)
        transfer.take(first, memoryview(bytearray(stored_bytes[first:end])))
        assert transfer.needs(first, end) or bytes(memory) == before
    inside = Box(tuple(c - w for c, w in zip(common.offsets, wanted.offsets, strict=True)), common.sizes)
    assert cut(room, inside).tobytes() == cut(array, common).tobytes()
    outside = np.ones(wanted.sizes, bool)
    outside[tuple(slice(o, e) for o, e in zip(inside.offsets, inside.ends, strict=True))] = False
    assert not any(room[outside].tobytes())


def test_no_piece_is_needed_between_the_rows_of_a_narrow_box() -> None:
    transfer = Transfer(Box((0, 0), (4, 100)), Box((0, 10), (4, 2)), 4, memoryview(bytearray(32)))
    assert all(transfer.needs(*run) for run in ((40, 48), (44, 45), (0, 1600), (438, 441)))
    assert not any(transfer.needs(*run) for run in ((0, 40), (48, 440), (1248, 1600)))


@given(st.data())
def test_overlapping_finds_what_comparing_all_pairs_finds(data: st.DataObject) -> None:
    shape = data.draw(SHAPES)
    boxes = data.draw(st.lists(boxes_in(shape, least=0), max_size=6))
    pairs = {(i, j) for j in range(len(boxes)) for i in range(j) if boxes[i].elements and boxes[i].common(boxes[j])}
    found = overlapping(boxes)
    assert found in pairs if pairs else found is None


@pytest.mark.parametrize("axes", [1, 2, 3])
def test_a_static_grid_does_not_overlap(axes: int) -> None:
    cells = [Box(tuple(int(i) * 3 for i in index), (3,) * axes) for index in np.ndindex(*(4,) * axes)]
    assert overlapping(cells) is None
    assert overlapping([*cells, Box((2,) * axes, (2,) * axes)]) is not None
