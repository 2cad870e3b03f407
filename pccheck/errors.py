"""Errors, grouped by whose fault they are (floor 0: imports nothing of pccheck).

Every error carries its facts as attributes as well as text; the text says what, where, and what to do now.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


class PccheckError(Exception):
    """Base of everything pccheck raises on purpose; catch it to catch them all.

    Errors can be copied and pickled, facts included: one that cannot hangs the process pool that it is raised in.
    """

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (type(self), self.args, vars(self).copy())


def _rebuild(cls: type[PccheckError], args: tuple[object, ...], facts: dict[str, object]) -> PccheckError:
    error = cls.__new__(cls)
    builtin: Any = next(base for base in cls.__mro__ if base.__module__ == "builtins")
    builtin.__init__(error, *args)  # sets args and, for an OSError, errno; ours would take other arguments
    vars(error).update(facts)
    return error


# -- the caller's fault ---------------------------------------------------------------------------------------------


class UsageError(PccheckError, ValueError):
    """The call cannot be carried out as made; nothing was changed."""


class OptionError(UsageError):
    """An option is out of its range: `field`, `value` and `allowed` name it."""

    def __init__(self, field: str, value: object, allowed: str) -> None:
        super().__init__(f"{field}={value!r} is not allowed: {field} must be {allowed}")
        self.field, self.value, self.allowed = field, value, allowed


class UnsupportedLeafError(UsageError, TypeError):
    """A leaf cannot be stored exactly, or (`restoring`) not be restored so: `path`, `type_name`, `reason` say which."""

    def __init__(self, path: str, type_name: str, reason: str, *, restoring: bool = False) -> None:
        doing = "restore" if restoring else "save"
        super().__init__(f"cannot {doing} {path or 'a leaf'} of type {type_name}: {reason}")
        self.path, self.type_name, self.reason, self.restoring = path, type_name, reason, restoring

    def at(self, path: str, *, restoring: bool = False) -> UnsupportedLeafError:
        """Give the same error of the leaf at `path`: whoever raises it knows the leaf alone."""
        return UnsupportedLeafError(path or "the state itself", self.type_name, self.reason, restoring=restoring)


_PARTLY = "partial=True to restore what fits and get this list"


class MismatchError(UsageError):
    """The checkpoint does not fit `like`, or the target: `mismatches` lists every leaf that differs, by path."""

    def __init__(self, mismatches: Sequence[object], *, partly: str = _PARTLY) -> None:
        self.mismatches = tuple(mismatches)
        groups: dict[str, list[object]] = {}
        for mismatch in self.mismatches:
            groups.setdefault(getattr(mismatch, "problem", ""), []).append(mismatch)
        lines = []
        for problem, found in sorted(groups.items(), key=lambda g: _PROBLEMS.index(g[0]) if g[0] in _PROBLEMS else 99):
            if problem:
                lines.append(f" {len(found):,} x {problem}:")
            lines += [f"  {m}" for m in found[:_SHOWN]]
            if len(found) > _SHOWN:
                lines.append(f"  ... and {len(found) - _SHOWN:,} more; `mismatches` of this error lists all")
        side = getattr(self.mismatches[0], "side", "`like`") if self.mismatches else "`like`"
        text = "\n".join(lines)
        super().__init__(
            f"the checkpoint does not fit {side} in {len(self.mismatches):,} place(s):\n{text}\n"
            f"Correct {side}, or pass {partly}."
        )


_PROBLEMS = ("missing", "unexpected", "shape", "dtype", "kind", "part", "type", "value", "tied")
_SHOWN = 1000  # of each problem


class ChangedError(UsageError):
    """Leaves were changed while they were being captured: `paths` names them, `step` the save that may mix steps."""

    def __init__(self, step: int, paths: Sequence[str]) -> None:
        shown = ", ".join(paths[:8]) + (f" and {len(paths) - 8} more" if len(paths) > 8 else "")
        super().__init__(
            f"the save of step {step} may hold parts of two steps: changed before the fence was reached: {shown}. "
            "Call fence() before these are changed, attach the optimizer that changes them, or save with "
            "snapshot='copy'."
        )
        self.step, self.paths = step, tuple(paths)


class StepNotFoundError(UsageError, LookupError):
    """No checkpoint of this step is there: `step` was asked for, `available` could be had."""

    def __init__(self, step: int, available: Sequence[int], where: str) -> None:
        super().__init__(f"{where} holds no checkpoint of step {step}; it holds {sorted(available)}")
        self.step, self.available, self.where = step, tuple(sorted(available)), where


class ClosedError(UsageError):
    """The Checkpointer or view was closed before this call."""


class ForkedError(UsageError):
    """The call came from a forked child: a store belongs to the process that opened it."""


# -- the medium's fault ---------------------------------------------------------------------------------------------


class MediumError(PccheckError, OSError):
    """Storage failed an operation: `operation`, `path`, `offset` and `errno` say which."""

    def __init__(self, operation: str, path: str, error: OSError, offset: int | None = None) -> None:
        where = path if offset is None else f"{path} at byte {offset}"
        super().__init__(error.errno, f"{operation} failed on {where}: {error.strerror or error}")
        self.operation, self.path, self.offset, self.cause = operation, path, offset, error

    def __str__(self) -> str:
        return str(self.args[1])


class StoreGoneError(MediumError):
    """The store or files of it were removed, renamed or moved away while it was open: a restart would not find them."""


# -- the content's fault --------------------------------------------------------------------------------------------


class ContentError(PccheckError):
    """Stored bytes are not what they must be; nothing of them was handed out."""


class FormatError(ContentError):
    """Bytes are not of this format, or of a version this release cannot read."""


class DamagedError(ContentError):
    """Stored bytes fail their digest: `path` (file), `leaves`, `offset` and `length` (bytes in the file) say where."""

    def __init__(self, path: str, reason: str, *, offset: int = 0, length: int = 0, leaves: Sequence[str] = ()) -> None:
        super().__init__(
            f"{path} is damaged: {reason}"
            + (f" at bytes {offset}..{offset + length}" if length else "")
            + (f", in {', '.join(leaves[:8])}{' and more' if len(leaves) > 8 else ''}" if leaves else "")
            + WHOLE_ONES
        )
        self.path, self.reason, self.offset, self.length, self.leaves = path, reason, offset, length, tuple(leaves)


# What to do, which is left out where it was done already, or cannot be.
WHOLE_ONES = "; `pccheck inspect --verify PATH` lists what is whole: restore an older step"


class NoValidCheckpointError(ContentError):
    """Checkpoints are there but none verifies: `skipped` says why, one entry each."""

    def __init__(self, where: str, skipped: Sequence[object]) -> None:
        self.where, self.skipped = where, tuple(skipped)
        lines = "\n".join(f"  {s}" for s in self.skipped).replace(WHOLE_ONES, "")  # none is, and it is said below
        super().__init__(
            f"{where} holds checkpoints but none of them verifies:\n{lines}\n"
            "Look with `pccheck inspect --verify`; to start afresh on purpose, use another directory."
        )


class ReusedError(ContentError):
    """The slot was given to a newer checkpoint while it was being read; read again."""


# -- capacity and time ----------------------------------------------------------------------------------------------


class CapacityError(PccheckError):
    """There is no room: `path`, `needed_bytes` and `free_bytes` say how much."""

    def __init__(self, path: str, needed_bytes: int, free_bytes: int) -> None:
        super().__init__(
            f"no room at {path}: {needed_bytes:,} bytes are needed, {free_bytes:,} are free; "
            "free some space, lower in_flight or keep, or use another directory"
        )
        self.path, self.needed_bytes, self.free_bytes = path, needed_bytes, free_bytes


class PoolMemoryError(MemoryError, CapacityError):  # in this order it can be pickled
    """There is no memory for the buffer pool: `needed_bytes` and `free_bytes` say how much; nothing was changed."""

    def __init__(self, needed_bytes: int, free_bytes: int) -> None:
        MemoryError.__init__(
            self,
            f"no memory for a buffer pool of {needed_bytes:,} bytes ({free_bytes:,} are available); "
            "lower buffer_bytes or in_flight, or give this process more memory",
        )
        self.path, self.needed_bytes, self.free_bytes = "memory", needed_bytes, free_bytes


class DeadlineError(PccheckError, TimeoutError):
    """A wait ended without its event: `waited_s` and `waiting_for` say what for."""

    def __init__(self, waiting_for: str, waited_s: float) -> None:
        super().__init__(f"waited {waited_s:.1f} s for {waiting_for}")
        self.waiting_for, self.waited_s = waiting_for, waited_s


class StoreTaken(PccheckError):
    """Another writer has, or took over, this store: `holder` describes it."""

    def __init__(self, path: str, holder: str, hint: str = "") -> None:
        hint = hint or "An earlier run that has not ended? Then end that one; else use another directory."
        super().__init__(f"{path} is being written by {holder}. {hint}")
        self.path, self.holder = path, holder


class SkippedError(PccheckError):
    """This save was skipped, so it never becomes durable: `step`, `reason`."""

    def __init__(self, step: int, reason: str) -> None:
        super().__init__(f"the save of step {step} was skipped: {reason}")
        self.step, self.reason = step, reason


# -- other ranks' fault ---------------------------------------------------------------------------------------------


class RanksError(PccheckError):
    """Ranks do not agree, or one is missing or was restarted: `ranks` names those at fault."""

    def __init__(self, reason: str, ranks: Sequence[int] = ()) -> None:
        super().__init__(reason)
        self.reason, self.ranks = reason, tuple(ranks)


class RankTimeoutError(RanksError, DeadlineError):
    """Ranks were waited for in vain: `ranks` names them, `waiting_for` and `waited_s` what for and how long."""

    def __init__(self, waiting_for: str, waited_s: float, ranks: Sequence[int]) -> None:
        hint = "look at what became of them; if they have ended, start all ranks of the job again"
        DeadlineError.__init__(self, f"{waiting_for}; missing: {named_ranks(ranks)} ({hint})", waited_s)
        self.waiting_for, self.reason, self.ranks = waiting_for, str(self), tuple(ranks)


class CoordinatorLostError(RanksError):
    """The place through which ranks agree cannot be reached any more: no later save can become durable on all."""


def named_ranks(ranks: Sequence[int]) -> str:
    """Give ranks in words, the first 16."""
    shown = ", ".join(map(str, ranks[:16]))
    return f"rank{'s' if len(ranks) > 1 else ''} {shown}{' and more' if len(ranks) > 16 else ''}"
