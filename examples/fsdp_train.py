"""Train a small transformer with FSDP2 on several ranks, with a checkpoint every few steps that all ranks agree on.

    export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1  # else gloo may look for dead ranks after a restart (torch 2.13)
    torchrun --standalone --nproc-per-node=4 --max-restarts=3 examples/fsdp_train.py --out out/fsdp

Each rank stores its own shards. Started again, on any number of ranks, it goes on after the newest checkpoint that all
ranks of its time had finished. `python examples/fsdp_train.py` shows that: it starts 4 ranks on CPUs, kills one at a
random moment, starts again, kills all, goes on with 2 ranks to the end, and checks every restored state against the
digest that was saved beside it.
"""

from __future__ import annotations

import argparse
import functools
import hashlib
import os
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from pccheck_torch import ResumableLoader, ResumableSampler, StoreCoordinator, TrainingState, attach
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

import pccheck

CONTEXT, BATCH, WIDTH, HEADS, LAYERS = 32, 4, 64, 4, 2


class Block(nn.Module):
    """One transformer layer: attention to what came before, then an MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH), nn.Dropout(0.1))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in self.qkv(self.norm1(x)).chunk(3, -1))
        attention = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attention.transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm2(x))


class Transformer(nn.Module):
    """A byte-level language model of 150,000 parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.token, self.place = nn.Embedding(256, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.Sequential(*(Block() for _ in range(LAYERS)))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 256)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.norm(self.blocks(self.token(tokens) + self.place.weight)))


class Text(Dataset[Tensor]):
    """This program's own text, in windows."""

    def __init__(self) -> None:
        self.bytes = torch.frombuffer(bytearray(Path(__file__).read_bytes()), dtype=torch.uint8).long()

    def __len__(self) -> int:
        return len(self.bytes) - CONTEXT

    def __getitem__(self, i: int) -> Tensor:
        return self.bytes[i : i + CONTEXT + 1]


# -- one rank ---------------------------------------------------------------------------------------------------------


def train(arguments: argparse.Namespace) -> None:
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)  # the same weights on all ranks, whatever their number
    model, text = Transformer(), Text()
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    loader = ResumableLoader(DataLoader(text, batch_size=BATCH, sampler=ResumableSampler(text)))
    torch.manual_seed(1 + rank)  # another dropout on each rank
    state = TrainingState(model=model, optimizer=optimizer, loader=loader)

    coordinator = StoreCoordinator()  # the ranks agree through the store of the process group
    with pccheck.Checkpointer(arguments.out, keep=2, coordinator=coordinator, agree_timeout_s=120) as ck:
        attach(ck, optimizer)  # save() returns at once; optimizer.step() waits for what is being copied
        start = state.restore(ck)
        say(f"rank {rank} of {world} begins with step {start}, digest {digest(model, optimizer, loader)}")
        for step, tokens in zip(range(start, arguments.steps), loader.endless(), strict=False):
            logits = model(tokens[:, :-1])
            loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            if step % arguments.save_every == 0 or step == arguments.steps - 1:
                save = ck.save(step, state, metadata={"digest": digest(model, optimizer, loader)})
                save.durable.add_done_callback(functools.partial(report, rank, step))
            if rank == 0 and step % 10 == 0:
                say(f"rank 0: step {step}, loss {loss.item():.3f}")
    dist.destroy_process_group()


def digest(model: nn.Module, optimizer: torch.optim.Optimizer, loader: ResumableLoader) -> str:
    return digest_of({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "loader": loader.state_dict()})


def digest_of(state: dict[str, Any]) -> str:
    """Digest what the ranks hold together: the same on each, and on any number of them. Only this show needs it."""
    found = hashlib.sha256(repr(state["loader"]).encode())
    for tensors in (state["model"], *state["optimizer"]["state"].values()):
        for name, tensor in tensors.items():
            whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
            found.update(name.encode() + whole.numpy().tobytes())
    return found.hexdigest()[:16]


def say(line: str) -> None:
    os.write(1, f"{line}\n".encode())  # one write: lines of several threads and ranks do not mix


def report(rank: int, step: int, durable: Future[int]) -> None:
    if durable.exception() is None:  # else the next save(), or the end of the `with` block, raises it
        say(f"rank {rank}: all ranks hold step {step}")


# -- the demonstration: a launcher that kills -------------------------------------------------------------------------


