"""Everything that reads a slot: record, manifest, payload (floor 2: imports floor 1 and below).

Nothing is allocated that the file's size does not justify, and nothing is handed out whose digest was not checked.
Readers take no lock: they read the record, the payload, and the record again; a record that changed meanwhile is a
ReusedError, and never taken for damage.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from typing import NoReturn, TypeVar

import xxhash

from pccheck import format
from pccheck.errors import ContentError, DamagedError, FormatError, MediumError, ReusedError
from pccheck.format import Record, SlotState
from pccheck.reading.chunks import allocate, read_chunks
from pccheck.state import manifest as manifests
from pccheck.state.manifest import ChunkEntry, Manifest
from pccheck.storage.medium import Medium

Progress = Callable[[int], None]
T = TypeVar("T")

DEFAULT_THREADS = 4
MAX_MANIFEST_BYTES = 1 << 31  # 10 million leaves; a sparse file may claim anything
_VERIFY_BYTES = 64 << 20  # buffer of a verification, unless one chunk is larger
_RECORD_READS = 4


# -- files -------------------------------------------------------------------------------------------------------------


@contextmanager
def opened(open_medium: Callable[[str], Medium], name: str) -> Iterator[Medium]:
    """Open a file that was listed, for as long as it is read; ReusedError where it was removed since."""
    try:
        medium = open_medium(name)
    except MediumError as error:
        if isinstance(error.cause, FileNotFoundError):
            raise ReusedError(f"{error.path} was removed since it was looked at; look again") from error
        raise
    with closing(medium):
        yield medium


def under_any(names: Sequence[str], read: Callable[[str], T]) -> T:
    """Give what `read` gives of the first of a checkpoint's names (at least one) that it can read.

    Raises the first error where it can read none, and ReusedError at once.
    """
    first: ContentError | MediumError | None = None
    for name in names:
        try:
            return read(name)
        except ReusedError:
            raise
        except (ContentError, MediumError) as error:
            first = first or error
    assert first is not None, "a checkpoint has at least one name"
    raise first


# -- record and manifest -----------------------------------------------------------------------------------------------


def read_record(medium: Medium) -> Record | None:
    """Give what the slot's record says, None for a slot never used.

    Raises:
        FormatError: the sector is not a record of this format, or fails its checksum.
        MediumError: it could not be read.
    """
    previous = None
    for _ in range(_RECORD_READS):
        sector = _read(medium, 0, min(medium.size(), format.RECORD_BYTES)).tobytes()
        if not sector.strip(b"\0"):
            return None  # also a file that a crash left empty or short before it was allocated
        try:
            return format.unpack_record(sector)
        except FormatError as error:
            if sector == previous:
                raise FormatError(f"{medium.path}: {error}") from None
            previous = sector  # a writer may have been at it between two halves of this read: look again
    raise ReusedError(f"the record of {medium.path} changes faster than it can be read; read again")


def read_manifest(medium: Medium, record: Record) -> Manifest:
    """Give the manifest of a sealed slot, checked against its digest, the record and the size of the file.

    Raises:
        FormatError: it claims what cannot be, or is of a version or codec that this release does not read.
        DamagedError: it fails its digest.
        ReusedError: the slot was given to a newer checkpoint meanwhile.
        MediumError: it could not be read.
    """
    if record.state != SlotState.SEALED:
        raise FormatError(f"{medium.path} holds no checkpoint: its record says {record.state.name.lower()}")
    try:
        format.check_geometry(record, medium.size())
        if record.manifest_bytes > MAX_MANIFEST_BYTES:
            raise FormatError(f"the record claims a manifest of {record.manifest_bytes:,} bytes; 2 GiB are the most")
        data = _read(medium, record.manifest_offset, record.manifest_bytes)
    except (FormatError, MediumError) as error:
        confirm(medium, record)
        raise error if isinstance(error, MediumError) else FormatError(f"{medium.path}: {error}") from None
    if xxhash.xxh3_128_digest(data) != record.manifest_digest:
        confirm(medium, record)
        raise DamagedError(
            medium.path,
            "the manifest fails its digest",
            offset=record.manifest_offset,
            length=record.manifest_bytes,
        )
    try:
        manifest = manifests.decode(data.tobytes())
        _check_against(record, manifest)
    except FormatError as error:
        raise FormatError(f"{medium.path}: {error}") from None
    return manifest


def confirm(medium: Medium, record: Record | Manifest) -> None:
    """Raise ReusedError unless the slot still holds this sealed checkpoint."""
    try:
        now = read_record(medium)
    except (FormatError, MediumError) as error:
        raise ReusedError(f"the record of {medium.path} changed while it was being read: {error}") from error
    identity = (record.incarnation, record.counter, record.step)
    if now is None or now.state != SlotState.SEALED or now.identity != identity:
        raise ReusedError(f"{medium.path} was given to a newer checkpoint while it was being read; read again")


def _check_against(record: Record, manifest: Manifest) -> None:
    """What the manifest alone cannot tell: whether it is this record's, and whether its chunks lie in this payload."""
    told = (manifest.incarnation, manifest.counter, manifest.step, manifest.rank, manifest.world)
    if told != (*record.identity, record.rank, record.world):
        raise FormatError(f"the manifest is of checkpoint {told}, the record of {record.identity}: two that were mixed")
    end = max((chunk.offset + chunk.stored for chunk in manifest.chunks), default=0)
    if end > record.manifest_offset:
        raise FormatError(f"a chunk ends at byte {end}, behind the payload's end at {record.manifest_offset}")


