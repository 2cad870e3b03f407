"""Captures off devices that work through streams and events (imports torch, pccheck.devices).

A stream does what it was told later, in order; an event is a point in it. Two orders make a capture right. It must come
after what the program had queued when it called `save()`: `begin` records an event on the caller's stream, and the
stream of the copies waits for it. And it must come before what changes a tensor afterwards: that is the gate's part.
The code is the same for CUDA and for the simulated device, on which both orders are tested by taking them away.
"""

from __future__ import annotations

import ctypes
import itertools
import threading
from collections import deque
from collections.abc import Sequence
from typing import Any, Protocol, final

import torch
from torch import Tensor

from pccheck.devices import Run

_MAX_VIEWS = 4096
_REGISTER_BYTES = 256 << 20  # drivers refuse registrations of 2 GiB (scitix/InstantTensor#19)
_ROOM = 1.1  # of a shadow: free memory over its bytes, since allocators round up
# Copies are made by elements of the same size that every kernel knows: not all dtypes can be copied as themselves.
SAME_SIZE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}


class Event(Protocol):
    """A point in a stream."""

    def wait(self, timeout_s: float) -> bool:
        """Wait until the stream has come there; False = time is up; raises what went wrong on the device."""


class Stream(Protocol):
    """A queue of a device. Thread-safe."""

    def record(self) -> Event:
        """Give the point behind everything that is queued by now."""

    def wait(self, event: Any) -> None:
        """Let everything queued from now on come after an event of any stream, without waiting here."""

    def copy(self, targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
        """Queue copies between tensors of bytes, in host memory or the device's."""


class Queues(Protocol):
    """What a kind of device offers: its streams and its memory. Thread-safe."""

    name: str

    def current(self) -> Stream:
        """Give the stream on which the calling thread works."""

    def side(self) -> Stream:
        """Give the one stream of the copies off the device."""

    def free_bytes(self) -> int:
        """Give how many bytes could be allocated now."""

    def register(self, address: int, nbytes: int) -> bool:
        """Pin host memory, so that it is copied to fast; False = refused."""

    def unregister(self, address: int) -> None:
        """Undo one `register`."""


class OnDevice(Protocol):
    """A tensor of a class that is on a device of its own, as those of `pccheck_torch.devices.simulated` are."""

    def __pccheck_memory__(self) -> tuple[StreamDevice, Tensor]:
        """Give the device, and a plain dense tensor over the memory."""

    def __pccheck_restore__(self, value: Tensor) -> Any:
        """Give a leaf such as this one with the values of a tensor."""


@final
class StreamDevice:
    """A `pccheck.devices.Device` over streams and events. Thread-safe; one object per device.

    Args:
        queues: its streams and memory.
    """

    def __init__(self, queues: Queues) -> None:
        self.name, self.queues = queues.name, queues
        self._lock = threading.Lock()
        self._views: dict[tuple[int, int], Tensor] = {}  # of host memory; bytes, so none keeps a leaf alive
        self._pinned: list[tuple[int, int]] = []
        self._late: deque[tuple[Event, Sequence[Tensor]]] = deque()  # copies of captures that ended before them

    def __repr__(self) -> str:
        return f"<StreamDevice {self.name}>"

    def begin(self) -> CaptureOnStream:
        """Open a capture whose copies come after everything that the caller's stream was given by now."""
        self.retire()
        side = self.queues.side()
        self.after_program(side)
        return CaptureOnStream(self, side)

    def after_program(self, side: Stream) -> None:
        """Let a stream wait for what the caller's stream was given by now."""
        side.wait(self.queues.current().record())

    def shadow(self, sources: Sequence[Any]) -> list[Any] | None:
        """Copy dense tensors within the device's memory, behind what the caller's stream was given by now.

        None where less than 1.1 times their bytes are free.
        """
        needed = sum(s.numel() * s.element_size() for s in sources)
        if self.queues.free_bytes() < _ROOM * needed:
            return None
        try:
            made = [torch.empty_like(s, requires_grad=False) for s in sources]
        except torch.OutOfMemoryError:
            return None
        plain = [SAME_SIZE[s.element_size()] for s in sources]
        targets = [t.view(d) for t, d in zip(made, plain, strict=True)]
        self.queues.current().copy(targets, [s.detach().view(d) for s, d in zip(sources, plain, strict=True)])
        return list(made)

    def register(self, address: int, nbytes: int) -> None:
        """Pin host memory in pieces of at most 256 MiB; those that are refused are copied to all the same, slower."""
        for start in range(0, nbytes, _REGISTER_BYTES):
            piece = (address + start, min(_REGISTER_BYTES, nbytes - start))
            if self.queues.register(*piece):
                with self._lock:
                    self._pinned.append(piece)

    def unregister(self, address: int, nbytes: int) -> None:
        """Unpin what `register` pinned of this memory, and forget views of it."""
        with self._lock:
            inside = [p for p in self._pinned if address <= p[0] < address + nbytes]
            self._pinned = [p for p in self._pinned if p not in inside]
            self._views = {k: v for k, v in self._views.items() if not address <= k[0] < address + nbytes}
        for start, _ in inside:
            self.queues.unregister(start)

    @property
    def registered_bytes(self) -> int:
        """How many bytes of host memory are pinned."""
        with self._lock:
            return sum(n for _, n in self._pinned)

    def host_view(self, address: int, nbytes: int) -> Tensor:
        """Give a tensor of bytes over host memory; the same one for the same buffer."""
        view = self._views.get((address, nbytes))
        if view is None:
            view = torch.frombuffer((ctypes.c_uint8 * nbytes).from_address(address), dtype=torch.uint8)
            with self._lock:
                if len(self._views) >= _MAX_VIEWS:
                    self._views.clear()
                self._views[address, nbytes] = view
        return view

    def retire(self, copies: Sequence[tuple[Event, Sequence[Tensor]]] = ()) -> None:
        """Hold sources of copies that may still run, and let go those of copies that were made."""
        with self._lock:
            self._late.extend(copies)
            while self._late and _is_over(self._late[0][0]):
                self._late.popleft()


@final
class CaptureOnStream:
    """The copies of one checkpoint off one device. Used by one thread at a time, but for `order`.

    It holds the sources until they were copied: a caching allocator would give memory that was freed meanwhile to
    whoever asks next on the program's stream, which knows nothing of the copies.

    Args:
        device: which.
        stream: where the copies are queued.
    """

    def __init__(self, device: StreamDevice, stream: Stream) -> None:
        self._device, self._stream = device, stream
        self._copies: deque[tuple[Event, Sequence[Tensor]]] = deque()
        self._last: Event | None = None

    def copy(self, address: int, nbytes: int, runs: Sequence[Run]) -> TicketOfEvent:
        """Queue copies of bytes of dense tensors into a host buffer."""
        while self._copies and _is_over(self._copies[0][0]):
            self._copies.popleft()
        ordered = sorted(runs, key=_place)
        sources = [byte_view(run.source, run.first, run.length) for run in ordered]
        self._stream.copy(_cut(self._device.host_view(address, nbytes), ordered), sources)
        self._last = event = self._stream.record()
        self._copies.append((event, sources))
        return TicketOfEvent(event)

    def order(self, timeout_s: float) -> bool:
        """Let what the calling thread queues from now on come after the copies queued here, without waiting for them.

        An event says so to the device. Always True.
        """
        last = self._last
        if last is not None:
            self._device.queues.current().wait(last)
        return True

    def end(self) -> None:
        """Leave what is still being copied to the device to hold."""
        self._device.retire(list(self._copies))
        self._copies.clear()


@final
class TicketOfEvent:
    """Copies up to an event."""

    def __init__(self, event: Event) -> None:
        self._event = event

    def wait(self, timeout_s: float) -> bool:
        """Wait until they are made; False = time is up; raises what went wrong on the device."""
        return self._event.wait(timeout_s)


def byte_view(tensor: Tensor, first: int, length: int) -> Tensor:
    """Give some bytes of a dense tensor's memory, whatever its dtype and strides."""
    start = tensor.storage_offset() * tensor.element_size() + first
    view = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    return view.set_(tensor.untyped_storage(), start, (length,), (1,))


def _place(run: Run) -> int:
    return run.place


def _cut(buffer: Tensor, runs: Sequence[Run]) -> Sequence[Tensor]:
    """Give the pieces of a buffer that these runs fill, in one call: slicing one by one costs five times as much."""
    sizes, at = [], 0
    for run in runs:
        sizes += [run.place - at, run.length]
        at = run.place + run.length
    sizes.append(buffer.numel() - at)
    pieces: Sequence[Tensor] = torch.split(buffer, sizes)
    return list(itertools.islice(pieces, 1, None, 2))


def _is_over(event: Event) -> bool:
    try:
        return event.wait(0.0)
    except Exception:  # the device failed: it reads nothing any more, and whoever waits for the ticket hears of it
        return True
