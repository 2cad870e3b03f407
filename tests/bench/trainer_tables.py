"""The tables of trainers: who loses how much of its time, alone and among ranks (bench: imports all below it)."""

from __future__ import annotations

import statistics
from collections.abc import Callable

from .contenders import Contender, Nothing, Pccheck, RawWrite
from .peers import DcpAsync, TorchCheckpointing, TorchSave
from .ranks import RankCost, measure_rank, over_directory, over_store
from .scale import Bench, size_text
from .tables import Cell, Figure, Table
from .trainers import KINDS, Cost, Training, measure_mode, measure_trainer

UNTIMED = 12  # saves: of each of three modes "auto" makes three before it chooses


def trainers(bench: Bench) -> Table:
    """Trainer milliseconds lost per checkpoint, and step times at one checkpoint a second."""
    s = bench.scale
    everyone: list[tuple[Contender, float]] = [
        (Nothing(), s.pairs_s),
        (RawWrite(), s.pairs_s),
        (Pccheck("lazy", 2), s.pairs_s),
        (Pccheck("lazy", 2, whole=True), s.pairs_s),
        (Pccheck("copy", 2), s.pairs_s),
        (DcpAsync(), 0.0),
        (DcpAsync(process=True), 0.0),
        (TorchCheckpointing(), 0.0),
        (TorchSave(), 0.0),
    ]
    rows: list[dict[str, Cell]] = []
    notes = [
        "lost: of the trainer's time, per checkpoint; median [quartiles] of pairs of windows without and with a save. "
        "The one with it goes on until that is durable; lost = its time less as many steps at the pace just before.",
        f"ratio: step time over that without, in windows of {s.long_s:g} s that each begin with a save (longer where "
        "it is not durable by then); median of the pairs.",
        f"longest step: of the {KINDS[0]} while a checkpoint is under way, the call that begins it included.",
        f"{RawWrite.name}: a thread that writes and syncs as many bytes, and does nothing else.",
        f"The state changes in place every {1e3 * s.pass_s:.0f} ms, the passes between are steps of one kind. After "
        "each run the last checkpoint was restored and compared bit by bit.",
    ]
    for leaves in s.trained:
        title = f"{leaves[0]} x {size_text(leaves[1])}"
        cells = {c.name: tuple(k for k in KINDS if bench.wants(f"{title}, {k}: {c.name}")) for c, _ in everyone[1:]}
        cells[Nothing.name] = tuple(k for k in KINDS if any(k in kinds for kinds in cells.values()))
        for contender, pairs_s in everyone:
            kinds = cells[contender.name]
            if not kinds:
                continue
            name = f"{title}: {contender.name}"
            if isinstance(contender, TorchCheckpointing) and contender.missing():
                rows.append({"": name, **{f"{kind}: lost ms": "-" for kind in kinds}})
                notes.append("torch_checkpointing is not installed here: pip install torch-checkpointing")
                continue
            training = Training(
                leaves=leaves, kinds=kinds, pass_s=s.pass_s, short_s=2 * s.pass_s, long_s=s.long_s,
                pairs_s=pairs_s, long_pairs_s=s.long_pairs_s,
            )  # fmt: skip
            with bench.here(f"trainers: {name}") as where:
                found = bench.lab.run(measure_trainer, contender, where, training)
            rows.append({"": name, **_cells(found)})
    return Table(
        name="trainers",
        title="What a checkpoint costs a trainer, by kind of step",
        rows=rows,
        notes=list(dict.fromkeys(notes)),
    )


def _cells(found: dict[str, Cost]) -> dict[str, Cell]:
    cells: dict[str, Cell] = {}
    for kind, cost in found.items():
        low, middle, high = statistics.quantiles(cost.lost_ms, n=4)
        cells[f"{kind}: lost ms"] = Figure([low, middle, high], 1)
        cells[f"{kind}: ratio"] = Figure([statistics.median(cost.ratio)])
    if KINDS[0] in found:
        cells["longest step, ms"] = Figure([found[KINDS[0]].longest_ms], 1)
    return cells


def snapshots(bench: Bench) -> Table:
    """What save() and the gate cost in each snapshot mode."""
    s = bench.scale
    leaves = s.trained[0]
    rows: list[dict[str, Cell]] = []
    for mode in ("copy", "lazy", "device", "auto"):
        if not bench.wants(f"snapshots: {mode}"):
            continue
        row: dict[str, Cell] = {"": mode}
        for title, pause_s in ((f"change {1e3 * s.pass_s:.0f} ms later", s.pass_s), ("change at once", 0.0)):
            with bench.here(f"snapshots: {mode}, {title}") as where:
                found = bench.lab.run(measure_mode, Pccheck(mode, 2), where, leaves, s.mode_saves, pause_s, UNTIMED)
            row[f"{title}: save()"] = Figure(found.save_ms, 1, "ms")
            row[f"{title}: gate"] = Figure(found.gate_ms, 1, "ms")
            row[f"{title}: mode"] = found.mode
        rows.append(row)
    return Table(
        name="snapshots",
        title=f"Snapshot modes: {leaves[0]} x {size_text(leaves[1])} in host memory",
        rows=rows,
        notes=[
            f"Median [least..greatest] of {s.mode_saves} saves, each durable before the next; the {UNTIMED} before, in "
            "which auto tries every mode, are not counted.",
            "gate: what the optimizer's step waits for the capture. mode: what it ended with; auto goes on measuring.",
        ],
    )


def ranks(bench: Bench) -> Table:
    """What ranks wait for, and how long until all of them agree."""
    s = bench.scale
    rows: list[dict[str, Cell]] = []
    for world in s.worlds:
        for name, contender in _rank_contenders():
            row_name = f"{world} ranks: {name}"
            if not bench.wants(row_name):
                continue
            with bench.here(f"ranks: {row_name}") as where:
                found = bench.lab.together(measure_rank, world, contender, where, s.rank_bytes, s.rank_saves)
            rows.append({"": row_name, **_rank_cells(found)})
    return Table(
        name="ranks",
        title=f"Ranks: FSDP2 over gloo, {size_text(s.rank_bytes)} on each rank",
        rows=rows,
        notes=[
            f"Of each of {s.rank_saves} saves the slowest rank's time; median [least..greatest].",
            "blocked, agreed: of saves that were alone; agreed = durable on every rank, and every rank knows (for DCP: "
            "the call's future).",
            "back to back: per save, where each was asked for as soon as the state had changed after the one before.",
            "Every rank then restored what it had held at the last save. The ranks share these cores and this disk.",
        ],
    )


def _rank_contenders() -> list[tuple[str, Contender]]:
    found: list[tuple[str, Contender]] = []
    for title, over in (("StoreCoordinator", over_store), ("SharedDirectory", over_directory)):
        for in_flight in (1, 2):
            contender = Pccheck("lazy", in_flight, over=over, whole=True)
            found.append((f"pccheck lazy, in_flight {in_flight}, {title}", contender))
    return [*found, (DcpAsync().name, DcpAsync())]


def _rank_cells(found: list[RankCost]) -> dict[str, Cell]:
    blocked = [max(times) for times in zip(*(cost.blocked_ms for cost in found), strict=True)]
    durable = [max(times) for times in zip(*(cost.durable_ms for cost in found), strict=True)]
    return {
        "blocked": Figure(blocked, 1, "ms"),
        "agreed": Figure(durable, 1, "ms"),
        "back to back": Figure([max(cost.each_ms for cost in found)], 1, "ms"),
    }


TABLES: dict[str, Callable[[Bench], Table]] = {"trainers": trainers, "snapshots": snapshots, "ranks": ranks}
