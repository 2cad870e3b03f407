"""Every way to save that the budgets allow, what each costs, and the best of them (floor 0: imports tuning.*)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

from pccheck.tuning.basis import Basis, Setting
from pccheck.tuning.goodput import loss_per_failure, state_age, useful_fraction
from pccheck.tuning.intervals import Choice, choose_interval, waitless_interval
from pccheck.tuning.prediction import predict
from pccheck.tuning.room import check_storage, no_pool, pool_bytes, pool_does, storage_room
from pccheck.tuning.wanted import Wanted

Snapshot = Literal["copy", "lazy"]

# Measured rates differ by more from run to run: what gains less is not worth a slot, a writer, or a fence.
WORTH = 0.002  # of all time
WORTH_LOST = 0.02  # of the work lost per failure, which counts where it is not known how many failures there are


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What saving in one way brings.

    Args:
        name: of the way, for people.
        interval: steps from save to save.
        work_s: the same in seconds of undisturbed training.
        slowdown: time with checkpoints over time without, >= 1.
        stall_s: seconds of the trainer that each checkpoint costs, waits for storage not counted.
        durable_s: seconds from a save until it is durable.
        lost_s: mean seconds that one failure throws away.
        age_mean_s, age_max_s: of the newest durable state.
        useful: share of all time that is useful work, neither repeated nor restarting (goodput); None where it is not
            known how often the job fails.
    """

    name: str
    interval: int
    work_s: float
    slowdown: float
    stall_s: float
    durable_s: float
    lost_s: float
    age_mean_s: float
    age_max_s: float
    useful: float | None


