"""When machines were lost and came back: what a trace is, and how its text is read (floor 0: imports errors).

A trace's first moment is the start of the job, not a failure. A loss kills the job. A gain (more machines) is no
failure: a job may ignore it, or restart on purpose. No machines left ends the job.
"""

from __future__ import annotations

import csv
import math
import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from pccheck.errors import OptionError, UsageError

MOST_ROWS = 1_000_000  # of one trace; more is refused rather than simulated for hours
LONGEST_S = 1e10  # from the start of a trace that is read to its end, 317 years: no rate of failures is lower elsewhere


class TraceError(UsageError):
    """The text is no trace: `name`, `line` (1 = the first) and `reason` say where and why."""

    def __init__(self, name: str, line: int, reason: str) -> None:
        super().__init__(
            f"{name}, line {line}: {reason}. A trace is CSV with the columns `Time,GPUs` (the number alive, row by "
            "row) or `seconds,event` (start, loss, gain, end); docs/replay.md shows both"
        )
        self.name, self.line, self.reason = name, line, reason


@dataclass(frozen=True, kw_only=True)
class Trace:
    """What happened to one job's machines, in seconds after its start.

    Attributes:
        losses: when machines were lost; each kills the job. Rising, above 0, up to `end_s`.
        gains: when machines were added; rising. Nothing happens to the job unless it wants to.
        end_s: when the trace ends.
        killed_at_end: the trace ends because no machine is left: the last loss is at `end_s`, and what was not durable
            then is lost. Otherwise the job is still alive at `end_s`, and all that it did counts.
        name: for people.

    Raises OptionError for times out of order or out of range. Immutable, so safe to share between threads.
    """

    losses: tuple[float, ...]
    end_s: float
    gains: tuple[float, ...] = ()
    killed_at_end: bool = False
    name: str = "trace"

    def __post_init__(self) -> None:
        if not (math.isfinite(self.end_s) and self.end_s > 0):
            raise OptionError("end_s", self.end_s, "a finite number of seconds above 0")
        for field, times in (("losses", self.losses), ("gains", self.gains)):
            rising = all(a < b for a, b in zip((0.0, *times), times, strict=False))
            if not (rising and all(t <= self.end_s for t in times)):
                raise OptionError(field, times[:8], f"rising seconds above 0, up to end_s={self.end_s}")
        if self.killed_at_end and self.losses[-1:] != (self.end_s,):
            raise OptionError("killed_at_end", True, "False unless the last loss is at end_s")

    @property
    def failures(self) -> int:
        """Number of losses, the one that ends the trace included."""
        return len(self.losses)

    @property
    def mtbf_s(self) -> float:
        """Mean time between losses, seconds: how long the trace lasts for each; infinite without any."""
        return self.end_s / self.failures if self.failures else math.inf

    def scaled(self, factor: float) -> Trace:
        """Give the same trace with every time multiplied by `factor` (above 0): 0.01 plays it a hundred times faster.

        Raises OptionError if `factor` is not a finite number above 0.
        """
        if not (math.isfinite(factor) and factor > 0):
            raise OptionError("factor", factor, "a finite number above 0")
        return replace(
            self,
            losses=tuple(t * factor for t in self.losses),
            gains=tuple(t * factor for t in self.gains),
            end_s=self.end_s * factor,
        )


def exponential_trace(mtbf_s: float, *, failures: int, seed: int = 0) -> Trace:
    """Make a trace whose losses come at random, as the closed forms of `pccheck.tuning` suppose.

    Args:
        mtbf_s: mean seconds between losses, above 0.
        failures: how many; 1 up to a million. The last one ends the trace.
        seed: the same seed gives the same trace.

    Raises OptionError for an argument out of range.
    """
    if not (math.isfinite(mtbf_s) and mtbf_s > 0):
        raise OptionError("mtbf_s", mtbf_s, "a finite number of seconds above 0")
    if not 1 <= failures <= MOST_ROWS:
        raise OptionError("failures", failures, f"1 to {MOST_ROWS:,}")
    dice, now, losses = random.Random(seed), 0.0, []
    for _ in range(failures):
        now += dice.expovariate(1 / mtbf_s) or math.ulp(now)
        losses.append(now)
    return Trace(losses=tuple(losses), end_s=now, killed_at_end=True, name=f"exponential, seed {seed}")


# -- text ------------------------------------------------------------------------------------------------------------


