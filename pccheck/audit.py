"""Facts about the stores under a path, for `pccheck inspect` (floor 4: imports reports, listing and reader, never a
writer).

It looks and cannot repair: nothing is locked, mapped or written, and a store may be in use meanwhile.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from pccheck import format
from pccheck.errors import ContentError, DamagedError, MediumError, ReusedError
from pccheck.format import SlotState
from pccheck.reading.listing import Listing, SlotFile
from pccheck.reading.places import Place, locate
from pccheck.reading.reader import read_manifest, verify
from pccheck.reports import Damage, SlotReport, State, StoreReport, exit_code
from pccheck.state.manifest import Manifest
from pccheck.storage.medium import Medium

Progress = Callable[[str, int, int], None]

_TRIES = 10


def audit(path: str | os.PathLike[str], *, verify: bool = False, progress: Progress | None = None) -> list[StoreReport]:
    """Look at a store, a single slot file, or a folder of rank-00000, rank-00001, ... stores.

    Args:
        path: what to look at.
        verify: read and digest every byte of every checkpoint; else records and manifests only.
        progress: called with (file name, bytes read since the last call, bytes to read in all) while verifying.

    Raises:
        UsageError: there is no such path, or it holds no store.
        MediumError: a single slot file cannot be opened.
    """
    previous: list[set[tuple[int | None, int | None, int | None]]] = []
    for _ in range(_TRIES):
        places = locate(path)
        alone = len(places) == 1 and places[0].is_at(path)
        reports = [
            _audit_place(place, None, verify, progress) if alone else _audit_rank(place, verify, progress)
            for place in places
        ]
        found = [{slot.identity for slot in report.slots} for report in reports]
        # Ranks that save meanwhile may have let go of one checkpoint here before another was found there.
        if exit_code(reports) == 0 or any(report.damaged for report in reports) or found == previous or alone:
            break
        previous = found
    return reports


def _audit_rank(place: Place, deep: bool, progress: Progress | None) -> StoreReport:
    """Judge one rank's store; progress is told with the folder's name before the file's."""
    folder = os.path.basename(place.path)

    def told(name: str, count: int, total: int) -> None:
        if progress:
            progress(f"{folder}/{name}", count, total)

    return _audit_place(place, place.rank, deep, told if progress else None)


def _audit_place(place: Place, rank: int | None, deep: bool, progress: Progress | None) -> StoreReport:
    """Judge every file; while a fast writer moved its only checkpoint from slot to slot meanwhile, look again."""
    try:
        for _ in range(_TRIES):
            listing = place.look()
            done: dict[tuple[int | None, int | None, int | None], SlotReport] = {}
            slots = tuple(_audit_file(place, listing, file, deep, progress, done) for file in listing.files)
            report = StoreReport(path=place.path, check=listing.check, slots=slots, rank=rank)
            moving = any(slot.state == "filling" or slot.verdict == "reused" for slot in slots)
            if report.valid or report.damaged or not moving:
                break
        return report
    finally:
        place.close()


def _audit_file(
    place: Place,
    listing: Listing,
    file: SlotFile,
    deep: bool,
    progress: Progress | None,
    done: dict[tuple[int | None, int | None, int | None], SlotReport],
) -> SlotReport:
    """Judge one file; a slot that a writer takes meanwhile is looked at again, a few times."""
    for _ in range(_TRIES):
        known = None if file.record is None else done.get(file.record.identity)
        if known is not None and file.links > 1 and known.verdict == "ok":
            return _report(
                file, listing, verdict="ok", verified=known.verified, leaves=known.leaves, metadata=known.metadata
            )
        try:
            report = _judge(place, listing, file, deep, progress)
        except ReusedError:
            again = next((f for f in place.look().files if f.name == file.name), None)
            if again is None:
                break
            file = again
            continue
        if file.record is not None:
            done[file.record.identity] = report
        return report
    return _report(file, listing, verdict="reused")


def _judge(place: Place, listing: Listing, file: SlotFile, deep: bool, progress: Progress | None) -> SlotReport:
    if file.problem is not None:
        length = format.RECORD_BYTES if file.file_bytes >= format.RECORD_BYTES else file.file_bytes
        return _report(file, listing, verdict="damaged", damages=(Damage(reason=file.problem, length=length),))
    if file.record is None or not file.sealed:
        return _report(file, listing)
    manifest: Manifest | None = None
    try:
        medium = place.open(file.name)
    except MediumError as error:
        if isinstance(error.cause, FileNotFoundError):
            raise ReusedError(f"{file.name} was removed meanwhile") from error
        return _report(file, listing, verdict="damaged", damages=(Damage(reason=str(error)),))
    try:
        manifest = read_manifest(medium, file.record)
        damages = _verify(medium, file, manifest, progress) if deep else ()
    except ReusedError:
        raise
    except (ContentError, MediumError) as error:
        damages = (_damage(error, medium.path),)
    finally:
        medium.close()
    return _report(
        file,
        listing,
        verdict="damaged" if damages else "ok",
        verified=deep and manifest is not None,
        leaves=None if manifest is None else len(manifest.leaves),
        metadata=None if manifest is None else manifest.metadata,
        damages=damages,
    )


def _verify(medium: Medium, file: SlotFile, manifest: Manifest, progress: Progress | None) -> tuple[Damage, ...]:
    assert file.record is not None
    total = sum(chunk.stored for chunk in manifest.chunks)
    report = (lambda count: progress(file.name, count, total)) if progress else None
    return tuple(_damage(damage, medium.path) for damage in verify(medium, file.record, manifest, report))


def _damage(error: ContentError | MediumError, path: str) -> Damage:
    if isinstance(error, DamagedError):
        return Damage(reason=error.reason, offset=error.offset, length=error.length, leaves=error.leaves)
    reason = str(error).removeprefix(f"{path}: ")
    return Damage(reason=reason, offset=(error.offset or 0) if isinstance(error, MediumError) else 0)


def _state(file: SlotFile, listing: Listing) -> State:
    record = file.record
    if file.problem is not None:
        return "unreadable"
    if record is None:
        return "free"
    if record.state == SlotState.FILLING:
        return "filling"
    if record.state == SlotState.WITHDRAWN:
        return "withdrawn"
    if file.abandoned:
        return "abandoned"
    if file.kept:
        return "kept"
    check = listing.check
    return "published" if check is not None and check.word == record.word else "sealed"


def _report(file: SlotFile, listing: Listing, **facts: Any) -> SlotReport:
    record = file.record
    if record is None:
        return SlotReport(name=file.name, state=_state(file, listing), file_bytes=file.file_bytes, **facts)
    return SlotReport(
        name=file.name,
        state=_state(file, listing),
        counter=record.counter,
        step=record.step,
        incarnation=record.incarnation,
        base=record.base,
        rank=record.rank,
        world=record.world,
        file_bytes=file.file_bytes,
        payload_bytes=record.payload_bytes if record.state == SlotState.SEALED else None,
        time_ns=record.time_ns,
        **facts,
    )