class Life:
    """One start of the job: its processes, and what they say. As torchrun does, it ends all when one has died."""

    def __init__(self, world: int, arguments: argparse.Namespace) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = str(free.getsockname()[1])
        where = {"WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "OMP_NUM_THREADS": "1"}
        options = ["--out", arguments.out, "--steps", arguments.steps, "--save-every", arguments.save_every]
        command = [sys.executable, __file__, *map(str, options)]
        out, into = os.pipe()
        with open(arguments.out / "errors.txt", "w") as errors:
            self.ranks = [
                subprocess.Popen(command, env={**os.environ, **where, "RANK": str(rank)}, stdout=into, stderr=errors)
                for rank in range(world)
            ]
        os.close(into)
        self.lines = os.fdopen(out)
        self.begun: dict[int, tuple[int, str]] = {}  # rank -> the step that it began with, and the digest there
        self.agreed: list[int] = []

    def run(self, victims: list[int], after: int, delay_s: float) -> None:
        """Listen until all have ended; kill the victims some time after so many steps were agreed on."""
        watchdog, killing = threading.Timer(120, self.kill_all), threading.Timer(delay_s, self.end, [victims])
        watchdog.start()
        for line in self.lines:
            if begins := re.match(r"rank (\d+) of \d+ begins with step (\d+), digest (\w+)", line):
                self.begun[int(begins[1])] = (int(begins[2]), begins[3])
            elif holds := re.match(r"rank \d+: all ranks hold step (\d+)", line):
                if int(holds[1]) in self.agreed:
                    continue  # another rank said so before
                self.agreed.append(int(holds[1]))
                if victims and len(self.agreed) == after:
                    killing.start()
            say(f"    {line.rstrip()}")
        watchdog.cancel()
        for rank in self.ranks:
            rank.wait()

    def end(self, victims: list[int]) -> None:
        say(f"    --> SIGKILL of rank {', '.join(map(str, victims))}")
        for victim in victims:
            self.ranks[victim].kill()
        threading.Timer(0.5, self.kill_all).start()

    def kill_all(self) -> None:
        for rank in self.ranks:
            rank.kill()

    def check(self, newest: tuple[int, str] | None, victims: list[int]) -> None:
        """Hold what the ranks said against what was on disk before."""
        statuses = [rank.returncode for rank in self.ranks]
        if any(statuses[v] != -signal.SIGKILL for v in victims) or (not victims and any(statuses)):
            raise SystemExit(f"FAILED: the ranks ended with {statuses}, see errors.txt")
        begun = [self.begun.get(rank) for rank in range(len(self.ranks))]
        if len(set(begun)) != 1 or newest not in (None, begun[0]):
            raise SystemExit(f"FAILED: on disk was {newest}, the ranks began with {begun}")


def newest_on_disk(out: Path) -> tuple[int, str]:
    """Give the step to begin with, and the digest of the state there, of the newest checkpoint that all ranks hold."""
    with pccheck.open(out) as view:
        stored = view.checkpoint()
        return stored.step + 1, stored.metadata["digest"]


def demonstrate(arguments: argparse.Namespace) -> None:
    chance = random.Random(arguments.seed)
    shutil.rmtree(arguments.out, ignore_errors=True)
    arguments.out.mkdir(parents=True)
    agreed: list[int] = []
    for world, victims in ((4, [chance.randrange(4)]), (4, [0, 1, 2, 3]), (2, [])):
        newest = newest_on_disk(arguments.out) if agreed else None
        say(f"{world} ranks are started; on disk is {newest or 'nothing yet'}")
        if newest and newest[0] <= max(agreed):
            raise SystemExit(f"FAILED: all ranks had agreed on step {max(agreed)}, and it is lost")
        life = Life(world, arguments)
        life.run(victims, after=chance.randrange(1, 4), delay_s=chance.uniform(0.0, 0.2))
        life.check(newest, victims)
        agreed += life.agreed
    with pccheck.open(arguments.out) as view:  # this one process reads what 2 ranks stored
        last = view.restore()
    if last is None or last.step != arguments.steps - 1 or digest_of(last.state) != last.metadata["digest"]:
        raise SystemExit("FAILED: the last checkpoint is not the state that was saved")
    say(f"verified: of {len(agreed)} steps agreed on none was lost; each start had the state that was saved")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=61, help="steps in all, those before a restart included")
    parser.add_argument("--save-every", type=int, default=3, help="steps between checkpoints")
    parser.add_argument("--out", type=Path, default=Path("out/fsdp"), help="folder of the checkpoints")
    parser.add_argument("--seed", type=int, default=None, help="of the moments of the kills; None = another each time")
    (train if "RANK" in os.environ else demonstrate)(parser.parse_args())
