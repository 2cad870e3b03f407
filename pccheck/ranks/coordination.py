"""How ranks hear of each other: one blob of each, which all can read (floor 2: imports floor 0).

Everything that ranks agree on is worked out from these blobs (see agreement), so that a coordinator is no more than a
place: a key-value store, a shared directory. Nothing in it needs to survive the job.
"""

from __future__ import annotations

from typing import Protocol, final


class Coordinator(Protocol):
    """A place where each rank leaves one blob that all ranks can read. Thread-safe.

    Attributes:
        rank: of this process, from 0.
        world: number of ranks.
    """

    rank: int
    world: int

    def publish(self, blob: bytes) -> None:
        """Leave this rank's blob in place of its last one, whole or not at all.

        Raises CoordinatorLostError where the place is gone; never blocks for longer than its own time-out.
        """

    def read(self) -> list[bytes | None]:
        """Give the newest blob of every rank, None where there is none; without waiting for any rank.

        What earlier jobs left may be among them: the blobs themselves tell.
        """

    def close(self) -> None:
        """Take this rank's blob away and leave. Idempotent; not called while another rank may still need the blob."""


@final
class Solo:
    """One rank alone: its own word is the agreement."""

    rank = 0
    world = 1

    def __init__(self) -> None:
        self._blob: bytes | None = None

    def publish(self, blob: bytes) -> None:
        """Keep the blob."""
        self._blob = blob

    def read(self) -> list[bytes | None]:
        """Give it back."""
        return [self._blob]

    def close(self) -> None:
        """Forget it."""
        self._blob = None
