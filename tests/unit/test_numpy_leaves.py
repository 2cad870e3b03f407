"""NumPy arrays and scalars: every dtype, every layout, ties, refusals, and what a file may claim of them."""

from __future__ import annotations

import ctypes
import math

import ml_dtypes
import numpy as np
import pytest

from pccheck.errors import FormatError, UnsupportedLeafError
from pccheck.leaves import LeafSpec, dense_strides, is_dense
from pccheck.state import numpy_dtypes, numpy_leaves
from pccheck.state.numpy_leaves import NumpyKind, as_numpy
from pccheck.testing.compare import difference

KIND = NumpyKind()
ML = sorted(
    name for name in vars(ml_dtypes) if isinstance(getattr(ml_dtypes, name), type) and not name.endswith("info")
)
ML = [name for name in ML if issubclass(getattr(ml_dtypes, name), np.generic)]
BUILTIN = [
    "?", "i1", "u1", *(order + code for order in "<>" for code in ("i2", "i4", "i8", "u2", "u4", "u8")),
    *(order + code for order in "<>" for code in ("f2", "f4", "f8", "c8", "c16")), "g", "G",
    "<M8[ns]", ">M8[25s]", "<M8[D]", "<M8", "<m8[us]", ">m8[h]", "<m8", "S7", "<U3", ">U3", "V5", "S1", "V1",
]  # fmt: skip
STRUCTURED = [
    np.dtype([("a", "<f4"), ("b", ">i8", (2, 3)), ("c", [("d", "S3"), ("e", "<M8[ms]")])]),
    np.dtype({"names": ["x", "y"], "formats": ["<i2", "<f8"], "offsets": [4, 16], "itemsize": 40}),
    np.dtype([("a", "i1"), ("b", "f8")], align=True),
    np.dtype([("", "i4"), ("ünïcode", ml_dtypes.bfloat16)]),
    np.dtype([]),
]


def memory(host):
    return ctypes.string_at(host.address, host.nbytes) if host.nbytes else b""


def again(value):
    """Through describe, host_bytes and build, as a checkpoint does it."""
    spec, host = KIND.describe(value), KIND.host_bytes(value)
    assert host.nbytes == spec.nbytes
    return KIND.build(spec, memoryview(bytearray(memory(host))))


def filled(dtype, shape):
    """Random bytes are legal values of every dtype but bool, float80 and text."""
    dtype = np.dtype(dtype)
    random = np.random.default_rng(7)
    if dtype.kind == "U":
        return random.choice(np.array(["", "é", "日本語", "a"], dtype), shape)
    if dtype.char in "?gG" or dtype.name in ML:
        return random.integers(0, 2, shape).astype(dtype)
    size = math.prod(shape) * dtype.itemsize
    return np.ndarray(shape, dtype, random.bytes(size)).copy() if size else np.zeros(shape, dtype)


@pytest.mark.parametrize("shape", [(), (3,), (2, 3, 4), (0, 5)], ids=str)
@pytest.mark.parametrize("dtype", [*BUILTIN, *ML, *STRUCTURED], ids=lambda d: str(d)[:30])
def test_every_dtype_comes_back_to_the_bit(dtype, shape):
    dtype = getattr(ml_dtypes, dtype) if dtype in ML else dtype
    array = filled(dtype, shape)
    back = again(array)
    assert difference(back, array) is None
    assert back.dtype == array.dtype
    assert back.dtype.isalignedstruct == array.dtype.isalignedstruct
    assert back.flags.writeable


@pytest.mark.parametrize("dtype", [*BUILTIN, *ML, *STRUCTURED[:3]], ids=lambda d: str(d)[:30])
def test_every_scalar_comes_back_as_a_scalar(dtype):
    dtype = getattr(ml_dtypes, dtype) if dtype in ML else dtype
    scalar = filled(dtype, (1,))[0]
    back = again(scalar)
    assert type(back) is type(scalar)
    assert difference(np.asarray(back), np.asarray(scalar)) is None
    assert KIND.describe(back).dtype == KIND.describe(scalar).dtype


@pytest.mark.parametrize("text", [np.str_("a\0"), np.str_(""), np.bytes_(b"\0a\0"), np.bytes_(b""), np.str_("\ud800")])
def test_strings_keep_nul_at_their_end(text):
    back = again(text)
    assert type(back) is type(text)
    assert back == text
    assert len(back) == len(text)


