"""Turns a state into what a checkpoint is made of: layout, addresses, manifest (floor 1: imports floor 0, leaftable).

The first save of a structure plans it: paths, specs, ties, layout, and the JSON of both. Later saves of the same
structure only prove that it is the same, ask where the arrays lie now, and encode the small Python values anew.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import compress
from typing import Any, final

import msgspec
import numpy as np

from pccheck import format, nodes, tree
from pccheck.errors import UsageError
from pccheck.forms import SMALL_BYTES
from pccheck.leaftable import Addresses, LeafGroup, LeafTable
from pccheck.leaves import KindTable
from pccheck.manifest import ChunkEntry, encode_metadata
from pccheck.plan import Layout, lay_out
from pccheck.structure import Structure, picker

MAX_LINK = 4096  # characters
MAX_WRITER = 1000
_HOLE = msgspec.Raw(b"\0")  # JSON has no NUL byte, so that the text can be cut at the holes
_encode = msgspec.json.Encoder().encode


@final
@dataclass(kw_only=True)
class Prepared:
    """One state, ready to be captured. `encode_manifest` reads none of the caller's memory.

    Args:
        step: the caller's label.
        layout: where the bytes go; the same object as long as the structure is.
        addresses: where each piece of the layout begins in host memory.
        keep: what keeps these addresses valid; to be dropped when everything is captured.
        stable: nobody but pccheck can change these bytes, so that `save()` need not wait for the capture.
        manifest_room: bytes that the manifest takes at most, a multiple of PAGE.
    """

    step: int
    layout: Layout
    addresses: Addresses
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
        if plan is not None:
            found = plan.structure.match(state)
            bound = None if found is None else plan.bind(found)
            if bound is not None:
                return plan.prepared(bound, step, about)
            self._plan = None  # before the next one is made: both together would take twice the memory
        plan = _Plan(state, self._kind_of, self._chunk_bytes)
        found = plan.structure.match(state)
        bound = None if found is None else plan.bind(found)
        if bound is None:
            raise _changed()
        self._plan = plan
        return plan.prepared(bound, step, about)


def _changed() -> UsageError:
    return UsageError("the state was changed by another thread while it was being saved; save it under your lock")


def _printable(text: str) -> str:
    return text.encode("utf-8", "backslashreplace").decode()


@dataclass
class _Bound:
    """What one save adds to its plan."""

    addresses: Addresses
    keep: list[object]
    tree: bytes
    values: int


class _Plan:
    """All that stays the same while the structure does. Keeps no leaf alive; `values` are small."""

    def __init__(self, state: object, kind_of: KindTable, chunk_bytes: int) -> None:
        values: list[Any] = []

        def hole(value: Any) -> msgspec.Raw:
            values.append(value)
            return _HOLE

        skeleton, leaves, paths = tree.flatten(state, lambda v: kind_of(v) is not None, hole)
        self.fragments = _encode(skeleton).split(b"\0")
        self.floats = [i for i, v in enumerate(values) if type(v) in (float, complex)]  # -0.0 == 0.0
        self.values: tuple[Sequence[Any], list[bytes]] = ((), [])

        self.structure = Structure(state)
        found = self.structure.match(state)
        places = _leaf_places(found, self.structure.order, leaves)
        self.pick_values = picker([i for i, is_leaf in zip(self.structure.order, places, strict=True) if not is_leaf])
        leaf_places = list(compress(self.structure.order, places))
        if len(leaf_places) != len(leaves) or len(self.structure.order) != len(leaves) + len(values):
            raise _changed()

        table = LeafTable(leaves, paths, kind_of)
        self.layout = lay_out(table.lengths, chunk_bytes)
        self.leaves = _encode(table.entries(self.layout))
        self.groups = [LeafGroup(kind, rows, leaves, leaf_places, table) for kind, rows in table.rows.items()]
        self.stable = table.stable

    def bind(self, found: list[Any]) -> _Bound | None:
        """Take from a state of this structure what changes from save to save; None if the plan does not fit it."""
        values = self._encode_values(self.pick_values(found))
        if values is None:
            return None
        addresses: Addresses = np.zeros(len(self.layout.pieces), np.uint64)
        keep: list[object] = []
        for group in self.groups:
            if not group.bind(found, addresses, keep):
                return None
        parts = [b""] * (2 * len(values) + 1)
        parts[0::2], parts[1::2] = self.fragments, values
        return _Bound(addresses, keep, b"".join(parts), len(values))

    def prepared(self, bound: _Bound, step: int, metadata: bytes) -> Prepared:
        """Give the whole."""
        room = len(bound.tree) + len(self.leaves) + len(metadata)
        room += 40 * bound.values  # so that numbers may get longer without a larger slot
        room += 224 * len(self.layout.chunks) + 6 * (MAX_LINK + MAX_WRITER) + 1024
        parts = {"metadata": metadata, "tree": bound.tree, "leaves": self.leaves}
        return Prepared(
            step=step, layout=self.layout, addresses=bound.addresses, keep=bound.keep, stable=self.stable,
            manifest_room=format.padded(room), _parts={name: msgspec.Raw(part) for name, part in parts.items()},
        )  # fmt: skip

    def _encode_values(self, values: Sequence[Any]) -> list[bytes] | None:
        """Encode the small values; those that are as they were are not encoded again."""
        before, encoded = self.values
        if len(before) != len(values):
            encoded = [_encode(nodes.encode_value(v)) for v in values]
        else:
            encoded = encoded.copy()
            for i in {*self.floats, *compress(range(len(values)), map(operator.ne, values, before))}:
                value = values[i]
                if type(value) in (str, bytes) and len(value) > SMALL_BYTES:
                    return None
                encoded[i] = _encode(nodes.encode_value(value))
        self.values = (values, encoded)
        return encoded


def _leaf_places(found: list[Any] | None, order: list[int], leaves: list[Any]) -> list[bool]:
    """Tell, in depth-first order, which of the things found are leaves; the rest are small values."""
    if found is None or len(found) != len(order):
        raise _changed()
    is_leaf, at = [], 0
    for place in order:
        is_leaf.append(at < len(leaves) and found[place] is leaves[at])
        at += is_leaf[-1]
    return is_leaf
