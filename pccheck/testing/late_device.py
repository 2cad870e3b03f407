"""A device of host memory whose copies are made late, by its own thread, for checks of pipelines (beside the floors).

Imports floors 0 to 2. What it has not copied yet it copies from where it is by then, and to where it was told to: a
buffer that was given away too soon is written to under its new owner, a source that was changed too soon is seen.
"""

from __future__ import annotations

import ctypes
import queue
import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import final

from pccheck.pipeline.interface import Job, Pipeline
from pccheck.state.plan import Chunk
from pccheck.storage.media import address_of
from pccheck.storage.medium import Medium
from pccheck.testing import pipelines
from pccheck.testing.pipelines import CHUNK
from pccheck.testing.promises import check
from pccheck.testing.states import LONG_S, State, check_file, make_state


@final
class LateTicket:
    """Copies that a LateDevice was told to make."""

    def __init__(self, moves: Sequence[tuple[int, int, int]], error: BaseException | None) -> None:
        self.moves = moves  # source, bytes, target
        self.error = error
        self.ended = threading.Event()

    def wait(self, timeout_s: float) -> bool:
        """Wait until they are made; False = time is up; raises what they fail with."""
        check(timeout_s <= 1.0, "a ticket is waited for in slices of at most a second, so that cancelling is noticed")
        if not self.ended.wait(timeout_s):
            return False
        if self.error is not None:
            raise self.error
        return True


@final
class LateDevice:
    """Makes copies in order, `delay_s` seconds late, and none while it is held. Thread-safe; close it at the end."""

    def __init__(self, delay_s: float = 0.0) -> None:
        self._delay_s = delay_s
        self._queue: queue.SimpleQueue[LateTicket | None] = queue.SimpleQueue()
        self._going_on = threading.Event()
        self._going_on.set()
        self._fail: tuple[int, BaseException] | None = None
        self.told = self.made = 0  # tickets
        self._thread = threading.Thread(target=self._run, name="late-device", daemon=True)
        self._thread.start()

    def copy(self, moves: Sequence[tuple[int, int, int]]) -> LateTicket:
        """Queue copies, each source, bytes and target."""
        self.told += 1
        fails = self._fail is not None and self._fail[0] == self.told
        ticket = LateTicket(() if fails else moves, self._fail[1] if fails and self._fail else None)
        self._queue.put(ticket)
        return ticket

    def fail(self, number: int, error: BaseException) -> None:
        """Have the ticket of this number, counted from 1 from now on, fail with an error; nothing is copied for it."""
        self._fail = self.told + number, error

    def hold(self) -> None:
        """Make no further copy."""
        self._going_on.clear()

    def go_on(self) -> None:
        """Make them again."""
        self._going_on.set()

    def is_told(self, number: int) -> bool:
        """Wait until so many tickets were asked for in all; False after LONG_S."""
        deadline = time.monotonic() + LONG_S
        while self.told < number and time.monotonic() < deadline:
            time.sleep(0.002)
        return self.told >= number

    def close(self) -> None:
        """Make what is queued, and stop."""
        self.go_on()
        self._queue.put(None)
        self._thread.join(LONG_S)
        check(not self._thread.is_alive(), "a device comes to its end")

    def _run(self) -> None:
        while (ticket := self._queue.get(timeout=10 * LONG_S)) is not None:
            time.sleep(self._delay_s)
            self._going_on.wait(10 * LONG_S)
            for source, nbytes, target in ticket.moves:
                ctypes.memmove(target, source, nbytes)
            self.made += 1
            ticket.ended.set()


