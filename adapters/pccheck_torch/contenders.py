"""torch.save and DCP in a live replay, each as its users keep it safe from crashes (imports torch, none of pccheck).

`pccheck replay --live` finds them by their entry points. Both read and write tensors that share the memory of the
trainer's arrays.
"""

from __future__ import annotations

import os
import shutil
import warnings
from concurrent.futures import Future
from pathlib import Path
from typing import Any, cast, final

import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import async_save

State = dict[str, NDArray[Any]]


def _tensors(state: State) -> dict[str, Tensor]:
    return {name: torch.from_numpy(array) for name, array in state.items()}


@final
class TorchSave:
    """torch.save into a new file, fsync, rename over the old one, fsync of the folder: the trainer waits for it all.

    Args:
        directory: holds one file.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def restore(self, like: State) -> tuple[int, State] | None:
        """Load the file; None where there is none."""
        path = self._directory / "checkpoint.pt"
        if not path.exists():
            return None
        loaded = torch.load(path, weights_only=True)
        return loaded["step"], {name: tensor.numpy() for name, tensor in loaded["state"].items()}

    def save(self, step: int, state: State) -> None:
        """Save, and return when it is durable."""
        new = self._directory / "new.pt"
        with new.open("wb") as file:
            torch.save({"step": step, "state": _tensors(state)}, file)
            file.flush()
            os.fsync(file.fileno())
        new.replace(self._directory / "checkpoint.pt")
        fd = os.open(self._directory, os.O_RDONLY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)

    def fence(self) -> None:
        """Return at once: nothing is read after `save`."""

    def close(self) -> None:
        """Return at once: nothing is under way."""


@final
class Dcp:
    """torch.distributed.checkpoint.async_save, in a thread, one at a time: a save waits for the one before.

    Each step has a folder, which is complete when DCP has written `.metadata`, its last act; then older ones go.

    Args:
        directory: holds the folders.
    """

    def __init__(self, directory: Path) -> None:
        # It warns at each call that there is no process group, which is meant, and it uses its own deprecated names.
        warnings.filterwarnings("ignore", module="torch.distributed")
        self._directory = directory
        self._running: Future[Any] | None = None

    def restore(self, like: State) -> tuple[int, State] | None:
        """Load the newest complete folder, in place; None where there is none."""
        steps = self._complete()
        if not steps:
            return None
        load(_tensors(like), checkpoint_id=self._folder(steps[-1]), no_dist=True)
        return steps[-1], like

    def save(self, step: int, state: State) -> None:
        """Wait for the save before, copy the state, and return."""
        self._wait()
        folder = self._folder(step)
        shutil.rmtree(folder, ignore_errors=True)  # what a killed process left of this step
        saving = cast("Future[Any]", async_save(_tensors(state), checkpoint_id=folder, no_dist=True))
        saving.add_done_callback(lambda done: self._tidy(step, done))
        self._running = saving

    def fence(self) -> None:
        """Return at once: the state was copied by `save`."""

    def close(self) -> None:
        """Wait for the save under way."""
        self._wait()

    def _wait(self) -> None:
        running, self._running = self._running, None
        if running is not None:
            running.result()

    def _tidy(self, step: int, done: Future[Any]) -> None:
        """Remove older folders once the one of a step is complete; in DCP's thread."""
        if done.cancelled() or done.exception() is not None:
            return
        for folder in self._directory.glob("step-*"):
            if _step(folder) < step:  # a newer one may be under way by now
                shutil.rmtree(folder, ignore_errors=True)

    def _folder(self, step: int) -> Path:
        return self._directory / f"step-{step}"

    def _complete(self) -> list[int]:
        found = self._directory.glob("step-*/.metadata")
        return sorted(_step(path.parent) for path in found)


def _step(folder: Path) -> int:
    return int(folder.name.removeprefix("step-"))
