"""The tables of training loops: who is measured on which disk (bench: imports all below it)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from .contenders import Contender, Nothing, Pccheck
from .lab import emptied
from .loops import Loop, Slowdown, measure_slowdown
from .peers import peers
from .scale import Bench, size_text
from .states import MIB
from .tables import Cell, Figure, Table


@dataclass(frozen=True, kw_only=True)
class Column:
    """One loop on one disk.

    Args:
        title: of the column.
        loop: what is done there.
        contenders: by whom.
        disk: what must be entered meanwhile.
        directory: where that disk is; None = where the bench runs.
        fill: start the clock only when as many saves as fit in flight are under way, as a slow disk demands.
    """

    title: str
    loop: Loop
    contenders: Sequence[Contender]
    disk: Callable[[], AbstractContextManager[object]] = nullcontext
    directory: Path | None = None
    fill: bool = False


def _rounds(bench: Bench, columns: Sequence[Column]) -> dict[tuple[str, str], list[Slowdown]]:
    """Measure every contender of every column once per round."""
    found: dict[tuple[str, str], list[Slowdown]] = {}
    for number in range(bench.scale.rounds):
        for column in columns:
            with column.disk():
                for contender in column.contenders:
                    if contender.name != Nothing.name and not bench.wants(f"{column.title}: {contender.name}"):
                        continue
                    bench.say(f"round {number + 1} of {bench.scale.rounds}, {column.title}: {contender.name}")
                    slots = contender.in_flight + 1 if contender.in_flight else 0
                    lead = max(column.loop.lead, slots) if column.fill else column.loop.lead
                    loop = replace(column.loop, warm_up=slots, lead=lead)
                    with emptied((column.directory or bench.directory) / "run") as where:
                        result = bench.lab.run(measure_slowdown, contender, where, loop)
                    found.setdefault((contender.name, column.title), []).append(result)
    return found


def _loop_rows(columns: Sequence[Column], found: dict[tuple[str, str], list[Slowdown]]) -> list[dict[str, Cell]]:
    names = list(dict.fromkeys(c.name for column in columns for c in column.contenders))
    rows = []
    for name in names:
        row: dict[str, Cell] = {"": name}
        runs = [run for (who, _), all_runs in found.items() if who == name for run in all_runs]
        if not runs:
            continue  # not asked for
        for column in columns:
            measured = found.get((name, column.title))
            row[column.title] = Figure([r.ratio for r in measured]) if measured else "-"
        whole = sum(r.restored is not None for r in runs)
        row["restored"] = "-" if name == Nothing.name else f"{whole} of {len(runs)}"
        rows.append(row)
    return rows


_METHOD = (
    "Time per step over that of a loop without checkpoints in the same process, alternating; median [least..greatest] "
    "of the rounds. After each run the last checkpoint was restored and compared bit by bit."
)


def slowdown(bench: Bench) -> Table:
    """Training-loop slowdown."""
    s = bench.scale
    everyone = [Nothing(), *_pccheck("lazy", 1, 2, 3), *_pccheck("copy", 1, 2, 3), *peers()]
    device = Loop(state_bytes=s.state_bytes, step_s=s.step_s, every=s.every, intervals=s.intervals)
    python = replace(device, python=True, intervals=1, pairs=s.python_pairs)
    columns = [
        Column(title="device", loop=device, contenders=everyone),
        Column(title="python", loop=python, contenders=everyone),
    ]
    rows = _loop_rows(columns, _rounds(bench, columns))
    return Table(
        name="slowdown",
        title=f"Slowdown: {size_text(s.state_bytes)}, {1e3 * s.step_s:.0f} ms steps, a save every {s.every} steps",
        rows=rows,
        notes=[_METHOD, "device: the step waits outside the interpreter lock. python: the step holds it."],
    )


def every_step(bench: Bench) -> Table:
    """The same with a save at every step."""
    s = bench.scale
    loop = Loop(
        state_bytes=s.small_state_bytes, step_s=s.small_step_s, every=1, lead=4, intervals=s.every_step_intervals
    )
    everyone = [Nothing(), *_pccheck("lazy", 1, 2, 3), *_pccheck("copy", 2), *peers()]
    columns = [Column(title="device", loop=loop, contenders=everyone)]
    return Table(
        name="every-step",
        title=f"Slowdown: {size_text(s.small_state_bytes)}, {1e3 * s.small_step_s:.0f} ms steps, a save every step",
        rows=_loop_rows(columns, _rounds(bench, columns)),
        notes=[_METHOD],
    )


def limited_disk(bench: Bench) -> Table:
    """The effect of in_flight, beside the peers, on disks of many rates."""
    s = bench.scale
    why_not = bench.slow_disk.up(1000, 4)
    try:
        columns = _limited_columns(bench, kernel=why_not is None)
        rows = _loop_rows(columns, _rounds(bench, columns))
    finally:
        if why_not is None:
            bench.slow_disk.down()
    produced = s.state_bytes / MIB / (s.step_s * s.every)
    notes = [_METHOD, f"Rates in MiB/s; the loop produces {produced:.0f}. Below that no checkpointer can keep up."]
    if why_not is None:
        notes.append("The disk: ext4 on a device whose writes the kernel limits.")
    else:
        notes.append(f"No such disk here ({why_not}): pccheck ran on a throttled medium, without peers.")
    return Table(name="limited-disk", title="Slowdown on a limited disk, device mode", rows=rows, notes=notes)


def _limited_columns(bench: Bench, *, kernel: bool) -> list[Column]:
    s = bench.scale
    produced = s.state_bytes / MIB / (s.step_s * s.every)
    whole = Loop(
        state_bytes=s.state_bytes, step_s=s.step_s, every=s.every, intervals=2 * s.intervals, intervals_without=3
    )
    half = replace(whole, state_bytes=s.state_bytes // 2, step_s=s.step_s / 2)
    disks: list[tuple[str, Loop, tuple[tuple[float, float], ...]]] = [
        (f"{500 / 480 * produced:.0f}", whole, ((500 / 480 * produced, 1.0),)),
        (f"1x: {produced:.0f}", half, ((produced, 1.0),)),
        (f"3x: {3 * produced:.0f}", half, ((3 * produced, 1.0),)),
    ]
    if s.slow_rates:
        disks.insert(1, (f"0.3x: {0.3 * produced:.0f}", half, ((0.3 * produced, 1.0),)))
        changing = replace(whole, intervals=s.changing_intervals)
        disks.append(("200 and 900, 4 s each", changing, ((200.0, 4.0), (900.0, 4.0))))
    return [_on_disk(bench, title, loop, phases, kernel=kernel) for title, loop, phases in disks]


def _on_disk(bench: Bench, title: str, loop: Loop, phases: tuple[tuple[float, float], ...], *, kernel: bool) -> Column:
    if not kernel:
        total = tuple((rate * MIB, seconds) for rate, seconds in phases)
        ours = [Pccheck("lazy", n, total=total) for n in (1, 2, 3)]
        return Column(title=title, loop=loop, contenders=ours, fill=True)
    return Column(
        title=title,
        loop=loop,
        contenders=[*_pccheck("lazy", 1, 2, 3), *peers()],
        disk=lambda: bench.slow_disk.changing(phases),
        directory=bench.slow_disk.mountpoint,
        fill=True,
    )


def network(bench: Bench) -> Table:
    """Storage that gives each stream less than it gives all: where several in flight are the point."""
    s = bench.scale
    produced = s.small_state_bytes / (s.small_step_s * s.every)
    loop = Loop(state_bytes=s.small_state_bytes, step_s=s.small_step_s, every=s.every, intervals=4 * s.intervals)
    total, stream = 1.7 * produced, 0.42 * produced
    columns = []
    for title, limit in ((f"{stream / MIB:.0f} MiB/s a stream", stream), ("one stream fills it", 0.0)):
        slow: dict[str, Any] = {"total": ((total, 1.0),), "stream_bytes_per_s": limit}
        ours = [Pccheck("lazy", n, writers=n, writers_per_checkpoint=1, **slow) for n in (1, 2, 3, 4)]
        columns.append(Column(title=title, loop=loop, contenders=ours, fill=True))
    return Table(
        name="network",
        title=f"Slowdown on storage of {total / MIB:.0f} MiB/s, where the loop produces {produced / MIB:.0f} MiB/s",
        rows=_loop_rows(columns, _rounds(bench, columns)),
        notes=[
            _METHOD,
            "The medium is made slow by pccheck.testing.throttle, hence the portable pipeline, and no peers.",
            "writers = in_flight, writers_per_checkpoint = 1: several checkpoints are written side by side.",
            "One checkpoint is one stream; in_flight streams share the total. Where one fills it, more gain nothing.",
        ],
    )


def _pccheck(snapshot: str, *in_flight: int) -> list[Contender]:
    return [Pccheck(snapshot, n) for n in in_flight]


TABLES: dict[str, Callable[[Bench], Table]] = {
    "slowdown": slowdown,
    "every-step": every_step,
    "limited-disk": limited_disk,
    "network": network,
}
