"""Needed bytes of one slot, and no more, to where they are wanted (floor 2: imports reader, chunks and below).

Leaves that are wanted as they were stored are read in place: their chunks go straight into the memory that they keep.
Of which only a part is wanted, or that are few in their chunks, are copied out of a bounded buffer. Every chunk is read
once, however many leaves need it, and is verified before a byte of it is used.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from queue import SimpleQueue
from typing import TypeAlias, final

from pccheck import format
from pccheck.reading.chunks import allocate, read_chunks
from pccheck.reading.reader import confirm, fetch, raise_damage
from pccheck.state.boxes import Box
from pccheck.state.manifest import Manifest
from pccheck.state.transfer import Transfer
from pccheck.storage.medium import Medium

Place: TypeAlias = tuple[int, int]  # first byte in the byte space, number of bytes
_SMALL_BYTES = 64 << 10
_BUFFER_BYTES = 256 << 20  # unless one chunk is larger


@final
@dataclass(frozen=True, kw_only=True)
class Copying:
    """A leaf of which a part is wanted: where it is stored, and what copies the part."""

    offset: int
    nbytes: int
    transfer: Transfer


@final
@dataclass(frozen=True, kw_only=True)
class Gathered:
    """What `gather` read.

    Args:
        places: the bytes of every place that was asked for.
        chunks: how many chunks were read.
    """

    places: dict[Place, memoryview]
    chunks: int


def gather(
    medium: Medium, manifest: Manifest, places: Iterable[Place], copyings: Sequence[Copying] = (), *, threads: int
) -> Gathered:
    """Read leaves of one slot, whole ones into memory of their own, parts into where their transfers say.

    Beside what it gives, it takes `threads` buffers of one chunk each (together at most 256 MiB, or one chunk).

    Args:
        medium: the slot that `manifest` was read from.
        manifest: what `read_manifest` gave.
        places: of the leaves that are wanted as they were stored; equal ones are read once.
        copyings: the leaves of which a part is wanted.
        threads: how many chunks are read at once, 1..64.

    Raises:
        DamagedError: a chunk fails its digest; names the leaves in it and its bytes in the file.
        ReusedError: the slot was given to a newer checkpoint meanwhile.
        MediumError: a chunk could not be read.
    """
    wanted = dict.fromkeys(place for place in places if place[1])
    found: dict[Place, memoryview] = {}
    in_place = _worth_reading_in_place(manifest, wanted)
    aside = list(copyings)
    scattered = sorted(wanted.keys() - in_place)
    for place, room in zip(scattered, own_rooms([nbytes for _, nbytes in scattered], medium.path), strict=True):
        found[place], all_ = room, Box((0,), (place[1],))
        aside.append(Copying(offset=place[0], nbytes=place[1], transfer=Transfer(all_, all_, 1, room)))
    rooms = _read_in_place(medium, manifest, in_place, threads)
    for offset, nbytes in in_place:
        start, room = rooms[offset // manifest.chunk_bytes]
        found[offset, nbytes] = room[offset - start : offset - start + nbytes]
    jobs: dict[int, list[Copying]] = {}
    for copying in aside:
        for index, first, end in _pieces(manifest, copying):
            if not copying.transfer.needs(first - copying.offset, end - copying.offset):
                continue
            if index in rooms:
                start, room = rooms[index]
                copying.transfer.take(first - copying.offset, room[first - start : end - start])
            else:
                jobs.setdefault(index, []).append(copying)
    if jobs:
        _copy_aside(medium, manifest, jobs, threads)
    return Gathered(places=found, chunks=len(rooms) + len(jobs))


def own_rooms(lengths: Sequence[int], path: str) -> list[memoryview]:
    """Give memory for leaves of these lengths, 64-byte aligned; small ones share a mapping, of which there are few."""
    small = [format.padded(n, format.LEAF_ALIGN) if n < _SMALL_BYTES else 0 for n in lengths]
    shared, at = allocate(sum(small), path), 0
    rooms = []
    for length, padded in zip(lengths, small, strict=True):
        rooms.append(shared[at : at + length] if padded or not length else allocate(length, path))
        at += padded
    return rooms


def _worth_reading_in_place(manifest: Manifest, places: Iterable[Place]) -> set[Place]:
    """Give the places whose chunks consist for at least a half of what is wanted: they would keep alive the rest."""
    size, used = manifest.chunk_bytes, Counter[int]()
    for offset, nbytes in places:
        for index in _covering(size, offset, nbytes):
            used[index] += min((index + 1) * size, _end(offset, nbytes)) - max(index * size, offset)
    found = set()
    for offset, nbytes in places:
        covering = _covering(size, offset, nbytes)
        stored = min(covering.stop * size, manifest.data_bytes) - covering.start * size
        if 2 * sum(used[index] for index in covering) >= stored:
            found.add((offset, nbytes))
    return found


def _end(offset: int, nbytes: int) -> int:
    """Give the end of a leaf with the padding that makes the next one begin aligned."""
    return format.padded(offset + nbytes, format.LEAF_ALIGN)


def _covering(size: int, offset: int, nbytes: int) -> range:
    return range(offset // size, (offset + nbytes - 1) // size + 1)


def _pieces(manifest: Manifest, copying: Copying) -> Iterator[tuple[int, int, int]]:
    """Give the chunks in which a leaf lies, and the bytes of the byte space that it has in each."""
    size, end = manifest.chunk_bytes, copying.offset + copying.nbytes
    for index in _covering(size, copying.offset, copying.nbytes):
        yield index, max(index * size, copying.offset), min((index + 1) * size, end)


def _read_in_place(
    medium: Medium, manifest: Manifest, places: Iterable[Place], threads: int
) -> dict[int, tuple[int, memoryview]]:
    """Read the chunks of these places, those side by side into one mapping: chunk -> (first byte of its run, run)."""
    size = manifest.chunk_bytes
    rooms: dict[int, tuple[int, memoryview]] = {}
    for run in _runs(sorted({index for place in places for index in _covering(size, *place)})):
        start, end = run.start * size, min(run.stop * size, manifest.data_bytes)
        room = allocate(format.padded(end - start), medium.path)
        fetch(medium, manifest, manifest.chunks[run.start : run.stop], room, start, threads)
        rooms.update(dict.fromkeys(run, (start, room)))
    return rooms


def _runs(indices: Sequence[int]) -> list[range]:
    runs: list[range] = []
    for index in indices:
        if runs and runs[-1].stop == index:
            runs[-1] = range(runs[-1].start, index + 1)
        else:
            runs.append(range(index, index + 1))
    return runs


def _copy_aside(medium: Medium, manifest: Manifest, jobs: dict[int, list[Copying]], threads: int) -> None:
    """Read chunks into a few buffers, and copy what is wanted of each; different threads write different bytes."""
    room_bytes = format.padded(min(manifest.chunk_bytes, manifest.data_bytes))
    count = max(1, min(threads, len(jobs), _BUFFER_BYTES // room_bytes))
    rooms: SimpleQueue[memoryview] = SimpleQueue()
    for _ in range(count):
        rooms.put(allocate(room_bytes, medium.path))
    bad: list[tuple[int, int]] = []

    def read(index: int) -> None:
        if bad:
            return  # nothing of this checkpoint is handed out any more
        chunk, room = manifest.chunks[index], rooms.get()
        try:
            wrong = read_chunks(medium, [chunk], room, chunk.start, 1)
            bad.extend((index, errno) for _, errno in wrong)
            for copying in () if wrong else jobs[index]:
                first = max(chunk.start, copying.offset)
                end = min(chunk.start + chunk.data, copying.offset + copying.nbytes)
                copying.transfer.take(first - copying.offset, room[first - chunk.start : end - chunk.start])
        finally:
            rooms.put(room)

    if count == 1:
        for index in sorted(jobs):
            read(index)
    else:
        with ThreadPoolExecutor(count, thread_name_prefix="pccheck-read") as pool:
            for done in [pool.submit(read, index) for index in sorted(jobs)]:
                done.result()
    confirm(medium, manifest)
    if bad:
        index, errno = min(bad)
        raise_damage(medium.path, manifest, manifest.chunks[index], errno)
