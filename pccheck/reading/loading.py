"""Loads one checkpoint that several ranks saved together (floor 2: imports members, reads, restored and below)."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any, TypeVar, final

from pccheck.errors import FormatError, MismatchError, UsageError, named_ranks
from pccheck.format import Record
from pccheck.leaves import ABSENT, KindTable, LeafSpec
from pccheck.reading.members import Files, RankFile, StoreFiles
from pccheck.reading.reader import DEFAULT_THREADS
from pccheck.reading.reads import Reads, Source
from pccheck.reading.restored import Restored
from pccheck.reading.world import WorldIdentity
from pccheck.state import assembly
from pccheck.state.boxes import Box
from pccheck.state.entries import LeafEntry, firsts, parts_of
from pccheck.state.fit import Want
from pccheck.state.kinds import kind_of
from pccheck.state.wanting import Ask

T = TypeVar("T")


@final
@dataclass(frozen=True, kw_only=True)
class LoadedWorld:
    """What `load_world` gives.

    Args:
        restored: the state and what goes with it; `skipped` is empty, for the caller to fill (`dataclasses.replace`).
        record: the home rank's record of the checkpoint.
        store: folder of the home rank's store.
        name: the file in it that was read, "slot-..." or "kept/...".
        whole: every chunk of that file was read and verified.
    """

    restored: Restored
    record: Record
    store: str
    name: str
    whole: bool


def load_world(
    root: str | os.PathLike[str],
    identity: WorldIdentity,
    home_rank: int,
    *,
    like: Any = None,
    partial: bool = False,
    kinds: KindTable = kind_of,
    threads: int = DEFAULT_THREADS,
) -> LoadedWorld:
    """Give the state of one checkpoint as a rank restores it; writes nothing, locks nothing, changes nothing.

    The tree and the leaves that belong to a rank come from `home_rank`; leaves stored in parts are put together from
    the stores of all ranks. Only chunks with needed bytes are read, and each is verified. Stores other than the home
    rank's are looked at only where a part is wanted that the home rank did not store.

    Args:
        root: the job's folder.
        identity: which checkpoint; as `world_candidates` gives it.
        home_rank: 0..identity.world - 1; rank r of any new world takes `r % identity.world`.
        like: as in `Checkpointer.restore`.
        partial: as there.
        kinds: finds kinds of leaves.
        threads: chunks read at once, 1..64.

    Raises:
        DamagedError: a chunk or manifest fails its digest.
        FormatError: a manifest claims what cannot be; or parts are missing, overlap or do not go together (names path
            and ranks).
        MediumError: something cannot be read.
        ReusedError: a store does not hold the checkpoint (any more), or gave its slot to a newer one meanwhile.
        MismatchError: it does not fit `like`, and `partial` is off.
        UsageError: `home_rank` is out of range, or `like` holds what can be no leaf.
    """
    files = StoreFiles(os.fspath(root), identity)
    return load_files(files, home_rank, like=like, partial=partial, kinds=kinds, threads=threads)


def load_files(
    files: Files,
    home_rank: int,
    *,
    like: Any = None,
    partial: bool = False,
    kinds: KindTable = kind_of,
    threads: int = DEFAULT_THREADS,
) -> LoadedWorld:
    """Do what `load_world` does with the checkpoint in these files."""
    parts = Parts(files, home_rank, threads)
    manifest = parts.home.manifest
    specs = parts.specs()
    fit = None if like is None else assembly.fit_of(manifest, like, kinds, specs=specs)
    if fit is not None and fit.mismatches and not partial:
        raise MismatchError(fit.mismatches)
    wants = [Want(i, None, specs[i]) for i in parts.named()] if fit is None else fit.wants
    reads, whole = parts.read([(want.ask, want.spec.box) for want in wants])
    state, mismatches = assembly.assemble(
        manifest, reads.data, kinds,
        like=ABSENT if like is None else like, fit=fit, partial=partial, specs=specs, key=reads.key,
    )  # fmt: skip
    restored = Restored(
        step=parts.home.record.step,
        counter=parts.home.record.counter,
        state=state,
        metadata=dict(manifest.metadata),
        mismatches=mismatches,
    )
    return LoadedWorld(
        restored=restored, record=parts.home.record, store=parts.home.store, name=parts.home.name, whole=whole
    )


@final
class Parts:
    """The parts of one world checkpoint; those of other ranks are found when they are needed. Thread-safe.

    Args:
        files: of all ranks.
        home_rank: whose tree and own leaves are meant.
        threads: manifests and chunks read at once.

    Raises as `load_world`.
    """

    def __init__(self, files: Files, home_rank: int, threads: int) -> None:
        if not 0 <= home_rank < files.world:
            raise UsageError(f"home_rank={home_rank} is no rank of a world of {files.world}")
        self._all, self._home_rank, self._threads = files, home_rank, threads
        self._files = {home_rank: files.open(home_rank)}
        self._sources: dict[str, list[Source]] | None = None
        self._lock = threading.Lock()

    @property
    def home(self) -> RankFile:
        """The home rank's part."""
        return self._files[self._home_rank]

    def named(self) -> list[int]:
        """Give the places of the leaves that the home rank's tree names: of several parts of a leaf, the first."""
        return firsts(self.home.manifest.leaves)

    def specs(self, leaves: Sequence[LeafEntry] | None = None) -> list[LeafSpec]:
        """Give what each leaf (of the home rank) is when it is whole: put together where it was stored in parts."""
        return [_whole(entry) for entry in (self.home.manifest.leaves if leaves is None else leaves)]

    def sources(self) -> dict[str, list[Source]]:
        """Give, by path, what ranks store of the leaves that are stored in parts; the home rank first.

        Raises FormatError where ranks do not mean the same array.
        """
        with self._lock:
            if self._sources is not None:
                return self._sources
            others = [rank for rank in range(self._all.world) if rank != self._home_rank]
            self._files.update(zip(others, _at_once(self._all.open, others, self._threads), strict=True))
            found: dict[str, list[Source]] = {}
            for rank in (self._home_rank, *others):
                for entry in self._files[rank].manifest.leaves:
                    if entry.box is not None:
                        found.setdefault(entry.path, []).append(Source(rank, entry))
            for rank in (self._home_rank, *others):
                for entry in self._files[rank].manifest.leaves:
                    _check_same(found.get(entry.path), Source(rank, entry))
            self._sources = found
            return found

    def read(
        self, wanted: Sequence[tuple[Ask, Box | None]], leaves: Sequence[LeafEntry] | None = None
    ) -> tuple[Reads, bool]:
        """Read leaves (of the home rank), or boxes of them; tell whether all chunks of its file were read."""
        reads, leaves = Reads(), self.home.manifest.leaves if leaves is None else leaves
        for ask, box in wanted:
            index = ask if isinstance(ask, int) else ask[0]
            own = [Source(self._home_rank, entry) for entry in parts_of(leaves, index)]
            if own[0].entry.box is None and box is None:
                reads.want_stored(ask, own[0])
                continue
            box = Box.whole(own[0].entry.shape) if box is None else box
            alone = index < len(self.home.manifest.leaves) and _holds(own, box)
            reads.want_box(ask, box, own if alone else self.sources()[own[0].entry.path])
        return reads, self.carry_out(reads)

    def carry_out(self, reads: Reads) -> bool:
        """Read what was collected, rank after rank; tell whether all chunks of the home rank's file were read."""
        whole = not self.home.manifest.chunks
        for rank, (places, copyings) in sorted(reads.of_ranks(self._all.where).items()):
            gathered = self._files[rank].gather(places, copyings, self._threads)
            reads.add(rank, gathered)
            if rank == self._home_rank:
                whole = gathered.chunks == len(self.home.manifest.chunks)
        reads.check_copies()
        return whole


