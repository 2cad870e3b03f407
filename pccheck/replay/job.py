"""What is simulated, and what comes of it (floor 0: imports errors, tuning.storage, replay.timeline)."""

from __future__ import annotations

import math
from dataclasses import dataclass

from pccheck.errors import OptionError
from pccheck.replay.timeline import Timeline
from pccheck.tuning.storage import StorageModel


@dataclass(frozen=True, kw_only=True)
class Job:
    """One training job and its storage, as the simulation sees them.

    Attributes:
        step_s: seconds of a step without checkpoints, the mean; above 0.
        state_bytes: of one checkpoint, 1 or more.
        storage: rates of one stream and of all together, and the fixed cost of a commit.
        stall_s: seconds of the trainer that each save costs besides waiting for a slot, interference included; 0 or
            more. The write begins with it, and is not durable before it is over.
        restart_s: seconds from a kill until the new process begins to load; 0 or more.
        load_s: seconds that it then takes to load the state, where one is durable; 0 or more.
        storage_changes: (seconds, factor): from then on, storage has `factor` times its rates (1e-6 to 1e6).
        jitter: coefficient of variation of the time of each step and of the size of each write, 0 to 1: that of n steps
            together is jitter / sqrt(n). A step takes as long whenever it is done, and whatever policy saves.
        seed: of the jitter.

    Raises OptionError for a value out of range. Immutable.
    """

    step_s: float
    state_bytes: int
    storage: StorageModel
    stall_s: float = 0.0
    restart_s: float = 0.0
    load_s: float = 0.0
    storage_changes: tuple[tuple[float, float], ...] = ()
    jitter: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        def check(field: str, fine: bool, allowed: str) -> None:
            if not fine:
                raise OptionError(field, getattr(self, field), allowed)

        check("step_s", 0 < self.step_s < math.inf, "seconds above 0")
        check("state_bytes", self.state_bytes >= 1, "1 or more bytes")
        check("stall_s", 0 <= self.stall_s < math.inf, "seconds, 0 or more")
        check("restart_s", 0 <= self.restart_s < math.inf, "seconds, 0 or more")
        check("load_s", 0 <= self.load_s < math.inf, "seconds, 0 or more")
        check("jitter", 0 <= self.jitter <= 1, "0 to 1")
        times = [at for at, _ in self.storage_changes]
        fine = times == sorted(set(times)) and all(at >= 0 and 1e-6 <= f <= 1e6 for at, f in self.storage_changes)
        check("storage_changes", fine, "(seconds, factor above 0, from 1e-6 to 1e6) with rising seconds")

    @property
    def down_s(self) -> float:
        """Seconds from a kill until the next step begins, if nothing else goes wrong."""
        return self.restart_s + self.load_s


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What one policy made of a trace. `useful_s + lost_s + stall_s + down_s` is `wall_s`.

    Attributes:
        policy: its name.
        goodput: useful work over wall time, 0 to 1.
        wall_s: how long the trace lasted.
        steps: that count at the end: the last durable one if the trace ended with a kill, else all that were done.
        useful_s: what those steps take where nothing disturbs them.
        lost_s: work that kills undid, the step that was under way included.
        stall_s: what saves kept the trainer from, waits for a slot included.
        slot_wait_s: of it, waits because `in_flight` checkpoints were under way.
        down_s: restarts, loading included.
        in_flight: checkpoints that could be under way at once.
        intervals: (seconds, steps): which interval was in force from when on; at most the first 10,000 changes.
        saves: that were begun.
        durable: of them, became durable.
        kills: losses of the trace, and of them `kills_down` while the job was down already.
        restarts: on purpose, when machines were added.
        timeline: what happened when; None unless it was asked for.
    """

    policy: str
    goodput: float
    wall_s: float
    steps: int
    useful_s: float
    lost_s: float
    stall_s: float
    slot_wait_s: float
    down_s: float
    in_flight: int
    intervals: tuple[tuple[float, int], ...]
    saves: int
    durable: int
    kills: int
    kills_down: int
    restarts: int
    timeline: Timeline | None = None

    @property
    def interval(self) -> int | None:
        """The interval that was in force for the longest time, in steps; None where nothing was saved."""
        held: dict[int, float] = {}
        ends = [at for at, _ in self.intervals[1:]] + [self.wall_s]
        for (at, steps), end in zip(self.intervals, ends, strict=False):
            held[steps] = held.get(steps, 0.0) + end - at
        return max(held, key=lambda steps: held[steps]) if held else None
