"""One rank of a small job with a Controller: `controller_ranks.py FOLDER RANK WORLD STEPS [--die-at N] [--torch PORT]`.

Its steps take a millisecond or two, by its rank; a rank that is told to dies by SIGKILL. It prints, as JSON, at which
steps a save was due, the decisions, how long the longest call took, and what the last save by a deadline gave.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import time
import warnings
from pathlib import Path

import numpy as np

import pccheck


def coordinator(arguments: argparse.Namespace):
    if not arguments.torch:
        return pccheck.SharedDirectory(arguments.folder / "told", rank=arguments.rank, world=arguments.world)
    import torch.distributed as dist
    from pccheck_torch import StoreCoordinator

    store = dist.TCPStore("127.0.0.1", arguments.torch, is_master=False)
    return StoreCoordinator(store, rank=arguments.rank, world=arguments.world, timeout_s=20.0)


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("rank", type=int)
    parser.add_argument("world", type=int)
    parser.add_argument("steps", type=int)
    parser.add_argument("--die-at", type=int, default=-1)
    parser.add_argument("--torch", type=int, default=0)
    parser.add_argument("--agree-s", type=float, default=60.0)
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")  # a rank that is lost is told of, and asked for below
    # Each rank saves another number of bytes, and calls its steps longer or shorter: no two measure the same.
    state = {"x": np.zeros(1 + (1 << 18) * arguments.rank)}
    due, longest_s, answer = [], 0.0, None
    ck = pccheck.Checkpointer(
        arguments.folder / "ck", coordinator=coordinator(arguments), agree_timeout_s=arguments.agree_s,
        on_error="warn", exit_timeout_s=5.0, when_full="block" if arguments.agree_s > 30 else "skip",
    )  # fmt: skip
    controller = pccheck.Controller(ck, profile_steps=20)
    for step in range(arguments.steps):
        time.sleep(0.001 * (1 + arguments.rank))
        began = time.monotonic()
        is_due = controller.due(step)
        longest_s = max(longest_s, time.monotonic() - began)
        if is_due:
            due.append(step)
            ck.save(step, state)
        if step == arguments.die_at:
            os.kill(os.getpid(), signal.SIGKILL)
        if step == arguments.steps // 2 and arguments.agree_s > 30:
            ck.restore(branch=False)  # an exchange of its own, between those of the Controller
    if arguments.agree_s > 30:
        given = controller.save_by(arguments.steps, state, 30.0 - arguments.rank)
        answer = [given.action, given.durable, given.step, given.reason]
        ck.close()
    decisions = [(d.step, d.interval, d.reason) for d in controller.decisions]
    print(json.dumps({"due": due, "decisions": decisions, "longest_s": longest_s, "answer": answer}), flush=True)
    os._exit(0)  # a job whose rank is lost is not drained


if __name__ == "__main__":
    sys.exit(main())
