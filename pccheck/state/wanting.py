"""Holds one leaf of a checkpoint against one of `like`: what to read, and what to make of it (floor 0: imports leaves,
boxes, entries, mismatch).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, TypeAlias, final

from pccheck.leaves import ABSENT, KindTable, LeafKind, LeafSpec
from pccheck.state.boxes import Box
from pccheck.state.entries import StoredLeaves, box_of
from pccheck.state.mismatch import Problem, told

TEXT_KINDS = {"str": str, "bytes": bytes}  # kinds of leaves that are Python values all the same

NUMBERS = (bool, int, float, complex)

Ask: TypeAlias = int | tuple[int, Box]  # a leaf by its place in the manifest, or one of several boxes of it


@final
@dataclass(frozen=True)
class Want:
    """One leaf to read: build it as `spec` with `kind`, then give it the place of `like`.

    `kind` is None where the leaf comes back as it was saved, and its framework is not installed. Of a leaf that is
    `joined`, it is one box.
    """

    index: int
    kind: LeafKind | None
    spec: LeafSpec
    like: Any = field(default=ABSENT, repr=False)
    joined: bool = False

    @property
    def ask(self) -> Ask:
        """What to ask for its bytes by."""
        return (self.index, self.spec.box) if self.joined and self.spec.box is not None else self.index


@final
@dataclass(frozen=True)
class Join:
    """One leaf that is joined of boxes, in the order in which `kind` asked for them; equal boxes are one Want."""

    kind: LeafKind
    wants: tuple[Want, ...]
    like: Any = field(repr=False)


class Differs(NamedTuple):
    """How a stored leaf is not what is asked for."""

    problem: Problem
    expected: str
    found: str


def as_stored(index: int, stored: StoredLeaves, named: Callable[[str], LeafKind | None]) -> tuple[Want, ...]:
    """Give what reads a leaf as it was saved: one Want, or several where what is stored of it makes no whole."""
    parts = stored.split.get(index, (stored.specs[index],))
    return tuple(Want(n, named(spec.kind), spec) for n, spec in enumerate(parts, index))


def wanted(
    like: Any, kind: LeafKind, want: LeafSpec, index: int, stored: StoredLeaves, kind_of: KindTable
) -> Want | Join | Differs:
    """Give what makes a leaf of `like` out of a stored one, or how they differ.

    Args:
        like: the leaf.
        kind, want: what `kind_of.like` gave for it.
        index: the stored leaf.
        stored: what the stored leaves are.
        kind_of: finds kinds.
    """
    have = stored.specs[index]
    if have.shape != want.shape:
        return Differs("shape", str(want.shape), str(have.shape))
    spec = _readable_as(have, want, kind, like, kind_of)
    if spec is None:
        return Differs("dtype", _dtype(want), _dtype(have))
    boxes = kind.boxes(like)
    for box in [box_of(want)] if boxes is None else boxes:
        if not _has(stored.boxes(index), box, kind, part_of(spec, have, box)):
            return Differs("part", told(box), ", ".join(map(told, stored.boxes(index))))
    if boxes is None:
        return Want(index, kind, part_of(spec, have, want.box), like)
    parts = {box: Want(index, kind, part_of(spec, have, box), joined=True) for box in boxes}
    return Join(kind, tuple(parts[box] for box in boxes), like)


def of_number(value: Any, kind: LeafKind, like: Any) -> Any:
    """Give a stored Python number as the leaf of `like`, of a kind that says that this may be (`holds_number`)."""
    boxes = kind.boxes(like)
    return kind.convert(value, like) if boxes is None else kind.join([value] * len(boxes), like)


def _readable_as(have: LeafSpec, want: LeafSpec, kind: LeafKind, like: Any, kind_of: KindTable) -> LeafSpec | None:
    """Give a stored leaf's spec as one of `kind`; None where its elements are others than `like` asks for."""
    if have.kind == kind.name:
        same = have.dtype == want.dtype and have.extra.get("struct") == want.extra.get("struct")
        return have if same or kind.casts(have, like) else None
    stored_as = kind_of.named(have.kind)
    dtype = have.dtype if stored_as is None else stored_as.common_dtype(have)
    spec = None if dtype is None else kind.adopt(have, dtype)
    if spec is None or not (dtype == kind.common_dtype(want) or kind.casts(spec, like)):
        return None
    return spec


def _has(stored: list[Box], box: Box, kind: LeafKind, part: LeafSpec) -> bool:
    """Tell whether a box can be put together out of disjoint ones."""
    if box in stored:
        return True
    if not box.fits(part.shape):
        return False
    common = (each.common(box) for each in stored)
    return kind.divisible(part) and sum(c.elements for c in common if c is not None) == box.elements


def part_of(spec: LeafSpec, stored: LeafSpec, box: Box | None) -> LeafSpec:
    """Give the spec of a part of a stored leaf, which comes back in C order; None = all of it, as it is stored."""
    elements = math.prod(stored.local_shape)
    if box is None:
        return replace(spec, box=None)
    nbytes = stored.nbytes * box.elements // elements if elements else 0
    return replace(spec, box=box, nbytes=nbytes, extra=spec.extra_in_c_order)


def _dtype(spec: LeafSpec) -> str:
    return f"{spec.dtype} ({spec.kind})"


def shown(spec: LeafSpec) -> str:
    """Give a leaf in a few words."""
    if spec.kind in TEXT_KINDS:
        return spec.kind
    return f"{spec.kind} {spec.dtype}{list(spec.shape)}"
