"""The comparison that the other tests rest on sees every kind of difference."""

from __future__ import annotations

import collections
import dataclasses
import struct
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
import pytest

from pccheck.testing.compare import difference, same


class Point(NamedTuple):
    x: Any
    y: Any


class Other(NamedTuple):
    x: Any
    y: Any


@dataclasses.dataclass
class Data:
    x: Any
    y: Any


def nan(bits):
    return struct.unpack(">d", bytes.fromhex(bits))[0]


def ordered(version):
    made = collections.OrderedDict(a=1)
    made.version = version
    return made


DIFFERENT = [
    (1, True), (1, 1.0), (0.0, -0.0), (nan("7ff8000000000000"), nan("7ff8000000000001")), (1j, complex(-0.0, 1)),
    ("a", b"a"), ((), []), ((1,), Point(1, 2)), (Point(1, 2), Other(1, 2)), (Point(1, 2), Data(1, 2)), (None, 0),
    ({"a": 1, "b": 2}, {"b": 2, "a": 1}), ({1: 0}, {True: 0}), ({0.0: 1}, {-0.0: 1}), ({}, collections.OrderedDict()),
    ({"a": 1}, {"a": 2}), ([1], [1, 1]), (ordered(1), ordered(2)), ({(1,): 1}, {(True,): 1}),
    (collections.defaultdict(list), collections.defaultdict(int)), (Data(1, [2]), Data(1, [3])),
    (np.zeros(2, "<f4"), np.zeros(2, "<f8")), (np.zeros(2, "<f4"), np.zeros(2, ">f4")), (np.zeros(2), np.zeros((2, 1))),
    (np.float32(1), np.array(1, "<f4")), (np.float64(1), 1.0), (np.zeros(1), -np.zeros(1)),
    (np.zeros(1, ml_dtypes.bfloat16), np.zeros(1, ml_dtypes.float8_e5m2)),
    (np.zeros(1, "M8[s]"), np.zeros(1, "M8[ms]")), (np.zeros(1, [("a", "i4")]), np.zeros(1, [("b", "i4")])),
]  # fmt: skip


@pytest.mark.parametrize(("a", "b"), DIFFERENT, ids=lambda v: type(v).__name__)
def test_what_differs_is_not_the_same_wherever_it_stands(a, b):
    for x, y in ((a, b), (b, a), ([0, a], [0, b]), ({"k": (a,)}, {"k": (b,)}), (Point(0, a), Point(0, b))):
        assert not same(x, y)
        assert difference(x, y)
    for value in (a, b):
        assert difference({"k": [value]}, {"k": [value]}) is None


def test_the_place_is_told():
    assert str(difference({"a": [1, {"b/c": 2}]}, {"a": [1, {"b/c": 3}]})).startswith("/a/1/b~1c: ")


def test_by_field_lets_records_be_namedtuples_of_the_same_name():
    twin = collections.namedtuple("Point", "x y")
    assert same(Point(1, [2]), twin(1, [2]), by_field=True)
    assert not same(Point(1, 2), twin(1, 3), by_field=True)
    assert not same(Point(1, 2), Other(1, 2), by_field=True)
    assert not same(Point(1, 2), collections.namedtuple("Point", "y x")(1, 2), by_field=True)
    assert not same(Point(1, 2), (1, 2), by_field=True)
    assert same(Data(1, 2), {"x": 1, "y": 2}, by_field=True)
    assert same(Data(1, 2), collections.namedtuple("Data", "x y")(1, 2), by_field=True)


def test_tensors_are_compared_by_type_dtype_shape_gradient_and_bits():
    torch = pytest.importorskip("torch")
    one = torch.arange(6.0)
    assert same(one, one.clone())
    assert same(one.reshape(2, 3).t(), one.reshape(2, 3).t().contiguous())
    assert same(one[1:3], one[1:3].clone())
    for other in (
        one.double(), one.reshape(2, 3), one + 1, torch.nn.Parameter(one), one.clone().requires_grad_(), one.numpy(),
        one.view(torch.int32), one.flip(0),
    ):  # fmt: skip
        assert not same(one, other)
    assert not same(torch.zeros(1), -torch.zeros(1))
