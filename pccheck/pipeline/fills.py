"""Chunks of which devices bring bytes: a thread has them filled, job after job, in order (floor 2: imports floor 0)."""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import NamedTuple, Protocol, TypeVar, final

from pccheck.devices import Ticket
from pccheck.errors import DeadlineError, UsageError
from pccheck.pipeline.interface import Filler

FILL_TIMEOUT_S = 600.0  # default of the time that copies of one chunk may take
NO_BUFFERS = "a free buffer: devices do not end their copies to any of them"  # what nobody can wait for
# How long a device is waited for before it is seen whether another chunk can be queued: doubled each time, since a
# device that is far behind must not cost the interpreter, up to what a gate that waits for it may lose.
FIRST_LOOK_S, LAST_LOOK_S = 0.002, 0.05
SLICE_S = 1.0  # longest wait at a stretch, so that a job that was cancelled is noticed
GRACE_S = 5.0  # how long copies may still take once their job has failed
IDLE_S = 60.0  # how often the thread looks around even if nobody calls it

Begun = TypeVar("Begun")


class Fillable(Protocol):
    """What the filling of a job needs of it. Only `take_fill` waits; errors are bugs."""

    def cancel(self) -> None:
        """Cancel the job."""

    def fills_left(self) -> int:
        """Chunks that have not been taken; 0 as soon as the job has failed."""

    def failed(self) -> bool:
        """Tell whether the job has failed."""

    def take_fill(self, timeout_s: float) -> tuple[int, int, int] | None:
        """Wait for the next chunk to fill: index, address and bytes of its buffer; None = time is up, or none is left.

        With 0 seconds it must not wait for a buffer: those that are filled just now could be the ones it waits for.
        """

    def fill_done(self, chunk: int) -> None:
        """Hand a taken chunk on: its copies were made."""

    def drop_fill(self, chunk: int, *, reusable: bool) -> None:
        """Give a taken chunk of a failed job up; its buffer is lost where a device may still write to it."""

    def reclaim(self, chunk: int) -> None:
        """Make a lost buffer free again."""

    def fail_fill(self, error: BaseException) -> None:
        """Fail the job with this error unless it has ended; the first error stays."""


class _Copies(NamedTuple):
    """Copies into one chunk's buffer, queued at `since`."""

    job: Fillable
    filler: Filler  # keeps what is copied from
    chunk: int
    ticket: Ticket
    since: float


@final
class Order:
    """One job to fill, which ends its filler exactly once.

    Args:
        filler: the job's.
        timeout_s: how long the copies of one chunk may take.
    """

    def __init__(self, filler: Filler, timeout_s: float) -> None:
        self._filler, self._unended = filler, [filler]
        self._timeout_s = timeout_s
        self._grace_end: float | None = None
        self.job: Fillable | None = None  # once it is the thread's to fill

    def end(self) -> BaseException | None:
        """End the filler unless that was done; gives what it raised."""
        try:
            filler = self._unended.pop()  # one step: two threads cannot both have it
        except IndexError:
            return None
        try:
            filler.end()
        except BaseException as error:
            return error
        return None

    def fill(self, job: Fillable) -> list[_Copies]:
        """Have every chunk of the job filled; gives the copies that did not end, whose buffers are lost until they do.

        Copies of later chunks are queued, as far as buffers go, while earlier ones are awaited: the device must not
        wait for this thread, and a gate need only wait until they are queued. Whatever goes wrong fails the job.
        """
        pending: deque[_Copies] = deque()
        late: list[_Copies] = []
        look_s = FIRST_LOOK_S
        while (left := job.fills_left()) or pending:
            place = job.take_fill(0.0 if pending else SLICE_S) if left else None
            if place is not None:
                self._queue(job, place, pending)
            elif pending:
                ended = self._finish(pending[0], look_s if left else SLICE_S, last=len(pending) == 1)
                if ended is False:
                    late.append(pending[0])
                if ended is not None:
                    pending.popleft()
                    look_s = FIRST_LOOK_S
                else:
                    look_s = min(2 * look_s, LAST_LOOK_S)
        error = self.end()
        if error is not None:
            job.fail_fill(error)
        return late

    def _queue(self, job: Fillable, place: tuple[int, int, int], pending: deque[_Copies]) -> None:
        chunk, address, nbytes = place
        try:
            if not self._filler.has(chunk):
                raise UsageError(f"a piece of chunk {chunk} has the address 0, but its filler has nothing of it")
            ticket = self._filler.fill(chunk, address, nbytes)
        except BaseException as error:  # no copy runs then: a filler promises that
            job.fail_fill(error)
            job.drop_fill(chunk, reusable=True)
        else:
            pending.append(_Copies(job, self._filler, chunk, ticket, time.monotonic()))

    def _finish(self, copies: _Copies, slice_s: float, *, last: bool) -> bool | None:
        """Wait for copies, and hand their chunk on or give it up; None = not yet, False = they do not end."""
        job, error = copies.job, None
        try:
            ended = self._await(copies, slice_s)
        except BaseException as raised:
            ended, error = True, raised
        if ended is None:
            return None
        if last and error is None and not job.fills_left():
            error = self.end()  # before the job can be seen to be captured: what it raises is told
        if error is not None:
            job.fail_fill(error)
        if ended and error is None:
            job.fill_done(copies.chunk)
        else:
            job.drop_fill(copies.chunk, reusable=ended)
        return ended

    def _await(self, copies: _Copies, slice_s: float) -> bool | None:
        now, limit = time.monotonic(), copies.since + self._timeout_s
        if copies.job.failed():
            self._grace_end = self._grace_end or now + GRACE_S
            limit = min(limit, self._grace_end)
        if copies.ticket.wait(min(max(0.0, limit - now), slice_s)):
            return True
        if now < limit:
            return None
        copies.job.fail_fill(DeadlineError(f"a device to copy chunk {copies.chunk}", now - copies.since))
        return False


