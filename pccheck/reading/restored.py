"""What a restore gives, and how it gets into live leaves (floor 2: imports floor 1 and below)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pccheck.errors import WHOLE_ONES, MismatchError
from pccheck.state.assigning import Assigning
from pccheck.state.kinds import kind_of
from pccheck.state.mismatch import Mismatch

# Seen: partial=True was passed after a restart, and the run went on without the moments.
_NO_PLACE_YET = (
    "what has no place in it yet (the moments of an optimizer that has not stepped) to its owner's load_state_dict() "
    "(a TrainingState does so); partial=True leaves it out"
)


@dataclass(frozen=True)
class Skipped:
    """A checkpoint that was passed over, and why; `counter` and `step` are None where its record is unreadable."""

    counter: int | None
    step: int | None
    name: str
    reason: str

    def __post_init__(self) -> None:
        # What to do about it was done: it was passed over.
        object.__setattr__(self, "reason", self.reason.replace(WHOLE_ONES, ""))

    def __str__(self) -> str:
        what = "" if self.counter is None else f" (step {self.step}, counter {self.counter})"
        return f"{self.name}{what}: {self.reason}"


@dataclass(frozen=True)
class Restored:
    """A restored checkpoint.

    Args:
        step: the caller's label.
        counter: its place in the order of all checkpoints.
        state: the tree.
        metadata: what was saved beside it.
        skipped: what was passed over, and why, newest first.
        mismatches: with `partial=True`, every leaf in which the checkpoint and `like` differ.
    """

    step: int
    counter: int
    state: Any
    metadata: dict[str, Any]
    skipped: tuple[Skipped, ...] = ()
    mismatches: tuple[Any, ...] = ()

    def load_into(self, target: Any, *, partial: bool = False) -> tuple[Mismatch, ...]:
        """Copy the restored state into a live tree of the same structure, in place, and give where the two differ.

        Arrays and tensors are written where they are: whoever else holds them sees the restored values. Python values
        (and NumPy scalars, torch.Size and the like) are replaced in dicts, lists and dataclasses; tuples, namedtuples
        and frozen dataclasses in which one changes are replaced by new ones that hold the same arrays. Where nothing
        mutable is above such a value, it must be equal. An array that stands in the target several times is written
        once; then the checkpoint must have one array there, too. A `state_dict()` is made for the occasion: its tensors
        are the live ones, but numbers that are replaced in it (a learning rate) reach nothing; use `load_state_dict`.

        Nothing is touched before the whole target fits (and all digests were checked by the restore). Parts of global
        arrays fit where the restored leaf is the same part: give the target as `like` to `restore`.

        Args:
            target: any nesting of dict, list, tuple, namedtuple and dataclass.
            partial: write what fits, and give the rest instead of raising it.

        Raises:
            MismatchError: something is missing, unexpected, or of another shape, dtype or type; lists all of it.
            UsageError: the target holds something that can be no leaf.
        """
        found = Assigning(kind_of, target, self.state)
        if found.mismatches and not partial:
            if any(m.problem == "unexpected" for m in found.mismatches):
                raise MismatchError(found.mismatches, partly=_NO_PLACE_YET)
            raise MismatchError(found.mismatches)
        found.carry_out()
        return found.mismatches
