"""What the crash explorer did and found (beside the floors: imports nothing of pccheck)."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True)
class Violation:
    """One crash after which an invariant does not hold.

    Args:
        crash: "process death" or "power loss", and after what.
        position: operations of the log before the crash.
        fault: what does not hold.
        lost: how the disk differs from what the process saw.
        log: the operations up to the crash.
    """

    crash: str
    position: int
    fault: str
    lost: tuple[str, ...]
    log: tuple[str, ...]

    def __str__(self) -> str:
        lost = "\n".join(f"    {line}" for line in self.lost)
        return f"{self.fault}\n  {self.crash} at {self.position}:\n{lost}\n  after\n" + "\n".join(self.log)


@dataclass(kw_only=True)
class Report:
    """What an exploration did and found.

    Args:
        positions: crash points looked at.
        images: legal disks enumerated at them.
        distinct: disks that recovery can tell apart, each checked once.
        reopened: crashes after which the store was reopened and explored on.
        sampled: how often there were too many combinations to enumerate them all.
        violations: the first few of each kind of fault.
        violated: how many there were, by the first word of the fault: "I1", "I2", "I3".
        syncs: how often each sync was called, by purpose, in the run itself.
    """

    positions: int = 0
    images: int = 0
    distinct: int = 0
    reopened: int = 0
    sampled: int = 0
    violations: list[Violation] = field(default_factory=list)
    violated: Counter[str] = field(default_factory=Counter)
    syncs: Counter[str] = field(default_factory=Counter)

    @property
    def ok(self) -> bool:
        """Whether every invariant held after every crash."""
        return not self.violated

    def __str__(self) -> str:
        head = (
            f"{self.positions} crash points ({self.reopened} reopenings), {self.images} disks, {self.distinct} of them "
            f"distinct, {self.sampled} times sampled; violations: {dict(self.violated) or 'none'}"
        )
        return "\n\n".join([head, *map(str, self.violations)])
