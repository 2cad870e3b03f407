"""A framework for tests: arrays that lie in parts, as on several devices, and containers unknown to the core."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from pccheck.containers import ContainerKind
from pccheck.errors import UnsupportedLeafError
from pccheck.leaves import HostBytes, LeafKind, LeafSpec
from pccheck.state.boxes import Box
from tests.unit.tables import TableWith


def cut(array, box):
    return array[tuple(slice(o, e) for o, e in zip(box.offsets, box.ends, strict=True))]


class Split:
    """An array whose boxes lie apart."""

    def __init__(self, shape, parts, dtype=None):
        self.shape, self.parts = tuple(shape), dict(parts)
        self.dtype = np.dtype(dtype or next(iter(self.parts.values())).dtype)
        self.deleted = False

    @classmethod
    def of(cls, array, *boxes):
        return cls(array.shape, {box: cut(array, box).copy() for box in boxes}, array.dtype)

    def whole(self):
        found = np.zeros(self.shape, self.dtype)
        for box, array in self.parts.items():
            cut(found, box)[...] = array
        return found


class Abstract:
    """What asks for the boxes of a Split."""

    def __init__(self, shape, dtype, *boxes):
        self.shape, self.dtype, self.boxes = tuple(shape), np.dtype(dtype), boxes


class SplitKind(LeafKind):
    name = "split"

    def __init__(self):
        self.numbered, self.held, self.asked = {}, [], []

    def recognises(self, value):
        return isinstance(value, Split)

    def parts(self, value):
        if value.deleted:
            raise UnsupportedLeafError("", "Split", "it was deleted")
        return max(1, len(value.parts))

    def part(self, number):
        return self.numbered.setdefault(number, PartKind(self, number))

    def describe(self, value):
        return self.part(0).describe(value)

    def fingerprint(self, values):
        return self.part(0).fingerprint(values)

    def addresses(self, values):
        return self.part(0).addresses(values)

    def host_bytes(self, value):
        return self.part(0).host_bytes(value)

    def hold(self, values):
        return self.part(0).hold(values)

    def build(self, spec, data):
        local = np.ndarray(spec.local_shape, spec.dtype, data)
        return Split(spec.local_shape, {Box.whole(spec.local_shape): local}, local.dtype)

    def like(self, value):
        if not isinstance(value, (Split, Abstract)):
            return None
        nbytes = int(np.prod(value.shape)) * value.dtype.itemsize
        return LeafSpec(kind=self.name, dtype=value.dtype.name, shape=value.shape, nbytes=nbytes)

    def boxes(self, like):
        return list(like.parts) if isinstance(like, Split) else like.boxes

    def casts(self, spec, like):
        return np.dtype(spec.dtype).kind == like.dtype.kind == "f"

    def join(self, values, like):
        local = [next(iter(value.parts.values())).astype(like.dtype) for value in values]
        return Split(like.shape, zip(self.boxes(like), local, strict=True), like.dtype)

    def convert(self, value, like):
        raise AssertionError("these leaves are joined")

    def placement(self, like):
        return tuple(self.boxes(like)), like.dtype

    def common_dtype(self, spec):
        return spec.dtype

    def adopt(self, spec, dtype):
        try:
            name = np.dtype(dtype).name
        except TypeError:
            return None
        extra = {"stride": spec.extra["stride"]} if "stride" in spec.extra else {}
        return replace(spec, kind=self.name, dtype=name, extra=extra)


class PartKind(LeafKind):
    """One part of each Split."""

    name = "split"

    def __init__(self, whole, number):
        self.whole, self.number = whole, number

    def _part(self, value):
        nothing = Box((0,) * len(value.shape), (0,) * len(value.shape)), np.zeros(0, value.dtype)
        return [*value.parts.items(), nothing][self.number]

    def recognises(self, value):
        return isinstance(value, Split)

    def describe(self, value):
        box, array = self._part(value)
        return LeafSpec(kind="split", dtype=value.dtype.name, shape=value.shape, nbytes=array.nbytes, box=box)

    def fingerprint(self, values):
        self.whole.asked.append(("fingerprint", self.number))
        return [(list(v.parts), v.dtype, v.shape, v.deleted) for v in values]

    def hold(self, values):
        self.whole.asked.append(("hold", self.number))
        held = Held(values)
        self.whole.held.append(held)
        return held

    def addresses(self, values):
        self.whole.asked.append(("addresses", self.number))
        return [self._part(value)[1].ctypes.data for value in values]

    def host_bytes(self, value):
        _, array = self._part(value)
        alias = (array.ctypes.data, array.dtype, array.shape) if array.nbytes else None
        return HostBytes(address=array.ctypes.data, nbytes=array.nbytes, keep=value, alias=alias)

    def build(self, spec, data):
        raise AssertionError("parts are built by the kind itself")

    like = convert = build


class Held:
    """What keeps the memory of some leaves as it is."""

    def __init__(self, values):
        self.values = list(values)


class Bag:
    """A container with static fields."""

    def __init__(self, static="", **items):
        self.static, self.items = static, items


@dataclass
class Layer:
    """A dataclass with a static field."""

    weight: Any
    bias: Any
    name: str = "static"


@dataclass
class Known:
    """A dataclass like any other."""

    a: Any
    name: str = "stored"


class BagKind(ContainerKind):
    """Opens bags, and layers by two of their three fields."""

    def __init__(self):
        self.opened = 0

    def recognises(self, value):
        return isinstance(value, (Bag, Layer))

    def open(self, value):
        self.opened += 1
        if isinstance(value, Layer):
            return ("weight", "bias"), (value.weight, value.bias)
        return tuple(value.items), list(value.items.values())

    def close(self, like, children):
        if isinstance(like, Layer):
            return Layer(*children, name=like.name)
        return Bag(like.static, **dict(zip(like.items, children, strict=True)))


class Table(TableWith):
    """The kinds of pccheck, and these."""

    def __init__(self):
        super().__init__(SplitKind())
        self.bags = BagKind()

    def container(self, value):
        return self.bags if self.bags.recognises(value) else super().container(value)
