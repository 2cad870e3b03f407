"""A disk that the kernel limits, where there is a tool for it; its rate may change (bench: imports nothing)."""

from __future__ import annotations

import subprocess
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import cycle
from pathlib import Path
from typing import final

TOOL = Path(__file__).resolve().parents[3] / "shared" / "tools" / "slow-disk"


@final
class SlowDisk:
    """A mounted file system whose writes the kernel limits.

    Args:
        tool: `TOOL up|rate|down MOUNTPOINT [MiB per s] [GiB]`; its exit status 3 = this machine cannot do it.
        mountpoint: an empty folder, made if need be.
    """

    def __init__(self, tool: Path, mountpoint: Path) -> None:
        self._tool, self.mountpoint = tool, mountpoint

    def up(self, mib_per_s: float, size_gib: int) -> str | None:
        """Mount it; give why it cannot be had, None where it could."""
        if not self._tool.exists():
            return "no tool that limits a disk was given (--slow-disk)"
        done = self._call("up", f"{mib_per_s:.0f}", str(size_gib))
        if done.returncode == 3:
            return done.stderr.strip() or "the tool says that this machine cannot do it"
        done.check_returncode()
        return None

    def set_rate(self, mib_per_s: float) -> None:
        """Change the rate while it is mounted."""
        self._call("rate", f"{mib_per_s:.0f}").check_returncode()

    def down(self) -> None:
        """Unmount it."""
        self._call("down").check_returncode()

    def _call(self, command: str, *args: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [str(self._tool), command, str(self.mountpoint), *args],
            text=True, capture_output=True, timeout=120, check=False,
        )  # fmt: skip

    @contextmanager
    def changing(self, phases: Sequence[tuple[float, float]]) -> Iterator[None]:
        """Hold the rates, each `(MiB per s, seconds)`, in turn while the block runs."""
        if len(phases) == 1:
            self.set_rate(phases[0][0])
            yield
            return
        stop = threading.Event()

        def drive() -> None:
            for rate, seconds in cycle(phases):
                self.set_rate(rate)
                if stop.wait(seconds):
                    return

        thread = threading.Thread(target=drive, daemon=True)
        thread.start()
        try:
            yield
        finally:
            stop.set()
            thread.join(120)
