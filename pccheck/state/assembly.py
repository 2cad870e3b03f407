"""Puts a restored state together out of a manifest and its bytes (floor 1: imports floor 0 and the core's kinds)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any, final

import msgspec

from pccheck.errors import FormatError, MismatchError, UnsupportedLeafError
from pccheck.leaves import ABSENT, KindTable, LeafSpec
from pccheck.state import tree
from pccheck.state.fit import Fit, Mismatch, Want, match
from pccheck.state.manifest import Manifest
from pccheck.state.numpy_leaves import NumpyKind

MAX_FORMS = 16  # kinds, dtypes and shapes of leaves that share their bytes


def assemble(
    manifest: Manifest,
    read: Callable[[int], memoryview],
    kind_of: KindTable,
    *,
    like: object = ABSENT,
    partial: bool = False,
) -> tuple[Any, tuple[Mismatch, ...]]:
    """Give the state of a checkpoint, and where it and `like` differ.

    Args:
        manifest: what `manifest.decode` gave.
        read: gives the verified bytes of one leaf, writable and 64-byte aligned; asked once for tied leaves, and only
            for leaves that the state needs.
        kind_of: finds kinds of leaves, such as `kinds.kind_of`.
        like: the structure, kinds and devices that come back; ABSENT: as saved, or as NumPy where that framework is
            not installed.
        partial: give the places that differ, instead of raising; there the state has what `like` has.

    Raises:
        MismatchError: the checkpoint does not fit `like`; nothing was read.
        FormatError: the manifest describes leaves that cannot be.
    """
    builder = Builder(manifest, read, kind_of)
    if like is ABSENT:
        return tree.build(manifest.tree, builder.leaf), ()
    fit = fit_of(manifest, like, kind_of)
    if fit.mismatches and not partial:
        raise MismatchError(fit.mismatches)
    return fit.make(builder.want), fit.mismatches


def fit_of(manifest: Manifest, like: object, kind_of: KindTable) -> Fit:
    """Hold `like` against a manifest: `wants` of what this gives names the leaves that a restore reads."""
    return match(like, manifest.tree, [entry.spec() for entry in manifest.leaves], kind_of)


@final
class Builder:
    """Builds leaves; those of the same place share their memory, and are one object where nothing else differs."""

    def __init__(self, manifest: Manifest, read: Callable[[int], memoryview], kind_of: KindTable) -> None:
        self._leaves, self._read, self._kind_of = manifest.leaves, read, kind_of
        self._data: dict[tuple[int, int], memoryview] = {}
        self._built: dict[tuple[int, int, bytes], Any] = {}
        self._forms: Counter[tuple[int, int]] = Counter()  # how many different leaves were made of a place

    def leaf(self, index: int) -> Any:
        """Give a leaf as it was saved, or as NumPy where its kind is not installed."""
        spec = self._leaves[index].spec()
        return self.want(Want(index, self._kind_of.named(spec.kind), spec))

    def want(self, want: Want) -> Any:
        """Give a leaf as it is wanted."""
        entry = self._leaves[want.index]
        try:
            value = self._build(want, entry.offset, entry.nbytes)
            return value if want.like is ABSENT or want.kind is None else want.kind.convert(value, want.like)
        except FormatError as error:
            raise FormatError(f"{entry.path or 'the state itself'}: {error}") from None
        except UnsupportedLeafError as error:
            raise UnsupportedLeafError(entry.path, error.type_name, error.reason) from None

    def _build(self, want: Want, offset: int, nbytes: int) -> Any:
        spec = want.spec
        if not nbytes:
            return self._new(want, self._read(want.index))
        key = (offset, nbytes, msgspec.json.encode((spec.kind, spec.dtype, spec.shape, spec.extra), order="sorted"))
        if key not in self._built:
            place = (offset, nbytes)
            self._forms[place] += 1
            if self._forms[place] > MAX_FORMS:  # each may be a copy: a small file could ask for any amount of memory
                raise FormatError(f"more than {MAX_FORMS} different leaves have the same {nbytes} bytes")
            if place not in self._data:
                self._data[place] = self._read(want.index)
            self._built[key] = self._new(want, self._data[place])
        return self._built[key]

    def _new(self, want: Want, data: memoryview) -> Any:
        if want.kind is not None:
            return want.kind.build(want.spec, data)
        if "value" in want.spec.extra:  # no array, but a small thing that only its framework has: as plain Python
            value = want.spec.extra["value"]
            return tuple(value) if isinstance(value, list) else value
        return self._new(Want(want.index, _NUMPY, _as_numpy(want.spec)), data)


_NUMPY = NumpyKind()


def _as_numpy(spec: LeafSpec) -> LeafSpec:
    found = _NUMPY.adopt(spec, spec.dtype)
    if found is None:
        raise FormatError(f"{spec.nbytes} bytes do not make an array of shape {spec.shape}")
    return found
