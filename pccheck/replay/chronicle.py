"""What one contender told over its lives, and what comes of it (floor 0: imports replay.schedule, told, timeline)."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf
from statistics import median
from typing import final

from pccheck.replay.schedule import Life
from pccheck.replay.timeline import Segment, SegmentKind, Timeline
from pccheck.replay.told import MOST_DIGESTS, Began, Saved, Saving, Stepped, Told
from pccheck.replay.trace import Trace

_SHORTEST_S = 1e-3  # of stalls that a timeline shows


@dataclass(frozen=True, kw_only=True)
class LiveOutcome:
    """What one contender made of a trace, as measured. `work_s + lost_s + load_s + down_s` is `wall_s`.

    Attributes:
        contender: its name.
        every: steps between saves.
        goodput: steps that count, times the seconds of an undisturbed step, over the time; 0 to 1, but for noise.
        wall_s: how long the trace lasted.
        steps: that count at the end: those a next process goes on after if the trace ended with a kill, else all done.
        useful_s: those steps, in seconds of undisturbed work.
        work_s: seconds that were spent on them, stalls included.
        lost_s: seconds spent on what kills undid, the step that was under way included.
        load_s: seconds spent on opening, restoring and checking.
        down_s: seconds from kills until the next process may begin.
        stall_s: seconds that the loop spent in `save()` and `fence()`, of `work_s` and `lost_s`.
        slowdown: seconds of a step, over those of an undisturbed one: stalls and interference.
        saves: that were asked for.
        kills: losses of the trace, and of them `kills_down` while the job was down already.
        lost_steps: of each other kill: how many were done again.
        loads_s: of each process that got so far: seconds until it had opened and restored; checking is not in it.
        starts_s: of each process: seconds of CPU time to import and set up, which count for nobody.
        refused: why a restored state was not what had been saved, so that the job began anew; () is as it should be.
        timeline: what happened when; `save` calls of a millisecond and more are cut out of the work.
    """

    contender: str
    every: int
    goodput: float
    wall_s: float
    steps: int
    useful_s: float
    work_s: float
    lost_s: float
    load_s: float
    down_s: float
    stall_s: float
    slowdown: float
    saves: int
    kills: int
    kills_down: int
    lost_steps: tuple[int, ...]
    loads_s: tuple[float, ...]
    starts_s: tuple[float, ...]
    refused: tuple[str, ...]
    timeline: Timeline

    @property
    def stall_per_save_s(self) -> float:
        """Seconds that the loop spent in `save()` and `fence()`, for each save."""
        return self.stall_s / self.saves if self.saves else 0.0

    @property
    def load_median_s(self) -> float:
        """Seconds until a process had opened and restored, the median."""
        return median(self.loads_s) if self.loads_s else 0.0

    @property
    def lost_per_kill(self) -> float:
        """Steps lost for each kill that hit a job that was up, the mean."""
        return sum(self.lost_steps) / len(self.lost_steps) if self.lost_steps else 0.0


@dataclass(frozen=True)
class _Record:
    """One life, in seconds of the trace; `began_s` and `first` are None where it was killed before it had restored."""

    life: Life
    began_s: float | None
    first: int
    steps: tuple[tuple[float, int], ...]

    @property
    def reached(self) -> int:
        return self.steps[-1][1] if self.steps else self.first


@final
class Chronicle:
    """Collects what a contender's processes told. Not thread-safe.

    Args:
        contender: its name.
        every: steps between its saves.
    """

    def __init__(self, contender: str, every: int) -> None:
        self.contender, self.every = contender, every
        self._digests: dict[int, str] = {}
        self._records: list[_Record] = []
        self._saves: list[tuple[float, int]] = []
        self._held: list[tuple[float, float, int]] = []  # from, until, step: what the trainer spent in `save`
        self._loads_s: list[float] = []
        self._starts_s: list[float] = []
        self._refused: list[str] = []
        self._fences_s = 0.0

    @property
    def digests(self) -> dict[int, str]:
        """By step, of the newest saves that were begun."""
        return dict(list(self._digests.items())[-MOST_DIGESTS:])

    def started(self, seconds: float) -> None:
        """Note what a process took to import and set up."""
        self._starts_s.append(seconds)

    def lived(self, life: Life, went_at: float, told: list[Told]) -> None:
        """Note a life that is over.

        Args:
            life: as scheduled.
            went_at: when its process was told to go, on the clock of what it told.
            told: all of it.
        """
        began: Began | None = None
        steps: list[tuple[float, int]] = []
        for one in told:
            match one:
                case Began():
                    began = one
                    self.loaded(one)
                case Stepped():
                    steps.append((min(life.start_s + one.at - went_at, life.end_s), one.step))
                    self._fences_s += one.fence_s
                case Saving():
                    self._saves.append((min(life.start_s + one.at - went_at, life.end_s), one.step))
                    self._held.append((self._saves[-1][0], life.end_s, one.step))  # until killed, if nothing follows
                    # Behind the others even if the step was saved before: it is among the newest now.
                    self._digests.pop(one.step, None)
                    self._digests[one.step] = one.digest
                case Saved():
                    since_s, _, step = self._held[-1]
                    self._held[-1] = (since_s, min(since_s + one.stall_s, life.end_s), step)
        before = self._records[-1].reached if self._records else 0
        began_s = None if began is None else min(life.start_s + began.at - went_at, life.end_s)
        self._records.append(_Record(life, began_s, before if began is None else began.step, tuple(steps)))

    def loaded(self, began: Began) -> None:
        """Note how a process began; of those that are in a life, `lived` does it."""
        self._loads_s.append(began.load_s)
        if began.refused is not None:
            self._refused.append(began.refused)

    def outcome(self, trace: Trace, step_s: float, final_step: int | None) -> LiveOutcome:
        """Give what came of it.

        Args:
            trace: that it lived through.
            step_s: seconds of an undisturbed step, above 0.
            final_step: after which a process would go on at the end; None = the job was alive then.
        """
        steps = final_step if final_step is not None else (self._records[-1].reached if self._records else 0)
        segments = _segments(self._records, trace.end_s, steps)
        spent: dict[str, float] = dict.fromkeys(("work", "lost", "load", "down"), 0.0)
        for segment in segments:
            spent[segment.kind] += segment.end_s - segment.start_s
        kills = _kills(self._records, trace, steps)
        ends = {record.life.end_s for record in self._records if record.began_s is not None}
        ran = [(r.steps[-1][0] - r.began_s, len(r.steps)) for r in self._records if r.began_s is not None and r.steps]
        done = sum(count for _, count in ran)
        held_s = sum(until_s - since_s for since_s, until_s, _ in self._held)
        return LiveOutcome(
            contender=self.contender, every=self.every, goodput=steps * step_s / trace.end_s, wall_s=trace.end_s,
            steps=steps, useful_s=steps * step_s,
            work_s=spent["work"], lost_s=spent["lost"], load_s=spent["load"], down_s=spent["down"],
            stall_s=self._fences_s + held_s, slowdown=sum(s for s, _ in ran) / done / step_s if done else 1.0,
            saves=len(self._saves), kills=trace.failures,
            kills_down=trace.failures - sum(record.life.killed for record in self._records),
            lost_steps=tuple(reached - resumed for at, reached, resumed in kills if at in ends),
            loads_s=tuple(self._loads_s), starts_s=tuple(self._starts_s), refused=tuple(self._refused),
            timeline=Timeline(
                segments=_cut(segments, self._held), saves=tuple(self._saves), kills=kills, end_s=trace.end_s
            ),
        )  # fmt: skip


def _resumed(records: list[_Record], final: int) -> list[int]:
    """Give, for each life, the step after which the next one that got so far went on."""
    found, after = [], final
    for record in reversed(records):
        found.append(after)
        if record.began_s is not None:
            after = record.first
    return found[::-1]


def _segments(records: list[_Record], end_s: float, final: int) -> tuple[Segment, ...]:
    """Give what was done when. A step counts if no later process had to go on from before it."""
    counted, kept = [], final
    for record in reversed(records):
        counted.append(kept)
        if record.began_s is not None:
            kept = min(kept, record.first)
    segments: list[Segment] = []

    def add(kind: SegmentKind, start_s: float, stop_s: float, first: int, last: int) -> None:
        if stop_s > start_s:
            segments.append(Segment(kind, start_s, stop_s, first, last))

    now_s, at = 0.0, 0
    for record, limit in zip(records, reversed(counted), strict=True):
        life = record.life
        add("down", now_s, life.start_s, at, at)
        now_s = life.end_s
        if record.began_s is None:
            add("load", life.start_s, life.end_s, at, at)
            continue
        add("load", life.start_s, record.began_s, record.first, record.first)
        at = record.reached
        good = [(when, step) for when, step in record.steps if step <= limit]
        split_s, split = (life.end_s, at) if not life.killed else good[-1] if good else (record.began_s, record.first)
        add("work", record.began_s, split_s, record.first, split)
        add("lost", split_s, life.end_s, split, at)
    add("down", now_s, end_s, at, at)
    return tuple(segments)


def _kills(records: list[_Record], trace: Trace, final: int) -> tuple[tuple[float, int, int], ...]:
    """Give (seconds, step reached, step gone on after) of each kill; of a job that was down, nothing is lost by it."""
    at_end = {r.life.end_s: (r, resumed) for r, resumed in zip(records, _resumed(records, final), strict=True)}
    found, resumed = [], 0
    for kill_s in trace.losses:
        record, after = at_end.get(kill_s, (None, resumed))
        resumed = after
        up = record is not None and record.began_s is not None
        found.append((kill_s, record.reached if up and record is not None else resumed, resumed))
    return tuple(found)


def _cut(segments: tuple[Segment, ...], held: list[tuple[float, float, int]]) -> tuple[Segment, ...]:
    """Give the segments with those cut out of work, counted or lost, in which the trainer was in `save`."""
    stalls = iter([*(h for h in held if h[1] - h[0] >= _SHORTEST_S), (inf, inf, 0)])
    since_s, until_s, step = next(stalls)
    found: list[Segment] = []
    for segment in segments:
        now_s, at = segment.start_s, segment.first
        while segment.kind in ("work", "lost") and since_s < segment.end_s:
            if since_s > now_s:
                found.append(Segment(segment.kind, now_s, since_s, at, step))
            stop_s = min(until_s, segment.end_s)
            found.append(Segment("stall", max(since_s, now_s), stop_s, step, step))
            now_s, at = stop_s, step
            if until_s > segment.end_s:  # the rest of it is in the next segment
                break
            since_s, until_s, step = next(stalls)
        if now_s < segment.end_s:
            found.append(Segment(segment.kind, now_s, segment.end_s, at, segment.last))
    return tuple(found)
