"""What else there is, behind the same protocol (bench: imports torch, safetensors, torch_checkpointing, contenders).

Every peer keeps the newest checkpoint only, as pccheck does with keep=1, and makes it durable (fsync), unless its name
says that it cannot.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import warnings
from abc import ABC, abstractmethod
from concurrent.futures import Future
from pathlib import Path
from typing import Any, cast, final

import safetensors.torch
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType, async_save
from torch.nn import Module
from torch.optim import Optimizer

from .contenders import Contender
from .states import State


class _Peer(ABC):
    """What is the same for all peers; each keeps its checkpoints in a directory that it makes."""

    name: str
    in_flight = 1

    def prepare(self, directory: Path) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self._directory = directory

    def train(self, model: Module, optimizer: Optimizer) -> Any:
        """Give the state dict, made once: it holds the parameters, and making it at every save would cost more."""
        return {"model": model.state_dict()}

    def fence(self) -> None:
        return

    @abstractmethod
    def save(self, step: int, state: State) -> None: ...

    @abstractmethod
    def busy(self) -> bool: ...

    @abstractmethod
    def finish(self) -> None: ...

    @abstractmethod
    def restore(self, like: State) -> State | None: ...


class _InOneFile(_Peer):
    """Saves while the trainer waits: a new file, fsync, rename over the old one, fsync the directory."""

    def save(self, step: int, state: State) -> None:
        new = self._directory / "new"
        self._write(new, state)
        _sync(new, os.O_RDWR)
        new.rename(self._directory / "checkpoint")
        _sync(self._directory, os.O_RDONLY)

    def busy(self) -> bool:
        return False

    def finish(self) -> None:
        return

    def restore(self, like: State) -> State | None:
        return self._read(self._directory / "checkpoint")

    @abstractmethod
    def _write(self, path: Path, state: State) -> None: ...

    @abstractmethod
    def _read(self, path: Path) -> State: ...


def _sync(path: Path, flags: int) -> None:
    fd = os.open(path, flags)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


@final
class TorchSave(_InOneFile):
    """torch.save."""

    name = "torch.save + fsync"

    def _write(self, path: Path, state: State) -> None:
        with path.open("wb") as file:
            torch.save(state, file)

    def _read(self, path: Path) -> State:
        state: State = torch.load(path, weights_only=True)
        return state


@final
class SafeTensors(_InOneFile):
    """safetensors, of which each tensor is called `group/name`."""

    name = "safetensors + fsync"

    def _write(self, path: Path, state: State) -> None:
        flat = {f"{group}/{name}": t for group, tensors in state.items() for name, t in tensors.items()}
        safetensors.torch.save_file(flat, path)

    def _read(self, path: Path) -> State:
        state: State = {}
        for tensor_path, tensor in safetensors.torch.load_file(path).items():
            group, name = tensor_path.split("/", 1)
            state.setdefault(group, {})[name] = tensor
        return state


class _InFolders(_Peer):
    """Saves in the background, one at a time, each into a folder of its own; then the one before is removed."""

    def prepare(self, directory: Path) -> None:
        super().prepare(directory)
        self._newest: Path | None = None
        self._running: tuple[Future[Any], Path] | None = None

    def save(self, step: int, state: State) -> None:
        self.finish()
        path = self._directory / f"step-{step}"
        self._running = (self._begin(path, state), path)

    def busy(self) -> bool:
        return self._running is not None and not self._running[0].done()

    def finish(self) -> None:
        if self._running is None:
            return
        future, path = self._running
        future.result()
        self._running = None
        if self._newest is not None and self._newest != path and self._removes():
            shutil.rmtree(self._newest)
        self._newest = path

    def restore(self, like: State) -> State | None:
        state: State = {group: {n: torch.empty_like(t) for n, t in tensors.items()} for group, tensors in like.items()}
        assert self._newest is not None, "nothing was saved"
        self._load(self._newest, state)
        return state

    def _removes(self) -> bool:
        """Tell whether it is this process that removes."""
        return True

    @abstractmethod
    def _begin(self, path: Path, state: State) -> Future[Any]: ...

    @abstractmethod
    def _load(self, path: Path, into: State) -> None: ...


@final
class DcpAsync(_InFolders):
    """torch.distributed.checkpoint.async_save, one at a time, as it demands.

    Where there are ranks, they have a gloo group of their own for it.

    Args:
        process: it saves in a process, which gets the state in shared memory that is kept; else in a thread.
    """

    def __init__(self, *, process: bool = False) -> None:
        self.name = f"DCP async_save, {'process' if process else 'thread'}"
        self._process = process

    def prepare(self, directory: Path) -> None:
        super().prepare(directory)
        self._how: dict[str, Any] = {"no_dist": True}
        warnings.filterwarnings("ignore", module="torch.distributed")  # that no process group is set up: it is meant
        if self._process:
            os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # its process tells of every request there
            os.environ["GLOO_SOCKET_IFNAME"] = "lo"  # and wants a group, even of one
            dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
            shared = StagingOptions(
                use_pinned_memory=False, use_shared_memory=True, use_async_staging=False, use_non_blocking_copy=False
            )
            self._how |= {
                "async_stager": DefaultStager(shared), "async_checkpointer_type": AsyncCheckpointerType.PROCESS,
            }  # fmt: skip
        elif dist.is_initialized():
            self._how = {"process_group": dist.new_group(backend="gloo")}

    def _begin(self, path: Path, state: State) -> Future[Any]:
        return cast("Future[Any]", async_save(state, checkpoint_id=path, **self._how))

    def _removes(self) -> bool:
        return "no_dist" in self._how or dist.get_rank() == 0

    def _load(self, path: Path, into: State) -> None:
        load(into, checkpoint_id=path, no_dist="no_dist" in self._how)


@final
class TorchCheckpointing(_InFolders):
    """torch_checkpointing: copied to shared memory in a thread, written by a process; its lock() is the fence.

    Its page cache is never synced: what it calls done, a power cut may take.
    """

    name = "torch_checkpointing (no fsync)"

    @staticmethod
    def missing() -> bool:
        """Tell whether it is not installed."""
        return importlib.util.find_spec("torch_checkpointing") is None

    def prepare(self, directory: Path) -> None:
        from torch_checkpointing import CheckpointManager
        from torch_checkpointing.config import AsyncCheckpointSaverConfig
        from torch_checkpointing.staging import CheckpointStagerConfig
        from torch_checkpointing.storage.filesystem import LocalFileSystemStorageConfig

        super().prepare(directory)
        staging = CheckpointStagerConfig(use_pinned_memory=False, use_non_blocking_copy=False)
        self._manager: Any = CheckpointManager.Config(
            save=AsyncCheckpointSaverConfig(staging_config=staging),
            storage_config=LocalFileSystemStorageConfig(use_direct_io=False),  # its default fails on ext4: EINVAL
        ).build()

    def fence(self) -> None:
        with self._manager.lock():
            pass

    def _begin(self, path: Path, state: State) -> Future[Any]:
        future: Future[Any] = self._manager.save(os.fspath(path), state)
        return future

    def _load(self, path: Path, into: State) -> None:
        self._manager.load(os.fspath(path), into=into, strict=True)
        self._manager.close()


def peers() -> list[Contender]:
    """Give the peers."""
    return [TorchSave(), SafeTensors(), DcpAsync()]
