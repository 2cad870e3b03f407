"""Train a small GPT on the Python standard library, with a checkpoint every few steps. Kill it: it resumes by itself.

    python examples/torch_train.py --steps 200 --save-every 5 --out out/train

A second start with the same --out goes on after the newest checkpoint, and ends, bit for bit, where a run that was
never killed ends: the state holds all that the next step depends on, the random generators included.
"""

from __future__ import annotations

import argparse
import functools
import math
import random
import sysconfig
import time
from concurrent.futures import Future
from pathlib import Path

import numpy as np
import pccheck_torch
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

import pccheck

CONTEXT, BATCH, WIDTH, HEADS, LAYERS, DROPOUT = 64, 8, 160, 5, 4, 0.1


class Block(nn.Module):
    """One transformer layer: attention to what came before, then an MLP, both with dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in self.qkv(self.norm1(x)).chunk(3, -1))
        attention = F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=DROPOUT if self.training else 0.0)
        x = x + F.dropout(self.out(attention.transpose(1, 2).flatten(2)), DROPOUT, self.training)
        return x + F.dropout(self.mlp(self.norm2(x)), DROPOUT, self.training)


class GPT(nn.Module):
    """A byte-level GPT of 1.3 million parameters; the embedding is also the output layer (one tensor, stored once)."""

    def __init__(self) -> None:
        super().__init__()
        self.token, self.place = nn.Embedding(256, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.Sequential(*(Block() for _ in range(LAYERS)))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 256, bias=False)
        for embedding in (self.token, self.place):
            nn.init.normal_(embedding.weight, std=0.02)
        self.head.weight = self.token.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.token(tokens) + self.place.weight
        return self.head(self.norm(self.blocks(x)))


class Text(Dataset[tuple[Tensor, Tensor]]):
    """The standard library's own sources, cut into windows; where exactly is drawn anew whenever one is asked for."""

    def __init__(self, limit: int = 2 << 20) -> None:
        files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
        self.bytes = np.frombuffer(b"".join(f.read_bytes() for f in files)[:limit], np.uint8)

    def __len__(self) -> int:
        return len(self.bytes) // CONTEXT - 2

    def __getitem__(self, window: int) -> tuple[Tensor, Tensor]:
        start = window * CONTEXT + random.randrange(CONTEXT)  # jitter: new cuts in every epoch
        row = torch.from_numpy(self.bytes[start : start + CONTEXT + 1].astype(np.int64))
        return row[:-1], row[1:]


def learning_rate(step: int, steps: int, warmup: int = 20) -> float:
    """Linear warm-up, then half a cosine down to a tenth, as a factor."""
    if step < warmup:
        return (step + 1) / warmup
    return 0.55 + 0.45 * math.cos(math.pi * min(1.0, (step - warmup) / max(1, steps - warmup)))


def train(arguments: argparse.Namespace) -> None:
    random.seed(arguments.seed)
    np.random.seed(arguments.seed)
    torch.manual_seed(arguments.seed)
    torch.set_num_threads(1)  # with the deterministic algorithms below: the same bits in every run on this machine
    torch.use_deterministic_algorithms(True)

    steps: int = arguments.steps
    model, text, losses = GPT(), Text(), list[float]()
    sampler = pccheck_torch.ResumableSampler(text, seed=arguments.seed)
    loader = pccheck_torch.ResumableLoader(DataLoader(text, BATCH, sampler=sampler, drop_last=True))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.95))
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: learning_rate(step, steps))
    state = pccheck_torch.TrainingState(
        model=model, optimizer=optimizer, scheduler=schedule, loader=loader, losses=losses
    )

    say(f"opening {arguments.out}")
    with pccheck.Checkpointer(arguments.out, in_flight=2, keep=1) as ck:
        if arguments.snapshot == "lazy":
            pccheck_torch.attach(ck, optimizer)  # from now on optimizer.step() waits for captures, and save() does not
        first = state.restore(ck)
        say(f"resumed after step {first - 1}" if first else "starting anew: no checkpoint yet")

        begin, in_save, saves = time.perf_counter(), 0.0, 0
        for step, (tokens, targets) in zip(range(first, steps), loader.endless(), strict=False):
            loss = F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
            losses.append(loss.item())
            say(f"step {step} loss {losses[-1]:.4f}")

            if (step + 1) % arguments.save_every == 0 or step == steps - 1:
                say(f"saving step {step}")
                before = time.perf_counter()
                save = ck.save(step, state, metadata={"loss": f"{losses[-1]:.4g}"})
                in_save, saves = in_save + time.perf_counter() - before, saves + 1
                save.durable.add_done_callback(functools.partial(report, step, before))
        seconds, in_gate = time.perf_counter() - begin, ck.stats().fence_wait_s
    if saves:
        say(
            f"{saves} checkpoints in {seconds:.1f} s held the loop for {1e3 * in_save / saves:.1f} ms in save "
            f"and {1e3 * in_gate / saves:.1f} ms in step each: {100 * (in_save + in_gate) / seconds:.2f} % of its time"
        )


def say(line: str) -> None:
    print(line + "\n", end="", flush=True)  # one write: lines of two threads do not mix


def report(step: int, begun: float, durable: Future[int]) -> None:
    if durable.exception() is None:  # else the next save, or the end of the `with` block, raises it
        say(f"durable step {step} after {1e3 * (time.perf_counter() - begun):.0f} ms")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=200, help="steps in all, those before a restart included")
    parser.add_argument("--save-every", type=int, default=5, help="steps between checkpoints")
    parser.add_argument("--out", type=Path, default=Path("out/train"), help="folder of the checkpoints")
    parser.add_argument("--snapshot", choices=["lazy", "copy"], default="lazy", help="when the state is copied")
    parser.add_argument("--seed", type=int, default=0)
    train(parser.parse_args())
