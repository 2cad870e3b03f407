"""Accelerators: leaves leave their memory chunk by chunk, block by block (imports jax, pccheck.devices).

JAX orders what it is told by the arrays that are used: a slice of an array comes after what computes it, and before
whatever takes its memory away by donation, once the slice was asked for. So nothing is needed to come after the
program; and to come before what changes a leaf, all copies that were asked for are awaited. A leaf is never read whole
where it is large: JAX would keep that host copy as long as the array lives.
"""

from __future__ import annotations

import ctypes
import functools
import math
import threading
import time
from collections import deque
from collections.abc import Sequence
from typing import Any, NamedTuple, final

import jax
import numpy as np

from pccheck.deadlines import reached
from pccheck.devices import Run
from pccheck.errors import UsageError

BLOCK_BYTES = 4 << 20  # of one slice: large enough for the bus, and few enough programs to compile
_ROOM = 1.1  # of a shadow: free memory over its bytes, since allocators round up
_MAX_INDEX = 2**31 - 1  # of a slice's first row


class Source(NamedTuple):
    """An array on one device, and which of its rows are stored; None = all."""

    array: Any
    rows: tuple[int, int] | None = None


def device_of(array: Any) -> JaxDevice:
    """Give the device that an array of one device lies on; always the same object."""
    (device,) = array.devices()
    return _device(device)


@functools.cache
def _device(device: Any) -> JaxDevice:
    return JaxDevice(device)


@final
class JaxDevice:
    """A `pccheck.devices.Device` over one device of JAX. Thread-safe; one object per device.

    Args:
        device: JAX's.
    """

    def __init__(self, device: Any) -> None:
        self._device = device
        self.name = f"{device.platform}:{device.id}"

    def __repr__(self) -> str:
        return f"<JaxDevice {self.name}>"

    def begin(self) -> JaxCapture:
        """Open a capture; the arrays themselves make its copies come after what computes them."""
        return JaxCapture()

    def shadow(self, sources: Sequence[Any]) -> list[Any] | None:
        """Copy arrays within the device's memory, so that the originals may be donated; None where there is no room."""
        needed = sum(_nbytes(source.array) for source in sources)
        free = self._free_bytes()
        if free is not None and free < _ROOM * needed:
            return None
        arrays = [source.array for source in sources]
        try:
            made = jax.device_put(arrays, [array.sharding for array in arrays], may_alias=False)
        except jax.errors.JaxRuntimeError as error:
            if "RESOURCE_EXHAUSTED" in str(error):
                return None
            raise
        return [Source(array, source.rows) for array, source in zip(made, sources, strict=True)]

    def register(self, address: int, nbytes: int) -> None:
        """Nothing: JAX copies through pinned memory of its own."""

    def unregister(self, address: int, nbytes: int) -> None:
        """Nothing."""

    def _free_bytes(self) -> int | None:
        stats = self._device.memory_stats() or {}
        if "bytes_limit" not in stats or "bytes_in_use" not in stats:
            return None
        return int(stats["bytes_limit"]) - int(stats["bytes_in_use"])


@final
class JaxCapture:
    """The copies of one checkpoint off one device. Used by one thread at a time, but for `order`."""

    def __init__(self) -> None:
        self._open: deque[JaxTicket] = deque()

    def copy(self, address: int, nbytes: int, runs: Sequence[Run]) -> JaxTicket:
        """Ask for slices of arrays, and for these to come to the host; raises UsageError for a donated array."""
        while self._open and self._open[0].is_made:
            self._open.popleft()
        pieces: list[_Piece] = []
        try:
            for run in runs:
                pieces += _pieces(run, address)
        except RuntimeError as error:
            if any(run.source.array.is_deleted() for run in runs):
                raise UsageError(
                    "an array was donated before it was captured: call fence() before the step that donates the "
                    "state, or save with snapshot='copy' or 'device'"
                ) from error
            raise
        for piece in pieces:
            piece.array.copy_to_host_async()
        ticket = JaxTicket(pieces)
        self._open.append(ticket)
        return ticket

    def order(self, timeout_s: float) -> bool:
        """Wait until all copies that were asked for were made; False = time is up.

        JAX has no word for "after this": an array of which a copy to the host runs may be donated all the same.
        """
        end = time.monotonic() + timeout_s
        return all(ticket.wait(max(0.0, end - time.monotonic())) for ticket in list(self._open))

    def end(self) -> None:
        """Nothing: tickets hold what they still copy from."""


