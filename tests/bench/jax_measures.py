"""What saving costs a program of jax, one process each (bench: imports jax_contenders, jax_states, loops, measures)."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from .contenders import Saver
from .jax_contenders import Reader
from .jax_states import Arrays, Shapes, bytes_of
from .lab import emptied
from .loops import Loop, Slowdown, measure_loop
from .measures import CHUNK, RAW_THREADS, Memory, reset_peak, status
from .raw import RawFile, region


@dataclass(frozen=True, kw_only=True)
class Kind:
    """A loop, and whether its step donates the state."""

    loop: Loop
    donated: bool


def measure_kinds(contender: Saver, directory: Path, shapes: Shapes, kinds: Mapping[str, Kind]) -> dict[str, Slowdown]:
    """Measure loops one after the other, each with a state and a directory of its own; raises as `measure_loop`."""
    found = {}
    for name, kind in kinds.items():
        with emptied(directory) as where:
            found[name] = measure_loop(contender, where, kind.loop, Arrays(shapes, donated=kind.donated))
    return found


def measure_jax_memory(contender: Reader, directory: Path, shapes: Shapes, loop: Loop) -> Memory:
    """Give how far resident memory rose above that of the loop and its state while saving, and then in restoring.

    The loop runs at its pace and its step donates the state: what a saver holds beyond that is then seen. Restoring
    counts beyond one restored state.
    """
    trained = Arrays(shapes, donated=True)
    base = reset_peak()
    contender.prepare(directory)
    last = loop.intervals * loop.every
    for step in range(1, last + 1):
        time.sleep(loop.step_s)
        contender.fence()
        trained.set(step)
        if step % loop.every == 0:
            contender.save(step, trained.state)
    contender.finish()
    saving = status("VmHWM") - base
    contender.close()
    base = reset_peak()
    restored = contender.read(directory, trained.state)
    restoring = status("VmHWM") - base - bytes_of(shapes)
    assert not (wrong := trained.differences(restored, last)), wrong[:5]
    return Memory(saving_bytes=saving, restoring_bytes=restoring)


def save_once(contender: Reader, directory: Path, shapes: Shapes) -> None:
    """Leave a checkpoint of step 1 for another process."""
    trained = Arrays(shapes, donated=True)
    trained.set(1)
    contender.prepare(directory)
    contender.save(1, trained.state)
    contender.close()


@dataclass(frozen=True, kw_only=True)
class Restoring:
    """Seconds of the first restore of a process, and of a raw read of as many bytes just before."""

    restore_s: float
    raw_s: float


def measure_restore(contender: Reader, directory: Path, raw_path: Path, shapes: Shapes) -> Restoring:
    """Restore what `save_once` left, into memory that this process never touched, and compare every bit.

    No file is in the page cache: what was written through it would else be read from memory.
    """
    trained, size = Arrays(shapes, donated=True), bytes_of(shapes)
    raw = RawFile(raw_path, size // 4096 * 4096, CHUNK, RAW_THREADS)
    raw_s = size / raw.read(region(size // 4096 * 4096))
    raw.close()
    _leave_cache(directory)
    began = time.perf_counter()
    restored = contender.read(directory, trained.state)
    restore_s = time.perf_counter() - began
    assert not (wrong := trained.differences(restored, 1)), wrong[:5]
    return Restoring(restore_s=restore_s, raw_s=raw_s)


def _leave_cache(directory: Path) -> None:
    for path in directory.rglob("*"):
        if path.is_file():
            fd = os.open(path, os.O_RDONLY)
            os.fsync(fd)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(fd)


def typical_ms(run: Slowdown) -> float:
    """Give the median of what saves of one run blocked."""
    return statistics.median(run.blocked_ms)
