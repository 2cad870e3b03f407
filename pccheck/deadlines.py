"""Waits with a deadline for what knows none (floor 1: imports errors).

A host that hangs, rather than dies, answers neither yes nor no, nor does a hung accelerator: they must not hang a
trainer.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any, TypeVar, final

from pccheck.errors import CoordinatorLostError, PccheckError

T = TypeVar("T")
_POLL_S = (50e-6, 1e-3)  # first and longest pause: a chunk of 16 MiB leaves an accelerator in 0.3 to 1 ms


def reached(asked: Callable[[], bool], timeout_s: float) -> bool:
    """Ask now and then until the answer is yes; False = `timeout_s` seconds are over; raises what `asked` raises."""
    end, pause = time.monotonic() + timeout_s, _POLL_S[0]
    while not asked():
        left = end - time.monotonic()
        if left <= 0:
            return False
        time.sleep(min(pause, left))
        pause = min(2 * pause, _POLL_S[1])
    return True


@final
class Calls:
    """Runs calls to what ranks agree through, one after the other on a thread of its own, each with a deadline.

    `run` may be called by any thread; `lost` says why no call can succeed any more, "" while they can.

    Args:
        timeout_s: seconds, more than 0, after which what does not answer counts as lost.
        service: what the calls go to, for messages.
        host: what keeps that alive, for messages.
    """

    def __init__(self, timeout_s: float, *, service: str, host: str) -> None:
        self._timeout_s, self._service, self._host = timeout_s, service, host
        self._queue: SimpleQueue[tuple[Callable[[], Any], Future[Any]] | None] = SimpleQueue()
        self.lost = ""
        threading.Thread(target=self._work, name="pccheck calls", daemon=True).start()

    def run(self, call: Callable[[], T]) -> T:
        """Give what a call gives; errors of pccheck's pass through.

        Raises:
            CoordinatorLostError: it failed or took too long, or an earlier one did.
        """
        if self.lost:
            raise CoordinatorLostError(self.lost)
        future: Future[T] = Future()
        self._queue.put((call, future))
        try:
            return future.result(self._timeout_s)
        except PccheckError:
            raise
        except (RuntimeError, OSError, ValueError) as error:  # torch's stores and JAX's service raise the first
            what = str(error).splitlines()[0] if str(error) else f"no answer within {self._timeout_s:.1f} s"
            self.lost = (
                f"{self._service} is lost ({what}): is {self._host} gone? What all ranks agreed on before is safe; "
                "start the job again"
            )
            raise CoordinatorLostError(self.lost) from error

    def end(self) -> None:
        """Let the thread end after the calls that it was given."""
        self._queue.put(None)

    def _work(self) -> None:
        while (item := self._queue.get()) is not None:
            call, future = item
            try:
                future.set_result(call())
            except BaseException as error:
                future.set_exception(error)
