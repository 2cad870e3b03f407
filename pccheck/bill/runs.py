"""The runs of one store as `runs.json` holds them, bounded (floor 0: imports nothing of pccheck).

The file is a note, not a part of the store: no checkpoint depends on it, it is never synced, and whatever is wrong with
it costs nothing but itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Literal, final

import msgspec
from msgspec import Meta

FILE_NAME = "runs.json"
VERSION = 1
MOST_RUNS = 64
MOST_POINTS = 512  # of the run that is under way; each one that is over keeps OLD_POINTS
OLD_POINTS = 64
EVERY_S = 2.0  # from note to note; so much is forgotten of a run that is killed
LIMIT_BYTES = 256 * 1024
_LIVE_BYTES = 64 * 1024  # of these for the run that is under way
_MARK = b'{"format":"pccheck runs"'

Seconds = Annotated[float, Meta(ge=0, le=1e12)]
Count = Annotated[int, Meta(ge=0, le=1 << 60)]
Step = Annotated[int, Meta(ge=-(1 << 63), le=(1 << 63) - 1)]
Text = Annotated[str, Meta(max_length=300)]
Bucket = Annotated[int, Meta(ge=-1000, le=1000)]


class Point(msgspec.Struct, frozen=True, array_like=True):
    """The age of the newest durable checkpoint, over one or several publications.

    Args:
        at_s: when the last of them was published, seconds after the run began.
        step: of that checkpoint.
        worst_s: greatest age before any of them.
        fresh_s: age right after the last.
    """

    at_s: Seconds
    step: Step
    worst_s: Seconds
    fresh_s: Seconds


class Run(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One opening of a store for writing, from its first `save()` on. Times in seconds, after the opening by default.

    Args:
        incarnation: of the store; the same on all ranks of a job.
        rank, world: whose it is.
        began_s: Unix time of the opening.
        uptime_s: how long it has been open, as far as is known.
        ended: it was closed; without this mark it goes on or was cut short.
        holder: text about its process.
        in_flight, snapshot, pipeline: its settings.
        restored_step: what it restored before its first save, None where that is not known; `restored_at_s` when.
        first_step, last_step: of the first and the last `save()` that returned.
        returned_at_s: when the last of these returned.
        progress, climbs, climbed_s: steps between saves in a row, summed where they grew; how often; and their seconds.
        longest: most of these steps between two saves.
        paces: how often a step took how long there, without the time in `save()`, see `durations`.
        returned: calls of `save()` that returned.
        saves, committed, superseded, skipped, failed, retries, save_s, slot_wait_s, copy_wait_s, pool_wait_s: as
            `pccheck.Stats` has them.
        gate_wait_s: what fences and gates outside of `save()` waited.
        first_save_s: the first save's part of `save_s`.
        written_bytes, state_bytes: of all payloads; of the last one.
        durable: how many checkpoints took how long to be durable, see `durations`; `durable_worst_s`.
        durable_step, saved_at_s: the newest durable checkpoint, and when its `save()` began.
        age_s2: the age of the newest durable checkpoint, integrated over `uptime_s`; `age_worst_s`.
        stride, points: how many publications each point stands for.
    """

    incarnation: Count
    rank: Count = 0
    world: Count = 1
    began_s: Seconds
    uptime_s: Seconds
    ended: bool = False
    holder: Text = ""
    in_flight: Count = 1
    snapshot: Text = ""
    pipeline: Text = ""
    restored_step: Step | None = None
    restored_at_s: Seconds | None = None
    first_step: Step
    last_step: Step
    returned_at_s: Seconds | None = None
    progress: Count = 0
    climbs: Count = 0
    climbed_s: Seconds = 0.0
    longest: Count = 0
    paces: dict[Bucket, Count] = {}
    returned: Count = 0
    saves: Count = 0
    committed: Count = 0
    superseded: Count = 0
    skipped: Count = 0
    failed: Count = 0
    retries: Count = 0
    save_s: Seconds = 0.0
    slot_wait_s: Seconds = 0.0
    copy_wait_s: Seconds = 0.0
    gate_wait_s: Seconds = 0.0
    pool_wait_s: Seconds = 0.0
    first_save_s: Seconds = 0.0
    written_bytes: Count = 0
    state_bytes: Count = 0
    durable: dict[Bucket, Count] = {}
    durable_worst_s: Seconds = 0.0
    durable_step: Step | None = None
    saved_at_s: Seconds = 0.0
    age_s2: Annotated[float, Meta(ge=0, le=1e24)] = 0.0
    age_worst_s: Seconds = 0.0
    stride: Count = 1
    points: Annotated[tuple[Point, ...], Meta(max_length=2 * MOST_POINTS)] = ()

    @property
    def cost_s(self) -> float:
        """What checkpoints made the trainer wait, in `save()` and at gates."""
        return self.save_s + self.gate_wait_s


