"""Who is measured: pccheck, behind the one protocol of all contenders (bench: imports torch, pccheck, states, trained).

A contender is made in one process and used in another, so that before `prepare` it holds nothing but its options.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol, final

import pccheck_torch
from torch.nn import Module
from torch.optim import Optimizer

import pccheck
from pccheck.events import SnapshotPicked
from pccheck.ranks.coordination import Coordinator
from pccheck.storage.directory import Directory
from pccheck.testing.throttle import Rate, ThrottledVolume

from .raw import RawFile
from .states import State, differences
from .trained import copies, local


class Saver(Protocol):
    """A way to save a state of some kind, that of `states` where nothing else is said; one thread calls it."""

    name: str
    in_flight: int  # saves that may be under way at once; 0 = it never saves

    def prepare(self, directory: Path) -> None:
        """Open, in an empty directory."""

    def save(self, step: int, state: Any) -> None:
        """Save, and return as soon as training may go on."""

    def fence(self) -> None:
        """Return as soon as the state may be changed."""

    def finish(self) -> None:
        """Wait until every save is durable."""

    def restore(self, like: Any) -> Any:
        """Close, and give the newest checkpoint as a new process would read it; None = this one never saves."""


class Contender(Saver, Protocol):
    """A way to save a model and what optimizes it."""

    def train(self, model: Module, optimizer: Optimizer) -> Any:
        """Hear of what will be trained, after `prepare`; give the state to save."""

    def busy(self) -> bool:
        """Tell whether a save is not yet durable."""


@final
class Nothing:
    """A loop without checkpoints: what the others are compared with, and, compared with itself, the noise."""

    name = "none"
    in_flight = 0

    def prepare(self, directory: Path) -> None: ...

    def train(self, model: Module, optimizer: Optimizer) -> Any: ...

    def save(self, step: int, state: State) -> None: ...

    def fence(self) -> None: ...

    def busy(self) -> bool:
        return False

    def finish(self) -> None: ...

    def restore(self, like: State) -> State | None:
        return None


@final
class RawWrite:
    """One plain write of as many bytes, and a sync: what the disk takes from a trainer, whoever saves."""

    name = "raw write"
    in_flight = 0

    def prepare(self, directory: Path) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self._path, self._thread = directory / "raw", threading.Thread()

    def train(self, model: Module, optimizer: Optimizer) -> Any:
        size = -(-sum(p.nbytes for p in model.parameters()) // 4096) * 4096
        self._file = RawFile(self._path, size, size, 1)

    def save(self, step: int, state: State) -> None:
        self._thread = threading.Thread(target=self._file.write)
        self._thread.start()

    def fence(self) -> None: ...

    def busy(self) -> bool:
        return self._thread.is_alive()

    def finish(self) -> None:
        if self.busy():
            self._thread.join()

    def restore(self, like: State) -> State | None:
        self._file.close()
        return None


@final
class Pccheck:
    """pccheck.

    Args:
        snapshot: "copy", "lazy", "device" or "auto"; what is trained is attached where that makes a difference.
        in_flight: checkpoints at once.
        buffer_bytes: the pool; None = pccheck's own choice.
        writers: threads that write.
        writers_per_checkpoint: of these, how many may be at one checkpoint; None = all.
        total: (bytes per second, seconds) in turn of a medium made slow by `pccheck.testing.throttle`; () = not slow.
        stream_bytes_per_s: of each checkpoint's stream on that medium; 0 = not limited.
        over: makes the coordinator of this rank, given the directory; None = one process alone.
        whole: save a TrainingState, random generators included; else a state dict that is made once, as of the peers.
    """

    def __init__(
        self,
        snapshot: str = "lazy",
        in_flight: int = 2,
        *,
        buffer_bytes: int | None = None,
        writers: int = 2,
        writers_per_checkpoint: int | None = None,
        total: tuple[tuple[float, float], ...] = (),
        stream_bytes_per_s: float = 0.0,
        over: Callable[[Path], Coordinator] | None = None,
        whole: bool = False,
    ) -> None:
        self.name = f"pccheck {snapshot}, in_flight {in_flight}" + (", TrainingState" if whole else "")
        self.in_flight = in_flight
        self._options: dict[str, Any] = {
            "snapshot": snapshot,
            "in_flight": in_flight,
            "buffer_bytes": buffer_bytes,
            "writers": writers,
            "writers_per_checkpoint": writers_per_checkpoint,
        }
        self._total, self._stream_bytes_per_s = total, stream_bytes_per_s
        self._over, self._whole = over, whole
        self.picked = snapshot  # the mode that was told of last

    def prepare(self, directory: Path) -> None:
        self._directory = directory
        where: Any = directory
        if self._total or self._stream_bytes_per_s:
            inner = Directory(os.fspath(directory), create=True, write=True)
            rate = Rate(self._total) if self._total else None
            where = ThrottledVolume(inner, total=rate, stream_bytes_per_s=self._stream_bytes_per_s or None)
        if self._over is not None:
            self._options["coordinator"] = self._over(directory)
        if self.picked == "auto":
            self._options["observer"] = self._observe
        self.checkpointer = pccheck.Checkpointer(where, **self._options)
        self.last: pccheck.Save | None = None

    def _observe(self, event: Any) -> None:
        if isinstance(event, SnapshotPicked):
            self.picked = event.mode

    def train(self, model: Module, optimizer: Optimizer) -> Any:
        if self._options["snapshot"] in ("lazy", "auto"):
            pccheck_torch.attach(self.checkpointer, optimizer)
        self._training = pccheck_torch.TrainingState(model=model, optimizer=optimizer)
        return self._training if self._whole else {"model": model.state_dict()}

    def save(self, step: int, state: State) -> None:
        self.last = self.checkpointer.save(step, state)

    def fence(self) -> None:
        self.checkpointer.fence()

    def busy(self) -> bool:
        return self.last is not None and not self.last.durable.done()

    def finish(self) -> None:
        self.checkpointer.wait()

    def restore(self, like: State) -> State | None:
        if self._over is not None:  # the ranks restore together, each in place what it holds
            assert self._training.restore(self.checkpointer), "nothing was saved"
            self.checkpointer.close()
            return like
        self.checkpointer.close()
        with pccheck.open(self._directory) as view:
            restored = view.restore()
        assert restored is not None, "nothing was saved"
        state: State = restored.state
        return state


def check_restored(contender: Contender, model: Module, optimizer: Optimizer, step: int, state: Any) -> None:
    """Save, change the state at once, and compare what is restored, of this rank, with what was saved.

    Raises AssertionError if it is not the same in every bit.
    """
    expected = copies(model)
    contender.save(step, state)
    contender.fence()
    optimizer.step()
    contender.finish()
    restored = contender.restore({"model": model.state_dict()})
    if restored is None:
        assert contender.in_flight == 0, f"{contender.name} saves nothing"
        return
    wrong = differences({"model": {n: local(t) for n, t in restored["model"].items()}}, {"model": expected})
    assert not wrong, f"{contender.name} restored another state than it was given: {wrong[:5]}"
