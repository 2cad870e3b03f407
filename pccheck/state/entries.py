"""The leaves of a manifest, of which one may be stored in several parts (floor 0: imports errors, leaves, apart, boxes,
transfer).

An array that is spread over the devices of one process has an entry for each of its parts, side by side, with the same
path; the tree names the first. None of them shares bytes with anything but the same part of an equal array.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any, final

import msgspec

from pccheck.errors import FormatError
from pccheck.leaves import LeafSpec
from pccheck.state.apart import MAX_PARTS
from pccheck.state.boxes import Box
from pccheck.state.transfer import overlapping


class LeafEntry(msgspec.Struct, frozen=True, gc=False, omit_defaults=True):
    """One leaf, or one part of it: a LeafSpec and where its bytes begin; tied leaves have the same place."""

    path: str
    kind: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int
    extra: dict[str, Any] = {}
    box: tuple[tuple[int, ...], tuple[int, ...]] | None = None  # offsets, sizes

    @classmethod
    def of(cls, path: str, spec: LeafSpec, offset: int) -> LeafEntry:
        """Give the entry of a leaf with this spec."""
        box = None if spec.box is None else (spec.box.offsets, spec.box.sizes)
        return cls(path, spec.kind, spec.dtype, spec.shape, offset, spec.nbytes, spec.extra, box)

    def spec(self) -> LeafSpec:
        """Give the leaf's spec."""
        return LeafSpec(
            kind=self.kind, dtype=self.dtype, shape=self.shape, nbytes=self.nbytes, extra=self.extra,
            box=None if self.box is None else Box(*self.box),
        )  # fmt: skip


def firsts(leaves: Sequence[LeafEntry]) -> list[int]:
    """Give the places of the leaves that a tree names: all but the further parts of leaves."""
    return [i for i, e in enumerate(leaves) if not i or e.path != leaves[i - 1].path]


def parts_of(leaves: Sequence[LeafEntry], index: int) -> Sequence[LeafEntry]:
    """Give the parts of leaf `index` from that one on; most leaves have one."""
    end, path = index + 1, leaves[index].path
    while end < len(leaves) and leaves[end].path == path:
        end += 1
    return leaves[index:end]


def box_of(spec: LeafSpec) -> Box:
    """Give the part of the global array that a spec is of."""
    return Box.whole(spec.shape) if spec.box is None else spec.box


def whole_of(spec: LeafSpec) -> LeafSpec:
    """Give the spec of the whole array, in C order, of which this is a part."""
    if spec.box is None:
        return spec
    elements = spec.box.elements
    nbytes = spec.nbytes // elements * Box.whole(spec.shape).elements if elements else 0
    return replace(spec, box=None, nbytes=nbytes, extra=spec.extra_in_c_order)


# -- what a file claims ------------------------------------------------------------------------------------------------


def check_parts(path: str, specs: Sequence[LeafSpec]) -> None:
    """Raise FormatError unless these can be several parts of one array."""
    first, name = specs[0], path[:200]
    boxes = [spec.box for spec in specs if spec.box is not None]
    if len(boxes) < len(specs) or len(specs) > MAX_PARTS:
        raise FormatError(f"two leaves have the path {name!r}, or one has more than {MAX_PARTS} parts")
    if any((s.kind, s.dtype, s.shape, s.extra) != (first.kind, first.dtype, first.shape, first.extra) for s in specs):
        raise FormatError(f"the parts of leaf {name!r} are of different arrays")
    if overlapping(boxes) is not None:
        raise FormatError(f"parts of leaf {name!r} overlap")
    if len({divmod(s.nbytes, box.elements) for s, box in zip(specs, boxes, strict=True) if box.elements}) > 1:
        raise FormatError(f"the parts of leaf {name!r} have elements of different sizes")


def check_sharing(leaves: Sequence[LeafEntry]) -> None:
    """Raise FormatError where a leaf of several parts is no array, or shares bytes with anything but an equal one.

    Else a small file could name the same bytes as the parts of any number of large arrays. What one entry alone may
    claim was checked before.
    """
    whose: dict[int, object] = {}  # by first byte
    for start, end in pairwise([*firsts(leaves), len(leaves)]):
        parts = leaves[start:end]
        if len(parts) > 1:
            check_parts(parts[0].path, [e.spec() for e in parts])
        stored = [e.offset for e in parts if e.nbytes]
        if len(set(stored)) < len(stored):
            raise FormatError(f"parts of leaf {parts[0].path[:200]!r} share their bytes")
        same = None if len(parts) == 1 else (parts[0].shape, [(e.offset, e.box) for e in parts if e.nbytes])
        if any(whose.setdefault(offset, same) != same for offset in stored):
            raise FormatError(f"leaf {parts[0].path[:200]!r} shares some of its parts, not all, with another leaf")


# -- what a reader makes of them ---------------------------------------------------------------------------------------


@final
@dataclass(frozen=True)
class StoredLeaves:
    """What the leaves of a checkpoint are.

    Args:
        specs: of each leaf, by its place in the manifest; of one in several parts, of all of these together.
        split: the parts of leaves in several parts that do not make a whole array, by the place of the first; the
            others follow it. Their spec is that of the whole array.
    """

    specs: Sequence[LeafSpec]
    split: Mapping[int, Sequence[LeafSpec]] = field(default_factory=dict)

    @classmethod
    def of(cls, leaves: Sequence[LeafEntry]) -> StoredLeaves:
        """Give what the leaves of one manifest are, without the parts that other ranks may have."""
        specs, split = [entry.spec() for entry in leaves], {}
        for index, end in pairwise([*firsts(leaves), len(leaves)]):
            if end - index < 2:
                continue
            parts = specs[index:end]
            with_bytes = next((spec for spec in parts if spec.nbytes), parts[0])
            specs[index] = whole_of(with_bytes)
            if sum(box_of(spec).elements for spec in parts) < Box.whole(parts[0].shape).elements:
                split[index] = parts
        return cls(specs, split)

    def boxes(self, index: int) -> list[Box]:
        """Give the parts of leaf `index` that are stored; what makes a whole counts as one."""
        return [box_of(spec) for spec in self.split.get(index, (self.specs[index],))]
