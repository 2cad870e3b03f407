"""Goodput against the interval, as advice sees it (floor 4: imports plots, tuning.advice; matplotlib in functions)."""

from __future__ import annotations

import math
from pathlib import Path

from pccheck import plots
from pccheck.errors import OptionError
from pccheck.tuning.advice import Advice
from pccheck.tuning.units import bytes_text, seconds_text

_POINTS = 200
_BOUNDS = {
    "bandwidth": "storage, within the slowdown",
    "waits": "storage, without waits",
    "stall": "stalls allowed",
    "failures": "best without bounds",
    "recovery point": "recovery point",
}


def goodput(advice: Advice, file: Path) -> None:
    """Draw the useful share of the time against the interval, with the point that was chosen and the bounds on it.

    Lines are one checkpoint in flight and, if that is another number, as many as advised. Where it is not known how
    often the job fails, it is the share of the time that is not spent on checkpoints.

    Args:
        advice: what to draw.
        file: to write; its ending says the format, such as .png or .svg.

    Raises UsageError without matplotlib, MediumError if the file cannot be written.
    """
    figure = plots.figure(7.5, 4.5)
    axes = figure.add_subplot()
    chosen = advice.plan
    for in_flight in sorted({1, chosen.in_flight}):
        try:
            seen = advice.curve(_intervals(advice), in_flight=in_flight)
        except OptionError:
            continue  # the budgets have room for the chosen number only
        axes.plot(
            [o.interval for o in seen], [_share(o.useful, o.slowdown) for o in seen], label=f"{in_flight} in flight"
        )
    for i, (name, steps) in enumerate(chosen.choice.terms.items()):
        if 1 < steps < _MOST_STEPS and (name != "stall" or advice.binds == "stall"):
            axes.axvline(steps, color=f"C{i + 3}", linestyle="--", linewidth=0.9, label=f"{_BOUNDS[name]}: {steps:,}")
    share = _share(advice.outcome.useful, advice.outcome.slowdown)
    axes.plot(advice.interval, share, "o", color="black", label=f"advised: {advice.interval:,} steps, {share:.1%}")
    axes.set_xscale("log")
    axes.xaxis.set_major_formatter("{x:,.0f}")
    axes.set_ylim(0, 1)
    axes.set_xlabel(f"interval, steps of {seconds_text(advice.wanted.step_s)}")
    known = advice.wanted.mtbf_s is not None
    axes.set_ylabel("useful share of the time" if known else "share of the time not spent on checkpoints")
    fails = f"a failure every {seconds_text(advice.wanted.mtbf_s or math.inf)}" if known else "without failures"
    axes.set_title(f"{bytes_text(advice.wanted.state_bytes)} of state, {fails}", fontsize=10)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    plots.save(figure, file)


_MOST_STEPS = 10**7


def _intervals(advice: Advice) -> list[int]:
    """Give whole numbers of steps, evenly spaced in the logarithm, far enough to both sides of the chosen one."""
    low, high = math.log(max(1, advice.interval / 20)), math.log(max(100, advice.interval * 50))
    steps = {round(math.exp(low + (high - low) * i / _POINTS)) for i in range(_POINTS + 1)}
    return sorted(steps | {advice.interval})


def _share(useful: float | None, slowdown: float) -> float:
    return 1 / slowdown if useful is None else useful
