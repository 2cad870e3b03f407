"""What runs did when, as a picture: work, saves, kills, lost work (floor 4: imports plots, replay.timeline)."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from pccheck import plots
from pccheck.replay.timeline import SegmentKind, Timeline

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_COLOURS: dict[SegmentKind, tuple[str, str]] = {
    "work": ("#2ca02c", "work that counts"),
    "lost": ("#d62728", "work that a kill undid"),
    "stall": ("#ff9e1b", "held up by saves"),
    "down": ("#bdbdbd", "down"),
    "load": ("#9467bd", "loading"),
}
_DURABLE, _DROPPED = "#1f77b4", "#e377c2"


def timelines(runs: Mapping[str, Timeline], file: Path, *, title: str) -> None:
    """Draw runs below one another over the same time.

    Of each, a bar tells what the trainer did; strokes below it are saves, from when they were begun until they were
    durable or dropped, where that is known, and dots where only the beginning is. Triangles are kills.

    Args:
        runs: by name, from the top; one or more.
        file: to write; its ending says the format, such as .png or .svg.
        title: above the picture.

    Raises UsageError without matplotlib, MediumError if the file cannot be written.
    """
    figure = plots.figure(11.0, 1.2 + 0.75 * len(runs))
    axes = figure.add_subplot()
    for row, run in enumerate(runs.values()):
        _draw(axes, -float(row), run)
    for colour, label in _COLOURS.values():
        axes.broken_barh([], (0, 0), facecolors=colour, label=label)
    axes.plot([], [], color=_DURABLE, linewidth=2, label="save, until durable")
    axes.plot([], [], color=_DROPPED, linewidth=2, label="save that a kill dropped")
    axes.plot([], [], "v", color="black", markersize=5, linestyle="none", label="kill")
    axes.set_yticks([-row for row in range(len(runs))], list(runs))
    axes.set_ylim(-len(runs) + 0.55, 0.55)
    axes.set_xlim(0, max(run.end_s for run in runs.values()))
    axes.set_xlabel("seconds")
    axes.set_title(title, fontsize=10)
    axes.legend(fontsize=8, loc="center left", bbox_to_anchor=(1.01, 0.5))
    plots.save(figure, file)


def _draw(axes: Axes, y: float, run: Timeline) -> None:
    for kind, (colour, _) in _COLOURS.items():
        spans = [(s.start_s, s.end_s - s.start_s) for s in run.segments if s.kind == kind]
        axes.broken_barh(spans, (y - 0.05, 0.38), facecolors=colour, linewidth=0)
    for durable, colour in ((True, _DURABLE), (False, _DROPPED)):
        # Two lanes, so that a save is told from the one before.
        spans_of = [
            [(b, e - b) for i, (b, e, d) in enumerate(run.flights) if d == durable and i % 2 == n] for n in (0, 1)
        ]
        for lane, spans in enumerate(spans_of):
            axes.broken_barh(spans, (y - 0.18 - 0.12 * lane, 0.09), facecolors=colour, linewidth=0)
    if not run.flights:
        axes.plot([at for at, _ in run.saves], [y - 0.18] * len(run.saves), ".", color=_DURABLE, markersize=2)
    axes.plot([at for at, *_ in run.kills], [y + 0.4] * len(run.kills), "v", color="black", markersize=4)
