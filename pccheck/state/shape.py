"""How a state is built, and its small values, as JSON that is made anew in part only (floor 1: imports floor 0)."""

from __future__ import annotations

import operator
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import compress
from typing import Any, final

import msgspec

from pccheck.errors import UsageError
from pccheck.leaves import KindTable
from pccheck.state import nodes, tree
from pccheck.state.forms import SMALL_BYTES
from pccheck.state.nodes import Node
from pccheck.state.structure import Structure, picker

_HOLE = msgspec.Raw(b"\0")  # JSON has no NUL byte, so that the text can be cut at the holes
_encode = msgspec.json.Encoder().encode


def changed_meanwhile() -> UsageError:
    """Give the error that says that a state changed under the hands of who looks at it."""
    return UsageError("the state was changed by another thread while it was being saved; save it under your lock")


@final
class Shape:
    """How a state is built, and its small values. Keeps no leaf alive once these are taken.

    Args:
        state: what is saved.
        kind_of: finds the kinds of its leaves.
        check: called with the skeleton; what it raises goes on to the caller.

    Raises:
        UnsupportedLeafError: something in the state cannot be stored exactly; names its path.
        UsageError: another thread changed the state meanwhile.
    """

    def __init__(self, state: object, kind_of: KindTable, check: Callable[[Node], None]) -> None:
        values: list[Any] = []
        ends: list[tuple[type, int]] = []  # what is no container, depth-first: its type, and in how many parts stored

        def hole(value: Any) -> msgspec.Raw:
            values.append(value)
            ends.append((type(value), 0))
            return _HOLE

        def parts(value: object) -> int:
            kind = kind_of(value)
            count = 0 if kind is None else kind.parts(value)
            if count:
                ends.append((type(value), count))
            return count

        skeleton, leaves, self._paths = tree.flatten(state, parts, hole, kind_of.container)
        check(skeleton)
        self._leaves: list[Any] = leaves
        self._fragments = _encode(skeleton).split(b"\0")
        self._floats = [i for i, v in enumerate(values) if type(v) is float]
        self._complex = [i for i, v in enumerate(values) if type(v) is complex]
        self._known: _Values | None = None
        self.values = len(values)

        self.structure = Structure(state, kind_of.container, lambda v: kind_of(v) is not None)
        found, order = self.structure.match(state), self.structure.order
        if found is None or [type(found[place]) for place in order] != [cls for cls, _ in ends]:
            raise changed_meanwhile()
        stored = list(zip(order, ends, strict=True))
        self.leaf_places = [place for place, (_, count) in stored for _ in range(count)]
        self._pick = picker([place for place, (_, count) in stored if not count])

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
        floats = array("d", [values[i] for i in self._floats]).tobytes()
        if (
            known is not None
            and not self._complex  # in these -0.0 equals 0.0
            and values == known.values
            and floats == known.floats
        ):
            return known.text
        if known is None:
            encoded = [_encode(nodes.encode_value(v)) for v in values]
        else:
            encoded = known.encoded.copy()
            changed = {*compress(range(len(values)), map(operator.ne, values, known.values)), *self._complex}
            changed.update(compress(self._floats, map(operator.ne, _bits(floats), _bits(known.floats))))
            for i in changed:
                value = values[i]
                if type(value) in (str, bytes) and len(value) > SMALL_BYTES:
                    return None
                encoded[i] = _encode(nodes.encode_value(value))
        parts = [b""] * (2 * len(encoded) + 1)
        parts[0::2], parts[1::2] = self._fragments, encoded
        self._known = _Values(values, floats, encoded, b"".join(parts))
        return self._known.text


@dataclass(frozen=True)
class _Values:
    """The small values of the last save, and their JSON."""

    values: Sequence[Any]
    floats: bytes  # the bits of the floats among them
    encoded: list[bytes]
    text: bytes  # of the whole tree


def _bits(floats: bytes) -> memoryview:
    return memoryview(floats).cast("Q")
