"""One place in which a checkpoint differs from what it is wanted for (floor 0: imports boxes)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

from pccheck.state.boxes import Box

Problem: TypeAlias = Literal["missing", "unexpected", "kind", "shape", "dtype", "part", "type", "value", "tied"]
MAX_MISMATCHES = 100_000  # a `like` that contains itself twice would have 2^100


@dataclass(frozen=True)
class Mismatch:
    """One place in which a checkpoint and `like` differ.

    Args:
        path: where, written as `paths` says.
        problem: "missing" in the checkpoint, "unexpected" in it, or another "kind" (array or not), "shape", "dtype",
            "part" (of a global array), "type" (of a container or Python value), a "value" that is out of range where a
            number is to become an array; in `load_into` also another "value" where nothing can be replaced, or "tied"
            where one array of the target would get two contents.
        expected: what `like` has; "" where it has nothing.
        found: what the checkpoint has; "" where it has nothing.
        side: what is held against the checkpoint: "`like`", or "the target" of `load_into`.
    """

    path: str
    problem: Problem
    expected: str
    found: str
    side: str = "`like`"

    def __str__(self) -> str:
        place = self.path or "the state itself"
        if self.problem == "missing":
            return f"{place}: not in the checkpoint; {self.side} has {self.expected} there"
        if self.problem == "unexpected":
            return f"{place}: the checkpoint has {self.found}, {self.side} has nothing there"
        return f"{place}: {self.problem} is {self.found} in the checkpoint, {self.expected} in {self.side}"


def told(box: Box) -> str:
    """Give a box as one would slice it: [0:4, 8:16]."""
    return "[" + ", ".join(f"{o}:{e}" for o, e in zip(box.offsets, box.ends, strict=True)) + "]"
