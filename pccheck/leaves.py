"""What an array-like leaf is: the protocol that adapters implement (floor 0: imports errors, state.boxes).

An adapter package offers one `LeafKind` under the entry point group "pccheck.leaves", named after the top-level
module of the types it knows (`torch = "pccheck_torch:kind"`). It is loaded when the first leaf of such a type is seen.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, final

from pccheck.containers import ContainerKind
from pccheck.devices import DeviceBytes as DeviceBytes
from pccheck.errors import FormatError, UnsupportedLeafError
from pccheck.state.boxes import Box as Box
from pccheck.state.boxes import is_dense as is_dense
from pccheck.state.boxes import part_of as part_of


@dataclass(frozen=True, kw_only=True, slots=True)
class LeafSpec:
    """What a leaf is, apart from its bytes: enough to build it again.

    Args:
        kind: the adapter's name, such as "numpy" or "torch".
        dtype: the dtype's name in that kind, such as "<f4" or "bfloat16".
        shape: global shape.
        nbytes: how many bytes are stored here: those of the box.
        extra: small JSON. "stride" is the same for all kinds: strides, in elements, of bytes that are dense but not in
            C order; "bits" the name of the dtype as which NumPy reads elements of a dtype that it does not have. The
            rest only the adapter reads (requires_grad, fields of a structured dtype, ...).
        box: the part of the global array that is stored here, in C order; None = all of it. Only a box that is all of
            the array may have "stride".
    """

    kind: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    extra: dict[str, Any] = field(default_factory=dict)
    box: Box | None = None

    @property
    def local_shape(self) -> tuple[int, ...]:
        """The shape of what is stored here."""
        return self.shape if self.box is None else self.box.sizes

    @property
    def extra_in_c_order(self) -> dict[str, Any]:
        """`extra` of the same leaf, or of a part of it, with its bytes in C order: without "stride"."""
        return {k: v for k, v in self.extra.items() if k != "stride"}


@dataclass(frozen=True, slots=True)
class StoredLeaf:
    """What stands for a stored leaf in a tree that was not read: see `pccheck.outline`.

    In a `like` it asks for the leaf as it was saved.

    Args:
        path: where in the state.
        spec: what it is; `spec.box` is the part that the rank of this tree stored.
        boxes: these parts where it stored several that do not make the whole; `spec.box` is then the first of them.
    """

    path: str
    spec: LeafSpec
    boxes: tuple[Box, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class HostBytes:
    """Bytes of a leaf in host memory: dense, in C order or as the spec's "stride" says.

    Args:
        address: where they begin; any value when nbytes is 0.
        nbytes: how many.
        keep: what keeps the memory alive (and unmoved) while it is referenced; the leaf itself where the bytes are
            its own, in place.
        alias: equal for two leaves of one kind in one state exactly when they are the same memory seen alike, and
            then made of nothing but the leaf's address (as `addresses` gives it) and what `fingerprint` compares;
            None = never tied.
        stable: nobody else can change these bytes (an owned copy, an immutable array): no copy is owed before
            `save()` returns.
    """

    address: int
    nbytes: int
    keep: object
    alias: object = None
    stable: bool = False


class LeafKind(ABC):
    """One framework's leaves. Implementations are final, stateless and thread-safe."""

    name: str

    @abstractmethod
    def recognises(self, value: object) -> bool:
        """Tell whether this kind stores values such as this one."""

    @abstractmethod
    def describe(self, value: Any) -> LeafSpec:
        """Give the spec of a leaf; raises UnsupportedLeafError (path "") for one that cannot be stored exactly."""

    @abstractmethod
    def fingerprint(self, values: Sequence[Any]) -> object:
        """Give what must compare equal for a cached plan to hold: dtypes, shapes, strides, layout, device, `extra`.

        Types are compared elsewhere, and addresses are asked for by `addresses`. It must keep no leaf alive.
        """

    def unchanged(self, values: Sequence[Any], fingerprint: Any) -> bool:
        """Tell whether the fingerprint of these leaves, as many and of the same types, is still this one.

        Called on every save with all leaves of this kind at once: it must not loop in Python over 4,000 leaves where a
        `map` of a C function will do, and better makes no list of 4,000 tuples, which would set off the garbage
        collector. It may raise for leaves that `describe` refuses.
        """
        return bool(self.fingerprint(values) == fingerprint)

    def addresses(self, values: Sequence[Any]) -> Sequence[int]:
        """Give where the memory of each leaf begins; asked only for leaves that `host_bytes` gave an alias.

        Called on every save, as `fingerprint` is; a NumPy array of uint64 is best.
        """
        return [self.host_bytes(value).address for value in values]  # type: ignore[union-attr]

    def hold(self, values: Sequence[Any]) -> object:
        """Give what, beside the leaves, must be kept so that their memory stays as it is until it was captured.

        Asked on every save, of leaves whose bytes are read in place, before `addresses`: an array library that may give
        away the memory of a living array (JAX's donation) says here what forbids it.
        """
        return None

    def held_at(self, values: Sequence[Any], fingerprint: Any) -> tuple[object, Sequence[int]] | None:
        """Give what `hold` and then `addresses` give, if `unchanged`, else None; may raise as any of them does.

        Asked in place of the three about the leaves that have an alias, unless `hold` is to be asked of others, or not
        of all of them: a kind that finds them out in one go does so here.
        """
        return (self.hold(values), self.addresses(values)) if self.unchanged(values, fingerprint) else None

    def parts(self, value: Any) -> int:
        """Give in how many parts a leaf is stored here, 1..: more than 1 for arrays that are spread over devices.

        Asked when a state is planned. Of a leaf with several parts, `part(n)` is asked what else is asked of a kind,
        with the whole leaf as the value; each part is a box of the global array, and no two overlap. Leaves that are
        stored in other numbers of parts must have other fingerprints.
        """
        return 1

    def part(self, number: int) -> LeafKind:
        """Give the kind that answers for part `number`, from 0, of leaves of several parts; the same object each time.

        Its name is that of this kind.
        """
        raise NotImplementedError(f"leaves of kind {self.name} have no parts")

    def divisible(self, spec: LeafSpec) -> bool:
        """Tell whether a leaf's bytes are its elements alone, in C order, so that some of its rows can be stored alone.

        Kinds that store anything else (parts one after the other, a packed form) say so here; the default knows of
        "stride" and of "value", which stands for leaves without bytes.
        """
        return not spec.extra.keys() & {"stride", "value"}

    @abstractmethod
    def host_bytes(self, value: Any) -> HostBytes | DeviceBytes:
        """Give the leaf's bytes, those of its box: in place where they lie contiguous, else a copy (`stable`).

        In host memory, or on a device, from which they are copied chunk by chunk.
        """

    def sources(self, values: Sequence[Any]) -> Sequence[Any]:
        """Give `DeviceBytes.source` of each leaf; asked only for leaves whose bytes lie in place on a device.

        Called on every save, as `fingerprint` is.
        """
        return [self.host_bytes(value).source for value in values]  # type: ignore[union-attr]

    @abstractmethod
    def build(self, spec: LeafSpec, data: memoryview) -> Any:
        """Give the leaf over `data` (writable, 64-byte aligned, `nbytes` long, owned by the result).

        A spec with a box gives the local part alone, in C order; `convert` then makes a global array of it.
        Raises FormatError where the spec is impossible, or the data of another length than it says.
        """

    @abstractmethod
    def like(self, value: object) -> LeafSpec | None:
        """Give what a leaf of `like` asks for, abstract ones included; None if it is not of this kind.

        A spec with a box asks for that part of the global array only.
        """

    @abstractmethod
    def convert(self, value: Any, like: Any) -> Any:
        """Give a restored leaf of this kind with the device (and other placement) of `like`; same dtype and shape."""

    def boxes(self, like: Any) -> Sequence[Box] | None:
        """Give the boxes of the global array that `join` needs for a leaf of `like`; None = `convert` makes it.

        Equal boxes are read once, but each is given to `join`. Each is made by `build`, of a spec with that box.
        """
        return None

    def join(self, values: Sequence[Any], like: Any) -> Any:
        """Give a leaf with the placement of `like` out of restored local arrays, one of each of its `boxes`."""
        raise NotImplementedError(f"leaves of kind {self.name} are not joined of parts")

    def casts(self, spec: LeafSpec, like: Any) -> bool:
        """Tell whether `convert` and `join` give a stored leaf the dtype of `like`, should it be another one.

        `spec` is one of this kind: what `adopt` gave, for a leaf of another.
        """
        return False

    def placement(self, like: Any) -> Hashable | None:
        """Give what is equal for leaves of `like` of which `convert` makes the same: so tied leaves stay tied.

        None = convert each for itself.
        """
        return None

    def holds_number(self, spec: LeafSpec, number: bool | int | float | complex) -> bool:
        """Tell whether a leaf of this spec may stand for this Python number: no axes, of its class, and in range.

        Then `convert` takes either as `like` of the other, and `join` takes such a number for each box.
        """
        return False

    def assign(self, target: Any, value: Any) -> None:
        """Copy a restored leaf of this kind into a live one of the same dtype and shape, in place.

        Raises UnsupportedLeafError (path "") for leaves that cannot be changed.
        """
        raise UnsupportedLeafError("", type(target).__name__, "leaves of this kind cannot be changed in place")

    def assignable(self, target: Any) -> bool:
        """Tell whether `assign` can change this live leaf: asked of all leaves before the first one is changed."""
        return True

    def common_dtype(self, spec: LeafSpec) -> str | None:
        """Give the dtype's name as all kinds write it ("float32", "bfloat16"); None if no other kind has it."""
        return spec.dtype

    def adopt(self, spec: LeafSpec, dtype: str) -> LeafSpec | None:
        """Give this kind's spec for the bytes of another kind's leaf, whose common dtype is `dtype`; None if it cannot.

        Unlike `build`, this may be asked about dtypes that this kind does not know.
        """
        extra = {"stride": spec.extra["stride"]} if "stride" in spec.extra else {}
        return replace(spec, kind=self.name, dtype=dtype, extra=extra)


