"""The tables of single costs: throughput, calls, memory (bench: imports all below it)."""

from __future__ import annotations

from collections.abc import Callable

from .contenders import Contender, Pccheck
from .measures import measure_calls, measure_memory, measure_rates
from .peers import peers
from .scale import Bench, size_text
from .states import MIB
from .tables import Cell, Figure, Table


def rates(bench: Bench) -> Table:
    """Persist and restore beside raw."""
    with bench.here("rates") as where:
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
        title=f"Throughput of {size_text(bench.scale.state_bytes)}",
        rows=rows,
        notes=[
            "Raw: O_DIRECT from and to memory in huge pages, 16 MiB a call, 2 threads, fdatasync at the end of writes.",
            "All alternate within one process; ratios are of neighbours. Restoring allocates: hence fresh.",
        ],
    )


def calls(bench: Bench) -> Table:
    """How long save() takes."""
    s = bench.scale
    rows: list[dict[str, Cell]] = []
    for kind in ("torch", "numpy"):
        with bench.here(f"calls: {kind}") as where:
            times = bench.lab.run(measure_calls, where, *s.call_leaves, kind, s.calls)
        rows.append({"": kind, "save() returns within": Figure(times, 2, "ms")})
    return Table(
        name="calls",
        title=f"save() of an unchanged structure of {s.call_leaves[0]} leaves, lazy",
        rows=rows,
        notes=[f"Median [least..greatest] of {s.calls} calls, each with none under way; the first 4 are not counted."],
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
        with bench.here(f"memory: {contender.name}") as where:
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
        title=f"Greatest resident memory beyond the loop and its state of {size_text(s.state_bytes)}",
        rows=rows,
        notes=["Restoring: beyond one restored state. The page cache is not counted."],
    )


TABLES: dict[str, Callable[[Bench], Table]] = {
    "rates": rates,
    "calls": calls,
    "memory": memory,
}
