"""A read-only view of a store, a slot file, a linked folder, or the stores of all ranks (floor 3: imports below)."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from functools import partial as partial_
from types import TracebackType
from typing import Any, Self, TypeAlias, final

from pccheck.errors import (
    ClosedError,
    ContentError,
    MediumError,
    NoValidCheckpointError,
    ReusedError,
    StepNotFoundError,
    UsageError,
)
from pccheck.format import Record
from pccheck.reading.committed import HOME, Committed, restore_newest
from pccheck.reading.linked import LinkedFiles, is_linked, rank_name
from pccheck.reading.linkplaces import find_linked, holds_stores
from pccheck.reading.listing import Listing
from pccheck.reading.loading import load_files
from pccheck.reading.members import Files, StoreFiles
from pccheck.reading.places import Place, locate
from pccheck.reading.restored import Restored, Skipped
from pccheck.reading.restoring import assemble, candidates, fitting, load_newest, of_step, retried
from pccheck.reading.stored import Checkpoint, open_checkpoint
from pccheck.reading.world import WorldIdentity, look_at_world
from pccheck.storage.medium import Medium

Stored: TypeAlias = Checkpoint | Committed
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One checkpoint of a view.

    Args:
        step: the caller's label.
        counter: its place in the order of all checkpoints.
        incarnation: which opening of the store made it.
        metadata: what was saved beside the state.
        time: when it was made, in UTC.
        name: its file, relative to the store.
    """

    step: int
    counter: int
    incarnation: int
    metadata: dict[str, Any]
    time: datetime
    name: str


def open(path: str | os.PathLike[str]) -> View:
    """Open a store, a slot file, a job's folder of rank-00000, ... or a linked folder; nothing is locked or written.

    Of a job's folder it shows what all ranks hold: the tree and the leaves of rank 0, with arrays of which ranks stored
    parts put together, and so of a linked folder. Of one rank's store it shows the parts, as `pccheck.Shard`.

    Processes may be saving into the stores meanwhile, and the folders may be read-only.

    Raises:
        UsageError: there is nothing at the path, or it is no store, or a linked folder that was never finished; of
            Orbax steps it names the folder of an item, which can be opened.
        MediumError: it cannot be read.
        FormatError: it is a linked folder whose list cannot be read.
    """
    if is_linked(path):
        return _LinkedView(LinkedFiles(path))
    try:
        places = locate(path)
    except UsageError as error:
        raise _or_linked(path, error) from None
    if holds_stores(path) and not any(place.look().files for place in places):
        for place in places:
            place.close()
        raise _or_linked(path, UsageError(f"{path} holds no checkpoint"))
    if len(places) == 1 and places[0].is_at(path):
        return _StoreView(places[0])
    for place in places:
        place.close()
    return _WorldView(os.path.abspath(os.fspath(path)))


def _or_linked(path: str | os.PathLike[str], error: UsageError) -> UsageError:
    """Give the error that names what can be opened below a path; the given one where nothing can."""
    linked = find_linked(path) if os.path.isdir(path) else None
    return UsageError(linked.how_to_open()) if linked and "" not in linked.folders else error


@dataclass(frozen=True, kw_only=True)
class _Found:
    """One checkpoint that a look found: its record, a file of it, and what reads its manifest."""

    record: Record
    name: str
    abandoned: bool
    read: Callable[[], Stored] = field(repr=False)


