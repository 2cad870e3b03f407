"""Turns a state into what a checkpoint is made of: layout, addresses, manifest (floor 1: imports floor 0, leaftable).

The first save of a structure plans it: paths, specs, ties, layout, and the JSON of both. Later saves of the same
structure only prove that it is the same, ask where the arrays lie now, and encode the small Python values anew.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import compress
from typing import Any, cast, final

import msgspec
import numpy as np
from numpy.typing import NDArray

from pccheck import format
from pccheck.errors import UsageError
from pccheck.leaves import KindTable
from pccheck.state import nodes, tree
from pccheck.state.forms import SMALL_BYTES
from pccheck.state.leaftable import LeafTable
from pccheck.state.manifest import ChunkEntry, encode_metadata
from pccheck.state.plan import Layout
from pccheck.state.structure import Structure, picker

MAX_LINK = 4096  # characters
MAX_WRITER = 1000
_HOLE = msgspec.Raw(b"\0")  # JSON has no NUL byte, so that the text can be cut at the holes
_encode = msgspec.json.Encoder().encode


@final
@dataclass(kw_only=True, eq=False)
class Prepared:
    """One state, ready to be captured. `encode_manifest` reads none of the caller's memory.

    Args:
        step: the caller's label.
        layout: where the bytes go; the same object as long as the structure is.
        addresses: where each piece of the layout begins in host memory; a NumPy array of uint64.
        keep: what keeps these addresses valid; to be dropped when everything is captured.
        stable: nobody but pccheck can change these bytes, so that `save()` need not wait for the capture.
        manifest_room: bytes that the manifest takes at most, a multiple of PAGE.
    """

    step: int
    layout: Layout
    addresses: Sequence[int]
    keep: object = field(repr=False)
    stable: bool
    manifest_room: int
    _parts: Mapping[str, msgspec.Raw] = field(repr=False)

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
    """

    def __init__(self, kind_of: KindTable, chunk_bytes: int) -> None:
        self._kind_of, self._chunk_bytes = kind_of, chunk_bytes
        self._plan: _Plan | None = None

    def prepare(self, state: object, *, step: int, metadata: Mapping[str, Any] | None = None) -> Prepared:
        """Give what saving this state needs; the bytes of dense arrays are not copied, others are.

        Raises:
            UnsupportedLeafError: something in the state cannot be stored exactly; names its path.
            UsageError: `metadata` is not small JSON; or another thread changed the state meanwhile.
        """
        about = encode_metadata(metadata)
        plan = self._plan
        prepared = None if plan is None else plan.prepare(state, step, about)
        if prepared is not None:
            return prepared
        self._plan = None
        shape = _Shape(state, self._kind_of)
        for table in self._tables(plan, *shape.take_leaves()):
            plan = _Plan(shape, table)
            prepared = plan.prepare(state, step, about)
            if prepared is not None:
                self._plan = plan
                return prepared
        raise _changed()

    def _tables(self, plan: _Plan | None, leaves: list[Any], paths: list[str]) -> Iterator[LeafTable]:
        """Give the old table where only values around the leaves changed (a list of losses grows), then a new one."""
        if plan is not None and plan.table.names(leaves, paths):
            yield plan.table
        yield LeafTable(leaves, paths, self._kind_of, self._chunk_bytes)


def _changed() -> UsageError:
    return UsageError("the state was changed by another thread while it was being saved; save it under your lock")


def _printable(text: str) -> str:
    return text.encode("utf-8", "backslashreplace").decode()


