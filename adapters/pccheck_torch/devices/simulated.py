"""A device whose streams run late, for tests without a GPU (imports torch, pccheck_torch.devices.streams).

Tensors of a `SimulatedDevice` lie in host memory, but are changed only by what is queued on its compute stream, which a
thread runs later. How late is told stream by stream, so that a missing order between program and captures shows every
time and not now and then:

    with SimulatedDevice() as device:
        device.compute.pace = "when_needed"
        weights = device.hold(torch.zeros(1000))          # what save() is given
        device.queue(lambda: weights.memory.add_(1))      # a kernel
        checkpointer.save(1, {"weights": weights})
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Literal, Self, final

import torch
from torch import Tensor

from pccheck_torch.devices.streams import Event, StreamDevice

Pace = Literal["now", "when_needed", "held"]


@final
class SimulatedDevice:
    """Two streams, each a thread, and the memory of whatever `hold` was given. Thread-safe; close it.

    Args:
        name: for messages.
        compute_lag_s, copy_lag_s: seconds that each thing queued takes longer.
        free_bytes: memory for shadows.
        timeout_s: the longest that one stream waits for the other, and `synchronize` for a stream.
    """

    def __init__(
        self,
        name: str = "simulated:0",
        *,
        compute_lag_s: float = 0.0,
        copy_lag_s: float = 0.0,
        free_bytes: int = 1 << 40,
        timeout_s: float = 60.0,
    ) -> None:
        self.name = name
        self.compute = SimulatedStream(f"{name} compute", compute_lag_s, timeout_s)
        self.copies = SimulatedStream(f"{name} copies", copy_lag_s, timeout_s)
        self.free = free_bytes
        self.pinned: dict[int, int] = {}
        self.device = StreamDevice(self)

    def hold(self, tensor: Tensor) -> SimulatedTensor:
        """Give a leaf over the memory of a dense tensor; from now on only what is queued may change that."""
        held = tensor.detach().as_subclass(SimulatedTensor)
        held.owner, held.memory = self, tensor.detach()
        held._local_tensor = held.memory
        return held

    def queue(self, work: Callable[[], object]) -> None:
        """Queue work on the compute stream, as launching a kernel does, and return."""
        self.compute.queue(work)

    def synchronize(self) -> None:
        """Wait until both streams have done everything that they were given."""
        self.compute.synchronize()
        self.copies.synchronize()

    def close(self) -> None:
        """Do what is queued and stop both threads; raises the first error of what was queued."""
        try:
            self.compute.close()
        finally:
            self.copies.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    # -- Queues ------------------------------------------------------------------------------------------------------

    def current(self) -> SimulatedStream:
        """Give the compute stream: all threads work on it."""
        return self.compute

    def side(self) -> SimulatedStream:
        """Give the stream of the copies."""
        return self.copies

    def free_bytes(self) -> int:
        """Give the memory for shadows."""
        return self.free

    def register(self, address: int, nbytes: int) -> bool:
        """Note that host memory is pinned."""
        self.pinned[address] = nbytes
        return True

    def unregister(self, address: int) -> None:
        """Note that it is not any more."""
        del self.pinned[address]


class SimulatedTensor(torch.Tensor):
    """A leaf on a simulated device; `memory` is the plain tensor that work queued on `owner` may read and change."""

    owner: SimulatedDevice
    memory: Tensor
    _local_tensor: Tensor  # by this name, as in a DTensor, optimizers are found to own it

    def __pccheck_memory__(self) -> tuple[StreamDevice, Tensor]:
        """Give the device and the memory."""
        return self.owner.device, self.memory

    def __pccheck_restore__(self, value: Tensor) -> SimulatedTensor:
        """Give the values as a leaf on the same device."""
        return self.owner.hold(value)


@final
class SimulatedStream:
    """Does what is queued, in order, on a thread of its own. Thread-safe.

    `pace` may be set at any time: "now" = at once; "when_needed" = only what somebody waits for, be it another stream
    or the program, and thus as late as can be; "held" = nothing.

    Args:
        name: for messages.
        lag_s: seconds that each thing takes longer.
        timeout_s: the longest wait for another stream, and of `synchronize`.
    """

    def __init__(self, name: str, lag_s: float, timeout_s: float) -> None:
        self.name, self.lag_s, self._timeout_s = name, lag_s, timeout_s
        self._changed = threading.Condition()
        self._pace: Pace = "now"
        self._queue: deque[Callable[[], object]] = deque()
        self._queued = self._done = self._needed = 0  # how many things were queued, done, waited for
        self._closed = False
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    @property
    def pace(self) -> Pace:
        """How soon it does what it is given."""
        return self._pace

    @pace.setter
    def pace(self, pace: Pace) -> None:
        with self._changed:
            self._pace = pace
            self._changed.notify_all()

    def queue(self, work: Callable[[], object]) -> int:
        """Queue work and give its number, from 1."""
        with self._changed:
            if self._closed:
                raise RuntimeError(f"stream {self.name} is closed")
            self._queue.append(work)
            self._queued += 1
            self._changed.notify_all()
            return self._queued

    def record(self) -> SimulatedEvent:
        """Give the point behind everything that is queued by now."""
        with self._changed:
            return SimulatedEvent(self, self._queued)

    def wait(self, event: Event) -> None:
        """Let everything queued from now on come after an event."""
        self.queue(lambda: self._await(event))

    def copy(self, targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
        """Queue copies."""
        self.queue(lambda: torch._foreach_copy_(list(targets), list(sources)))

    def reach(self, number: int, timeout_s: float) -> bool:
        """Wait until so many things were done; what is waited for is needed."""
        with self._changed:
            if timeout_s > 0:
                self._needed = max(self._needed, number)
                self._changed.notify_all()
            there = self._changed.wait_for(lambda: self._error is not None or self._done >= number, timeout_s)
            if self._error is not None:
                raise RuntimeError(f"what was queued on stream {self.name} failed") from self._error
            return there

    def synchronize(self) -> None:
        """Wait until everything queued by now was done; TimeoutError; raises what failed."""
        if not self.record().wait(self._timeout_s):
            raise TimeoutError(f"stream {self.name} did not finish within {self._timeout_s} s")

    def close(self) -> None:
        """Do what is queued, and stop; raises what failed, once."""
        self.pace = "now"
        with self._changed:
            was_closed, self._closed = self._closed, True
            self._changed.notify_all()
        self._thread.join(self._timeout_s)
        if self._error is not None and not was_closed:
            raise RuntimeError(f"what was queued on stream {self.name} failed") from self._error

    def _await(self, event: Event) -> None:
        if not event.wait(self._timeout_s):
            raise TimeoutError(f"stream {self.name} waited {self._timeout_s} s for another")

    def _run(self) -> None:
        while (work := self._next()) is not None:
            try:
                if self.lag_s:
                    time.sleep(self.lag_s)
                work()
            except BaseException as error:
                with self._changed:
                    self._error = self._error or error
            del work  # it may hold tensors
            with self._changed:
                self._done += 1
                self._changed.notify_all()

    def _next(self) -> Callable[[], object] | None:
        with self._changed:
            self._changed.wait_for(self._may_go_on)
            return self._queue.popleft() if self._queue else None

    def _may_go_on(self) -> bool:
        if not self._queue:
            return self._closed
        return self._pace == "now" or (self._pace == "when_needed" and self._needed > self._done)


@final
class SimulatedEvent:
    """A point in a simulated stream.

    Args:
        stream: which.
        number: how many things come before it.
    """

    def __init__(self, stream: SimulatedStream, number: int) -> None:
        self._stream, self._number = stream, number

    def wait(self, timeout_s: float) -> bool:
        """Wait until the stream has come there."""
        return self._stream.reach(self._number, timeout_s)
