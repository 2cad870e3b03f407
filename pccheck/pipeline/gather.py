"""Bytes of one chunk, gathered from the pieces of a layout (floor 2: imports plan)."""

from __future__ import annotations

import ctypes
from bisect import bisect_right
from collections.abc import Sequence

from pccheck.state.plan import Chunk, Layout

# Below this size a copy keeps the interpreter's lock: letting go of it and waiting for a busy main thread to give it
# back (5 ms each) costs more than the copy, for thousands of small arrays all of the difference.
LOCKED_COPY_BYTES = 32 << 10


def gather(layout: Layout, addresses: Sequence[int], chunk: Chunk, target: memoryview, target_address: int) -> None:
    """Copy a chunk's pieces to `target`, with zeros in gaps and padding.

    Args:
        layout: where the pieces lie in the byte space.
        addresses: where in memory each piece begins; they must stay readable meanwhile.
        chunk: which part of the byte space.
        target: `chunk.stored_bytes` writable bytes.
        target_address: where in memory `target` begins.
    """
    pieces, end = layout.pieces, chunk.start + chunk.data_bytes
    at = chunk.start
    index = max(bisect_right(pieces, chunk.start, key=lambda piece: piece.offset) - 1, 0)
    while index < len(pieces) and pieces[index].offset < end:
        piece = pieces[index]
        first, last = max(piece.offset, chunk.start), min(piece.offset + piece.length, end)
        if first < last:
            _zero(target, target_address, at - chunk.start, first - at)
            source = int(addresses[index]) + first - piece.offset  # the planner hands an array of numbers
            _copy(target, target_address, first - chunk.start, source, last - first)
            at = last
        index += 1
    _zero(target, target_address, at - chunk.start, chunk.start + chunk.stored_bytes - at)


def _copy(target: memoryview, target_address: int, place: int, source: int, length: int) -> None:
    if length <= LOCKED_COPY_BYTES:
        target[place : place + length] = ctypes.string_at(source, length)
    else:
        ctypes.memmove(target_address + place, source, length)


def _zero(target: memoryview, target_address: int, place: int, length: int) -> None:
    if length <= LOCKED_COPY_BYTES:
        target[place : place + length] = bytes(length)
    else:
        ctypes.memset(target_address + place, 0, length)
