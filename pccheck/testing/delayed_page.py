"""A CHECK page whose sync takes its time (beside the floors: imports floors 0 and 1)."""

from __future__ import annotations

import time
from typing import final

from pccheck.storage.volume import CheckPage


@final
class DelayedPage:
    """A CHECK page whose sync takes longer."""

    def __init__(self, inner: CheckPage, delay_s: float) -> None:
        self.inner = inner
        self.atomic = inner.atomic
        self._delay_s = delay_s

    def load(self, offset: int) -> int:
        """Give a word."""
        return self.inner.load(offset)

    def store(self, offset: int, value: int) -> None:
        """Set a word."""
        self.inner.store(offset, value)

    def compare_and_swap(self, offset: int, expected: int, value: int) -> bool:
        """Set a word if it is `expected`."""
        return self.inner.compare_and_swap(offset, expected, value)

    def read(self, offset: int, length: int) -> bytes:
        """Give bytes."""
        return self.inner.read(offset, length)

    def write(self, offset: int, data: bytes) -> None:
        """Set bytes."""
        self.inner.write(offset, data)

    def sync(self) -> None:
        """Sync after the delay."""
        time.sleep(self._delay_s)
        self.inner.sync()

    def links(self) -> int:
        """Give how many names CHECK has."""
        return self.inner.links()

    def close(self) -> None:
        """Close."""
        self.inner.close()
