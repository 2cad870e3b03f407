"""The tables: who is measured in which, how often, and what the rows say (bench: imports all rooms of the bench but run)."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path

from .contenders import Contender, DcpAsync, Nothing, Pccheck, peers
from .disks import SlowDisk
from .lab import Lab, emptied
from .loops import Loop, Slowdown, measure_slowdown
from .measures import measure_calls, measure_memory, measure_rates, measure_tiny_ops
from .states import MIB
from .tables import Cell, Figure, Table


@dataclass(frozen=True, kw_only=True)
class Scale:
    """How large and how often everything is."""

    rounds: int = 3
    state_bytes: int = 480 * MIB
    step_s: float = 0.1
    small_state_bytes: int = 120 * MIB
    small_step_s: float = 0.05
    every: int = 10
    intervals: int = 3
    python_pairs: int = 4
    every_step_intervals: int = 40
    slow_rates: bool = True  # False = skip the slowest disks, as a quick run must
    changing_intervals: int = 16
    many: tuple[int, int] = (3000, 87 * 1024)  # leaves, bytes of each
    many_pairs: int = 60
    many_pairs_slow: int = 8
    window_s: float = 0.15
    call_leaves: tuple[int, int] = (4000, 16 * 1024)
    calls: int = 40
    rate_rounds: int = 9
    memory_saves: int = 4


FULL = Scale()
QUICK = Scale(
    rounds=1, state_bytes=6 * MIB, step_s=0.004, small_state_bytes=2 * MIB, small_step_s=0.002, every=5, intervals=2,
    python_pairs=1, every_step_intervals=5, slow_rates=False, changing_intervals=4, many=(60, 4096), many_pairs=4,
    many_pairs_slow=2, window_s=0.01, call_leaves=(100, 256), calls=5, rate_rounds=3, memory_saves=3,
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Bench:
    """What every table needs."""

    lab: Lab
    scale: Scale
    directory: Path
    slow_disk: SlowDisk
    say: Callable[[str], None]

    def here(self) -> AbstractContextManager[Path]:
        """Give a path with nothing at it, on the disk to measure."""
        return emptied(self.directory / "run")


def _pccheck(snapshot: str, *in_flight: int) -> list[Contender]:
    return [Pccheck(snapshot, n) for n in in_flight]


# -- training loops ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Column:
    """One loop on one disk."""

    title: str
    loop: Loop
    contenders: Sequence[Contender]
    disk: Callable[[], AbstractContextManager[object]] = nullcontext
    directory: Path | None = None


def _rounds(bench: Bench, columns: Sequence[Column]) -> dict[tuple[str, str], list[Slowdown]]:
    """Measure every contender of every column once per round."""
    found: dict[tuple[str, str], list[Slowdown]] = {}
    for number in range(bench.scale.rounds):
        for column in columns:
            with column.disk():
                for contender in column.contenders:
                    bench.say(f"round {number + 1} of {bench.scale.rounds}, {column.title}: {contender.name}")
                    slots = contender.in_flight + 1 if contender.in_flight else 0
                    loop = replace(column.loop, warm_up=slots, lead=max(column.loop.lead, slots))
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
    python = replace(device, python=True, intervals=min(2, s.intervals), pairs=s.python_pairs)
    columns = [
        Column(title="device", loop=device, contenders=everyone),
        Column(title="python", loop=python, contenders=everyone),
    ]
    rows = _loop_rows(columns, _rounds(bench, columns))
    return Table(
        name="slowdown",
        title=f"Slowdown: {_size(s.state_bytes)}, {1e3 * s.step_s:.0f} ms steps, a save every {s.every} steps",
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
        title=f"Slowdown: {_size(s.small_state_bytes)}, {1e3 * s.small_step_s:.0f} ms steps, a save every step",
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
    notes = [_METHOD, f"Rates in MiB/s; the loop produces {produced:.0f} MiB/s. Below that no checkpointer can keep up."]
    if why_not is None:
        notes.append("The disk: ext4 on a device whose writes the kernel limits.")
    else:
        notes.append(f"No disk limited by the kernel here ({why_not}): pccheck ran on a throttled medium, without peers.")
    return Table(name="limited-disk", title="Slowdown on a limited disk, device mode", rows=rows, notes=notes)


def _limited_columns(bench: Bench, *, kernel: bool) -> list[Column]:
    s = bench.scale
    produced = s.state_bytes / MIB / (s.step_s * s.every)
    whole = Loop(
        state_bytes=s.state_bytes, step_s=s.step_s, every=s.every, intervals=s.intervals, intervals_without=s.intervals
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
    columns = []
    for title, loop, phases in disks:
        if kernel:
            everyone: list[Contender] = [*_pccheck("lazy", 1, 2, 3), *peers()]
            disk, where = (lambda phases=phases: bench.slow_disk.changing(phases)), bench.slow_disk.mountpoint
        else:
            total = tuple((rate * MIB, seconds) for rate, seconds in phases)
            everyone, disk, where = [Pccheck("lazy", n, total=total) for n in (1, 2, 3)], nullcontext, bench.directory
        columns.append(Column(title=title, loop=loop, contenders=everyone, disk=disk, directory=where))
    return columns


def network(bench: Bench) -> Table:
    """Storage that gives each stream less than it gives all: where several in flight are the point."""
    s = bench.scale
    produced = s.small_state_bytes / (s.small_step_s * s.every)
    loop = Loop(state_bytes=s.small_state_bytes, step_s=s.small_step_s, every=s.every, intervals=2 * s.intervals)
    total, stream = 1.7 * produced, 0.42 * produced
    columns = [
        Column(
            title=title,
            loop=loop,
            contenders=[Pccheck("lazy", n, total=((total, 1.0),), stream_bytes_per_s=limit) for n in (1, 2, 3, 4)],
        )
        for title, limit in ((f"{stream / MIB:.0f} MiB/s a stream", stream), ("one stream fills it", 0.0))
    ]
    return Table(
        name="network",
        title=f"Slowdown on storage of {total / MIB:.0f} MiB/s, where the loop produces {produced / MIB:.0f} MiB/s",
        rows=_loop_rows(columns, _rounds(bench, columns)),
        notes=[
            _METHOD,
            "The medium is made slow by pccheck.testing.throttle, hence the portable pipeline, and no peers.",
            "One checkpoint is one stream: in_flight streams share the total. Where one stream fills it, they gain nothing.",
        ],
    )


# -- single costs -----------------------------------------------------------------------------------------------------


def rates(bench: Bench) -> Table:
    """Persist and restore beside raw."""
    with bench.here() as where:
        bench.say("rates")
        found = bench.lab.run(measure_rates, where, bench.scale.state_bytes, bench.scale.rate_rounds).by_name
    beside = {"save until durable": "raw write", "restore, fresh memory": "raw read, fresh memory"}
    rows: list[dict[str, Cell]] = []
    for name, values in found.items():
        row: dict[str, Cell] = {"": name, "GB/s": Figure([v / 1e9 for v in values], 2), "of raw": ""}
        if name in beside:
            row["of raw"] = Figure([a / b for a, b in zip(values, found[beside[name]], strict=True)], 2)
        rows.append(row)
    return Table(
        name="rates",
        title=f"Throughput of {_size(bench.scale.state_bytes)}",
        rows=rows,
        notes=[
            "Raw: O_DIRECT from and to memory in huge pages, 16 MiB a call, 2 threads, fdatasync at the end of writes.",
            "All alternate within one process; the ratio is of neighbours. Restoring allocates, so it compares with fresh.",
        ],
    )


def tiny_ops(bench: Bench) -> Table:
    """Trainer milliseconds lost per checkpoint with thousands of leaves."""
    s = bench.scale
    rows: list[dict[str, Cell]] = []
    everyone: list[tuple[Contender, int]] = [
        (Nothing(), s.many_pairs),
        (Pccheck("lazy", 2), s.many_pairs),
        (Pccheck("copy", 2), s.many_pairs),
        (DcpAsync(), s.many_pairs_slow),
    ]
    for contender, pairs in everyone:
        bench.say(f"tiny operations: {contender.name}")
        with bench.here() as where:
            found = bench.lab.run(measure_tiny_ops, contender, where, *s.many, pairs, s.window_s)
        quarters = statistics.quantiles(found.lost_ms, n=4)
        row: dict[str, Cell] = {
            "": contender.name,
            "lost": Figure([statistics.median(found.lost_ms)], 1, "ms"),
            "quartiles": f"{quarters[0]:.1f}..{quarters[2]:.1f}",
            "longest step": f"{found.longest_ms[0]:.1f} -> {found.longest_ms[1]:.1f} ms",
            "durable, trainer idle": Figure([found.durable_ms], 0, "ms"),
        }
        rows.append(row)
    return Table(
        name="tiny-ops",
        title=f"Lost per checkpoint: {s.many[0]} leaves, {_size(s.many[0] * s.many[1])}, steps of tiny torch operations",
        rows=rows,
        notes=[
            f"Windows of a fixed number of steps (about {1e3 * s.window_s:.0f} ms) without and with a save alternate "
            f"within one process, {s.many_pairs} pairs (DCP {s.many_pairs_slow}).",
            "A window goes on until the checkpoint is durable: lost = its time less as many steps at the pace before it.",
        ],
    )


def calls(bench: Bench) -> Table:
    """How long save() takes."""
    s = bench.scale
    rows: list[dict[str, Cell]] = []
    for kind in ("torch", "numpy"):
        bench.say(f"calls: {kind}")
        with bench.here() as where:
            times = bench.lab.run(measure_calls, where, *s.call_leaves, kind, s.calls)
        rows.append({"": kind, "save() returns within": Figure(times, 2, "ms")})
    return Table(
        name="calls",
        title=f"save() of an unchanged structure of {s.call_leaves[0]} leaves, lazy",
        rows=rows,
        notes=[f"Median [least..greatest] of {s.calls} calls, none under way before them, after 4 that are not counted."],
    )


def memory(bench: Bench) -> Table:
    """Peak memory."""
    s = bench.scale
    rows: list[dict[str, Cell]] = []
    chunk = 16 * MIB
    states = -(-s.state_bytes // chunk) * chunk
    everyone: list[tuple[Contender, int]] = [
        (Pccheck("lazy", 1, buffer_bytes=max(states, 2 * chunk)), max(states, 2 * chunk)),
        (Pccheck("lazy", 2, buffer_bytes=2 * states), 2 * states),
        (Pccheck("copy", 2, buffer_bytes=4 * chunk), 4 * chunk),
        *((peer, 0) for peer in peers()),
    ]
    for contender, pool in everyone:
        bench.say(f"memory: {contender.name}")
        with bench.here() as where:
            found = bench.lab.run(measure_memory, contender, where, s.state_bytes, s.memory_saves)
        row: dict[str, Cell] = {
            "": contender.name,
            "pool": f"{pool / MIB:.0f} MiB" if pool else "-",
            "extra, saving": Figure([found.saving_bytes / MIB], 0, "MiB"),
            "beyond the pool": Figure([(found.saving_bytes - pool) / MIB], 0, "MiB") if pool else "-",
            "extra, restoring": Figure([found.restoring_bytes / MIB], 0, "MiB"),
        }
        rows.append(row)
    return Table(
        name="memory",
        title=f"Greatest resident memory beyond the loop and its state of {_size(s.state_bytes)}",
        rows=rows,
        notes=["Restoring: beyond one restored state. The page cache is not counted."],
    )


def _size(count: int) -> str:
    return f"{count / MIB:.0f} MiB" if count >= MIB else f"{count / 1024:.0f} KiB"


ALL: dict[str, Callable[[Bench], Table]] = {
    "slowdown": slowdown,
    "every-step": every_step,
    "limited-disk": limited_disk,
    "network": network,
    "rates": rates,
    "tiny-ops": tiny_ops,
    "calls": calls,
    "memory": memory,
}
