"""Fills chunks with what lies on devices, many devices at once (floor 1: imports floor 0)."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, final

from pccheck.devices import Capture, Device, Run, Ticket
from pccheck.errors import UsageError
from pccheck.state.plan import Layout

_ORPHANS_S = 60.0  # how long copies are waited for that were queued before another device refused its own


class OnDevice(NamedTuple):
    """A piece of a layout that lies on a device, and the byte of its source where it begins."""

    piece: int
    device: Device
    first: int


class _Part(NamedTuple):
    """What of one piece goes into one chunk: `first..first + length` of its source, to `place` in the buffer."""

    piece: int
    first: int
    length: int
    place: int


@final
class DeviceLayout:
    """Which bytes of which device go where in each chunk; made once for a layout. Immutable."""

    def __init__(self, layout: Layout, found: Iterable[OnDevice]) -> None:
        chunks: dict[int, dict[int, list[_Part]]] = defaultdict(lambda: defaultdict(list))
        numbers: dict[Device, int] = {}
        self.device_of: dict[int, int] = {}  # of each piece: its device's number
        self.first_of: dict[int, int] = {}  # of each piece: the byte of its source where it begins
        for piece, device, first in found:
            number = self.device_of[piece] = numbers.setdefault(device, len(numbers))
            self.first_of[piece] = first
            start, length = layout.pieces[piece].offset, layout.pieces[piece].length
            done = 0
            while done < length:
                chunk, place = divmod(start + done, layout.chunk_bytes)
                count = min(length - done, layout.chunk_bytes - place)
                chunks[chunk][number].append(_Part(piece, first + done, count, place))
                done += count
        self.devices = tuple(numbers)
        self.chunks: Mapping[int, Sequence[tuple[int, Sequence[_Part]]]] = {
            chunk: tuple(by_device.items()) for chunk, by_device in chunks.items()
        }


@final
class DeviceFiller:
    """Fills the chunks of one checkpoint with what lies on devices. Called by one thread at a time.

    `begin` is called in the thread that called `save()`; then a pipeline has it, and ends it exactly once. Whoever
    does not hand it to a pipeline after all ends it; a second end does nothing.

    Args:
        layout: what goes where.
        sources: by piece, what its device copies from; kept until the end.
    """

    def __init__(self, layout: DeviceLayout, sources: dict[int, Any]) -> None:
        self._layout, self._sources = layout, sources
        self._captures: list[Capture] | None = None

    def __repr__(self) -> str:
        return f"<DeviceFiller of {len(self._layout.device_of)} pieces on {len(self._layout.devices)} device(s)>"

    @property
    def devices(self) -> Sequence[Device]:
        """The devices that hold something of this checkpoint."""
        return self._layout.devices

    @property
    def captures(self) -> Sequence[Capture]:
        """The captures under way, one for each device; none before `begin` and after `end`."""
        return tuple(self._captures or ())

    def place_of(self, piece: int) -> tuple[Device, Any, int]:
        """Give a piece's device, what that copies from, and the byte of it where the piece begins; before `end`."""
        device = self._layout.devices[self._layout.device_of[piece]]
        return device, self._sources[piece], self._layout.first_of[piece]

    def shadow(self, pieces: Iterable[int]) -> list[int]:
        """Copy pieces within their devices' memory and fill from there; give those for which there is no room.

        Raises UsageError after `begin`, since a copy must be made before the capture that takes it away begins.
        """
        if self._captures is not None:
            raise UsageError("shadow() comes before begin()")
        wanted: dict[int, list[int]] = defaultdict(list)
        for piece in pieces:
            wanted[self._layout.device_of[piece]].append(piece)
        left: list[int] = []
        for number, mine in wanted.items():
            shadows = self._layout.devices[number].shadow([self._sources[piece] for piece in mine])
            if shadows is None:
                left += mine
            else:
                self._sources.update(zip(mine, shadows, strict=True))
        return left

    def begin(self) -> None:
        """Begin a capture of every device: its copies come after all that the calling thread has queued by now."""
        if self._captures is not None:
            raise UsageError("a filler begins once")
        self._captures = []
        try:
            for device in self._layout.devices:
                self._captures.append(device.begin())
        except BaseException:
            self.end()
            raise

    def has(self, chunk: int) -> bool:
        """Tell whether anything of this chunk lies on a device."""
        return chunk in self._layout.chunks

    def fill(self, chunk: int, address: int, nbytes: int) -> Ticket:
        """Queue copies of what lies on devices of a chunk into its buffer; the rest of it is not touched.

        Raises UsageError before `begin` and after `end`, and whatever a device raises; no copy runs then.
        """
        captures, tickets = self._captures, _Tickets()
        if not captures:
            raise UsageError("fill() is legal between begin() and end() only")
        try:
            for number, parts in self._layout.chunks[chunk]:
                runs = [Run(self._sources[piece], first, length, place) for piece, first, length, place in parts]
                tickets.add(captures[number].copy(address, nbytes, runs))
        except BaseException:
            tickets.wait(_ORPHANS_S)  # the buffer is about to be used for something else
            raise
        return tickets

    def end(self) -> None:
        """End every capture once, and let the sources go; raises the first error of a device, after all were ended."""
        captures, self._captures = self._captures, []
        self._sources = {}
        errors: list[Exception] = []
        for capture in captures or ():
            try:
                capture.end()
            except Exception as error:
                errors.append(error)
        if errors:
            raise errors[0]


@final
class _Tickets:
    """Copies of several devices as one ticket."""

    def __init__(self) -> None:
        self._open: list[Ticket] = []
        self._errors: list[Exception] = []

    def add(self, ticket: Ticket) -> None:
        self._open.append(ticket)

    def wait(self, timeout_s: float) -> bool:
        """Wait until all are made; False = time is up. Raises the first error once no other copy runs any more."""
        end = time.monotonic() + timeout_s
        while self._open:
            try:
                if not self._open[-1].wait(max(0.0, end - time.monotonic())):
                    return False
            except Exception as error:
                self._errors.append(error)
            self._open.pop()
        if self._errors:
            raise self._errors[0]
        return True
