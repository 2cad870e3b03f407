"""Judges one file that should hold a checkpoint, for audits (floor 4: imports reports, listing and reader)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pccheck import format
from pccheck.errors import ContentError, DamagedError, MediumError, ReusedError
from pccheck.format import SlotState
from pccheck.reading.listing import SlotFile
from pccheck.reading.reader import read_manifest, verify
from pccheck.reports import Damage, SlotReport, State
from pccheck.state.entries import firsts
from pccheck.state.manifest import Manifest
from pccheck.storage.medium import Medium

Progress = Callable[[str, int, int], None]


def judge(
    open_medium: Callable[[str], Medium], file: SlotFile, state: State, deep: bool, progress: Progress | None
) -> SlotReport:
    """Judge one file; raises ReusedError where a writer takes it meanwhile.

    Args:
        open_medium: opens it by its name.
        file: what a look found.
        state: what it is.
        deep: read and digest every byte.
        progress: called with (file name, bytes read since the last call, bytes to read in all).
    """
    if file.problem is not None:
        length = format.RECORD_BYTES if file.file_bytes >= format.RECORD_BYTES else file.file_bytes
        return report(file, state, verdict="damaged", damages=(Damage(reason=file.problem, length=length),))
    if not file.whole or state == "free":
        return report(file, state)
    assert file.record is not None, "a whole file has a record"
    manifest: Manifest | None = None
    try:
        medium = open_medium(file.name)
    except MediumError as error:
        if isinstance(error.cause, FileNotFoundError):
            raise ReusedError(f"{file.name} was removed meanwhile") from error
        return report(file, state, verdict="damaged", damages=(Damage(reason=str(error)),))
    try:
        manifest = read_manifest(medium, file.record)
        damages = _verify(medium, file, manifest, progress) if deep else ()
    except ReusedError:
        raise
    except (ContentError, MediumError) as error:
        damages = (_damage(error, medium.path),)
    finally:
        medium.close()
    return report(
        file,
        state,
        verdict="damaged" if damages else "ok",
        verified=deep and manifest is not None,
        leaves=None if manifest is None else len(firsts(manifest.leaves)),
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


def report(file: SlotFile, state: State, **facts: Any) -> SlotReport:
    """Say what a file's record says, and these facts."""
    record = file.record
    if record is None:
        return SlotReport(name=file.name, state=state, file_bytes=file.file_bytes, **facts)
    return SlotReport(
        name=file.name,
        state=state,
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
