"""Starts jobs of fsdp_ranks.py, hears what their ranks tell, and kills them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch.distributed as dist

WORKER = Path(__file__).with_name("fsdp_ranks.py")
DEADLINE_S = 120.0


class Jobs:
    """Runs jobs one after the other; the store of their ranks lives in this process, as torchrun's in the agent."""

    def __init__(self) -> None:
        self.store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
        self.process = subprocess.Popen(
            [sys.executable, str(WORKER)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )
        self.attempt = 0
        self.ranks: dict[int, int] = {}  # of the job that runs, or has run: rank -> pid

    def run(self, hear: Callable[[str, list[str]], None] = lambda word, rest: None, **job: Any) -> dict[int, int]:
        """Run a job to its end and give the exit status of each rank."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.attempt += 1
        job |= {"port": self.store.port, "attempt": self.attempt, "folder": str(job["folder"])}
        self.process.stdin.write(json.dumps(job) + "\n")
        self.process.stdin.flush()
        ended: dict[int, int] = {}
        watchdog = threading.Timer(DEADLINE_S, self.close)
        watchdog.start()
        try:
            while True:
                line = self.process.stdout.readline()
                assert line, f"the ranks hung, or their server died; ended so far: {ended}"
                word, *rest = line.split(maxsplit=2)
                if word == "done":
                    return ended
                if word == "pids":
                    self.ranks = dict(enumerate(map(int, line.split()[1:])))
                elif word == "exit":
                    ended[int(rest[0])] = int(rest[1])
                hear(word, line.split()[1:] if word not in ("error", "wrong") else rest)
        finally:
            watchdog.cancel()

    def kill(self, ranks: Iterable[int]) -> None:
        """SIGKILL some ranks; those that ended already are as dead as they get."""
        for rank in ranks:
            try:
                os.kill(self.ranks[rank], signal.SIGKILL)
            except ProcessLookupError:
                pass

    def close(self) -> None:
        """End the server and the ranks."""
        self.process.kill()
        self.kill(self.ranks)
        self.process.wait(DEADLINE_S)
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.close()
        self.process.stdout.close()
