"""A read-only view of a store or of one slot file (floor 3: imports restoring, places, kinds and below)."""

from __future__ import annotations

import difflib
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from types import TracebackType
from typing import Any, Self, TypeVar, final

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
from pccheck.kinds import kind_of
from pccheck.manifest import Manifest
from pccheck.medium import Medium
from pccheck.places import Place, locate
from pccheck.reader import confirm, read_leaves, read_manifest, read_payload
from pccheck.restoring import ATTEMPTS, Candidate, Loaded, Restored, Skipped, assemble, candidates, load_newest

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
        loaded = load_newest(self._look, self._open, where=self.path, step=step, fallback=fallback)
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

    def _look(self) -> Any:
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
            read = _read(self._open, candidate)
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
            read = _read(self._open, candidate)
            if isinstance(read, Checkpoint):
                return read
            skipped.append(Skipped(candidate.record.counter, candidate.record.step, candidate.names[0], str(read)))
        if skipped:
            raise NoValidCheckpointError(self.path, skipped)
        raise UsageError(f"{self.path} holds no checkpoint")

    def _retry(self, attempt: Callable[[], T]) -> T:
        """Try again, at most 10 times, where a writer gave a slot to a newer checkpoint meanwhile."""
        for _ in range(ATTEMPTS - 1):
            try:
                return attempt()
            except ReusedError:
                continue
        return attempt()


@final
class Checkpoint:
    """One checkpoint of a view; its payload is read when it is asked for. Thread-safe.

    A writer may give its slot to a newer checkpoint: reading then raises ReusedError.
    """

    def __init__(self, open_medium: Callable[[str], Medium], name: str, record: Record, manifest: Manifest) -> None:
        self._open, self._manifest, self._record = open_medium, manifest, record
        self.name = name
        self.step, self.counter = record.step, record.counter

    def __repr__(self) -> str:
        return f"<Checkpoint step {self.step}, counter {self.counter} in {self.name}>"

    @property
    def metadata(self) -> dict[str, Any]:
        """What was saved beside the state."""
        return dict(self._manifest.metadata)

    def paths(self) -> list[str]:
        """Give the paths of the leaves, in the order of the state."""
        return [leaf.path for leaf in self._manifest.leaves]

    def state(self, like: Any = None, partial: bool = False) -> Any:
        """Give the whole state, every byte verified; `restore` gives the mismatches of `partial` as well."""
        return self.restore(like=like, partial=partial).state

    def restore(self, like: Any = None, partial: bool = False) -> Restored:
        """Give the whole state, every byte verified, in the shape of `like`.

        Raises:
            DamagedError: a byte fails its digest.
            MismatchError: it does not fit `like`.
            ReusedError: the slot was given to a newer checkpoint.
            MediumError: it cannot be read.
        """
        medium = self._opened()
        try:
            payload = read_payload(medium, self._manifest)
        finally:
            medium.close()
        loaded = Loaded(record=self._record, name=self.name, manifest=self._manifest, payload=payload)
        return assemble(loaded, like=like, partial=partial)

    def __getitem__(self, path: str) -> Any:
        return self.read([path])[0]

    def read(self, paths: Sequence[str]) -> list[Any]:
        """Give single leaves; only the chunks that they lie in are read, and all of those are verified.

        Raises:
            KeyError: there is no such leaf.
            DamagedError, ReusedError, MediumError: as `restore`.
        """
        known = {leaf.path: index for index, leaf in enumerate(self._manifest.leaves)}
        for path in paths:
            if path not in known:
                near = difflib.get_close_matches(str(path), known, 3)
                hint = f"; did you mean {', '.join(map(repr, near))}?" if near else "; see paths()"
                raise KeyError(f"step {self.step} has no leaf {path!r}{hint}")
        indices = [known[path] for path in paths]
        medium = self._opened()
        try:
            parts = read_leaves(medium, self._manifest, indices)
        finally:
            medium.close()
        specs = [self._manifest.leaves[index].spec() for index in indices]
        return [kind_of.named(spec.kind).build(spec, part) for spec, part in zip(specs, parts, strict=True)]

    def _opened(self) -> Medium:
        try:
            medium = self._open(self.name)
        except MediumError as error:
            if isinstance(error.cause, FileNotFoundError):
                raise ReusedError(f"{self.name} was removed since it was looked at; look again") from error
            raise
        try:
            confirm(medium, self._record)
        except BaseException:
            medium.close()
            raise
        return medium


def _read(open_medium: Callable[[str], Medium], candidate: Candidate) -> Checkpoint | ContentError | MediumError:
    """Read a candidate's manifest under the first of its names that gives it, or give the first error."""
    first: ContentError | MediumError | None = None
    for name in candidate.names:
        try:
            medium = open_medium(name)
        except (ContentError, MediumError) as error:
            if isinstance(error, MediumError) and isinstance(error.cause, FileNotFoundError):
                raise ReusedError(f"{name} was removed while the store was being read; read again") from error
            first = first or error
            continue
        try:
            confirm(medium, candidate.record)
            return Checkpoint(open_medium, name, candidate.record, read_manifest(medium, candidate.record))
        except ReusedError:
            raise
        except (ContentError, MediumError) as error:
            first = first or error
        finally:
            medium.close()
    assert first is not None, "a candidate has at least one name"
    return first
