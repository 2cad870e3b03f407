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
from pccheck.state.entries import StoredLeaves, parts_of
from pccheck.state.fit import Fit, Want, match
from pccheck.state.manifest import Manifest
from pccheck.state.mismatch import Mismatch
from pccheck.state.numpy_leaves import as_numpy
from pccheck.state.shards import Shard
from pccheck.state.wanting import Ask, Join, as_stored

MAX_FORMS = 16  # kinds, dtypes and shapes of leaves that share their bytes


def assemble(
    manifest: Manifest,
    read: Callable[[Any], memoryview],
    kind_of: KindTable,
    *,
    like: object = ABSENT,
    fit: Fit | None = None,
    partial: bool = False,
    specs: Sequence[LeafSpec] | None = None,
    key: Callable[[Any], Hashable | None] | None = None,
) -> tuple[Any, tuple[Mismatch, ...]]:
    """Give the state of a checkpoint, and where it and `like` differ.

    Args:
        manifest: what `manifest.decode` gave.
        read: gives the verified bytes of what a Want asks for (`Want.ask`), writable and 64-byte aligned; asked once
            for tied leaves, and only for leaves that the state needs.
        kind_of: finds kinds of leaves, such as `kinds.kind_of`.
        like: the structure, kinds and devices that come back; ABSENT: as saved, or as NumPy where that framework is
            not installed, and leaves of which the manifest has a part as `Shard`, or several as a list of these.
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
    return match(like, manifest.tree, _stored(manifest, specs), kind_of)


def _stored(manifest: Manifest, specs: Sequence[LeafSpec] | None) -> StoredLeaves:
    return StoredLeaves.of(manifest.leaves) if specs is None else StoredLeaves(specs)


@final
class Builder:
    """Builds leaves; those of the same bytes share their memory, and are one object where nothing else differs."""

    def __init__(
        self,
        manifest: Manifest,
        read: Callable[[Any], memoryview],
        kind_of: KindTable,
        *,
        specs: Sequence[LeafSpec] | None = None,
        key: Callable[[Any], Hashable | None] | None = None,
    ) -> None:
        self._leaves, self._read, self._kind_of = manifest.leaves, read, kind_of
        self._stored, self._alone = _stored(manifest, specs), specs is None
        self._key = key or self._place
        self._data: dict[Hashable, memoryview] = {}
        self._built: dict[tuple[Hashable, bytes], Any] = {}
        self._moved: dict[Hashable, Any] = {}
        self._forms: Counter[Hashable] = Counter()  # how many different leaves were made of the same bytes

    def leaf(self, index: int) -> Any:
        """Give a leaf as it was saved, or as NumPy where its kind is not installed; a part of one as a `Shard`.

        Of one of which several parts are here that do not make the whole, it is a list of Shards.
        """
        found = list(map(self.want, self.wants(index)))
        return found if index in self._stored.split else found[0]

    def wants(self, index: int) -> tuple[Want, ...]:
        """Give what `leaf` reads."""
        return as_stored(index, self._stored, self._kind_of.named)

    def want(self, want: Want | Join) -> Any:
        """Give a leaf as it is wanted."""
        asked = (want,) if isinstance(want, Want) else want.wants
        path = self._leaves[asked[0].index].path if asked else ""
        try:
            if isinstance(want, Join):
                return self._joined(want)
            if want.like is not ABSENT and want.kind is not None:
                return self._converted(want, want.kind)
            spec = want.spec
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
        built = self._build(want)
        if self._key(want.ask) is None:
            return kind.convert(built, want.like)
        return self._once(kind, [built], want.like, lambda: kind.convert(built, want.like))

    def _joined(self, join: Join) -> Any:
        """Join a leaf of its boxes; those tied in the checkpoint once, as above."""
        built = list(map(self._build, join.wants))
        if any(self._key(want.ask) is None for want in join.wants):
            return join.kind.join(built, join.like)
        return self._once(join.kind, built, join.like, lambda: join.kind.join(built, join.like))

    def _once(self, kind: LeafKind, built: Sequence[Any], like: Any, make: Callable[[], Any]) -> Any:
        place = kind.placement(like)
        if place is None:
            return make()
        key = (tuple(map(id, built)), kind.name, place)  # what was built is kept, so that its id is nobody else's
        if key not in self._moved:
            self._moved[key] = make()
        return self._moved[key]

    def _place(self, ask: Ask) -> Hashable | None:
        index = ask if isinstance(ask, int) else ask[0]
        return tuple((e.offset, e.nbytes) for e in parts_of(self._leaves, index) if e.nbytes) or None

    def _build(self, want: Want) -> Any:
        spec, same = want.spec, self._key(want.ask)
        if same is None:
            return self._new(want, self._read(want.ask))
        shared = (same, spec.box)
        form = msgspec.json.encode((spec.kind, spec.dtype, spec.shape, spec.extra, spec.box), order="sorted")
        if (shared, form) not in self._built:
            self._forms[shared] += 1
            if self._forms[shared] > MAX_FORMS:  # each may be a copy: a small file could ask for any amount of memory
                raise FormatError(f"more than {MAX_FORMS} different leaves have the same {spec.nbytes} bytes")
            if shared not in self._data:
                self._data[shared] = self._read(want.ask)
            self._built[shared, form] = self._new(want, self._data[shared])
        return self._built[shared, form]

    def _new(self, want: Want, data: memoryview) -> Any:
        spec = want.spec
        if not self._alone:  # how many bytes all ranks have of it, this rank's manifest need not know
            spec = replace(spec, nbytes=data.nbytes)
        return as_numpy(spec, data) if want.kind is None else want.kind.build(spec, data)
