"""Single costs, one process each: rates, calls, memory (bench: imports contenders, raw, states)."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import pccheck

from .contenders import Contender, Pccheck
from .raw import RawFile, region
from .states import MIB, Marks, differences, gpt_state, many_leaves, size_of

CHUNK = 16 * MIB
RAW_THREADS = 2


@dataclass(frozen=True, kw_only=True)
class Rates:
    """Bytes per second of each round, by what was measured."""

    by_name: dict[str, list[float]]


def measure_rates(directory: Path, state_bytes: int, rounds: int) -> Rates:
    """Persist and restore, each beside raw writes and reads of as many bytes, in alternation."""
    directory.mkdir(parents=True)
    state = gpt_state(state_bytes)
    marks, size = Marks(state), size_of(state)
    raw = RawFile(directory / "raw", size // 4096 * 4096, CHUNK, RAW_THREADS)
    rates: dict[str, list[float]] = {}
    contender = Pccheck("lazy", 2)
    contender.prepare(directory / "store")
    for step in range(1, 4):  # every slot once, so that allocated blocks and buffers have been touched
        contender.save(step, state)
        contender.finish()
    step = 3
    for _ in range(rounds):
        rates.setdefault("raw write", []).append(raw.write())
        step += 1
        marks.set(step)
        began = time.perf_counter()
        contender.save(step, state)
        contender.finish()
        rates.setdefault("save until durable", []).append(size / (time.perf_counter() - began))
    contender.checkpointer.close()
    touched = region(size // 4096 * 4096)
    raw.read(touched)
    for _ in range(rounds):
        rates.setdefault("raw read, touched memory", []).append(raw.read(touched))
        rates.setdefault("raw read, fresh memory", []).append(raw.read(region(touched.nbytes)))
        with pccheck.open(directory / "store") as view:
            began = time.perf_counter()
            restored = view.restore()
            rates.setdefault("restore, fresh memory", []).append(size / (time.perf_counter() - began))
        assert restored is not None
        assert restored.step == step
        assert not (wrong := differences(restored.state, state)), wrong[:5]
        del restored
    raw.close()
    return Rates(by_name=rates)


def measure_calls(directory: Path, count: int, leaf_bytes: int, kind: str, calls: int) -> list[float]:
    """Give the milliseconds that each `save()` of an unchanged structure took (lazy), none under way before it."""
    state: Any = many_leaves(count, leaf_bytes, kind)
    contender = Pccheck("lazy", 2)
    contender.prepare(directory)
    times = []
    for step in range(calls + 4):
        began = time.perf_counter()
        contender.save(step, state)
        times.append(1e3 * (time.perf_counter() - began))
        contender.finish()
    restored: Any = contender.restore(state)
    for name, leaf in state["model"].items():
        assert (restored["model"][name] == leaf).all(), f"{name} was restored with other values"
    return times[4:]


@dataclass(frozen=True, kw_only=True)
class Memory:
    """Bytes of the greatest extra use while saving, and while restoring."""

    saving_bytes: int
    restoring_bytes: int


def measure_memory(contender: Contender, directory: Path, state_bytes: int, saves: int) -> Memory:
    """Give how far resident memory rose above that of the loop and its state while saving, and then in restoring.

    Restoring counts beyond one restored state, and only what it adds to the greatest use up to then is seen to be more;
    so the writer is closed first, and the peak is reset.
    """
    state = gpt_state(state_bytes)
    marks = Marks(state)
    marks.set(0)
    torch.save({"warm": torch.zeros(8)}, directory.parent / "warm")  # what libraries load at first use is not counted
    base = reset_peak()
    contender.prepare(directory)
    for step in range(1, saves + 1):
        contender.fence()
        marks.set(step)
        contender.save(step, state)
    contender.finish()
    saving = status("VmHWM") - base
    if isinstance(contender, Pccheck):
        contender.checkpointer.close()
    base = reset_peak()
    restored = contender.restore(state)
    assert restored is None or not differences(restored, state)  # also touches what a peer has only mapped
    restoring = status("VmHWM") - base - size_of(state)
    return Memory(saving_bytes=saving, restoring_bytes=restoring)


def reset_peak() -> int:
    """Make the present use the greatest so far, and give it."""
    Path("/proc/self/clear_refs").write_text("5")
    return status("VmRSS")


def status(field: str) -> int:
    """Give the bytes that the kernel tells of this process by that name."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise LookupError(field)
