"""What share of the time is useful work, what failures cost, how old what is saved gets (floor 0: imports tuning.*).

The model: a period is `work_s` of useful work and then `stall_s`, which one checkpoint costs the trainer. Its state is
that at the end of the work; it is durable `durable_s` later, while the next periods run. Failures come at random, one
in `mtbf_s` on average, also during restarts; all that is not durable is lost. With `in_flight` given, a checkpoint
begins only when fewer than so many are under way: if `durable_s` is longer than in_flight periods, training waits.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from pccheck.tuning.domain import not_negative, positive, whole
from pccheck.tuning.optimum import exponential_excess


@dataclass(frozen=True, kw_only=True)
class StateAge:
    """How old the newest durable state is, in seconds, at a random instant (`mean_s`) and at worst (`max_s`)."""

    mean_s: float
    max_s: float


@dataclass(frozen=True)
class _Periods:
    """Work, stall, lag and, where training waits for storage (`waits`), the rest of each cycle of n periods."""

    work: float
    stall: float
    lag: float
    n: int
    waits: bool

    @classmethod
    def of(cls, work_s: float, stall_s: float, durable_s: float, in_flight: int | None) -> _Periods:
        work, stall = positive("work_s", work_s), not_negative("stall_s", stall_s)
        lag = not_negative("durable_s", durable_s)
        n = 1 if in_flight is None else whole("in_flight", in_flight)
        return cls(work, stall, lag, n, in_flight is not None and lag > n * (work + stall))

    @property
    def busy(self) -> float:
        return self.work + self.stall

    @property
    def gap(self) -> float:
        """From the beginning of the last checkpoint of a cycle to that of the first of the next one."""
        return self.lag - (self.n - 1) * self.busy


def useful_fraction(
    work_s: float,
    *,
    stall_s: float,
    durable_s: float,
    mtbf_s: float,
    restart_s: float = 0.0,
    in_flight: int | None = None,
) -> float:
    """Give the fraction of the time that is useful work, U (also called goodput, or ETTR), exactly.

    U = tau exp(-(R + L - c) / M) / (M (exp((tau + c) / M) - 1)); L = c is Daly's model of blocking checkpoints (2006),
    another L Vaidya's (1997). If training waits for storage, L > N (tau + c), checkpoints begin in groups of N, and U
    is multiplied by (1 - exp(-N (tau + c) / M)) / (1 - exp(-L / M)); were they evenly spaced, U would be lower, by 1 to
    8 % in cases tried. Without failures it is the plain overhead.

    Args:
        work_s: useful seconds from checkpoint to checkpoint (tau), greater than 0.
        stall_s: seconds of the trainer that one checkpoint costs (c), 0 or more.
        durable_s: seconds from the state that is saved until it is durable (L), 0 or more.
        mtbf_s: mean seconds between failures (M), greater than 0; infinity = never.
        restart_s: seconds from a failure until training goes on (R), 0 or more; failures can hit it again.
        in_flight: checkpoints that may be under way at once (N), 1 or more; None = as many as there are.

    Raises OptionError for a value out of its range.
    """
    p = _Periods.of(work_s, stall_s, durable_s, in_flight)
    m, r = positive("mtbf_s", mtbf_s, infinite=True), not_negative("restart_s", restart_s)
    if m == math.inf:
        return p.work / (p.lag / p.n if p.waits else p.busy)
    # exp(x) - 1 = exp(x) (1 - exp(-x)): no overflow however rare checkpoints are
    useful = p.work / m * math.exp(-(r + p.lag - p.stall + p.busy) / m) / -math.expm1(-p.busy / m)
    if p.waits:
        useful *= math.expm1(-p.n * p.busy / m) / math.expm1(-p.lag / m)
    return useful


def loss_per_failure(
    work_s: float, *, stall_s: float, durable_s: float, mtbf_s: float, in_flight: int | None = None
) -> float:
    """Give the mean seconds, work and stalls alike, that one failure throws away, exactly.

    M - P exp(-(L - c) / M) / (exp(P / M) - 1) with P = tau + c: from a failure back to the end of the last period whose
    state was durable. Restarting is not part of it. Its limit for rare failures is `loss_first_order`.

    Args:
        work_s: useful seconds from checkpoint to checkpoint (tau), greater than 0.
        stall_s: seconds of the trainer that one checkpoint costs (c), 0 or more.
        durable_s: seconds from the state that is saved until it is durable (L), 0 or more.
        mtbf_s: mean seconds between failures (M), greater than 0; infinity = the limit for rare ones.
        in_flight: checkpoints that may be under way at once (N), 1 or more; None = as many as there are.

    Raises OptionError for a value out of its range.
    """
    p = _Periods.of(work_s, stall_s, durable_s, in_flight)
    m = positive("mtbf_s", mtbf_s, infinite=True)
    lag = p.lag - p.stall
    if m == math.inf:
        return _mean_age(p) - p.stall
    if not p.waits:
        # 1 - x exp(-d) / (exp(x) - 1), as a sum of what does not cancel for a large M
        x = p.busy / m
        if x > 700:
            return m
        kept = x / math.expm1(x)
        return m * (exponential_excess(x) / math.expm1(x) - kept * math.expm1(-lag / m))
    if p.lag < 1e-7 * m:  # the difference would lose its digits, and its limit is as close
        return _mean_age(p) - p.stall
    return m - math.exp(-(lag + p.busy) / m) * _reached(p, m)


def loss_first_order(work_s: float, *, stall_s: float, durable_s: float) -> float:
    """Give the mean seconds that one rare failure throws away, (L - c) + (tau + c) / 2.

    Exact for M much greater than L + tau; 19 % too high at (L + tau) / M = 0.6. Gemini (SOSP 2023) has the same form:
    t_ckpt + 1 / (2 f), f a frequency. The time to durable counts whole: at a random instant the newest durable state is
    between L and L + tau old.

    Args:
        work_s: useful seconds from checkpoint to checkpoint (tau), greater than 0.
        stall_s: seconds of the trainer that one checkpoint costs (c), 0 or more.
        durable_s: seconds from the state that is saved until it is durable (L), 0 or more.

    Raises OptionError for a value out of its range.
    """
    return loss_per_failure(work_s, stall_s=stall_s, durable_s=durable_s, mtbf_s=math.inf)


def state_age(work_s: float, *, stall_s: float, durable_s: float, in_flight: int | None = None) -> StateAge:
    """Give how old the newest durable state is, on average and at worst: L + P / 2 and L + P, with P = tau + c.

    CheckFreq's bound is this with L = tau: 1.5 tau and 2 tau. If training waits for storage, checkpoints begin in
    groups of N, and the time between groups counts.

    Args:
        work_s: useful seconds from checkpoint to checkpoint (tau), greater than 0.
        stall_s: seconds of the trainer that one checkpoint costs (c), 0 or more.
        durable_s: seconds from the state that is saved until it is durable (L), 0 or more.
        in_flight: checkpoints that may be under way at once (N), 1 or more; None = as many as there are.

    Raises OptionError for a value out of its range.
    """
    p = _Periods.of(work_s, stall_s, durable_s, in_flight)
    return StateAge(mean_s=_mean_age(p), max_s=p.lag + (p.gap if p.waits else p.busy))


def slowdown(interval: int, *, step_s: float, durable_s: float, in_flight: int, stall_s: float = 0.0) -> float:
    """Give time with checkpoints over time without: max(1 + c / (f t), T_w / (N f t)), a ratio of at least 1.

    In N intervals N checkpoints begin, and N can be under way: they last at least as long as one takes. PCcheck,
    ASPLOS 2025, section 3.4: its rule, solved for the slowdown.

    Args:
        interval: steps from checkpoint to checkpoint (f), 1 or more.
        step_s: seconds of a step without checkpoints (t), greater than 0.
        durable_s: seconds until a checkpoint is durable while `in_flight` are under way (T_w), 0 or more.
        in_flight: checkpoints that may be under way at once (N), 1 or more.
        stall_s: seconds of the trainer that one checkpoint costs (c), 0 or more.

    Raises OptionError for a value out of its range.
    """
    work = whole("interval", interval) * positive("step_s", step_s)
    n, lag = whole("in_flight", in_flight), not_negative("durable_s", durable_s)
    return max(1 + not_negative("stall_s", stall_s) / work, lag / (n * work))


def _mean_age(p: _Periods) -> float:
    if not p.waits:
        return p.lag + p.busy / 2
    return p.lag + ((p.n - 1) * p.busy**2 + p.gap**2) / (2 * p.lag)


def _reached(p: _Periods, m: float) -> float:
    """Give the sum, over all periods k, of how far k moves the end of what is saved, times its weight exp(-e_k / M).

    The weight is relative to that of the first period, e_1 = tau + c. Within a group of N each moves it by one period;
    the first of each later group by the gap.
    """
    cycle = -math.expm1(-p.lag / m)
    group = math.expm1(-p.n * p.busy / m) / math.expm1(-p.busy / m)
    return p.busy * group / cycle + (p.lag - p.n * p.busy) * math.exp(-p.lag / m) / cycle
