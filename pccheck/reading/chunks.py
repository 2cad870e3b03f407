"""Chunks from a medium into memory, many at once, each against its digest (floor 2: imports floor 1 and below).

Through the extension's threads where the medium has a descriptor and the extension was built, else through Python's.
"""

from __future__ import annotations

import errno as codes
import importlib
import mmap
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import xxhash

from pccheck.errors import MediumError
from pccheck.state.manifest import ChunkEntry
from pccheck.storage.medium import Medium

_HUGE = 2 << 20

# read_chunks(fd, destination, destination_offsets, file_offsets, lengths, digests, threads, alignment)
_NativeReader = Callable[[int, memoryview, list[int], list[int], list[int], bytes, int, int], list[tuple[int, int]]]


def _native_reader() -> _NativeReader | None:
    try:
        reader: _NativeReader = importlib.import_module("pccheck._native").read_chunks
    except (ImportError, AttributeError):  # without the extension a checkout's folder of C files is what is imported
        return None
    return reader


def allocate(length: int, path: str) -> memoryview:
    """Give `length` writable bytes, page-aligned, in huge pages where they pay; freed with the last view of them.

    Raises MemoryError, naming the file that asks for them, where the system has not got them.
    """
    if not length:
        return memoryview(bytearray())
    room = length if length < _HUGE else length + _HUGE
    try:
        mapping = mmap.mmap(-1, room, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, OverflowError, ValueError) as error:
        raise MemoryError(f"{length:,} bytes of memory to read {path} cannot be had: {error}") from error
    if length < _HUGE:
        return memoryview(mapping)[:length]
    # Huge pages double the rate of reads into fresh memory, but only where the mapping begins on a border of one.
    if hasattr(mmap, "MADV_HUGEPAGE"):
        try:
            mapping.madvise(mmap.MADV_HUGEPAGE)
        except OSError:
            pass  # a kernel without them: slower, not wrong
    start = -np.frombuffer(mapping, np.uint8).ctypes.data % _HUGE
    return memoryview(mapping)[start : start + length]


def read_chunks(
    medium: Medium, chunks: Sequence[ChunkEntry], room: memoryview, start: int, threads: int, *, native: bool = True
) -> list[tuple[int, int]]:
    """Fill `room`, which stands for the byte space from `start` on, and give what went wrong.

    Args:
        medium: where the chunks are.
        chunks: which, their places checked against the file; each must fit into `room` with its padding.
        room: page-aligned memory.
        start: first byte of the byte space that `room` holds.
        threads: chunks read at once, 1..64.
        native: use the extension where it can be used.

    Returns:
        Ascending `(index, errno)` of bad chunks; errno 0 = was read, but fails its digest.
    """
    if not chunks:
        return []
    reader = _native_reader() if native else None
    fileno = medium.fileno() if reader is not None else None
    if reader is not None and fileno is not None:
        bad = reader(
            fileno,
            room,
            [chunk.start - start for chunk in chunks],
            [chunk.offset for chunk in chunks],
            [chunk.stored for chunk in chunks],
            bytes.fromhex("".join(chunk.digest for chunk in chunks)),
            max(1, min(threads, len(chunks))),
            medium.alignment,
        )
        return sorted(bad)

    def read(item: tuple[int, ChunkEntry]) -> tuple[int, int] | None:
        index, chunk = item
        part = room[chunk.start - start : chunk.start - start + chunk.stored]
        try:
            medium.read_into(part, chunk.offset)
        except MediumError as error:
            return index, error.errno or codes.EIO
        return None if xxhash.xxh3_128_hexdigest(part) == chunk.digest else (index, 0)

    if len(chunks) == 1 or threads == 1:
        return [bad for bad in map(read, enumerate(chunks)) if bad]
    with ThreadPoolExecutor(min(threads, len(chunks)), thread_name_prefix="pccheck-read") as pool:
        return [bad for bad in pool.map(read, enumerate(chunks)) if bad]
