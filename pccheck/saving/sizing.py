"""How large the buffer pool should be on this machine (floor 1: imports nothing of pccheck)."""

from __future__ import annotations

import os
from pathlib import Path

_CGROUP_FILES = (  # limit, use: version 2, then version 1
    ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
    ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"),
)


def available_bytes() -> int:
    """Give the bytes that the host and the control group leave, whichever is less."""
    return min([_host_bytes(), *(left for limit, use in _CGROUP_FILES if (left := _left(limit, use)) is not None)])


def _host_bytes() -> int:
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2


def _left(limit_file: str, use_file: str) -> int | None:
    try:
        limit, use = Path(limit_file).read_text().strip(), Path(use_file).read_text().strip()
        return max(0, int(limit) - int(use))
    except (OSError, ValueError):  # no such group, or "max"
        return None


def pool_bytes(wanted: int | None, state_bytes: int, in_flight: int, chunk_bytes: int) -> int:
    """Give the size of the buffer pool in bytes.

    Never more than in_flight times the state, in whole chunks, nor less than two chunks: more could not be used, and
    was seen to be touched all the same (2.97 GB for 80 MB of state). Unless told, as much, and at most a quarter of
    what is available: three checkpoints in flight over a pool of one state were measured to slow training by 20 %
    where three states' worth did not. The paper's table asks for one to two states (PCcheck, ASPLOS 2025, for N = 2).
    """
    useful = in_flight * -(-state_bytes // chunk_bytes) * chunk_bytes
    room = available_bytes() // 4 if wanted is None else wanted
    return max(2 * chunk_bytes, min(useful, room))
