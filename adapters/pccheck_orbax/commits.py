"""The future that Orbax waits for before it commits a step (may import pccheck, Orbax)."""

from __future__ import annotations

import os
import time
from typing import Any, final

import jax
from orbax.checkpoint.future import CommitFutureAwaitingContractedSignals

import pccheck
from pccheck_orbax.staging import Staged


@final
class Commit:
    """Resolved once the save is durable and its file lies in the folder of its item. Made within `async_save`.

    Orbax waits for the futures of a save one after the other, and first for those that make its folders. These make
    them in the primary process only; the others are told by signals, which are awaited here.

    Args:
        save: the save.
        staged: where it was linked to.
        folder: of the item, while Orbax makes the step.
    """

    def __init__(self, save: pccheck.Save, staged: Staged, folder: str) -> None:
        self._save, self._staged, self._folder = save, staged, folder
        self._awaited = False
        self._told: _Told | None = _Told() if jax.process_index() > 0 else None

    def result(self, timeout: float | None = None) -> None:
        """Wait for at most `timeout` seconds; raises TimeoutError, or why the save failed."""
        self._awaited = True
        self._staged.look(self._folder)
        end = None if timeout is None else time.monotonic() + timeout
        try:
            self._save.durable.result(timeout)
        except TimeoutError:
            raise
        except BaseException:
            self._staged.drop()
            raise
        if self._told is not None:
            self._told.wait(_left(end))
        self._staged.move(self._folder, _left(end))

    def is_forsaken(self) -> bool:
        """Tell whether Orbax never came for a save that has ended, and its folder is not there."""
        return not self._awaited and self._save.durable.done() and not os.path.isdir(self._folder)

    def cancel(self) -> bool:
        """Call the save off unless its file was moved; tell whether it was under way."""
        under_way = not self._save.durable.done()
        self._staged.drop()
        if self._told is not None:
            self._told.cancel()
        return under_way


@final
class _Told:
    """Waits for the primary process to say that the folders are there."""

    def __init__(self) -> None:
        self._coroutine = _nothing()
        self._future: Any = CommitFutureAwaitingContractedSignals(self._coroutine, name="pccheck_folders")

    def wait(self, timeout: float | None) -> None:
        try:
            self._future.result(timeout=timeout)
        except BaseException:
            self._close()
            raise

    def cancel(self) -> None:
        self._future.cancel()
        self._close()

    def _close(self) -> None:
        try:
            self._coroutine.close()  # one that never ran would be warned of
        except (ValueError, RuntimeError):
            pass  # it runs this moment


async def _nothing() -> None:
    """What is run once the folders are there."""


def _left(end: float | None) -> float | None:
    return None if end is None else max(0.0, end - time.monotonic())
