"""How large and how often everything is measured, and with what (bench: imports disks, lab, states)."""

from __future__ import annotations

import re
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
    trained: tuple[tuple[int, int], ...] = ((64, 4 * MIB), (3000, 87 * 1024))  # leaves, bytes of each
    pass_s: float = 0.1
    long_s: float = 1.0
    pairs_s: float = 7.0
    long_pairs_s: float = 6.0
    mode_saves: int = 20
    worlds: tuple[int, ...] = (2, 4)
    rank_bytes: int = 64 * MIB
    rank_saves: int = 15
    call_leaves: tuple[int, int] = (4000, 16 * 1024)
    calls: int = 40
    rate_rounds: int = 9
    memory_saves: int = 4
    jax_leaves: tuple[int, int] = (3000, 87 * 1024)
    probe_s: float = 30.0
    probe_bytes: int | None = None  # what the probe itself chooses
    loop_s: float = 8.0  # that each loop of `advice` takes


FULL = Scale()
QUICK = Scale(
    rounds=1, state_bytes=6 * MIB, step_s=0.004, small_state_bytes=2 * MIB, small_step_s=0.002, every=5, intervals=2,
    python_pairs=1, every_step_intervals=5, slow_rates=False, changing_intervals=4,
    trained=((60, 4096),), pass_s=0.004, long_s=0.012, pairs_s=0.01, long_pairs_s=0.01, mode_saves=3,
    worlds=(2,), rank_bytes=MIB // 4, rank_saves=3,
    call_leaves=(100, 256), calls=5, rate_rounds=3, memory_saves=3, jax_leaves=(60, 4096), probe_s=3.0,
    probe_bytes=4 * MIB, loop_s=0.1,
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Bench:
    """What every table needs."""

    lab: Lab
    scale: Scale
    directory: Path
    slow_disk: SlowDisk
    match: str  # only what this finds: in "column: contender" of the loops, in the rows of trainers and ranks
    say: Callable[[str], None]

    def here(self, measured: str) -> AbstractContextManager[Path]:
        """Say what is measured, and give a path with nothing at it, on the disk to measure."""
        self.say(measured)
        return emptied(self.directory / "run")

    def wants(self, name: str) -> bool:
        """Tell whether something is to be measured."""
        return re.search(self.match, name) is not None


def size_text(count: int) -> str:
    """Give a number of bytes as people write it."""
    return f"{count / MIB:.0f} MiB" if count >= MIB else f"{count / 1024:.0f} KiB"
