"""Agreement between ranks on what to restore and what is committed (floor 2: imports floor 0)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, kw_only=True)
class Held:
    """What one rank holds when it opens its store."""

    incarnation: int  # the greatest it has seen
    counter: int  # the greatest it has used
    whole: tuple[tuple[int, int, int], ...]  # (incarnation, counter, step) of each checkpoint that can be restored


@dataclass(frozen=True, kw_only=True)
class Opening:
    """What the ranks agreed on: this incarnation, the first counter to use."""

    incarnation: int
    next_counter: int


class Coordinator(Protocol):
    """How ranks agree. Calls come from several threads."""

    rank: int
    world: int

    def open(self, held: Held, timeout_s: float) -> Opening:
        """Agree on a new incarnation and the next counter."""

    def agree(self, *, counter: int, step: int, ok: bool, timeout_s: float) -> bool:
        """Report one save; give whether all ranks hold it. A missing rank is a DeadlineError that names it."""

    def close(self) -> None:
        """Leave."""


class Solo:
    """One rank alone: its own publish is the agreement."""

    rank = 0
    world = 1

    def open(self, held: Held, timeout_s: float) -> Opening:
        """Give the next incarnation and counter."""
        return Opening(incarnation=held.incarnation + 1, next_counter=held.counter + 1)

    def agree(self, *, counter: int, step: int, ok: bool, timeout_s: float) -> bool:
        """Give what this rank reported, at once."""
        return ok

    def close(self) -> None:
        """Leave nothing behind."""
