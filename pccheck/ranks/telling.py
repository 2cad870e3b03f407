"""What one rank tells the others: a blob of facts (floor 0: imports nothing of pccheck)."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

VERSION = 1


class Held(msgspec.Struct, frozen=True, array_like=True):
    """A rank holds this counter durably: its step, and the digest of its plan of the global arrays."""

    counter: int
    step: int
    plan: str


class Refused(msgspec.Struct, frozen=True, array_like=True):
    """A rank does not hold the counters `low..high`, and never will; the reason is of the last of them."""

    low: int
    high: int
    reason: str


class Answer(msgspec.Struct, frozen=True, array_like=True):
    """What a rank says in the number-th exchange of its life."""

    number: int
    topic: str
    payload: bytes


class Blob(msgspec.Struct, frozen=True):
    """All that one rank tells.

    Args:
        version: of this structure.
        nonce: of this life of the rank.
        heard: by rank, the nonce last heard of it; "" = none.
        answers: of its last two exchanges.
        held: counters that it holds, as long as somebody may ask.
        refused: counters that it does not hold.
        since: of counters below this one nothing is told any more.
        floor: the least counter of which it still wants to hear.
        agreed: the greatest counter that it knows to be agreed.
        left: why it says nothing more; "" = it is there.
    """

    version: int
    nonce: str
    heard: tuple[str, ...]
    answers: tuple[Answer, ...]
    held: tuple[Held, ...]
    refused: tuple[Refused, ...]
    since: int
    floor: int
    agreed: int
    left: str


encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(Blob).decode


def decode(raw: bytes | None, world: int) -> Blob | None:
    """Give a blob, None for anything else: torn, of another version, or of a job of another size."""
    blob = _blob(raw)
    return blob if blob is not None and len(blob.heard) == world else None


def world_of(raw: bytes | None) -> int:
    """Give the number of ranks of the job that a blob is of; 0 = it is no blob."""
    blob = _blob(raw)
    return 0 if blob is None else len(blob.heard)


def _blob(raw: bytes | None) -> Blob | None:
    if raw is None:
        return None
    try:
        blob = _decode(raw)
    except (msgspec.DecodeError, ValueError):
        return None
    return blob if blob.version == VERSION and blob.nonce else None


def joined(refused: Iterable[Refused]) -> list[Refused]:
    """Join ranges that touch: a rank that skips save after save tells it in one line."""
    joined: list[Refused] = []
    for r in sorted(refused, key=lambda r: r.low):
        if joined and r.low <= joined[-1].high + 1:
            joined[-1] = Refused(joined[-1].low, max(joined[-1].high, r.high), r.reason)
        else:
            joined.append(r)
    return joined
