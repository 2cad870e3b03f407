"""What an observer hears of a Checkpointer (floor 0: imports nothing of pccheck).

Events are frozen and arrive in order on a thread of their own; an observer that is slow or raises delays no commit.
"""

from __future__ import annotations

from abc import ABC
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Event(ABC):
    """Base of all events: which save it is about."""

    step: int
    counter: int


@dataclass(frozen=True, kw_only=True)
class SnapshotPicked(Event):
    """From this save on, states are captured in another mode: "copy", "lazy" or "device", and why."""

    mode: str
    reason: str


@dataclass(frozen=True, kw_only=True)
class Returned(Event):
    """`save()` returned to its caller, who had waited `seconds`.

    Of these `slot_wait_s` for a place among the checkpoints in flight, and `copy_wait_s` for copies of the state.
    Exactly one of `Published`, `Superseded`, `Skipped` and `Failed` tells how each such save ended, perhaps before it
    returned. A save that raised instead has a `Failed` only if it had got its place; one that was refused has no event.
    """

    seconds: float
    slot_wait_s: float
    copy_wait_s: float


@dataclass(frozen=True, kw_only=True)
class Captured(Event):
    """No byte of the caller's memory is needed any more, `seconds` after `save()`; `pool_wait_s` of it for buffers."""

    seconds: float
    pool_wait_s: float


@dataclass(frozen=True, kw_only=True)
class Persisted(Event):
    """All chunks were written, `seconds` after `save()`."""

    payload_bytes: int
    seconds: float
    retries: int


@dataclass(frozen=True, kw_only=True)
class Sealed(Event):
    """Data and record are durable."""

    slot: int
    seconds: float


@dataclass(frozen=True, kw_only=True)
class Published(Event):
    """The word names this checkpoint, durably, `seconds` after `save()`."""

    slot: int
    seconds: float


@dataclass(frozen=True, kw_only=True)
class Superseded(Event):
    """A newer checkpoint was published first: this one is durable, and kept only as far as `keep` reaches."""

    slot: int
    seconds: float


@dataclass(frozen=True, kw_only=True)
class Released(Event):
    """The slot of this checkpoint is free for another."""

    slot: int


@dataclass(frozen=True, kw_only=True)
class Skipped(Event):
    """The save was not made."""

    reason: str


@dataclass(frozen=True, kw_only=True)
class Failed(Event):
    """The save failed; the last good checkpoint is untouched."""

    error: BaseException


@dataclass(frozen=True, kw_only=True)
class Restored(Event):
    """`restore()` gave this checkpoint, from which the run goes on, after `seconds`."""

    seconds: float


@dataclass(frozen=True, kw_only=True)
class IntervalChosen(Event):
    """A `Controller` saves every `interval` steps from this step on, `before` another, for a `reason`.

    It was worked out from the seconds of a step alone, the seconds that a checkpoint costs the trainer, the worst until
    one is durable, and the mean time between failures (None = not known); `overhead` is what checkpoints added to the
    time of the last steps, as a share. It is about no save: `counter` is 0.
    """

    interval: int
    before: int
    reason: str
    step_s: float
    stall_s: float
    durable_s: float
    mtbf_s: float | None
    overhead: float


@dataclass(frozen=True, kw_only=True)
class Grew(Event):
    """The store took a slot more, because readers, pins or quarantine held the others."""

    slots: int