State = Literal["running", "ended", "failed"]


@final
@dataclass(frozen=True, kw_only=True)
class JobRun:
    """One run of a job.

    Args:
        parts: by rank, the lowest first.
        state: how it stands; failed if any rank's part is: it never said that it ended, and nobody goes on with it.
    """

    parts: dict[int, Run]
    state: State

    @property
    def first(self) -> Run:
        """The part of the lowest rank."""
        return next(iter(self.parts.values()))


class _File(msgspec.Struct, frozen=True, kw_only=True):
    format: Literal["pccheck runs"]
    version: int
    runs: Annotated[tuple[Run, ...], Meta(max_length=4 * MOST_RUNS)]


class _Head(msgspec.Struct, frozen=True, kw_only=True):
    format: Literal["pccheck runs"]
    version: int


@final
@dataclass(frozen=True, kw_only=True)
class Found:
    """What is under the file's name.

    Args:
        runs: oldest first.
        problem: why it cannot be read.
        ours: a writer may replace it: it is not there, or whole, or the beginning of one that a crash left, be it of no
            byte, with zeros after it; never somebody else's, nor what is larger than any of ours.
    """

    runs: tuple[Run, ...] = ()
    problem: str | None = None
    ours: bool = True


def read(data: bytes | None) -> Found:
    """Make out what a file holds, of which at most LIMIT_BYTES + 1 bytes were read; None = there is none."""
    if data is None:
        return Found()
    if len(data) > LIMIT_BYTES:
        return Found(problem=f"it is larger than {LIMIT_BYTES:,} bytes", ours=False)
    ours = data.startswith(_MARK) or _MARK.startswith(data.rstrip(b"\0"))  # or a crash left its length, and zeros
    try:
        version = msgspec.json.decode(data, type=_Head).version
        if version == VERSION:
            return Found(runs=msgspec.json.decode(data, type=_File).runs)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        what = "it was cut short, or is damaged" if ours else "it is no history of pccheck's"
        return Found(problem=f"{what}: {error}", ours=ours)
    return Found(problem=f"its version is {version}, and this pccheck knows {VERSION}", ours=False)


def encode(run: Run) -> bytes:
    """Give the JSON of one run."""
    return msgspec.json.encode(run)


def pack(encoded: Sequence[bytes]) -> bytes:
    """Give the bytes of a file of these runs."""
    return b"".join([_MARK, b',"version":%d,"runs":[\n' % VERSION, b",\n".join(encoded), b"\n]}\n"])


def settle(old: Sequence[Run]) -> list[bytes]:
    """Give the JSON of runs that are over, so thinned that they leave room for one that is under way."""
    points = OLD_POINTS
    kept = [_thinned(run, points) for run in old[-(MOST_RUNS - 1) :]]
    encoded = [encode(run) for run in kept]
    while encoded and len(pack(encoded)) > LIMIT_BYTES - _LIVE_BYTES:
        if points:
            points //= 2
            kept = [_thinned(run, points) for run in kept]
            encoded = [encode(run) for run in kept]
        else:
            del encoded[0]
    return encoded


def thin(points: Sequence[Point]) -> list[Point]:
    """Give half as many points: of each two one that stands for both."""
    pairs = zip(points[0::2], points[1::2], strict=False)
    return [joined(a, b) for a, b in pairs] + list(points[len(points) // 2 * 2 :])


def joined(first: Point, then: Point) -> Point:
    """Give the point that stands for two in a row."""
    return Point(then.at_s, then.step, max(first.worst_s, then.worst_s), then.fresh_s)


def _thinned(run: Run, most: int) -> Run:
    points, stride = list(run.points), run.stride
    while len(points) > most:
        points, stride = (thin(points), stride * 2) if most else ([], stride)
    return msgspec.structs.replace(run, points=tuple(points), stride=min(stride, 1 << 60))
