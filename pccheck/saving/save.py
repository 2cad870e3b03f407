"""One save: what the caller holds of it, and what the committer works on (floor 2: imports floors 0, 1)."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Literal

from pccheck.errors import SkippedError
from pccheck.format import Record
from pccheck.pipeline.interface import Job
from pccheck.state.planner import Prepared

Outcome = Literal["committed", "superseded", "skipped", "failed"]
Path = str | os.PathLike[str]
Link = Path | Callable[[], Path]


class Save:
    """A save under way. Thread-safe.

    Attributes:
        step: the caller's label.
        counter: its place in the order of all saves.
        report: whether later calls raise how it failed, too.
        began_s: when `save()` was called, on the monotonic clock.
        slot_wait_s, copy_wait_s: what `save()` waited for a place among those in flight, and for copies of the state.
        captured: resolves (to the step) once the caller's memory is not read any more.
        durable: resolves (to the step) once the checkpoint survives a crash; raises SkippedError or why it failed.
    """

    def __init__(self, step: int, counter: int, *, report: bool = True) -> None:
        self.step, self.counter, self.report = step, counter, report
        self.began_s, self.slot_wait_s, self.copy_wait_s = time.monotonic(), 0.0, 0.0
        self.captured: Future[int] = Future()
        self.durable: Future[int] = Future()
        for future in (self.captured, self.durable):
            future.set_running_or_notify_cancel()  # a save cannot be cancelled, by asyncio's time-outs neither
        self._outcome: Outcome | None = None
        self._lock = threading.RLock()  # callbacks of `captured` run under it

    @property
    def outcome(self) -> Outcome | None:
        """How it ended; None while it runs. "superseded": durable, but a newer one was published first."""
        return self._outcome

    def __repr__(self) -> str:
        return f"<Save step {self.step}, counter {self.counter}: {self._outcome or 'running'}>"

    def finish(self, outcome: Outcome, error: BaseException | None = None) -> None:
        """Set the outcome and resolve both futures; only the first call counts."""
        with self._lock:
            if self._outcome is not None:
                return
            self._outcome = outcome
        self.note_captured()
        if error is None:
            self.durable.set_result(self.step)
        else:
            self.durable.set_exception(error)

    def skip(self, reason: str) -> None:
        """End it as skipped."""
        self.finish("skipped", SkippedError(self.step, reason))

    def note_captured(self) -> None:
        """Resolve `captured`, once."""
        with self._lock:
            if not self.captured.done():
                self.captured.set_result(self.step)


@dataclass(frozen=True, kw_only=True)
class Launched:
    """A save that was started.

    Args:
        job: what captures and writes it.
        chunks: leading chunks whose capture `save()` waits for; None = all.
        lazy: the caller's memory is read after that.
    """

    job: Job
    chunks: int | None
    lazy: bool


@dataclass(kw_only=True)
class Underway:
    """What the committer needs of one save."""

    save: Save
    record: Record
    prepared: Prepared
    job: Job
    started_s: float = field(default_factory=time.monotonic)
    deadline_s: float  # on the monotonic clock
    pin: bool
    link: Link | None = None

    def seconds(self) -> float:
        """Give the seconds since the save began."""
        return time.monotonic() - self.started_s

    def left_s(self) -> float:
        """Give the seconds until its deadline."""
        return max(0.0, self.deadline_s - time.monotonic())
