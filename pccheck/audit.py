"""Facts about the stores under a path, for `pccheck inspect` (floor 4: imports judging, reports and reading, never a
writer).

It looks and cannot repair: nothing is locked, mapped or written, and a store may be in use meanwhile.
"""

from __future__ import annotations

import os

from pccheck import judging
from pccheck.errors import ReusedError, UsageError
from pccheck.format import SlotState
from pccheck.judging import Progress as Progress
from pccheck.linkaudit import audit_linked
from pccheck.reading.linkplaces import find_linked, holds_stores
from pccheck.reading.listing import Listing, SlotFile
from pccheck.reading.places import Place, locate
from pccheck.reports import SlotReport, State, StoreReport, exit_code

_TRIES = 10


def audit(path: str | os.PathLike[str], *, verify: bool = False, progress: Progress | None = None) -> list[StoreReport]:
    """Look at a store, a slot file, a folder of rank-00000, rank-00001, ... stores, or what holds linked folders.

    Args:
        path: what to look at.
        verify: read and digest every byte of every checkpoint; else records and manifests only.
        progress: called with (file name, bytes read since the last call, bytes to read in all) while verifying.

    Raises:
        UsageError: there is no such path, or it holds no store, nor steps of Orbax.
        MediumError: a single slot file cannot be opened.
    """
    reports: list[StoreReport] = []
    problem: UsageError | None = None
    try:
        reports = _audit_stores(path, verify, progress)
        if any(report.slots for report in reports) and not holds_stores(path):
            return reports
    except UsageError as error:
        problem = error
    linked = find_linked(path)
    if linked:
        stores = [_audit_place(Place.of_store(store), None, verify, progress) for store in linked.stores]
        # A CHECK without any slot, which somebody left among steps of Orbax, holds nothing.
        return [audit_linked(linked, verify, progress), *stores, *(report for report in reports if report.slots)]
    if problem is not None:
        raise problem
    return reports


def _audit_stores(path: str | os.PathLike[str], verify: bool, progress: Progress | None) -> list[StoreReport]:
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
            return judging.report(
                file, _state(file, listing), verdict="ok", verified=known.verified, leaves=known.leaves,
                metadata=known.metadata,
            )  # fmt: skip
        try:
            found = judging.judge(place.open, file, _state(file, listing), deep, progress)
        except ReusedError:
            again = next((f for f in place.look().files if f.name == file.name), None)
            if again is None:
                break
            file = again
            continue
        if file.record is not None:
            done[file.record.identity] = found
        return found
    return judging.report(file, _state(file, listing), verdict="reused")


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
    if file.linked:
        return "linked" if file.links > 1 else "free"
    check = listing.check
    return "published" if check is not None and check.word == record.word else "sealed"