@final
class FillThread:
    """A thread that fills jobs in the order of `put`; started with the first of them. Thread-safe.

    It ends after `stop`, but not before every copy has ended: what a device still writes to must not be unmapped. A
    daemon, so that a stuck device cannot keep the interpreter from ending.

    Args:
        timeout_s: how long the copies of one chunk may take.
    """

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._orders: queue.SimpleQueue[Order | None] = queue.SimpleQueue()
        self._late: list[_Copies] = []
        self._thread: threading.Thread | None = None
        self._submitting = threading.Lock()  # held over a submission and its `put`: their orders must be the same

    def submit(self, filler: Filler | None, begin: Callable[[Order | None], Begun]) -> Begun:
        """Have `begin` submit a job, which must `put` it here, and give that job; its filler is ended if that fails.

        Args:
            filler: the job's; None = nothing of it is to be filled.
            begin: called with the order to put, None without a filler.
        """
        if filler is None:
            return begin(None)
        order = Order(filler, self._timeout_s)
        try:
            with self._submitting:
                self._start()  # before the job: a system may refuse another thread
                return begin(order)
        except BaseException as error:
            if order.job is not None:
                order.job.cancel()  # a Ctrl-C just now: the thread ends it
            elif (second := order.end()) is not None:
                error.add_note(f"and ending the filler failed: {second!r}")
            raise

    def _start(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="pccheck-fill", daemon=True)
        if self._thread.ident is None:  # also where it could not be started the last time
            self._thread.start()

    def put(self, order: Order, job: Fillable) -> None:
        """Have a job filled, after those before it."""
        order.job = job
        self._orders.put(order)

    def stop(self) -> None:
        """Have the thread end when it has filled what was put before."""
        self._orders.put(None)

    def close(self, start: float, timeout_s: float) -> None:
        """Stop, and wait for its end; raises DeadlineError `timeout_s` after `start`, a time of the monotonic clock."""
        self.stop()
        thread = self._thread
        if thread is None or thread.ident is None:
            return
        thread.join(max(0.0, start + timeout_s - time.monotonic()))
        if thread.is_alive():
            raise DeadlineError(f"a device to end its copies of {len(self._late)} chunks", timeout_s)

    def _run(self) -> None:
        stopping = False
        while not stopping or self._late:
            try:
                order = self._orders.get(timeout=SLICE_S if self._late else IDLE_S)
            except queue.Empty:
                self._look_after_late()
                continue
            if order is None:
                stopping = True
            elif order.job is not None:
                self._late += order.fill(order.job)
            del order  # what it keeps is not this thread's
            self._look_after_late()

    def _look_after_late(self) -> None:
        self._late = [copies for copies in self._late if not _has_ended(copies)]


def _has_ended(copies: _Copies) -> bool:
    try:
        if not copies.ticket.wait(0.0):
            return False
    except Exception:
        pass  # it has failed, and so it has ended
    copies.job.reclaim(copies.chunk)
    return True
