"""Picks the newest checkpoint that verifies, and builds its state (floor 2: imports floor 1 and below).

The Checkpointer and the read-only view restore through this one piece of code.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias, TypeVar

from pccheck.errors import (
    ContentError,
    DamagedError,
    FormatError,
    MediumError,
    MismatchError,
    NoValidCheckpointError,
    ReusedError,
    StepNotFoundError,
)
from pccheck.format import Record, SlotState
from pccheck.leaves import ABSENT, KindTable
from pccheck.reading.listing import Listing
from pccheck.reading.reader import DEFAULT_THREADS, confirm, opened, read_manifest, read_record, under_any
from pccheck.reading.reads import read_wanted
from pccheck.reading.restored import Restored as Restored
from pccheck.reading.restored import Skipped as Skipped
from pccheck.state import assembly
from pccheck.state.fit import Fit
from pccheck.state.kinds import kind_of
from pccheck.state.manifest import Manifest
from pccheck.state.wanting import Ask
from pccheck.storage.medium import Medium

T = TypeVar("T")

ATTEMPTS = 20
LOCK_AFTER = 2  # lost races; from then on the slot is locked while it is read


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """One sealed checkpoint and the names it can be read under; a copy may stand in for a damaged original."""

    record: Record
    names: tuple[str, ...]
    abandoned: bool = False


@dataclass(frozen=True, kw_only=True)
class Loaded:
    """A checkpoint of which what is wanted is in memory, every byte verified.

    Args:
        record: its record.
        name: the file it was read from.
        manifest: its manifest.
        read: gives the bytes of what a Want asks for.
        whole: every chunk of it was read and verified.
        skipped: what was passed over, newest first.
        fit: how it fits `like`, where one was given.
    """

    record: Record
    name: str
    manifest: Manifest
    read: Callable[[Ask], memoryview] = field(repr=False)
    whole: bool = True
    skipped: tuple[Skipped, ...] = ()
    fit: Fit | None = field(default=None, repr=False)


Accept: TypeAlias = Callable[[Manifest], Fit | None]  # what is wanted, and how it fits; None = all, as stored


def candidates(listing: Listing) -> list[Candidate]:
    """Give the sealed checkpoints of a listing, newest first, each once however many names it has."""
    found: dict[tuple[int, int, int], Candidate] = {}
    for file in listing.files:
        if file.record is None or not file.sealed:
            continue
        known = found.get(file.record.identity)
        found[file.record.identity] = Candidate(
            record=file.record,
            names=(*(known.names if known else ()), file.name),
            abandoned=file.abandoned,
        )
    return sorted(found.values(), key=lambda c: (c.record.counter, c.record.incarnation), reverse=True)


def load_newest(
    look: Callable[[], Listing],
    open_medium: Callable[[str], Medium],
    *,
    where: str,
    step: int | None = None,
    fallback: bool = True,
    accept: Accept = lambda manifest: None,
    threads: int = DEFAULT_THREADS,
) -> Loaded | None:
    """Give the newest checkpoint that verifies, with what is wanted of it; None only where no sealed record is.

    Args:
        look: lists the store; called again whenever a slot was reused while it was being read, at most 20 times.
        open_medium: opens a file of the listing by its name.
        where: names the store in errors.
        step: only checkpoints of this step, those on abandoned branches last; None = the newest of any.
        fallback: pass over what does not verify; False = raise instead.
        accept: called with a manifest before its payload is read: gives what is wanted of it, see `fitting`; what it
            raises is raised.
        threads: how many chunks are read at once.

    Raises:
        NoValidCheckpointError: checkpoints are there but none verifies.
        StepNotFoundError: no checkpoint of `step` is there.
        DamagedError, FormatError, MediumError: the first that does not verify, with `fallback=False` or `step`.
        ReusedError: a writer was faster each time.
    """
    passed: dict[tuple[int, int, int], Skipped] = {}
    for attempt in range(ATTEMPTS):
        listing = look()
        wanted = of_step(
            candidates(listing), step, where, step_of=lambda c: c.record.step, abandoned=lambda c: c.abandoned
        )
        first_error: ContentError | MediumError | None = None
        try:
            for candidate in wanted:
                if candidate.record.identity in passed:
                    continue
                # By step, a slot must not be held: what it is refilled with may be of another step.
                lock = attempt >= LOCK_AFTER and step is None
                try:
                    loaded = _load(candidate, open_medium, accept, threads, lock=lock)
                except (DamagedError, FormatError, MediumError) as error:
                    if not fallback:
                        raise
                    first_error = first_error or error
                    name = ", ".join(candidate.names)
                    record = candidate.record
                    passed[record.identity] = Skipped(record.counter, record.step, name, str(error))
                    continue
                return replace(loaded, skipped=(*unreadable(listing), *newest_first(passed.values())))
        except ReusedError:
            continue
        if step is not None and first_error is not None:
            raise first_error
        if listing.moving:
            continue
        skipped = (*unreadable(listing), *newest_first(passed.values()), *_left_behind(listing))
        if skipped:
            raise NoValidCheckpointError(where, skipped)
        return None
    raise ReusedError(
        f"{where}: {ATTEMPTS} times in a row a slot was given to a newer checkpoint while it was being read; "
        "read again, or let the writer keep more checkpoints"
    )


def assemble(loaded: Loaded, kinds: KindTable = kind_of, *, like: Any = None, partial: bool = False) -> Restored:
    """Give the state of a loaded checkpoint, in the shape of `like` where that is given.

    Raises:
        MismatchError: it does not fit `like`, and `partial` is off.
        FormatError: a leaf is not what its kind can build.
    """
    state, mismatches = assembly.assemble(
        loaded.manifest, loaded.read, kinds, like=ABSENT if like is None else like, fit=loaded.fit, partial=partial
    )
    return Restored(
        step=loaded.record.step,
        counter=loaded.record.counter,
        state=state,
        metadata=dict(loaded.manifest.metadata),
        skipped=loaded.skipped,
        mismatches=mismatches,
    )


def fitting(like: Any, kinds: KindTable = kind_of, *, partial: bool = False) -> Accept:
    """Give an `accept` for `load_newest`: what `like` wants; MismatchError for a checkpoint that does not fit it."""

    def accept(manifest: Manifest) -> Fit | None:
        if like is None:
            return None
        fit = assembly.fit_of(manifest, like, kinds)
        if fit.mismatches and not partial:
            raise MismatchError(fit.mismatches)
        return fit

    return accept


def of_step(
    found: Sequence[T], step: int | None, where: str, *, step_of: Callable[[T], int], abandoned: Callable[[T], bool]
) -> list[T]:
    """Give what may be restored of what was found, in its order; of one step, what is on abandoned branches last.

    Args:
        found: the checkpoints, newest first.
        step: only those of this step; None = of any, but on no abandoned branch.
        where: names the store in errors.
        step_of, abandoned: say of one which step it is of, and whether a roll-back left it behind.

    Raises:
        StepNotFoundError: no checkpoint of `step` is there.
    """
    offered = [each for each in found if not abandoned(each)]
    if step is None:
        return offered
    wanted = [each for each in found if step_of(each) == step]
    if not wanted:
        raise StepNotFoundError(step, sorted({step_of(each) for each in offered}), where)
    return sorted(wanted, key=abandoned)


def retried(attempt: Callable[[], T]) -> T:
    """Give what `attempt` gives; where a writer gave a slot to a newer checkpoint meanwhile, try it 20 times in all."""
    for _ in range(ATTEMPTS - 1):
        try:
            return attempt()
        except ReusedError:
            continue
    return attempt()


def _load(
    candidate: Candidate, open_medium: Callable[[str], Medium], accept: Accept, threads: int, *, lock: bool
) -> Loaded:
    """Read one checkpoint under the first of its names that verifies; raise the first error if none does."""

    def load(name: str) -> Loaded:
        with opened(open_medium, name) as medium:
            record = _hold(medium, candidate.record) if lock else candidate.record
            confirm(medium, record)
            manifest = read_manifest(medium, record)
            fit = accept(manifest)
            read, whole = read_wanted(medium, manifest, None if fit is None else fit.wants, threads=threads)
            return Loaded(record=record, name=name, manifest=manifest, read=read, whole=whole, fit=fit)

    return under_any(candidate.names, load)


def _hold(medium: Medium, record: Record) -> Record:
    """Lock a slot against its writer until the medium is closed, and give the record it holds now: it, or a newer one.

    A writer that is faster than a reader would otherwise win every race.
    """
    if medium.lock_shared():
        now = read_record(medium)
        if now is not None and now.state == SlotState.SEALED and now.counter >= record.counter:
            return now
    raise ReusedError(f"{medium.path} is being given to a newer checkpoint; read again")


def newest_first(passed: Iterable[Skipped]) -> list[Skipped]:
    """Give what was passed over in its order; what no record tells the counter of, last."""
    return sorted(passed, key=lambda s: s.counter or 0, reverse=True)


def unreadable(listing: Listing) -> list[Skipped]:
    """Give the files whose record cannot be believed: each may have been a checkpoint."""
    found = []
    for file in listing.files:
        if file.problem is not None:
            counter, step = (None, None) if file.record is None else (file.record.counter, file.record.step)
            found.append(Skipped(counter, step, file.name, file.problem))
    return found


def _left_behind(listing: Listing) -> list[Skipped]:
    return [
        Skipped(c.record.counter, c.record.step, c.names[0], "on a branch that a roll-back abandoned; ask by step")
        for c in candidates(listing)
        if c.abandoned
    ]
