"""Many small pieces in one call: copied and digested alike by native code and by its portable twin."""

from __future__ import annotations

import array

import numpy as np
import pytest
import xxhash

from pccheck.pipeline import gather

LENGTHS = [0, 1, 100, 240, 241, 255, 256, 257, 5000, 0, 3 << 20, 70_000]


@pytest.fixture(params=["native", "portable"])
def way(request, monkeypatch):
    """Run both, as far as they were built."""
    if request.param == "native" and not gather.NATIVE:
        pytest.skip("the extension was not built")
    monkeypatch.setattr(gather, "NATIVE", request.param == "native")
    return request.param


@pytest.fixture
def source():
    """Give bytes, and where in them pieces begin that overlap nothing, at odd places."""
    data = np.random.default_rng(0).integers(0, 256, 1 << 23, dtype=np.uint8)
    starts = np.cumsum([3, *LENGTHS[:-1]]) + 7 * np.arange(len(LENGTHS))
    return data, starts


def address(data):
    return data.__array_interface__["data"][0]


@pytest.mark.parametrize("kind", [list, lambda n: np.array(n, np.uint64), lambda n: array.array("Q", n)])
def test_pieces_are_copied_and_nothing_else(way, source, kind):
    data, starts = source
    target = np.zeros_like(data)
    places = np.cumsum([11, *LENGTHS[:-1]]) + 13 * np.arange(len(LENGTHS))
    gather.copy_pieces(
        kind([address(data) + int(s) for s in starts]),
        kind(LENGTHS),
        kind([address(target) + int(p) for p in places]),
    )
    want = np.zeros_like(data)
    for start, place, length in zip(starts, places, LENGTHS, strict=True):
        want[place : place + length] = data[start : start + length]
    assert np.array_equal(target, want)


def test_many_bytes_are_copied_by_several_threads(way):
    data = np.random.default_rng(1).integers(0, 256, 48 << 20, dtype=np.uint8)
    target = np.zeros_like(data)
    offsets = np.arange(0, data.nbytes, 100_000, dtype=np.uint64)
    lengths = np.minimum(data.nbytes - offsets, 100_000).astype(np.uint64)
    gather.copy_pieces(offsets + np.uint64(address(data)), lengths, offsets + np.uint64(address(target)))
    assert np.array_equal(target, data)


def test_digests_are_xxh3_of_each_piece(way, source):
    data, starts = source
    digests = gather.digest_pieces([address(data) + int(s) for s in starts], LENGTHS)
    pieces = [data[s : s + n].tobytes() for s, n in zip(starts, LENGTHS, strict=True)]
    assert digests == b"".join(xxhash.xxh3_128_digest(p if len(p) >= 256 else p.ljust(256, b"\0")) for p in pieces)
    before = data[starts[2]]
    data[starts[2]] = before + 1
    changed = gather.digest_pieces([address(data) + int(s) for s in starts], LENGTHS)
    assert [i for i in range(len(LENGTHS)) if digests[16 * i : 16 * i + 16] != changed[16 * i : 16 * i + 16]] == [2]


def test_no_pieces(way):
    gather.copy_pieces([], [], [])
    gather.copy_pieces([0], [0], [0])
    assert gather.digest_pieces([], []) == b""
    assert gather.digest_pieces([0], [0]) == xxhash.xxh3_128_digest(bytes(256))


def test_tables_that_contradict_each_other_are_refused(way):
    byte = np.zeros(1, np.uint8)
    for tables in (([address(byte)], [1], []), ([address(byte)], [], [address(byte)]), ([0], [1], [address(byte)])):
        with pytest.raises(ValueError, match=r"addresses|address 0"):
            gather.copy_pieces(*tables)
    for tables in (([address(byte)], []), ([0], [1])):
        with pytest.raises(ValueError, match=r"addresses|address 0"):
            gather.digest_pieces(*tables)


def test_numbers_of_threads_that_are_refused():
    if not gather.NATIVE:
        pytest.skip("the extension was not built")
    from pccheck import _native

    for threads in (0, 65):
        with pytest.raises(ValueError, match="threads"):
            _native.copy_pieces([], [], [], threads)
    with pytest.raises(TypeError, match="64-bit"):
        _native.copy_pieces(np.zeros(1, np.float64), [0], [0], 1)
