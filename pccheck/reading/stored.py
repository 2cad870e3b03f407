"""One stored checkpoint, of which only what is asked for is read (floor 2: imports restoring and below)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, final

from pccheck import format
from pccheck.errors import ReusedError, UsageError
from pccheck.format import Record
from pccheck.reading.reader import DEFAULT_THREADS, confirm, opened, read_manifest, under_any, verify
from pccheck.reading.reads import no_such_leaf, read_wanted
from pccheck.reading.restoring import Candidate, Loaded, Restored, assemble, fitting
from pccheck.state.assembly import Builder
from pccheck.state.entries import LeafEntry, StoredLeaves, firsts
from pccheck.state.kinds import kind_of
from pccheck.state.manifest import Manifest
from pccheck.state.wanting import Ask, as_stored
from pccheck.storage import fileio
from pccheck.storage.medium import Medium


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
        leaves = self._manifest.leaves
        return [leaves[index].path for index in firsts(leaves)]

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
        fit = fitting(like, partial=partial)(self._manifest)
        wanted = None if fit is None else fit.wants
        with self._opened() as medium:
            read, whole = read_wanted(medium, self._manifest, wanted, threads=DEFAULT_THREADS)
        loaded = Loaded(record=self._record, name=self.name, manifest=self._manifest, read=read, whole=whole, fit=fit)
        return assemble(loaded, like=like, partial=partial)

    def mapped(self, like: Any = None) -> Any:
        """Give the whole state without reading it into memory: its arrays lie in the file, mapped copy-on-write.

        Every byte is verified first. For as long as one array lives, the slot is locked, so that no writer reuses it: a
        Checkpointer takes another slot meanwhile. What is written to the arrays stays in this process.

        Raises:
            UsageError: the file cannot be mapped so: it is in memory, its chunks are apart, or there are no locks here.
            DamagedError, MismatchError, ReusedError, MediumError: as `restore`.
        """
        fit = fitting(like)(self._manifest)
        leaves = self._manifest.leaves
        if (fit is not None and any(want.spec.box is not None for want in fit.wants)) or len(firsts(leaves)) < len(
            leaves
        ):
            raise UsageError("parts of arrays cannot be mapped; ask for whole arrays, or use state()")
        # The mapping has a descriptor of its own, and with it the lock.
        with self._opened() as medium, opened(self._open, self.name) as other:
            payload = _map(medium, other, self._record, self._manifest)
            damages = verify(medium, self._record, self._manifest)
        if damages:
            raise damages[0]
        loaded = Loaded(
            record=self._record,
            name=self.name,
            manifest=self._manifest,
            read=lambda ask: _bytes_of(payload, leaves, ask),
            fit=fit,
        )
        return assemble(loaded, like=like).state

    def __getitem__(self, path: str) -> Any:
        return self.read([path])[0]

    def read(self, paths: Sequence[str]) -> list[Any]:
        """Give single leaves; only the chunks that they lie in are read, and all of those are verified.

        Raises:
            KeyError: there is no such leaf.
            DamagedError, ReusedError, MediumError: as `restore`.
        """
        known = {self._manifest.leaves[index].path: index for index in firsts(self._manifest.leaves)}
        for path in paths:
            if path not in known:
                raise no_such_leaf(self.step, path, known)
        indices = [known[path] for path in paths]
        stored = StoredLeaves.of(self._manifest.leaves)
        wanted = [want for index in dict.fromkeys(indices) for want in as_stored(index, stored, kind_of.named)]
        with self._opened() as medium:
            read, _ = read_wanted(medium, self._manifest, wanted, threads=DEFAULT_THREADS)
        builder = Builder(self._manifest, read, kind_of)
        return [builder.leaf(index) for index in indices]

    @contextmanager
    def _opened(self) -> Iterator[Medium]:
        with opened(self._open, self.name) as medium:
            confirm(medium, self._record)
            yield medium


def _bytes_of(payload: memoryview, leaves: Sequence[LeafEntry], ask: Ask) -> memoryview:
    assert isinstance(ask, int), "parts are not mapped"
    return payload[leaves[ask].offset : leaves[ask].offset + leaves[ask].nbytes]


def _map(medium: Medium, other: Medium, record: Record, manifest: Manifest) -> memoryview:
    """Lock a slot and map its payload; `other` is the same file opened once more."""
    fileno = medium.fileno()
    if fileno is None or any(c.offset - c.start != format.PAYLOAD_OFFSET for c in manifest.chunks):
        raise UsageError(f"{medium.path} cannot be mapped: chunk_bytes must be a multiple of 64 KiB; use state()")
    if not medium.lock_shared():
        raise ReusedError(f"{medium.path} is being given to a newer checkpoint; look again")
    if other.lock_exclusive():  # beside the lock just taken: then a lock holds nobody off
        raise UsageError(f"{medium.path} is on a file system without locks, where a writer may reuse it; use state()")
    confirm(medium, record)
    if not manifest.data_bytes:
        return memoryview(b"")
    length = format.PAYLOAD_OFFSET + manifest.data_bytes
    return fileio.map_private(fileno, length, medium.path)[format.PAYLOAD_OFFSET :]


def open_checkpoint(open_medium: Callable[[str], Medium], candidate: Candidate) -> Checkpoint:
    """Read a candidate's manifest under the first of its names that gives it, or raise the first error."""

    def read(name: str) -> Checkpoint:
        with opened(open_medium, name) as medium:
            confirm(medium, candidate.record)
            return Checkpoint(open_medium, name, candidate.record, read_manifest(medium, candidate.record))

    return under_any(candidate.names, read)
