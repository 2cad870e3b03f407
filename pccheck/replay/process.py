"""One trainer, as its supervisor sees it (floor 4: imports replay.told, replay.places).

It is a session of its own, so that whatever it starts dies with it, and a Ctrl-C at the terminal reaches the supervisor
alone, which ends all trainers. A trainer whose supervisor died without doing so ends by itself: nobody listens.
"""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Self, final

import msgspec

from pccheck.errors import DeadlineError, PccheckError
from pccheck.replay import places
from pccheck.replay.told import DECODER, MOST_BYTES, Began, Go, Job, Missing, Ready, Told

_KILL = 9  # SIGKILL; the module that names it is for those who handle signals
_READY_S = 180.0  # frameworks take seconds to import; a busy machine takes longer
_BEGAN_S = 180.0
_DEAD_S = 60.0  # until a killed process is gone: it may be in the middle of a large write


class TrainerError(PccheckError):
    """A trainer ended by itself or does not answer: `contender`, `reason` and `printed` (the end of its output)."""

    def __init__(self, contender: str, reason: str, printed: str) -> None:
        super().__init__(f"the trainer of {contender} {reason}. It printed:\n{printed or '(nothing)'}")
        self.contender, self.reason, self.printed = contender, reason, printed


@final
class Trainer:
    """A process that trains; it has begun to import and set up. Leaving the `with` block kills it. Not thread-safe.

    Args:
        job: what it does.
        folder: where a file without a name takes what it prints.
    """

    def __init__(self, job: Job, folder: Path) -> None:
        self._job, self._killed = job, False
        self._log = places.log_file(folder)
        self._link, theirs = multiprocessing.Pipe()
        command = [sys.executable, "-P", "-m", "pccheck.replay.trainer", str(theirs.fileno())]
        try:
            self._process = subprocess.Popen(
                [*command, msgspec.json.encode(job).decode()],
                stdin=subprocess.DEVNULL, stdout=self._log, stderr=subprocess.STDOUT,
                pass_fds=(theirs.fileno(),), start_new_session=True,
            )  # fmt: skip
        except BaseException:
            self._link.close()
            self._log.close()
            raise
        finally:
            theirs.close()

    @property
    def pid(self) -> int:
        """The process."""
        return self._process.pid

    def await_ready(self) -> Ready | Missing:
        """Wait until it can be told to go; raises TrainerError."""
        told = self._await(time.monotonic() + _READY_S)
        if not isinstance(told, (Ready, Missing)):
            raise self._garbled()
        return told

    def go(self, digests: dict[int, str]) -> float:
        """Tell it to go; gives when, on the monotonic clock. Raises TrainerError if it is gone."""
        at = time.monotonic()
        try:
            self._link.send_bytes(msgspec.json.encode(Go(digests)))
        except OSError:
            raise self._ended() from None
        return at

    def await_began(self) -> Began:
        """Wait until it has restored; raises TrainerError."""
        told = self._await(time.monotonic() + _BEGAN_S)
        if not isinstance(told, Began):
            raise self._garbled()
        return told

    def follow(self, until: float) -> list[Told]:
        """Give what it tells until then, on the monotonic clock; raises TrainerError if it ends before."""
        told = []
        while (left := until - time.monotonic()) > 0:
            if self._link.poll(left):
                told.append(self._receive())
        return told

    def kill(self) -> list[Told]:
        """Kill it and whatever it started, with SIGKILL; give what it had told and nobody had heard."""
        self._kill()
        told: list[Told] = []
        with suppress(EOFError, OSError, msgspec.DecodeError):  # the last message may have been cut short
            while self._link.poll(0):
                told.append(DECODER.decode(self._link.recv_bytes(MOST_BYTES)))
        return told

    def close(self) -> None:
        """Kill it if it lives, and close what it was heard through. Idempotent."""
        try:
            self._kill()
        finally:
            self._link.close()
            self._log.close()

    def _kill(self) -> None:
        if self._killed:
            return
        with suppress(ProcessLookupError):  # a session keeps the number of its first process when that is gone
            os.killpg(self._process.pid, _KILL)
        try:
            self._process.wait(_DEAD_S)
        except subprocess.TimeoutExpired:
            raise DeadlineError(f"killed process {self._process.pid} to be gone", _DEAD_S) from None
        self._killed = True

    def _await(self, until: float) -> Told:
        if not self._link.poll(max(0.0, until - time.monotonic())):
            self._kill()
            raise TrainerError(self._job.contender, "did not answer in time", places.tail(self._log))
        return self._receive()

    def _receive(self) -> Told:
        try:
            return DECODER.decode(self._link.recv_bytes(MOST_BYTES))
        except (EOFError, ConnectionError):
            raise self._ended() from None
        except (OSError, msgspec.DecodeError):  # OSError: of a message that says to be longer than any
            raise self._garbled() from None

    def _garbled(self) -> TrainerError:
        """Kill it: what else it says cannot be told from noise."""
        self._kill()
        reason = "wrote something else where it tells its supervisor what it does"
        return TrainerError(self._job.contender, reason, places.tail(self._log))

    def _ended(self) -> TrainerError:
        try:
            status = self._process.wait(_DEAD_S)
            reason = f"ended by itself, with status {status}"
        except subprocess.TimeoutExpired:
            reason = "does not listen any more"
        self._kill()
        return TrainerError(self._job.contender, reason, places.tail(self._log))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()
