"""Arrays asked all at once: every change is noticed, and what cannot be told is an error, or asked in another way."""

from __future__ import annotations

import gc
import subprocess
import sys
import weakref
from collections import OrderedDict

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from pccheck import dlpack  # noqa: E402

_native = pytest.importorskip("pccheck._native")
if not hasattr(_native, "check_arrays"):
    pytest.skip("the native extension is not built", allow_module_level=True)
if not hasattr(torch.Tensor, "__dlpack_c_exchange_api__"):
    pytest.skip("this torch has no DLPack exchange table", allow_module_level=True)

Tensor = torch.Tensor


def base():
    return [torch.ones(4, 6), torch.zeros(3, dtype=torch.complex64), torch.ones(()), torch.ones(5)[1:]]


def checked(arrays, told, addresses=None):
    found = np.zeros(len(arrays), np.uint64) if addresses is None else addresses
    return _native.check_arrays(Tensor, arrays, told, found), found.tolist()


@pytest.mark.parametrize("sequence", [list, tuple])
def test_addresses_are_those_of_the_first_elements(sequence):
    arrays = sequence(base())
    told = _native.describe_arrays(Tensor, arrays)
    assert checked(arrays, told) == (-1, [t.data_ptr() for t in arrays])
    other = base()
    assert checked(other, told) == (-1, [t.data_ptr() for t in other])


CHANGES = {
    "shape": lambda: torch.ones(6, 4),
    "axes": lambda: torch.ones(24),
    "an axis of one": lambda: torch.ones(4, 6, 1),
    "stride": lambda: torch.ones(6, 4).t(),
    "stride within": lambda: torch.ones(4, 12)[:, ::2],
    "dtype": lambda: torch.ones(4, 6, dtype=torch.int32),
    "bits": lambda: torch.ones(4, 6, dtype=torch.float64),
}


@pytest.mark.parametrize("at", [0, 1, 30, 63])
@pytest.mark.parametrize("what", CHANGES)
def test_the_first_change_is_told(what, at):
    arrays = [torch.ones(4, 6) for _ in range(64)]
    told = _native.describe_arrays(Tensor, arrays)
    arrays[at] = CHANGES[what]()
    assert checked(arrays, told)[0] == at
    if at < 63:
        arrays[63] = CHANGES[what]()
        assert checked(arrays, told)[0] == at


QUESTIONS = ("requires_grad", "is_neg")
ANSWERS = {
    "an attribute": lambda: torch.ones(4, 6, requires_grad=True),
    "a method": lambda: torch._neg_view(torch.ones(4, 6)),
}


@pytest.mark.parametrize("at", [0, 30, 63])
@pytest.mark.parametrize("what", ANSWERS)
def test_another_answer_to_a_question_is_told(what, at):
    arrays, found = [torch.ones(4, 6) for _ in range(64)], np.zeros(64, np.uint64)
    told = _native.describe_arrays(Tensor, arrays, QUESTIONS)
    assert _native.check_arrays(Tensor, arrays, told, found, QUESTIONS) == -1
    assert found.tolist() == [t.data_ptr() for t in arrays]
    arrays[at] = ANSWERS[what]()
    assert _native.check_arrays(Tensor, arrays, told, found, QUESTIONS) == at
    assert _native.check_arrays(Tensor, arrays, _native.describe_arrays(Tensor, arrays, QUESTIONS), found, QUESTIONS)
    for fewer in ((), QUESTIONS[:1]):  # it was described with another number of answers
        assert _native.check_arrays(Tensor, arrays, told, found, fewer) >= 0
    alone = _native.describe_arrays(Tensor, arrays[:1], QUESTIONS)
    assert _native.check_arrays(Tensor, arrays[:1], alone, found[:1], QUESTIONS) == -1
    assert _native.check_arrays(Tensor, arrays[:1], alone[:-1], found[:1], QUESTIONS) == 0


def test_what_is_no_question_is_an_error():
    arrays = [torch.ones(3)]
    for name, error in {
        "no_such": AttributeError, "__module__": TypeError, "stride": TypeError, "cross": TypeError, 3: TypeError,
    }.items():  # fmt: skip
        with pytest.raises(error):
            _native.describe_arrays(Tensor, arrays, (name,))
    with pytest.raises(ValueError, match="at most"):
        _native.describe_arrays(Tensor, arrays, ("is_leaf",) * 9)
    with pytest.raises(TypeError, match="item 0 is no"):
        _native.describe_arrays(Tensor, [3], QUESTIONS)
    assert dlpack.described(Tensor, arrays, ("no_such",)) is None
    assert _native.describe_arrays(Tensor, [], QUESTIONS) == b""


