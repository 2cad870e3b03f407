"""The extension's functions: digest, atomics, addresses, parallel reading."""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import random
import threading

import ml_dtypes
import numpy as np
import pytest
import xxhash

native = pytest.importorskip("pccheck.pipeline.native", exc_type=ImportError, reason="the extension was not built")
from pccheck import _native  # noqa: E402

PAGE = 4096


def kernels():
    """Names of the kernels that this machine has."""
    best = _native.isa()
    return ["c"] if best == "c" else ["c", best]


@pytest.fixture(params=kernels())
def kernel(request):
    """Run with each kernel."""
    best = _native.isa()
    _native.choose_isa(request.param)
    assert _native.isa() == request.param
    yield request.param
    _native.choose_isa(best)


def random_bytes(length, seed=1):
    return np.random.default_rng(seed).integers(0, 256, length, dtype=np.uint8)


# -- digest ------------------------------------------------------------------------------------------------------------


def test_digest_is_that_of_the_xxhash_package(kernel):
    data = random_bytes(1 << 20)
    lengths = [*range(241, 1400), *range(2000, 2120), 4096, 8192, 65535, 65536, 65537, (1 << 20) - 64]
    for number, length in enumerate(lengths):
        part = data[number % 64 : number % 64 + length]
        assert _native.xxh3_128(part) == xxhash.xxh3_128_digest(part), (kernel, length, number % 64)


def test_digest_refuses_what_is_not_its_path():
    for length in (0, 1, 240):
        with pytest.raises(ValueError, match="xxhash"):
            _native.xxh3_128(bytes(length))
    with pytest.raises((TypeError, BufferError, ValueError)):
        _native.xxh3_128(np.zeros((64, 64), np.uint8)[:, ::2])


def test_an_unknown_kernel_is_refused():
    before = _native.isa()
    with pytest.raises(ValueError, match="abacus"):
        _native.choose_isa("abacus")
    assert _native.isa() == before


# -- files -------------------------------------------------------------------------------------------------------------


