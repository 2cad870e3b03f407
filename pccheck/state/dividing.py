"""Which leaves are the same on all ranks, and who stores what of them (floor 0: imports errors, leaves, boxes, tree).

Every rank computes the same division from the same shapes, so that ranks need not talk (FastPersist, arXiv 2406.13768,
section 4.2); `Division.digest` is equal where they did.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, final

import msgspec

from pccheck.errors import OptionError, UsageError
from pccheck.leaves import LeafKind, LeafSpec
from pccheck.state import nodes, paths, tree
from pccheck.state.boxes import Box, divide
from pccheck.state.nodes import Node

DIGEST_BYTES = 16
_ALLOWED = 'True, False, or a list of paths such as ["model", "optimizer"]'


@final
@dataclass(frozen=True)
class Replicated:
    """The leaves that are the same on all ranks: at or under `prefixes` ("" is the root), and not under `own`."""

    prefixes: tuple[str, ...] = ()
    own: frozenset[str] = frozenset()

    @classmethod
    def of(cls, option: object) -> Replicated:
        """Give what the option `replicated` says: True, False, or paths; raises OptionError."""
        if isinstance(option, bool):
            return cls(("",) if option else ())
        if not isinstance(option, (list, tuple)) or not all(isinstance(p, str) for p in option):
            raise OptionError("replicated", option, _ALLOWED)  # a single str would be a list of its characters
        return cls(tuple(option))

    def __contains__(self, path: object) -> bool:
        return _is_under(str(path), self.prefixes) and not _is_under(str(path), self.own)

    def check(self, skeleton: Node) -> None:
        """Raise UsageError unless each prefix names a place in the state: a misspelt one would divide nothing."""
        for prefix in self.prefixes:
            if prefix and not _has(skeleton, prefix):
                top = [part for part, _ in _children_of(skeleton)]
                raise UsageError(
                    f"replicated={list(self.prefixes)!r}: the state has nothing at {prefix!r}; at its root it has "
                    f"{', '.join(top[:20])}{' and more' if len(top) > 20 else ''}"
                )


def _is_under(path: str, prefixes: Collection[str]) -> bool:
    """Tell whether one of these is the path, a place above it, or the root: as many look-ups as the path has parts."""
    above = itertools.accumulate(path.split("/"), "{}/{}".format)
    return "" in prefixes or any(place in prefixes for place in above)


def _has(node: Any, path: str) -> bool:
    for part in path.split("/"):
        node = next((child for name, child in _children_of(node) if name == part), None)
        if node is None:
            return False
    return True


def _children_of(node: Any) -> list[tuple[str, Any]]:
    attributes = node.attributes if isinstance(node, nodes.Ordered) else []
    return tree.children_of(node) + [(paths.attribute(nodes.decode_key(name)), child) for name, child in attributes]


@final
@dataclass
class Division:
    """Divides arrays that all ranks have, and tells what each leaf becomes.

    An array is what tied leaves share. One that is not in C order is stored whole, by one rank. One without rows (no
    axis, or no bytes) is each rank's own: it is too small to be worth another file's reading.

    Args:
        rank, world: which of how many ranks this is; a world of 1 divides nothing.
    """

    rank: int
    world: int
    _arrays: list[tuple[int, LeafSpec, bool]] = field(default_factory=list)
    _numbers: dict[int, int] = field(default_factory=dict)
    _mine: list[Box | None] = field(default_factory=list)

    def offer(self, array: int, kind: LeafKind, spec: LeafSpec) -> None:
        """Take an array (by the caller's number) into the division, if it can be divided, or stored by one alone."""
        plain = kind.name not in ("str", "bytes") and spec.box is None and spec.shape and spec.nbytes
        rows = kind.divisible(spec)
        if self.world > 1 and plain and (rows or "stride" in spec.extra) and array not in self._numbers:
            self._numbers[array] = len(self._arrays)
            self._arrays.append((array, spec, rows))

    def divide(self) -> None:
        """Divide what was offered."""
        shapes = [(spec.shape if rows else (1,), spec.nbytes) for _, spec, rows in self._arrays]
        self._mine = divide(shapes, self.world)[self.rank] if shapes else []

    def part(self, array: int, spec: LeafSpec) -> tuple[LeafSpec, int]:
        """Give the spec of what this rank stores of a leaf of an array, and the byte of the array where that begins."""
        number = self._numbers.get(array)
        if number is None:
            return spec, 0
        box, (_, _, rows) = self._mine[number], self._arrays[number]
        if box is None:
            nothing = (0,) * len(spec.shape)
            return replace(spec, nbytes=0, extra=spec.extra_in_c_order, box=Box(nothing, nothing)), 0
        if not rows:
            return replace(spec, box=Box.whole(spec.shape)), 0
        row = spec.nbytes // spec.shape[0]
        return replace(spec, nbytes=row * box.sizes[0], box=box), row * box.offsets[0]

    def digest(self, leaves: Sequence[tuple[str, LeafSpec, int]]) -> bytes:
        """Give 16 bytes that are equal on ranks that divided the same arrays alike.

        Parts of global arrays (boxes) are left out: the stages of a pipeline rightly hold different ones, and a reader
        finds what lacks or contradicts.

        Args:
            leaves: path, spec, and array of each leaf of the state.
        """
        shared = [
            (path, spec.kind, spec.dtype, spec.shape, self._numbers[array])
            for path, spec, array in leaves
            if array in self._numbers
        ]
        return hashlib.blake2b(msgspec.json.encode([self.world, shared]), digest_size=DIGEST_BYTES).digest()
