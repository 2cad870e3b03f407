"""The names that processes leave of themselves, and whether they live (floor 1: imports nothing of pccheck)."""

from __future__ import annotations

import os
import re
import socket
from pathlib import Path

_HOLDER = re.compile(r"pid (\d+), parent (\d+), boot (\S+), host (.+)")


def describe_self() -> str:
    """Give the text by which others know this process."""
    return f"pid {os.getpid()}, parent {os.getppid()}, boot {_boot_id()}, host {socket.gethostname()}"


def is_alive(holder: str) -> bool:
    """Tell whether a process lives; one on another host or boot is taken for alive, an unknown text for dead."""
    match = _HOLDER.fullmatch(holder)
    if not match or not is_of_here(holder):
        return match is not None
    try:
        os.kill(int(match[1]), 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        return True
    return True


def is_of_here(holder: str) -> bool:
    """Tell whether it can be told from here if a process lives: whether it is of this host since it was started."""
    match = _HOLDER.fullmatch(holder)
    return match is not None and match[3] == _boot_id() and match[4] == socket.gethostname()


def pid_and_parent(holder: str) -> tuple[int, int]:
    """Give both numbers of a text; (-1, -1) where it is another."""
    match = _HOLDER.fullmatch(holder)
    return (int(match[1]), int(match[2])) if match else (-1, -1)


def _boot_id() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return "unknown"
