"""What is known of the leaves of a state when each was asked once (floor 1: imports floor 0)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, final

from pccheck.devices import Device, DeviceBytes
from pccheck.errors import UnsupportedLeafError
from pccheck.leaves import HostBytes, KindTable, LeafKind, LeafSpec
from pccheck.state.dividing import Division, Replicated


@final
@dataclass(kw_only=True)
class Array:
    """What tied leaves share: one piece of the layout.

    Args:
        full: bytes of it, be they all stored here or not.
        stable: nobody else can change them.
        device: where they lie; None = in host memory.
        length: bytes that are stored here.
        first: the byte of the whole where these begin.
    """

    full: int
    stable: bool
    device: Device | None
    length: int
    first: int = 0


@final
class Described:
    """Leaves, each asked once for its spec and bytes.

    Args:
        leaves: what `tree.flatten` gave.
        paths: their paths.
        kind_of: finds their kinds.
        replicated: which leaves are the same on all ranks.
        division: divides them.

    Raises:
        UnsupportedLeafError: a leaf cannot be stored exactly; names its path.
    """

    def __init__(
        self, leaves: list[Any], paths: list[str], kind_of: KindTable, replicated: Replicated, division: Division
    ) -> None:
        self.specs: list[LeafSpec] = []
        self.traced: list[bool] = []  # which leaves may be tied
        self.in_place: list[bool] = []  # which leaves' bytes are read where they are
        self.array_of: list[int] = []  # of each leaf; tied ones share one
        self.arrays: list[Array] = []  # in the order of the layout's pieces
        self.rows: dict[LeafKind, list[int]] = {}
        self._known: dict[object, int] = {}
        for i, (leaf, path) in enumerate(zip(leaves, paths, strict=True)):
            kind = kind_of(leaf)
            assert kind is not None, "flatten asked before"
            try:
                spec, found = kind.describe(leaf), kind.host_bytes(leaf)
            except UnsupportedLeafError as error:
                raise error.at(path) from None
            self._take(kind, leaf, spec, found)
            self.rows.setdefault(kind, []).append(i)
            if division.world > 1 and path in replicated:  # so are the leaves that it is tied to
                division.offer(self.array_of[-1], kind, spec)
            del found  # a copy is let go at once: it is made again when it is bound
        division.divide()
        self.digest = division.digest(list(zip(paths, self.specs, self.array_of, strict=True)))
        for i, (spec, array) in enumerate(zip(self.specs, self.array_of, strict=True)):
            self.specs[i], first = division.part(array, spec)
            self.arrays[array].length, self.arrays[array].first = self.specs[i].nbytes, first

    def _take(self, kind: LeafKind, leaf: Any, spec: LeafSpec, found: HostBytes | DeviceBytes) -> None:
        key = None if found.alias is None else (kind, found.alias, spec.shape, spec.box)
        array = None if key is None else self._known.get(key)
        device = found.device if isinstance(found, DeviceBytes) else None
        if array is None:
            array = len(self.arrays)
            self.arrays.append(Array(full=found.nbytes, stable=found.stable, device=device, length=found.nbytes))
            if key is not None:
                self._known[key] = array
        self.specs.append(spec)
        self.traced.append(key is not None)
        self.in_place.append(not found.stable if isinstance(found, DeviceBytes) else found.keep is leaf)
        self.array_of.append(array)
