"""Bytes gathered from pieces of memory: one chunk of a layout, or many pieces at once (floor 2: imports below).

What must fit together before a layout is gathered is checked here, for both pipelines.
"""

from __future__ import annotations

import ctypes
import os
from bisect import bisect_right
from collections.abc import Iterator, Sequence

import numpy as np

from pccheck.errors import UsageError
from pccheck.format import PAGE
from pccheck.state.plan import Chunk, Layout
from pccheck.storage.digest import xxh3_128
from pccheck.storage.medium import Medium

try:
    from pccheck._native import copy_pieces as _native_copy
    from pccheck._native import digest_pieces as _native_digest
except ImportError:  # not built: also where `_native` is but a checkout's folder of C files
    NATIVE = False
else:
    NATIVE = True

# Below this size a copy keeps the interpreter's lock: letting go of it and waiting for a busy main thread to give it
# back (5 ms each) costs more than the copy, for thousands of small arrays all of the difference.
LOCKED_COPY_BYTES = 32 << 10


def check_job(layout: Layout, addresses: Sequence[int], prologue: bytes | None, buffer_bytes: int) -> None:
    """Raise UsageError where what a pipeline is given does not fit together, or its buffers."""
    if len(addresses) != len(layout.pieces):
        raise UsageError(f"{len(addresses)} addresses do not fit a layout of {len(layout.pieces)} pieces")
    if layout.chunk_bytes > buffer_bytes:
        raise UsageError(f"chunks of {layout.chunk_bytes} do not fit buffers of {buffer_bytes} bytes")
    if prologue is not None and len(prologue) != PAGE:
        raise UsageError(f"a prologue is one page of {PAGE} bytes, not {len(prologue)}")


def check_mapping(layout: Layout, medium: Medium, mapping: memoryview) -> None:
    """Raise UsageError where the mapping of a medium ends before the last chunk does."""
    if layout.chunks and layout.chunks[-1].file_offset + layout.chunks[-1].stored_bytes > mapping.nbytes:
        raise UsageError(f"{medium.path} is shorter than the checkpoint; allocate it first")


def gather(layout: Layout, addresses: Sequence[int], chunk: Chunk, target: memoryview, target_address: int) -> None:
    """Copy a chunk's pieces to `target`, with zeros in gaps and padding; those with the address 0 are there already.

    Args:
        layout: where the pieces lie in the byte space.
        addresses: where in memory each piece begins; they must stay readable meanwhile.
        chunk: which part of the byte space.
        target: `chunk.stored_bytes` writable bytes.
        target_address: where in memory `target` begins.
    """
    pieces, at = layout.pieces, chunk.start
    for index, first, last in _parts(layout, chunk):
        _zero(target, target_address, at - chunk.start, first - at)
        if addresses[index]:
            source = addresses[index] + first - pieces[index].offset
            _copy(target, target_address, first - chunk.start, source, last - first)
        at = last
    _zero(target, target_address, at - chunk.start, chunk.start + chunk.stored_bytes - at)


def has_gaps(layout: Layout, addresses: Sequence[int], chunk: Chunk) -> bool:
    """Tell whether the chunk has pieces with the address 0, which `gather` leaves to somebody else."""
    return any(not addresses[index] for index, _, _ in _parts(layout, chunk))


def _parts(layout: Layout, chunk: Chunk) -> Iterator[tuple[int, int, int]]:
    """Give which pieces have bytes in a chunk, in order, each with where in the byte space these begin and end."""
    pieces, end = layout.pieces, chunk.start + chunk.data_bytes
    index = max(bisect_right(pieces, chunk.start, key=lambda piece: piece.offset) - 1, 0)
    while index < len(pieces) and pieces[index].offset < end:
        piece = pieces[index]
        first, last = max(piece.offset, chunk.start), min(piece.offset + piece.length, end)
        if first < last:
            yield index, first, last
        index += 1


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


# -- many pieces in one call -------------------------------------------------------------------------------------------

SHORT_BYTES = 256  # shorter pieces are digested with zeros up to this length: only XXH3's long path is native
MOST_THREADS = 4  # memory is not copied faster by more


def copy_pieces(addresses: Sequence[int], lengths: Sequence[int], targets: Sequence[int]) -> None:
    """Copy disjoint pieces of memory, natively in one call without the interpreter's lock where that was built.

    Args:
        addresses: where each piece begins; quickest as an array of 64-bit numbers, as the two others.
        lengths: its bytes; 0 is legal, then nothing is touched.
        targets: where it is copied to.

    Raises ValueError where their numbers differ, or a piece with bytes has the address 0.
    """
    if NATIVE:
        _native_copy(addresses, lengths, targets, min(os.cpu_count() or 1, MOST_THREADS))
        return
    for source, length, target in _pieces(addresses, lengths, targets):
        ctypes.memmove(target, source, length)


def digest_pieces(addresses: Sequence[int], lengths: Sequence[int]) -> bytes:
    """Give XXH3-128 of each piece of memory, 16 bytes each, natively where that was built.

    Pieces of less than 256 bytes are digested as if zeros followed up to there: it tells whether a piece was changed,
    not of what length it is. Raises ValueError where the numbers differ, or a piece with bytes has the address 0.
    """
    if NATIVE:
        return _native_digest(addresses, lengths)
    return b"".join(_digest(source, length) for source, length, _ in _pieces(addresses, lengths, addresses))


def _digest(source: int, length: int) -> bytes:
    if length < SHORT_BYTES:
        return xxh3_128(ctypes.string_at(source, length).ljust(SHORT_BYTES, b"\0") if length else bytes(SHORT_BYTES))
    return xxh3_128(memoryview((ctypes.c_uint8 * length).from_address(source)))


def _pieces(*columns: Sequence[int]) -> list[tuple[int, int, int]]:
    if len({len(column) for column in columns}) != 1:
        raise ValueError("addresses, lengths and targets must be of the same number")
    pieces = list(zip(*(np.asarray(column, np.uint64).tolist() for column in columns), strict=True))
    if any(length and not (source and target) for source, length, target in pieces):
        raise ValueError("a piece with bytes has the address 0")
    return pieces
