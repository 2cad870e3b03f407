"""Memory of many exporters held by one object: kept as it is until that is dropped, whole or not at all."""

from __future__ import annotations

import ctypes
import gc
import sys
import threading

import numpy as np
import pytest

from pccheck import holding

if not holding.NATIVE:
    pytest.skip("the native extension is not built", allow_module_level=True)

from pccheck import _native


def arrays(count=5):
    """Give exporters that say whether somebody holds them: a bytearray does not grow meanwhile."""
    return [bytearray(b"%d" % n * 40) for n in range(count)]


def is_held(array):
    try:
        array.append(0)
    except BufferError:
        return True
    array.pop()
    return False


@pytest.mark.parametrize("sequence", [list, tuple])
def test_memory_is_held_until_it_is_let_go(sequence):
    plain = arrays()
    held, places = holding.hold(sequence(plain))
    assert [ctypes.string_at(int(at), len(array)) for at, array in zip(places, plain, strict=True)] == plain
    assert len(held) == 5
    assert all(map(is_held, plain))
    del held
    assert not any(map(is_held, plain))


def test_what_is_held_lives_on():
    made = arrays()
    texts, counts = list(map(bytes, made)), list(map(sys.getrefcount, made))
    held, places = holding.hold(made)
    assert list(map(sys.getrefcount, made)) == [count + 1 for count in counts]
    del made
    gc.collect()
    assert [ctypes.string_at(int(at), len(text)) for at, text in zip(places, texts, strict=True)] == texts
    del held


def test_an_array_may_be_held_many_times():
    (array,) = arrays(1)
    one, _ = holding.hold([array, array])
    two, places = holding.hold([array] * 3)
    assert len(set(places.tolist())) == 1
    del one
    assert is_held(array)
    del two
    assert not is_held(array)


def test_nothing_is_held_of_nothing():
    held, places = holding.hold([])
    assert len(held) == len(places) == 0


class Foreign:
    pass


FOREIGN = {
    "an int": 3, "None": None, "a text": "t", "an object": Foreign(), "a list": [1], "a class": Foreign,
    "a capsule of something else": np._core._multiarray_umath._ARRAY_API,
}  # fmt: skip


@pytest.mark.parametrize("what", FOREIGN)
@pytest.mark.parametrize("at", [0, 2, 4])
def test_foreign_objects_are_refused_and_the_others_let_go(what, at):
    plain = arrays()
    counts = list(map(sys.getrefcount, plain))
    mixed = [*plain[:at], FOREIGN[what], *plain[at:]]
    with pytest.raises((TypeError, BufferError)):
        holding.hold(mixed)
    assert not any(map(is_held, plain))
    del mixed
    assert list(map(sys.getrefcount, plain)) == counts


ODD = {
    "F order": lambda: np.ones((3, 4), order="F"),
    "a gap": lambda: np.ones((4, 6))[:, ::2],
    "backwards": lambda: np.ones(4)[::-1],
}


@pytest.mark.parametrize("capsule", [False, True])
@pytest.mark.parametrize("what", ODD)
def test_what_is_not_in_c_order_is_refused(what, capsule):
    plain, odd = arrays(), ODD[what]()
    count = sys.getrefcount(odd)
    with pytest.raises((BufferError, ValueError)):
        holding.hold([*plain, odd.__dlpack__() if capsule else odd])
    gc.collect()
    assert not any(map(is_held, plain))
    assert sys.getrefcount(odd) == count


@pytest.mark.parametrize("versioned", [False, True])
@pytest.mark.parametrize(
    "make",
    [
        lambda: np.arange(12.0).reshape(3, 4),
        lambda: np.arange(12.0).reshape(3, 1, 4),
        lambda: np.arange(12.0)[4:],
        lambda: np.array(3.0),
        lambda: np.ones((0, 3)),
        lambda: np.ones((3, 4), order="F")[:, :1],
        lambda: np.ones((1, 4), order="F"),
    ],
)
def test_capsules_are_held_as_buffers_are(make, versioned):
    array = make()
    if versioned and np.lib.NumpyVersion(np.__version__) < "2.1.0":
        pytest.skip("this NumPy makes no such capsules")
    count, c_order = sys.getrefcount(array), array.flags.c_contiguous
    capsule = array.__dlpack__(max_version=(1, 0)) if versioned else array.__dlpack__()
    assert ("versioned" in repr(capsule)) is versioned
    if c_order:
        held, places = holding.hold([b"before", capsule])
        del capsule
        gc.collect()
        assert sys.getrefcount(array) == count + 1
        assert places[1] == array.ctypes.data or not array.size
        del held
    else:
        with pytest.raises(BufferError, match="item 1"):
            holding.hold([b"before", capsule])
        del capsule
    assert sys.getrefcount(array) == count


def test_a_used_capsule_is_refused():
    class Made:
        def __init__(self, array):
            self.capsule = array.__dlpack__()

        def __dlpack__(self, **_):
            return self.capsule

        def __dlpack_device__(self):
            return (1, 0)

    made = Made(np.ones(3))
    taken = np.from_dlpack(made)
    with pytest.raises(BufferError, match="item 0"):
        holding.hold([made.capsule])
    assert taken.tolist() == [1, 1, 1]


def test_a_capsule_of_a_device_is_refused():
    capsule = np.ones(3).__dlpack__()
    get = ctypes.pythonapi.PyCapsule_GetPointer
    get.restype, get.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
    device = ctypes.c_int32.from_address(get(capsule, b"dltensor") + 8)
    assert device.value == 1
    device.value = 2  # CUDA
    with pytest.raises(BufferError, match="host memory"):
        holding.hold([capsule])
    device.value = 1


@pytest.mark.parametrize("room", [0, 4, 6])
def test_addresses_must_have_room(room):
    plain = arrays()
    with pytest.raises(ValueError, match="addresses"):
        _native.hold_buffers(plain, np.zeros(room, np.uint64))
    with pytest.raises(TypeError):
        _native.hold_buffers(plain, bytes(40))
    assert not any(map(is_held, plain))


def test_holds_are_made_by_holding_alone():
    held, _ = holding.hold([])
    with pytest.raises(TypeError):
        type(held)()
    assert not gc.is_tracked(held), "however many there are, no work for the garbage collector"


def test_nothing_is_left_of_many_holds():
    """Threads hold the same arrays at once: all counts are as before."""
    plain = arrays(200)
    kind = type(holding.hold([])[0])
    counts, kinds = list(map(sys.getrefcount, plain)), sys.getrefcount(kind)

    def work():
        for n in range(200):
            holding.hold(plain)
            with pytest.raises(TypeError):
                holding.hold([*plain[: n % 50], None])

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert list(map(sys.getrefcount, plain)) == counts
    assert sys.getrefcount(kind) == kinds
    assert not any(map(is_held, plain))
