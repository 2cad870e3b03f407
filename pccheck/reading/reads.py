"""Which bytes of which ranks a restore needs, and what they make together (floor 2: imports gathering and below).

A leaf that some rank stored exactly as it is wanted is read from there, in place. Any other is put together from what
the stores of all ranks have of it: together they must have each wanted element. Equal boxes are copies, as of a
parameter that is sharded along one axis of a mesh only, and must have equal bytes: the stages of a pipeline may have
given one name to different things. Boxes that overlap otherwise are refused.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import NamedTuple, TypeAlias, final

import numpy as np

from pccheck.errors import FormatError, named_ranks
from pccheck.leaves import dense_strides
from pccheck.reading.gathering import Copying, Gathered, Place, gather, own_rooms
from pccheck.state.boxes import Box
from pccheck.state.entries import LeafEntry, StoredLeaves, firsts, parts_of
from pccheck.state.fit import Want
from pccheck.state.manifest import Manifest
from pccheck.state.mismatch import told
from pccheck.state.transfer import Transfer, overlapping
from pccheck.state.wanting import Ask, as_stored
from pccheck.storage.medium import Medium

_EMPTY = memoryview(bytearray())

Key: TypeAlias = Hashable  # equal for leaves that are the same bytes seen through the same box


class Source(NamedTuple):
    """What one rank stores of a leaf."""

    rank: int
    entry: LeafEntry

    @property
    def box(self) -> Box:
        """The part of the global array that it is."""
        return Box.whole(self.entry.shape) if self.entry.box is None else Box(*self.entry.box)

    @property
    def place(self) -> Place:
        """Where it lies in its rank's byte space."""
        return self.entry.offset, self.entry.nbytes


class _Part(NamedTuple):
    """A leaf to be put together."""

    box: Box
    itemsize: int
    sources: tuple[Source, ...]


@final
class Reads:
    """Collects what is wanted, then says what to read of each rank. Used by one thread."""

    def __init__(self) -> None:
        self._keys: dict[Ask, Key] = {}  # of all that is wanted
        self._places: dict[Key, tuple[int, Place]] = {}
        self._parts: dict[Key, _Part] = {}
        self._data: dict[Key, memoryview] = {}
        self._copies: list[tuple[Key, Key, str]] = []  # what must have equal bytes, and what to say otherwise

    def want_stored(self, ask: Ask, source: Source) -> None:
        """Want a leaf as this rank stored it."""
        if (key := self._stored(source)) is not None:
            self._keys[ask] = key

    def want_box(self, ask: Ask, box: Box, sources: Sequence[Source]) -> None:
        """Want a part of a leaf, in C order.

        Args:
            ask: what it will be asked for by.
            box: the part of the global array.
            sources: what ranks store of it; the first that is exactly this part is taken, if any is.

        Raises:
            FormatError: the sources leave holes in the part, or overlap in it unequally; names path and ranks.
        """
        if not box.elements:
            return
        holders: dict[Box, list[Source]] = {}
        for source in sources:
            if source.box.common(box) is not None:
                holders.setdefault(source.box, []).append(source)
        exact = [source for source in holders.get(box, ()) if "stride" not in source.entry.extra]
        for n in range(max(map(len, holders.values()), default=1)):
            if exact:
                key = self._stored(exact[min(n, len(exact) - 1)])
            else:
                key = self._part(box, [same[min(n, len(same) - 1)] for same in holders.values()], sources)
            if key is None:
                return
            first = self._keys.setdefault(ask, key)
            if key != first:
                self._copies.append((first, key, _differing(box, holders.values())))

    def _stored(self, source: Source) -> Key | None:
        if not source.entry.nbytes:
            return None
        key = (source.rank, source.place)
        self._places[key] = key
        return key

    def _part(self, box: Box, used: Sequence[Source], sources: Sequence[Source]) -> Key | None:
        itemsize = _checked(box, used, sources)
        if not itemsize:
            return None
        key = (box, tuple((source.rank, source.place, source.box) for source in used))
        self._parts[key] = _Part(box, itemsize, tuple(used))
        return key

    def key(self, ask: Ask) -> Key | None:
        """Give what is equal for leaves that share their bytes, None for one without bytes."""
        return self._keys.get(ask)

    def of_ranks(self, path: str) -> dict[int, tuple[list[Place], list[Copying]]]:
        """Allocate what parts are put together in, and give what `gather` is to read of each rank.

        `path` names, in errors, what the memory is for. Call it once, when everything is wanted.
        """
        rooms = own_rooms([part.box.elements * part.itemsize for part in self._parts.values()], path)
        self._data = dict(zip(self._parts, rooms, strict=True))
        found: dict[int, tuple[list[Place], list[Copying]]] = {}
        for rank, place in self._places.values():
            found.setdefault(rank, ([], []))[0].append(place)
        for key, part in self._parts.items():
            for source in part.sources:
                transfer = Transfer(source.box, part.box, part.itemsize, self._data[key], _order(source.entry))
                copying = Copying(offset=source.entry.offset, nbytes=source.entry.nbytes, transfer=transfer)
                found.setdefault(source.rank, ([], []))[1].append(copying)
        return found

    def add(self, rank: int, gathered: Gathered) -> None:
        """Take what was read of a rank."""
        for key, (at, place) in self._places.items():
            if at == rank:
                self._data[key] = gathered.places[place]

    def check_copies(self) -> None:
        """Raise FormatError where ranks store different bytes as the same part; when everything was added."""
        for key, other, differing in self._copies:
            if not np.array_equal(np.asarray(self._data[key]), np.asarray(self._data[other])):
                raise FormatError(differing)
        needed = set(self._keys.values())
        self._data = {key: data for key, data in self._data.items() if key in needed}

    def data(self, ask: Ask) -> memoryview:
        """Give the bytes of what was wanted: the same memory for leaves with the same key."""
        key = self._keys.get(ask)
        return _EMPTY if key is None else self._data[key]


