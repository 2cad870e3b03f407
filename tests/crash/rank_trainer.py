"""Ranks of one job as processes of their own, which save in a loop and kill themselves at a named point.

    rank_trainer.py serve       import once, then fork the ranks of a job for each JSON line of options

As a launcher does, the server ends all ranks soon after one has died. A rank tells on standard output, each line by one
os.write, so that it survives its SIGKILL: "RANK restored COUNTER STEP FINGERPRINT", "RANK fresh", "RANK saving STEP
FINGERPRINT", "RANK durable COUNTER STEP", "RANK failed STEP ERROR", "RANK ended"; the server tells "RANK exit STATUS",
and "over" in the end.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
import traceback

import pccheck
from pccheck.testing.scenario import fingerprint, make_state

DATA_BYTES = 60_000
CHUNK_BYTES = 16 * 1024
GRACE_S = 0.05  # between the death of one rank and that of the others
DEADLINE_S = 60.0


def tell(*words: object) -> None:
    os.write(1, (" ".join(map(str, words)) + "\n").encode())


def hook(rank: int, options: dict):
    """Give what happens at the points of a commit: the nth time, this rank dies, or sleeps for ever."""
    lock, seen = threading.Lock(), [0]

    def at(here: str) -> None:
        if here != options.get("point") or rank not in options["victims"]:
            return
        with lock:
            seen[0] += 1
            now = seen[0] == options.get("nth", 1)
        if now and options.get("sleep"):
            time.sleep(DEADLINE_S)
        elif now:
            os.kill(os.getpid(), signal.SIGKILL)

    return at


def rank_state(rank: int, step: int):
    return {"rank": rank, "tree": make_state(step, f"rank {rank}", data_bytes=DATA_BYTES)}


def train(rank: int, options: dict) -> None:
    coordinator = pccheck.SharedDirectory(options["directory"] + "/told", rank=rank, world=options["world"])
    ck = pccheck.Checkpointer(
        options["directory"], coordinator=coordinator, in_flight=options.get("in_flight", 2),
        keep=options.get("keep", 1), keep_every=options.get("keep_every"), chunk_bytes=CHUNK_BYTES, on_error="warn",
        agree_timeout_s=options.get("agree_timeout_s", DEADLINE_S), exit_timeout_s=1.0, _at=hook(rank, options),
    )  # fmt: skip
    restored = ck.restore()
    if restored:
        tell(rank, "restored", restored.counter, restored.step, fingerprint(restored.state).hex())
    else:
        tell(rank, "fresh")
    start = restored.step + 1 if restored else 0
    for step in range(start, start + options.get("saves", 6)):
        state = rank_state(rank, step)
        tell(rank, "saving", step, fingerprint(state).hex())
        save(ck, rank, step, state)
    if options.get("leave"):
        ck.close()
    else:
        ck.wait(DEADLINE_S)
    tell(rank, "ended")


def save(ck: pccheck.Checkpointer, rank: int, step: int, state: object) -> None:
    saved = ck.save(step, state, report=False)

    def resolved(future) -> None:
        error = future.exception()
        if error is None:
            tell(rank, "durable", saved.counter, step)
        else:
            tell(rank, "failed", step, type(error).__name__, *getattr(error, "ranks", ()))

    saved.durable.add_done_callback(resolved)


def run(options: dict) -> None:
    pids = {}
    for rank in range(options["world"]):
        pid = os.fork()
        if pid == 0:
            try:
                train(rank, options)
            except BaseException:
                traceback.print_exc()
                os._exit(1)
            os._exit(0)
        pids[pid] = rank
    deadline = time.monotonic() + DEADLINE_S
    while pids:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid in pids:
            code = os.waitstatus_to_exitcode(status)
            tell(pids.pop(pid), "exit", code)
            if code:
                deadline = min(deadline, time.monotonic() + GRACE_S)
        elif time.monotonic() > deadline or (options.get("sleep") and set(pids.values()) == set(options["victims"])):
            for left in pids:
                os.kill(left, signal.SIGKILL)
            deadline = float("inf")
        else:
            time.sleep(0.002)
    tell("over")


def serve() -> None:
    for line in sys.stdin:
        run(json.loads(line))


if __name__ == "__main__":
    serve()
