"""Errors of saves whose caller has gone on: each is told once, later (floor 2: imports nothing of pccheck)."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Sequence
from typing import final


@final
class Unreported:
    """Errors that nobody was told of yet. Thread-safe.

    Args:
        raises: the first one is raised; else all are warned about.
    """

    def __init__(self, *, raises: bool) -> None:
        self._raises = raises
        self._lock = threading.RLock()  # entered in one step: a Ctrl-C leaves it as it was
        self._errors: list[tuple[int, BaseException]] = []

    def note(self, counter: int, error: BaseException) -> None:
        """Take an error of the save of this counter."""
        with self._lock:
            self._errors.append((counter, error))

    def tell(self, *, before: int | None = None) -> None:
        """Raise the oldest error (of counters below `before`), or warn of all."""
        if not self._raises:
            _warn([f"a save failed: {error}" for error in self._take(None, before)])
        for error in self._take(1, before):
            raise error

    def tell_last(self) -> None:
        """Raise the oldest error with a note of each other one, since nobody asks again; or warn of all."""
        try:
            self.tell()
        except Exception as error:
            for other in self._take(None, None):
                error.add_note(f"and another save failed: {other}")
            raise

    def tell_now(self, errors: Sequence[BaseException]) -> None:
        """Raise the first of these errors, or warn of all."""
        if not self._raises:
            _warn(list(map(str, errors)))
        elif errors:
            raise errors[0]

    def _take(self, most: int | None, before: int | None) -> list[BaseException]:
        with self._lock:
            taken = [e for e in self._errors if before is None or e[0] < before][:most]
            self._errors = [e for e in self._errors if e not in taken]
        return [error for _, error in taken]


def _warn(texts: Sequence[str]) -> None:
    for text in texts:
        warnings.warn(text, RuntimeWarning, stacklevel=4)
