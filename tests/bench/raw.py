"""What the disk can do: plain O_DIRECT reads and writes of one file in two threads (bench: imports numpy)."""

from __future__ import annotations

import mmap
import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import final

import numpy as np

HUGE = 2 << 20


def region(size: int) -> memoryview:
    """Give fresh, untouched memory in huge pages, aligned to one."""
    mapping = mmap.mmap(-1, size + HUGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    mapping.madvise(mmap.MADV_HUGEPAGE)
    start = -np.frombuffer(mapping, np.uint8).ctypes.data % HUGE
    return memoryview(mapping)[start : start + size]


@final
class RawFile:
    """An allocated file of random bytes that has been written once, and its source in touched memory.

    Args:
        path: on the file system to measure; must allow O_DIRECT.
        size: bytes, a multiple of 4096.
        chunk_bytes: bytes per call.
        threads: at once.
    """

    def __init__(self, path: Path, size: int, chunk_bytes: int, threads: int) -> None:
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_DIRECT, 0o600)
        os.posix_fallocate(self._fd, 0, size)
        self._size, self._chunk_bytes = size, chunk_bytes
        self._threads = ThreadPoolExecutor(threads)
        self._source = region(size)
        words = np.frombuffer(self._source, np.uint64)
        words[:] = np.arange(words.size, dtype=np.uint64)
        self.write()

    def write(self) -> float:
        """Write all and sync; give bytes per second."""
        return self._timed(lambda part, offset: os.pwritev(self._fd, [part], offset), self._source, sync=True)

    def read(self, destination: memoryview) -> float:
        """Read all; give bytes per second."""
        rate = self._timed(lambda part, offset: os.preadv(self._fd, [part], offset), destination, sync=False)
        assert destination[-4096:] == self._source[-4096:], "read what was not written"
        return rate

    def _timed(self, call: Callable[[memoryview, int], int], memory: memoryview, *, sync: bool) -> float:
        def move(offset: int) -> None:
            part = memory[offset : offset + self._chunk_bytes]
            done = call(part, offset)
            assert done == part.nbytes, f"moved {done} of {part.nbytes} bytes"

        began = time.perf_counter()
        for _ in self._threads.map(move, range(0, self._size, self._chunk_bytes)):
            pass
        if sync:
            os.fdatasync(self._fd)
        return self._size / (time.perf_counter() - began)

    def close(self) -> None:
        """Close."""
        self._threads.shutdown()
        os.close(self._fd)
