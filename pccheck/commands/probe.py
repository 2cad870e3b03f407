"""`pccheck probe`: what storage does with checkpoints (floor 4: imports probing, tuning, printing)."""

from __future__ import annotations

import os
import statistics
import sys
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated

import msgspec
import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from pccheck import printing
from pccheck.errors import CapacityError, OptionError, PccheckError, PoolMemoryError, UsageError
from pccheck.options import MIB
from pccheck.probing import probe as measure
from pccheck.probing.trials import TINY_BYTES
from pccheck.tuning.basis import reads_text
from pccheck.tuning.machine import Machine, Sample
from pccheck.tuning.units import bytes_text, parse_bytes, parse_seconds, rate_text, seconds_text, value_text

_OPTIONS = {"size_bytes": "--size", "seconds": "--seconds", "in_flight": "--in-flight"}  # as the errors name them


def probe(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="The folder that checkpoints will be written to.")],
    seconds: Annotated[
        str, typer.Option(metavar="TIME", help="About how long it may take: 30, 2m, 1h at most.")
    ] = "30",
    size: Annotated[
        str | None,
        typer.Option(
            metavar="BYTES",
            help="Of the largest state, such as 2GB; default: what storage writes in that time, at most 256 MiB.",
        ),
    ] = None,
    in_flight: Annotated[int, typer.Option(metavar="N", help="Most checkpoints at once.")] = 4,
    as_json: Annotated[
        str | None,
        typer.Option(
            "--json", metavar="FILE", help="Write there what `pccheck advise --probe FILE` takes; - = print it."
        ),
    ] = None,
) -> None:
    """Measure what the storage of DIR does with checkpoints: one and several at once, of several sizes, and read back.

    Works in DIR/pccheck-probe.tmp and removes it; takes at most half of the space that is free. Leave the machine alone
    meanwhile. Exit status: 0 = measured; 2 = DIR or an option cannot be used, or storage failed; 130 = interrupted.
    """
    try:
        target = _target(as_json)
        with ExitStack() as stack:
            machine = measure(
                directory, seconds=parse_seconds(seconds, field="--seconds"), in_flight=in_flight,
                size_bytes=None if size is None else parse_bytes(size, field="--size"), progress=_progress(stack),
            )  # fmt: skip
        if target is not None:
            with target.open("wb") as file:
                file.write(machine.to_json())
    except (PccheckError, OSError) as error:
        print(f"pccheck probe: {printing.plain(_text(error))}", file=sys.stderr)
        raise typer.Exit(2) from None
    except KeyboardInterrupt:
        print("pccheck probe: interrupted; nothing was left behind", file=sys.stderr)
        raise typer.Exit(130) from None
    if as_json == "-":
        print(machine.to_json().decode(), end="")
        return
    show(machine, Console(highlight=False))
    name = "FILE" if target is None else printing.plain(str(target))
    made = "pccheck probe DIR --json FILE, then " if target is None else ""
    print(f"\nSettings for your job: {made}pccheck advise --state SIZE --step TIME --probe {name}")


def _target(as_json: str | None) -> Path | None:
    """Give the file to write, and find out before the measurement whether it can be."""
    if as_json in (None, "-"):
        return None
    target = Path(as_json)
    if target.is_dir() or not os.access(target.parent, os.W_OK):
        raise UsageError(f"{target} cannot be written: --json takes a file in a folder that is there")
    return target


def _text(error: Exception) -> str:
    """Say an error in the words of the command line."""
    if isinstance(error, OptionError):
        name = _OPTIONS.get(error.field, error.field)
        return f"{name} {value_text(error.field, error.value)} is not allowed: it must be {error.allowed}"
    if isinstance(error, CapacityError):
        where = "memory" if isinstance(error, PoolMemoryError) else error.path
        need = f"{bytes_text(error.needed_bytes)} are needed, {bytes_text(error.free_bytes)} are free"
        return f"no room: {where}: {need}; free some, give a smaller --size or --in-flight, or probe another folder"
    if isinstance(error, OSError) and not isinstance(error, PccheckError):  # of the file of --json
        return f"{error.filename} cannot be written: {error.strerror}"
    return str(error)


def _progress(stack: ExitStack) -> Callable[[float, str], object] | None:
    """Give a progress bar on the terminal of standard error; None where that is no terminal."""
    console = Console(stderr=True)
    if not console.is_terminal:
        return None
    columns = (TextColumn("{task.description:30}"), BarColumn(), TimeRemainingColumn())
    bar = stack.enter_context(Progress(*columns, console=console, transient=True))
    task = bar.add_task("", total=1.0)
    return lambda done, doing: bar.update(task, completed=done, description=doing)


def show(machine: Machine, console: Console) -> None:
    """Print what was measured, and what it means."""
    console.print(
        f"{machine.path}: {machine.filesystem}; {machine.cpus} cores, {machine.pipeline} data path, "
        f"{bytes_text(machine.free_bytes)} free; measured in {seconds_text(machine.seconds)}",
        markup=False, soft_wrap=True,
    )  # fmt: skip
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    for column in ("checkpoints", "writers", "size", "durable after", "worst", "rate"):
        table.add_column(column, justify="left" if column in ("checkpoints", "writers") else "right")
    for sample in _merged(s for s in machine.samples if s.state_bytes > TINY_BYTES):
        table.add_row(
            _way(sample), _writers(sample), bytes_text(sample.state_bytes), seconds_text(sample.durable_s),
            seconds_text(sample.worst_durable_s), rate_text(sample.bytes_per_s),
        )  # fmt: skip
    console.print(table)
    console.print(f"copying to the pool  {rate_text(machine.copy_bytes_per_s)}   (what save() waits for in copy mode)")
    console.print(f"reading back         {_reading(machine)}", soft_wrap=True)
    console.print(f"a commit             {seconds_text(machine.commit_s)}   (until next to no bytes are durable)")
    console.print(f"save() in lazy mode  {seconds_text(machine.save_s)}\n")
    for note in machine.notes:
        console.print(f"Note: {note}.", markup=False, soft_wrap=True)
    for sentence in meaning(machine):
        console.print(sentence, markup=False, soft_wrap=True)