@pytest.mark.parametrize("looks", [b"", b"odd", bytes(8 * 40), b"\xff" * (8 * 40)])
def test_where_answering_looks_changes_no_answer(looks):
    arrays, found = [torch.ones(3) for _ in range(40)], np.zeros(40, np.uint64)
    told = _native.describe_arrays(Tensor, arrays)
    assert _native.check_arrays(Tensor, arrays, told, found, (), looks) == -1
    assert found.tolist() == [t.data_ptr() for t in arrays]
    arrays[7] = torch.ones(4)
    assert _native.check_arrays(Tensor, arrays, told, found, (), looks) == 7


def test_another_device_is_a_change():
    told = bytearray(_native.describe_arrays(Tensor, [torch.ones(3)]))
    for byte in (0, 4):  # the device's type, and its number
        other = bytearray(told)
        other[byte] += 1
        assert checked([torch.ones(3)], bytes(other))[0] == 0


def test_a_pointer_that_changed_is_given():
    t = torch.ones(3)
    told = _native.describe_arrays(Tensor, [t])
    t.data = torch.zeros(3)
    assert checked([t], told) == (-1, [t.data_ptr()])
    t.untyped_storage().resize_(0)
    assert checked([t], told) == (-1, [0])


def test_more_or_fewer_arrays_are_a_change():
    told = _native.describe_arrays(Tensor, base())
    assert checked(base()[:3], told)[0] == 3
    assert checked([*base(), torch.ones(1)], told)[0] == 4
    assert checked([], told)[0] == 0
    assert checked([], _native.describe_arrays(Tensor, [])) == (-1, [])


@pytest.mark.parametrize("length", range(0, 40, 7))
def test_a_description_that_ends_early_fits_nothing(length):
    told = _native.describe_arrays(Tensor, [torch.ones(4, 6)])
    assert len(told) > 40
    assert checked([torch.ones(4, 6)], told[:length])[0] == 0


class Foreign:
    pass


FOREIGN = {
    "an int": 3, "None": None, "a NumPy array": np.ones(3), "a class": Tensor, "an object": Foreign(), "a text": "t",
}  # fmt: skip


@pytest.mark.parametrize("what", FOREIGN)
@pytest.mark.parametrize("at", [0, 9, 19])
def test_foreign_objects_are_refused(what, at):
    arrays = [torch.ones(3) for _ in range(20)]
    told = _native.describe_arrays(Tensor, arrays)
    arrays[at] = FOREIGN[what]
    with pytest.raises(TypeError, match=f"item {at} is no"):
        checked(arrays, told)
    with pytest.raises(TypeError, match=f"item {at} is no"):
        _native.describe_arrays(Tensor, arrays)
    assert dlpack.described(Tensor, arrays) is None


@pytest.mark.filterwarnings("ignore:.*(parse|quantiz|nested|CSR).*")
@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.ones(3, device="meta"),
        lambda: torch.ones(3, 3).to_sparse(),
        lambda: torch.ones(3, 3).to_sparse_csr(),
        lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
        lambda: torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8),
        lambda: torch.empty(3, dtype=torch.bits8),
    ],
)
def test_what_dlpack_cannot_tell_is_an_error_and_asked_one_by_one(make):
    told = _native.describe_arrays(Tensor, [torch.ones(3)])
    with pytest.raises((RuntimeError, BufferError)):
        checked([make()], told)
    assert dlpack.described(Tensor, [torch.ones(3), make()]) is None


def test_what_has_no_memory_of_its_own_is_an_error():
    told, seen = _native.describe_arrays(Tensor, [torch.ones(2)]), []

    def ask(x):
        with pytest.raises((RuntimeError, BufferError)):
            checked([x], told)
        seen.append(x)
        return x

    torch.func.vmap(ask)(torch.ones(3, 2))
    assert seen


