"""How `pccheck advise` tells its advice to people (floor 4: imports printing, tuning, rich)."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from pccheck.printing import plain
from pccheck.tuning.advice import Advice
from pccheck.tuning.planning import Outcome
from pccheck.tuning.units import bytes_text, seconds_text

_WIDEST = 100  # columns: longer lines are hard to read


def show(advice: Advice, console: Console) -> None:
    """Print the settings, what they bring beside other ways, and why; then the lines to paste."""
    console.print(Text(plain(advice.headline), "bold"))
    for sentence in advice.unreachable:
        console.print(Text(sentence, "bold red"))
    console.print()
    console.print(_settings(advice))
    console.print()
    table = _outcomes(advice)
    # A terminal too narrow breaks its lines; a table that is cut loses figures.
    width, console.width = console.width, 1000
    least = Measurement.get(console, console.options, table).minimum
    console.width = max(width, least)
    console.print(table)
    console.width = width
    console.print()
    _section(console, "What it means", advice.meaning)
    _section(console, "What binds", [advice.binding])
    _section(console, "What would help", advice.helping)
    _section(console, "What this rests on", [*_measured(advice), *advice.assumptions])
    console.print(Text("To paste", "bold"))
    for line in advice.loop.splitlines():
        console.print(Text("  " + line), soft_wrap=True)


def _settings(advice: Advice) -> Text:
    plan, seen = advice.plan, advice.outcome
    streams = plan.setting.writers_per_checkpoint
    at_once = "all at one checkpoint" if streams is None else f"{streams} at each checkpoint"
    slots = plan.in_flight + plan.keep
    ranks, part = advice.wanted.ranks, bytes_text(advice.wanted.part_bytes)
    saved_by, of, total = "1, which saves all of the state", "", ""
    if ranks > 1:
        saved_by, of, total = f"{ranks:,}, each saves {part} of the state", " on each rank", " in all"
    rows = {
        "save every": f"{advice.interval:,} step{'s' * (advice.interval > 1)} ({seconds_text(seen.work_s)} of work)",
        "ranks": saved_by,
        "in_flight": str(plan.in_flight),
        "snapshot": plan.snapshot,
        "writers": f"{plan.setting.writers}, {at_once}",
        "chunk_bytes": f"{plan.setting.chunk_bytes / 2**20:g} MiB",
        "buffer_bytes": f"{bytes_text(plan.buffer_bytes)} of memory{of}",
        "keep": f"{plan.keep}, so {slots} slots{of}: {bytes_text(plan.storage_bytes)} of storage{total}",
    }
    lines = [Text.assemble((f"  {name:<14}", "dim"), value) for name, value in rows.items()]
    lines[0].stylize("bold")
    return Text("\n").join(lines)


def _outcomes(advice: Advice) -> Table:
    table = Table(box=SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0), show_edge=False)
    table.add_column("", overflow="fold")
    for name in ("steps", "slowdown", "stall", "durable", "lost", "oldest", "useful"):
        table.add_column(name, justify="right", no_wrap=True)
    for outcome in (advice.outcome, *advice.others):
        table.add_row(*_row(outcome), style="bold" if outcome is advice.outcome else "")
    return table


def _row(outcome: Outcome) -> Sequence[str]:
    seconds = (outcome.stall_s, outcome.durable_s, outcome.lost_s, outcome.age_max_s)
    useful = "-" if outcome.useful is None else f"{outcome.useful:.1%}"
    return outcome.name, f"{outcome.interval:,}", f"{outcome.slowdown:.3f}", *map(_short, seconds), useful


def _short(seconds: float) -> str:
    return f"{seconds:,.0f} s" if 10 <= seconds < 99_999.5 else seconds_text(seconds)


def _measured(advice: Advice) -> Sequence[str]:
    machine = advice.basis.machine
    return [f"a probe of {plain(machine.path)} ({plain(machine.filesystem)})"] if advice.source == "probe" else []


def _section(console: Console, title: str, sentences: Sequence[str]) -> None:
    if not sentences:
        return
    width = min(_WIDEST, console.width)
    console.print(Text(title, "bold"))
    for sentence in sentences:
        wrapped = textwrap.fill(plain(sentence), width, initial_indent="  - ", subsequent_indent="    ")
        console.print(Text(wrapped), soft_wrap=True)
    console.print()
