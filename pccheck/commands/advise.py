"""`pccheck advise`: how often, how many, how big (floor 4: imports audit, tuning, replay, plots; never a writer)."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Annotated, Literal, cast

import msgspec
import typer
from rich.console import Console

from pccheck import audit, printing
from pccheck.commands import advice_text
from pccheck.errors import ContentError, MediumError, OptionError, UsageError
from pccheck.plots.goodput import goodput
from pccheck.replay.files import read_trace
from pccheck.reports import StoreReport
from pccheck.tuning.advice import advise as find_advice
from pccheck.tuning.basis import Rates
from pccheck.tuning.machine import MAX_JSON_BYTES, Machine
from pccheck.tuning.room import ProbedRoomError
from pccheck.tuning.units import parse_bytes, parse_rate, parse_seconds, seconds_text, value_text
from pccheck.tuning.wanted import FAILURE_RATES, MOST_IN_FLIGHT, Wanted, failures_of


def advise(
    step: Annotated[str, typer.Option(metavar="TIME", help="Time of a training step without checkpoints: 2, 350ms.")],
    state: Annotated[
        str | None, typer.Option(metavar="SIZE", help="Size of a checkpoint, of all ranks together: 80GB, 512MiB.")
    ] = None,
    ranks: Annotated[
        int | None, typer.Option(metavar="N", help="Processes that save side by side, each an equal part.", min=1)
    ] = None,
    store: Annotated[
        Path | None, typer.Option(metavar="PATH", help="Take the size from the newest checkpoint there.")
    ] = None,
    mtbf: Annotated[
        str | None,
        typer.Option(metavar="TIME", help="Mean time between failures of the job: 45m, or spot, shared, dedicated."),
    ] = None,
    trace: Annotated[Path | None, typer.Option(metavar="FILE", help="Take it from a trace of failures (CSV).")] = None,
    node_mtbf: Annotated[
        str | None, typer.Option(metavar="TIME", help="Mean time between failures of one node, with --nodes.")
    ] = None,
    nodes: Annotated[
        int | None, typer.Option(metavar="N", help="Nodes of the job, for the failure rate only: any stops it.", min=1)
    ] = None,
    restart: Annotated[
        str | None, typer.Option(metavar="TIME", help="Time from a failure until training goes on.")
    ] = None,
    rpo: Annotated[str | None, typer.Option(metavar="TIME", help="No failure may lose more work than this.")] = None,
    dram: Annotated[str | None, typer.Option(metavar="SIZE", help="Most memory for the buffer pool of a rank.")] = None,
    storage: Annotated[str | None, typer.Option(metavar="SIZE", help="Most storage that all slots may take.")] = None,
    slowdown: Annotated[
        float | None, typer.Option(metavar="RATIO", help="Slowdown by checkpoints that is allowed in all: 1.05.")
    ] = None,
    stall: Annotated[
        float | None, typer.Option(metavar="SHARE", help="Share of the time that copying may take: 0.05.")
    ] = None,
    keep: Annotated[int, typer.Option(metavar="N", help="Finished checkpoints to keep.")] = 1,
    snapshot: Annotated[str, typer.Option(metavar="MODE", help="auto, copy or lazy.")] = "auto",
    max_in_flight: Annotated[
        int, typer.Option(metavar="N", help="Most checkpoints at once to advise.")
    ] = MOST_IN_FLIGHT,
    probe: Annotated[
        Path | None, typer.Option(metavar="FILE", help="What `pccheck probe --json FILE` measured.")
    ] = None,
    disk: Annotated[
        str | None, typer.Option(metavar="RATE", help="Rate of the storage, all ranks together: 2GB/s.")
    ] = None,
    stream: Annotated[
        str | None, typer.Option(metavar="RATE", help="Rate that one checkpoint alone reaches there.")
    ] = None,
    copy: Annotated[
        str | None, typer.Option(metavar="RATE", help="Rate at which a rank's state is copied to host memory.")
    ] = None,
    plot: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Draw goodput against the interval: FILE.png or .svg.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")] = False,
) -> None:
    """Say how often to save, how many at once and with which options, what that brings, and what would help.

    Needs no more than --state and --step: what is not told or measured is assumed, and the answer says what. Exit
    status: 0 = advice; 1 = a wish is out of reach, with the nearest; 2 = the command line or a budget is wrong.
    """
    try:
        mtbf_s, failures, whose = _failures(mtbf, trace, node_mtbf, nodes)
        state_bytes, parts = _state(state, store)
        wanted = Wanted(
            state_bytes=state_bytes,
            step_s=parse_seconds(step, field="step_s", zero=False),
            mtbf_s=mtbf_s,
            restart_s=None if restart is None else parse_seconds(restart, field="restart_s"),
            rpo_s=None if rpo is None else parse_seconds(rpo, field="rpo_s", zero=False),
            dram_bytes=None if dram is None else parse_bytes(dram, field="dram_bytes"),
            storage_bytes=None if storage is None else parse_bytes(storage, field="storage_bytes"),
            slowdown=slowdown,
            stall_fraction=stall,
            keep=keep,
            snapshot=cast(Literal["auto", "copy", "lazy"], snapshot),
            max_in_flight=max_in_flight,
            ranks=ranks or parts,
        )
        advice = find_advice(wanted, machine_of(probe, disk, stream, copy), failures=failures, whose=whose)
        if plot is not None:
            goodput(advice, plot)
    except OptionError as error:
        _stop(option_text(error))
    except (UsageError, MediumError, ContentError) as error:
        _stop(str(error))
    if as_json:
        print(json.dumps(advice.as_json(), indent=2))
    else:
        advice_text.show(advice, Console(highlight=False))
    raise typer.Exit(1 if advice.unreachable else 0)


def _stop(text: str) -> None:
    print(f"pccheck advise: {printing.plain(text)}", file=sys.stderr)
    raise typer.Exit(2) from None


_FLAGS = {
    "state_bytes": "--state",
    "step_s": "--step",
    "mtbf_s": "--mtbf",
    "restart_s": "--restart",
    "rpo_s": "--rpo",
    "dram_bytes": "--dram",
    "storage_bytes": "--storage",
    "stall_fraction": "--stall",
}


def option_text(error: OptionError) -> str:
    """Say an error in the words of the command line."""
    if isinstance(error, ProbedRoomError):
        return str(error)
    flag = _FLAGS.get(error.field, "--" + error.field.replace("_", "-"))
    return f"{flag} {value_text(error.field, error.value)} is not allowed: it must be {error.allowed}"


def _failures(
    mtbf: str | None, trace: Path | None, node_mtbf: str | None, nodes: int | None
) -> tuple[float | None, str, str]:
    """Give the mean time between failures of the job, where it comes from, and whose it is if maybe not this job's."""
    if sum(given is not None for given in (mtbf, trace, node_mtbf)) > 1:
        raise UsageError("give one of --mtbf, --trace and --node-mtbf")
    if node_mtbf is not None:
        if nodes is None:
            raise UsageError("--node-mtbf needs --nodes: a job fails as often as all its nodes together")
        each_s = parse_seconds(node_mtbf, field="node_mtbf", zero=False)
        return each_s / nodes, f"{seconds_text(each_s)} between those of a node, {nodes:,} nodes", ""
    if mtbf in FAILURE_RATES:
        mtbf_s, source = failures_of(mtbf, machines=nodes)
        of = FAILURE_RATES[mtbf].machines if nodes is None else None
        return mtbf_s, source, f"as of {of:,.0f} nodes (`--nodes` tells yours)" if of else ""
    if nodes is not None:
        raise UsageError(_of_no_nodes(mtbf, trace, nodes))
    if trace is not None:
        read = read_trace(trace)
        if not math.isfinite(read.mtbf_s):
            raise UsageError(f"{trace} has no losses: leave it out")
        return read.mtbf_s, f"{read.failures} losses in {seconds_text(read.end_s)}, {read.name}", ""
    if mtbf is None:
        return None, "", ""
    try:
        return parse_seconds(mtbf, field="mtbf_s", zero=False), "", ""
    except OptionError as error:
        raise OptionError("mtbf_s", mtbf, f"{', '.join(FAILURE_RATES)}; or {error.allowed}") from None


