"""How many steps from checkpoint to checkpoint, and how many in flight (floor 0: imports errors, tuning.*)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from pccheck.errors import OptionError
from pccheck.tuning.domain import at_least, at_most, not_negative, positive, ratio, share, whole
from pccheck.tuning.goodput import slowdown as slowdown_of
from pccheck.tuning.goodput import state_age, useful_fraction
from pccheck.tuning.optimum import optimum

Binds = Literal["bandwidth", "stall", "failures", "waits", "recovery point", "every step"]


@dataclass(frozen=True, kw_only=True)
class Choice:
    """An interval, and why it is that.

    Args:
        interval: steps from checkpoint to checkpoint (f), 1 or more.
        binds: what makes it no other: "bandwidth" (storage, within the slowdown that is allowed), "stall" (what each
            checkpoint costs the trainer), "failures" (the optimum between their cost and that of checkpoints), "waits"
            (the shortest interval at which no checkpoint waits for storage), "recovery point" (a longer one would be
            better, but not keep it), "every step" (nothing asks for more than 1).
        terms: what each of these asks for, in steps: lower bounds, but "failures", the best interval were there no
            bounds (only with mtbf_s), and "recovery point", an upper one (only with rpo_s; 0 or less = none keeps it).
        slowdown: time with checkpoints over time without that this interval brings, >= 1.
        oldest_s: greatest age in seconds of the newest durable state.
        useful: predicted fraction of the time that is useful work; None without mtbf_s.
        feasible: whether rpo_s is kept; True without one.
        why: why it is not kept, and what would help; empty if it is.
    """

    interval: int
    binds: Binds
    terms: dict[str, int]
    slowdown: float
    oldest_s: float
    useful: float | None = None
    feasible: bool = True
    why: str = ""


def pccheck_interval(durable_s: float, *, in_flight: int, step_s: float, slowdown: float) -> int:
    """Give PCcheck's interval in steps, ceil(T_w / (N q t)): the shortest at which training slows by no more than q.

    PCcheck, ASPLOS 2025, section 3.4.

    Args:
        durable_s: worst seconds until one checkpoint is durable while `in_flight` are under way (T_w), 0 or more.
        in_flight: checkpoints that may be under way at once (N), 1 or more.
        step_s: seconds of a step without checkpoints (t), greater than 0.
        slowdown: time with checkpoints over time without that is allowed (q), a ratio of at least 1: 1.05 = 5 % slower.

    Raises OptionError for a value out of its range; a slowdown below 1 is refused with what to give instead.
    """
    lag, n = not_negative("durable_s", durable_s), whole("in_flight", in_flight)
    return at_least(lag / (n * ratio("slowdown", slowdown) * positive("step_s", step_s)))


def stall_interval(stall_s: float, *, step_s: float, fraction: float) -> int:
    """Give the shortest interval in steps at which stalls take no more than a fraction of the work, ceil(c / (p t)).

    CheckFreq, FAST 2021, second term of Algorithm 1.

    Args:
        stall_s: seconds of the trainer that one checkpoint costs (c), 0 or more.
        step_s: seconds of a step without checkpoints (t), greater than 0.
        fraction: stalls over work that is allowed (p), greater than 0 and less than 1.

    Raises OptionError for a value out of its range.
    """
    stall = not_negative("stall_s", stall_s)
    return at_least(stall / (share("fraction", fraction) * positive("step_s", step_s)))


def waitless_interval(durable_s: float, *, in_flight: int, step_s: float, stall_s: float = 0.0) -> int:
    """Give the shortest interval in steps at which no checkpoint waits for an earlier one, ceil((T_w / N - c) / t).

    The first term of CheckFreq's Algorithm 1 (FAST 2021), for N in flight. Below it the useful fraction rises with the
    interval, whatever the failures, as long as T_w <= M.

    Args:
        durable_s: worst seconds until one checkpoint is durable while `in_flight` are under way (T_w), 0 or more.
        in_flight: checkpoints that may be under way at once (N), 1 or more.
        step_s: seconds of a step without checkpoints (t), greater than 0.
        stall_s: seconds of the trainer that one checkpoint costs (c), 0 or more.

    Raises OptionError for a value out of its range.
    """
    lag, n = not_negative("durable_s", durable_s), whole("in_flight", in_flight)
    return at_least((lag / n - not_negative("stall_s", stall_s)) / positive("step_s", step_s))


def best_in_flight(
    durable_s: Mapping[int, float],
    *,
    state_bytes: int | None = None,
    storage_bytes: int | None = None,
    keep: int = 1,
    worth: float = 0.01,
) -> int:
    """Give the smallest number in flight with the least time per checkpoint, T_w(N) / N, for which storage has room.

    Smallest, since T_w itself is lost with every failure. PCcheck, ASPLOS 2025, section 3.4.

    Args:
        durable_s: {N: worst seconds until one of N under way is durable}, measured or by `StorageModel`.
        state_bytes: of one checkpoint (m), 1 or more; needed with `storage_bytes`.
        storage_bytes: that checkpoints may take: N needs (N + keep) m; None = no limit.
        keep: finished checkpoints that stay, 1 or more.
        worth: share of the time per checkpoint that more in flight must save, 0 or more and less than 1: measured
            times differ by a percent from run to run.

    Raises OptionError for a value out of its range, and where not even the smallest number finds room.
    """
    if worth != 0:
        share("worth", worth)
    each = {whole("durable_s", n): positive("durable_s", seconds) / n for n, seconds in durable_s.items()}
    if storage_bytes is not None:
        m, room = whole("state_bytes", 0 if state_bytes is None else state_bytes), whole("storage_bytes", storage_bytes)
        each = {n: seconds for n, seconds in each.items() if (n + whole("keep", keep)) * m <= room}
        if not each:
            allowed = f"at least {(min(durable_s, default=1) + keep) * m} for checkpoints of {m} bytes"
            raise OptionError("storage_bytes", storage_bytes, allowed)
    if not each:
        raise OptionError("durable_s", durable_s, "a time for at least one number in flight")
    least = min(each.values()) * (1 + _SAME) / (1 - worth)
    return min(n for n, seconds in each.items() if seconds <= least)


def in_flight_needed(durable_s: float, *, work_s: float, stall_s: float = 0.0) -> int:
    """Give how many checkpoints are under way at once if none is to wait, ceil(L / P), P = tau + c (Little's law).

    Args:
        durable_s: seconds until a checkpoint is durable (L), 0 or more.
        work_s: useful seconds from checkpoint to checkpoint (tau), greater than 0.
        stall_s: seconds of the trainer that one checkpoint costs (c), 0 or more.

    Raises OptionError for a value out of its range.
    """
    period = positive("work_s", work_s) + not_negative("stall_s", stall_s)
    return at_least(not_negative("durable_s", durable_s) / period)


def choose_interval(
    *,
    step_s: float,
    stall_s: float,
    durable_s: float,
    in_flight: int,
    slowdown: float = 1.05,
    stall_fraction: float = 0.05,
    mtbf_s: float | None = None,
    restart_s: float = 0.0,
    rpo_s: float | None = None,
    durable_alone_s: float | None = None,
) -> Choice:
    """Choose how many steps from checkpoint to checkpoint, by PCcheck, CheckFreq and the exact optimum together.

    Without mtbf_s the shortest interval that both bounds allow: max(1, ceil(T_w / (N q t)), ceil(c / (p t))). With it,
    of all intervals that keep these bounds and let no checkpoint wait, the one of the greatest useful fraction. That
    rises up to the optimum and falls after it, so that this is the better of the two whole numbers of steps next to
    `optimum`, or the bound that is nearest to it. A recovery point limits it from above, and also rules out waits.

    Args:
        step_s: seconds of a step without checkpoints (t), greater than 0.
        stall_s: seconds of the trainer that one checkpoint costs (c), 0 or more: best measured, as interval times the
            step time with checkpoints less that without, which holds interference, too.
        durable_s: worst seconds until one checkpoint is durable while `in_flight` are under way (T_w), 0 or more.
        in_flight: checkpoints that may be under way at once (N), 1 or more.
        slowdown: time with checkpoints over time without that is allowed (q), a ratio of at least 1.
        stall_fraction: stalls over work that is allowed (p), greater than 0 and less than 1.
        mtbf_s: mean seconds between failures (M), greater than 0; None = not known.
        restart_s: seconds from a failure until training goes on (R), 0 or more; it matters for `useful` only.
        rpo_s: recovery-point objective, the greatest age in seconds of the newest durable state; None = none.
        durable_alone_s: seconds until a checkpoint is durable where storage keeps up (L), at most durable_s; None =
            durable_s, a safe bound.

    Raises OptionError for a value out of its range. A recovery point that cannot be kept is no error: see `Choice`.
    """
    t, c, n = positive("step_s", step_s), not_negative("stall_s", stall_s), whole("in_flight", in_flight)
    alone = durable_s if durable_alone_s is None else not_negative("durable_alone_s", durable_alone_s)
    if alone > not_negative("durable_s", durable_s):
        raise OptionError("durable_alone_s", durable_alone_s, f"seconds, at most durable_s ({durable_s:g})")
    bounds = {
        "bandwidth": pccheck_interval(durable_s, in_flight=n, step_s=t, slowdown=slowdown),
        "stall": stall_interval(c, step_s=t, fraction=share("stall_fraction", stall_fraction)),
    }
    waits = waitless_interval(durable_s, in_flight=n, step_s=t, stall_s=c)
    terms = {**bounds, "waits": waits}
    if mtbf_s is not None or rpo_s is not None:
        bounds = terms.copy()
    least = chosen = max(bounds.values())
    if mtbf_s is not None:
        terms["failures"] = _best(t, c, alone, positive("mtbf_s", mtbf_s))
        chosen = max(least, terms["failures"])
    if rpo_s is not None:
        terms["recovery point"] = at_most((positive("rpo_s", rpo_s) - alone - c) / t)
        chosen = max(least, min(chosen, terms["recovery point"]))
    lag = alone if chosen >= waits else durable_s
    oldest = state_age(chosen * t, stall_s=c, durable_s=lag, in_flight=n).max_s
    feasible = rpo_s is None or chosen <= terms["recovery point"]
    useful = None
    if mtbf_s is not None:
        useful = useful_fraction(chosen * t, stall_s=c, durable_s=lag, mtbf_s=mtbf_s, restart_s=restart_s, in_flight=n)
    return Choice(
        interval=chosen,
        binds=_binds(chosen, bounds, terms),
        terms=terms,
        slowdown=slowdown_of(chosen, step_s=t, durable_s=durable_s, in_flight=n, stall_s=c),
        oldest_s=oldest,
        useful=useful,
        feasible=feasible,
        why=""
        if feasible or rpo_s is None
        else _why(rpo_s, chosen, oldest, alone, max(bounds, key=bounds.__getitem__)),
    )


_SAME = 1e-9


def _best(t: float, c: float, lag: float, m: float) -> int:
    """Give the whole number of steps, 1 or more, of the greatest useful fraction if there were no bounds."""
    steps = optimum(c, m) / t
    near = {max(1, math.floor(steps)), max(1, math.ceil(steps))}
    return max(sorted(near), key=lambda f: useful_fraction(f * t, stall_s=c, durable_s=lag, mtbf_s=m))


def _binds(chosen: int, bounds: dict[str, int], terms: dict[str, int]) -> Binds:
    if chosen == terms.get("failures"):
        return "failures" if chosen > 1 else "every step"
    if chosen == terms.get("recovery point") and chosen > max(bounds.values()):
        return "recovery point"
    names: tuple[Literal["bandwidth", "stall", "waits"], ...] = ("bandwidth", "stall", "waits")
    return next((name for name in names if chosen > 1 and bounds.get(name) == chosen), "every step")


_HELP = {
    "bandwidth": "faster storage, or a smaller state",
    "waits": "faster storage, or a smaller state",
    "stall": "a checkpoint that stalls the trainer less, or a larger stall_fraction",
}


def _why(rpo_s: float, interval: int, oldest_s: float, lag_s: float, bound: str) -> str:
    helps = _HELP[bound] if interval > 1 else "faster storage, or a smaller state"
    return (
        f"the newest durable state would be up to {oldest_s:.4g} s old, more than {rpo_s:g} s: it is durable after "
        f"{lag_s:.4g} s, and {interval} steps is the shortest interval within the bounds; what helps: {helps}"
    )
