"""Starts the processes of a job on 127.0.0.1, and hears how they ended."""

from __future__ import annotations

import socket
import subprocess
from collections.abc import Sequence


def free_port() -> int:
    """Give a port on which nobody listens now."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port: int = found.getsockname()[1]
        return port


def outputs(processes: Sequence[subprocess.Popen[str]], timeout_s: float) -> list[tuple[str, str]]:
    """Wait for all; give what each wrote to stdout and stderr. None outlives this, nor is left a zombie."""
    try:
        return [process.communicate(timeout=timeout_s) for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