class _Plan:
    """A shape and a table of leaves that belong together. Keeps no leaf alive."""

    def __init__(self, shape: _Shape, table: LeafTable) -> None:
        self.shape, self.table = shape, table
        self.picks = [picker([shape.leaf_places[i] for i in rows]) for rows in table.rows]

    def prepare(self, state: object, step: int, metadata: bytes) -> Prepared | None:
        """Prepare a state of this plan; None if it is of another."""
        found = self.shape.structure.match(state)
        tree_json = None if found is None else self.shape.encode(found)
        bound = None if found is None or tree_json is None else self.table.bind([pick(found) for pick in self.picks])
        if bound is None or tree_json is None:
            return None
        (addresses, keep), layout = bound, self.table.layout
        room = len(tree_json) + len(self.table.json) + len(metadata)
        room += 40 * self.shape.values  # so that numbers may get longer without a larger slot
        room += 224 * len(layout.chunks) + 6 * (MAX_LINK + MAX_WRITER) + 1024
        parts = {"metadata": metadata, "tree": tree_json, "leaves": self.table.json}
        return Prepared(
            step=step, layout=layout, addresses=cast("Sequence[int]", addresses), keep=keep, stable=self.table.stable,
            manifest_room=format.padded(room), _parts={name: msgspec.Raw(part) for name, part in parts.items()},
        )  # fmt: skip


class _Shape:
    """How a state is built, and its small values. Keeps no leaf alive once these are taken."""

    def __init__(self, state: object, kind_of: KindTable) -> None:
        values: list[Any] = []

        def hole(value: Any) -> msgspec.Raw:
            values.append(value)
            return _HOLE

        skeleton, leaves, self._paths = tree.flatten(state, lambda v: kind_of(v) is not None, hole)
        self._leaves: list[Any] = leaves
        self._fragments = _encode(skeleton).split(b"\0")
        self._floats = [i for i, v in enumerate(values) if type(v) is float]
        self._complex = [i for i, v in enumerate(values) if type(v) is complex]
        self._known: _Values | None = None
        self.values = len(values)

        self.structure = Structure(state)
        found, order = self.structure.match(state), self.structure.order
        is_leaf = _leaf_places(found, order, leaves)
        self.leaf_places = list(compress(order, is_leaf))
        places = list(compress(order, map(operator.not_, is_leaf)))
        self._pick = picker(places)
        if len(self.leaf_places) != len(leaves) or len(places) != len(values):
            raise _changed()

    def take_leaves(self) -> tuple[list[Any], list[str]]:
        """Give the leaves and paths that were found, once."""
        taken = self._leaves, self._paths
        self._leaves, self._paths = [], []
        return taken

    def encode(self, found: list[Any]) -> bytes | None:
        """Give the tree as JSON; None if a string got so long that it is a leaf now.

        Values that are as they were are not encoded again: those that compare equal, but floats by their bits.
        """
        values, known = self._pick(found), self._known
        floats = np.fromiter((values[i] for i in self._floats), np.float64, len(self._floats)).view(np.uint64)
        if known is None:
            encoded = [_encode(nodes.encode_value(v)) for v in values]
        else:
            encoded = known.encoded.copy()
            changed = {*compress(range(len(values)), map(operator.ne, values, known.values)), *self._complex}
            changed.update(self._floats[i] for i in np.flatnonzero(floats != known.floats))
            for i in changed:
                value = values[i]
                if type(value) in (str, bytes) and len(value) > SMALL_BYTES:
                    return None
                encoded[i] = _encode(nodes.encode_value(value))
        self._known = _Values(values, floats, encoded)
        parts = [b""] * (2 * len(encoded) + 1)
        parts[0::2], parts[1::2] = self._fragments, encoded
        return b"".join(parts)


@dataclass(frozen=True)
class _Values:
    """The small values of the last save, and their JSON."""

    values: Sequence[Any]
    floats: NDArray[np.uint64]  # the bits of the floats among them
    encoded: list[bytes]


def _leaf_places(found: list[Any] | None, order: list[int], leaves: list[Any]) -> list[bool]:
    """Tell, in depth-first order, which of the things found are leaves; the rest are small values."""
    if found is None or len(found) != len(order):
        raise _changed()
    is_leaf, at = [], 0
    for place in order:
        is_leaf.append(at < len(leaves) and found[place] is leaves[at])
        at += is_leaf[-1]
    return is_leaf
