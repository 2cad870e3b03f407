"""The tables of JAX and Orbax: loops, many leaves, memory, restoring (bench: imports all below it)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from importlib.metadata import version

import jax

from .contenders import Nothing, Saver
from .jax_contenders import PccheckJax, Reader, ours, stock
from .jax_measures import Kind, Restoring, measure_jax_memory, measure_kinds, measure_restore, save_once, typical_ms
from .jax_states import TURNS, Shapes, bytes_of, gpt, many
from .loops import Loop, Slowdown
from .scale import Bench, size_text
from .states import MIB
from .tables import Cell, Figure, Table

_METHOD = (
    "Time per step over that of a loop without checkpoints in the same process, alternating; median [least..greatest] "
    "of the rounds. blocked: milliseconds that save() and fence() kept the trainer, median of a run's saves. After "
    "each run the last checkpoint was restored and compared bit by bit."
)
_KINDS = "device: the step waits outside the interpreter lock. python: the step holds it."


def orbax(bench: Bench) -> Table:
    """Training-loop slowdown of a GPT in jax arrays."""
    s = bench.scale
    shapes = gpt(s.state_bytes)
    kinds = {
        f"{mode}, {'donated' if donated else 'kept'}": Kind(loop=loop, donated=donated)
        for mode, loop in _loops(bench, shapes).items()
        for donated in (True, False)
    }
    everyone: list[Saver] = [Nothing(), *ours(1, 2, 3), PccheckJax(), *stock()]
    return Table(
        name="orbax",
        title=f"JAX: {size_text(s.state_bytes)}, {1e3 * s.step_s:.0f} ms steps, a save every {s.every} steps",
        rows=_rows(kinds, _rounds(bench, everyone, shapes, kinds)),
        notes=[
            _METHOD,
            _KINDS,
            "donated: a jitted update of all leaves owns the memory of the state that it replaces, and changes it in "
            f"place; kept: it makes new arrays, of one leaf in {TURNS}.",
            _versions(),
        ],
    )


def orbax_leaves(bench: Bench) -> Table:
    """The same with thousands of small leaves."""
    s = bench.scale
    count, leaf_bytes = s.jax_leaves
    shapes = many(count, leaf_bytes)
    kinds = {mode: Kind(loop=loop, donated=True) for mode, loop in _loops(bench, shapes).items()}
    everyone: list[Saver] = [Nothing(), *ours(1, 2, 3), PccheckJax(), *stock()]
    return Table(
        name="orbax-leaves",
        title=f"JAX: {count} leaves of {size_text(leaf_bytes)}, {1e3 * s.step_s:.0f} ms steps, donated, a save every "
        f"{s.every} steps",
        rows=_rows(kinds, _rounds(bench, everyone, shapes, kinds)),
        notes=[_METHOD, _KINDS, _versions()],
    )


def orbax_memory(bench: Bench) -> Table:
    """Peak memory of one process."""
    s = bench.scale
    loop = Loop(state_bytes=s.state_bytes, step_s=s.step_s, every=s.every, intervals=s.memory_saves)
    everyone: list[Reader] = [*ours(1, 2, 3), PccheckJax(), *stock()]
    rows: list[dict[str, Cell]] = []
    for contender in everyone:
        if not bench.wants(contender.name):
            continue
        with bench.here(f"orbax-memory: {contender.name}") as where:
            found = bench.lab.run(measure_jax_memory, contender, where, gpt(s.state_bytes), loop)
        row: dict[str, Cell] = {
            "": contender.name,
            "extra, saving": Figure([found.saving_bytes / MIB], 0, "MiB"),
            "extra, restoring": Figure([found.restoring_bytes / MIB], 0, "MiB"),
        }
        rows.append(row)
    return Table(
        name="orbax-memory",
        title=f"JAX: greatest resident memory beyond the loop and its state of {size_text(s.state_bytes)}",
        rows=rows,
        notes=[
            f"{s.memory_saves} saves at the pace of {1e3 * s.step_s:.0f} ms steps that donate, one every {s.every}.",
            "Restoring: beyond one restored state. The page cache is not counted.",
            _versions(),
        ],
    )


def orbax_restore(bench: Bench) -> Table:
    """Restoring in a new process."""
    s = bench.scale
    shapes = gpt(s.state_bytes)
    everyone = [c for c in [*ours(2), PccheckJax(), *stock()] if bench.wants(c.name)]
    found: dict[str, list[Restoring]] = {c.name: [] for c in everyone}
    for number in range(s.rounds):
        for contender in everyone:
            with bench.here(f"round {number + 1} of {s.rounds}, orbax-restore: {contender.name}") as where:
                bench.lab.run(save_once, contender, where / "steps", shapes)
                result = bench.lab.run(measure_restore, contender, where / "steps", where / "raw", shapes)
            found[contender.name].append(result)
    rows: list[dict[str, Cell]] = []
    gigabytes = bytes_of(shapes) / 1e9
    for name, results in found.items():
        row: dict[str, Cell] = {
            "": name,
            "restore": Figure([r.restore_s for r in results], 2, "s"),
            "GB/s": Figure([gigabytes / r.restore_s for r in results], 2),
            "raw read, GB/s": Figure([gigabytes / r.raw_s for r in results], 2),
            "of raw": Figure([r.raw_s / r.restore_s for r in results], 2),
        }
        rows.append(row)
    return Table(
        name="orbax-restore",
        title=f"JAX: restoring {size_text(s.state_bytes)} as a new process's first act, opening included",
        rows=rows,
        notes=[
            "Into memory not touched before, with no file in the page cache; compared bit by bit. Raw: O_DIRECT, "
            "16 MiB a call, 2 threads, into fresh huge pages, in the same process just before.",
            _versions(),
        ],
    )


def _loops(bench: Bench, shapes: Shapes) -> dict[str, Loop]:
    s = bench.scale
    device = Loop(state_bytes=bytes_of(shapes), step_s=s.step_s, every=s.every, intervals=s.intervals)
    return {"device": device, "python": replace(device, python=True, intervals=1, pairs=s.python_pairs)}


def _rounds(
    bench: Bench, everyone: Sequence[Saver], shapes: Shapes, kinds: dict[str, Kind]
) -> dict[str, dict[str, list[Slowdown]]]:
    """Measure every contender once per round; give the runs by contender and kind."""
    wanted = {c.name: [k for k in kinds if bench.wants(f"{k}: {c.name}")] for c in everyone if c.name != Nothing.name}
    wanted[Nothing.name] = [k for k in kinds if any(k in ks for ks in wanted.values())]
    found: dict[str, dict[str, list[Slowdown]]] = {}
    for number in range(bench.scale.rounds):
        for contender in everyone:
            warm_up = contender.in_flight + 1 if contender.in_flight else 0
            asked = {k: replace(kinds[k], loop=replace(kinds[k].loop, warm_up=warm_up)) for k in wanted[contender.name]}
            if not asked:
                continue
            with bench.here(f"round {number + 1} of {bench.scale.rounds}: {contender.name}") as where:
                for name, run in bench.lab.run(measure_kinds, contender, where, shapes, asked).items():
                    found.setdefault(contender.name, {}).setdefault(name, []).append(run)
    return found


def _rows(kinds: dict[str, Kind], found: dict[str, dict[str, list[Slowdown]]]) -> list[dict[str, Cell]]:
    rows, asked = [], [kind for kind in kinds if any(kind in by_kind for by_kind in found.values())]
    for name, by_kind in found.items():
        row: dict[str, Cell] = {"": name}
        for kind in asked:
            runs = by_kind.get(kind, [])
            row[kind] = Figure([run.ratio for run in runs]) if runs else "-"
            saves = runs and name != Nothing.name
            row[f"{kind}: blocked"] = Figure([typical_ms(run) for run in runs], 1, "ms") if saves else "-"
        all_runs = [run for runs in by_kind.values() for run in runs]
        whole = sum(run.restored is not None for run in all_runs)
        row["restored"] = "-" if name == Nothing.name else f"{whole} of {len(all_runs)}"
        rows.append(row)
    return rows


def _versions() -> str:
    names = ("jax", "orbax-checkpoint", "tensorstore")
    told = ", ".join(f"{name} {version(name)}" for name in names)
    return f"{told}; arrays on {jax.devices()[0].platform}."


TABLES: dict[str, Callable[[Bench], Table]] = {
    "orbax": orbax,
    "orbax-leaves": orbax_leaves,
    "orbax-memory": orbax_memory,
    "orbax-restore": orbax_restore,
}
