"""Goodput by interval and policy, as a picture (floor 4: imports plots, replay.comparing; matplotlib in functions)."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from pccheck import plots
from pccheck.replay.comparing import Comparison

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_LINES = ("#1f77b4", "#7f7f7f", "#bcbd22")
_MARKS = "oDsv^<>PX*pdhH8"


def goodput_by_interval(comparison: Comparison, file: Path, *, title: str) -> None:
    """Draw goodput against the interval: a line for each way to save at fixed intervals, a mark for each policy.

    A policy whose interval changes is drawn at the one that it kept for the longest time.

    Args:
        comparison: what was replayed.
        file: to write; its ending says the format, such as .png or .svg.
        title: above the picture.

    Raises UsageError without matplotlib, MediumError if the file cannot be written.
    """
    figure = plots.figure(8.0, 5.0)
    axes = figure.add_subplot()
    for colour, (name, outcomes) in zip(_LINES, comparison.sweeps.items(), strict=False):
        steps, goodputs = [o.interval or 1 for o in outcomes], [o.goodput for o in outcomes]
        axes.plot(steps, goodputs, color=colour, linewidth=1.2, label=f"every so many steps, {name}")
    _marks(axes, comparison)
    _dress(axes, title)
    plots.save(figure, file)


def _marks(axes: Axes, comparison: Comparison) -> None:
    for i, outcome in enumerate(comparison.outcomes):
        label = f"{outcome.policy}, {outcome.goodput:.3f}"
        if outcome.interval is None:
            axes.axhline(outcome.goodput, color="black", linestyle="--", linewidth=0.8, label=label)
        else:
            mark, colour = _MARKS[i % len(_MARKS)], f"C{i % 10}"
            axes.plot(
                outcome.interval, outcome.goodput, mark, color=colour, label=label, linestyle="none", markersize=6
            )


def goodput_of_runs(runs: Mapping[str, tuple[int, float]], file: Path, *, title: str) -> None:
    """Draw what was measured of live runs: a mark for each, by its interval and goodput.

    Args:
        runs: by name: interval in steps, and goodput.
        file: to write; its ending says the format, such as .png or .svg.
        title: above the picture.

    Raises UsageError without matplotlib, MediumError if the file cannot be written.
    """
    figure = plots.figure(8.0, 5.0)
    axes = figure.add_subplot()
    for i, (name, (interval, goodput)) in enumerate(runs.items()):
        axes.plot(interval, goodput, _MARKS[i % len(_MARKS)], color=f"C{i % 10}", label=f"{name}, {goodput:.3f}")
    _dress(axes, title)
    plots.save(figure, file)


def _dress(axes: Axes, title: str) -> None:
    axes.set_xscale("log")
    axes.set_ylim(0, 1)
    axes.set_xlabel("interval, steps")
    axes.set_ylabel("goodput, useful share of the time")
    axes.set_title(title, fontsize=10)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8, loc="center left", bbox_to_anchor=(1.01, 0.5))