@final
class LateFiller:
    """Fills what of a state lies on a LateDevice, and checks how a pipeline calls it.

    Args:
        state: the state; what lies on the device is one of its arrays like any other.
        pieces: which of its pieces do.
        device: that copies them.
        memory: of the pipeline.
    """

    def __init__(self, state: State, pieces: Sequence[int], device: LateDevice, memory: tuple[int, int]) -> None:
        self._state, self._device, self._memory = state, device, memory
        self._pieces = frozenset(i for i in pieces if state.layout.pieces[i].length)
        self.chunks = [i for i, chunk in enumerate(state.layout.chunks) if self._moves(chunk, 0)]  # on the device
        self.filled: list[int] = []
        self.ends = 0
        self.raises: dict[int, BaseException] = {}  # by chunk: what fill() raises
        self.end_raises: BaseException | None = None
        self.denied: set[int] = set()  # has() says that it has nothing of these

    @property
    def addresses(self) -> list[int]:
        """Those of the state, with 0 for what lies on the device."""
        return [0 if i in self._pieces else a for i, a in enumerate(self._state.addresses)]

    def has(self, chunk: int) -> bool:
        """Tell whether anything of this chunk lies on the device."""
        return chunk in self.chunks and chunk not in self.denied

    def fill(self, chunk: int, address: int, nbytes: int) -> LateTicket:
        """Queue the copies of one chunk."""
        start, size = self._memory
        check(start <= address and address + nbytes <= start + size, "buffers lie in the pipeline's memory")
        check(nbytes == self._state.layout.chunks[chunk].stored_bytes, "a buffer holds one chunk")
        check(threading.current_thread().name == "pccheck-fill", "fill() is called by the thread for it")
        check(not self.ends and chunk not in self.filled, "each chunk is filled once, and none after the end")
        self.filled.append(chunk)
        if chunk in self.raises:
            raise self.raises[chunk]
        ctypes.memset(address, 0xA5, nbytes)  # what is not brought is not zero by chance
        return self._device.copy(self._moves(self._state.layout.chunks[chunk], address))

    def end(self) -> None:
        """Count the calls."""
        self.ends += 1
        if self.end_raises is not None:
            raise self.end_raises

    def _moves(self, chunk: Chunk, address: int) -> list[tuple[int, int, int]]:
        moves, end = [], chunk.start + chunk.data_bytes
        pieces = self._state.layout.pieces
        for index in self._pieces:
            piece = pieces[index]
            first, last = max(piece.offset, chunk.start), min(piece.offset + piece.length, end)
            if first < last:
                source = address_of(self._state.arrays[index].data) + first - piece.offset
                moves.append((source, last - first, address + first - chunk.start))
        return moves


@contextmanager
def late_device(delay_s: float = 0.0) -> Iterator[LateDevice]:
    """Give a device that is closed at the end."""
    device = LateDevice(delay_s)
    try:
        yield device
    finally:
        device.close()


def submit(pipeline: Pipeline, state: State, filler: LateFiller, medium: Medium, prologue: bytes | None = None) -> Job:
    """Start a job that is filled."""
    return pipeline.submit(state.layout, filler.addresses, state.arrays, medium, prologue=prologue, filler=filler)


def written(job: Job, state: State, want: list[bytes], medium: Medium) -> None:
    """Wait for the end of a job, and check what it stored."""
    check(job.wait_written(LONG_S), "a job ends")
    check_file(want, state.layout, medium, job)


def finish(pipeline: Pipeline, *fillers: LateFiller) -> None:
    """Close a pipeline all of whose jobs have ended, and check that their fillers were ended."""
    pipelines.finish(pipeline)
    for filler in fillers:
        check(filler.ends == 1, f"a filler is ended exactly once, not {filler.ends} times")
        check(filler.filled == sorted(filler.filled), "chunks are filled in order")


def spread_state(rng: random.Random, chunks: int = 6) -> State:
    """A state of which pieces lie across the borders of chunks."""
    return make_state(rng, [CHUNK - 100, *[CHUNK] * (chunks - 2), 5000], CHUNK)


def wait_until(holds: Callable[[], bool]) -> None:
    """Wait until this holds, at most LONG_S."""
    deadline = time.monotonic() + LONG_S
    while not holds() and time.monotonic() < deadline:
        time.sleep(0.01)
