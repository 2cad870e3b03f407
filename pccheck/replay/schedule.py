"""When processes of a replay live and are killed (floor 0: imports replay.trace)."""

from __future__ import annotations

from dataclasses import dataclass

from pccheck.replay.trace import Trace


@dataclass(frozen=True)
class Life:
    """One process: from when it is told to go until it is killed, or the trace ends, in seconds of the trace."""

    start_s: float
    end_s: float
    killed: bool


def lives(trace: Trace, restart_s: float) -> tuple[Life, ...]:
    """Give the lives of a job that is up again `restart_s` (0 or more) seconds after each kill.

    A kill that comes before that hits a job that is down, which then needs the whole time again.
    """
    found, up_s = [], 0.0
    for kill_s in trace.losses:
        if kill_s > up_s:
            found.append(Life(up_s, kill_s, killed=True))
        up_s = kill_s + restart_s
    if up_s < trace.end_s and not trace.killed_at_end:
        found.append(Life(up_s, trace.end_s, killed=False))
    return tuple(found)


def mean_life_s(trace: Trace, duration_s: float, restart_s: float) -> float:
    """Give how long a process lives, the mean, if a trace with losses is played in `duration_s` seconds (above 0)."""
    plan = lives(trace.scaled(duration_s / trace.end_s), restart_s)
    return sum(life.end_s - life.start_s for life in plan) / len(plan)
