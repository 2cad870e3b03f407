"""Device copies of one checkpoint: told how far they are queued, and what may come after (floor 2: imports below)."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from typing import final

from pccheck.devices import Capture, Ticket
from pccheck.state.filling import DeviceFiller


@final
class OrderedFiller:
    """A filler that can put what its caller queues next behind its own copies. Thread-safe, but for one who fills.

    On a device the gate need not wait until leaves were copied: once their copies are queued, the device itself makes
    everything that is queued later wait for them. The host waits only while chunks wait for a free buffer.

    Args:
        inner: fills; `begin` has not been called.
    """

    def __init__(self, inner: DeviceFiller) -> None:
        self._inner = inner
        self._captures: Sequence[Capture] = ()
        self._changed = threading.Condition()
        self._queued = 0  # leading chunks of which all copies are queued
        self._ended = False

    def begin(self) -> None:
        """Begin, in the thread that called `save()`: the copies come after all that it has queued by now."""
        self._inner.begin()
        self._captures = self._inner.captures

    def has(self, chunk: int) -> bool:
        """Tell whether anything of this chunk lies on a device."""
        return self._inner.has(chunk)

    def fill(self, chunk: int, address: int, nbytes: int) -> Ticket:
        """Queue copies of what lies on devices of a chunk into its buffer; the rest of it is not touched."""
        ticket = self._inner.fill(chunk, address, nbytes)
        with self._changed:
            self._queued = chunk + 1
            self._changed.notify_all()
        return ticket

    def end(self) -> None:
        """Nothing will be filled any more, be it that all was or that the job failed; called exactly once."""
        try:
            self._inner.end()
        finally:
            with self._changed:
                self._ended = True
                self._changed.notify_all()

    def order(self, chunks: int, timeout_s: float) -> bool:
        """Put what the calling thread queues from now on behind the copies of the first `chunks` chunks.

        Waits until these are queued; False = time is up. Where a device cannot order, it waits for the copies.
        """
        with self._changed:
            if not self._changed.wait_for(lambda: self._ended or self._queued >= chunks, timeout_s):
                return False
        end = time.monotonic() + timeout_s
        return all(capture.order(max(0.0, end - time.monotonic())) for capture in self._captures)
