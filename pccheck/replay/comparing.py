"""Policies side by side over one trace, and fixed intervals beside them (floor 0: imports tuning, replay rooms)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from pccheck.errors import OptionError, UsageError
from pccheck.replay.job import Job, Outcome
from pccheck.replay.policies import CheckFreqLoop, ControllerLoop, Fixed, ideal
from pccheck.replay.policy import Policy
from pccheck.replay.simulation import simulate
from pccheck.replay.trace import Trace
from pccheck.tuning import choose_interval, daly, daly_first_order, optimum, pccheck_interval, young
from pccheck.tuning.domain import share
from pccheck.tuning.law import SLOWDOWN

# What answers in seconds: each loss is simulated for every policy and every interval of the sweeps.
MOST_STOPS = 5_000
MOST_SAVES = 300_000  # by one policy
_GROWTH = 1.25  # from one interval of a sweep to the next
_MOST_SAVES = 20_000  # of one run of a sweep
# As `advise` does with a known rate of failures: the best interval needs no bounds on what checkpoints cost.
_UNBOUNDED, _ALL = 1e6, 1 - 1e-9
_NEAR = 12  # intervals tried around the best of a sweep


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """What became of a job under each policy.

    Attributes:
        trace, job: what was replayed.
        mtbf_s: mean time between failures that policies were told, seconds.
        outcomes: of the policies, the ideal last.
        sweeps: {kind of saving: outcomes of fixed intervals, rising}; the first is with all checkpoints in flight.
        best: of all fixed intervals, the one with the most goodput.
    """

    trace: Trace
    job: Job
    mtbf_s: float
    outcomes: tuple[Outcome, ...]
    sweeps: dict[str, tuple[Outcome, ...]]
    best: Outcome

    def regret(self, outcome: Outcome) -> float:
        """Give the share of the best fixed interval's goodput that a policy missed; negative if it did better."""
        return 1 - outcome.goodput / self.best.goodput if self.best.goodput else 0.0


def compare(
    job: Job,
    trace: Trace,
    *,
    in_flight: int = 2,
    mtbf_s: float | None = None,
    slowdown: float | None = None,
    stall_fraction: float = 0.05,
    fixed: Sequence[int] = (),
    gains: bool = False,
    timeline: bool = False,
) -> Comparison:
    """Replay a trace under every policy.

    Args:
        job: the training job and its storage.
        trace: when it is killed.
        in_flight: checkpoints at once where more than one is allowed (PCcheck's N), 1 or more.
        mtbf_s: that the policies which ask for one are told; None = what the trace has, which no job knows beforehand.
        slowdown: PCcheck's q, 1 or more; None = 1.05, and for the controller and advice as much as pays.
        stall_fraction: the overhead that CheckFreq allows, above 0, less than 1.
        fixed: intervals in steps to list, each a policy.
        gains: restart on purpose when machines were added.
        timeline: keep what happened when, for each policy.

    Raises OptionError for a value out of its range, UsageError for a trace of more than 5,000 losses (and gains, where
    they count), or one in which a policy makes more than 300,000 saves.
    """
    stops = trace.failures + len(trace.gains) * gains
    if stops > MOST_STOPS:
        raise UsageError(
            f"{trace.name} has {stops:,} losses{' and gains' * gains}; up to {MOST_STOPS:,} are simulated, which takes "
            "seconds: replay a part of it"
        )
    share("stall_fraction", stall_fraction)
    told_s = trace.mtbf_s if mtbf_s is None else mtbf_s
    if not told_s > 0:
        raise OptionError("mtbf_s", mtbf_s, "seconds above 0")
    policies = _policies(job, trace, in_flight, told_s, slowdown, stall_fraction)
    policies += [Fixed(f"every {steps}", steps, in_flight=in_flight) for steps in sorted(set(fixed))]
    outcomes = [
        simulate(job, trace, policy, gains=gains, timeline=timeline, most_saves=MOST_SAVES) for policy in policies
    ]
    top = ideal(job, trace)
    kinds = {f"{in_flight} in flight": (in_flight, False), "1 in flight": (1, False), "synchronous": (1, True)}
    sweeps = {name: sweep(job, trace, in_flight=n, waits=waits, gains=gains) for name, (n, waits) in kinds.items()}
    return Comparison(
        trace=trace,
        job=job,
        mtbf_s=told_s,
        outcomes=(*outcomes, top if timeline else replace(top, timeline=None)),
        sweeps=sweeps,
        best=max((o for outcomes in sweeps.values() for o in outcomes), key=lambda o: o.goodput),
    )


