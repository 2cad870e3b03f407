"""Writes one checkpoint for DCP: storage writer and stager in one (imports torch, pccheck's public names, plans)."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from concurrent.futures import Future
from typing import Any, Literal, NoReturn, final

import torch
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.staging import AsyncStager
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult

import pccheck
from pccheck.errors import RanksError, UsageError
from pccheck_torch.dcp.plans import Told, assert_as_staged, is_ours, state_of


class WriterMeta(StorageMeta):
    """What DCP hands from a writer to its planner: here, the writer itself."""

    def __init__(self, writer: Writer) -> None:
        super().__init__()
        self.writer = writer


@final
class Writer(StorageWriter, AsyncStager):
    """Writes one checkpoint through a Checkpointer, from `dcp.save` or `dcp.async_save`; make one for each save.

    In `dcp.async_save` it is the stager as well: the capture of the state begins in that call, on the calling thread,
    and with snapshot="copy" it ends there. In the other modes `dcp.async_save` returns at once, with an
    `AsyncSaveResponse`: the state must not change until its `staging_completion` is done, unless the Checkpointer is
    guarded (`pccheck_torch.attach`), whose gate then waits. DCP's future resolves when the checkpoint is durable on all
    ranks.

    Nothing is planned or pickled by DCP where `pccheck_torch.dcp.SavePlanner` plans. With another planner its plan is
    held against what was saved.

    Args:
        checkpointer: where to; of as many ranks as the process group that saves.
        step: the caller's label, the same on all ranks.
        metadata: small JSON that `pccheck inspect` shows.
        when_full: as in `Checkpointer.save`.

    Raises (from dcp.save, from the future of dcp.async_save, within DCP's CheckpointException):
        UsageError: it was used before, or with `checkpoint_id`, or the plan cannot be stored.
        RanksError: the ranks of the process group are not those of the Checkpointer, or save different steps.
        (any): as `Checkpointer.save` and `Save.durable`.
    """

    _synchronize_after_execute = False

    def __init__(
        self,
        checkpointer: pccheck.Checkpointer,
        step: int,
        *,
        metadata: Mapping[str, Any] | None = None,
        when_full: Literal["block", "skip"] | None = None,
    ) -> None:
        self.step = step
        self.saved: pccheck.Save | None = None
        self.refused: Exception | None = None  # why `stage` did not start the save
        self._checkpointer, self._metadata, self._when_full = checkpointer, metadata, when_full
        self._staged: dict[str, Any] | None = None
        self._used: set[str] = set()
        self._local: SavePlan | None = None

    # -- as a stager ------------------------------------------------------------------------------------------------

    def stage(self, state_dict: dict[str, Any]) -> dict[str, Any] | Future[dict[str, Any]]:
        """Start the save. What fails here is told by the future, where all ranks hear of it: else they would wait."""
        self._use("stage")
        self._staged = state_dict
        try:
            self.saved = self._save(state_dict)
        except Exception as error:
            self.refused = error
            return state_dict
        if self._checkpointer.options.snapshot == "copy":
            return state_dict
        staged: Future[dict[str, Any]] = Future()
        self.saved.captured.add_done_callback(lambda _: staged.set_result(state_dict))
        return staged

    @property
    def should_synchronize_after_execute(self) -> bool:
        """False: what `stage` gives is all there is to wait for."""
        return False

    def synchronize_staging(self) -> None:
        """Wait until the state may change; for callers of DCP's older ways."""
        if self.saved is not None:
            self.saved.captured.result(patience_s(self._checkpointer))

    def close(self) -> None:
        """Do nothing: the Checkpointer belongs to its owner."""

    # -- as a storage writer ----------------------------------------------------------------------------------------

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Begin; refused the second time, and where `checkpoint_id` asks for another place than the Checkpointer's."""
        self._use("reset")
        if checkpoint_id is not None:
            raise UsageError(
                f"checkpoint_id={checkpoint_id!r} cannot be used: a checkpoint lies in its Checkpointer's directory "
                f"and is named by its step ({self.step}); leave checkpoint_id out"
            )

    def storage_meta(self) -> StorageMeta:
        """Give this writer to the planner."""
        return WriterMeta(self)

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Begin to write."""
        self._use("write")

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Raise what went wrong in `stage`, here where DCP tells all ranks."""
        if self.refused is not None:
            raise self.refused
        self._local = plan
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Check that the ranks that save are those of the Checkpointer; without collectives each rank comes alone."""
        world = self._checkpointer.world
        if len(plans) not in (1, world):
            raise RanksError(
                f"{len(plans)} ranks save, but the Checkpointer is of {world}: open it on each rank, with a "
                "coordinator of the same ranks (pccheck_torch.dcp.Backend does)"
            )
        return plans

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> torch.futures.Future[list[WriteResult]]:
        """Wait until the checkpoint is durable on all ranks."""
        assert self._local is not None
        if self.saved is None:
            self.saved = self._save(planner.state if is_ours(planner) else state_of(self._local, plan, planner))
        elif not is_ours(planner) and self._staged is not None:
            assert_as_staged(self._staged, self._local, plan, self.step)
        self._staged = None
        self.saved.durable.result(patience_s(self._checkpointer))
        told = Told(self.step, self.saved.counter)
        results = [WriteResult(item.index, _nbytes(item), told) for item in plan.items]
        done: torch.futures.Future[list[WriteResult]] = torch.futures.Future()
        done.set_result(results or [WriteResult(MetadataIndex(f"step {self.step}"), 0, told)])
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Check that all ranks wrote one checkpoint. `metadata` may be shared with other saves: it is left as it is."""
        told = {result.storage_data for result in (r for of_rank in results for r in of_rank)}
        if len(told) > 1:
            raise RanksError(f"ranks saved different checkpoints: {sorted(told)}; all ranks must save the same steps")

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Tell that no path stands for a writer such as this: it needs a Checkpointer."""
        return False

    def __reduce__(self) -> NoReturn:
        raise UsageError(
            "a pccheck writer belongs to its process: call dcp.async_save with AsyncCheckpointerType.THREAD (the "
            "default), since the Checkpointer's own threads write without the interpreter"
        )

    def __repr__(self) -> str:
        return f"<Writer of step {self.step}: {self.saved or self.refused or 'unused'}>"

    def _save(self, state: Any) -> pccheck.Save:
        return self._checkpointer.save(
            self.step, state, metadata=self._metadata, when_full=self._when_full, report=False
        )  # fmt: skip

    def _use(self, part: str) -> None:
        if part in self._used:
            raise UsageError(
                f"this Writer was used for step {self.step} already; make a new Writer(checkpointer, step) for "
                "each save"
            )
        self._used.add(part)


def patience_s(checkpointer: pccheck.Checkpointer) -> float:
    """Give the seconds after which a save has ended by its own deadlines, or never will."""
    return checkpointer.options.write_timeout_s + checkpointer.options.agree_timeout_s + 60.0


def _nbytes(item: WriteItem) -> int:
    if item.tensor_data is None:
        return 0
    return math.prod(item.tensor_data.chunk.sizes) * item.tensor_data.properties.dtype.itemsize
