"""How saves through DCP end, and who was told (imports torch)."""

from __future__ import annotations

from concurrent.futures import Future, InvalidStateError
from typing import final

from torch.distributed.checkpoint.api import CheckpointException


@final
class Saving(Future[None]):
    """The end of a save: resolves when it is durable on all ranks, or raises why it is not. Thread-safe.

    Attributes:
        step: the caller's label.
        asked: whether somebody asked how it ended.
    """

    def __init__(self, step: int) -> None:
        super().__init__()
        self.step, self.asked = step, False
        self.set_running_or_notify_cancel()  # a save cannot be cancelled

    def result(self, timeout: float | None = None) -> None:
        """Wait for the end; raises what failed."""
        try:
            super().result(timeout)
        finally:
            self.asked = self.asked or self.done()

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Wait for the end; give what failed."""
        try:
            return super().exception(timeout)
        finally:
            self.asked = self.asked or self.done()

    def end(self, error: BaseException | None) -> None:
        """Note how it ended; only the first call counts."""
        try:
            self.set_result(None) if error is None else self.set_exception(error)
        except InvalidStateError:  # a Ctrl-C ended it before DCP did
            pass

    def failure(self) -> BaseException | None:
        """Give what failed, if it did by now, without counting as being told."""
        return super().exception(0) if self.done() else None


def cause_of(error: BaseException | None, rank: int) -> BaseException | None:
    """Give the error that a rank (this one before others) had, out of DCP's collection of them; else the error."""
    if not isinstance(error, CheckpointException) or not error.failures:
        return error
    first = rank if rank in error.failures else min(error.failures)
    cause = error.failures[first][0]
    others = [r for r in sorted(error.failures) if r != first]
    told = f"on rank {first}" + (f", and on ranks {', '.join(map(str, others[:16]))} as well" if others else "")
    if told not in getattr(cause, "__notes__", []):
        cause.add_note(told)
    return cause