def _holds(own: Sequence[Source], box: Box) -> bool:
    """Tell whether a rank needs no other for a box: it has that very one, all of the array, or several parts of it."""
    if len(own) == 1:
        return own[0].entry.box is None or own[0].box == box
    common = (source.box.common(box) for source in own)
    return sum(c.elements for c in common if c is not None) == box.elements


def _whole(entry: LeafEntry) -> LeafSpec:
    spec = entry.spec()
    if spec.box is None:
        return spec
    elements = spec.box.elements
    nbytes = spec.nbytes // elements * Box.whole(spec.shape).elements if elements else 0
    return replace(spec, box=None, nbytes=nbytes, extra=spec.extra_in_c_order)


def _check_same(sources: Sequence[Source] | None, source: Source) -> None:
    """Raise FormatError where a leaf is stored in parts, and by this rank as another array."""
    if sources is None:
        return
    path, one, other = source.entry.path or "the state itself", sources[0], source.entry
    if other.box is None:
        raise FormatError(f"{path}: rank {one.rank} stores a part of it, rank {source.rank} an array of its own")
    for what in ("kind", "dtype", "shape"):
        a, b = getattr(one.entry, what), getattr(other, what)
        if a != b:
            raise FormatError(f"{path}: its {what} is {a} for rank {one.rank}, {b} for rank {source.rank}")
    if one.entry.extra.get("struct") != other.extra.get("struct"):
        raise FormatError(f"{path}: its fields differ between {named_ranks([one.rank, source.rank])}")


def _at_once(call: Callable[[int], T], ranks: Sequence[int], threads: int) -> list[T]:
    if len(ranks) < 2 or threads < 2:
        return list(map(call, ranks))
    with ThreadPoolExecutor(min(threads, len(ranks)), thread_name_prefix="pccheck-read") as pool:
        return list(pool.map(call, ranks))
