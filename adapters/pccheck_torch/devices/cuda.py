"""CUDA devices: streams, events and pinned memory of torch.cuda (imports torch, pccheck_torch.devices.streams).

Nothing here runs unless a tensor is on a CUDA device.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, final

import torch
from torch import Tensor

from pccheck.deadlines import reached
from pccheck_torch.devices.streams import Event, StreamDevice

_PORTABLE = 1  # cudaHostRegisterPortable: pinned for all devices of the process


@functools.cache
def cuda_device(index: int) -> StreamDevice:
    """Give the device of this number; always the same object."""
    return StreamDevice(CudaQueues(index))


@final
class CudaQueues:
    """The streams and the memory of one CUDA device. Thread-safe.

    Args:
        index: its number.
    """

    def __init__(self, index: int) -> None:
        self.name = f"cuda:{index}"
        self._device = torch.device("cuda", index)
        self._side: CudaStream | None = None

    def current(self) -> CudaStream:
        """Give the stream on which the calling thread works on this device."""
        return CudaStream(torch.cuda.current_stream(self._device))

    def side(self) -> CudaStream:
        """Give the stream of the copies; made when it is first asked for."""
        if self._side is None:
            self._side = CudaStream(torch.cuda.Stream(self._device))  # type: ignore[no-untyped-call]
        return self._side

    def free_bytes(self) -> int:
        """Give what the driver has left, and what torch's allocator has reserved but not given out."""
        free, _ = torch.cuda.mem_get_info(self._device)
        kept = torch.cuda.memory_reserved(self._device) - torch.cuda.memory_allocated(self._device)
        return int(free + kept)

    def register(self, address: int, nbytes: int) -> bool:
        """Pin host memory with cudaHostRegister; False where the driver refuses."""
        with torch.cuda.device(self._device):
            if int(_runtime().cudaHostRegister(address, nbytes, _PORTABLE)) == 0:
                return True
            self._take_error()
            return False

    def unregister(self, address: int) -> None:
        """Unpin; a driver that is being shut down may refuse, and then it has unpinned everything."""
        with torch.cuda.device(self._device):
            if int(_runtime().cudaHostUnregister(address)) != 0:
                self._take_error()

    def _take_error(self) -> None:
        """Take the error that CUDA remembers of a refused call, which the next launch of a kernel would raise."""
        try:
            torch.empty(1, device=self._device).zero_()
        except RuntimeError:
            pass


def _runtime() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]


@final
class CudaStream:
    """A CUDA stream. Thread-safe.

    Args:
        stream: torch's.
    """

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def record(self) -> CudaEvent:
        """Give the point behind everything that is queued by now."""
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(self._stream)
        return CudaEvent(event)

    def wait(self, event: Event) -> None:
        """Let everything queued from now on come after an event."""
        assert isinstance(event, CudaEvent), "streams of one process wait for CUDA events only"
        self._stream.wait_event(event.event)

    def copy(self, targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
        """Queue copies; one call for all, in which the interpreter's lock is given up once."""
        with torch.no_grad(), torch.cuda.stream(self._stream):
            torch._foreach_copy_(list(targets), list(sources), non_blocking=True)


@final
class CudaEvent:
    """A point in a CUDA stream.

    Args:
        event: torch's, recorded.
    """

    def __init__(self, event: Any) -> None:
        self.event = event

    def wait(self, timeout_s: float) -> bool:
        """Wait by asking now and then: `synchronize` knows no time-out, and a hung GPU must not hang the program."""
        return reached(self.event.query, timeout_s)
