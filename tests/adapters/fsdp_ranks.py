"""Ranks for tests of FSDP2, DDP and tensor parallelism over gloo: `python fsdp_ranks.py`, then one job a line as JSON.

A job is {"scene": name, "world": ranks, "port": of a TCPStore that outlives the ranks, "attempt": a new number, ...}.
The ranks are forked, so that torch is imported once; each is a process of its own that opens all of its files itself.
What they tell and how each ended comes line by line; "done" ends a job.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import signal
import sys
import traceback
import warnings
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from pccheck_torch import ResumableLoader, ResumableSampler, StoreCoordinator, TrainingState, attach
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

import pccheck

DATA = torch.arange(103 * 10, dtype=torch.float32).reshape(103, 10).sin()


def tell(*words: object) -> None:
    os.write(1, (" ".join(map(str, words)) + "\n").encode())  # one write: lines of threads and ranks do not mix


class Net(nn.Module):
    """Layers that no number of ranks divides, some of fewer rows than ranks, and buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm = nn.Linear(10, 7), nn.BatchNorm1d(7)
        self.middle, self.down = nn.Linear(7, 34), nn.Linear(34, 7)
        self.last, self.drop = nn.Linear(7, 1), nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.up(x))
        return self.last(self.down(self.drop(self.middle(x).relu())))


class Stage(nn.Module):
    """One stage of a pipeline, under the name that it has in the whole model."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.name = f"stage{number}"
        self.add_module(self.name, nn.Linear(10, 5 + number))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.get_submodule(self.name)(x)


def build(how: str, shape: list[int], seed: int = 0) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Give a model, the same on all ranks, and its optimizer.

    Args:
        how: "plain", "fsdp" (mesh of one axis: shards; of two: replicas, shards), "tp" (shards, tensors), "ddp",
            or "pp" (stages, shards), in which each stage is another model.
        shape: of the mesh.
        seed: of the weights.
    """
    torch.manual_seed(seed)
    model: nn.Module = Net()
    if how == "fsdp":
        mesh = init_device_mesh("cpu", tuple(shape), mesh_dim_names=("replicas", "shards")[-len(shape) :])
        fully_shard(model.middle, mesh=mesh)
        fully_shard(model, mesh=mesh)
    elif how == "tp":
        mesh = init_device_mesh("cpu", tuple(shape), mesh_dim_names=("shards", "tensors"))
        parallelize_module(model, mesh["tensors"], {"middle": ColwiseParallel(), "down": RowwiseParallel()})
        fully_shard(model, mesh=mesh["shards"])
    elif how == "pp":
        mesh = init_device_mesh("cpu", tuple(shape), mesh_dim_names=("stages", "shards"))
        model = Stage(mesh.get_local_rank("stages"))
        fully_shard(model, mesh=mesh["shards"])
    elif how == "ddp":
        model = DistributedDataParallel(model)
    return model, torch.optim.AdamW(model.parameters(), lr=0.01, betas=(0.8, 0.95))


def named(model: nn.Module, optimizer: torch.optim.Optimizer) -> Any:
    """Give the optimizer, that of a stage under a name of its own: it knows its parameters by their numbers."""
    return {model.name: optimizer} if isinstance(model, Stage) else optimizer


def train(model: nn.Module, optimizer: torch.optim.Optimizer, batch: torch.Tensor) -> None:
    model(batch).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


# -- what a state is --------------------------------------------------------------------------------------------------


