"""Who is measured: small classes behind one protocol (bench: imports torch, safetensors, pccheck).

A contender is made in one process and used in another, so that before `prepare` it holds nothing but its options.
Every peer makes its checkpoints durable (fsync) and keeps the newest one, as pccheck does with keep=1.
"""

from __future__ import annotations

import os
import shutil
import warnings
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Protocol, final

import safetensors.torch
import torch
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import async_save

import pccheck
from pccheck.storage.directory import Directory
from pccheck.testing.throttle import Rate, ThrottledVolume

from .states import State


class Contender(Protocol):
    """A way to save; one thread calls it."""

    name: str
    in_flight: int  # saves that may be under way at once; 0 = it never saves

    def prepare(self, directory: Path) -> None:
        """Open, in an empty directory."""

    def save(self, step: int, state: State) -> None:
        """Save, and return as soon as training may go on."""

    def fence(self) -> None:
        """Return as soon as the state may be changed."""

    def busy(self) -> bool:
        """Tell whether a save is not yet durable."""

    def finish(self) -> None:
        """Wait until every save is durable."""

    def restore(self, like: State) -> State | None:
        """Close, and give the newest checkpoint as a new process would read it; None = this one never saves."""


@final
class Nothing:
    """A loop without checkpoints: what the others are compared with, and, compared with itself, the noise."""

    name = "none"
    in_flight = 0

    def prepare(self, directory: Path) -> None: ...

    def save(self, step: int, state: State) -> None: ...

    def fence(self) -> None: ...

    def busy(self) -> bool:
        return False

    def finish(self) -> None: ...

    def restore(self, like: State) -> State | None:
        return None


@final
class Pccheck:
    """pccheck.

    Args:
        snapshot: "lazy" or "copy".
        in_flight: checkpoints at once.
        buffer_bytes: the pool; None = pccheck's own choice.
        writers: threads that write.
        writers_per_checkpoint: of these, how many may be at one checkpoint; None = all.
        total: (bytes per second, seconds) in turn of a medium made slow by `pccheck.testing.throttle`; () = not slow.
        stream_bytes_per_s: of each checkpoint's stream on that medium; 0 = not limited.
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
    ) -> None:
        self.name = f"pccheck {snapshot}, in_flight {in_flight}"
        self.in_flight = in_flight
        self._options: dict[str, Any] = {
            "snapshot": snapshot,
            "in_flight": in_flight,
            "buffer_bytes": buffer_bytes,
            "writers": writers,
            "writers_per_checkpoint": writers_per_checkpoint,
        }
        self._total, self._stream_bytes_per_s = total, stream_bytes_per_s

    def prepare(self, directory: Path) -> None:
        self._directory = directory
        where: Any = directory
        if self._total or self._stream_bytes_per_s:
            inner = Directory(os.fspath(directory), create=True, write=True)
            rate = Rate(self._total) if self._total else None
            where = ThrottledVolume(inner, total=rate, stream_bytes_per_s=self._stream_bytes_per_s or None)
        self.checkpointer = pccheck.Checkpointer(where, **self._options)
        self.last: pccheck.Save | None = None

    def save(self, step: int, state: State) -> None:
        self.last = self.checkpointer.save(step, state)

    def fence(self) -> None:
        self.checkpointer.fence()

    def busy(self) -> bool:
        return self.last is not None and not self.last.durable.done()

    def finish(self) -> None:
        self.checkpointer.wait()

    def restore(self, like: State) -> State | None:
        self.checkpointer.close()
        with pccheck.open(self._directory) as view:
            restored = view.restore()
        assert restored is not None, "nothing was saved"
        state: State = restored.state
        return state


@final
class TorchSave:
    """torch.save into a new file, fsync, rename over the old one, fsync the directory."""

    name = "torch.save + fsync"
    in_flight = 1

    def prepare(self, directory: Path) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self._directory = directory

    def save(self, step: int, state: State) -> None:
        with (self._directory / "new").open("wb") as file:
            torch.save(state, file)
        _commit_file(self._directory)

    def fence(self) -> None: ...

    def busy(self) -> bool:
        return False

    def finish(self) -> None: ...

    def restore(self, like: State) -> State | None:
        state: State = torch.load(self._directory / "checkpoint", weights_only=True)
        return state


@final
class SafeTensors:
    """safetensors into a new file, fsync, rename over the old one, fsync the directory."""

    name = "safetensors + fsync"
    in_flight = 1

    def prepare(self, directory: Path) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self._directory = directory

    def save(self, step: int, state: State) -> None:
        flat = {f"{group}/{name}": t for group, tensors in state.items() for name, t in tensors.items()}
        safetensors.torch.save_file(flat, self._directory / "new")
        _commit_file(self._directory)

    def fence(self) -> None: ...

    def busy(self) -> bool:
        return False

    def finish(self) -> None: ...

    def restore(self, like: State) -> State | None:
        state: State = {}
        for path, tensor in safetensors.torch.load_file(self._directory / "checkpoint").items():
            group, name = path.split("/", 1)
            state.setdefault(group, {})[name] = tensor
        return state


@final
class DcpAsync:
    """torch.distributed.checkpoint.async_save in a thread, one at a time, each in a folder of its own."""

    name = "DCP async_save, thread"
    in_flight = 1

    def prepare(self, directory: Path) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self._directory = directory
        self._newest: Path | None = None
        self._running: tuple[Future[Any], Path] | None = None
        warnings.filterwarnings("ignore", module="torch.distributed")  # that no process group is set up: it is meant

    def save(self, step: int, state: State) -> None:
        self.finish()
        path = self._directory / f"step-{step}"
        future: Any = async_save(state, checkpoint_id=path, no_dist=True)
        self._running = (future, path)

    def fence(self) -> None: ...

    def busy(self) -> bool:
        return self._running is not None and not self._running[0].done()

    def finish(self) -> None:
        if self._running is None:
            return
        future, path = self._running
        future.result()
        self._running = None
        if self._newest is not None and self._newest != path:
            shutil.rmtree(self._newest)
        self._newest = path

    def restore(self, like: State) -> State | None:
        state: State = {group: {n: torch.empty_like(t) for n, t in tensors.items()} for group, tensors in like.items()}
        load(state, checkpoint_id=self._newest, no_dist=True)
        return state


def _commit_file(directory: Path) -> None:
    """Make `new` durable and give it the name `checkpoint`."""
    for path, flags in ((directory / "new", os.O_RDWR), (directory, os.O_RDONLY)):
        fd = os.open(path, flags)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)
        if path != directory:
            path.rename(directory / "checkpoint")


def peers() -> list[Contender]:
    """Give the peers."""
    return [TorchSave(), SafeTensors(), DcpAsync()]
