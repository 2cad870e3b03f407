"""A training job over a trace of failures, in simulated time (floor 0: imports errors, tuning, and rooms of replay).

Events, not steps: from save to save, with writes that share storage meanwhile. A kill comes when the trace says, be the
job at work, waiting, restarting, or redoing what an earlier kill undid. It drops the saves under way; of those that are
durable, the newest counts, in whatever order they became so. How long a step takes depends on its number alone.
"""

from __future__ import annotations

import math
import random

from pccheck.errors import OptionError, UsageError
from pccheck.replay.disk import Disk, Flight
from pccheck.replay.job import Job, Outcome
from pccheck.replay.policy import Policy, Watch
from pccheck.replay.steptimes import StepTimes, factor
from pccheck.replay.timeline import Segment, SegmentKind, Timeline
from pccheck.replay.trace import Trace

MOST_STEPS = 1_000_000_000  # that a trace may have time for
_MOST_CHANGES = 10_000


class _Stopped(Exception):
    """The trace stops the trainer in what it does."""


def simulate(
    job: Job, trace: Trace, policy: Policy, *, gains: bool = False, timeline: bool = False,
    most_saves: int | None = None,
) -> Outcome:  # fmt: skip
    """Give what becomes of a job that saves as a policy says, over a trace.

    Deterministic: the same arguments (and a fresh policy) give the same outcome.

    Args:
        job: the training job and its storage.
        trace: when it is killed.
        policy: when it saves; a fresh one.
        gains: restart on purpose when machines were added: at the end of the step, once a save of it is durable.
        timeline: keep what happened when.
        most_saves: give up beyond so many; None = never.

    Raises OptionError if the trace has time for more than a billion steps, UsageError after too many saves.
    """
    if trace.end_s / job.step_s > MOST_STEPS:
        raise OptionError("step_s", job.step_s, f"above {trace.end_s / MOST_STEPS:.3g}: the trace lasts so long")
    return _Run(job, trace, policy, gains, _Recorder() if timeline else None, most_saves or math.inf).run()


class _Recorder:
    """Keeps what happened when."""

    def __init__(self) -> None:
        self.segments: list[Segment] = []
        self.saves: list[tuple[float, int]] = []
        self.flights: list[tuple[float, float, bool]] = []
        self.kills: list[tuple[float, int, int]] = []

    def spent(self, kind: SegmentKind, start_s: float, end_s: float, first: int, last: int) -> None:
        if end_s > start_s:
            self.segments.append(Segment(kind, start_s, end_s, first, last))

    def killed(self, at_s: float, reached: int, durable: int) -> None:
        """Note a kill, and that work since the durable step was lost."""
        self.kills.append((at_s, reached, durable))
        for i in range(len(self.segments) - 1, -1, -1):
            segment = self.segments[i]
            if segment.kind == "work":
                if segment.first < durable:
                    break
                self.segments[i] = Segment("lost", segment.start_s, segment.end_s, segment.first, segment.last)


