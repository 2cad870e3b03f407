"""Facts about linked folders, for `pccheck inspect` (floor 4: imports judging, reports and reading, never a writer)."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from functools import partial

from pccheck import format, judging
from pccheck.errors import ContentError, MediumError, ReusedError, UsageError
from pccheck.format import Record
from pccheck.judging import Progress
from pccheck.reading.linked import LIST_NAME, read_list
from pccheck.reading.linkplaces import LinkPlaces, is_any_linked, is_temporary, names_in, step_of
from pccheck.reading.listing import SlotFile, list_file
from pccheck.reports import Damage, SlotReport, State, StoreReport
from pccheck.storage.directory import Directory
from pccheck.storage.medium import Medium

_TRIES = 3
_ADAPTERS = ("shardings", "step_name")  # keys of metadata that format.md reserves: no user gave them


def audit_linked(places: LinkPlaces, deep: bool, progress: Progress | None) -> StoreReport:
    """Judge every file of every linked folder, one that is removed meanwhile left out; and name what is of Orbax."""
    slots: list[SlotReport] = []
    for folder in places.folders:
        slots += _audit_folder(places.at(folder), folder, deep, progress)
    for folder in places.foreign:
        slots.append(SlotReport(name=folder or ".", state="of Orbax", step=step_of(places.at(folder))))
    return StoreReport(path=places.path, check=None, slots=tuple(slots), folders=True)


def _audit_folder(where: str, folder: str, deep: bool, progress: Progress | None) -> list[SlotReport]:
    """Judge one folder; whoever deletes it meanwhile removes its files one by one, which is no damage."""
    found: list[SlotReport] = []
    for _ in range(_TRIES):
        try:
            found = _judged(where, folder, deep, progress)
        except (ContentError, MediumError) as error:  # of its list; UsageError: it went away, or comes into being
            name = os.path.join(folder, LIST_NAME)
            found = [SlotReport(name=name, state="unreadable", verdict="damaged", damages=(Damage(reason=str(error)),))]
        except UsageError:
            continue
        if all(slot.verdict != "damaged" for slot in found):
            break
    return found if is_any_linked(where) else []


def _judged(where: str, folder: str, deep: bool, progress: Progress | None) -> list[SlotReport]:
    names = names_in(where)
    listed = read_list(where) if LIST_NAME in names and not is_temporary(where) else None
    with closing(Directory(where, create=False, write=False)) as volume:
        if listed is None:
            return [_judge(volume, folder, name, None, deep, progress) for name in names if name.endswith(".pcc")]
        return [
            _judge(volume, folder, one.file, partial(listed.lists, rank), deep, progress)
            for rank, one in enumerate(listed.ranks)
        ]


def _judge(
    volume: Directory, folder: str, name: str, lists: Callable[[Record], bool] | None, deep: bool,
    progress: Progress | None,
) -> SlotReport:  # fmt: skip
    """Judge one file; `lists` tells whether its folder's list is of this record, None where there is no list."""
    shown = os.path.join(folder, name)
    try:
        (file,) = list_file(volume, name).files
    except MediumError as error:
        file = SlotFile(name=name, problem=str(error))
    reason = None if lists is None else _differs(file, lists)
    file = replace(file, name=shown, problem=file.problem or reason)
    if lists is None:
        return judging.report(file, "unfinished")
    state: State = "linked" if file.problem is None else "unreadable"
    try:
        return _without_notes(judging.judge(partial(_open, volume, name), file, state, deep, progress))
    except ReusedError as error:
        return judging.report(file, state, verdict="damaged", damages=(Damage(reason=str(error)),))


def _without_notes(report: SlotReport) -> SlotReport:
    """Leave out of the metadata what an adapter noted there for itself."""
    told = {key: value for key, value in (report.metadata or {}).items() if key not in _ADAPTERS}
    return replace(report, metadata=None if report.metadata is None else told)


def _open(volume: Directory, name: str, shown: str) -> Medium:
    return volume.open(name)


def _differs(file: SlotFile, lists: Callable[[Record], bool]) -> str | None:
    """Say why a file is not the one that its folder's list names."""
    if file.problem is not None:
        return None
    record = file.record
    if record is None or record.state is not format.SlotState.SEALED:
        return "it holds no whole checkpoint"
    if not lists(record):
        return f"it holds step {record.step}, counter {record.counter}, not what {LIST_NAME} lists"
    return None
