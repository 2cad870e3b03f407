"""One rank of an FSDP2 job for tests: `fsdp_worker.py FOLDER`: three more steps, each saved; then a comparison.

The ranks are started with RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT set. At the end the model is held against one
that one process trained alone, and what restoring read against what this rank holds.
"""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist
from pccheck_torch import StoreCoordinator, TrainingState
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import pccheck


def layers() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3))


def train(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    torch.manual_seed(step)
    model(torch.randn(4, 5)).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    model = layers()
    for layer in model:
        fully_shard(layer, mesh=init_device_mesh("cpu", (world,)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    state = TrainingState(model=model, optimizer=optimizer, mine=rank)
    with pccheck.Checkpointer(sys.argv[1], coordinator=StoreCoordinator(timeout_s=10), agree_timeout_s=30) as ck:
        start = state.restore(ck)
        for param, inner in optimizer.state.items():  # a fresh optimizer got this rank's part, and no more
            assert inner["exp_avg"].placements == param.placements
            assert inner["exp_avg"].to_local().shape == param.to_local().shape
        for step in range(start, start + 3):
            train(model, optimizer, step)
            ck.save(step, state)
    alone = layers()
    its_optimizer = torch.optim.AdamW(alone.parameters(), lr=0.1)
    for step in range(start + 3):
        train(alone, its_optimizer, step)
    same = all(
        torch.allclose(a.full_tensor(), b, atol=1e-6)
        for a, b in zip(model.parameters(), alone.parameters(), strict=True)
    )
    print(f"rank {rank} of {world} began at {start}, mine {state.extras['mine']}, same {same}\n", end="", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
