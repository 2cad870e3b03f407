"""Training processes that save in a loop and kill themselves at a named point; started by tests.crash.processes.

    trainer.py serve            import once, then fork a trainer for each JSON line of options on standard input
    trainer.py torch OPTIONS    train a small model with DataLoader workers

A trainer tells on standard output, each line written at once by os.write, so that it survives its SIGKILL:
"pid N", "restored COUNTER STEP", "saving STEP FINGERPRINT", "durable COUNTER STEP", "workers PID PID", "ended".
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable

import pccheck
from pccheck.testing.scenario import fingerprint, make_state

DATA_BYTES = 200_000
CHUNK_BYTES = 64 * 1024


def tell(*words: object) -> None:
    os.write(1, (" ".join(map(str, words)) + "\n").encode())


def killer(point: str | None, nth: int):
    """Give the hook that ends this process at the nth time that a point of the commit is reached."""
    lock, seen = threading.Lock(), [0]

    def at(here: str) -> None:
        if here == point:
            with lock:
                seen[0] += 1
                if seen[0] == nth:
                    os.kill(os.getpid(), signal.SIGKILL)

    return at


def open_store(options: dict) -> pccheck.Checkpointer:
    return pccheck.Checkpointer(
        options["directory"],
        in_flight=options.get("in_flight", 2),
        keep=options.get("keep", 1),
        keep_every=options.get("keep_every"),
        chunk_bytes=CHUNK_BYTES,
        pipeline=options.get("pipeline", "auto"),
        lock_timeout_s=0,
        _at=killer(options.get("point"), options.get("nth", 1)),
    )


def save(ck: pccheck.Checkpointer, step: int, state: object) -> None:
    tell("saving", step, fingerprint(state).hex())
    saved = ck.save(step, state)

    def resolved(future) -> None:
        if future.exception() is None:
            tell("durable", saved.counter, step)

    saved.durable.add_done_callback(resolved)


def train(options: dict) -> None:
    tell("pid", os.getpid())
    with open_store(options) as ck:
        restored = ck.restore()
        start = restored.step + 1 if restored else 0
        if restored:
            tell("restored", restored.counter, restored.step)
        for step in range(start, start + options.get("saves", 8)):
            save(ck, step, make_state(step, data_bytes=DATA_BYTES))
    tell("ended")


def train_torch(options: dict) -> None:
    import torch
    from torch.utils.data import DataLoader, TensorDataset

    torch.manual_seed(0)
    tell("pid", os.getpid())
    model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 1))
    optimizer = torch.optim.AdamW(model.parameters())
    with open_store(options) as ck:
        restored = ck.restore()
        start = 0
        if restored:
            tell("restored", restored.counter, restored.step)
            model.load_state_dict(restored.state["model"])
            optimizer.load_state_dict(restored.state["optimizer"])
            start = restored.step + 1
        ck.save(start, {"model": model.state_dict(), "optimizer": optimizer.state_dict()}).durable.result(60)
        data = TensorDataset(torch.randn(4096, 64), torch.randn(4096, 1))
        loader = DataLoader(data, batch_size=32, num_workers=2, persistent_workers=True, multiprocessing_context="fork")
        batches = iter(loader)
        tell("workers", *(worker.pid for worker in batches._workers))
        for step in range(start + 1, start + 1 + options.get("saves", 8)):
            x, y = next(batches)
            optimizer.zero_grad()
            torch.nn.functional.mse_loss(model(x), y).backward()
            optimizer.step()
            save(ck, step, {"model": model.state_dict(), "optimizer": optimizer.state_dict()})
        if options.get("linger"):
            tell("lingering")
            time.sleep(60)
    tell("ended")


def serve(train: Callable[[dict], None]) -> None:
    """Fork a trainer for each line of options, one after the other."""
    for line in sys.stdin:
        child = os.fork()
        if child == 0:
            try:
                train(json.loads(line))
            except BaseException:
                traceback.print_exc()
                os._exit(1)
            os._exit(0)
        _, status = os.waitpid(child, 0)
        tell("exit", os.waitstatus_to_exitcode(status))


if __name__ == "__main__":
    if sys.argv[1] == "serve":
        serve(train)
    else:
        train_torch(json.loads(sys.argv[2]))
