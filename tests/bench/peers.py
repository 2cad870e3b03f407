"""What else there is, behind the same protocol (bench: imports torch, safetensors, torch_checkpointing, contenders).

Every peer keeps the newest checkpoint only, as pccheck does with keep=1, and makes it durable (fsync), unless its name
says that it cannot.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import warnings
from concurrent.futures import Future
from pathlib import Path
from typing import Any, final

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


@final
class TorchSave:
    """torch.save into a new file, fsync, rename over the old one, fsync the directory."""

    name = "torch.save + fsync"
    in_flight = 1

    def prepare(self, directory: Path) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self._directory = directory

    def train(self, model: Module, optimizer: Optimizer) -> Any:
        return _held(model)

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

    def train(self, model: Module, optimizer: Optimizer) -> Any:
        return _held(model)

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
    """torch.distributed.checkpoint.async_save, one at a time, as it demands, each in a folder of its own.

    Where there are ranks, they have a gloo group of their own for it.

    Args:
        process: it saves in a process, which gets the state in shared memory that is kept; else in a thread.
    """

    in_flight = 1

    def __init__(self, *, process: bool = False) -> None:
        self.name = f"DCP async_save, {'process' if process else 'thread'}"
        self._process = process

    def prepare(self, directory: Path) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self._directory = directory
        self._newest: Path | None = None
        self._running: tuple[Future[Any], Path] | None = None
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

    def train(self, model: Module, optimizer: Optimizer) -> Any:
        return _held(model)

    def save(self, step: int, state: State) -> None:
        self.finish()
        path = self._directory / f"step-{step}"
        future: Any = async_save(state, checkpoint_id=path, **self._how)
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
        if self._newest is not None and self._newest != path and ("no_dist" in self._how or dist.get_rank() == 0):
            shutil.rmtree(self._newest)
        self._newest = path

    def restore(self, like: State) -> State | None:
        state: State = {group: {n: torch.empty_like(t) for n, t in tensors.items()} for group, tensors in like.items()}
        load(state, checkpoint_id=self._newest, no_dist="no_dist" in self._how)
        return state


@final
class TorchCheckpointing:
    """torch_checkpointing: copied to shared memory in a thread, written by a process; its lock() is the fence.

    Its page cache is never synced: what it calls done, a power cut may take.
    """

    name = "torch_checkpointing (no fsync)"
    in_flight = 1

    @staticmethod
    def missing() -> bool:
        """Tell whether it is not installed."""
        return importlib.util.find_spec("torch_checkpointing") is None

    def prepare(self, directory: Path) -> None:
        from torch_checkpointing import CheckpointManager
        from torch_checkpointing.config import AsyncCheckpointSaverConfig
        from torch_checkpointing.staging import CheckpointStagerConfig
        from torch_checkpointing.storage.filesystem import LocalFileSystemStorageConfig

        directory.mkdir(parents=True, exist_ok=True)
        self._directory = directory
        self._newest: Path | None = None
        self._running: tuple[Future[Any], Path] | None = None
        staging = CheckpointStagerConfig(use_pinned_memory=False, use_non_blocking_copy=False)
        self._manager: Any = CheckpointManager.Config(
            save=AsyncCheckpointSaverConfig(staging_config=staging),
            storage_config=LocalFileSystemStorageConfig(use_direct_io=False),  # its default fails on ext4: EINVAL
        ).build()

    def train(self, model: Module, optimizer: Optimizer) -> Any:
        return _held(model)

    def save(self, step: int, state: State) -> None:
        self.finish()
        path = self._directory / f"step-{step}"
        self._running = (self._manager.save(os.fspath(path), state), path)

    def fence(self) -> None:
        with self._manager.lock():
            pass

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
        assert self._newest is not None, "nothing was saved"
        self._manager.load(os.fspath(self._newest), into=state, strict=True)
        self._manager.close()
        return state


def _held(model: Module) -> State:
    """Give the state dict once: it holds the parameters themselves, and making it at every save would cost more."""
    return {"model": model.state_dict()}


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