class StateSource(Protocol):
    """An object that may be given to `save()` as the whole state, in place of the tree that it stands for.

    Its class may have `__pccheck_own__`, a tuple or a property that gives one: the paths in that tree at or under which
    ranks differ (random states, data positions): these are each rank's own, whatever the option `replicated` says.
    """

    def __pccheck_state__(self) -> Any:
        """Give that tree; called by `save()`, in the caller's thread."""


class KindTable(Protocol):
    """Finds the kind of a leaf. Thread-safe."""

    def __call__(self, value: object) -> LeafKind | None:
        """Give the kind that stores this value; None if none does; UnsupportedLeafError (path "") says what lacks."""

    def named(self, name: str) -> LeafKind | None:
        """Give the kind of this name; None if its adapter or framework is not installed."""

    def like(self, value: object) -> tuple[LeafKind, LeafSpec] | None:
        """Give the kind and spec that a leaf of `like` asks for, abstract arrays included; None if it is no array."""

    def container(self, value: object) -> ContainerKind | None:
        """Give what opens a container that the core does not know, by its class; None if nothing does."""


@final
class Absent:
    """The type of ABSENT, which stands for `like` where none was given (None is a legal `like`)."""

    def __repr__(self) -> str:
        return "ABSENT"


ABSENT = Absent()


def dense_strides(spec: LeafSpec) -> tuple[int, ...] | None:
    """Give the strides, in elements, of a spec that is not in C order; FormatError unless they are dense."""
    strides = spec.extra.get("stride")
    if strides is None or not spec.nbytes:
        return None
    legal = isinstance(strides, (list, tuple)) and all(type(s) is int and 0 <= s < 1 << 62 for s in strides)
    if not legal or len(strides) != len(spec.shape) or not is_dense(spec.shape, strides):
        raise FormatError(f"strides {strides!r:.200} do not lay out shape {spec.shape} without gaps")
    size = math.prod(spec.shape)  # an axis of one element may have any stride: none that leads far away
    return tuple(s if n > 1 else min(s, size) for s, n in zip(strides, spec.shape, strict=True))