def outcome(
    name: str,
    wanted: Wanted,
    restart_s: float,
    *,
    interval: int,
    stall_s: float,
    durable_s: float,
    slowdown: float,
    in_flight: int,
) -> Outcome:
    """Give what an interval brings, by the exact formulas of `pccheck.tuning`."""
    work_s = interval * wanted.step_s
    age = state_age(work_s, stall_s=stall_s, durable_s=durable_s, in_flight=in_flight)
    mtbf_s = math.inf if wanted.mtbf_s is None else wanted.mtbf_s
    lost_s = loss_per_failure(work_s, stall_s=stall_s, durable_s=durable_s, mtbf_s=mtbf_s, in_flight=in_flight)
    useful = useful_fraction(
        work_s, stall_s=stall_s, durable_s=durable_s, mtbf_s=mtbf_s, restart_s=restart_s, in_flight=in_flight
    )
    return Outcome(
        name=name,
        interval=interval,
        work_s=work_s,
        slowdown=slowdown,
        stall_s=stall_s,
        durable_s=durable_s,
        lost_s=lost_s,
        age_mean_s=age.mean_s,
        age_max_s=age.max_s,
        useful=None if wanted.mtbf_s is None else useful,
    )


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Options of a Checkpointer, the interval for them, and what comes of it.

    Args:
        in_flight, keep, buffer_bytes, snapshot: options of the Checkpointer of each rank.
        setting: its other options.
        choice: the interval, and what asks for it.
        outcome: what it brings.
        storage_bytes: of all slots of all ranks together.
    """

    in_flight: int
    keep: int
    buffer_bytes: int
    snapshot: Snapshot
    setting: Setting
    choice: Choice
    outcome: Outcome
    storage_bytes: int


def best_plan(wanted: Wanted, basis: Basis, *, in_flight: int | None = None) -> Plan:
    """Give the best plan within the budgets; of several that are as good, the one that needs least.

    Best is the greatest useful fraction; where it is not known how often the job fails, the least work lost per failure
    within the overhead that is allowed. If no plan keeps the recovery point, the one that comes nearest.

    Args:
        wanted: the job and its wishes.
        basis: the rates.
        in_flight: only plans with so many; None = from one up to `wanted.max_in_flight`.

    Raises OptionError if a budget leaves room for none, with the least that would do.
    """
    counts = range(1, wanted.max_in_flight + 1) if in_flight is None else (in_flight,)
    check_storage(wanted, basis, counts[0])
    room = storage_room(wanted, basis)
    snapshots: tuple[Snapshot, ...] = ("copy", "lazy") if wanted.snapshot == "auto" else (wanted.snapshot,)
    plans = [
        plan_of(wanted, basis, count, setting, snapshot)
        for count in counts
        if (count + wanted.keep) * wanted.state_bytes <= room
        for setting in basis.settings
        if pool_does(wanted, basis, count, setting)
        for snapshot in snapshots
    ]
    if not plans:
        raise no_pool(wanted, basis, counts[0])
    return _best(plans)


def plan_of(wanted: Wanted, basis: Basis, in_flight: int, setting: Setting, snapshot: Snapshot) -> Plan:
    """Give the plan for given options: the interval by `choose_interval`, and what comes of it by `predict`.

    The interval leaves room for the slowest saves that were measured; what comes of it is told for usual ones.
    """
    setting = setting.of(in_flight)
    pool = pool_bytes(wanted, basis, in_flight, setting)
    model = basis.machine.model(**setting.cut)
    alone_s = basis.machine.alone_s(wanted.part_bytes, **setting.cut)
    at = partial(_outcome, wanted, basis, in_flight=in_flight, setting=setting, buffer_bytes=pool, snapshot=snapshot)
    stall_s = at(1).stall_s  # the same at any interval
    # A save each 100 ms that takes 95 ms until durable cost 4 % more than one that takes them always (measured). And of
    # many ways one is always the fastest, if only by luck: the few saves of a trial came to more than the limit of a
    # disk, and in a benchmark what was advised slowed a loop down by 18 % instead of 4.
    slow = basis.machine.spread(**setting.cut) * (1 + basis.doubt(setting))
    durable_s = {count: slow * model.durable_s(wanted.part_bytes, count) for count in range(1, in_flight + 1)}
    choice = choose_interval(
        step_s=wanted.step_s,
        stall_s=stall_s,
        durable_s=durable_s[in_flight],
        durable_alone_s=min(alone_s, durable_s[in_flight]),
        in_flight=in_flight,
        slowdown=wanted.slowdown_allowed,
        stall_fraction=wanted.stall_allowed,
        mtbf_s=wanted.mtbf_s,
        restart_s=basis.restart_s,
        rpo_s=wanted.rpo_s,
    )
    seen = [at(interval) for interval in _intervals(choice, durable_s, wanted.step_s, stall_s)]
    kept = [found for found in seen if wanted.rpo_s is None or found.age_max_s <= wanted.rpo_s * (1 + 1e-9)]
    best = max(kept, key=_goodness) if kept else min(seen, key=lambda found: found.age_max_s)
    waits = best.interval != choice.interval or (choice.binds, best.interval) == ("bandwidth", choice.terms["waits"])
    choice = replace(
        choice,
        interval=best.interval,
        binds="waits" if waits else choice.binds,
        slowdown=best.slowdown,
        oldest_s=best.age_max_s,
        useful=best.useful,
        feasible=bool(kept),
    )
    return Plan(
        in_flight=in_flight,
        keep=wanted.keep,
        buffer_bytes=pool,
        snapshot=snapshot,
        setting=setting,
        choice=choice,
        outcome=best,
        storage_bytes=(in_flight + wanted.keep) * wanted.state_bytes,
    )


def at_interval(wanted: Wanted, basis: Basis, plan: Plan, interval: int) -> Outcome:
    """Give what the options of a plan bring at another interval."""
    return _outcome(
        wanted,
        basis,
        interval,
        in_flight=plan.in_flight,
        setting=plan.setting,
        buffer_bytes=plan.buffer_bytes,
        snapshot=plan.snapshot,
    )


def _outcome(
    wanted: Wanted,
    basis: Basis,
    interval: int,
    *,
    in_flight: int,
    setting: Setting,
    buffer_bytes: int,
    snapshot: Snapshot,
) -> Outcome:
    seen = predict(
        basis.machine,
        state_bytes=wanted.part_bytes,
        in_flight=in_flight,
        interval=interval,
        step_s=wanted.step_s,
        **setting.cut,
        buffer_bytes=buffer_bytes,
        snapshot=snapshot,
    )
    return outcome(
        f"{in_flight} in flight",
        wanted,
        basis.restart_s,
        interval=interval,
        stall_s=seen.stall_s,
        durable_s=seen.durable_s,
        slowdown=seen.slowdown,
        in_flight=in_flight,
    )


def _intervals(choice: Choice, durable_s: Mapping[int, float], step_s: float, stall_s: float) -> list[int]:
    """Give the chosen interval, and longer ones from which on fewer checkpoints are under way at once.

    Each of these is durable sooner, which `choose_interval` cannot know: it is told one time to durable.
    """
    fewer = {
        waitless_interval(seconds, in_flight=count, step_s=step_s, stall_s=stall_s)
        for count, seconds in durable_s.items()
    }
    return [choice.interval, *sorted(f for f in fewer if f > choice.interval)]


def _goodness(seen: Outcome) -> tuple[float, float]:
    return (seen.useful or 0.0, -seen.lost_s)


def _best(plans: Sequence[Plan]) -> Plan:
    """Give the best; plans come in the order of what they need, so that the first that is as good is it."""
    among = [plan for plan in plans if plan.choice.feasible]
    if not among:
        nearest = min(plan.choice.oldest_s for plan in plans)
        among = [plan for plan in plans if plan.choice.oldest_s <= (1 + WORTH_LOST) * nearest]
    least_lost = min(plan.outcome.lost_s for plan in among)
    most_useful = max(plan.outcome.useful or 0.0 for plan in among)
    for plan in among:
        if plan.outcome.useful is None:
            good = plan.outcome.lost_s <= (1 + WORTH_LOST) * least_lost
        else:
            good = plan.outcome.useful >= most_useful - WORTH
        if good:
            return plan
    raise AssertionError(plans)  # one of them is the best