class View(ABC):
    """What is in a store, or in the stores of all ranks, now; each call looks anew. Made by `pccheck.open`.

    Thread-safe. `view["model/w"]` reads one leaf of the newest checkpoint, and only the chunks that it lies in.
    """

    def __init__(self, path: str) -> None:
        self._path, self._closed = path, False

    @property
    def path(self) -> str:
        """The folder or file."""
        return self._path

    @property
    def checkpoints(self) -> list[Entry]:
        """Every checkpoint whose record and manifest are whole, newest first, without those on abandoned branches."""
        return retried(self._entries)

    def steps(self) -> list[int]:
        """Give the steps that can be restored, sorted."""
        return sorted({c.record.step for c in self._offered()})

    def latest(self) -> int | None:
        """Give the step of the newest checkpoint, None if there is none."""
        return next((c.record.step for c in self._offered()), None)

    def checkpoint(self, step: int | None = None) -> Stored:
        """Give the newest checkpoint (of a step) whose record and manifest are whole; its payload is not read yet.

        Raises:
            UsageError: no checkpoint is here at all.
            StepNotFoundError: none of this step is.
            NoValidCheckpointError: there are some, but the manifest of none is whole.
        """
        return retried(lambda: self._pick(step))

    @abstractmethod
    def restore(
        self, step: int | None = None, *, like: Any = None, fallback: bool = True, partial: bool = False
    ) -> Restored | None:
        """Give the newest checkpoint that verifies (of a step), as `Checkpointer.restore` does, and change nothing."""

    def __getitem__(self, path: str) -> Any:
        return retried(lambda: self._pick(None)[path])

    def __contains__(self, path: object) -> bool:
        return path in self.keys()

    def __iter__(self) -> Iterator[str]:
        return iter(self.keys())

    def __len__(self) -> int:
        return len(self.keys())

    def keys(self) -> list[str]:
        """Give the paths of the newest checkpoint's leaves; none where no checkpoint is."""
        return retried(lambda: self._pick(None).paths()) if self._offered() else []

    def close(self) -> None:
        """Close; later calls raise ClosedError. What was restored stays."""
        self._closed = True

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<View of {self.path}{' (closed)' if self._closed else ''}>"

    # -- inside ----------------------------------------------------------------------------------------------------

    @abstractmethod
    def _find(self) -> list[_Found]:
        """Look for checkpoints that are there, newest first, abandoned ones included."""

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError(f"the view of {self.path} is closed; open it again")

    def _offered(self) -> list[_Found]:
        self._check_open()
        return [found for found in self._find() if not found.abandoned]

    def _entries(self) -> list[Entry]:
        entries = []
        for found in self._offered():
            try:
                read = found.read()
            except ReusedError:
                raise
            except (ContentError, MediumError):
                continue
            record = found.record
            entries.append(
                Entry(
                    step=record.step,
                    counter=record.counter,
                    incarnation=record.incarnation,
                    metadata=read.metadata,
                    time=_EPOCH + timedelta(microseconds=record.time_ns // 1000),
                    name=read.name,
                )
            )
        return entries

    def _pick(self, step: int | None) -> Stored:
        self._check_open()
        wanted = of_step(
            self._find(), step, self.path, step_of=lambda f: f.record.step, abandoned=lambda f: f.abandoned
        )
        skipped = []
        for each in wanted:
            try:
                return each.read()
            except ReusedError:
                raise
            except (ContentError, MediumError) as error:
                skipped.append(Skipped(each.record.counter, each.record.step, each.name, str(error)))
        if skipped:
            raise NoValidCheckpointError(self.path, skipped)
        raise UsageError(f"{self.path} holds no checkpoint")


@final
class _StoreView(View):
    """One store, or one slot file."""

    def __init__(self, place: Place) -> None:
        super().__init__(place.path)
        self._place = place

    def restore(
        self, step: int | None = None, *, like: Any = None, fallback: bool = True, partial: bool = False
    ) -> Restored | None:
        """Give the newest checkpoint that verifies (of a step), and change nothing."""
        loaded = load_newest(
            self._look, self._open, where=self.path, step=step, fallback=fallback, accept=fitting(like, partial=partial)
        )
        return None if loaded is None else assemble(loaded, like=like, partial=partial)

    def close(self) -> None:
        """Close; later calls raise ClosedError."""
        super().close()
        self._place.close()

    def _find(self) -> list[_Found]:
        return [
            _Found(
                record=c.record, name=c.names[0], abandoned=c.abandoned, read=partial_(open_checkpoint, self._open, c)
            )
            for c in candidates(self._look())
        ]

    def _look(self) -> Listing:
        self._check_open()
        return self._place.look()

    def _open(self, name: str) -> Medium:
        return self._place.open(name)


@final
class _WorldView(View):
    """The stores of all ranks of a job."""

    def restore(
        self, step: int | None = None, *, like: Any = None, fallback: bool = True, partial: bool = False
    ) -> Restored | None:
        """Give the newest checkpoint that all of its ranks hold and that verifies (of a step), and change nothing."""
        self._check_open()
        return restore_newest(self.path, step=step, like=like, fallback=fallback, partial=partial)

    def _find(self) -> list[_Found]:
        found = []
        for checkpoint in look_at_world(self.path).checkpoints:
            if checkpoint.complete:
                home = checkpoint.members[HOME].candidate
                read = partial_(_committed, self.path, checkpoint.identity)
                found.append(_Found(record=home.record, name=home.names[0], abandoned=checkpoint.abandoned, read=read))
        return found


def _committed(root: str, identity: WorldIdentity) -> Committed:
    return Committed(StoreFiles(root, identity))


@final
class _LinkedView(View):
    """A linked folder: one checkpoint."""

    def __init__(self, files: LinkedFiles) -> None:
        super().__init__(files.where)
        self._files = files

    def restore(
        self, step: int | None = None, *, like: Any = None, fallback: bool = True, partial: bool = False
    ) -> Restored | None:
        """Give the checkpoint, and change nothing; there is none to fall back to."""
        self._check_open()
        files: Files = self._files
        if step not in (None, files.step):
            raise StepNotFoundError(step, [files.step], self.path)
        return load_files(files, HOME, like=like, partial=partial).restored

    def _find(self) -> list[_Found]:
        record = self._files.record(HOME)
        return [_Found(record=record, name=rank_name(HOME), abandoned=False, read=partial_(Committed, self._files))]
