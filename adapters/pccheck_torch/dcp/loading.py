"""Loads the newest checkpoint that verifies on all ranks, through DCP (imports torch, pccheck, reader)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_loader import load

import pccheck
from pccheck.errors import ContentError, MediumError, NoValidCheckpointError
from pccheck_torch.dcp.futures import cause_of
from pccheck_torch.dcp.load_planner import LoadPlanner
from pccheck_torch.dcp.reader import NothingThereError, Reader


@dataclass(frozen=True, kw_only=True)
class Loaded:
    """What `Backend.load` loaded.

    Args:
        step: the caller's label.
        counter: its place in the order of all checkpoints.
        metadata: what was saved beside the state.
        skipped: newer checkpoints that were passed over, and why.
    """

    step: int
    counter: int
    metadata: dict[str, Any]
    skipped: tuple[pccheck.Skipped, ...] = ()


def load_newest(
    checkpointer: pccheck.Checkpointer,
    state_dict: dict[str, Any],
    step: int | None,
    planner: Callable[[], LoadPlanner],
    group: dist.ProcessGroup | None,
    rank: int,
) -> Loaded | None:
    """Load a step, or the newest checkpoint; pass over those that cannot be read on some rank, on all of them.

    DCP gives all ranks the same collection of errors, so that all come to the same end.

    Args:
        checkpointer: where from.
        state_dict: what to load into.
        step: None = the newest.
        planner: makes a planner for each attempt.
        group: of the ranks that load; None = this process alone.
        rank: of this process.

    Raises as `Backend.load` does.
    """
    skipped: list[pccheck.Skipped] = []
    before: int | None = None
    while True:
        reader = Reader(checkpointer, step, before=before)
        try:
            load(
                state_dict, storage_reader=reader, planner=planner(), process_group=group, no_dist=group is None
            )  # fmt: skip
        except CheckpointException as error:
            errors = [failure[0] for _, failure in sorted(error.failures.items())]
            if any(isinstance(e, NothingThereError) for e in errors):
                if skipped:
                    raise NoValidCheckpointError(reader.path, skipped) from None
                return None
            unreadable = next((e for e in errors if isinstance(e, (ContentError, MediumError))), None)
            planned = error.args[0] == "read"  # all ranks found the same checkpoint, and it fits
            if step is not None or unreadable is None or not planned:
                raise cause_of(error, rank) from None  # type: ignore[misc]
            found = reader.outline
            skipped += (*found.skipped, pccheck.Skipped(found.counter, found.step, found.path, str(unreadable)))
            before = found.counter
        else:
            found = reader.outline
            return Loaded(
                step=found.step, counter=found.counter, metadata=found.metadata, skipped=(*skipped, *found.skipped)
            )
