"""What limits on slowdown and stalls cost, and the least that would do (floor 0: imports tuning.*)."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace

from pccheck.tuning.basis import Basis
from pccheck.tuning.domain import LEAST_SHARE
from pccheck.tuning.planning import Outcome, Plan, best_plan
from pccheck.tuning.wanted import ANY_STALL, Wanted

_MOST = 1.0  # of the training time: more than that stalls may not take, asked for or not
_CLOSE = 1.001
_MUCH = 0.02  # of all time: a wish that costs less is its owner's business


def lifted(wanted: Wanted) -> Wanted:
    """Give the same wishes without limits on slowdown and stalls."""
    return replace(wanted, slowdown=None if wanted.mtbf_s is not None else 1 + _MOST, stall_fraction=None)


def are_set(wanted: Wanted) -> bool:
    """Say whether there are such limits: told, or those that hold where it is not known what failures cost."""
    return wanted.mtbf_s is None or wanted.slowdown is not None or wanted.stall_fraction is not None


def names(wanted: Wanted) -> str:
    """Say what is limited."""
    told = ["the slowdown"] * (wanted.slowdown is not None) + ["stalls"] * (wanted.stall_fraction is not None)
    return " and ".join(told) or "the slowdown and stalls"


def ratio_text(ratio: float) -> str:
    """Say a slowdown with what makes it one, however little that is: "1.05", "1.00002"."""
    return f"{ratio:.10g}"


def least_that_keep_it(wanted: Wanted, basis: Basis) -> tuple[str, Wanted] | None:
    """Give the tightest limits, in two digits, that keep the recovery point; None where they are not in its way.

    The limit on the slowdown alone is loosened, or that on stalls, or both.
    """

    def slower(share: float) -> Wanted:
        return replace(wanted, slowdown=1 + share)

    def longer(share: float) -> Wanted:
        return replace(wanted, stall_fraction=min(share, ANY_STALL))

    def both(share: float) -> Wanted:
        return replace(longer(share), slowdown=1 + share)

    ways: list[tuple[str, float, Callable[[float], Wanted]]] = []
    if are_set(wanted):
        ways.append(("a slowdown of up to {ratio} allowed", wanted.slowdown_allowed - 1, slower))
    if wanted.stall_fraction is not None:
        ways.append(("stalls of up to {percent}% allowed", wanted.stall_fraction, longer))
        if wanted.slowdown is not None:
            ways.append(("a slowdown of up to {ratio} and stalls of up to {percent}% allowed", 0.0, both))
    for name, tight, loosened in ways:
        if best_plan(loosened(_MOST), basis).choice.feasible:
            share = _least(tight, lambda share, of=loosened: best_plan(of(share), basis).choice.feasible)  # type: ignore[misc]
            return name.format(ratio=ratio_text(1 + share), percent=f"{100 * share:g}"), loosened(share)
    return None


def _least(tight: float, keeps: Callable[[float], bool]) -> float:
    low, high = max(tight, LEAST_SHARE), _MOST
    while high > _CLOSE * low:
        middle = math.sqrt(low * high)
        low, high = (low, middle) if keeps(middle) else (middle, high)
    unit = 10.0 ** (math.floor(math.log10(high)) - 1)
    return min(_MOST, float(f"{math.ceil(high / unit - 1e-9) * unit:.2g}"))


def cost(wanted: Wanted, basis: Basis, plan: Plan) -> Iterator[str]:
    """Say by how much more of the time would be useful without the limits that were asked for, where that is much."""
    if wanted.mtbf_s is None or not are_set(wanted):
        return
    free = best_plan(lifted(wanted), basis)
    best = free if free.choice.feasible else best_plan(replace(lifted(wanted), rpo_s=None), basis)
    if _useful(best) <= _useful(plan) + _MUCH:
        return
    asked = []
    if wanted.slowdown is not None:
        asked.append(f"a slowdown of at most {ratio_text(wanted.slowdown)}")
    if wanted.stall_fraction is not None:
        asked.append(f"stalls of at most {100 * wanted.stall_fraction:g}%")
    more = ""
    if best is not free:
        more = f"; without the recovery point, too, which is out of reach, {_useful(best):.1%} {_how(best.outcome)}"
    yield (
        f"The wish for {' and '.join(asked)} costs useful time: without it {_useful(free):.1%} of the time would be "
        f"useful instead of {_useful(plan):.1%} {_how(free.outcome)}{more}."
    )


def _useful(plan: Plan) -> float:
    return plan.outcome.useful or 0.0


def _how(seen: Outcome) -> str:
    return f"(every {f'{seen.interval:,} steps' if seen.interval > 1 else 'step'}, slowdown {seen.slowdown:.3f})"
