"""The leaves of one state: which are tied, and where their bytes lie (floor 1: imports floor 0)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, final

import msgspec
import numpy as np
from numpy.typing import NDArray

from pccheck.errors import UnsupportedLeafError
from pccheck.leaves import KindTable, LeafKind, LeafSpec
from pccheck.state.manifest import LeafEntry
from pccheck.state.plan import lay_out
from pccheck.state.structure import Pick, picker

Addresses = NDArray[np.uint64]
_PART = 512  # leaves: 20,000 tensors asked nine things one after the other took twice as long


@final
class LeafTable:
    """The leaves of one state as they are planned. Keeps none of them alive.

    Args:
        leaves: what `tree.flatten` gave.
        paths: their paths.
        kind_of: finds their kinds.
        chunk_bytes: bytes of byte space per chunk.

    Raises:
        UnsupportedLeafError: a leaf cannot be stored exactly; names its path.
    """

    def __init__(self, leaves: list[Any], paths: list[str], kind_of: KindTable, chunk_bytes: int) -> None:
        self._paths, self._types = paths, list(map(type, leaves))
        table = _described(leaves, paths, kind_of)
        self.layout = lay_out(table.lengths, chunk_bytes)
        self.stable = table.stable  # all bytes are copies, or cannot change
        offsets = [self.layout.pieces[piece].offset for piece in table.pieces]
        self.json = msgspec.json.encode(
            [
                LeafEntry(path, s.kind, s.dtype, s.shape, offset, s.nbytes, s.extra)
                for path, s, offset in zip(paths, table.specs, offsets, strict=True)
            ]
        )
        self.rows = list(table.rows.values())  # the leaves of each group
        self._groups = [_Group(kind, rows, leaves, table) for kind, rows in table.rows.items()]

    def names(self, leaves: list[Any], paths: list[str]) -> bool:
        """Tell whether these are leaves of the same types at the same paths."""
        return paths == self._paths and list(map(type, leaves)) == self._types

    def bind(self, groups: Sequence[Sequence[Any]]) -> tuple[Addresses, list[object]] | None:
        """Give the address of each piece, and what keeps these valid; None if the leaves are not those of the table.

        Args:
            groups: the leaves now, one sequence for each of `rows`; of the types that they had.
        """
        addresses: Addresses = np.zeros(len(self.layout.pieces), np.uint64)
        keep: list[object] = []
        for group, leaves in zip(self._groups, groups, strict=True):
            if not group.bind(leaves, addresses, keep):
                return None
        return addresses, keep


@dataclass
class _Described:
    """What is known of leaves when each has been asked once."""

    specs: list[LeafSpec]
    traced: list[bool]  # which leaves may be tied
    in_place: list[bool]
    pieces: list[int]  # of each leaf; tied ones share one
    lengths: list[int]  # of each piece
    rows: dict[LeafKind, list[int]]
    stable: bool = True


def _described(leaves: list[Any], paths: list[str], kind_of: KindTable) -> _Described:
    table = _Described([], [], [], [], [], {})
    known: dict[object, int] = {}
    for i, (leaf, path) in enumerate(zip(leaves, paths, strict=True)):
        kind = kind_of(leaf)
        assert kind is not None, "flatten asked before"
        try:
            spec, host = kind.describe(leaf), kind.host_bytes(leaf)
        except UnsupportedLeafError as error:
            raise UnsupportedLeafError(path or "the state itself", error.type_name, error.reason) from None
        piece = known.get((kind, host.alias)) if host.alias is not None else None
        if piece is None:
            piece = len(table.lengths)
            table.lengths.append(host.nbytes)
            table.stable &= host.stable or not host.nbytes
            if host.alias is not None:
                known[kind, host.alias] = piece
        table.specs.append(spec)
        table.traced.append(host.alias is not None)
        table.in_place.append(host.keep is leaf)
        table.pieces.append(piece)
        table.rows.setdefault(kind, []).append(i)
        del host  # a copy is let go at once: it is made again when it is bound
    return table


class _Group:
    """The leaves of one kind: how they are proved unchanged, and where their addresses go."""

    def __init__(self, kind: LeafKind, rows: list[int], leaves: list[Any], table: _Described) -> None:
        self.kind, self.lengths = kind, table.lengths
        values = [leaves[i] for i in rows]
        traced = [n for n, i in enumerate(rows) if table.traced[i]]
        self.parts = [
            _Part(kind, values[start : start + _PART], [n - start for n in traced if start <= n < start + _PART])
            for start in range(0, len(values), _PART)
        ]
        known = self._addresses(values)
        assert known is not None, "leaves just described are of their own fingerprint"
        self.addresses, self.partition = known, _partition(known)
        # Of each piece one leaf gives the bytes, the first: in place by its address, or as a copy.
        first: dict[int, int] = {}
        for n, i in enumerate(rows):
            first.setdefault(table.pieces[i], n)
        in_place = {n for n in traced if table.in_place[rows[n]]}
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

    def bind(self, values: Sequence[Any], addresses: Addresses, keep: list[object]) -> bool:
        """Enter the addresses that these leaves have now; False if they are not the leaves of the plan."""
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
