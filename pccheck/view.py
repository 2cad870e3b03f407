"""A read-only view of a store or of one slot file (floor 3: imports floors 0 to 2)."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from types import TracebackType
from typing import Any, Self, TypeVar, final

from pccheck.errors import ClosedError, NoValidCheckpointError, ReusedError, StepNotFoundError, UsageError
from pccheck.reading.listing import Listing
from pccheck.reading.places import Place, locate
from pccheck.reading.restoring import ATTEMPTS, Candidate, Restored, Skipped, assemble, candidates, fitting, load_newest
from pccheck.reading.stored import Checkpoint, open_checkpoint
from pccheck.storage.medium import Medium

T = TypeVar("T")
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
    """Open a store, one slot file, or one rank's store for reading; nothing is locked or written.

    A process may be saving into the store meanwhile, and the folder may be read-only.

    Raises:
        UsageError: there is nothing at the path, or it is no store, or the stores of several ranks.
        MediumError: it cannot be read.
    """
    places = locate(path)
    if len(places) == 1:
        return View(places[0])
    for place in places:
        place.close()
    names = ", ".join(os.path.basename(p.path) for p in places[:4])
    raise UsageError(f"{os.fspath(path)} holds {len(places)} stores; open one of them: {names}, ...")


@final
class View:
    """What is in a store now; each call looks anew. Thread-safe. Made by `pccheck.open`.

    `view["model/w"]` reads one leaf of the newest checkpoint, and only the chunks that it lies in.
    """

    def __init__(self, place: Place) -> None:
        self._place = place
        self._closed = False

    @property
    def path(self) -> str:
        """The folder or file."""
        return self._place.path

    @property
    def checkpoints(self) -> list[Entry]:
        """Every checkpoint whose record and manifest are whole, newest first, without those on abandoned branches."""
        return self._retry(self._entries)

    def steps(self) -> list[int]:
        """Give the steps that can be restored, sorted."""
        return sorted({c.record.step for c in self._offered()})

    def latest(self) -> int | None:
        """Give the step of the newest checkpoint, None if there is none."""
        return next((c.record.step for c in self._offered()), None)

    def checkpoint(self, step: int | None = None) -> Checkpoint:
        """Give the newest checkpoint (of a step) whose record and manifest are whole; its payload is not read yet.

        Raises:
            UsageError: no checkpoint is here at all.
            StepNotFoundError: none of this step is.
            NoValidCheckpointError: there are some, but the manifest of none is whole.
        """
        return self._retry(lambda: self._pick(step))

    def restore(
        self, step: int | None = None, *, like: Any = None, fallback: bool = True, partial: bool = False
    ) -> Restored | None:
        """Give the newest checkpoint that verifies (of a step), as `Checkpointer.restore` does, and change nothing."""
        loaded = load_newest(
            self._look, self._open, where=self.path, step=step, fallback=fallback, accept=fitting(like, partial=partial)
        )
        return None if loaded is None else assemble(loaded, like=like, partial=partial)

    def __getitem__(self, path: str) -> Any:
        return self._retry(lambda: self._pick(None)[path])

    def __contains__(self, path: object) -> bool:
        return path in self.keys()

    def __iter__(self) -> Iterator[str]:
        return iter(self.keys())

    def __len__(self) -> int:
        return len(self.keys())

    def keys(self) -> list[str]:
        """Give the paths of the newest checkpoint's leaves; none where no checkpoint is."""
        return self.checkpoint().paths() if self._offered() else []

    def close(self) -> None:
        """Close; later calls raise ClosedError. What was restored stays."""
        self._closed = True
        self._place.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<View of {self.path}{' (closed)' if self._closed else ''}>"

    # -- inside ----------------------------------------------------------------------------------------------------

    def _look(self) -> Listing:
        if self._closed:
            raise ClosedError(f"the view of {self.path} is closed; open it again")
        return self._place.look()

    def _open(self, name: str) -> Medium:
        return self._place.open(name)

    def _offered(self) -> list[Candidate]:
        return [c for c in candidates(self._look()) if not c.abandoned]

    def _entries(self) -> list[Entry]:
        found = []
        for candidate in self._offered():
            read = open_checkpoint(self._open, candidate)
            if not isinstance(read, Checkpoint):
                continue
            record = candidate.record
            found.append(
                Entry(
                    step=record.step,
                    counter=record.counter,
                    incarnation=record.incarnation,
                    metadata=read.metadata,
                    time=_EPOCH + timedelta(microseconds=record.time_ns // 1000),
                    name=read.name,
                )
            )
        return found

    def _pick(self, step: int | None) -> Checkpoint:
        found = candidates(self._look())
        if step is None:
            wanted = [c for c in found if not c.abandoned]
        else:
            wanted = sorted((c for c in found if c.record.step == step), key=lambda c: c.abandoned)
            if not wanted:
                steps = {c.record.step for c in found if not c.abandoned}
                raise StepNotFoundError(step, sorted(steps), self.path)
        skipped = []
        for candidate in wanted:
            read = open_checkpoint(self._open, candidate)
            if isinstance(read, Checkpoint):
                return read
            skipped.append(Skipped(candidate.record.counter, candidate.record.step, candidate.names[0], str(read)))
        if skipped:
            raise NoValidCheckpointError(self.path, skipped)
        raise UsageError(f"{self.path} holds no checkpoint")

    def _retry(self, attempt: Callable[[], T]) -> T:
        """Try again, at most 20 times, where a writer gave a slot to a newer checkpoint meanwhile."""
        for _ in range(ATTEMPTS - 1):
            try:
                return attempt()
            except ReusedError:
                continue
        return attempt()