def read_wanted(
    medium: Medium, manifest: Manifest, wants: Sequence[Want] | None, *, threads: int
) -> tuple[Callable[[Ask], memoryview], bool]:
    """Read what is wanted of one slot alone; give what gives the bytes of each Want, and whether all chunks were read.

    Args:
        medium: the slot.
        manifest: its manifest.
        wants: leaves and parts of them that lie in what is stored here; None = every leaf as it is stored, in one where
            its parts make a whole.
        threads: how many chunks are read at once, 1..64.

    Errors as in `gather`, and FormatError for a part of elements that are stored packed.
    """
    reads, rank, leaves = Reads(), manifest.rank, manifest.leaves
    if wants is None:
        stored = StoredLeaves.of(leaves)
        wants = [want for index in firsts(leaves) for want in as_stored(index, stored, lambda name: None)]
    for want in wants:
        parts = [Source(rank, entry) for entry in parts_of(leaves, want.index)]
        box = want.spec.box
        if (box is None and len(parts) == 1) or want.spec == parts[0].entry.spec():
            reads.want_stored(want.ask, parts[0])
        else:
            reads.want_box(want.ask, Box.whole(want.spec.shape) if box is None else box, parts)
    places, copyings = reads.of_ranks(medium.path).get(rank, ([], []))
    gathered = gather(medium, manifest, places, copyings, threads=threads)
    reads.add(rank, gathered)
    return reads.data, gathered.chunks == len(manifest.chunks)


def _order(entry: LeafEntry) -> list[int] | None:
    """Give the axes in which a leaf's bytes are in C order; None for 0, 1, 2, ..."""
    strides = dense_strides(entry.spec())
    if strides is None:
        return None
    return sorted(range(len(strides)), key=lambda axis: (entry.shape[axis] > 1, -strides[axis]))


def _checked(box: Box, used: Sequence[Source], sources: Sequence[Source]) -> int:
    """Give the bytes per element of a part; FormatError unless the sources have each of its elements exactly once."""
    path = sources[0].entry.path or "the state itself" if sources else "a leaf"
    common = [c for c in (source.box.common(box) for source in used) if c is not None]
    twice = overlapping(common)
    if twice is not None:
        a, b = (used[i].rank for i in twice)
        raise FormatError(f"{path}: ranks {a} and {b} both store elements of {told(box)}: two checkpoints were mixed")
    missing = box.elements - sum(c.elements for c in common)
    if missing:
        ranks = [source.rank for source in sources if source.box.elements]
        raise FormatError(
            f"{path}: {missing:,} of {box.elements:,} elements of {told(box)} are stored by no rank "
            f"({named_ranks(ranks) if ranks else 'no rank'} stored any of it, of {len(sources)} asked)"
        )
    sizes = {divmod(source.entry.nbytes, source.box.elements) for source in used}
    if any(rest for _, rest in sizes):
        raise FormatError(
            f"{path}: elements of {used[0].entry.dtype} are stored packed, so that {told(box)} cannot be taken out of "
            f"{told(used[0].box)}; ask for all of that"
        )
    if len(sizes) > 1:
        raise FormatError(f"{path}: {named_ranks([s.rank for s in used])} store elements of different sizes")
    return next(iter(sizes))[0]


def _differing(box: Box, holders: Iterable[Sequence[Source]]) -> str:
    same = max(holders, key=len)
    path, ranks = same[0].entry.path or "the state itself", named_ranks([source.rank for source in same])
    return (
        f"{path}: {ranks} store different values of the same part of {told(box)}: the stages of a pipeline must have "
        "paths of their own; restore on as many ranks as saved it"
    )


def no_such_leaf(step: int, path: str, known: Iterable[str]) -> KeyError:
    """Give the error that says that a checkpoint has no leaf at a path, and which of those that it has are like it."""
    below = [one for one in known if one.startswith(f"{path}/")]
    if below:
        return KeyError(
            f"step {step} has no leaf {path!r}, but {len(below)} below it, such as {below[0]!r}; "
            "`view.restore().state` has the containers"
        )
    near = difflib.get_close_matches(str(path), list(known), 3)
    hint = f"did you mean {', '.join(map(repr, near))}?" if near else "`list(view)` names all."
    values = "Numbers and other small values are no leaves: `view.restore().state` has them"
    return KeyError(f"step {step} has no leaf {path!r}; {hint} {values}")