def parse_trace(text: str, *, name: str = "trace") -> Trace:
    """Read a trace from the text of a CSV file; its header says which of two forms it has.

    `Time,GPUs` (after an index column, if there is one): each row tells how many machines, or GPUs, are alive at that
    time; fewer than in the row before is a loss, more is a gain, none left ends the trace. `seconds,event` (a third
    column `count` may follow, for people: it is checked, not used): the first row is a `start`, then `loss` and `gain`,
    and at last, if wanted, an `end`; without it the trace ends with its last row.

    Raises TraceError, with the line, for anything else: a wrong header, a number that is none, times that do not rise,
    nothing alive at the start, rows after the end, times more than 317 years after the start, more than a million rows.
    """
    rows = _rows(text, name)
    line, header = next(rows, (1, []))
    columns = [cell.strip().lower() for cell in header]
    if columns[-2:] == ["time", "gpus"] and len(columns) in (2, 3):
        return _of_counts(rows, len(columns), name)
    if columns in (["seconds", "event"], ["seconds", "event", "count"]):
        return _of_events(rows, len(columns), name)
    raise TraceError(name, line, f"the header names the columns {', '.join(columns)[:80] or '(none)'}")


def _rows(text: str, name: str) -> Iterator[tuple[int, list[str]]]:
    """Give (line, cells) of each row; empty lines and lines that begin with # are passed over."""
    lines = text.removeprefix("\ufeff").splitlines()
    if len(lines) > MOST_ROWS:
        raise TraceError(name, MOST_ROWS + 1, f"more than {MOST_ROWS:,} rows")
    for line, words in enumerate(lines, start=1):
        if words.strip() and not words.lstrip().startswith("#"):
            try:
                yield line, next(csv.reader([words], strict=True))
            except csv.Error as error:
                raise TraceError(name, line, f"not CSV ({error})") from None


def _of_counts(rows: Iterable[tuple[int, list[str]]], width: int, name: str) -> Trace:
    """Read rows of the number alive. Rows after the first with none alive are checked, and mean nothing."""
    start_s = last_s = end_s = 0.0
    alive: int | None = None
    losses: list[float] = []
    gains: list[float] = []
    line = 1
    for line, cells in rows:
        time_s, count = _number(cells, width, name, line, at=-2), _count(cells[-1], name, line)
        if alive is None:
            if count == 0:
                raise TraceError(name, line, "none alive at the start")
            start_s, alive = time_s, count
        elif time_s <= last_s:
            raise TraceError(name, line, f"time {time_s} does not come after {last_s}")
        elif time_s - start_s > LONGEST_S:
            raise TraceError(name, line, f"time {time_s} is more than {LONGEST_S:.0e} s after the start, at {start_s}")
        elif alive:
            end_s = time_s - start_s
            if count != alive:
                (losses if count < alive else gains).append(end_s)
            alive = count
        last_s = time_s
    if alive is None or not end_s:
        raise TraceError(name, line, "fewer than two rows")
    return Trace(losses=tuple(losses), gains=tuple(gains), end_s=end_s, killed_at_end=alive == 0, name=name)


def _of_events(rows: Iterable[tuple[int, list[str]]], width: int, name: str) -> Trace:
    """Read rows of events."""
    start_s: float | None = None
    last_s, ended, event, line = 0.0, False, "", 1
    times: dict[str, list[float]] = {"loss": [], "gain": []}
    for line, cells in rows:
        seconds, event = _number(cells, width, name, line, at=0), cells[1].strip().lower()
        if width == 3:
            _count(cells[2], name, line)
        if start_s is None:
            if event != "start":
                raise TraceError(name, line, f"the first row is {event[:20]!r}, not 'start'")
            start_s = last_s = seconds
            continue
        if ended:
            raise TraceError(name, line, "a row after 'end'")
        if event not in ("loss", "gain", "end"):
            raise TraceError(name, line, f"{event[:20]!r} is none of 'loss', 'gain', 'end'")
        if seconds <= last_s:
            raise TraceError(name, line, f"second {seconds} does not come after {last_s}")
        if seconds - start_s > LONGEST_S:
            raise TraceError(name, line, f"second {seconds} is more than {LONGEST_S:.0e} after the start, at {start_s}")
        last_s, ended = seconds, event == "end"
        if not ended:
            times[event].append(seconds - start_s)
    if start_s is None or last_s == start_s:
        raise TraceError(name, line, "fewer than two rows")
    losses, gains = tuple(times["loss"]), tuple(times["gain"])
    return Trace(losses=losses, gains=gains, end_s=last_s - start_s, killed_at_end=event == "loss", name=name)


def _number(cells: list[str], width: int, name: str, line: int, *, at: int) -> float:
    """Give the time of a row of `width` cells."""
    if len(cells) != width:
        raise TraceError(name, line, f"{len(cells)} cells, the header has {width}")
    try:
        value = float(cells[at])
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise TraceError(name, line, f"{cells[at][:40]!r} is no time in seconds")
    return value


def _count(cell: str, name: str, line: int) -> int:
    """Give a whole number of machines, 0 or more."""
    text = cell.strip()
    if not (text.isascii() and text.isdigit() and len(text) <= 9):
        raise TraceError(name, line, f"{cell[:40]!r} is no whole number of machines")
    return int(text)
