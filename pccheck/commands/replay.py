"""`pccheck replay`: policies over a trace of failures (floor 4: imports replay, tuning, plots, printing)."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from pccheck import printing
from pccheck.commands import live_text, replay_text
from pccheck.commands.advise import machine_of, option_text
from pccheck.errors import CapacityError, MediumError, OptionError, PccheckError, UsageError
from pccheck.plots import replay as pictures
from pccheck.plots.timeline import timelines
from pccheck.replay import contender as contenders
from pccheck.replay import live as lives
from pccheck.replay import places
from pccheck.replay.comparing import Comparison, compare
from pccheck.replay.files import read_trace
from pccheck.replay.jobs import job_of
from pccheck.replay.schedule import mean_life_s
from pccheck.replay.trace import Trace
from pccheck.tuning.domain import duration as checked_duration
from pccheck.tuning.units import bytes_text, parse_bytes, parse_seconds, seconds_text, value_text
from pccheck.tuning.wanted import FAILURE_RATES, Wanted, failures_of


def replay(
    trace: Annotated[Path, typer.Argument(help="CSV of when machines were lost: Time,GPUs or seconds,event.")],
    state: Annotated[str | None, typer.Option(help="Size of a checkpoint: 80GB, 512MiB.")] = None,
    step: Annotated[str | None, typer.Option(help="Time of a training step without checkpoints: 2, 350ms.")] = None,
    probe: Annotated[Path | None, typer.Option(help="What `pccheck probe --json FILE` measured.")] = None,
    disk: Annotated[str | None, typer.Option(help="Rate of the storage, all writers together: 2GB/s.")] = None,
    stream: Annotated[str | None, typer.Option(help="Rate that one checkpoint alone reaches there.")] = None,
    copy: Annotated[str | None, typer.Option(help="Rate at which the state is copied to host memory.")] = None,
    dram: Annotated[str | None, typer.Option(help="Most memory for the buffer pool.")] = None,
    storage: Annotated[str | None, typer.Option(help="Most storage that all slots may take.")] = None,
    restart: Annotated[str | None, typer.Option(help="Time from a failure until training goes on.")] = None,
    mtbf: Annotated[
        str | None, typer.Option(help="That policies are told: 45m, spot, ...; default: of the trace.")
    ] = None,
    in_flight: Annotated[
        int | None, typer.Option(help="Checkpoints at once; default: as advised.", min=1, max=64)
    ] = None,
    every: Annotated[
        list[int] | None, typer.Option(help="List this interval, too; may be repeated.", min=1, max=10**9)
    ] = None,
    slowdown: Annotated[float | None, typer.Option(help="That is allowed, PCcheck's q: 1.05.")] = None,
    stall: Annotated[float, typer.Option(help="The overhead that CheckFreq allows.")] = 0.05,
    scale: Annotated[float, typer.Option(help="Multiply the trace's times by this.")] = 1.0,
    gains: Annotated[bool, typer.Option("--gains", help="Restart on purpose when machines come.")] = False,
    disk_change: Annotated[
        list[str] | None, typer.Option(help="TIME:FACTOR: from then on storage is so fast; may be repeated.")
    ] = None,
    jitter: Annotated[float, typer.Option(help="Spread of step times and writes: 0.05.")] = 0.0,
    seed: Annotated[int, typer.Option(help="Of the jitter, and of what is trained.", min=0)] = 0,
    live: Annotated[bool, typer.Option("--live", help="Real processes, killed by SIGKILL.")] = False,
    contender: Annotated[list[str] | None, typer.Option(help="Live: who, or FILE.py:CLASS; may be repeated.")] = None,
    directory: Annotated[Path | None, typer.Option(help="Live: where checkpoints go; default: here.")] = None,
    duration: Annotated[str, typer.Option(help="Live: how long the trace is to take.")] = "2m",
    tuned: Annotated[bool, typer.Option("--tuned", help="Live: each at the interval that its costs call for.")] = False,
    plot: Annotated[Path | None, typer.Option(help="Draw goodput and timelines into this folder.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")] = False,
) -> None:
    """Replay a trace of failures: what share of the time is useful work, by policy and interval.

    In simulation, which takes seconds: --state and --step are needed, the rest is assumed as in `pccheck advise`.
    With --live real training processes are killed at the trace's times, scaled down to --duration.

    Exit status: 0 = replayed; 1 = with --live, a contender failed or restored a wrong state; 2 = the trace, the command
    line or storage is wrong.
    """
    try:
        read = _scaled(read_trace(trace), scale)
        if plot is not None:
            _make_folder(plot)
        if live:
            simulated = (probe, disk, stream, copy, dram, storage, mtbf, in_flight, gains, disk_change, jitter)
            if any(simulated) or scale != 1:
                raise UsageError("--live measures this machine: options of the simulation such as --disk do not apply")
            settings = _settings(directory, duration, restart, every, step, state, tuned, seed)
            raise typer.Exit(_live(read, contender, settings, plot, as_json=as_json))
        if contender or directory or tuned:
            raise UsageError("--contender, --directory and --tuned go with --live")
        wanted, told_s = _wanted(state, step, restart, dram, storage), _mtbf_s(mtbf, read, scale)
        job, count, assumed = job_of(
            replace(wanted, mtbf_s=told_s), machine_of(probe, disk, stream, copy), in_flight=in_flight,
            storage_changes=_changes(disk_change or []), jitter=jitter, seed=seed,
        )  # fmt: skip
        comparison = compare(
            job, read, in_flight=count, mtbf_s=told_s, slowdown=slowdown, stall_fraction=stall,
            fixed=every or (), gains=gains, timeline=plot is not None,
        )  # fmt: skip
        if plot is not None:
            _draw(comparison, plot)
    except OptionError as error:
        if error.field in _OPTIONS:
            error = OptionError(_OPTIONS[error.field], error.value, error.allowed)
        _stop(option_text(error))
    except CapacityError as error:
        _stop(f"no room at {error.path}: {_room(error)}; free some, or give a smaller --state or another --directory")
    except PccheckError as error:
        _stop(str(error))
    if as_json:
        print(json.dumps(replay_text.as_json(comparison, assumed), indent=2))
    else:
        replay_text.show(comparison, assumed, Console(highlight=False))


_OPTIONS = {
    "storage_changes": "disk_change",
    "duration_s": "duration",
    "fraction": "stall",
}  # as the command line has them


def _scaled(trace: Trace, scale: float) -> Trace:
    try:
        return trace.scaled(scale)
    except OptionError:
        raise OptionError("scale", scale, "a number above 0 that leaves the trace's times finite and apart") from None


def _room(error: CapacityError) -> str:
    return f"{bytes_text(error.needed_bytes)} are needed, {bytes_text(error.free_bytes)} are free"


def _stop(text: str) -> None:
    print(f"pccheck replay: {printing.plain(text)}", file=sys.stderr)
    raise typer.Exit(2) from None


# -- in simulation -----------------------------------------------------------------------------------------------------


def _wanted(state: str | None, step: str | None, restart: str | None, dram: str | None, storage: str | None) -> Wanted:
    if state is None or step is None:
        raise UsageError("give --state SIZE and --step TIME, or --live")
    return Wanted(
        state_bytes=parse_bytes(state, field="state_bytes"),
        step_s=parse_seconds(step, field="step_s"),
        restart_s=None if restart is None else parse_seconds(restart, field="restart_s"),
        dram_bytes=None if dram is None else parse_bytes(dram, field="dram_bytes"),
        storage_bytes=None if storage is None else parse_bytes(storage, field="storage_bytes"),
    )


def _mtbf_s(mtbf: str | None, trace: Trace, scale: float) -> float | None:
    """Give the mean time between failures that policies are told; None = nothing fails, and none was told."""
    if mtbf in FAILURE_RATES:
        return failures_of(mtbf)[0]
    if mtbf is not None:
        return parse_seconds(mtbf, field="mtbf_s")
    if not trace.losses:
        return None
    try:
        return checked_duration("mtbf_s", trace.mtbf_s)
    except OptionError as error:
        scaled = "" if scale == 1 else f", its times multiplied by --scale {scale:g}"
        raise UsageError(
            f"{trace.name}: a failure every {value_text('mtbf_s', trace.mtbf_s)}{scaled}: it must be {error.allowed}"
        ) from None


def _changes(texts: list[str]) -> tuple[tuple[float, float], ...]:
    """Read TIME:FACTOR, in any order."""
    changes = []
    for text in texts:
        at, _, factor = text.partition(":")
        try:
            changes.append((parse_seconds(at, field="disk_change"), float(factor)))
        except ValueError:
            raise OptionError("disk_change", text, "TIME:FACTOR, such as 1h:0.33") from None
    return tuple(sorted(changes))


def _make_folder(folder: Path) -> None:
    try:
        places.made(folder)
    except OSError as error:
        raise MediumError("making the folder for pictures", str(folder), error) from error


def _draw(comparison: Comparison, folder: Path) -> None:
    title = replay_text.headline(comparison)
    pictures.goodput_by_interval(comparison, folder / "goodput.png", title=title)
    shown = {o.policy: o.timeline for o in comparison.outcomes if o.policy in _SHOWN and o.timeline is not None}
    timelines(shown, folder / "timeline.png", title=title)


_SHOWN = ("controller", "PCcheck", "one in flight", "CheckFreq", "synchronous", "ideal")


# -- live --------------------------------------------------------------------------------------------------------------


def _settings(
    directory: Path | None, duration: str, restart: str | None, every: list[int] | None, step: str | None,
    state: str | None, tuned: bool, seed: int,
) -> lives.Settings:  # fmt: skip
    """Give the settings of a live replay: what is not told is as `pccheck.replay.live` has it."""
    if every is not None and len(every) > 1:
        raise UsageError("with --live give --every once: all save every so many steps, or each as --tuned finds")
    told: dict[str, Any] = {"every": every[0]} if every else {}
    if restart is not None:
        told["restart_s"] = parse_seconds(restart, field="restart_s")
    if step is not None:
        told["step_s"] = parse_seconds(step, field="step_s")
    if state is not None:
        told["state_bytes"] = parse_bytes(state, field="state_bytes")
    return lives.Settings(
        directory=directory or Path(),
        duration_s=parse_seconds(duration, field="duration"),
        tuned=tuned,
        seed=seed,
        **told,
    )


def _live(trace: Trace, names: list[str] | None, settings: lives.Settings, plot: Path | None, *, as_json: bool) -> int:
    """Run it, tell it, and give the exit status."""
    console = Console(stderr=True)
    progress = console.print if console.is_terminal else None
    chosen = names or list(contenders.installed())
    contenders.check(chosen)
    places.check(settings.directory)
    total_s, turns = lives.expected_s(trace, len(chosen), settings), "s take turns" if len(chosen) > 1 else ""
    console.print(
        f"{len(chosen)} contender{turns}, {seconds_text(settings.duration_s)} each; "
        "with the start of processes "
        f"about {seconds_text(total_s)} in all",
        soft_wrap=True, highlight=False,
    )  # fmt: skip
    if short := _too_short(trace, settings):
        console.print(short, soft_wrap=True, highlight=False, markup=False)
    results = lives.run(trace, chosen, settings, progress=progress)
    if plot is not None and results.outcomes:
        title = f"{trace.name}, {trace.failures} kills in {settings.duration_s:.0f} s"
        marks = {o.contender: (o.every, o.goodput) for o in results.outcomes}
        pictures.goodput_of_runs(marks, plot / "goodput.png", title=title)
        timelines({o.contender: o.timeline for o in results.outcomes}, plot / "timeline.png", title=title)
    if as_json:
        print(json.dumps(live_text.as_json(results), indent=2))
    else:
        live_text.show(results, Console(highlight=False))
    return 1 if results.failed or any(o.refused for o in results.outcomes) else 0


_SHORT_LIFE_S, _FAIR_LIFE_S = 1.0, 2.0  # opening and restoring takes tenths of a second, a save about as long
_DURATIONS_S = (10.0, 20.0, 30.0, 60.0, 120.0, 180.0, 300.0, 600.0, 1200.0, 1800.0, 3600.0)


def _too_short(trace: Trace, settings: lives.Settings) -> str | None:
    """Warn where processes are killed before they get to do much; None = they live long enough."""
    if not trace.losses:
        return None
    life_s = mean_life_s(trace, settings.duration_s, settings.restart_s)
    if life_s >= _SHORT_LIFE_S:
        return None
    fair = (s for s in _DURATIONS_S if s > settings.duration_s)
    fair_s = next((s for s in fair if mean_life_s(trace, s, settings.restart_s) >= _FAIR_LIFE_S), None)
    return (
        f"{trace.failures:,} kills in {seconds_text(settings.duration_s)} leave about {life_s:.2g} s a life, little to "
        "train and save in: give "
        + ("a part of the trace" if fair_s is None else f"--duration {_given(fair_s)} or more")
    )


def _given(seconds: float) -> str:
    """Give a duration as an option takes it."""
    for size, unit in ((3600, "h"), (60, "m")):
        if seconds % size == 0:
            return f"{seconds / size:.0f}{unit}"
    return f"{seconds:.0f}s"
