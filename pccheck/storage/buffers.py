"""A bounded pool of equal, page-aligned buffers (floor 1: imports floor 0, forks)."""

from __future__ import annotations

import ctypes
import mmap
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import final

import numpy as np

from pccheck.errors import ClosedError, OptionError
from pccheck.storage import forks

PAGE = 4096
HUGE_PAGE = 2 << 20


@dataclass(frozen=True, eq=False)
class Buffer:
    """One buffer: its bytes, and where in memory they begin."""

    index: int
    view: memoryview
    address: int


@final
class BufferPool:
    """Buffers over one anonymous mapping, in huge pages and not copied by fork where the system can. Thread-safe.

    Args:
        buffers: how many, at least 1.
        buffer_bytes: size of each, a multiple of 4096.
    """

    def __init__(self, buffers: int, buffer_bytes: int) -> None:
        if buffers < 1:
            raise OptionError("buffers", buffers, "at least 1")
        if buffer_bytes < PAGE or buffer_bytes % PAGE:
            raise OptionError("buffer_bytes", buffer_bytes, "a multiple of 4096, at least 4096")
        self.buffers = buffers
        self.buffer_bytes = buffer_bytes
        self._pid = os.getpid()
        total = buffers * buffer_bytes
        with forks.held_off():
            self._map = mmap.mmap(-1, total + HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            # A forked child would have every page that the parent writes copied first: 1,573 ms instead of 42 per
            # copy of the state were seen.
            self._in_children = not _advise(self._map, "MADV_DONTFORK")
            forks.enter(self)
        _advise(self._map, "MADV_HUGEPAGE")
        base = int(np.frombuffer(self._map, np.uint8).__array_interface__["data"][0])
        skip = -base % (HUGE_PAGE if total >= HUGE_PAGE else PAGE)
        self.memory = base + skip, total  # address and bytes of all buffers
        whole = memoryview(self._map)[skip : skip + total]
        starts = range(0, total, buffer_bytes)
        self._free = [Buffer(i, whole[s : s + buffer_bytes], base + skip + s) for i, s in enumerate(starts)]
        self._free.reverse()  # the lowest first: memory that few jobs need is never touched
        self._out: set[int] = set()
        self._closed = False
        self._returned = threading.Condition()

    def __repr__(self) -> str:
        return f"<BufferPool {self.free} of {self.buffers} free, {self.buffer_bytes} bytes each>"

    @property
    def free(self) -> int:
        """Buffers that nobody holds."""
        return len(self._free)

    def take(self, timeout_s: float, cancelled: Callable[[], bool] = lambda: False) -> Buffer | None:
        """Wait for a free buffer; None when time is up or `cancelled()`, which is asked again at every `wake()`.

        Args:
            timeout_s: seconds to wait at most; 0 = do not wait.
            cancelled: called under the pool's lock, must not take another.

        Raises:
            ClosedError: the pool was closed.
        """
        forks.check_owner(self._pid, "a buffer pool")
        deadline = time.monotonic() + timeout_s
        with self._returned:
            while True:
                if self._closed:
                    raise ClosedError("the buffer pool was closed before this call")
                if cancelled():
                    return None
                if self._free:
                    buffer = self._free.pop()
                    self._out.add(buffer.index)
                    return buffer
                left = deadline - time.monotonic()
                if left <= 0:
                    return None
                self._returned.wait(left)

    def give_back(self, buffer: Buffer) -> None:
        """Make a taken buffer free again; raises ValueError for one that is not out."""
        forks.check_owner(self._pid, "a buffer pool")
        with self._returned:
            if buffer.index not in self._out:
                raise ValueError(f"buffer {buffer.index} was given back twice or is of another pool")
            self._out.remove(buffer.index)
            if not self._closed:
                self._free.append(buffer)
            self._returned.notify_all()

    def wake(self) -> None:
        """Have every waiting `take` ask its `cancelled` again."""
        with self._returned:
            self._returned.notify_all()

    def close(self) -> None:
        """Refuse further takes; the memory is freed with the last buffer that is still out."""
        forks.check_owner(self._pid, "a buffer pool")
        with self._returned:
            self._closed = True
            self._free.clear()
            self._returned.notify_all()

    def forget(self) -> None:
        """Keep the mapping from being unmapped by a forked child, which has not got it.

        The child's memory may hold something else at that address by then, and freeing the mapping would free that.
        """
        if not self._in_children:
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._map))


def _advise(mapping: mmap.mmap, advice: str) -> bool:
    """Give the kernel an advice; tell whether it knows it."""
    if not hasattr(mmap, advice):
        return False
    try:
        mapping.madvise(getattr(mmap, advice))
    except OSError:  # a kernel built without huge pages
        return False
    return True
