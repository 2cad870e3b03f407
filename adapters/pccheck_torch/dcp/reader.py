"""Reads a checkpoint for DCP, however it was saved (imports torch, pccheck's public names, load_planner, merging)."""

from __future__ import annotations

import os
from typing import Any, NamedTuple, final

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import (
    STORAGE_TYPES,
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, ReadItem
from torch.distributed.checkpoint.planner import LoadPlanner as DcpLoadPlanner
from torch.distributed.checkpoint.storage import StorageReader

import pccheck
from pccheck.errors import PccheckError, RanksError, ReusedError, UsageError
from pccheck.leaves import StoredLeaf
from pccheck_torch.dcp.fitting import filled, is_array, leaves_of
from pccheck_torch.dcp.load_planner import LoadPlanner
from pccheck_torch.dcp.merging import Merged, Part
from pccheck_torch.dcp.names import Leaf, flat, put
from pccheck_torch.leaves.dense import dtype_of


class NothingThereError(UsageError):
    """There is no checkpoint at all."""


class ReaderMeta(StorageMeta):
    """What DCP hands from a reader to its planner: here, the reader itself."""

    def __init__(self, reader: Reader) -> None:
        super().__init__()
        self.reader = reader


class Identity(NamedTuple):
    """Which checkpoint a rank loads."""

    step: int
    counter: int
    incarnation: int


@final
class Reader(StorageReader):
    """Gives `dcp.load` the checkpoints of a directory, saved by `Checkpointer.save` or by DCP, on any number of ranks.

    Reads only what is asked for, and verifies every byte of it before a live tensor is touched. With
    `pccheck_torch.dcp.LoadPlanner` the whole state dict is held against the checkpoint first; DCP's own planners work
    too, as strict as they are. Make one reader for each load.

    Args:
        source: a job's folder or store; or an open Checkpointer, which waits for saves under way, and whose `restore`
            then reads (a step older than the newest begins a branch: see there).
        step: which checkpoint; None = the newest that all ranks hold.
        before: only checkpoints of lower counters.

    Raises (from dcp.load, within DCP's CheckpointException):
        StepNotFoundError, NoValidCheckpointError: as `Checkpointer.restore`.
        UsageError: no checkpoint is there at all.
        DamagedError, FormatError, MediumError: it cannot be read; nothing was loaded.
        RanksError: ranks found different checkpoints; give `step`.
    """

    def __init__(
        self,
        source: str | os.PathLike[str] | pccheck.Checkpointer,
        step: int | None = None,
        *,
        before: int | None = None,
    ) -> None:
        self._checkpointer = source if isinstance(source, pccheck.Checkpointer) else None
        self.path = source.path if isinstance(source, pccheck.Checkpointer) else os.fspath(source)
        self._step, self._before = step, before
        self._merged: Merged | None = None
        self._names: dict[str, Leaf] = {}
        self._failure: Exception | None = None
        self._planner: LoadPlanner | None = None
        self._values: dict[Part, Any] = {}

    @property
    def outline(self) -> pccheck.Outline:
        """What the checkpoint holds; raises what hindered the look at it."""
        return self.merged.outline

    @property
    def merged(self) -> Merged:
        """The same, as one tree; raises what hindered the look at it."""
        if self._failure is not None:
            raise self._failure
        if self._merged is None:
            raise UsageError("DCP reads the metadata first: give this reader to dcp.load")
        return self._merged

    def serve(self, planner: LoadPlanner) -> None:
        """Read for a planner of ours, which says itself what it wants."""
        self._planner = planner

    # -- as a storage reader ----------------------------------------------------------------------------------------

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Refuse another place than the one that this reader was made for."""
        if checkpoint_id is not None:
            raise UsageError(f"checkpoint_id={checkpoint_id!r} cannot be used: make a Reader(directory, step)")

    def read_metadata(self, *args: Any) -> Metadata:
        """Say what the checkpoint holds, by DCP's names; names that would stand for two places are left out.

        What fails is raised by the next call, where DCP tells it as it is.
        """
        try:
            if self._checkpointer is not None:
                self._checkpointer.wait()
            outline = pccheck.outline(self.path, self._step, before=self._before)
            if outline is None:
                raise NothingThereError(f"{self.path} holds no checkpoint that all of its ranks hold")
            self._merged = Merged(outline, _rank() if self._checkpointer is None else self._checkpointer.rank)
        except (PccheckError, OSError) as error:
            self._failure = error
            return Metadata({}, {}, storage_meta=ReaderMeta(self))
        self._names = _names(self._merged.tree)
        return Metadata(
            {fqn: _told(leaf.value) for fqn, leaf in self._names.items()},
            planner_data={fqn: leaf.mapping for fqn, leaf in self._names.items()},
            storage_meta=ReaderMeta(self),
        )

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any) -> None:
        """Raise what hindered `read_metadata`."""
        _ = self.merged

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Read and verify, while no rank has touched anything; a Checkpointer's ranks do that together, later."""
        found = self.outline
        plan.storage_data = Identity(found.step, found.counter, found.incarnation)
        if self._checkpointer is None:
            self._values = self.merged.read(self._wanted(plan))
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Check that all ranks found the same checkpoint."""
        found = [plan.storage_data for plan in plans]
        if len(set(found)) > 1:
            odd = [rank for rank, identity in enumerate(found) if identity != found[0]]
            raise RanksError(f"ranks found different checkpoints: {found}; wait for saves to end, or give step=", odd)
        return plans

    def read_data(self, plan: LoadPlan, planner: DcpLoadPlanner) -> torch.futures.Future[None]:
        """Hand out what was read, and read what was not yet."""
        wanted = {part: like for part, like in self._wanted(plan).items() if part not in self._values}
        together = None if self._checkpointer is None else self._restore
        if wanted or together is not None:
            self._values |= self.merged.read(wanted, together)
        values, self._values = self._values, {}
        if self._planner is not None:
            self._planner.take(values)
        else:
            for item in plan.items:
                self._hand_over(item, planner, values)
        done: torch.futures.Future[None] = torch.futures.Future()
        done.set_result(None)
        return done

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Tell that DCP must not take this reader by itself."""
        return False

    # -- inside -----------------------------------------------------------------------------------------------------

    def _restore(self, like: Any) -> pccheck.Restored:
        assert self._checkpointer is not None
        step, counter = self.outline.step, self.outline.counter
        restored = self._checkpointer.restore(step, like=like, partial=True, fallback=False)
        if restored is None or restored.counter != counter:
            raise ReusedError(f"another checkpoint took the place of step {step}, counter {counter}; load again")
        return restored

    def _wanted(self, plan: LoadPlan) -> dict[Part, Any]:
        if self._planner is not None:
            return self._planner.wanted()
        wanted: dict[Part, Any] = {}
        for item in plan.items:
            leaf = self._names[item.storage_index.fqn]
            if item.type == LoadItemType.TENSOR:
                wanted[_part(item, leaf)] = leaf.value
            else:
                wanted.update({Part(keys): stored for keys, stored in leaves_of(leaf.value, leaf.keys)})
        return wanted

    def _hand_over(self, item: ReadItem, planner: DcpLoadPlanner, values: dict[Part, Any]) -> None:
        leaf = self._names[item.storage_index.fqn]
        if item.type == LoadItemType.TENSOR:
            tensor = planner.resolve_tensor(item).detach()
            tensor.copy_(values[_part(item, leaf)])
            planner.commit_tensor(item, tensor)
            return
        value = filled(leaf.value, leaf.keys, lambda keys: values[Part(keys)])
        if not isinstance(planner, DefaultLoadPlanner) or type(planner).load_bytes is not DefaultLoadPlanner.load_bytes:
            raise UsageError(
                f"{type(planner).__name__} unpickles {leaf.fqn!r} itself, and pccheck pickles nothing; use "
                "pccheck_torch.dcp.LoadPlanner, or a DefaultLoadPlanner without its own load_bytes"
            )
        if planner.flatten_state_dict:
            put(planner.original_state_dict, planner.mappings[item.dest_index.fqn], value)
        else:
            planner.state_dict[item.dest_index.fqn] = value


def _rank() -> int:
    return torch.distributed.get_rank() if torch.distributed.is_initialized() else 0


def _names(tree: Any) -> dict[str, Leaf]:
    found: dict[str, Leaf] = {}
    twice: set[str] = set()
    for leaf in flat(tree, lambda value: isinstance(value, StoredLeaf) and _is_tensor(value)):
        if leaf.fqn in found:
            twice.add(leaf.fqn)
        found[leaf.fqn] = leaf
    return {fqn: leaf for fqn, leaf in found.items() if fqn not in twice}


def _is_tensor(leaf: StoredLeaf) -> bool:
    return leaf.spec.kind == "torch" and is_array(leaf)


def _told(value: Any) -> STORAGE_TYPES:
    """Describe a tensor as one piece: which parts were stored where, pccheck finds itself."""
    if not isinstance(value, StoredLeaf) or not _is_tensor(value):
        return BytesStorageMetadata()
    size = torch.Size(value.spec.shape)
    chunk = ChunkStorageMetadata(torch.Size([0] * len(size)), size)
    return TensorStorageMetadata(TensorProperties(dtype=dtype_of(value.spec.dtype)), size, [chunk])


def _part(item: ReadItem, leaf: Leaf) -> Part:
    return Part(leaf.keys, tuple(item.storage_offsets), tuple(item.lengths))