def states(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    inner = model.module if isinstance(model, DistributedDataParallel) else model
    return {"model": inner.state_dict(), "optimizer": optimizer.state_dict()}


def whole(value: Any) -> Any:
    """Give plain copies of all tensors, gathered from the ranks."""
    if isinstance(value, DTensor):
        value = value.full_tensor()
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if isinstance(value, dict):
        return {key: whole(child) for key, child in value.items()}
    return type(value)(map(whole, value)) if isinstance(value, (list, tuple)) else value


def generators() -> list[Any]:
    kind, keys, *rest = np.random.get_state()
    return [random.getstate(), kind, keys.tolist(), rest, torch.get_rng_state()]


def differences(a: Any, b: Any, path: str = "") -> list[str]:
    """Give the places in which two states differ, to the bit and by type."""
    if isinstance(a, dict) and isinstance(b, dict) and list(a) == list(b):
        return [d for key in a for d in differences(a[key], b[key], f"{path}/{key}")]
    if isinstance(a, (list, tuple)) and type(a) is type(b) and len(a) == len(b):
        return [d for i, (x, y) in enumerate(zip(a, b, strict=True)) for d in differences(x, y, f"{path}/{i}")]
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        same = a.dtype == b.dtype and a.shape == b.shape and a.numpy().tobytes() == b.numpy().tobytes()
        return [] if same else [path]
    return [] if type(a) is type(b) and a == b else [path]


def check(folder: Path, rank: int, state: dict[str, Any], mine: int) -> list[str]:
    """Give in what a restored state differs from what was saved; before anything draws random numbers."""
    own = generators()
    saved = len(list(folder.glob("expected-*.pt")))
    expected = torch.load(folder / f"expected-{rank % saved}.pt", weights_only=False)
    wrong = differences(whole(state), expected["state"]) + differences(own, expected["own"], "own")
    return wrong if mine == rank % saved else [*wrong, f"mine: {mine}"]


def digest(value: Any) -> str:
    """Digest what this rank has of tensors, dicts, lists and numbers."""
    found = hashlib.sha256()

    def add(value: Any) -> None:
        if isinstance(value, dict):
            for key, child in value.items():
                found.update(repr(key).encode())
                add(child)
        elif isinstance(value, torch.Tensor):
            local = value.to_local() if isinstance(value, DTensor) else value
            found.update(local.detach().numpy().tobytes())
        elif isinstance(value, (list, tuple)):
            for child in value:
                add(child)
        else:
            found.update(repr(value).encode())

    add(value)
    return found.hexdigest()[:16]


# -- the scenes -------------------------------------------------------------------------------------------------------


class Rank:
    """One rank of a job."""

    def __init__(self, job: dict[str, Any], rank: int) -> None:
        self.job, self.rank, self.world = job, rank, job["world"]
        self.folder = Path(job["folder"])
        self.store = dist.TCPStore("127.0.0.1", job["port"], is_master=False, timeout=timedelta(seconds=30))
        group = dist.PrefixStore(f"group {job['attempt']}", self.store)
        dist.init_process_group("gloo", store=group, rank=rank, world_size=self.world, timeout=timedelta(seconds=60))

    def checkpointer(self, **options: Any) -> pccheck.Checkpointer:
        """Open the job's store; what ranks of earlier jobs, which died, told each other is still there."""
        coordinator: Any = (
            pccheck.SharedDirectory(self.folder / "ckpt", rank=self.rank, world=self.world)
            if self.job.get("coordinator") == "directory"
            else StoreCoordinator(self.store, rank=self.rank, world=self.world, timeout_s=20.0)
        )
        options = {"agree_timeout_s": 30.0, "buffer_bytes": 1 << 20, "chunk_bytes": 4096, **options}
        directory = self.folder / "ckpt"
        if self.job.get("local"):  # a disk that no other rank sees
            directory = self.folder / f"node-{self.rank}"
        return pccheck.Checkpointer(directory, coordinator=coordinator, **options)

    def seed(self) -> None:
        random.seed(self.rank)
        np.random.seed(self.rank)
        torch.manual_seed(self.rank)

    def train_until_killed(self) -> None:
        """Save every step, and tell what was saved and what is agreed; the job may say at which point to die."""
        job, hits = self.job, 0

        def at(point: str) -> None:
            nonlocal hits
            hits += point == job.get("point")
            if hits == job.get("nth") and self.rank in job["victims"]:
                os.kill(os.getpid(), signal.SIGKILL)

        model, optimizer = build("fsdp", [self.world])
        self.seed()
        loader = ResumableLoader(DataLoader(DATA, batch_size=4, sampler=ResumableSampler(DATA)))
        state = TrainingState(model=model, optimizer=optimizer, loader=loader)

        def held() -> str:
            return digest([states(model, optimizer), generators(), loader.state_dict()])

        def agreed(step: int, durable: Any) -> None:
            if durable.exception() is None:
                tell("durable", self.rank, step)

        with self.checkpointer(in_flight=job["in_flight"], _at=at) as ck:
            attach(ck, optimizer)
            start = step = state.restore(ck)
            tell("begin", self.rank, start, held())
            while step < start + job["steps"]:
                for batch in loader:
                    train(model, optimizer, batch)
                    random.random(), np.random.random()
                    tell("saving", self.rank, step, held())
                    ck.save(step, state).durable.add_done_callback(lambda done, step=step: agreed(step, done))
                    step += 1
                    if step == start + job["steps"]:
                        break

    def save(self) -> None:
        """Train three steps, save, and write beside it what the ranks had together."""
        model, optimizer = build(self.job["how"], self.job["mesh"])
        state = TrainingState(model=model, optimizer=named(model, optimizer), mine=self.rank)
        with self.checkpointer(replicated=self.job.get("replicated", False)) as ck:
            attach(ck, optimizer)
            for step in range(3):
                torch.manual_seed(step)
                train(model, optimizer, torch.randn(8, 10))
            self.seed()
            ck.save(2, state).durable.result(60)
            together = {"state": whole(states(model, optimizer)), "own": generators()}
        torch.save(together, self.folder / f"expected-{self.rank}.pt")

    def load(self) -> None:
        """Restore into a model of other weights, tell what differs from what was saved, and save that one."""
        model, optimizer = build(self.job["how"], self.job["mesh"], seed=1)
        state = TrainingState(model=model, optimizer=named(model, optimizer), mine=-1)
        with self.checkpointer(replicated=self.job.get("replicated", False)) as ck:
            assert state.restore(ck) == 3
            wrong = check(self.folder, self.rank, states(model, optimizer), state.extras["mine"])
            train(model, optimizer, torch.randn(8, 10))
            ck.save(3, state).durable.result(60)
        tell("wrong", self.rank, json.dumps(wrong))


def run(job: dict[str, Any], rank: int) -> int:
    try:
        member = Rank(job, rank)
        getattr(member, job["scene"])()
        dist.destroy_process_group()
    except BaseException:
        tell("error", rank, json.dumps(traceback.format_exc()[-3000:]))
        return 1
    return 0


def serve() -> None:
    torch.set_num_threads(1)
    build("plain", [])  # the first optimizer loads half of torch
    for line in sys.stdin:
        job = json.loads(line)
        ranks: dict[int, int] = {}
        for rank in range(job["world"]):
            pid = os.fork()
            if pid == 0:
                os._exit(run(job, rank))
            ranks[pid] = rank
        tell("pids", *ranks)
        while ranks:
            pid, status = os.wait()
            tell("exit", ranks.pop(pid), os.waitstatus_to_exitcode(status))
        tell("done")


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    serve()
