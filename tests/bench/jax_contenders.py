"""Who saves trees of jax arrays: pccheck, alone and under Orbax, and Orbax itself (bench: imports jax, orbax, pccheck).

All keep the newest checkpoint only, and each is asked with the args that its users write.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any, Protocol, cast, final

import jax
import orbax.checkpoint as ocp
from pccheck_orbax import CheckpointManager

import pccheck

from .contenders import Saver
from .jax_states import Tree


class Reader(Saver, Protocol):
    """A saver that can be closed, and through which a process that saved nothing can read."""

    def close(self) -> None:
        """Close what `prepare` opened."""

    def read(self, directory: Path, like: Tree) -> Tree:
        """Give the newest checkpoint that is there, placed as `like` is, its last byte read."""


class _Managed(ABC):
    """What is the same for all managers with Orbax's interface."""

    name: str
    in_flight: int

    def prepare(self, directory: Path) -> None:
        self._directory = directory
        self._manager = self._open(directory)

    def save(self, step: int, state: Tree) -> None:
        assert self._manager.save(step, args=self._to_save(state)), f"{self.name} did not save step {step}"

    def fence(self) -> None:
        return

    def finish(self) -> None:
        self._manager.wait_until_finished()

    def close(self) -> None:
        self._manager.close()

    def restore(self, like: Tree) -> Tree:
        self.close()
        return self.read(self._directory, like)

    def read(self, directory: Path, like: Tree) -> Tree:
        with self._open(directory) as manager:
            return _computed(manager.restore(manager.latest_step(), args=self._to_restore(_abstract(like))))

    @abstractmethod
    def _open(self, directory: Path) -> Any: ...

    def _to_save(self, state: Tree) -> Any:
        return ocp.args.StandardSave(state)

    def _to_restore(self, like: Tree) -> Any:
        return ocp.args.StandardRestore(like)


@final
class Orbax(_Managed):
    """The stock manager, asynchronous as it is by default.

    Args:
        compressed: as by default; else through the handler of PyTreeSave, where that can be told.
    """

    in_flight = 1

    def __init__(self, *, compressed: bool = True) -> None:
        self.name = "Orbax" if compressed else "Orbax, no compression"
        self._compressed = compressed

    def _open(self, directory: Path) -> Any:
        options = ocp.CheckpointManagerOptions(max_to_keep=1)
        if self._compressed:
            return ocp.CheckpointManager(directory, options=options)
        handler = ocp.PyTreeCheckpointHandler(use_compression=False)
        table = ocp.handlers.DefaultCheckpointHandlerRegistry()
        for args in (ocp.args.PyTreeSave, ocp.args.PyTreeRestore):
            table.add("default", args, handler)
        return ocp.CheckpointManager(directory, options=options, handler_registry=table)

    def _to_save(self, state: Tree) -> Any:
        return super()._to_save(state) if self._compressed else ocp.args.PyTreeSave(state)

    def _to_restore(self, like: Tree) -> Any:
        if self._compressed:
            return super()._to_restore(like)
        return ocp.args.PyTreeRestore(like, ocp.checkpoint_utils.construct_restore_args(like))


@final
class PccheckOrbax(_Managed):
    """pccheck's manager, its options left as they are.

    Args:
        in_flight: saves at once.
    """

    def __init__(self, in_flight: int = 2) -> None:
        self.name, self.in_flight = f"pccheck_orbax, in_flight {in_flight}", in_flight

    def _open(self, directory: Path) -> Any:
        options = ocp.CheckpointManagerOptions(max_to_keep=1, cleanup_tmp_directories=True)
        return CheckpointManager(directory, options=options, in_flight=self.in_flight)


@final
class PccheckJax:
    """pccheck.Checkpointer over jax arrays, without Orbax, its options left as they are.

    Args:
        in_flight: saves at once.
    """

    def __init__(self, in_flight: int = 2) -> None:
        self.name, self.in_flight = f"pccheck, in_flight {in_flight}", in_flight

    def prepare(self, directory: Path) -> None:
        self._directory = directory
        self._checkpointer = pccheck.Checkpointer(directory, in_flight=self.in_flight)

    def save(self, step: int, state: Tree) -> None:
        self._checkpointer.save(step, state)

    def fence(self) -> None:
        return

    def finish(self) -> None:
        self._checkpointer.wait()

    def close(self) -> None:
        self._checkpointer.close()

    def restore(self, like: Tree) -> Tree:
        self.close()
        return self.read(self._directory, like)

    def read(self, directory: Path, like: Tree) -> Tree:
        with pccheck.open(directory) as view:
            restored = view.restore(like=_abstract(like))
        assert restored is not None, "nothing was saved"
        return _computed(restored.state)


def _abstract(tree: Tree) -> Tree:
    """Give shapes, dtypes and shardings, as users do from `jax.eval_shape`."""
    spec: Any = jax.ShapeDtypeStruct
    abstract: Tree = jax.tree.map(lambda x: spec(x.shape, x.dtype, sharding=x.sharding), tree)
    return abstract


def _computed(tree: Tree) -> Tree:
    return cast("Tree", jax.block_until_ready(tree))  # type: ignore[no-untyped-call]


def ours(*in_flight: int) -> list[Reader]:
    """Give pccheck's managers."""
    return [PccheckOrbax(n) for n in in_flight]


def stock() -> list[Reader]:
    """Give Orbax's own."""
    return [Orbax(), Orbax(compressed=False)]
