"""Several ranks of one job in this process, each in a thread of its own where all must call at once."""

from __future__ import annotations

import atexit
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import numpy as np

import pccheck
from pccheck.errors import PccheckError

WAIT_S = 30.0


class Job:
    """Ranks over one root; `nodes` = a root for each rank, as on hosts with disks of their own."""

    def __init__(self, root: Path, world: int, *, nodes: bool = False, **options) -> None:
        self.root, self.world, self.nodes = root, world, nodes
        self.options = {"agree_timeout_s": WAIT_S, "chunk_bytes": 4096, "exit_timeout_s": 5.0, **options}
        self.pool = ThreadPoolExecutor(world)
        self.ranks: list[pccheck.Checkpointer] = []
        self.points: dict[int, object] = {}  # rank -> what to call at each point of a commit

    def place(self, rank: int) -> Path:
        return self.root / f"node-{rank}" if self.nodes else self.root / "ck"

    def open(self, rank: int, **options) -> pccheck.Checkpointer:
        coordinator = pccheck.SharedDirectory(self.root / "told", rank=rank, world=self.world)
        at = self.points.get(rank)
        return pccheck.Checkpointer(
            self.place(rank), coordinator=coordinator, _at=at, **{**self.options, **options}
        )  # fmt: skip

    def start(self) -> Job:
        """Open all ranks; what one raises is raised."""
        self.ranks = self.outcomes(self.open, raises=True)
        return self

    def outcomes(self, call, *, ranks=None, raises=False) -> list:
        """Call for each rank number at once; give results, or the errors of pccheck."""
        futures = [self.pool.submit(call, r) for r in (range(self.world) if ranks is None else ranks)]
        errors = [f.exception(2 * WAIT_S) for f in futures]
        if raises:
            done = [f.result() for f, e in zip(futures, errors, strict=True) if e is None]
            if any(errors):
                for ck in done:
                    with suppress(PccheckError):
                        ck.close()
                raise next(e for e in errors if e)
            return done
        for error in errors:
            if error is not None and not isinstance(error, PccheckError):
                raise error
        return [e or f.result() for f, e in zip(futures, errors, strict=True)]

    def all(self, call) -> list:
        """Call for each rank's Checkpointer at once, and give the results; the first error is raised."""
        futures = [self.pool.submit(call, ck) for ck in self.ranks]
        return [f.result(2 * WAIT_S) for f in futures]

    def save(self, step: int, **how) -> list[pccheck.Save]:
        return self.all(lambda ck: ck.save(step, state(ck.rank, step), **how))

    def commit(self, *steps: int) -> None:
        for step in steps:
            for save in self.save(step):
                save.durable.result(WAIT_S)

    def restore(self, **how) -> list:
        return self.all(lambda ck: ck.restore(**how))

    def close(self) -> None:
        self.outcomes(lambda r: self.ranks[r].close(), ranks=range(len(self.ranks)))
        self.ranks = []

    def kill(self) -> None:
        """Leave the stores as a death of all ranks would, as far as one process can."""
        for ck in self.ranks:
            ck._store.close()
            ck._agreement._channel._ending = True
            atexit.unregister(ck._life._at_exit)
        self.ranks = []

    def end(self) -> None:
        with suppress(PccheckError):
            self.close()
        self.pool.shutdown()


def state(rank: int, step: int) -> dict:
    return {"rank": rank, "step": step, "x": np.full(2000, 1000.0 * step + rank)}


def assert_states(restored: list, step: int, world: int) -> None:
    """Every rank has the whole state of this step, of the rank of a world of this size that it stands for."""
    for rank, r in enumerate(restored):
        assert r is not None
        assert r.step == step
        expected = state(rank % world, step)
        assert (r.state["rank"], r.state["step"]) == (expected["rank"], step)
        assert np.array_equal(r.state["x"], expected["x"])
