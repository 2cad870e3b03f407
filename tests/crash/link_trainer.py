"""Training processes with a store of links that kill themselves at a named point; started by tests.crash.processes.

    link_trainer.py serve       import once, then fork a trainer for each JSON line of options on standard input

Steps live in <directory>/<step>, finished when durable; the last three are left. Beside what trainer.py tells, it tells
"finished STEP", and "deleting STEP" before it does so.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from trainer import CHUNK_BYTES, DATA_BYTES, killer, serve, tell

import pccheck
from pccheck import links
from pccheck.testing.scenario import fingerprint, make_state

LEFT = 3


def clear(directory: Path, store: Path) -> int:
    """Remove what was not finished, and give the step to begin with."""
    steps = [int(folder.name) for folder in directory.iterdir() if folder.name.isdecimal()]
    for step in steps:
        if not (directory / str(step) / "pccheck.json").exists():
            links.drop_stale(directory / str(step), store)
            shutil.rmtree(directory / str(step))
    return max(steps, default=-1) + 1


def save(ck: pccheck.Checkpointer, directory: Path, step: int) -> None:
    state, folder = make_state(step, data_bytes=DATA_BYTES), directory / str(step)
    tell("saving", step, fingerprint(state).hex())

    def place() -> Path:
        folder.mkdir()
        return folder / links.rank_name(0)

    saved = ck.save(step, state, link=place)

    def resolved(future) -> None:
        if future.exception() is None:
            tell("durable", saved.counter, step)
            links.finish(folder, 1)
            tell("finished", step)

    saved.durable.add_done_callback(resolved)


def train(options: dict) -> None:
    tell("pid", os.getpid())
    directory = Path(options["directory"])
    store = directory / ".pccheck/default/process-00000"
    first = clear(directory, store)
    with pccheck.Checkpointer(
        store, keep=0, in_flight=options.get("in_flight", 2), chunk_bytes=CHUNK_BYTES, lock_timeout_s=0,
        _at=killer(options.get("point"), options.get("nth", 1)),
    ) as ck:  # fmt: skip
        for step in range(first, first + options.get("saves", 8)):
            save(ck, directory, step)
            finished = [f for f in directory.iterdir() if (f / "pccheck.json").exists()]
            for folder in sorted(finished, key=lambda f: int(f.name))[:-LEFT]:
                tell("deleting", folder.name)
                shutil.rmtree(folder)
    tell("ended")


if __name__ == "__main__":
    serve(train)
