"""How `pccheck report` tells people a bill (floor 4: imports bill.bills, printing, rich)."""

from __future__ import annotations

from collections.abc import Iterator

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from pccheck.bill.bills import Report, RunBill
from pccheck.printing import plain, print_whole

_STYLES = {"running": "bold green", "ended": "", "failed": "bold red"}
_RUNS_SHOWN = 20
_BARS = "▁▂▃▄▅▆▇█"
_BAR_COLUMNS = 60


def show(report: Report, console: Console) -> None:
    """Print what all runs came to, the newest run in full, and a line for each."""
    console.print(Text(plain(report.path), "bold"), soft_wrap=True)
    last = report.last
    if last is not None:
        for label, value in (*_all_runs(report), *_one(last)):
            console.print(Text.assemble((f"  {label:<12}", "dim"), plain(value)), soft_wrap=True)
        console.print()
        if len(report.runs) > 1:
            print_whole(_table(report.runs), console)
            console.print()
    for note in report.notes:
        console.print(Text(f"  {plain(note)}", "yellow"), soft_wrap=True)


def _all_runs(report: Report) -> Iterator[tuple[str, str]]:
    count, failures = len(report.runs), report.failures
    text = f"{count} run{'s' * (count != 1)}, {span(report.uptime_s)} in all"
    if failures:
        text += f"; {failures} failed, one in {span(report.mtbf_s)}, about {report.steps_lost:,} steps lost"
        if report.restart_s is not None:
            text += f", {span(report.restart_s)} until a restart had restored (median)"
    else:
        text += "; none failed"
    yield "runs", text


def _one(run: RunBill) -> Iterator[tuple[str, str]]:
    yield "newest run", f"{run.state}, began {run.began[:19].replace('T', ' ')} UTC, {span(run.uptime_s)} long"
    if run.writer:
        yield "writer", run.writer
    steps = f"saved {run.first_step:,} to {run.reached_step:,}"
    if run.durable_step is not None:
        steps += f", durable {run.durable_step:,}"
    if run.restored_step is not None:
        steps += f", restored {run.restored_step:,}"
    yield "steps", steps
    saves = run.saves
    ended = [(saves.committed, "committed"), (saves.superseded, "superseded"), (saves.skipped, "skipped")]
    ended += [(saves.failed, "failed"), (saves.retries, "writes tried again")]
    told = ", ".join(f"{number:,} {what}" for number, what in ended if number or what == "committed")
    yield "saves", f"{saves.started:,} started: {told}"
    yield "bytes", f"{size(run.state_bytes)} a checkpoint, {size(run.written_bytes)} written"
    interval = run.interval
    if interval.steps is not None:
        yield "interval", f"{interval.steps:.4g} steps, {span(interval.seconds)}; a step takes {span(interval.step_s)}"
    yield from _cost(run)
    durable = run.durable
    if durable.count:
        text = f"{span(durable.median_s)} after save() (median), {span(durable.p90_s)} (9 of 10)"
        yield "durable", f"{text}, {span(durable.worst_s)} (worst)"
    yield from _age(run)


def _cost(run: RunBill) -> Iterator[tuple[str, str]]:
    cost = run.cost
    text = f"{span(cost.total_s)} in all"
    if cost.ms_per_step is not None:
        text = f"{span(cost.ms_per_step / 1e3)} per step, {cost.percent:.2g} % of the time; {text}"
    if run.world > 1:
        text += f" (rank {cost.rank}, the worst of {len(run.ranks)})"
    yield "cost", text
    parts = (
        ("copies", cost.copy_wait_s), ("places in flight", cost.slot_wait_s), ("gates and fences", cost.gate_wait_s),
        ("other", cost.other_s),
    )  # fmt: skip
    yield "", "waited for: " + ", ".join(f"{what} {span(seconds)}" for what, seconds in parts)
    yield "", f"the first save() took {span(cost.first_save_s)}; captures waited {span(cost.pool_wait_s)} for buffers"


def _age(run: RunBill) -> Iterator[tuple[str, str]]:
    age, loss = run.age, run.loss
    now = "" if age.now_s is None else f"{span(age.now_s)} old now; "
    yield "newest", f"{now}{span(age.mean_s)} on average, {span(age.worst_s)} at worst"
    if len(age.series) > 1:
        yield "", f"{_bars([point.worst_s for point in age.series])} up to {span(max(p.worst_s for p in age.series))}"
    text = f"loses {span(loss.total_s)} on average: "
    text += f"{span(loss.work_s)} of work"
    text += ", and the restart" if loss.restart_s is None else f", {span(loss.restart_s)} to restart"
    yield "a failure", text


def _bars(values: list[float]) -> str:
    """Draw the greatest of each part of a series."""
    top, columns = max(values) or 1.0, min(_BAR_COLUMNS, len(values))
    cut = [values[i * len(values) // columns : (i + 1) * len(values) // columns] for i in range(columns)]
    return "".join(_BARS[min(7, int(8 * max(part) / top))] for part in cut)


def _table(runs: tuple[RunBill, ...]) -> Table:
    table = Table(box=SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0), show_edge=False)
    for name in ("run", "began (UTC)", "uptime", "end", "restored", "reached", "lost", "ms/step", "share"):
        table.add_column(name, justify="left" if name in ("began (UTC)", "end") else "right", no_wrap=True)
    for run in runs[-_RUNS_SHOWN:]:
        cost = run.cost
        table.add_row(
            str(run.incarnation), run.began[:16].replace("T", " "), span(run.uptime_s),
            Text(run.state, _STYLES[run.state]), _number(run.restored_step), _number(run.reached_step),
            _number(run.steps_lost), "-" if cost.ms_per_step is None else f"{cost.ms_per_step:.3g}",
            "-" if cost.percent is None else f"{cost.percent:.2g} %",
        )  # fmt: skip
    return table


def _number(value: int | None) -> str:
    return "-" if value is None else f"{value:,}"


def span(seconds: float | None) -> str:
    """Give a time in the unit that suits it."""
    if seconds is None:
        return "-"
    if seconds < 0.9995:
        return f"{seconds * 1e3:.3g} ms"
    for unit, length, end in (("s", 1.0, 120), ("min", 60.0, 7200), ("h", 3600.0, 172800)):
        if seconds < end:
            return f"{seconds / length:.3g} {unit}"
    return f"{seconds / 86400:,.1f} d"


def size(count: int) -> str:
    """Give a number of bytes in the unit that suits it."""
    amount, units = float(count), ["B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB"]
    while amount >= 999.5 and len(units) > 1:
        amount, _ = amount / 1024, units.pop(0)
    return f"{amount:.0f} {units[0]}" if units[0] == "B" else f"{amount:.3g} {units[0]}"