def _reading(machine: Machine) -> str:
    """Say how fast a checkpoint is read back, and what that rate is."""
    if machine.read_bytes_per_s is None:
        return "not measured"
    came = machine.fresh_memory_bytes_per_s
    how = reads_text(machine, "" if came is None else f"; fresh memory: {rate_text(came)}")
    return f"{rate_text(machine.read_bytes_per_s):<11} ({how})"


def _merged(samples: Iterable[Sample]) -> list[Sample]:
    """Give one row for what was measured more than once."""
    groups: dict[tuple[object, ...], list[Sample]] = {}
    for s in samples:
        key = (s.state_bytes, s.in_flight, s.writers, s.writers_per_checkpoint, s.chunk_bytes, s.pause_s > 0)
        groups.setdefault(key, []).append(s)
    return [
        msgspec.structs.replace(
            group[0],
            durable_s=statistics.median(s.durable_s for s in group),
            worst_durable_s=max(s.worst_durable_s for s in group),
            period_s=statistics.median(s.period_s for s in group),
        )
        for group in groups.values()
    ]


def _way(sample: Sample) -> str:
    if sample.in_flight > 1:
        return f"{sample.in_flight} at once"
    return "1, rested" if sample.pause_s else "1 at a time"


def _writers(sample: Sample) -> str:
    chunks = f", chunks of {sample.chunk_bytes / MIB:g} MiB" if sample.chunk_bytes != 16 * MIB else ""
    if sample.writers_per_checkpoint == 1:
        return ("1 each" if sample.in_flight > 1 else "1") + chunks
    return str(sample.writers) + chunks


_GAIN = 1.15  # rates of the same storage differ by as much from one second to the next
_EXAMPLE_BYTES = 10 * 10**9
_ENOUGH_BYTES = 10**9  # some disks take less than that into a cache, and any rate can come of it


def meaning(machine: Machine) -> list[str]:
    """Say what a probe means for a training job, and where it tells little; the rates are those of its table."""
    measured = rows = _merged(s for s in machine.samples if s.state_bytes > TINY_BYTES) or list(machine.samples)
    rows = [row for row in rows if not row.pause_s] or rows  # after a rest, a cache takes more than lasts
    rows = [row for row in rows if row.state_bytes == max(r.state_bytes for r in rows)]
    enough = max(row.bytes_per_s for row in rows) / _GAIN
    # Of those that reach as much: the fewest at once, then the settings that need not be told, then the fastest.
    row = min((r for r in rows if r.bytes_per_s >= enough), key=lambda r: (r.in_flight, _told(r), -r.bytes_per_s))
    rate, told = rate_text(row.bytes_per_s), ", ".join(_told(row))
    if row.in_flight == 1:
        said = f"One checkpoint at a time fills this storage ({rate}{f' with {told}' if told else ''}): "
        said += "several at once only bridge slow spells."
    else:
        alone = max((r.bytes_per_s for r in rows if r.in_flight == 1), default=None)
        idle = "" if alone is None else f"One checkpoint at a time leaves this storage idle ({rate_text(alone)}): "
        said = f"{idle}{', '.join((f'in_flight={row.in_flight}', *_told(row)))} reaches {rate}."
    model = machine.model(
        writers=row.writers, writers_per_checkpoint=row.writers_per_checkpoint, chunk_bytes=row.chunk_bytes
    )
    period_s = model.durable_s(_EXAMPLE_BYTES, row.in_flight) / row.in_flight
    return [
        said,
        f"A state of {bytes_text(_EXAMPLE_BYTES)} would be durable {seconds_text(machine.alone_s(_EXAMPLE_BYTES))} "
        f"after save(); this storage keeps up with one every {seconds_text(period_s)}.",
        *_doubts(machine, min(row.durable_s for row in measured)),
    ]


def _doubts(machine: Machine, shortest_s: float) -> list[str]:
    """Say why rates for larger states cannot be told from what was measured, the shortest save of which is given."""
    written = sum(sample.saves * sample.state_bytes for sample in machine.samples)
    if machine.commit_s > shortest_s:
        why = f"a commit of next to nothing took longer ({seconds_text(machine.commit_s)}) than a whole save"
        why += f" ({seconds_text(shortest_s)})"
    elif written < _ENOUGH_BYTES:
        why = f"only {bytes_text(written)} were written"
    else:
        return []
    return [f"Larger states may go at quite another rate: {why}. Probe for longer (`--seconds`)."]


def _told(sample: Sample) -> list[str]:
    """Give the options of a way of saving, but for those that are as the Checkpointer has them by itself."""
    each = sample.writers_per_checkpoint
    told = [f"writers={sample.writers}"] if each is not None or sample.writers != 2 else []
    told += [f"writers_per_checkpoint={each}"] if each is not None and sample.in_flight > 1 else []
    return told + ([f"chunk_bytes={sample.chunk_bytes // MIB} MiB"] if sample.chunk_bytes != 16 * MIB else [])
