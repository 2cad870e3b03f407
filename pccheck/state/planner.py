"""Turns a state into what a checkpoint is made of: layout, addresses, manifest (floor 1: imports floors 0 and 1).

The first save of a structure plans it: paths, specs, ties, layout, and the JSON of both. Later saves of the same
structure only prove that it is the same, ask where the arrays lie now, and encode the small Python values anew.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast, final

import msgspec
import numpy as np
from numpy.typing import NDArray

from pccheck import format
from pccheck.devices import Guard
from pccheck.errors import UsageError
from pccheck.leaves import KindTable
from pccheck.state.dividing import Replicated
from pccheck.state.filling import DeviceFiller
from pccheck.state.leaftable import LeafTable
from pccheck.state.manifest import ChunkEntry, encode_metadata
from pccheck.state.nodes import Node
from pccheck.state.owning import Copier, Ownership, PieceSet
from pccheck.state.plan import Layout
from pccheck.state.shape import Shape, changed_meanwhile
from pccheck.state.structure import picker

MAX_LINK = 4096  # characters
MAX_WRITER = 1000
_encode = msgspec.json.Encoder().encode


@final
@dataclass(kw_only=True, eq=False)
class Prepared:
    """One state, ready to be captured. `encode_manifest` reads none of the caller's memory.

    What lies on devices is copied by `filler`: call its `begin()` in the thread that called `save()`, after
    `copy_aside`, then hand it to the pipeline; call its `end()` if it goes nowhere.

    Args:
        step: the caller's label.
        layout: where the bytes go; the same object as long as the structure is.
        addresses: where each piece of the layout begins in host memory, 0 = on a device; a NumPy array of uint64.
        keep: what keeps these addresses valid; to be dropped when everything is captured.
        stable: nobody but pccheck can change these bytes, so that `save()` need not wait for the capture.
        manifest_room: bytes that the manifest takes at most, a multiple of PAGE.
        plan_digest: 16 bytes, equal on ranks whose global arrays are the same and divided alike.
        piece_paths: the path of the first leaf of each piece.
        changeable: the pieces that others can change: all that are not `stable`.
        unowned: of these, the ones that no guard's owner promises to wait for; all, without a guard.
        owned_chunks: of each owner: how many leading chunks, once captured, free all of its leaves.
        owners: of each piece: an owner, or as `owning` says; None without a guard.
        filler: copies what lies on devices; None where nothing does.
    """

    step: int
    layout: Layout
    addresses: Sequence[int]
    keep: object = field(repr=False)
    stable: bool
    manifest_room: int
    plan_digest: bytes
    piece_paths: Sequence[str] = field(repr=False)
    changeable: PieceSet = field(repr=False)
    unowned: PieceSet = field(repr=False)
    owned_chunks: Mapping[int, int]
    owners: NDArray[np.int64] | None = field(repr=False)
    filler: DeviceFiller | None
    _table: LeafTable = field(repr=False)
    _parts: Mapping[str, msgspec.Raw] = field(repr=False)

    def chunks_of(self, pieces: Sequence[int] | NDArray[np.intp]) -> int:
        """Give how many leading chunks, once captured, free all of these pieces."""
        return self._table.pieces.chunks_of(pieces)

    def smallest(self, pieces: PieceSet, nbytes: int) -> tuple[PieceSet, int]:
        """Give the smallest of some pieces, together at most `nbytes`, and the leading chunks that hold the others."""
        return self._table.pieces.smallest(pieces, nbytes)

    def copy_aside(self, pieces: PieceSet, copier: Copier, room: int | None = None) -> int:
        """Copy pieces within their own kind of memory, and let them be captured from there; before `filler.begin()`.

        Args:
            pieces: such as `unowned` or `changeable`.
            copier: copies host memory.
            room: address of `pieces.host_bytes` bytes, nobody else's until all is captured; None = newly allocated.

        Returns:
            How many leading chunks hold those of the pieces that could not be copied, since their device has no room: 0
            where all were.
        """
        if pieces.host.size:
            own = np.empty(pieces.host_bytes if room is None else 0, np.uint8)
            start = own.ctypes.data if room is None else room
            targets, addresses = pieces.places + np.uint64(start), np.array(self.addresses, np.uint64)
            copier(addresses[pieces.host], pieces.lengths, targets)
            addresses[pieces.host] = targets
            self.addresses, self.keep = cast("Sequence[int]", addresses), (self.keep, own)
        if self.filler is None or not pieces.device:
            return 0
        return self._table.pieces.chunks_of(self.filler.shadow(pieces.device))

    @property
    def payload_bytes(self) -> int:
        """Bytes of the slot file from PAYLOAD_OFFSET to the manifest."""
        return self.layout.payload_bytes

    def encode_manifest(
        self, *, counter: int, incarnation: int, rank: int, world: int, base: int, digests: bytes,
        link: str | None = None, writer: str = "",
    ) -> bytes:  # fmt: skip
        """Give the manifest's bytes, not longer than `manifest_room`.

        Args:
            counter, incarnation, rank, world, base: as in the record.
            digests: XXH3-128 of each chunk's stored bytes in order, 16 bytes each.
            link: the path that the checkpoint is linked to, at most MAX_LINK characters; never followed.
            writer: what wrote it, for people, at most MAX_WRITER characters.

        Raises:
            UsageError: a text is too long, or the digests are of another number of chunks.
        """
        chunks = self.layout.chunks
        if len(digests) != format.DIGEST_BYTES * len(chunks):
            raise UsageError(f"{len(digests)} bytes of digests do not fit {len(chunks)} chunks")
        if len(link or "") > MAX_LINK or len(writer) > MAX_WRITER:
            raise UsageError(f"link may have {MAX_LINK} characters, writer {MAX_WRITER}")
        size = format.DIGEST_BYTES
        table = [
            ChunkEntry(c.start, c.data_bytes, c.file_offset, c.stored_bytes, digests[size * i : size * (i + 1)].hex())
            for i, c in enumerate(chunks)
        ]
        about = {
            "version": format.VERSION, "step": self.step, "counter": counter, "incarnation": incarnation,
            "rank": rank, "world": world, "base": base, "writer": _printable(writer),
            "link": None if link is None else _printable(link),
            "chunk_bytes": self.layout.chunk_bytes, "data_bytes": self.layout.data_bytes,
        }  # fmt: skip
        return _encode({**about, **self._parts, "chunks": table})


@final
class Planner:
    """Prepares states for saving; remembers the plan of the last one. Thread-safe.

    Args:
        kind_of: finds the kind of a leaf, such as `kinds.kind_of`.
        chunk_bytes: bytes of byte space per chunk, a multiple of PAGE.
        rank, world: which of how many ranks this is.
        replicated: which leaves are the same on all ranks, of which each then stores its part: True = all, or those at
            or under these paths. Only with a `world` of more than 1 is anything divided.

    Raises:
        OptionError: `replicated` is something else.
    """

    def __init__(
        self, kind_of: KindTable, chunk_bytes: int, *,
        rank: int = 0, world: int = 1, replicated: bool | Sequence[str] = False,
    ) -> None:  # fmt: skip
        self._kind_of, self._chunk_bytes = kind_of, chunk_bytes
        self._rank, self._world, self._replicated = rank, world, Replicated.of(replicated)
        self._checked = False
        self._plan: _Plan | None = None

    def prepare(
        self, state: object, *, step: int, metadata: Mapping[str, Any] | None = None, guard: Guard | None = None,
        own: Sequence[str] = (),
    ) -> Prepared:  # fmt: skip
        """Give what saving this state needs; the bytes of dense arrays are not copied, others are.

        Args:
            state: what is saved.
            step: the caller's label.
            metadata: the user's small JSON.
            guard: asked who owns which leaves; not asked again while nothing has changed.
            own: paths at or under which nothing is the same on all ranks, whatever `replicated` says.

        Raises:
            UnsupportedLeafError: something in the state cannot be stored exactly; names its path.
            UsageError: `metadata` is not small JSON; or another thread changed the state meanwhile; or, at the first
                save, the state has nothing at a path of `replicated`.
        """
        about = encode_metadata(metadata)
        replicated = replace(self._replicated, own=frozenset(own))
        plan = self._plan if self._plan is not None and self._plan.replicated == replicated else None
        prepared = None if plan is None else plan.prepare(state, step, about, guard)
        if prepared is not None:
            return prepared
        self._plan = None
        shape = Shape(state, self._kind_of, self._check)
        for table in self._tables(plan, replicated, *shape.take_leaves()):
            plan = _Plan(shape, table, replicated)
            prepared = plan.prepare(state, step, about, guard)
            if prepared is not None:
                self._plan = plan
                return prepared
        raise changed_meanwhile()

    def _check(self, skeleton: Node) -> None:
        if not self._checked:  # later a place may go, such as one of a phase of training that is over
            self._replicated.check(skeleton)
            self._checked = True

    def _tables(
        self, plan: _Plan | None, replicated: Replicated, leaves: list[Any], paths: list[str]
    ) -> Iterator[LeafTable]:
        """Give the old table where only values around the leaves changed (a list of losses grows), then a new one."""
        if plan is not None and plan.table.names(leaves, paths):
            yield plan.table
        yield LeafTable(
            leaves, paths, self._kind_of, self._chunk_bytes,
            replicated=replicated, rank=self._rank, world=self._world,
        )  # fmt: skip


def _printable(text: str) -> str:
    return text.encode("utf-8", "backslashreplace").decode()


class _Plan:
    """A shape and a table of leaves that belong together. Keeps no leaf alive."""

    def __init__(self, shape: Shape, table: LeafTable, replicated: Replicated) -> None:
        self.shape, self.table, self.replicated = shape, table, replicated
        self.picks = [picker([shape.leaf_places[i] for i in rows]) for rows in table.rows]

    def prepare(self, state: object, step: int, metadata: bytes, guard: Guard | None) -> Prepared | None:
        """Prepare a state of this plan; None if it is of another."""
        found = self.shape.structure.match(state)
        tree_json = None if found is None else self.shape.encode(found)
        if found is None or tree_json is None:
            return None
        table, groups = self.table, [pick(found) for pick in self.picks]
        bound = table.bind(groups)
        if bound is None:
            return None
        owned: Ownership | None = None if guard is None else table.owned(guard, groups, bound)
        room = len(tree_json) + len(table.json) + len(metadata)
        room += 40 * self.shape.values  # so that numbers may get longer without a larger slot
        room += 224 * len(table.layout.chunks) + 6 * (MAX_LINK + MAX_WRITER) + 1024
        parts = {"metadata": metadata, "tree": tree_json, "leaves": table.json}
        return Prepared(
            step=step, layout=table.layout, addresses=cast("Sequence[int]", bound.addresses), keep=bound.keep,
            stable=table.stable, manifest_room=format.padded(room), plan_digest=table.digest,
            piece_paths=table.piece_paths, changeable=table.pieces.changeable,
            unowned=table.pieces.changeable if owned is None else owned.unowned,
            owned_chunks={} if owned is None else owned.chunks, owners=None if owned is None else owned.owners,
            filler=table.filler(bound), _table=table,
            _parts={name: msgspec.Raw(part) for name, part in parts.items()},
        )  # fmt: skip