class _Piece(NamedTuple):
    """An array whose bytes `first..first + length` go to an address."""

    array: Any
    first: int
    length: int
    target: int


@final
class JaxTicket:
    """Copies of slices. Thread-safe.

    Args:
        pieces: what is copied, and where to.
    """

    def __init__(self, pieces: list[_Piece]) -> None:
        self._left = pieces[::-1]
        self._lock = threading.Lock()
        self._error: Exception | None = None

    @property
    def is_made(self) -> bool:
        """Whether all copies are made, or have failed."""
        return not self._left

    def wait(self, timeout_s: float) -> bool:
        """Wait until the slices are computed, and copy them; False = time is up; raises what went wrong there."""
        end = time.monotonic() + timeout_s
        if not self._lock.acquire(timeout=max(0.0, timeout_s)):
            return False
        try:
            while self._left and self._error is None:
                computed = functools.partial(_is_over, self._left[-1].array)
                if not reached(computed, end - time.monotonic()):  # `block_until_ready` knows no time-out
                    return False
                self._copy(self._left[-1])
        finally:
            self._lock.release()
        if self._error is not None:
            raise self._error
        return True

    def _copy(self, piece: _Piece) -> None:
        try:
            host = np.ascontiguousarray(np.asarray(piece.array))
            ctypes.memmove(piece.target, host.ctypes.data + piece.first, piece.length)  # without the lock
        except Exception as error:
            self._error = error
            self._left.clear()  # nothing is copied any more
        else:
            self._left.pop()


def _is_over(array: Any) -> bool:
    return bool(array.is_deleted() or array.is_ready())


def _pieces(run: Run, address: int) -> list[_Piece]:
    """Give the slices that hold the bytes of a run: a small array is one, of a large one blocks of rows are cut."""
    array, rows = run.source
    first = run.first + (rows[0] * (_nbytes(array) // array.shape[0]) if rows else 0)
    target, end = address + run.place, first + run.length
    if _nbytes(array) <= BLOCK_BYTES:
        whole = array.addressable_data(0)  # another object: what JAX caches of it goes with it
        return [_Piece(whole, first, run.length, target)]
    axes, row_bytes = _split(array)
    count = math.prod(array.shape[:axes])
    block = min(count, max(1, BLOCK_BYTES // row_bytes))
    found = []
    while first < end:
        row = min(first // row_bytes, count - block)  # every slice of an array has the same length: one program
        start = row * row_bytes
        length = min(end, start + block * row_bytes) - first
        found.append(_Piece(_rows(array, row, block, axes), first - start, length, target))
        first, target = first + length, target + length
    return found


def _split(array: Any) -> tuple[int, int]:
    """Give how many leading axes are taken as one, so that its rows fit into a block, and the bytes of a row."""
    itemsize, axes = np.dtype(array.dtype).itemsize, 1
    while axes < array.ndim and math.prod(array.shape[axes:]) * itemsize > BLOCK_BYTES // 4:
        axes += 1
    return axes, math.prod(array.shape[axes:]) * itemsize


def _rows(array: Any, first: int, count: int, axes: int) -> Any:
    if math.prod(array.shape[:axes]) > _MAX_INDEX:  # an index of 32 bits does not reach: one program for each slice
        return jax.lax.slice_in_dim(_merged(array, axes), first, first + count)
    return _sliced(array, np.int32(first), count, axes)


@functools.partial(jax.jit, static_argnums=(2, 3))
def _sliced(array: Any, first: Any, count: int, axes: int) -> Any:
    return jax.lax.dynamic_slice_in_dim(_merged(array, axes), first, count)


def _merged(array: Any, axes: int) -> Any:
    return array.reshape(-1, *array.shape[axes:])


def _nbytes(array: Any) -> int:
    return int(array.size) * int(np.dtype(array.dtype).itemsize)