class _Run:
    """One run of the simulation."""

    def __init__(
        self, job: Job, trace: Trace, policy: Policy, gains: bool, recorder: _Recorder | None, most_saves: float
    ) -> None:
        self._most_saves = most_saves
        self._job, self._trace, self._policy, self._recorder = job, trace, policy, recorder
        self._stops = [*trace.losses] if trace.killed_at_end else [*(t for t in trace.losses), trace.end_s]
        self._stops.reverse()
        self._gains = [*reversed(trace.gains)] if gains else []
        self._disk = Disk(job)
        self._times = StepTimes(job.step_s, job.jitter, job.seed)
        self._writes_dice = random.Random(f"writes {job.seed}")
        self._now = 0.0
        self._step = self._saved_step = self._durable_step = 0
        self._spent = {"work": 0.0, "slot": 0.0, "stall": 0.0, "down": 0.0, "load": 0.0}
        self._is_down = False
        self._watch = Watch(job.jitter)
        self._busy_s = 0.0  # when the last save became durable
        self._intervals: list[tuple[float, int]] = []
        self._counts = {"saves": 0, "durable": 0, "kills": 0, "kills_down": 0, "restarts": 0}

    def run(self) -> Outcome:
        while self._stops:
            try:
                if self._is_down:
                    self._restart()
                self._train()
            except _Stopped:
                if self._stops or self._trace.killed_at_end:
                    self._kill()
        return self._outcome()

    # -- what the trainer does ---------------------------------------------------------------------------------------

    def _train(self) -> None:
        while True:
            interval = self._policy.interval
            if (not self._intervals or self._intervals[-1][1] != interval) and len(self._intervals) < _MOST_CHANGES:
                self._intervals.append((self._now, interval))
            steps = interval
            if self._gains:
                left_s = self._gains[-1] - self._now
                steps = min(interval, max(1, self._times.begun(self._step, left_s))) if left_s > 0 else 0
            self._work(steps)
            if steps < interval:
                self._hand_over()
                continue
            while more := self._policy.asked(self._seen()):
                self._work(more)
            self._save()

    def _seen(self) -> Watch:
        """Give what the trainer measured, with what it sees now."""
        begun_s = [flight.start_s for flight in self._disk.flights]
        self._watch.running, self._watch.oldest_s = len(begun_s), self._now - min(begun_s, default=self._now)
        return self._watch

    def _is_full(self) -> bool:
        return len(self._disk.flights) >= self._policy.in_flight

    def _work(self, steps: int) -> None:
        """Do steps; of the one in which the trace stops it, nothing is left."""
        begin_s, first = self._now, self._step
        done = 0
        try:
            self._until(begin_s + self._times.seconds(first, first + steps), "work")
            done = steps
        except _Stopped:
            done = min(steps, self._times.done(first, self._now - begin_s))
            raise
        finally:
            self._step += done
            disturbed = self._times.begun(first, self._busy_s - begin_s)
            clean = 0 if self._disk.flights else max(0, done - disturbed)
            self._watch.worked(done, self._times.seconds(first, self._step), clean)
            if self._recorder is not None:
                self._recorder.spent("work", begin_s, self._now, first, self._step)

    def _save(self) -> None:
        """Wait for a slot, hand the state over, and, if the policy waits, see it through."""
        asked_s = self._now
        self._counts["saves"] += 1
        if self._counts["saves"] > self._most_saves:
            raise UsageError(
                f"{self._policy.name!r} makes more than {self._most_saves:,} saves in this trace, which would take "
                "minutes to simulate: replay a part of the trace, or scale its times down"
            )
        self._watch.saves += 1
        while self._is_full():
            self._until(self._disk.next_s(), "slot")
        size = self._job.state_bytes * factor(self._writes_dice, self._job.jitter)
        flight = Flight(self._step, self._now, size, self._now + self._job.stall_s)
        self._disk.begin(flight)
        self._saved_step = self._step
        if self._recorder is not None:
            self._recorder.saves.append((asked_s, self._step))
        self._until(self._now + self._job.stall_s, "stall")
        while self._policy.waits and flight in self._disk.flights:
            self._until(self._disk.next_s(), "stall")

    def _hand_over(self) -> None:
        """Restart on purpose: nothing is lost."""
        if self._saved_step != self._step:
            self._save()
        while self._disk.flights:
            self._until(self._disk.next_s(), "stall")
        self._counts["restarts"] += 1
        self._is_down = True
        self._restart()

    def _restart(self) -> None:
        self._until(self._now + self._job.restart_s, "down")
        if self._durable_step:
            self._until(self._now + self._job.load_s, "load")
        self._is_down = False
        while self._gains and self._gains[-1] <= self._now:
            self._gains.pop()  # the new process has these machines already
        down_s = self._spent["down"] + self._spent["load"]
        self._watch = Watch(self._job.jitter)
        self._policy.restarted(up_s=self._now - down_s, failures=self._counts["kills"])

    def _kill(self) -> None:
        self._counts["kills"] += 1
        self._counts["kills_down"] += self._is_down
        if self._recorder is not None:
            self._recorder.flights += [(f.start_s, self._now, False) for f in self._disk.flights]
            self._recorder.killed(self._now, self._step, self._durable_step)
        self._disk.clear()
        self._is_down = True
        self._step = self._saved_step = self._durable_step

    # -- time --------------------------------------------------------------------------------------------------------

    def _until(self, time_s: float, kind: str) -> None:
        """Let time pass; raise _Stopped where the trace stops the trainer before."""
        start_s, self._now = self._now, min(time_s, self._stops[-1])
        for at_s, flight in self._disk.advance(self._now):
            self._counts["durable"] += 1
            self._watch.landed(at_s - flight.start_s, flight.service_s)
            self._busy_s = at_s
            self._durable_step = max(self._durable_step, flight.step)
            if self._recorder is not None:
                self._recorder.flights.append((flight.start_s, at_s, True))
        self._spent[kind] += self._now - start_s
        self._watch.slot_wait_s += (self._now - start_s) * (kind == "slot")
        self._watch.stall_s += (self._now - start_s) * (kind == "stall")
        if self._recorder is not None and kind != "work":
            shown: SegmentKind = "down" if kind == "down" else "load" if kind == "load" else "stall"
            self._recorder.spent(shown, start_s, self._now, self._step, self._step)
        if self._now == self._stops[-1]:
            self._stops.pop()
            raise _Stopped

    def _outcome(self) -> Outcome:
        wall_s, recorder, timeline = self._trace.end_s, self._recorder, None
        useful_s = self._times.seconds(0, self._step)
        if recorder is not None:
            timeline = Timeline(
                segments=tuple(recorder.segments),
                saves=tuple(recorder.saves),
                kills=tuple(recorder.kills),
                end_s=wall_s,
                flights=tuple(recorder.flights),
            )
        return Outcome(
            policy=self._policy.name,
            goodput=useful_s / wall_s,
            wall_s=wall_s,
            steps=self._step,
            useful_s=useful_s,
            lost_s=max(0.0, self._spent["work"] - useful_s),
            stall_s=self._spent["slot"] + self._spent["stall"],
            slot_wait_s=self._spent["slot"],
            down_s=self._spent["down"] + self._spent["load"],
            in_flight=self._policy.in_flight,
            intervals=tuple(self._intervals),
            timeline=timeline,
            **self._counts,
        )