LAYOUTS = {
    "fortran": lambda a: np.asfortranarray(a),
    "transposed": lambda a: a.transpose(2, 0, 1),
    "swapped": lambda a: a.swapaxes(0, 1),
    "reversed": lambda a: a[::-1],
    "strided": lambda a: a[:, ::2],
    "window": lambda a: a[1:, 1:],
    "row": lambda a: a[1],
    "broadcast": lambda a: np.broadcast_to(a[0], (5, *a[0].shape)),
    "field": lambda a: np.zeros((2, 3), [("a", "<f4"), ("b", "<f4")])["b"],
    "axis of one": lambda a: a[:, :1, :].transpose(2, 1, 0),
}
IN_PLACE = {"fortran", "transposed", "swapped", "row"}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_comes_back_with_its_values(layout):
    array = LAYOUTS[layout](np.arange(60, dtype="<f4").reshape(3, 4, 5))
    host = KIND.host_bytes(array)
    back = again(array)
    assert difference(back, array) is None
    if layout in IN_PLACE:
        assert host.keep is array, "no copy"
        assert back.strides == array.strides, "the order of memory comes back"
        assert not host.stable
    if layout in {"reversed", "strided", "window", "broadcast", "field"}:
        assert host.keep is not array
        assert host.stable
        assert back.flags.c_contiguous


def test_memory_mapped_and_read_only_arrays_are_read_in_place(tmp_path):
    file = tmp_path / "a.npy"
    np.save(file, np.arange(100.0))
    for mode in ("r", "c", "r+"):
        array = np.load(file, mmap_mode=mode)
        assert KIND.host_bytes(array).keep is array
        assert difference(again(array), np.arange(100.0)) is None
    locked = np.arange(5)
    locked.flags.writeable = False
    assert KIND.host_bytes(locked).keep is locked


def test_only_the_same_memory_seen_alike_is_tied():
    a = np.zeros((4, 4), "<f4")
    views = [a, a[:], a.view(), a.T, a[:2], a.reshape(2, 8), a.view("<i4"), a.copy(), a[::2], a[::2]]
    aliases = [KIND.host_bytes(v).alias for v in views]
    assert aliases[0] == aliases[1] == aliases[2]
    assert aliases[8] == aliases[9]
    assert len(set(aliases)) == 7
    empty = np.zeros((0,))
    assert KIND.host_bytes(empty).alias is None
    assert KIND.host_bytes(np.float32(1)).alias is None


class Sub(np.ndarray):
    pass


REFUSED = [
    (np.array([object()]), "Python objects"),
    (np.array([{}], dtype=object), "Python objects"),
    (np.zeros(2, [("a", "f4"), ("b", "O")]), "Python objects"),
    (np.ma.masked_array([1, 2], [True, False]), "subclass"),
    (np.zeros(3).view(Sub), "subclass"),
    (np.rec.array([(1, 2.0)], dtype=[("a", "i4"), ("b", "f8")]), "subclass"),
    (np.zeros(1, np.dtype([(("title", "name"), "f4")])), "titles"),
    (np.zeros(1, [("\ud800", "f4")]), "Unicode"),
    (np.array(["a"], np.dtypes.StringDType()), "objects|none that pccheck knows"),
]


@pytest.mark.parametrize(("value", "reason"), REFUSED, ids=lambda v: str(type(v).__name__))
def test_what_would_not_come_back_is_refused(value, reason):
    with pytest.raises(UnsupportedLeafError, match=reason) as caught:
        KIND.describe(value)
    assert caught.value.path == ""


# -- what a file may claim -------------------------------------------------------------------------------------------


def spec(dtype="<f4", shape=(2,), nbytes=8, **extra):
    return LeafSpec(kind="numpy", dtype=dtype, shape=shape, nbytes=nbytes, extra=extra)


