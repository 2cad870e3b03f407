"""The leaves of one state: which are tied, and where their bytes lie (floor 1: imports floor 0)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, final

import numpy as np
from numpy.typing import NDArray

from pccheck.errors import UnsupportedLeafError
from pccheck.leaves import KindTable, LeafKind, LeafSpec
from pccheck.manifest import LeafEntry
from pccheck.plan import Layout
from pccheck.structure import Pick, picker

Addresses = NDArray[np.uint64]
_PART = 512  # leaves: 20,000 tensors asked nine things one after the other took twice as long


@final
class LeafTable:
    """The leaves of one state: specs, and which of them share a piece of the byte space because they are tied."""

    def __init__(self, leaves: list[Any], paths: list[str], kind_of: KindTable) -> None:
        self.paths = paths
        self.specs: list[LeafSpec] = []
        self.traced: list[bool] = []  # which of them may be tied
        self.in_place: list[bool] = []
        self.pieces: list[int] = []  # of each leaf
        self.lengths: list[int] = []  # of each piece
        self.stable = True  # all bytes are copies, or cannot change
        self.rows: dict[LeafKind, list[int]] = {}
        known: dict[object, int] = {}
        for i, (leaf, path) in enumerate(zip(leaves, paths, strict=True)):
            kind = kind_of(leaf)
            assert kind is not None, "flatten asked before"
            try:
                spec, host = kind.describe(leaf), kind.host_bytes(leaf)
            except UnsupportedLeafError as error:
                raise UnsupportedLeafError(path or "the state itself", error.type_name, error.reason) from None
            self.in_place.append(host.keep is leaf)
            self.traced.append(host.alias is not None)
            piece = known.get((kind, host.alias)) if host.alias is not None else None
            if piece is None:
                piece = len(self.lengths)
                self.lengths.append(host.nbytes)
                self.stable &= host.stable or not host.nbytes
                if host.alias is not None:
                    known[kind, host.alias] = piece
            del host  # a copy is let go at once: it is made again when the plan is bound
            self.specs.append(spec)
            self.pieces.append(piece)
            self.rows.setdefault(kind, []).append(i)

    def entries(self, layout: Layout) -> list[LeafEntry]:
        """Give the manifest's leaf table."""
        return [
            LeafEntry(path, s.kind, s.dtype, s.shape, layout.pieces[piece].offset, s.nbytes, s.extra)
            for path, s, piece in zip(self.paths, self.specs, self.pieces, strict=True)
        ]


@final
class LeafGroup:
    """The leaves of one kind: how they are proved unchanged, and where their addresses go."""

    def __init__(
        self, kind: LeafKind, rows: list[int], leaves: list[Any], leaf_places: list[int], table: LeafTable
    ) -> None:
        self.kind = kind
        self.pick = picker([leaf_places[i] for i in rows])
        values = [leaves[i] for i in rows]
        self.lengths = table.lengths
        self.traced = [n for n, i in enumerate(rows) if table.traced[i]]
        self.parts = [
            _Part(kind, values[start : start + _PART], [n - start for n in self.traced if start <= n < start + _PART])
            for start in range(0, len(values), _PART)
        ]
        known = self._addresses(values)
        assert known is not None, "leaves just described are of their own fingerprint"
        self.addresses, self.partition = known, _partition(known)
        # Of each piece one leaf gives the bytes, the first: in place by its address, or as a copy.
        first: dict[int, int] = {}
        for n, i in enumerate(rows):
            first.setdefault(table.pieces[i], n)
        in_place = {n for n in self.traced if table.in_place[rows[n]]}
        direct = {piece: n for piece, n in first.items() if n in in_place}
        self.direct_to, self.direct_from = np.array(list(direct), np.intp), np.array(list(direct.values()), np.intp)
        self.others = [(piece, n) for piece, n in first.items() if piece not in direct]

    def _addresses(self, values: Sequence[Any]) -> Addresses | None:
        """Give the address of each leaf, 0 for those never tied; None if they are not the leaves of the plan."""
        found = np.zeros(len(values), np.uint64)
        for n, part in enumerate(self.parts):
            start = n * _PART
            if not part.read(self.kind, values[start : start + _PART], found[start : start + _PART]):
                return None
        return found

    def bind(self, found: list[Any], addresses: Addresses, keep: list[object]) -> bool:
        """Enter the addresses that this kind's leaves have now; False if they are not the leaves of the plan."""
        values = self.pick(found)
        try:
            now = self._addresses(values)
        except Exception:  # leaves that the kind refuses: planning anew says which, and why
            return False
        if now is None:
            return False
        if not np.array_equal(now, self.addresses):  # moved: then the same leaves must be tied as before
            if not np.array_equal(_partition(now), self.partition):
                return False
            self.addresses = now
        addresses[self.direct_to] = now[self.direct_from]
        keep.append(values)
        for piece, n in self.others:
            try:
                host = self.kind.host_bytes(values[n])
            except UnsupportedLeafError:
                return False
            if host.nbytes != self.lengths[piece]:
                return False
            addresses[piece] = host.address
            keep.append(host.keep)
        return True


class _Part:
    """Some leaves of a group: few enough that all questions asked of them find them in the processor's cache."""

    def __init__(self, kind: LeafKind, values: list[Any], traced: list[int]) -> None:
        self.fingerprint = kind.fingerprint(values)
        self.traced = None if len(traced) == len(values) else np.array(traced, np.intp)
        self.pick: Pick = picker(traced)

    def read(self, kind: LeafKind, values: Sequence[Any], addresses: Addresses) -> bool:
        if not kind.unchanged(values, self.fingerprint):
            return False
        if self.traced is None:
            addresses[:] = kind.addresses(values)
        elif self.traced.size:
            addresses[self.traced] = kind.addresses(self.pick(values))
        return True


def _partition(addresses: Addresses) -> NDArray[np.intp]:
    """Give, for each address, the first place at which it stands: equal exactly where the same ones are equal."""
    _, first, inverse = np.unique(addresses, return_index=True, return_inverse=True)
    return np.asarray(first[inverse], np.intp)
