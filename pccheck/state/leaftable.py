"""The leaves of one state: which are tied, where their bytes lie, and whose they are (floor 1: imports floors 0 and 1).

Every save asks it about all leaves at once: what is done for each leaf in Python is done once, when it is made.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, final

import msgspec
import numpy as np
from numpy.typing import NDArray

from pccheck.devices import DeviceBytes, Guard
from pccheck.errors import UnsupportedLeafError
from pccheck.leaves import KindTable, LeafKind
from pccheck.state.describing import Array, Described
from pccheck.state.dividing import Division, Replicated
from pccheck.state.filling import DeviceFiller, DeviceLayout, OnDevice
from pccheck.state.manifest import LeafEntry
from pccheck.state.owning import NOBODY, Indices, Numbers, Ownership, Pieces
from pccheck.state.plan import lay_out
from pccheck.state.shards import arrays_of
from pccheck.state.structure import Pick, picker

_PART = 512  # leaves: 20,000 tensors asked nine things one after the other took twice as long


@final
@dataclass(eq=False)
class Bound:
    """Where the bytes of a state's leaves lie now.

    Args:
        addresses: of each piece in host memory; 0 = on a device.
        keep: what keeps these valid.
        sources: by piece, what devices copy from.
        traced: of each group, the address of each leaf; the same object as before where none has moved.
    """

    addresses: Numbers
    keep: list[object] = field(default_factory=list)
    sources: dict[int, Any] = field(default_factory=dict)
    traced: list[Numbers] = field(default_factory=list)


@final
class LeafTable:
    """The leaves of one state as they are planned. Keeps none of them alive.

    Args:
        leaves: what `tree.flatten` gave.
        paths: their paths.
        kind_of: finds their kinds.
        chunk_bytes: bytes of byte space per chunk.
        replicated: which leaves are the same on all ranks.
        rank, world: which of how many ranks this is.

    Raises:
        UnsupportedLeafError: a leaf cannot be stored exactly; names its path.
    """

    def __init__(
        self, leaves: list[Any], paths: list[str], kind_of: KindTable, chunk_bytes: int, *,
        replicated: Replicated | None = None, rank: int = 0, world: int = 1,
    ) -> None:  # fmt: skip
        self._paths, self._types = paths, list(map(type, leaves))
        found = Described(leaves, paths, kind_of, replicated or Replicated(), Division(rank, world))
        arrays = found.arrays
        self.digest = found.digest
        self.layout = lay_out([a.length for a in arrays], chunk_bytes)
        self.stable = all(a.stable or not a.length for a in arrays)  # all bytes are copies, or cannot change
        self.pieces = Pieces(self.layout, [a.stable for a in arrays], [a.device is not None for a in arrays])
        places = [self.layout.pieces[piece].offset for piece in found.array_of]
        self.json = msgspec.json.encode(list(map(LeafEntry.of, paths, found.specs, places)))
        first: dict[int, str] = {}
        for path, piece in zip(paths, found.array_of, strict=True):
            first.setdefault(piece, path)
        self.piece_paths = tuple(first.values())  # pieces are numbered in the order of their first leaves
        self.rows = list(found.rows.values())  # the leaves of each group
        self._groups = [_Group(kind, rows, leaves, found) for kind, rows in found.rows.items()]
        on_device = [OnDevice(n, a.device, a.first) for n, a in enumerate(arrays) if a.device is not None and a.length]
        self._devices = DeviceLayout(self.layout, on_device) if on_device else None
        self._owned: tuple[tuple[object, ...], Ownership] | None = None

    def names(self, leaves: list[Any], paths: list[str]) -> bool:
        """Tell whether these are leaves of the same types at the same paths."""
        return paths == self._paths and list(map(type, leaves)) == self._types

    def bind(self, groups: Sequence[Sequence[Any]]) -> Bound | None:
        """Give where the bytes of each piece lie; None if the leaves are not those of the table.

        Args:
            groups: the leaves now, one sequence for each of `rows`; of the types that they had.
        """
        bound = Bound(np.zeros(len(self.layout.pieces), np.uint64))
        for group, leaves in zip(self._groups, groups, strict=True):
            if not group.bind(leaves, bound):
                return None
        return bound

    def filler(self, bound: Bound) -> DeviceFiller | None:
        """Give what fills the chunks with what lies on devices; None where nothing does."""
        return None if self._devices is None else DeviceFiller(self._devices, bound.sources)

    def owned(self, guard: Guard, groups: Sequence[Sequence[Any]], bound: Bound) -> Ownership:
        """Give who owns each piece, of leaves that `bind` has accepted and bound so.

        The guard is asked anew when its version changes, and about owned leaves that moved.
        """
        version = guard.version()
        asked = zip(self._groups, groups, bound.traced, strict=True)
        answers = [group.owners(guard, version, leaves, now) for group, leaves, now in asked]
        known = self._owned
        if known is None or any(a is not b for a, b in zip(known[0], answers, strict=True)):
            pieces = np.concatenate([np.empty(0, np.intp), *(group.pieces for group in self._groups)])
            owners = np.concatenate([np.empty(0, np.int64), *answers])
            known = self._owned = tuple(answers), self.pieces.owned(pieces, owners)
        return known[1]


class _Group:
    """The leaves of one kind: how they are proved unchanged, and where their addresses go."""

    def __init__(self, kind: LeafKind, rows: list[int], leaves: list[Any], found: Described) -> None:
        self.kind = kind
        values = [leaves[i] for i in rows]
        traced = [n for n, i in enumerate(rows) if found.traced[i]]
        in_place = [n for n, i in enumerate(rows) if found.in_place[i]]
        self.parts = [
            _Part(
                kind,
                values[start : start + _PART],
                [n - start for n in traced if start <= n < start + _PART],
                [n - start for n in in_place if start <= n < start + _PART],
            )
            for start in range(0, len(values), _PART)
        ]
        known = self._addresses(values, [])
        assert known is not None, "leaves just described are of their own fingerprint"
        self.addresses, self.partition = known, _partition(known)
        self.pieces: Indices = np.array([found.array_of[i] for i in rows], np.intp)
        # Of each piece with bytes one leaf gives them, the first: in place by its address, or as a copy.
        first: dict[int, int] = {}
        for n, piece in enumerate(self.pieces.tolist()):
            if found.arrays[piece].length:
                first.setdefault(piece, n)
        read = {piece: n for piece, n in first.items() if found.in_place[rows[n]]}
        device = {piece: n for piece, n in read.items() if found.arrays[piece].device is not None}
        direct = {piece: n for piece, n in read.items() if piece not in device and found.traced[rows[n]]}
        self.direct_to, self.direct_from = np.array(list(direct), np.intp), np.array(list(direct.values()), np.intp)
        shift = np.array([found.arrays[piece].first for piece in direct], np.uint64)
        self.shift = shift if shift.any() else None
        self.device_to, self.device_from = list(device), picker(list(device.values()))
        self.others = [(p, n, found.arrays[p]) for p, n in first.items() if p not in direct and p not in device]
        self._owners: tuple[object, object, Numbers, NDArray[np.int64]] | None = None

    def _addresses(self, values: Sequence[Any], keep: list[object]) -> Numbers | None:
        """Give the address of each leaf, 0 for those never tied; None if they are not the leaves of the plan.

        What holds their memory as it is goes to `keep`.
        """
        found = np.zeros(len(values), np.uint64)
        for n, part in enumerate(self.parts):
            start = n * _PART
            if not part.read(self.kind, values[start : start + _PART], found[start : start + _PART], keep):
                return None
        return found

    def bind(self, values: Sequence[Any], bound: Bound) -> bool:
        """Enter where the bytes of these leaves lie now; False if they are not the leaves of the plan."""
        try:
            now = self._addresses(values, bound.keep)
        except Exception:  # leaves that the kind refuses: planning anew says which, and why
            return False
        if now is None:
            return False
        known = self.addresses
        if np.array_equal(now, known):
            now = known
        elif np.array_equal(_partition(now), self.partition):  # moved, and the same leaves are tied as before
            self.addresses = now
        else:
            return False
        bound.traced.append(now)
        direct = now[self.direct_from]
        bound.addresses[self.direct_to] = direct if self.shift is None else direct + self.shift
        bound.keep.append(values)
        if self.device_to:
            bound.sources.update(zip(self.device_to, self.kind.sources(self.device_from(values)), strict=True))
        return all(self._bind_other(values[n], piece, array, bound) for piece, n, array in self.others)

    def _bind_other(self, value: Any, piece: int, array: Array, bound: Bound) -> bool:
        """Enter where the bytes of a leaf lie that is copied, or whose address alone does not tell."""
        try:
            found = self.kind.host_bytes(value)
        except UnsupportedLeafError:
            return False
        if found.nbytes != array.full:
            return False
        if isinstance(found, DeviceBytes):
            bound.sources[piece] = found.source
            return found.device == array.device
        bound.addresses[piece] = found.address + array.first
        bound.keep.append(found.keep)
        return array.device is None

    def owners(self, guard: Guard, version: object, values: Sequence[Any], now: Numbers) -> NDArray[np.int64]:
        """Give who owns each leaf; the same object as before while nothing has changed."""
        known = self._owners
        if known is None or known[0] is not guard or known[1] != version:
            found = np.full(len(values), NOBODY, np.int64)
            asked = np.flatnonzero(now)  # what is not traced may be another leaf next time: nobody's
        elif known[2] is not now:
            # Owned leaves that moved may be others. What nobody owned stays so until the version changes: a copy of the
            # random state, new for each save, must not have the guard look through all that it owns.
            found = known[3].copy()
            asked = np.flatnonzero((now != known[2]) & (found != NOBODY))
        else:
            return known[3]
        if asked.size:
            found[asked] = guard.owners(self.kind.name, arrays_of(self.kind, picker(asked.tolist())(values)))
        if known is not None and np.array_equal(found, known[3]):
            found = known[3]
        self._owners = guard, version, now, found
        return found


class _Part:
    """Some leaves of a group: few enough that all questions asked of them find them in the processor's cache."""

    def __init__(self, kind: LeafKind, values: list[Any], traced: list[int], in_place: list[int]) -> None:
        self.holds = bool(in_place) and type(kind).hold is not LeafKind.hold
        self.held: Pick = picker(in_place)
        self.traces, every = bool(traced), len(traced) == len(values)
        self.traced: Indices | slice = slice(None) if every else np.array(traced, np.intp)
        self.pick: Pick = (lambda leaves: leaves) if every else picker(traced)
        # These are asked about by themselves, in one go.
        self.at_once = self.traces and (traced == in_place or not self.holds)
        others = sorted(set(range(len(values))).difference(traced)) if self.at_once else []
        self.others: Pick | None = picker(others) if others else None
        self.fingerprint = kind.fingerprint(self.pick(values) if self.at_once else values)
        self.other_fingerprint = None if self.others is None else kind.fingerprint(self.others(values))

    def read(self, kind: LeafKind, values: Sequence[Any], addresses: Numbers, keep: list[object]) -> bool:
        if self.at_once:
            return self._read_at_once(kind, values, addresses, keep)
        if not kind.unchanged(values, self.fingerprint):
            return False
        if self.holds:  # by now these are the leaves of the plan; and an address may be another one once it is held
            keep.append(kind.hold(self.held(values)))
        if self.traces:
            addresses[self.traced] = kind.addresses(self.pick(values))
        return True

    def _read_at_once(self, kind: LeafKind, values: Sequence[Any], addresses: Numbers, keep: list[object]) -> bool:
        if self.others is not None and not kind.unchanged(self.others(values), self.other_fingerprint):
            return False
        found = kind.held_at(self.pick(values), self.fingerprint)
        if found is None:
            return False
        keep.append(found[0])
        addresses[self.traced] = found[1]
        return True


def _partition(addresses: Numbers) -> Indices:
    """Give, for each address, the first place at which it stands: equal exactly where the same ones are equal."""
    _, first, inverse = np.unique(addresses, return_index=True, return_inverse=True)
    return np.asarray(first[inverse], np.intp)
