"""The pool of buffers: bounded, aligned, back exactly once, and not in forked children."""

from __future__ import annotations

import ctypes
import gc
import mmap
import os
import random
import sys
import threading

import pytest

from pccheck.errors import ClosedError, ForkedError, OptionError
from pccheck.storage.buffers import BufferPool
from pccheck.storage.media import address_of

LONG_S = 60.0
MAP_FIXED_NOREPLACE = 0x100000  # Linux


def in_child(function):
    """Run a function in a forked child, which then ends as an interpreter does; give its exit status."""
    pid = os.fork()
    if pid == 0:
        code = 3
        try:
            function()
            gc.collect()
            code = 0
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def test_buffers_are_aligned_disjoint_and_writable():
    pool = BufferPool(5, 12288)
    taken = [pool.take(0) for _ in range(5)]
    assert pool.free == 0
    assert pool.take(0) is None
    for index, buffer in enumerate(taken):
        assert buffer.address == address_of(buffer.view)
        assert buffer.address % 4096 == 0
        assert buffer.view.nbytes == 12288
        buffer.view[:] = bytes([index]) * 12288
    assert [set(b.view) for b in taken] == [{i} for i in range(5)]
    for buffer in taken:
        pool.give_back(buffer)
    assert pool.free == pool.buffers == 5
    assert repr(pool) == "<BufferPool 5 of 5 free, 12288 bytes each>"


def test_large_pools_begin_on_a_huge_page():
    assert BufferPool(2, 2 << 20).take(0).address % (2 << 20) == 0


def test_a_few_buffers_are_used_again():
    pool = BufferPool(8, 4096)
    seen = set()
    for _ in range(20):
        buffer = pool.take(0)
        seen.add(buffer.index)
        pool.give_back(buffer)
    assert len(seen) == 1


def test_given_back_once():
    pool, other = BufferPool(2, 4096), BufferPool(2, 4096)
    buffer = pool.take(0)
    with pytest.raises(ValueError, match="another pool"):
        other.give_back(buffer)
    pool.give_back(buffer)
    with pytest.raises(ValueError, match="twice"):
        pool.give_back(buffer)
    assert pool.free == 2


def test_a_waiter_gets_what_comes_back():
    pool, got = BufferPool(1, 4096), []
    buffer = pool.take(0)
    thread = threading.Thread(target=lambda: got.append(pool.take(LONG_S)))
    thread.start()
    pool.give_back(buffer)
    thread.join(LONG_S)
    assert got == [buffer]


def test_a_cancelled_waiter_goes():
    pool, stop, got = BufferPool(1, 4096), threading.Event(), []
    asked = threading.Event()

    def cancelled():
        asked.set()
        return stop.is_set()

    buffer = pool.take(0)
    thread = threading.Thread(target=lambda: got.append(pool.take(LONG_S, cancelled)))
    thread.start()
    assert asked.wait(LONG_S)
    stop.set()
    pool.wake()
    thread.join(LONG_S)
    assert got == [None]
    pool.give_back(buffer)
    assert pool.take(0, lambda: True) is None
    assert pool.free == 1


def test_closed():
    pool, got = BufferPool(1, 4096), []
    buffer = pool.take(0)

    def wait():
        try:
            pool.take(LONG_S)
        except ClosedError as error:
            got.append(error)

    thread = threading.Thread(target=wait)
    thread.start()
    pool.close()
    thread.join(LONG_S)
    assert len(got) == 1
    buffer.view[:] = bytes(4096)  # memory that is still out stays
    pool.give_back(buffer)
    assert pool.free == 0
    pool.close()
    with pytest.raises(ClosedError):
        pool.take(0)


def test_never_two_holders():
    pool, owners, wrong = BufferPool(3, 4096), {}, []

    def work(me):
        rng = random.Random(me)
        for _ in range(300):
            buffer = pool.take(LONG_S)
            if owners.setdefault(buffer.index, me) != me:
                wrong.append(buffer)
            if rng.random() < 0.2:
                threading.Event().wait(0)
            del owners[buffer.index]
            pool.give_back(buffer)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LONG_S)
    assert not wrong
    assert pool.free == 3


@pytest.mark.skipif(sys.platform != "linux", reason="fork copies the pool elsewhere")
def test_not_in_a_forked_child():
    """The child has no copy of the memory, is told so, and does not free at that address when it drops the pool."""
    pools = [BufferPool(4, 1 << 20)]
    buffers = [pools[0].take(0)]
    buffers[0].view[:4] = b"mine"
    address = buffers[0].address

    def child():
        for call in (lambda: pools[0].take(0), lambda: pools[0].give_back(buffers[0]), pools[0].close):
            with pytest.raises(ForkedError):
                call()
        # Something else of the child comes to lie where the pool was; dropping the pool must not take it away.
        libc = ctypes.CDLL(None, use_errno=True)
        libc.mmap.restype = ctypes.c_void_p
        libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_FIXED_NOREPLACE
        there = libc.mmap(address, 1 << 20, mmap.PROT_READ | mmap.PROT_WRITE, flags, -1, 0)
        assert there == address, "the pool is in the child"
        ctypes.memset(address, 7, 1 << 20)
        del call
        buffers.clear()
        pools.clear()
        gc.collect()
        assert ctypes.string_at(address, 1 << 20) == bytes([7]) * (1 << 20)

    assert in_child(child) == 0
    assert bytes(buffers[0].view[:4]) == b"mine"


@pytest.mark.parametrize(("buffers", "size"), [(0, 4096), (1, 0), (1, 100), (1, 4097)])
def test_sizes_that_are_refused(buffers, size):
    with pytest.raises(OptionError):
        BufferPool(buffers, size)
