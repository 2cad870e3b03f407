"""One rank of a small job for tests: `rank_worker.py FOLDER [--name value ...]`; prints what it does, line by line.

The ranks are started by `torchrun`, or with RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT set. Each step multiplies the
weights; every step is saved. `--die-at N --victim R` kills rank R by SIGKILL after step N, in its first life only.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from pccheck_torch import StoreCoordinator, TrainingState
from torch.distributed.rendezvous import rendezvous

import pccheck
from pccheck.errors import PccheckError


def say(*words: object) -> None:
    print(" ".join(map(str, words)) + "\n", end="", flush=True)  # one write: lines of several ranks do not mix


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--die-at", type=int, default=-1)
    parser.add_argument("--victim", type=int, default=1)
    parser.add_argument("--agree-s", type=float, default=20.0)
    parser.add_argument("--group", action="store_true", help="init_process_group before the coordinator is made")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if arguments.group:  # gloo would find the addresses of the dead in the agent's store
        store, rank, world = next(rendezvous("env://"))
        store = dist.PrefixStore(os.environ["TORCHELASTIC_RESTART_COUNT"], store)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
    coordinator = StoreCoordinator(timeout_s=10.0)
    rank = coordinator.rank
    first_life = arguments.folder / f"died-{rank}"
    torch.manual_seed(rank)
    model = torch.nn.Linear(4, 4)
    state = TrainingState(model=model, rng=False, seen=0)
    try:
        with pccheck.Checkpointer(
            arguments.folder / "ckpt", coordinator=coordinator, agree_timeout_s=arguments.agree_s
        ) as ck:
            start = state.restore(ck)
            say("rank", rank, "start", start, "seen", state.extras["seen"])
            for step in range(start, arguments.steps):
                with torch.no_grad():
                    model.weight.mul_(2)
                state.extras["seen"] = step + 1
                save = ck.save(step, state)
                if step == arguments.die_at and rank == arguments.victim and not first_life.exists():
                    first_life.touch()
                    os.kill(os.getpid(), signal.SIGKILL)
                save.durable.result(60)
                say("rank", rank, "agreed", step)
    except PccheckError as error:
        say("rank", rank, "failed", type(error).__name__, error)
        return 3
    torch.manual_seed(rank)
    expected = torch.nn.Linear(4, 4).weight * 2.0**arguments.steps
    say("rank", rank, "ended", bool(torch.equal(model.weight, expected)))
    if arguments.group:
        dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
