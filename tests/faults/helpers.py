"""What the tests of this folder share: states that differ in every byte, counts of what a process holds, children."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import threading
from pathlib import Path
from typing import Any

import numpy as np

import pccheck
from pccheck import format
from pccheck.storage.directory import Directory
from pccheck.testing.faults import FaultyVolume, Script
from pccheck.testing.throttle import Rate, ThrottledVolume

CHUNK = 4096
WAIT_S = 60.0
ROOT = Path(__file__).parents[2]


def make_state(step: int, nbytes: int = 3 * CHUNK) -> dict[str, Any]:
    """Give a state whose arrays say in every element which step they are of; `nbytes` in all."""
    n = nbytes // 16
    return {"w": np.full(n, step, np.int64), "m": {"v": np.arange(n, dtype=np.int64) * 1000 + step}, "step": step}


def step_of(state: dict[str, Any]) -> int:
    """Give the step that every element of a state is of; an AssertionError shows what is mixed."""
    step = int(state["step"])
    expected = make_state(step, 16 * len(state["w"]))
    assert state["w"].dtype == np.int64
    np.testing.assert_array_equal(state["w"], expected["w"])
    np.testing.assert_array_equal(state["m"]["v"], expected["m"]["v"])
    return step


def throttled(directory: Path, bytes_per_s: float, **options: Any) -> pccheck.Checkpointer:
    """Open a store on storage of this rate."""
    volume = ThrottledVolume(Directory(str(directory), create=True, write=True), total=Rate.steady(bytes_per_s))
    return pccheck.Checkpointer(volume, **{"chunk_bytes": CHUNK, **options})


def faulty(directory: Path, script: Script, **options: Any) -> pccheck.Checkpointer:
    """Open a store on storage that fails by script."""
    volume = FaultyVolume(Directory(str(directory), create=True, write=True), script)
    return pccheck.Checkpointer(volume, **{"chunk_bytes": CHUNK, **options})


def pool_of(ck: pccheck.Checkpointer) -> tuple[int, int]:
    """Give free and all buffers of the pool."""
    pipeline = ck._flight.pipelines.current
    return (pipeline.free_buffers, pipeline.buffers) if pipeline else (0, 0)


def slot_files(directory: Path) -> list[Path]:
    """Give the slot files of a store, by slot."""
    return sorted(Path(directory).glob("slot-*.pcc"))


def records(directory: Path) -> dict[Path, format.Record]:
    """Give the records of a store's slots that validate."""
    found = {}
    for file in slot_files(directory):
        with file.open("rb") as f:
            record = format.unpack_record(f.read(format.RECORD_BYTES))
        if record is not None:
            found[file] = record
    return found


def open_files() -> list[str]:
    """Give the files this process has open; sockets and pipes may be another library's, of an earlier test."""
    paths = []
    for name in os.listdir("/proc/self/fd"):
        try:
            paths.append(os.readlink(f"/proc/self/fd/{name}"))
        except FileNotFoundError:
            pass  # that of the listing itself
    return sorted(path for path in paths if path.startswith("/"))


def threads_of_pccheck() -> int:
    """Give how many threads pccheck has: those of Python by their names, native ones by what they told the kernel."""
    named = [t for t in threading.enumerate() if t.name.startswith("pccheck")]
    native = 0
    for task in os.listdir("/proc/self/task"):
        try:
            with open(f"/proc/self/task/{task}/comm") as comm:
                native += comm.read().startswith("pcc")
        except (FileNotFoundError, ProcessLookupError):
            pass  # another library's, that has just ended
    return len(named) + native


def resident_bytes() -> int:
    """Give the resident set of this process."""
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def run_python(code: str, *args: object, timeout_s: float = 120.0, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run code in a process of its own."""
    command = [sys.executable, "-c", textwrap.dedent(code), *map(str, args)]
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, check=False, **options)


class Gate:
    """Holds the nth thread (from 1) that reaches a named point of a commit, until it is let go."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._seen: dict[str, int] = {}
        self._held: dict[tuple[str, int], tuple[threading.Event, threading.Event]] = {}

    def hold(self, point: str, nth: int) -> None:
        """Have the nth thread stop at the point."""
        self._held[point, nth] = threading.Event(), threading.Event()

    def __call__(self, point: str) -> None:
        with self._lock:
            self._seen[point] = nth = self._seen.get(point, 0) + 1
        if (point, nth) in self._held:
            reached, go_on = self._held[point, nth]
            reached.set()
            assert go_on.wait(WAIT_S)

    def reached(self, point: str, nth: int) -> None:
        """Wait until that thread is there."""
        assert self._held[point, nth][0].wait(WAIT_S), f"nobody came to {point} for the {nth}th time"

    def let_go(self, point: str, nth: int) -> None:
        """Let it go on."""
        self._held[point, nth][1].set()