def test_classes_without_the_table_are_refused():
    with pytest.raises(AttributeError):
        _native.describe_arrays(np.ndarray, [np.ones(3)])
    with pytest.raises(TypeError):
        _native.describe_arrays(3, [])
    assert dlpack.described(np.ndarray, [np.ones(3)]) is None

    class Capsuleless:
        __dlpack_c_exchange_api__ = "no capsule"

    with pytest.raises(ValueError, match="Capsule"):
        _native.describe_arrays(Capsuleless, [Capsuleless()])

    class Bare:  # instances end before the place where a tensor's body begins
        __slots__ = ()
        __dlpack_c_exchange_api__ = Tensor.__dlpack_c_exchange_api__

    with pytest.raises(RuntimeError):
        _native.describe_arrays(Bare, [Bare() for _ in range(40)])


@pytest.mark.parametrize("count", [0, 1, 3])
def test_room_for_another_number_of_addresses_is_refused(count):
    told = _native.describe_arrays(Tensor, [torch.ones(1)] * 2)
    with pytest.raises(ValueError, match="do not hold 2 addresses"):
        checked([torch.ones(1)] * 2, told, np.zeros(count, np.uint64))


def test_subclasses_are_arrays_of_their_class():
    p = torch.nn.Parameter(torch.ones(3))
    told = _native.describe_arrays(Tensor, [p])
    assert checked([torch.ones(3)], told)[0] == -1
    assert checked([p], told) == (-1, [p.data_ptr()])


def test_nothing_is_kept_alive():
    arrays = base()
    gone = [weakref.ref(t) for t in arrays]
    found = dlpack.described(Tensor, arrays)
    assert found is not None
    assert found.addresses(arrays) is not None
    del arrays
    gc.collect()
    assert [r() for r in gone] == [None] * len(gone)


def test_without_the_extension_nothing_is_described(monkeypatch):
    monkeypatch.setattr(dlpack, "NATIVE", False)
    assert dlpack.described(Tensor, base()) is None


@pytest.mark.parametrize("native", [True, False])
def test_contents_tell_containers_apart_by_identity(native, monkeypatch):
    monkeypatch.setattr(dlpack, "NATIVE", native)
    a, b, c = [1.5], [1.5], [1.5]
    known = dlpack.contents([[a, b], (c,), {"k": a}])
    assert dlpack.contents([[a, b], (c,), {"k": a}]) == known
    assert dlpack.contents(([a, b], (c,), {"k": a})) == known
    for other in (
        [[a], (b, c), {"k": a}], [[b, a], (c,), {"k": a}], [[a, [1.5]], (c,), {"k": a}], [[a, b], (c,), {"k": b}],
        [[a, b], (c,), {"l": a}], [[a, b], (c,), {}], [[a, b], (c,)], [[a, b], (c,), {"k": a}, []],
    ):  # fmt: skip
        assert dlpack.contents(other) != known
    assert dlpack.contents([]) == b""


@pytest.mark.parametrize("native", [True, False])
def test_contents_of_an_ordered_dict_go_by_its_own_order(native, monkeypatch):
    monkeypatch.setattr(dlpack, "NATIVE", native)
    ordered = OrderedDict(a=1, b=2)
    known = dlpack.contents([ordered])
    assert dlpack.contents([ordered]) == known
    ordered.move_to_end("a")
    assert dlpack.contents([ordered]) != known


def test_contents_leave_every_reference_as_it_was():
    item, key = object(), "a key of its own".replace("a", "the")
    containers = [[item] * 3, (item,), {key: item}]
    before = sys.getrefcount(item), sys.getrefcount(key)
    told = dlpack.contents(containers)
    assert (sys.getrefcount(item), sys.getrefcount(key)) == before
    assert len(told) == 8 * (3 + 3 + 1 + 2)


def test_contents_refuse_what_is_no_container():
    with pytest.raises(TypeError):
        _native.contents([3])
    with pytest.raises(TypeError):
        _native.contents([OrderedDict()])


def test_many_rounds_leak_nothing():
    program = (
        "import resource, torch, numpy as np\n"
        "from pccheck import dlpack\n"
        "ts = [torch.ones(2, 3) for _ in range(500)]\n"
        "bad = [*ts[:-1], 3]\n"
        "def round():\n"
        "    d = dlpack.described(torch.Tensor, ts)\n"
        "    assert d.addresses(ts) is not None and d.addresses(ts[:3]) is None\n"
        "    assert dlpack.described(torch.Tensor, bad) is None\n"
        "    dlpack.contents([ts, {'a': ts}])\n"
        "for _ in range(300): round()\n"
        "before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "for _ in range(1500): round()\n"
        "assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 4096\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")
