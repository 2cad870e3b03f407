"""What a supervisor and its trainers tell each other (floor 0: imports nothing of pccheck)."""

from __future__ import annotations

import msgspec

# Times are of the monotonic clock, which all processes of a machine share.


class Job(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a trainer is started with: who saves where, and what it trains."""

    contender: str
    directory: str
    state_bytes: int
    device_s: float
    every: int
    seed: int


class Go(msgspec.Struct, frozen=True, tag=True):
    """To a trainer: begin. `digests` are of the steps whose saves were begun so far, the newest."""

    digests: dict[int, str]


class Missing(msgspec.Struct, frozen=True, tag=True):
    """What this contender needs is not installed."""

    reason: str


class Ready(msgspec.Struct, frozen=True, tag=True):
    """All is imported, and the training set up, in so many seconds of CPU time; it waits for `Go`."""

    start_s: float
    state_bytes: int


class Began(msgspec.Struct, frozen=True, tag=True):
    """It goes on after `step` (0 = anew): loaded in `load_s`, checked in `verify_s`; why what it loaded was refused."""

    step: int
    at: float
    load_s: float
    verify_s: float
    refused: str | None


class Stepped(msgspec.Struct, frozen=True, tag=True):
    """A step was done; before its update it waited `fence_s`."""

    step: int
    at: float
    fence_s: float


class Saving(msgspec.Struct, frozen=True, tag=True):
    """A save is about to be asked for."""

    step: int
    digest: str
    at: float


class Saved(msgspec.Struct, frozen=True, tag=True):
    """The save was asked for; training goes on after `stall_s`."""

    step: int
    stall_s: float


Told = Missing | Ready | Began | Stepped | Saving | Saved

DECODER: msgspec.json.Decoder[Told] = msgspec.json.Decoder(Told)
MOST_BYTES = 1 << 20  # of one message
MOST_DIGESTS = 1000  # in one `Go`: what the pipe holds, so that telling it never waits
