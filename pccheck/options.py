"""The options of a Checkpointer, validated where they are made (floor 0: imports errors, state.dividing)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from pccheck.errors import OptionError
from pccheck.state.dividing import Replicated

MIB = 1 << 20
Snapshot = Literal["copy", "lazy", "device", "auto"]
WhenFull = Literal["block", "skip"]
OnError = Literal["raise", "warn"]
PipelineName = Literal["auto", "native", "portable"]


@dataclass(frozen=True, kw_only=True)
class Options:
    """How a Checkpointer works.

    Args:
        in_flight: checkpoints that may be under way at once (the paper's N), 1..64.
        keep: newest verified checkpoints to keep, 1..1000; 0 = a store of links: each checkpoint lives by the link
            that `save(link=)` gives it, in a folder of yours, until that is removed.
        keep_every: keep every checkpoint whose step is a multiple of this, for ever; None = none.
        buffer_bytes: most that the buffer pool may take; it never takes more than in_flight times the state. None =
            as much, at most a quarter of the memory that is free.
        chunk_bytes: bytes per chunk, a multiple of 4096, 4 KiB..1 GiB.
        writers: threads that write to storage, 1..64; they serve the oldest checkpoint first.
        writers_per_checkpoint: of these, how many may be at one checkpoint at once, 1..64; None = all of them. Where
            storage limits each stream below its total (network and object stores), let several checkpoints be written
            side by side: writers = in_flight, writers_per_checkpoint = 1.
        snapshot: how a state leaves the caller's hands. "copy" = `save()` returns when the state was copied to the
            pool; "lazy" = it returns at once, and `fence()` must come before the state is changed (an adapter's
            `attach` sees to that); "device" = `save()` copies the state within its own memory, device or host, and
            captures from there: one more state's worth of that memory; "auto" = whichever of these was measured to
            make the trainer wait least, lazy only where something is attached.
        when_full: what `save()` does while `in_flight` checkpoints are under way: "block" or "skip".
        max_block_s: longest that a blocked `save()` waits before it skips; None = until it can go on.
        on_error: "raise" = a failed save raises at the next call; "warn" = it is warned about and counted.
        write_timeout_s: longest that one checkpoint may take to reach storage before it counts as failed.
        lock_timeout_s: how long opening waits for a lock whose recorded holder is dead.
        exit_timeout_s: how long interpreter exit waits for checkpoints under way.
        agree_timeout_s: how long to wait for other ranks: at opening, in a restore, and with every save.
        pipeline: "native", "portable", or "auto" = native where the extension was built.
        replicated: which arrays are the same on all ranks, so that each rank stores only its part of them: True = all
            (random states that are arrays, too), or a list of the paths that they are at or under, such as
            ["model", "optimizer"]. Parts of global arrays (DTensor, Shard) and what is no array are stored by the rank
            that has them.
        debug_captures: digest what is captured lazily at `save()`, and again at the fence or at the next save, and name
            the leaves that changed in between (`on_error` says whether by an error or a warning): slow.
        history: keep `runs.json` in the store, at most 256 KiB, for `pccheck report`; no checkpoint depends on it.
    """

    in_flight: int = 2
    keep: int = 1
    keep_every: int | None = None
    buffer_bytes: int | None = None
    chunk_bytes: int = 16 * MIB
    writers: int = 2
    writers_per_checkpoint: int | None = None
    snapshot: Snapshot = "copy"
    when_full: WhenFull = "block"
    max_block_s: float | None = None
    on_error: OnError = "raise"
    write_timeout_s: float = 3600.0
    lock_timeout_s: float = 10.0
    exit_timeout_s: float = 60.0
    agree_timeout_s: float = 600.0
    pipeline: PipelineName = "auto"
    replicated: bool | Sequence[str] = False
    debug_captures: bool = False
    history: bool = True

    def __post_init__(self) -> None:
        check_whole_number("in_flight", self.in_flight, 1, 64)
        check_whole_number("keep", self.keep, 0, 1000)
        check_whole_number("writers", self.writers, 1, 64)
        if self.writers_per_checkpoint is not None:
            check_whole_number("writers_per_checkpoint", self.writers_per_checkpoint, 1, 64)
        check_whole_number("chunk_bytes", self.chunk_bytes, 4096, 1 << 30, multiple=4096)
        if self.keep_every is not None:
            check_whole_number("keep_every", self.keep_every, 1, 1 << 62)
            if not self.keep:
                raise OptionError("keep_every", self.keep_every, "None in a store of links (keep=0)")
        if self.buffer_bytes is not None:
            check_whole_number("buffer_bytes", self.buffer_bytes, 2 * self.chunk_bytes, 1 << 46)
        for name, choices in (
            ("snapshot", get_args(Snapshot)),
            ("when_full", get_args(WhenFull)),
            ("on_error", get_args(OnError)),
            ("pipeline", get_args(PipelineName)),
        ):
            if getattr(self, name) not in choices:
                raise OptionError(name, getattr(self, name), " or ".join(map(repr, choices)))
        if Replicated.of(self.replicated).prefixes and not isinstance(self.replicated, bool):
            object.__setattr__(self, "replicated", tuple(self.replicated))  # nobody changes it afterwards
        for name in ("debug_captures", "history"):
            if not isinstance(getattr(self, name), bool):
                raise OptionError(name, getattr(self, name), "True or False")
        for name in ("write_timeout_s", "lock_timeout_s", "exit_timeout_s", "agree_timeout_s", "max_block_s"):
            value = getattr(self, name)
            if value is None and name == "max_block_s":
                continue
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < 1e9:
                raise OptionError(name, value, "a number of seconds from 0 to 1e9")


def check_whole_number(field: str, value: object, low: int, high: int, multiple: int = 1) -> None:
    """Raise OptionError unless a value is a whole number from `low` to `high`, and a multiple of another one."""
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high or value % multiple:
        of = f", a multiple of {multiple}" if multiple > 1 else ""
        raise OptionError(field, value, f"a whole number from {low} to {high}{of}")