WRONG = [
    spec(dtype="O"),
    spec(dtype="|O"),
    spec(dtype="<f4,<f4"),
    spec(dtype="float32"),
    spec(dtype="<f3"),
    spec(dtype="<f99"),
    spec(dtype="<M8[parsec]"),
    spec(dtype="__import__('os')"),
    spec(dtype="|V999999999", nbytes=8),
    spec(dtype="nothing"),
    spec(shape=(3,)),
    spec(shape=(2**62, 2**62), nbytes=8),
    spec(shape=(2**62, 0), nbytes=0),
    spec(nbytes=4),
    spec(shape=(1,) * 70, nbytes=4),
    spec(shape=(1, 2), stride=[1]),
    spec(shape=(2, 1), stride=["a", 1]),
    spec(shape=(2,), stride=[2]),
    spec(shape=(2,), stride=[0]),
    spec(shape=(2,), stride=[-1]),
    spec(shape=(2,), stride=5),
    spec(dtype="struct"),
    spec(dtype="struct", struct=[]),
    spec(dtype="struct", struct={"names": ["a"]}),
    spec(dtype="struct", struct={"names": ["a"], "formats": ["O"], "offsets": [0], "itemsize": 4, "aligned": False}),
    spec(dtype="struct", struct={"names": ["a"], "formats": ["<f8"], "offsets": [0], "itemsize": 4, "aligned": False}),
    spec(dtype="struct", struct={"names": ["a"], "formats": ["<f4"], "offsets": [-4], "itemsize": 4, "aligned": False}),
    spec(dtype="struct", struct={"names": [1], "formats": [2], "offsets": [3], "itemsize": 4, "aligned": False}),
    spec(dtype="struct", struct=["<f4", [2**40]]),
]


@pytest.mark.parametrize("wrong", WRONG, ids=lambda s: f"{s.dtype}{s.shape}{s.extra}"[:60])
def test_a_wrong_spec_is_a_format_error(wrong):
    with pytest.raises(FormatError):
        KIND.build(wrong, memoryview(bytearray(wrong.nbytes)))


def test_a_dtype_nested_without_end_is_a_format_error():
    deep = "<f4"
    for _ in range(500):
        deep = [deep, [1]]
    with pytest.raises(FormatError, match="deep"):
        numpy_dtypes.decode("struct", {"struct": deep})


def test_data_of_another_length_is_a_format_error():
    with pytest.raises(FormatError):
        KIND.build(spec(), memoryview(bytearray(4)))


def test_the_array_is_made_over_the_bytes_it_was_given():
    data = bytearray(8)
    array = KIND.build(spec(), memoryview(data))
    array[0] = 1
    assert bytes(data) == np.array([1, 0], "<f4").tobytes()


@pytest.mark.parametrize(
    ("shape", "strides", "dense"),
    [
        ((2, 3), (3, 1), True), ((2, 3), (1, 2), True), ((2, 3), (3, 2), False), ((2, 3), (0, 1), False),
        ((1, 3), (77, 1), True), ((2, 3, 4), (1, 8, 2), True), ((), (), True), ((3,), (2,), False),
        ((2, 2), (1, 1), False),
    ],
)  # fmt: skip
def test_dense_is_without_gaps_and_without_overlap(shape, strides, dense):
    assert is_dense(shape, strides) is dense
    places = {sum(i * s for i, s in zip(index, strides, strict=True)) for index in np.ndindex(*shape)}
    assert dense is (places == set(range(math.prod(shape))))
    if not dense:
        with pytest.raises(FormatError):
            dense_strides(spec(shape=shape, stride=list(strides)))


# -- the quick route -------------------------------------------------------------------------------------------------


def changed(before, after):
    return not KIND.unchanged(after, KIND.fingerprint(before))


def test_the_fingerprint_sees_what_matters_and_nothing_else():
    a = np.zeros((4, 4), "<f4")
    assert not changed([a], [np.ones((4, 4), "<f4")])
    for other in (a.astype(">f4"), a.astype("<i4"), a.T, a.reshape(2, 8), a[:, :2], a.reshape(1, 4, 4)):
        assert changed([a], [other])
    assert changed([np.datetime64(1, "s")], [np.datetime64(1, "ms")])
    assert not changed([np.float32(1), a], [np.float32(2), a])


@pytest.mark.parametrize("native", [True, False])
def test_addresses_are_where_the_bytes_lie(native, monkeypatch):
    if native and numpy_leaves.buffer_addresses is None:
        pytest.skip("built without the extension")
    if not native:
        monkeypatch.setattr(numpy_leaves, "buffer_addresses", None)
    base = np.arange(12.0).reshape(3, 4)
    rows = [
        base,
        np.zeros(3, ml_dtypes.bfloat16),
        np.zeros(3, "M8[s]"),
        np.zeros((), ">i2"),
        np.zeros(2, STRUCTURED[0]),
    ]
    assert list(KIND.addresses(rows)) == [a.ctypes.data for a in rows]
    rows += [base.T, base[:, 1:]]
    assert list(KIND.addresses(rows)) == [a.ctypes.data for a in rows]


