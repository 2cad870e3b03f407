"""What a probe measures, and in which order (floor 3: imports errors, options).

The order is that of worth: when time is up, what advice needs least was not measured.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from pccheck.errors import CapacityError, OptionError
from pccheck.options import MIB, Snapshot
from pccheck.probing.place import SHARE

TINY_BYTES = 64 * 1024  # a checkpoint whose bytes cost nothing: what is left is the commit
LEAST_BYTES = 16 * MIB
MOST_BYTES = 256 * MIB  # unless told: larger ones were seen to reach no higher rate
SLOT_EXTRA_BYTES = MIB  # of a slot beside its state: record, manifest, padding
CHECK_BYTES = 64 * 1024
LEAST_SAVES, MOST_SAVES = 5, 40  # that a trial measures
_SPARE = 0.8
_PAGE = 4096


@dataclass(frozen=True, kw_only=True)
class Trial:
    """One way of saving that is measured.

    Args:
        title: for people.
        state_bytes: of each checkpoint.
        in_flight, writers, writers_per_checkpoint, chunk_bytes, snapshot: as the Checkpointer's.
        reads: the last checkpoint is read back.
        rests: storage rests before each save about as long as a save takes; else saves come back to back.
        weight: its share of the time, among those that are still to come.
    """

    title: str
    state_bytes: int
    in_flight: int = 1
    writers: int = 2
    writers_per_checkpoint: int | None = None
    chunk_bytes: int = 16 * MIB
    snapshot: Snapshot = "lazy"
    rests: bool = False
    reads: bool = False
    weight: float = 1.0


def slots_bytes(state_bytes: int, in_flight: int) -> int:
    """Give the bytes that the store of a probe takes at most."""
    return (in_flight + 1) * (state_bytes + SLOT_EXTRA_BYTES) + CHECK_BYTES


def check_size(directory: str, size_bytes: int | None, in_flight: int, free: int, memory: int) -> int:
    """Give the largest state that may be measured: what was asked for, or what disk and memory suggest.

    On disk it takes in_flight + 1 slots, at most SHARE of what is free; in memory the state, in_flight times as much
    for the pool, and one more when it is read back, at most half of what is left.

    Raises:
        OptionError: more was asked for.
        CapacityError: there is not room for the least.
    """
    on_disk = (int(SHARE * free) - CHECK_BYTES) // (in_flight + 1) - SLOT_EXTRA_BYTES
    in_memory = memory // 2 // (in_flight + 2)
    most = min(on_disk, in_memory)
    if size_bytes is None:
        if on_disk < LEAST_BYTES:
            raise CapacityError(directory, int(slots_bytes(LEAST_BYTES, in_flight) / SHARE), free)
        if in_memory < LEAST_BYTES:
            raise CapacityError("memory", 2 * (in_flight + 2) * LEAST_BYTES, memory)
        return min(most, MOST_BYTES) // _PAGE * _PAGE
    if not 2 * TINY_BYTES <= size_bytes <= most:
        what = f"half of what is free in {directory}" if on_disk <= in_memory else "half of the memory that is left"
        allowed = f"from {2 * TINY_BYTES:,} to {most:,} bytes, as in_flight={in_flight} are under way within {what}"
        raise OptionError("size_bytes", size_bytes, allowed)
    return size_bytes


def first() -> Trial:
    """Give the trial that says what a commit costs."""
    return Trial(title="commits", state_bytes=TINY_BYTES, rests=True)


def scout(state_bytes: int) -> Trial:
    """Give the trial that says how fast storage is, by which the size of the others is chosen, and memory."""
    return Trial(title="first look", state_bytes=min(32 * MIB, state_bytes), snapshot="copy")


def affordable_bytes(most: int, bytes_per_s: float, commit_s: float, seconds: float, in_flight: int) -> int:
    """Give the size of state with which storage of such a rate and cost of commits gets through all trials in time."""
    saves = sum(least_bytes(trial) for trial in plan(MOST_BYTES, in_flight)) / MOST_BYTES
    size = int((_SPARE * seconds / saves - commit_s) * bytes_per_s)
    return min(most, max(size, LEAST_BYTES)) // _PAGE * _PAGE


def least_bytes(trial: Trial) -> int:
    """Give the bytes that storage could write while a trial takes place, warm-up and rests included, at least."""
    saves = LEAST_SAVES + 2 * trial.in_flight + 1
    return trial.state_bytes * saves * (2 if trial.rests else 1)


def plan(state_bytes: int, in_flight: int) -> list[Trial]:
    """Give the trials with states up to a size and checkpoints at once up to a number.

    What matters most comes twice, some time apart: disks are faster at one time than at another.
    """
    alone = Trial(title="one at a time, rested", state_bytes=state_bytes, rests=True, weight=2.0, reads=True)
    once_more = replace(alone, reads=False)
    at_once = [
        # three at most: these writers serve the oldest first, and more at once only wait for longer
        Trial(title=_at_once(n), state_bytes=state_bytes, in_flight=n, weight=1.0 + n / 3)
        for n in range(min(3, in_flight), 0, -1)
    ]
    streams = [
        Trial(
            title=f"{_at_once(n)}, a writer each", state_bytes=state_bytes, in_flight=n, writers=n,
            writers_per_checkpoint=1, weight=1.0 + n / 4,
        )
        for n in sorted({1, min(2, in_flight), in_flight}, reverse=True)
    ]  # fmt: skip
    trials = [
        *at_once,
        alone,
        replace(once_more, title="a quarter of the size, rested", state_bytes=_quarter(state_bytes), weight=1.0),
        Trial(title="a quarter of the size, 1 at a time", state_bytes=_quarter(state_bytes), weight=0.7),
        replace(once_more, title="copy mode", snapshot="copy", weight=1.0),
        *streams,
        *(replace(trial, title=f"{trial.title}, again") for trial in (*at_once, once_more)),
        Trial(title="4 writers", state_bytes=state_bytes, writers=4),
    ]
    for chunk_bytes in (4 * MIB, 64 * MIB):
        if 2 * chunk_bytes <= state_bytes:
            title = f"chunks of {chunk_bytes // MIB} MiB"
            trials.append(Trial(title=title, state_bytes=state_bytes, chunk_bytes=chunk_bytes))
    return trials


def _at_once(count: int) -> str:
    return f"{count} at once" if count > 1 else "1 at a time"


def _quarter(state_bytes: int) -> int:
    return max(TINY_BYTES, state_bytes // 4 // _PAGE * _PAGE)