def _policies(
    job: Job, trace: Trace, in_flight: int, mtbf_s: float, slowdown: float | None, stall_fraction: float
) -> list[Policy]:
    """Give all but the fixed ones that were asked for, in the order in which they are shown."""
    t, c = job.step_s, job.stall_s
    many_s, one_s = job.storage.durable_s(job.state_bytes, in_flight), job.storage.durable_s(job.state_bytes, 1)
    failing, q = mtbf_s if math.isfinite(mtbf_s) else None, SLOWDOWN if slowdown is None else slowdown

    def steps(work_s: float) -> int:
        # Without failures the formulas ask for no checkpoint at all: one at the end.
        return max(1, round(min(work_s, trace.end_s) / t))

    def rule(name: str, count: int, durable_s: float) -> Policy:
        interval = pccheck_interval(durable_s, in_flight=count, step_s=t, slowdown=q)
        return Fixed(name, interval, in_flight=count)

    chosen = choose_interval(
        step_s=t,
        stall_s=c,
        durable_s=many_s,
        durable_alone_s=one_s,
        in_flight=in_flight,
        slowdown=q if failing is None or slowdown is not None else _UNBOUNDED,
        stall_fraction=stall_fraction if failing is None else _ALL,
        mtbf_s=failing,
        restart_s=job.down_s,
    )
    blocking_s = max(c, one_s)
    return [
        ControllerLoop(in_flight=in_flight, slowdown=slowdown, mtbf_s=failing, restart_s=job.down_s),
        Fixed("advised", chosen.interval, in_flight=in_flight),
        rule("PCcheck", in_flight, many_s),
        rule("one in flight", 1, one_s),
        CheckFreqLoop(total_steps=round(trace.end_s / t), fraction=stall_fraction),
        Fixed("Young", steps(young(c, mtbf_s)), in_flight=in_flight),
        Fixed("Daly, first order", steps(daly_first_order(c, mtbf_s, job.down_s)), in_flight=in_flight),
        Fixed("Daly", steps(daly(c, mtbf_s)), in_flight=in_flight),
        Fixed("optimum", steps(optimum(c, mtbf_s)), in_flight=in_flight),
        Fixed("synchronous", steps(optimum(blocking_s, mtbf_s)), waits=True),
    ]


def sweep(job: Job, trace: Trace, *, in_flight: int, waits: bool = False, gains: bool = False) -> tuple[Outcome, ...]:
    """Give the outcomes of fixed intervals, from every step (or as often as 20,000 saves go) to half the trace.

    They grow by a quarter each; around the best one, some more are tried.
    """
    most = max(1, int(trace.end_s / job.step_s / 2))
    tried: dict[int, Outcome] = {}

    def go(interval: int) -> None:
        if interval not in tried:
            policy = Fixed(f"every {interval}", interval, in_flight=in_flight, waits=waits)
            tried[interval] = simulate(job, trace, policy, gains=gains)

    wanted: float = max(1, 2 * most // _MOST_SAVES)
    while wanted <= most:
        go(round(wanted))
        wanted = max(wanted * _GROWTH, wanted + 1)
    best = max(tried, key=lambda interval: tried[interval].goodput)
    low, high = max(1, int(best / _GROWTH)), min(most, int(best * _GROWTH) + 1)
    for interval in range(low, high + 1, max(1, (high - low) // _NEAR)):
        go(interval)
    return tuple(tried[interval] for interval in sorted(tried))