# -- payload -----------------------------------------------------------------------------------------------------------


def read_payload(
    medium: Medium, manifest: Manifest, *, threads: int = DEFAULT_THREADS, fresh: bool = False
) -> memoryview:
    """Give the whole byte space of a checkpoint in one private mapping, every chunk verified.

    Args:
        medium: the slot that `manifest` was read from.
        manifest: what `read_manifest` gave.
        threads: how many chunks are read at once, 1..64.
        fresh: read past the page cache where the medium can.

    Raises:
        DamagedError: a chunk fails its digest; names the leaves in it and its bytes in the file.
        ReusedError: the slot was given to a newer checkpoint meanwhile.
        MediumError: a chunk could not be read.
    """
    room = allocate(format.padded(manifest.data_bytes), medium.path)
    fetch(medium, manifest, manifest.chunks, room, 0, threads, fresh)
    return room[: manifest.data_bytes]


def verify(
    medium: Medium,
    record: Record,
    manifest: Manifest,
    progress: Progress | None = None,
    *,
    threads: int = DEFAULT_THREADS,
    fresh: bool = True,
) -> list[DamagedError]:
    """Read every chunk in a few buffers and give all damages, in file order; an empty list = the checkpoint is whole.

    Args:
        medium: the slot.
        record: its record.
        manifest: its manifest.
        progress: called with the number of bytes just read, after every few chunks.
        threads: how many chunks are read at once, 1..64.
        fresh: read past the page cache where the medium can.

    Raises:
        ReusedError: the slot was given to a newer checkpoint meanwhile.
    """
    if fresh:
        medium.drop_cache()
    chunks = manifest.chunks
    step = max(1, min(2 * threads, _VERIFY_BYTES // manifest.chunk_bytes))
    room = allocate(format.padded(min(step * manifest.chunk_bytes, manifest.data_bytes)), medium.path)
    damages: list[DamagedError] = []
    for first in range(0, len(chunks), step):
        group = chunks[first : first + step]
        for index, errno in read_chunks(medium, group, room, group[0].start, threads):
            damages.append(_damage(medium.path, manifest, group[index], errno))
        confirm(medium, record)  # here, not only at the end: a reused slot must not be read on for minutes
        if progress:
            progress(sum(chunk.stored for chunk in group))
    return damages


def assert_whole(medium: Medium, record: Record) -> None:
    """Raise the first damage of a sealed checkpoint; errors as in `read_manifest` and `verify`."""
    for damage in verify(medium, record, read_manifest(medium, record)):
        raise damage


def leaves_in(manifest: Manifest, start: int, length: int) -> list[str]:
    """Give the paths of the leaves that have bytes in this part of the byte space."""
    found = (e.path for e in manifest.leaves if e.nbytes and e.offset < start + length and start < e.offset + e.nbytes)
    return list(dict.fromkeys(found))  # a leaf may have several parts there


def _read(medium: Medium, offset: int, length: int) -> memoryview:
    room = allocate(format.padded(length), medium.path)[:length]
    if length:
        medium.read_into(room, offset)
    return room


def fetch(
    medium: Medium,
    manifest: Manifest,
    chunks: Sequence[ChunkEntry],
    room: memoryview,
    start: int,
    threads: int,
    fresh: bool = False,
) -> None:
    """Fill `room`, which stands for the byte space from `start` on, with verified chunks; errors as `read_payload`."""
    if fresh:
        medium.drop_cache()
    bad = read_chunks(medium, chunks, room, start, threads)
    confirm(medium, manifest)
    if bad:
        index, errno = bad[0]
        raise_damage(medium.path, manifest, chunks[index], errno)


def raise_damage(path: str, manifest: Manifest, chunk: ChunkEntry, errno: int) -> NoReturn:
    """Raise what is wrong with a chunk: MediumError where `errno` says that it cannot be read, else DamagedError."""
    damage = _damage(path, manifest, chunk, errno)
    if errno:
        raise MediumError("read", path, OSError(errno, damage.reason), chunk.offset) from damage
    raise damage


def _damage(path: str, manifest: Manifest, chunk: ChunkEntry, errno: int) -> DamagedError:
    reason = f"a chunk cannot be read (errno {errno})" if errno else "a chunk fails its digest"
    leaves = leaves_in(manifest, chunk.start, chunk.data)
    return DamagedError(path, reason, offset=chunk.offset, length=chunk.stored, leaves=leaves)
