"""A Checkpointer's life, in one process, from opening to its one end (floor 2: imports errors)."""

from __future__ import annotations

import atexit
import os
import threading
from collections.abc import Callable
from typing import final

from pccheck.errors import ClosedError, ForkedError


@final
class Lifetime:
    """Tells whether a Checkpointer can still be used, and ends it once. Thread-safe.

    Args:
        path: of its store, for errors.
        drain: waits for what is under way, at most so many seconds (None = as long as it takes); it may raise, and is
            called again then: nothing has ended yet.
        end: lets go of everything; called once.
        tell: raises or warns of what nobody was told of, at interpreter exit.
        exit_timeout_s: for `drain` at interpreter exit, the one exit hook there is.
    """

    def __init__(
        self, path: str, drain: Callable[[float | None], object], end: Callable[[], object],
        tell: Callable[[], object], exit_timeout_s: float,
    ) -> None:  # fmt: skip
        self._path, self._drain, self._end = path, drain, end
        self._tell, self._exit_timeout_s = tell, exit_timeout_s
        self._closing = threading.Lock()
        self._closed = False
        self._pid = os.getpid()
        atexit.register(self._at_exit)

    def __repr__(self) -> str:
        return "closed" if self._closed else "open" if self._pid == os.getpid() else f"of pid {self._pid}"

    @property
    def is_open(self) -> bool:
        """Whether it has not ended, and is of this process."""
        return not self._closed and self._pid == os.getpid()

    def assert_own(self) -> None:
        """Raise ForkedError in a forked child."""
        if self._pid != os.getpid():
            raise ForkedError(f"{self._path} belongs to process {self._pid}; open another store in this child")

    def assert_usable(self) -> None:
        """Raise ForkedError in a forked child, and ClosedError after the end."""
        self.assert_own()
        if self._closed:
            raise ClosedError(f"the Checkpointer of {self._path} is closed; open a new one")

    def close(self, timeout_s: float | None) -> None:
        """Drain, for at most `timeout_s`, and end. Idempotent."""
        with self._closing:
            if self._closed:
                return
            self._closed = True
            try:
                self._drain(timeout_s)
            except BaseException:
                self._closed = False  # Ctrl-C in a notebook, or the deadline: it can be closed again
                raise
            try:
                self._end()
            finally:
                atexit.unregister(self._at_exit)

    def _at_exit(self) -> None:
        if self._pid == os.getpid():  # a forked child that ends normally must not wait for its parent's saves
            self.close(self._exit_timeout_s)
            self._tell()


def close_beside(error: BaseException | None, close: Callable[[], None], what: str) -> None:
    """Close, and where that fails beside an exception that is under way, note it there: that is the one to see."""
    if error is None:
        close()
        return
    try:
        close()
    except Exception as second:
        error.add_note(f"and closing {what} raised {second!r}")
