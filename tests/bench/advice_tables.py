"""What a probe predicts, beside what the loop then measures (bench: imports loops, states, scale, tables, lab)."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

import pccheck
from pccheck.tuning.advice import advise
from pccheck.tuning.machine import Machine
from pccheck.tuning.prediction import predict
from pccheck.tuning.wanted import Wanted

from .lab import emptied
from .loops import Loop, measure_slowdown
from .scale import Bench, size_text
from .states import State, gpt_state, size_of
from .tables import Cell, Figure, Table

_LIMITED_MIB_PER_S, _LIMITED_GIB = 500, 4
_KINDS, _IN_FLIGHT = ("keeps up", "too often"), (1, 2, 3)
_SHARE, _POINT = 0.25, 0.01  # a prediction may be wrong by so much: of the excess, of the time; of a slowdown anyway


@final
class Watched:
    """pccheck with any options, which notes when each checkpoint was durable.

    Args:
        options: of the Checkpointer.
    """

    def __init__(self, options: dict[str, Any]) -> None:
        self.in_flight = int(options["in_flight"])
        self.name = f"pccheck, {options}"
        self._options = options
        self.durable_s: dict[int, float] = {}  # by counter

    def prepare(self, directory: Path) -> None:
        self._directory = directory
        self._checkpointer = pccheck.Checkpointer(directory, observer=self._observe, **self._options)

    def _observe(self, event: Any) -> None:
        if isinstance(event, (pccheck.events.Published, pccheck.events.Superseded)):
            self.durable_s[event.counter] = event.seconds

    def save(self, step: int, state: State) -> None:
        self._checkpointer.save(step, state)

    def fence(self) -> None:
        self._checkpointer.fence()

    def finish(self) -> None:
        self._checkpointer.wait()

    def restore(self, like: State) -> State | None:
        self._checkpointer.close()
        with pccheck.open(self._directory) as view:
            restored = view.restore()
        assert restored is not None, "nothing was saved"
        state: State = restored.state
        return state


@dataclass(frozen=True, kw_only=True)
class Seen:
    """What one run of a loop measured: its slowdown, and the seconds until each of its checkpoints was durable."""

    slowdown: float
    durable_s: list[float]


def measure_watched(options: dict[str, Any], directory: Path, loop: Loop) -> Seen:
    """Measure a loop; raises as `measure_loop`."""
    contender = Watched(options)
    found = measure_slowdown(contender, directory, loop)
    in_order = [seconds for _, seconds in sorted(contender.durable_s.items())]
    return Seen(slowdown=found.ratio, durable_s=in_order[loop.warm_up + loop.lead :])


def measure_machine(directory: Path, seconds: float, size_bytes: int | None) -> bytes:
    """Give what a probe says of the disk that a folder is on, as JSON."""
    directory.mkdir(parents=True)
    return pccheck.probe(directory, seconds=seconds, size_bytes=size_bytes).to_json()


@dataclass(frozen=True, kw_only=True)
class Case:
    """One loop, and what is predicted of it."""

    name: str
    disk: str
    options: dict[str, Any]
    loop: Loop
    slowdown: float
    durable_s: float


def advice(bench: Bench) -> Table:
    """Give the table of predictions and what came of them, on the disk as it is, and on one that the kernel limits."""
    found: dict[str, list[tuple[Case, Seen]]] = {}
    notes = [
        "Each round a probe of the disk predicts, and then the loops run, each in a process of its own.",
        f"within: of the medians, the slowdown's excess over 1 within {_SHARE:.0%} or one point, time to durable "
        f"within {_SHARE:.0%}.",
        "keeps up: storage rests between saves. too often: twice as often as it writes one at a time.",
        "as advised: in_flight, interval and all options are what `advise` gives for steps as long.",
    ]
    for disk, entered in (("raw", _raw), ("limited", _limited)):
        if not any(bench.wants(name) for name in _names(disk)):
            continue
        with entered(bench) as where:
            if isinstance(where, str):
                notes.append(f"No disk of {_LIMITED_MIB_PER_S} MiB/s here: {where}.")
                continue
            for number in range(bench.scale.rounds):
                told = f"round {number + 1} of {bench.scale.rounds}, {disk}"
                bench.say(f"{told}: probe")
                with emptied(where / "probed") as folder:
                    machine = Machine.from_json(
                        bench.lab.run(measure_machine, folder, bench.scale.probe_s, bench.scale.probe_bytes)
                    )
                notes.append(f"{told}: {_told(machine)}")
                for case in _cases(bench, disk, machine):
                    if not bench.wants(case.name):
                        continue
                    bench.say(f"{told}: {case.name}")
                    with emptied(where / "run") as folder:
                        seen = bench.lab.run(measure_watched, case.options, folder, case.loop)
                    found.setdefault(case.name, []).append((case, seen))
    rows = [_row(name, rounds) for name, rounds in found.items()]
    within = sum(row["within"] == "yes" for row in rows)
    notes.append(f"{within} of {len(rows)} predictions hold.")
    title = (
        f"What `probe` and `advise` predict of a loop with {size_text(bench.scale.state_bytes)}, and what it measures"
    )
    return Table(name="advice", title=title, rows=rows, notes=notes)


@contextmanager
def _raw(bench: Bench) -> Iterator[Path | str]:
    yield bench.directory


@contextmanager
def _limited(bench: Bench) -> Iterator[Path | str]:
    """Give the folder of a limited disk, or why it cannot be had."""
    why_not = bench.slow_disk.up(_LIMITED_MIB_PER_S, _LIMITED_GIB)
    if why_not is not None:
        yield why_not
        return
    try:
        yield bench.slow_disk.mountpoint
    finally:
        bench.slow_disk.down()


def _told(machine: Machine) -> str:
    model = machine.model()
    return (
        f"{model.stream_bytes_per_s / 1e6:.0f} MB/s one at a time, {model.total_bytes_per_s / 1e6:.0f} MB/s several, "
        f"{1e3 * machine.commit_s:.1f} ms a commit, copied at {machine.copy_bytes_per_s / 1e9:.1f} GB/s, "
        f"probed in {machine.seconds:.0f} s with states of {max(s.state_bytes for s in machine.samples) / 1e6:.0f} MB."
    )


def _names(disk: str) -> list[str]:
    return [f"{disk}, {kind}: in_flight {n}" for kind in _KINDS for n in _IN_FLIGHT] + [f"{disk}, as advised"]


def _cases(bench: Bench, disk: str, machine: Machine) -> list[Case]:
    """Give the loops, by what the probe found: steps as in the other tables, or shorter where storage is faster."""
    s = bench.scale
    state_bytes = size_of(gpt_state(s.state_bytes))
    alone_s, busy_s = machine.alone_s(state_bytes), machine.model().durable_s(state_bytes, 1)
    often = max(1, round(busy_s / 2 / s.step_s))
    rested = max(s.every, math.ceil(1.5 * alone_s / s.step_s))
    names, cases = iter(_names(disk)), []
    for step_s, interval in ((s.step_s, rested), (busy_s / 2 / often, often)):  # as _KINDS
        for n in _IN_FLIGHT:
            found = predict(machine, state_bytes=state_bytes, in_flight=n, interval=interval, step_s=step_s)
            options = {"in_flight": n, "snapshot": "lazy"}
            loop = _loop(bench, step_s, interval, n, found.period_s)
            cases.append(
                Case(
                    name=next(names), disk=disk, options=options, loop=loop,
                    slowdown=found.slowdown, durable_s=found.durable_s,
                )
            )  # fmt: skip
    best = advise(Wanted(state_bytes=state_bytes, step_s=s.step_s), machine)
    loop = _loop(bench, s.step_s, best.interval, best.plan.in_flight, best.interval * s.step_s)
    outcome = best.outcome
    cases.append(
        Case(
            name=next(names), disk=disk, options=best.options, loop=loop,
            slowdown=outcome.slowdown, durable_s=outcome.durable_s,
        )
    )  # fmt: skip
    return cases


def _loop(bench: Bench, step_s: float, interval: int, in_flight: int, period_s: float) -> Loop:
    """Give a loop in which as many saves are measured as take `loop_s`, with all slots written before."""
    s = bench.scale
    saves = min(60, max(s.intervals + in_flight, math.ceil(s.loop_s / period_s)))
    return Loop(
        state_bytes=s.state_bytes, step_s=step_s, every=interval, lead=2 * in_flight + 1, intervals=saves,
        intervals_without=max(3, min(saves, math.ceil(s.loop_s / 2 / (interval * step_s)))), warm_up=in_flight + 1,
    )  # fmt: skip


def _row(name: str, rounds: list[tuple[Case, Seen]]) -> dict[str, Cell]:
    predicted, measured = [case.slowdown for case, _ in rounds], [seen.slowdown for _, seen in rounds]
    durable_s = [case.durable_s for case, _ in rounds]
    after_s = [statistics.median(seen.durable_s) for _, seen in rounds]
    slowdown = statistics.median(measured)
    off, late = statistics.median(predicted) - slowdown, statistics.median(durable_s) / statistics.median(after_s) - 1
    holds = abs(off) <= max(_POINT, _SHARE * (slowdown - 1)) and abs(late) <= _SHARE
    intervals = dict.fromkeys(f"{case.loop.every} x {1e3 * case.loop.step_s:.0f} ms" for case, _ in rounds)
    return {
        "": name,
        "a save every": ", ".join(intervals),
        "slowdown predicted": Figure(predicted),
        "measured": Figure(measured),
        "off by": f"{off:+.3f}",
        "durable predicted": Figure([1e3 * seconds for seconds in durable_s], 0, "ms"),
        "measured durable": Figure([1e3 * seconds for seconds in after_s], 0, "ms"),
        "off by ": f"{late:+.0%}",
        "within": "yes" if holds else "NO",
    }


TABLES: dict[str, Callable[[Bench], Table]] = {"advice": advice}