# -- shared names ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("dtype", "name"),
    [("<f4", "float32"), ("|b1", "bool"), ("bfloat16", "bfloat16"), ("<c16", "complex128"), ("int4", "int4")],
)
def test_shared_names_lead_there_and_back(dtype, name):
    assert KIND.common_dtype(spec(dtype=dtype)) == name
    adopted = KIND.adopt(LeafSpec(kind="x", dtype=name, shape=(2, 2), nbytes=1, extra={"stride": [1, 2], "q": 1}), name)
    assert adopted == LeafSpec(kind="numpy", dtype=dtype, shape=(2, 2), nbytes=1, extra={"stride": [1, 2]})


@pytest.mark.parametrize("dtype", [">f4", "<M8[s]", "|S3", "|V4", "struct"])
def test_what_numpy_alone_has_has_no_shared_name(dtype):
    assert KIND.common_dtype(spec(dtype=dtype)) is None


def test_a_dtype_that_numpy_lacks_is_adopted_as_raw_bytes():
    adopted = KIND.adopt(LeafSpec(kind="torch", dtype="float4_e2m1fn_x2", shape=(3,), nbytes=3), "float4_e2m1fn_x2")
    assert adopted is not None
    assert adopted.dtype == "|V1"
    assert KIND.build(adopted, memoryview(bytearray(b"abc"))).tobytes() == b"abc"
    assert KIND.adopt(LeafSpec(kind="torch", dtype="what", shape=(3,), nbytes=4), "what") is None


class Abstract:
    def __init__(self, shape, dtype):
        self.shape, self.dtype = shape, dtype


def test_like_takes_anything_with_shape_and_dtype():
    found = KIND.like(Abstract((2, 3), np.dtype("<f8")))
    assert found is not None
    assert (found.shape, found.dtype, found.nbytes) == ((2, 3), "<f8", 48)
    found = KIND.like(Abstract((), np.int16))
    assert found is not None
    assert found.dtype == "<i2"
    assert KIND.like(Abstract([2], np.dtype("f4"))) is None
    assert KIND.like(3) is None


def test_convert_gives_scalars_for_scalars_and_arrays_for_arrays():
    array = np.array(3, "<f4")
    assert type(KIND.convert(array, np.float32(0))) is np.float32
    assert type(KIND.convert(np.float32(3), array)) is np.ndarray
    assert KIND.convert(array, array) is array


def test_assign_copies_in_place_and_refuses_what_cannot_be_written():
    target, source = np.zeros((2, 3), order="F"), np.arange(6.0).reshape(2, 3)
    assert KIND.assignable(target)
    KIND.assign(target, source)
    np.testing.assert_array_equal(target, source)
    target.flags.writeable = False
    for refused in (target, np.float64(1)):
        assert not KIND.assignable(refused)
        with pytest.raises(UnsupportedLeafError, match="cannot be written"):
            KIND.assign(refused, source)


def row(name, dtype, shape, offset, nbytes):
    return {"name": name, "dtype": dtype, "shape": shape, "offset": offset, "nbytes": nbytes}


def test_a_leaf_of_parts_comes_back_as_a_dict_where_its_framework_is_not_installed():
    data = memoryview(bytearray(np.arange(4, dtype="<i8").tobytes().ljust(64, b"\0") + np.ones(3, "<f4").tobytes()))
    rows = [row("indices", "int64", [2, 2], 0, 32), row("values", "float32", [3], 64, 12), row("odd", "x9", [3], 0, 6)]
    spec = LeafSpec(kind="sparse", dtype="float32", shape=(9, 9), nbytes=len(data), extra={"parts": rows})
    found = as_numpy(spec, data)
    assert list(found) == ["indices", "values", "odd"]
    np.testing.assert_array_equal(found["indices"], [[0, 1], [2, 3]])
    np.testing.assert_array_equal(found["values"], np.ones(3, "<f4"))
    assert found["odd"].dtype == "V2"


@pytest.mark.parametrize(
    "parts",
    [
        [row("a", "int64", [2], 72, 16)],
        [row("a", "int64", [2], -8, 16)],
        [row("a", "int64", [3], 0, 16)],
        [row("a", "int64", [2.0], 0, 16)],
        [row("a", "int64", ["2"], 0, 16)],
        [row("a", "int64", 2, 0, 16)],
        [row("a", "int64", [2], 1 << 70, 16)],
        [{"name": "a"}],
        [7],
        7,
        {"a": 1},
    ],
)
def test_parts_that_cannot_be_are_refused(parts):
    spec = LeafSpec(kind="sparse", dtype="float32", shape=(9,), nbytes=76, extra={"parts": parts})
    with pytest.raises(FormatError):
        as_numpy(spec, memoryview(bytearray(76)))
