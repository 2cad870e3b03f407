"""What `advise` is asked for: the job, how often it fails, its budgets (floor 0: imports options, tuning.*)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from pccheck.errors import OptionError
from pccheck.options import MIB, check_whole_number
from pccheck.tuning.domain import LEAST_SHARE, duration, ratio, share
from pccheck.tuning.units import bytes_text

MOST_IN_FLIGHT = 8  # storage is full long before: two to four at once are enough (PCcheck, ASPLOS 2025)
SLOWDOWN, STALL_FRACTION = 1.05, 0.05  # limits where it is not known what failures cost
ANY_STALL = 1 - 1e-9  # no limit
LEAST_OVERHEAD = 0.001  # each save costs something: a slowdown of 1 is out of reach, and this is advised instead
LEAST_POOL = 32 * MIB  # two chunks of the default size: the least a pool may hold


@dataclass(frozen=True, kw_only=True)
class FailureRate:
    """How often the jobs of one kind of machine fail.

    Args:
        mtbf_s: mean seconds between failures of the whole job.
        machines: how many the job had, any of which stops it; None = not told by the source.
        source: where the figure comes from.
    """

    mtbf_s: float
    machines: float | None
    source: str

    def of(self, machines: int) -> float:
        """Give the mean time between failures of a job of as many machines, in seconds: MTBF of one over their number.

        Raises OptionError if the source does not tell of how many machines it speaks.
        """
        if self.machines is None:
            raise OptionError("nodes", machines, "left out with this rate, which is one of whole jobs")
        return self.mtbf_s * self.machines / machines


FAILURE_RATES = {
    "spot": FailureRate(
        mtbf_s=13_482 / 26,
        machines=46.65,
        source="a trace of 56 spot GPUs, 47 alive on average, published with PCcheck: 26 losses in 3.7 hours",
    ),
    "shared": FailureRate(
        mtbf_s=45 * 60.0,
        machines=None,
        source="jobs in shared clusters: 45 minutes, the figure that PCcheck (ASPLOS 2025) starts from",
    ),
    "dedicated": FailureRate(
        mtbf_s=54 * 86400 / 466,
        machines=2048,
        source="Llama 3's training (2024): 466 interruptions in 54 days, on 2,048 machines of 8 GPUs",
    ),
}


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """A job and its wishes; None = no such budget, or not known.

    Args:
        state_bytes: of one checkpoint on this storage, of all ranks together, 1..2**60.
        step_s: seconds of a training step without checkpoints; as all durations here from 1e-9 to 1e10.
        mtbf_s: mean seconds between failures of the job.
        restart_s: from a failure until the first new step; None = assumed: a minute, and the time to read the state.
        dram_bytes: most that the buffer pool of one rank may take, at least 32 MiB.
        storage_bytes: most that all slots of all ranks together may take.
        slowdown: the most that checkpoints may stretch the training, by stalls and waits for storage together, a
            ratio >= 1 (PCcheck's q); 1 itself is out of reach, as every save costs something, and 1.001 is advised
            instead, but any above it can be kept; None = 1.05, and with mtbf_s no limit: the best interval weighs it.
        stall_fraction: the most of the training time that copying may take, above 0 and below 1 (CheckFreq's p);
            None = all that the slowdown allows, else 0.05, and with mtbf_s no limit: the best interval weighs it.
        rpo_s: recovery-point objective: no failure may lose more work than this.
        keep: finished checkpoints to keep, 1..1000.
        snapshot: "copy", "lazy", or "auto" = lazy if copying would cost something worth it.
        max_in_flight: most checkpoints at once that may be advised, 1..8.
        ranks: processes that save side by side on this storage, each an equal part of the state, 1..10**6.

    Raises OptionError for a value out of its range.
    """

    state_bytes: int
    step_s: float
    mtbf_s: float | None = None
    restart_s: float | None = None
    dram_bytes: int | None = None
    storage_bytes: int | None = None
    slowdown: float | None = None
    stall_fraction: float | None = None
    rpo_s: float | None = None
    keep: int = 1
    snapshot: Literal["auto", "copy", "lazy"] = "auto"
    max_in_flight: int = MOST_IN_FLIGHT
    ranks: int = 1

    def __post_init__(self) -> None:
        check_whole_number("state_bytes", self.state_bytes, 1, 1 << 60)
        check_whole_number("keep", self.keep, 1, 1000)
        check_whole_number("max_in_flight", self.max_in_flight, 1, MOST_IN_FLIGHT)
        check_whole_number("ranks", self.ranks, 1, 10**6)
        if self.dram_bytes is not None:
            check_whole_number("dram_bytes", self.dram_bytes, 1, 1 << 60)
            if self.dram_bytes < LEAST_POOL:
                raise OptionError("dram_bytes", self.dram_bytes, f"at least {bytes_text(LEAST_POOL)}, two chunks")
        if self.storage_bytes is not None:
            check_whole_number("storage_bytes", self.storage_bytes, 1, 1 << 62)
        if self.snapshot not in ("auto", "copy", "lazy"):
            raise OptionError("snapshot", self.snapshot, "'auto', 'copy' or 'lazy'")
        duration("step_s", self.step_s)
        if self.mtbf_s is not None:
            duration("mtbf_s", self.mtbf_s)
        if self.rpo_s is not None:
            duration("rpo_s", self.rpo_s)
        if self.restart_s is not None:
            duration("restart_s", self.restart_s, zero=True)
        if self.stall_fraction is not None:
            share("stall_fraction", self.stall_fraction)
        if self.slowdown is not None:
            ratio("slowdown", self.slowdown)

    @property
    def part_bytes(self) -> int:
        """What one rank saves of a checkpoint."""
        return -(-self.state_bytes // self.ranks)

    @property
    def slowdown_allowed(self) -> float:
        """The limit on the slowdown that holds."""
        return SLOWDOWN if self.slowdown is None else self.slowdown

    @property
    def stall_allowed(self) -> float:
        """The limit on the share of stalls that holds: what was told, and no more than the slowdown leaves."""
        if self.slowdown is not None:
            overhead = max(self.slowdown - 1, LEAST_SHARE) if self.slowdown > 1 else LEAST_OVERHEAD
            return min(ANY_STALL, self.stall_fraction or ANY_STALL, overhead)
        if self.stall_fraction is None:
            return STALL_FRACTION if self.mtbf_s is None else ANY_STALL
        return self.stall_fraction

    @property
    def slowdown_limits_stalls(self) -> bool:
        """Whether the slowdown is the tighter limit on stalls."""
        return self.slowdown is not None and self.stall_allowed != self.stall_fraction


def failures_of(rate: str, *, machines: int | None = None) -> tuple[float, str]:
    """Give MTBF in seconds and its source, of a kind of machine by its name.

    Args:
        rate: "spot", "shared" or "dedicated".
        machines: of the job; None = as many as the source tells of.

    Raises OptionError for another name, and for machines where the source does not tell of how many it speaks.
    """
    found = FAILURE_RATES.get(rate)
    if found is None:
        raise OptionError("rate", rate, " or ".join(map(repr, FAILURE_RATES)))
    if machines is None:
        return found.mtbf_s, found.source
    check_whole_number("nodes", machines, 1, 10**7)
    return found.of(machines), f"{found.source}; scaled to {machines:,} nodes"
