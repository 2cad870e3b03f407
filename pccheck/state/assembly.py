"""Puts a restored state together out of a manifest and its bytes (floor 1: imports floor 0 and the core's kinds)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from typing import Any, final

import msgspec

from pccheck.errors import FormatError, MismatchError, UnsupportedLeafError
from pccheck.leaves import ABSENT, KindTable, LeafKind, LeafSpec
from pccheck.state import tree
from pccheck.state.boxes import Box
from pccheck.state.fit import Fit, Want, match
from pccheck.state.manifest import Manifest
from pccheck.state.mismatch import Mismatch
from pccheck.state.numpy_leaves import as_numpy
from pccheck.state.shards import Shard

MAX_FORMS = 16  # kinds, dtypes and shapes of leaves that share their bytes


def assemble(
    manifest: Manifest,
    read: Callable[[int], memoryview],
    kind_of: KindTable,
    *,
    like: object = ABSENT,
    fit: Fit | None = None,
    partial: bool = False,
    specs: Sequence[LeafSpec] | None = None,
    key: Callable[[int], Hashable | None] | None = None,
) -> tuple[Any, tuple[Mismatch, ...]]:
    """Give the state of a checkpoint, and where it and `like` differ.

    Args:
        manifest: what `manifest.decode` gave.
        read: gives the verified bytes of one leaf, or of the part of it that `wants_of` says, writable and 64-byte
            aligned; asked once for tied leaves, and only for leaves that the state needs.
        kind_of: finds kinds of leaves, such as `kinds.kind_of`.
        like: the structure, kinds and devices that come back; ABSENT: as saved, or as NumPy where that framework is
            not installed, and leaves of which the manifest has a part as `Shard`.
        fit: what `fit_of` gave for this `like`, where that was asked before; None = it is asked now.
        partial: give the places that differ, instead of raising; there the state has what `like` has.
        specs: what the leaves are where `read` puts them together from several manifests; None = as the manifest says.
        key: tells leaves that share their bytes (equal), and leaves that have none (None); None = by their places.

    Raises:
        MismatchError: the checkpoint does not fit `like`; nothing was read.
        FormatError: the manifest describes leaves that cannot be.
    """
    builder = Builder(manifest, read, kind_of, specs=specs, key=key)
    if like is ABSENT:
        return tree.build(manifest.tree, builder.leaf), ()
    fit = fit_of(manifest, like, kind_of, specs=specs) if fit is None else fit
    if fit.mismatches and not partial:
        raise MismatchError(fit.mismatches)
    return fit.make(builder.want), fit.mismatches


def fit_of(manifest: Manifest, like: object, kind_of: KindTable, *, specs: Sequence[LeafSpec] | None = None) -> Fit:
    """Hold `like` against a manifest: `wants` of what this gives names the leaves that a restore reads."""
    return match(like, manifest.tree, [e.spec() for e in manifest.leaves] if specs is None else specs, kind_of)


@final
class Builder:
    """Builds leaves; those of the same bytes share their memory, and are one object where nothing else differs."""

    def __init__(
        self,
        manifest: Manifest,
        read: Callable[[int], memoryview],
        kind_of: KindTable,
        *,
        specs: Sequence[LeafSpec] | None = None,
        key: Callable[[int], Hashable | None] | None = None,
    ) -> None:
        self._leaves, self._read, self._kind_of, self._specs = manifest.leaves, read, kind_of, specs
        self._key = key or self._place
        self._data: dict[Hashable, memoryview] = {}
        self._built: dict[tuple[Hashable, bytes], Any] = {}
        self._moved: dict[Hashable, Any] = {}
        self._forms: Counter[Hashable] = Counter()  # how many different leaves were made of the same bytes

    def leaf(self, index: int) -> Any:
        """Give a leaf as it was saved, or as NumPy where its kind is not installed; a part of one as a `Shard`."""
        spec = self._leaves[index].spec() if self._specs is None else self._specs[index]
        return self.want(Want(index, self._kind_of.named(spec.kind), spec))

    def want(self, want: Want) -> Any:
        """Give a leaf as it is wanted."""
        path, spec = self._leaves[want.index].path, want.spec
        try:
            if want.like is not ABSENT and want.kind is not None:
                return self._converted(want, want.kind)
            if spec.box is None:
                return self._build(want)
            local = self._build(replace(want, spec=replace(spec, shape=spec.box.sizes, box=None)))
            whole = spec.box == Box.whole(spec.shape)
            return local if whole else Shard(local, shape=spec.shape, offsets=spec.box.offsets)
        except FormatError as error:
            raise FormatError(f"{path or 'the state itself'}: {error}") from None
        except UnsupportedLeafError as error:
            raise error.at(path, restoring=True) from None

    def _converted(self, want: Want, kind: LeafKind) -> Any:
        """Convert a leaf; those tied in the checkpoint once, where they are to come to the same place."""
        built, place = self._build(want), kind.placement(want.like)
        if place is None or self._key(want.index) is None:
            return kind.convert(built, want.like)
        key = (id(built), kind.name, place)  # what was built is kept, so that its id is nobody else's
        if key not in self._moved:
            self._moved[key] = kind.convert(built, want.like)
        return self._moved[key]

    def _place(self, index: int) -> Hashable | None:
        entry = self._leaves[index]
        return (entry.offset, entry.nbytes) if entry.nbytes else None

    def _build(self, want: Want) -> Any:
        spec, same = want.spec, self._key(want.index)
        if same is None:
            return self._new(want, self._read(want.index))
        shared = (same, spec.box)
        form = msgspec.json.encode((spec.kind, spec.dtype, spec.shape, spec.extra, spec.box), order="sorted")
        if (shared, form) not in self._built:
            self._forms[shared] += 1
            if self._forms[shared] > MAX_FORMS:  # each may be a copy: a small file could ask for any amount of memory
                raise FormatError(f"more than {MAX_FORMS} different leaves have the same {spec.nbytes} bytes")
            if shared not in self._data:
                self._data[shared] = self._read(want.index)
            self._built[shared, form] = self._new(want, self._data[shared])
        return self._built[shared, form]

    def _new(self, want: Want, data: memoryview) -> Any:
        spec = want.spec
        if self._specs is not None:  # how many bytes all ranks have of it, this rank's manifest need not know
            spec = replace(spec, nbytes=data.nbytes)
        return as_numpy(spec, data) if want.kind is None else want.kind.build(spec, data)
