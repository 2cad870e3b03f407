"""How `pccheck replay --live` tells what it measured, to people and programs (floor 4: imports printing, replay)."""

from __future__ import annotations

from typing import Any

import msgspec
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from pccheck.printing import plain
from pccheck.replay.chronicle import LiveOutcome
from pccheck.replay.live import Results
from pccheck.tuning.units import bytes_text

_COLUMNS = ("", "every", "goodput", "steps", "lost per kill", "per save", "slowdown", "loading", "bad restores")


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
    table = Table(box=SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0), show_edge=False)
    for column in _COLUMNS:
        table.add_column(column, justify="right" if column else "left", no_wrap=True)
    for outcome in sorted(results.outcomes, key=lambda o: -o.goodput):
        bad = Text(f"{len(outcome.refused)}", "bold red" if outcome.refused else "dim")
        table.add_row(plain(outcome.contender), *_cells(outcome), bad)
    console.print(table)
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
        f"{outcome.lost_per_kill:.1f} steps",
        f"{outcome.stall_per_save_s * 1e3:.1f} ms",
        f"{outcome.slowdown:.3f}",
        f"{outcome.load_median_s * 1e3:.0f} ms",
    )
