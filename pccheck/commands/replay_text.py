"""How `pccheck replay` tells a simulation, to people and programs (floor 4: imports printing, replay, tuning, rich)."""

from __future__ import annotations

import math
from dataclasses import asdict
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from pccheck.printing import plain, print_whole
from pccheck.replay.comparing import Comparison
from pccheck.replay.job import Outcome
from pccheck.tuning.units import bytes_text, rate_text, seconds_text
from pccheck.version import __version__

_COLUMNS = ("", "at once", "every", "saves", "goodput", "lost", "waits", "down", "to best")


def headline(comparison: Comparison) -> str:
    """Say what was replayed."""
    trace, job = comparison.trace, comparison.job
    return (
        f"{plain(trace.name)}: {trace.failures} losses in {seconds_text(trace.end_s)}; "
        f"{bytes_text(job.state_bytes)} of state, {seconds_text(job.step_s)} a step"
    )


def show(comparison: Comparison, assumed: tuple[str, ...], console: Console) -> None:
    """Print what became of the job under each policy, and beside it the best fixed interval."""
    job, storage = comparison.job, comparison.job.storage
    console.print(Text(headline(comparison), "bold"), soft_wrap=True)
    count = max(outcome.in_flight for outcome in comparison.outcomes)
    rates = f"{rate_text(storage.stream_bytes_per_s)} of one checkpoint"
    if count > 1:
        rates += f", {rate_text(min(storage.total_bytes_per_s, count * storage.stream_bytes_per_s))} of {count} at once"
    told = "that nothing fails"
    if math.isfinite(comparison.mtbf_s):
        told = f"{seconds_text(comparison.mtbf_s)} between failures"
    console.print(
        f"storage takes {rates}; a save holds the trainer up for {seconds_text(job.stall_s)}; a restart takes "
        f"{seconds_text(job.down_s)}; policies that ask are told {told}",
        soft_wrap=True,
    )
    for sentence in assumed:
        console.print(Text(f"assumed: {sentence}", "dim"), soft_wrap=True)
    console.print()
    table = Table(box=SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0), show_edge=False)
    for column in _COLUMNS:
        table.add_column(column, justify="right" if column else "left", no_wrap=True)
    for outcome in comparison.outcomes:
        table.add_row(*_row(comparison, outcome), style="bold" if outcome.policy == "controller" else "")
    table.add_section()
    table.add_row(*_row(comparison, comparison.best), style="green")
    print_whole(table, console)
    console.print()
    console.print(
        "~: it changed, and this one was in force longest. goodput: steps that count, in undisturbed seconds, over all "
        "time. lost: worked, and undone by kills, or not ended when the trace was. waits: for saves. to best: against "
        "the best fixed interval (last row), which only the whole trace tells.",
        style="dim",
    )


def as_json(comparison: Comparison, assumed: tuple[str, ...]) -> dict[str, Any]:
    """Give the same facts under the names that docs/cli.md lists; they are stable."""
    trace = comparison.trace
    return {
        "pccheck": __version__,
        "trace": {
            "name": trace.name,
            "failures": trace.failures,
            "gains": len(trace.gains),
            "end_s": trace.end_s,
            "killed_at_end": trace.killed_at_end,
        },
        "job": asdict(comparison.job),
        "assumed": list(assumed),
        "mtbf_s": comparison.mtbf_s if math.isfinite(comparison.mtbf_s) else None,
        "policies": [_facts(comparison, outcome) for outcome in comparison.outcomes],
        "best": _facts(comparison, comparison.best),
        "fixed": {name: [_facts(comparison, o) for o in found] for name, found in comparison.sweeps.items()},
    }


def _facts(comparison: Comparison, outcome: Outcome) -> dict[str, Any]:
    facts = {name: value for name, value in vars(outcome).items() if name not in ("timeline", "intervals")}
    return {
        **facts,
        "interval": outcome.interval,
        "intervals": outcome.intervals,
        "to_best": comparison.regret(outcome),
    }


def _row(comparison: Comparison, outcome: Outcome) -> tuple[str, ...]:
    if outcome.interval is None:
        settings: tuple[str, ...] = ("-", "-", "-")
    else:
        varies = "~" if len({steps for _, steps in outcome.intervals}) > 1 else ""
        settings = (str(outcome.in_flight), f"{varies}{outcome.interval:,}", f"{outcome.saves:,}")
    times = (outcome.lost_s, outcome.stall_s, outcome.down_s)
    return (
        outcome.policy,
        *settings,
        f"{outcome.goodput:.3f}",
        *(f"{seconds / comparison.trace.end_s:.1%}" for seconds in times),
        f"{-comparison.regret(outcome):+.1%}",
    )
