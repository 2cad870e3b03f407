"""What saving costs ranks that agree: real processes, gloo over 127.0.0.1 (bench: imports contenders, trained)."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import pccheck_torch
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import pccheck

from .contenders import Contender, check_restored
from .trained import Leaves, Touch

TENSORS = 16


@dataclass(frozen=True, kw_only=True)
class RankCost:
    """What one rank saw.

    Args:
        blocked_ms: of each save that was alone: until training may go on.
        durable_ms: of the same: until it is durable and agreed by all ranks.
        each_ms: per save, where each is asked for as soon as the state was changed after the one before.
    """

    blocked_ms: list[float]
    durable_ms: list[float]
    each_ms: float


def over_store(directory: Path) -> pccheck_torch.StoreCoordinator:
    """Agree through the store of the process group."""
    return pccheck_torch.StoreCoordinator()


def over_directory(directory: Path) -> pccheck.SharedDirectory:
    """Agree through files."""
    return pccheck.SharedDirectory(directory, rank=dist.get_rank(), world=dist.get_world_size())


def measure_rank(
    rank: int, world: int, port: int, contender: Contender, directory: Path, rank_bytes: int, saves: int
) -> RankCost:
    """Be one rank: an FSDP2 model of `rank_bytes` on each, saved alone and then back to back.

    Raises AssertionError if this rank does not restore what it had at the last save.
    """
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, world, is_master=False, timeout=timedelta(seconds=60))
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=timedelta(seconds=120))
    try:
        model = Leaves(TENSORS, world, max(1, rank_bytes // 4 // TENSORS))
        fully_shard(model, mesh=init_device_mesh("cpu", (world,)))
        return _measure(contender, directory, model, saves)
    finally:
        dist.destroy_process_group()


def _measure(contender: Contender, directory: Path, model: Leaves, saves: int) -> RankCost:
    optimizer = Touch(model)
    contender.prepare(directory)
    state = contender.train(model, optimizer)
    blocked, durable, untimed = [], [], contender.in_flight + 2
    for step in range(untimed + saves):
        optimizer.step()
        dist.barrier()
        began = time.perf_counter()
        contender.save(step, state)
        blocked.append(1e3 * (time.perf_counter() - began))
        contender.finish()
        durable.append(1e3 * (time.perf_counter() - began))
    dist.barrier()
    began = time.perf_counter()
    for step in range(untimed + saves, untimed + 2 * saves):
        contender.save(step, state)
        contender.fence()
        optimizer.step()
    contender.finish()
    each_ms = 1e3 * (time.perf_counter() - began) / saves
    check_restored(contender, model, optimizer, untimed + 2 * saves, state)
    return RankCost(blocked_ms=blocked[untimed:], durable_ms=durable[untimed:], each_ms=each_ms)
