"""How fast a checkpoint is read back, into memory that was had before (floor 3: imports reading and below).

On a virtual machine whose host gives memory at its first touch, that touch took from 12 ms to 1.5 s for the 268 MB of a
restore that itself took 0.1 s: restores into fresh memory told what memory does, not storage. So the memory is touched
first, by itself, and read into again and again.
"""

from __future__ import annotations

import statistics
from contextlib import closing
from dataclasses import dataclass
from time import monotonic

import numpy as np

from pccheck import format
from pccheck.errors import NoValidCheckpointError
from pccheck.reading.chunks import allocate
from pccheck.reading.places import Place
from pccheck.reading.reader import DEFAULT_THREADS, fetch, opened, read_manifest
from pccheck.reading.restoring import candidates

LEAST_READS, MOST_READS = 3, 9
SHARE = 0.1  # of the time that is left: until then it is read more often than the least
MOST_BYTES = 256 << 20  # of a larger checkpoint the first: fresh memory for all of it may take half a minute


@dataclass(frozen=True, kw_only=True)
class ReadBack:
    """Reads of one checkpoint, each verified, as a restore reads it.

    Args:
        read_bytes: by each of them: all of the checkpoint, or the first 256 MiB.
        reads: how many there were.
        median_s, worst_s: of them.
        fresh_s: seconds until as much memory was had, every page of it touched once.
    """

    read_bytes: int
    reads: int
    median_s: float
    worst_s: float
    fresh_s: float


def read_back(store: str, until_s: float) -> ReadBack:
    """Read the newest checkpoint of a store several times, at least once, until its share of the time is up.

    Args:
        store: its folder.
        until_s: on the monotonic clock, when all time is up.

    Raises:
        NoValidCheckpointError: there is none.
        DamagedError, FormatError, MediumError: it cannot be read.
        MemoryError: there is no memory for it.
    """
    enough_s = monotonic() + SHARE * max(0.0, until_s - monotonic())
    with closing(Place.of_store(store)) as place:
        found = candidates(place.look())
        if not found:
            raise NoValidCheckpointError(store, ())
        with opened(place.open, found[0].names[0]) as medium:
            manifest = read_manifest(medium, found[0].record)
            chunks = [chunk for chunk in manifest.chunks if chunk.start + chunk.stored <= MOST_BYTES]
            chunks = chunks or list(manifest.chunks[:1])
            read_bytes = sum(chunk.stored for chunk in chunks)
            began_s = monotonic()
            room = allocate(format.padded(read_bytes), medium.path)
            np.asarray(room)[:] = 1
            fresh_s, times = monotonic() - began_s, list[float]()
            while len(times) < MOST_READS and (
                not times or monotonic() < (until_s if len(times) < LEAST_READS else enough_s)
            ):
                began_s = monotonic()
                fetch(medium, manifest, chunks, room, 0, DEFAULT_THREADS)
                times.append(monotonic() - began_s)
    return ReadBack(
        read_bytes=read_bytes, reads=len(times), median_s=statistics.median(times), worst_s=max(times),
        fresh_s=fresh_s,
    )  # fmt: skip
