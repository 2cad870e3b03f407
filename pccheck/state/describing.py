"""What is known of the leaves of a state when each was asked once (floor 1: imports floor 0)."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from itertools import groupby
from typing import Any, NamedTuple, final

from pccheck.devices import Device, DeviceBytes
from pccheck.errors import FormatError, UnsupportedLeafError
from pccheck.leaves import HostBytes, KindTable, LeafKind, LeafSpec
from pccheck.state import tree
from pccheck.state.dividing import Division, Replicated
from pccheck.state.entries import check_parts


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
        leaves: what `tree.flatten` gave: those of several parts several times.
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
        self._known: dict[object, list[int]] = {}
        for path, run in groupby(range(len(leaves)), paths.__getitem__):
            rows = list(run)
            parts = self._ask(leaves[rows[0]], path, kind_of, len(rows))
            self._take(leaves[rows[0]], parts)
            for i, part in zip(rows, parts, strict=True):
                self.rows.setdefault(part.kind, []).append(i)
                if division.world > 1 and path in replicated:  # so are the leaves that it is tied to
                    division.offer(self.array_of[i], part.kind, part.spec)
            del parts  # copies are let go at once: they are made again when they are bound
        division.divide()
        self.digest = division.digest(list(zip(paths, self.specs, self.array_of, strict=True)))
        for i, (spec, array) in enumerate(zip(self.specs, self.array_of, strict=True)):
            self.specs[i], first = division.part(array, spec)
            self.arrays[array].length, self.arrays[array].first = self.specs[i].nbytes, first

    def _ask(self, leaf: Any, path: str, kind_of: KindTable, count: int) -> list[_Part]:
        """Ask what a leaf is: the kind of each of its parts, where it has several."""
        kind = kind_of(leaf)
        assert kind is not None, "flatten asked before"
        try:
            kinds = [kind] if count == 1 else [kind.part(n) for n in range(count)]
            parts = [_Part(part, part.describe(leaf), part.host_bytes(leaf)) for part in kinds]
            if count > 1:
                check_parts(path, [part.spec for part in parts])
        except UnsupportedLeafError as error:
            raise error.at(path) from None
        except FormatError as error:
            raise UnsupportedLeafError(path, tree.type_name(leaf), str(error)) from None
        return parts

    def _take(self, leaf: Any, parts: list[_Part]) -> None:
        """Enter a leaf; it is tied to another where all of its parts are the same memory seen alike."""
        aliases = [part.alias for part in parts]
        key = None if None in aliases else tuple(aliases)
        arrays = None if key is None else self._known.get(key)
        if arrays is None:
            arrays = list(range(len(self.arrays), len(self.arrays) + len(parts)))
            for _, _, found in parts:
                device = found.device if isinstance(found, DeviceBytes) else None
                self.arrays.append(Array(full=found.nbytes, stable=found.stable, device=device, length=found.nbytes))
            if key is not None:
                self._known[key] = arrays
        for part, alias in zip(parts, aliases, strict=True):
            found = part.found
            self.specs.append(part.spec)
            self.traced.append(alias is not None)
            self.in_place.append(not found.stable if isinstance(found, DeviceBytes) else found.keep is leaf)
        self.array_of += arrays


class _Part(NamedTuple):
    """A leaf, or one of its parts, as its kind tells it."""

    kind: LeafKind
    spec: LeafSpec
    found: HostBytes | DeviceBytes

    @property
    def alias(self) -> Hashable | None:
        """Equal for what is the same memory seen alike; None = never tied."""
        alias = self.found.alias
        return None if alias is None else (self.kind, alias, self.spec.shape, self.spec.box)
