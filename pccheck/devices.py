"""What a device must do so that leaves in its memory are captured: the protocol of adapters (floor 0: imports nothing).

A device works through queues ("streams") of its own, later than the program that fills them. A capture is right if it
comes after everything that the program had queued when it called `save()`, and before everything that changes a leaf
afterwards; the second is the gate's part (see `Guard`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol


class Run(NamedTuple):
    """Bytes to copy off a device.

    Args:
        source: what `DeviceBytes.source` gave.
        first: first byte of it, counted in C order.
        length: how many.
        place: where in the host buffer they go.
    """

    source: Any
    first: int
    length: int
    place: int


class Ticket(Protocol):
    """Copies that a device was told to make."""

    def wait(self, timeout_s: float) -> bool:
        """Wait, without the interpreter's lock, until they are made; False = time is up. Raises what went wrong."""


class Capture(Protocol):
    """The copies of one checkpoint off one device. Called by one thread at a time, but for `order`."""

    def copy(self, address: int, nbytes: int, runs: Sequence[Run]) -> Ticket:
        """Queue copies into the host buffer of `nbytes` bytes at `address`, and return without waiting for them."""

    def order(self, timeout_s: float) -> bool:
        """Have what the calling thread queues from now on come after all copies queued here; False = time is up.

        It need not wait for them where the device can put them in order. Called by other threads than `copy`, too, and
        also after `end`.
        """

    def end(self) -> None:
        """No copy will be queued any more, be it that all were or that the checkpoint failed. May be called twice."""


class Device(Protocol):
    """One device, shared by all leaves in its memory. Thread-safe; hashable, equal for the same device."""

    name: str

    def begin(self) -> Capture:
        """Open a capture, in the thread that called `save()`: what is queued by now, its copies come after."""

    def shadow(self, sources: Sequence[Any]) -> list[Any] | None:
        """Copy sources within the device's memory, in order with what is queued; None where there is no room."""

    def register(self, address: int, nbytes: int) -> None:
        """Tell the device of host memory that it will copy to, so that it can do that fast; best effort."""

    def unregister(self, address: int, nbytes: int) -> None:
        """Undo `register`, before the memory is unmapped."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceBytes:
    """Bytes of a leaf in a device's memory: dense, in C order or as the spec's "stride" says.

    Args:
        device: whose memory.
        source: what the device copies from; keeps the memory alive.
        nbytes: how many.
        alias: as in HostBytes.
        stable: nobody else can change these bytes.
    """

    device: Device
    source: Any
    nbytes: int
    alias: object = None
    stable: bool = False


class Guard(Protocol):
    """Somebody who promises to call `Checkpointer.fence(owner=...)` before certain leaves are changed.

    Leaves that it owns are captured after `save()` has returned; all others are copied by value within it. Thread-safe.
    """

    def version(self) -> object:
        """Give what compares equal as long as `owners` of unchanged leaves (types, addresses, sizes) is unchanged."""

    def owners(self, kind: str, values: Sequence[Any]) -> Sequence[int]:
        """Give who owns each of these leaves of one kind: a number from 0, -1 = nobody.

        Called once per version about all leaves, and about owned leaves that moved since.
        """
