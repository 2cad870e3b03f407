"""What runs cost and what failures took, as plain numbers (floor 0: imports bill.*, tuning)."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from typing import Any

import msgspec

from pccheck.bill import deaths
from pccheck.bill.durations import quantile
from pccheck.bill.runs import JobRun, Run, State
from pccheck.errors import OptionError
from pccheck.tuning.goodput import loss_per_failure
from pccheck.version import __version__


class Saves(msgspec.Struct, frozen=True, kw_only=True):
    """How many saves were started, how those that are over ended, and writes that were tried again."""

    started: int
    committed: int
    superseded: int
    skipped: int
    failed: int
    retries: int


class Cost(msgspec.Struct, frozen=True, kw_only=True):
    """What checkpoints made the trainer wait: of several ranks, the one that waited longest.

    Args:
        rank: which one.
        ms_per_step: milliseconds per training step; None before the second save.
        percent: of the time between saves.
        ms_per_save: milliseconds per save.
        total_s: seconds in all, the sum of the next four.
        copy_wait_s: in `save()`, for copies of the state.
        slot_wait_s: in `save()`, for a place among the checkpoints in flight.
        gate_wait_s: at fences and gates before optimizer steps.
        other_s: in `save()`, for all else: planning, threads; in the first save, making the slots.
        first_save_s: of the total, the first save.
        pool_wait_s: what captures waited for buffers; no part of the total, but what copies and gates then wait for.
    """

    rank: int
    ms_per_step: float | None
    percent: float | None
    ms_per_save: float | None
    total_s: float
    copy_wait_s: float
    slot_wait_s: float
    gate_wait_s: float
    other_s: float
    first_save_s: float
    pool_wait_s: float


class Interval(msgspec.Struct, frozen=True, kw_only=True):
    """Means from save to save: steps and seconds; and a step without what checkpoints cost, the median over saves."""

    steps: float | None
    seconds: float | None
    step_s: float | None


class Durable(msgspec.Struct, frozen=True, kw_only=True):
    """How long checkpoints took from `save()` to durable: median and 90th percentile (within 2 %), and the longest."""

    count: int
    median_s: float | None
    p90_s: float | None
    worst_s: float | None


class AgePoint(msgspec.Struct, frozen=True, kw_only=True):
    """The age of the newest durable checkpoint around a publication; see `bill.runs.Point`."""

    at_s: float
    step: int
    worst_s: float
    fresh_s: float


class Age(msgspec.Struct, frozen=True, kw_only=True):
    """How old the newest durable checkpoint was: what a failure would have cost. Before the first, as old as the run.

    `series` has at most 512 points, each for `stride` publications; `now_s` is of a run that goes on.
    """

    now_s: float | None
    mean_s: float
    worst_s: float
    stride: int
    series: tuple[AgePoint, ...]


class Loss(msgspec.Struct, frozen=True, kw_only=True):
    """What one failure of such a run takes.

    Args:
        total_s: lost work and restart.
        work_s: mean age of the newest durable checkpoint over the run, measured.
        model_s: by `pccheck.tuning.loss_per_failure`, where failures were seen, to compare; no part of `total_s`.
        restart_s: median of what restarts took, from the last sign of life to what was restored; None = none was seen.
    """

    total_s: float
    work_s: float
    model_s: float | None
    restart_s: float | None


class RunBill(msgspec.Struct, frozen=True, kw_only=True):
    """One run. Steps are the labels given to `save()`; `died_step`, and so `steps_lost`, is an estimate."""

    incarnation: int
    state: State
    began: str
    uptime_s: float
    world: int
    ranks: tuple[int, ...]
    writer: str
    in_flight: int
    snapshot: str
    pipeline: str
    restored_step: int | None
    first_step: int
    reached_step: int
    durable_step: int | None
    died_step: int | None
    steps_lost: int | None
    saves: Saves
    state_bytes: int
    written_bytes: int
    cost: Cost
    interval: Interval
    durable: Durable
    age: Age
    loss: Loss


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """What checkpoints cost in the runs of a store, the last 64; made by `pccheck.report`.

    Args:
        path: the folder that was asked about.
        uptime_s: of all runs.
        failures: runs that never said that they ended.
        mtbf_s: uptime per failure; None without one.
        restart_s: median of what restarts after failures took.
        steps_lost: in all failures together, an estimate: `RunBill.died_step` is one.
        notes: what could not be told, in plain sentences.
        runs: oldest first.
    """

    path: str
    uptime_s: float
    failures: int
    mtbf_s: float | None
    restart_s: float | None
    steps_lost: int
    notes: tuple[str, ...]
    runs: tuple[RunBill, ...]

    @property
    def last(self) -> RunBill | None:
        """The newest run, None where there is none."""
        return self.runs[-1] if self.runs else None

    def as_json(self) -> dict[str, Any]:
        """Give it as what `json.dumps` takes, with the version of pccheck; names stay, members may be added."""
        made: dict[str, Any] = msgspec.to_builtins(self)
        return {"pccheck": __version__, **made}


def report_of(path: str, runs: Sequence[JobRun], notes: Iterable[str], now_s: float) -> Report:
    """Sum up the runs of a job, oldest first.

    Args:
        path: what was asked about.
        runs: of all ranks.
        notes: what is to be said besides.
        now_s: Unix time.
    """
    followed = list(zip(runs, [*runs[1:], None], strict=False))
    uptime_s = sum(run.first.uptime_s for run in runs)
    failures = sum(run.state == "failed" for run in runs)
    mtbf_s = uptime_s / failures if failures else None
    restarts = [deaths.restart_s(run.first, then.first) for run, then in followed if then and run.state == "failed"]
    restart_s = statistics.median(restarts) if restarts else None
    usual = next((run.first for run in reversed(runs) if run.first.progress), None)
    bills = tuple(_bill(run, then, usual, mtbf_s, restart_s, now_s) for run, then in followed)
    return Report(
        path=path, uptime_s=round(uptime_s, 3), failures=failures, mtbf_s=mtbf_s, restart_s=restart_s,
        steps_lost=sum(bill.steps_lost or 0 for bill in bills), notes=tuple(notes), runs=bills,
    )  # fmt: skip


def _bill(
    job: JobRun, then: JobRun | None, usual: Run | None, mtbf_s: float | None, restart_s: float | None, now_s: float
) -> RunBill:  # fmt: skip
    run, parts = job.first, job.parts.values()
    rank, dearest = max(job.parts.items(), key=lambda each: each[1].cost_s)
    cost, interval = _cost(rank, dearest)
    age = _age(run, now_s if job.state == "running" else None)
    died_step = None
    if job.state == "failed":
        noted, run = run, deaths.at_least(run, then)
        died_step = max(run.last_step, deaths.died_step(noted, usual))
    return RunBill(
        incarnation=run.incarnation, state=job.state, began=_iso(run.began_s), uptime_s=run.uptime_s, world=run.world,
        ranks=tuple(job.parts), writer=run.holder, in_flight=run.in_flight, snapshot=run.snapshot,
        pipeline=run.pipeline, restored_step=run.restored_step, first_step=run.first_step, reached_step=run.last_step,
        durable_step=run.durable_step, died_step=died_step, steps_lost=deaths.steps_lost(run, died_step, then),
        saves=Saves(
            started=run.saves, committed=run.committed, superseded=run.superseded, skipped=run.skipped,
            failed=max(part.failed for part in parts), retries=sum(part.retries for part in parts),
        ),
        state_bytes=sum(part.state_bytes for part in parts), written_bytes=sum(part.written_bytes for part in parts),
        cost=cost, interval=interval, durable=_durable(run), age=age,
        loss=_loss(run, age, cost, interval, mtbf_s, restart_s),
    )  # fmt: skip


def _cost(rank: int, run: Run) -> tuple[Cost, Interval]:
    """Give what checkpoints cost, and the mean interval: of saves after which the step had grown."""
    steps = run.progress / run.climbs if run.climbs else None
    seconds = run.climbed_s / run.climbs if run.climbs else None
    per_save_s = run.cost_s / run.returned if run.returned else None
    ms_per_step = percent = step_s = None
    if steps and seconds and per_save_s is not None:
        ms_per_step, percent = 1e3 * per_save_s / steps, min(100.0, 100 * per_save_s / seconds)
        step_s = _step_s(run, steps, seconds)
    cost = Cost(
        rank=rank, ms_per_step=ms_per_step, percent=percent,
        ms_per_save=None if per_save_s is None else 1e3 * per_save_s, total_s=run.cost_s,
        copy_wait_s=run.copy_wait_s, slot_wait_s=run.slot_wait_s, gate_wait_s=run.gate_wait_s,
        other_s=max(0.0, run.save_s - run.copy_wait_s - run.slot_wait_s), first_save_s=run.first_save_s,
        pool_wait_s=run.pool_wait_s,
    )  # fmt: skip
    return cost, Interval(steps=steps, seconds=seconds, step_s=step_s)


def _step_s(run: Run, steps: float, seconds: float) -> float:
    """Give what a step takes without checkpoints: the median, as means have pauses in them, such as for evaluation."""
    pace_s = quantile(run.paces, 0.5, math.inf)
    if pace_s is None:  # noted by a version that kept no paces
        return max(0.0, seconds - _steady_s(run)) / steps
    return max(0.0, pace_s - run.gate_wait_s / run.returned / steps)


def _steady_s(run: Run) -> float:
    """Give what a save costs after the first, which makes the slots."""
    return max(0.0, run.cost_s - run.first_save_s) / (run.returned - 1) if run.returned > 1 else run.cost_s


def _durable(run: Run) -> Durable:
    median_s, p90_s = (quantile(run.durable, part, run.durable_worst_s) for part in (0.5, 0.9))
    count = sum(run.durable.values())
    return Durable(count=count, median_s=median_s, p90_s=p90_s, worst_s=run.durable_worst_s if count else None)


def _age(run: Run, now_s: float | None) -> Age:
    known = now_s is not None and run.durable_step is not None
    return Age(
        now_s=max(0.0, (now_s or 0.0) - run.began_s - run.saved_at_s) if known else None,
        mean_s=run.age_s2 / run.uptime_s if run.uptime_s else 0.0, worst_s=run.age_worst_s, stride=run.stride,
        series=tuple(AgePoint(at_s=p.at_s, step=p.step, worst_s=p.worst_s, fresh_s=p.fresh_s) for p in run.points),
    )  # fmt: skip


def _loss(
    run: Run, age: Age, cost: Cost, interval: Interval, mtbf_s: float | None, restart_s: float | None
) -> Loss:  # fmt: skip
    model_s, durable = None, _durable(run)
    if mtbf_s and interval.seconds and durable.median_s:
        stall_s = _steady_s(run)
        try:
            model_s = loss_per_failure(
                interval.seconds - stall_s, stall_s=stall_s, durable_s=durable.median_s, mtbf_s=mtbf_s,
                in_flight=run.in_flight,
            )  # fmt: skip
        except OptionError:  # what was noted makes no sense, such as an interval shorter than what it costs
            model_s = None
    return Loss(total_s=age.mean_s + (restart_s or 0.0), work_s=age.mean_s, model_s=model_s, restart_s=restart_s)


def _iso(unix_s: float) -> str:
    try:
        return datetime.fromtimestamp(unix_s, UTC).isoformat(timespec="milliseconds")
    except (OverflowError, ValueError, OSError):
        return ""  # a year that no calendar has