def test_the_status_of_a_file_is_what_the_system_says(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(b"x" * 4097)
    os.link(path, tmp_path / "again")
    with path.open("rb") as file:
        found = os.fstat(file.fileno())
        assert _native.file_status(file.fileno()) == (4097, 2, found.st_dev, found.st_ino)
    with pytest.raises(OSError, match="Bad file descriptor"):
        _native.file_status(-1)


def test_a_file_is_locked_without_waiting(tmp_path):
    path = tmp_path / "file"
    path.touch()
    with path.open("rb") as one, path.open("rb") as other:
        _native.lock_file(one.fileno(), fcntl.LOCK_EX)
        with pytest.raises(BlockingIOError):
            _native.lock_file(other.fileno(), fcntl.LOCK_SH)
        _native.lock_file(one.fileno(), fcntl.LOCK_UN)
        _native.lock_file(other.fileno(), fcntl.LOCK_SH)
    with pytest.raises(OSError, match="Bad file descriptor"):
        _native.lock_file(-1, fcntl.LOCK_EX)


# -- atomics -----------------------------------------------------------------------------------------------------------


def test_words_in_shared_memory():
    page = mmap.mmap(-1, PAGE)
    _native.store64(page, 8, (1 << 64) - 2)
    assert _native.load64(page, 8) == (1 << 64) - 2
    assert page[8:16] == (0xFFFF_FFFF_FFFF_FFFE).to_bytes(8, "little")
    assert not _native.cas64(page, 8, 1, 2)
    assert _native.cas64(page, 8, (1 << 64) - 2, 7)
    assert _native.load64(page, 8) == 7
    assert _native.load64(page, 0) == _native.load64(page, PAGE - 8) == 0


def test_words_that_cannot_be_are_refused():
    page = mmap.mmap(-1, PAGE)
    for offset in (-8, -1, PAGE - 7, PAGE, 1 << 40):
        for call in (
            lambda o: _native.load64(page, o),
            lambda o: _native.store64(page, o, 1),
            lambda o: _native.cas64(page, o, 0, 1),
        ):
            with pytest.raises(IndexError, match=str(offset)):
                call(offset)
    with pytest.raises(ValueError, match="aligned"):
        _native.store64(page, 4, 1)
    with pytest.raises(OverflowError):
        _native.store64(page, 0, 1 << 64)
    with pytest.raises(OverflowError):
        _native.cas64(page, 0, -1, 1)
    with pytest.raises((TypeError, BufferError)):
        _native.store64(bytes(16), 0, 1)
    assert page[:] == bytes(PAGE)


def test_compare_and_swap_loses_no_increment():
    page = mmap.mmap(-1, PAGE)

    def count():
        for _ in range(2000):
            while not _native.cas64(page, 16, (old := _native.load64(page, 16)), old + 1):
                pass

    threads = [threading.Thread(target=count) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert _native.load64(page, 16) == 8000


# -- addresses ---------------------------------------------------------------------------------------------------------


def test_addresses_of_every_kind_of_array():
    read_only = np.arange(9)
    read_only.flags.writeable = False
    arrays = [
        np.zeros(3, np.float64),
        np.zeros((), np.int8),
        np.zeros((2, 3), ml_dtypes.bfloat16),
        np.zeros(5, ml_dtypes.float8_e4m3fn),
        np.zeros(7, "datetime64[ns]"),
        np.zeros(7, "S5"),
        np.zeros(7, "complex64"),
        np.zeros(100, np.uint8)[3:50],
        read_only,
    ]
    found = np.frombuffer(_native.buffer_addresses(arrays), np.uint64)
    assert found.tolist() == [a.ctypes.data for a in arrays]
    assert _native.buffer_addresses(tuple(arrays)) == found.tobytes()
    assert _native.buffer_addresses([]) == b""


@pytest.mark.parametrize(
    "value", [np.zeros((4, 4))[:, 1], np.zeros((4, 4))[::2], np.zeros((3, 4)).T, 3, None, "text"], ids=str
)
def test_addresses_of_what_is_not_one_run_of_bytes(value):
    with pytest.raises((ValueError, TypeError, BufferError)):
        _native.buffer_addresses([np.zeros(3), value])
    with pytest.raises(TypeError):
        _native.buffer_addresses(7)


# -- reading -----------------------------------------------------------------------------------------------------------


class File:
    """A file of random bytes, opened as asked for."""

    def __init__(self, folder, length, direct):
        self.path = folder / "chunks"
        self.data = random_bytes(length).tobytes()
        self.path.write_bytes(self.data)
        flags = os.O_RDONLY | (getattr(os, "O_DIRECT", 0) if direct else 0)
        try:
            self.fd = os.open(self.path, flags)
        except OSError:
            pytest.skip("no O_DIRECT on this file system")
        self.alignment = PAGE if direct else 1

    def read(self, room, places, digests=None, threads=3):
        at, offsets, lengths = ([place[i] for place in places] for i in range(3))
        return _native.read_chunks(self.fd, room, at, offsets, lengths, digests, threads, self.alignment)


@pytest.fixture(params=[False, True], ids=["buffered", "direct"])
def file(request, tmp_path):
    """Give a file of 2 MiB and a bit."""
    made = File(tmp_path, (2 << 20) + 777, request.param)
    yield made
    os.close(made.fd)


def digests_of(data, places):
    return b"".join(xxhash.xxh3_128_digest(data[o : o + n]) for _, o, n in places)


def test_chunks_arrive_where_they_belong(file, kernel):
    rng = random.Random(5)
    size = len(file.data)
    for unit in (1, 512, PAGE):
        room, places, at = mmap.mmap(-1, 4 << 20), [], 0
        for _ in range(20):
            length = max(241, rng.randrange(150_000) // unit * unit)
            offset = rng.randrange(size - length) // unit * unit
            places.append((at, offset, length))
            at += -(-length // unit) * unit + unit * rng.randrange(2)
        want = bytearray(len(room))
        for at, offset, length in places:
            want[at : at + length] = file.data[offset : offset + length]
        assert file.read(room, places, digests_of(file.data, places)) == []
        assert room[:] == want


def test_tables_may_be_arrays_or_bytes(file):
    room = bytearray(3 * PAGE)
    for kind in (
        list,
        tuple,
        lambda n: np.array(n, np.uint64),
        lambda n: np.array(n, np.int64),
        lambda n: np.array(n, np.uint64).tobytes(),
    ):
        at, offsets, lengths = kind([0, PAGE]), kind([PAGE, 0]), kind([PAGE, 300])
        assert _native.read_chunks(file.fd, room, at, offsets, lengths, None, 2, file.alignment) == []
        assert room[:PAGE] == file.data[PAGE : 2 * PAGE]
        assert room[PAGE : PAGE + 300] == file.data[:300]
        room[:] = bytes(len(room))
    for wrong in (np.zeros(2, np.int32), np.zeros(2), bytes(9)):
        with pytest.raises(TypeError, match="64-bit"):
            _native.read_chunks(file.fd, room, wrong, wrong, wrong, None, 2, 1)
    assert _native.read_chunks(file.fd, room, [], [], [], b"", 2, 1) == []


def test_damage_and_ends_are_told_apart(file):
    size = len(file.data)
    places = [(0, 0, PAGE), (PAGE, PAGE, PAGE), (2 * PAGE, size - 500, 500), (3 * PAGE, size - 500, 501)]
    digests = bytearray(digests_of(file.data, places))
    digests[17] ^= 1
    room = mmap.mmap(-1, 5 * PAGE)
    assert sorted(file.read(room, places, bytes(digests))) == [(1, 0), (3, errno.ENODATA)]
    assert room[: 2 * PAGE] == file.data[: 2 * PAGE]
    assert room[2 * PAGE : 2 * PAGE + 500] == file.data[-500:]


def test_a_failing_descriptor_is_reported_for_each_chunk(tmp_path):
    fd = os.open(tmp_path / "x", os.O_WRONLY | os.O_CREAT)
    room = bytearray(PAGE)
    assert _native.read_chunks(fd, room, [0, 9], [0, 9], [5, 5], None, 2, 1) == [(0, errno.EBADF), (1, errno.EBADF)]
    os.close(fd)


def test_reads_that_would_leave_the_destination_are_refused(file):
    room = bytearray(PAGE)
    for place in ((0, 0, PAGE + 1), (PAGE, 0, 1), (1, 0, PAGE), ((1 << 64) - 1, 0, 2), (0, (1 << 64) - 1, PAGE)):
        with pytest.raises(ValueError, match="chunk 0"):
            file.read(room, [place])
    with pytest.raises(ValueError, match="too short"):
        file.read(room, [(0, 0, 240)], bytes(16))
    with pytest.raises(ValueError, match="same number"):
        _native.read_chunks(file.fd, room, [0], [0, 1], [1], None, 1, 1)
    with pytest.raises(ValueError, match="same number"):
        file.read(room, [(0, 0, PAGE)], bytes(15))
    for threads, alignment in ((0, 1), (65, 1), (1, 0), (1, 3), (1, 1 << 30)):
        with pytest.raises(ValueError, match="contradict"):
            _native.read_chunks(file.fd, room, [0], [0], [1], None, threads, alignment)
    with pytest.raises((TypeError, BufferError)):
        _native.read_chunks(file.fd, bytes(PAGE), [0], [0], [1], None, 1, 1)