def _of_no_nodes(mtbf: str | None, trace: Path | None, nodes: int) -> str:
    """Say what to write in place of --nodes with what it does not go with."""
    if trace is not None:
        return "a trace tells the failures of the whole job: leave --nodes out"
    if mtbf is None:
        return f"--nodes tells no failure rate alone: --node-mtbf TIME --nodes {nodes}, or --mtbf spot --nodes {nodes}"
    told = f"--mtbf {mtbf} is that of the whole job, which needs no --nodes"
    return f"{told}; if it is a node's: --node-mtbf {mtbf} --nodes {nodes}"


def machine_of(probe: Path | None, disk: str | None, stream: str | None, copy: str | None) -> Machine | Rates:
    """Give what the options tell of a machine. Raises UsageError, MediumError, FormatError."""
    copy_rate = None if copy is None else parse_rate(copy, field="copy")
    if probe is None:
        return Rates(
            disk=None if disk is None else parse_rate(disk, field="disk"),
            stream=None if stream is None else parse_rate(stream, field="stream"),
            copy=copy_rate,
        )
    if disk is not None or stream is not None:
        raise UsageError("--probe has measured what --disk and --stream tell: leave them out, or it")
    try:
        with probe.open("rb") as file:
            data = file.read(MAX_JSON_BYTES + 1)
    except OSError as error:
        raise MediumError("reading the probe", str(probe), error) from error
    machine = Machine.from_json(data)
    if copy_rate is None:
        return machine
    return msgspec.structs.replace(machine, device_copy_bytes_per_s=copy_rate)


def _state(state: str | None, store: Path | None) -> tuple[int, int]:
    """Give the size of a checkpoint, and of how many ranks it is as far as is told."""
    if (state is None) == (store is None):
        raise UsageError("give one of --state SIZE and --store PATH")
    if state is not None:
        return parse_bytes(state, field="state_bytes"), 1
    return newest(audit.audit(cast(Path, store)), cast(Path, store))


def newest(reports: list[StoreReport], store: Path) -> tuple[int, int]:
    """Give the size of the newest whole checkpoint of a store, or of those of all ranks, and of how many ranks it is.

    Raises UsageError if there is none.
    """
    sizes: dict[tuple[int, int, int], dict[tuple[int | None, str], int]] = {}
    for report in reports:
        for slot in report.slots:
            if slot.verdict == "ok" and slot.payload_bytes and None not in slot.identity:
                # A pinned checkpoint has two names in its store, one payload; of linked folders each file counts.
                part = (slot.rank, slot.name if report.folders else "")
                sizes.setdefault(cast(tuple[int, int, int], slot.identity), {})[part] = slot.payload_bytes
    if not sizes:
        raise UsageError(f"{store} holds no whole checkpoint to take the size from: give --state SIZE")
    found = sizes[max(sizes)]
    return sum(found.values()), len({rank for rank, _ in found})
