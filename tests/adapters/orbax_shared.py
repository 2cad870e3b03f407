"""What the tests of Orbax's handlers share: states, and where files lie."""

from __future__ import annotations

import os
from pathlib import Path

import absl.logging
import numpy as np

absl.logging.set_verbosity(absl.logging.FATAL)  # Orbax logs what it raises


def state(step: int, elements: int = 1000) -> dict:
    return {"w": np.full(elements, step, np.float32), "at": {"step": step, "tag": f"s{step}", "pair": (1, None)}}


def same(restored, step: int, elements: int = 1000) -> bool:
    at = {"step": step, "tag": f"s{step}", "pair": (1, None)}
    return restored["at"] == at and restored["w"].shape == (elements,) and bool((restored["w"] == step).all())


def slots(root: Path, item: str = "default") -> list[Path]:
    return sorted((Path(root) / ".pccheck" / item / "process-0").glob("slot-*.pcc"))


def held(root: Path) -> int:
    """Count the files of checkpoints outside the stores: those of steps, and of what was to become one."""
    return len({file.stat().st_ino for file in Path(root).rglob("rank-*.pcc")})


def on_disk(root: Path) -> list[int]:
    """Give the steps that lie on the disk under names of digits alone."""
    return sorted(int(name) for name in os.listdir(root) if name.isdigit())
