"""How large and how often everything is measured, and with what (bench: imports disks, lab, states)."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

from .disks import SlowDisk
from .lab import Lab, emptied
from .states import MIB


@dataclass(frozen=True, kw_only=True)
class Scale:
    """How large and how often everything is."""

    rounds: int = 3
    state_bytes: int = 480 * MIB
    step_s: float = 0.1
    small_state_bytes: int = 120 * MIB
    small_step_s: float = 0.05
    every: int = 10
    intervals: int = 3
    python_pairs: int = 8
    every_step_intervals: int = 40
    slow_rates: bool = True  # False = skip the slowest disks, as a quick run must
    changing_intervals: int = 16
    many: tuple[int, int] = (3000, 87 * 1024)  # leaves, bytes of each
    many_pairs: int = 60
    many_pairs_slow: int = 8
    window_s: float = 0.15
    call_leaves: tuple[int, int] = (4000, 16 * 1024)
    calls: int = 40
    rate_rounds: int = 9
    memory_saves: int = 4


FULL = Scale()
QUICK = Scale(
    rounds=1, state_bytes=6 * MIB, step_s=0.004, small_state_bytes=2 * MIB, small_step_s=0.002, every=5, intervals=2,
    python_pairs=1, every_step_intervals=5, slow_rates=False, changing_intervals=4, many=(60, 4096), many_pairs=4,
    many_pairs_slow=2, window_s=0.01, call_leaves=(100, 256), calls=5, rate_rounds=3, memory_saves=3,
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Bench:
    """What every table needs."""

    lab: Lab
    scale: Scale
    directory: Path
    slow_disk: SlowDisk
    match: str  # of the loop tables only what this finds in "column: contender", and "none"
    say: Callable[[str], None]

    def here(self) -> AbstractContextManager[Path]:
        """Give a path with nothing at it, on the disk to measure."""
        return emptied(self.directory / "run")


def size_text(count: int) -> str:
    """Give a number of bytes as people write it."""
    return f"{count / MIB:.0f} MiB" if count >= MIB else f"{count / 1024:.0f} KiB"
