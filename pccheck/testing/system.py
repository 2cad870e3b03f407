"""What the crash explorer explores: a System (beside the floors: imports `testing` only).

Write a System of your own to explore a backend or another checkpoint library that works through a Volume.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

from pccheck.testing.disk import SyncInfo
from pccheck.testing.simulated import SimulatedVolume


class System(ABC):
    """A checkpoint library as the explorer drives it.

    What `open` gives needs `save(step, state)` (the result has `counter` and `durable`, a Future) and
    `restore(step=None)` (the result has `counter`, `step` and `state`, and may have `skipped`; or None). Where it has
    `steps()`, each of them is checked by `restore(step, branch=False)`, which must change nothing.
    """

    @abstractmethod
    def open(self, volume: SimulatedVolume) -> AbstractContextManager[Any]:
        """Open the store for writing; leaving the context drains and closes."""

    @abstractmethod
    def audit(self, volume: SimulatedVolume) -> list[str]:
        """Look without writing; give every damage that the library would report, and every pointer that is wrong."""

    def extents(self, name: str, head: bytes, size: int) -> Sequence[tuple[int, int]]:
        """Give the bytes of a file, beside its first sector, that recovery may read: all, unless you know better."""
        return ((0, size),)

    def identity(self, name: str, head: bytes) -> bytes:
        """Give a file's first sector without the time of day and the like."""
        return head

    def classify(self, info: SyncInfo) -> str:
        """Name a sync for reports and mutations."""
        return f"{info.kind} after {info.point or 'opening'}"
