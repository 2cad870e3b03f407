"""How `pccheck replay --live` tells what it measured, to people and programs (floor 4: imports printing, replay)."""

from __future__ import annotations

from typing import Any

import msgspec
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from pccheck.printing import plain, print_whole
from pccheck.replay.chronicle import LiveOutcome
from pccheck.replay.live import Results
from pccheck.tuning.units import bytes_text

_COLUMNS = ("every", "goodput", "steps", "lost/kill", "ms/save", "slowdown", "load ms", "bad")
_OTHERS = 63  # columns of the terminal that these take
_NAME = 17  # that a name has at least, so that all fit into 80; longer ones fold


def show(results: Results, console: Console) -> None:
    """Print what was measured, a row for each contender, the best first, and who did not take part."""
    trace, settings = results.trace, results.settings
    console.print(
        f"{plain(trace.name)} in {trace.end_s:.0f} s: {trace.failures} kills (SIGKILL), one each {trace.mtbf_s:.1f} s; "
        f"{settings.restart_s:g} s until a restart; {bytes_text(results.state_bytes)} of state; "
        f"a step takes {results.step_s * 1e3:.1f} ms undisturbed",
        highlight=False,
    )
    console.print()
    table = Table(box=SIMPLE_HEAD, pad_edge=False, padding=0, show_edge=False)
    table.add_column("", overflow="fold", max_width=max(_NAME, console.width - _OTHERS))
    for column in _COLUMNS:
        table.add_column(column, justify="right", no_wrap=True)
    for outcome in sorted(results.outcomes, key=lambda o: -o.goodput):
        bad = Text(f"{len(outcome.refused)}", "bold red" if outcome.refused else "dim")
        table.add_row(plain(outcome.contender), *_cells(outcome), bad)
    print_whole(table, console)
    console.print()
    console.print(
        "steps: that count. lost/kill: steps that a kill undid. ms/save: what a save held the loop up. slowdown: of a "
        "step, all costs of saves included. load ms: opening and restoring. bad: restored states that were wrong.",
        style="dim",
    )
    for outcome in results.outcomes:
        for why in sorted(set(outcome.refused)):
            line = f"{plain(outcome.contender)} began anew: {plain(why)}"
            console.print(Text(line, "bold red"), soft_wrap=True)
    for name, why in results.skipped.items():
        console.print(Text(f"{plain(name)} did not take part: {plain(why)}"), soft_wrap=True)
    for why in results.failed.values():
        console.print(Text("\n".join(plain(line) for line in why.splitlines()), "bold red"), soft_wrap=True)


def as_json(results: Results) -> dict[str, Any]:
    """Give all that was measured as what `json.dumps` takes; times in seconds."""
    found: dict[str, Any] = msgspec.to_builtins(results, enc_hook=str)
    return found


def _cells(outcome: LiveOutcome) -> tuple[str, ...]:
    return (
        f"{outcome.every}",
        f"{outcome.goodput:.3f}",
        f"{outcome.steps:,}",
        f"{outcome.lost_per_kill:.1f}",
        f"{outcome.stall_per_save_s * 1e3:.1f}",
        f"{outcome.slowdown:.3f}",
        f"{outcome.load_median_s * 1e3:.0f}",
    )
