"""Plans of a save: ours, which carries next to nothing, and what other planners' plans say (imports torch, pccheck)."""

from __future__ import annotations

from typing import Any, NamedTuple, TypeGuard, final

from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, WriteItem, WriteItemType
from torch.distributed.checkpoint.planner import SavePlanner as DcpSavePlanner
from torch.distributed.tensor import DTensor

import pccheck
from pccheck.errors import RanksError, UnsupportedLeafError, UsageError
from pccheck_torch.dcp.names import flat, nested


class Told(NamedTuple):
    """Which checkpoint a rank saves."""

    step: int
    counter: int


@final
class SavePlanner(DcpSavePlanner):
    """Plans nothing: pccheck's own plan, cached by the Checkpointer, says what goes where.

    So DCP gathers and scatters a few bytes however many tensors there are, and no plan can be stale: dtypes and shapes
    are looked at in each save. For `pccheck_torch.dcp.Writer` only; one planner may serve one save at a time.
    """

    def __init__(self) -> None:
        self.state: dict[str, Any] = {}
        self._step = 0

    def set_up_planner(
        self, state_dict: dict[str, Any], storage_meta: StorageMeta | None = None, is_coordinator: bool = False
    ) -> None:
        """Take the state; raises UsageError if the writer is not ours, since nothing would be written."""
        writer = getattr(storage_meta, "writer", None)
        if writer is None:
            raise UsageError("pccheck_torch.dcp.SavePlanner plans for pccheck_torch.dcp.Writer only, no other writer")
        self.state, self._step = state_dict, writer.step

    def create_local_plan(self) -> SavePlan:
        """Give a plan that says the step, and no more."""
        return SavePlan([], planner_data=self._step)

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        """Check that all ranks save the same step."""
        steps = [plan.planner_data for plan in all_plans]
        if len(set(steps)) > 1:
            odd = [rank for rank, step in enumerate(steps) if step != steps[0]]
            raise RanksError(f"ranks save different steps: {steps}; all must save the same", odd)
        return all_plans, Metadata({})

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        """Give it back."""
        return new_plan

    def resolve_data(self, write_item: WriteItem) -> Any:
        """Refuse: the plan has no items."""
        raise UsageError(f"pccheck_torch.dcp.SavePlanner has no item {write_item.index}")


def is_ours(planner: DcpSavePlanner) -> TypeGuard[SavePlanner]:
    """Tell whether a planner is ours."""
    return isinstance(planner, SavePlanner)


# -- plans of other planners -------------------------------------------------------------------------------------------


def state_of(local: SavePlan, final: SavePlan, planner: DcpSavePlanner) -> dict[str, Any]:
    """Give the tree to save for another planner's plan, as it resolves the items.

    Of a DTensor that several ranks have, DCP lets one write each part: on the others the part is empty. Plain tensors
    and Python values belong to the rank that saves them, as ever (see `replicated` of `pccheck.Checkpointer`).

    Args:
        local: this rank's plan before the coordinator saw it; not usable if the planner has it in a cache.
        final: what this rank is to write.
        planner: gives the data.

    Raises:
        UsageError: data is not what the plan says of it; or the planner makes bytes of its own of an object.
    """
    if not local.usable:
        local = getattr(planner, "_cached_save_plan", {}).get(getattr(planner, "_cached_plans_key", None), final)
    mine = {(item.index.fqn, item.index.offset) for item in final.items}
    names = final.planner_data if isinstance(final.planner_data, dict) else {}
    found: dict[str, Any] = {}
    for item in local.items:
        fqn = item.index.fqn
        if fqn in found:
            raise UnsupportedLeafError(fqn, "ShardedTensor", "it has several shards on one rank; use a DTensor")
        if item.type == WriteItemType.BYTE_IO:
            found[fqn] = _object(item, planner)
        else:
            found[fqn] = _part(item, planner, (fqn, item.index.offset) in mine)
    return nested({names.get(fqn, (fqn,)): value for fqn, value in found.items()})


def _object(item: WriteItem, planner: DcpSavePlanner) -> Any:
    """Give an object itself, not the pickled bytes that `resolve_data` of a DefaultSavePlanner makes of it."""
    kind: Any = type(planner)
    if (
        isinstance(planner, DefaultSavePlanner)
        and kind.resolve_data is DefaultSavePlanner.resolve_data
        and kind.transform_object is DefaultSavePlanner.transform_object
    ):
        return planner.lookup_object(item.index)
    raise UsageError(
        f"{kind.__name__} makes bytes of its own of {item.index.fqn!r}: pccheck stores Python values by type and never "
        "pickles; use pccheck_torch.dcp.SavePlanner, or a DefaultSavePlanner without its own transform_object"
    )


def _part(item: WriteItem, planner: DcpSavePlanner, is_mine: bool) -> Any:
    data, told = planner.resolve_data(item), item.tensor_data
    assert told is not None
    if not isinstance(data, Tensor) or data.dtype != told.properties.dtype or data.shape != told.chunk.sizes:
        have = f"{data.dtype} {list(data.shape)}" if isinstance(data, Tensor) else type(data).__name__
        raise _stale(item, have)
    if item.type == WriteItemType.TENSOR or not data.ndim:
        return data
    return pccheck.Shard(data if is_mine else data[:0], shape=told.size, offsets=told.chunk.offsets)


def assert_as_staged(state: dict[str, Any], local: SavePlan, final: SavePlan, step: int) -> None:
    """Hold another planner's plan against the state whose save began in `stage`.

    Raises:
        UsageError: the plan is of something else, as a plan is that DCP cached for another dtype.
    """
    there: dict[str, Any] = {leaf.fqn: leaf.value for leaf in flat(state)}
    for item in final.items:
        if item.index.fqn not in there:
            raise _unlike(item.index.fqn, step, "the state has nothing there")
        value, told = there[item.index.fqn], item.tensor_data
        if told is None:
            if isinstance(value, Tensor):
                raise _unlike(item.index.fqn, step, "a tensor was saved there")
        elif not isinstance(value, Tensor):
            raise _unlike(item.index.fqn, step, f"a {type(value).__name__} was saved there")
        elif value.dtype != told.properties.dtype or value.size() != told.size or not _has(value, told.chunk):
            raise _stale(item, f"{value.dtype} {list(value.shape)}")
    left = sorted(there.keys() - {item.index.fqn for item in local.items}) if local.usable else []
    if left:
        raise _unlike(left[0], step, f"the plan leaves it out (and {len(left) - 1} more)")


def _has(value: Tensor, chunk: Any) -> bool:
    parts: Any = value
    return not isinstance(value, DTensor) or any(part == chunk for part in parts.__create_chunk_list__())


def _stale(item: WriteItem, have: str) -> UsageError:
    told = item.tensor_data
    assert told is not None
    plan = f"{told.properties.dtype} {list(told.chunk.sizes)} at {list(told.chunk.offsets)} of {list(told.size)}"
    return UsageError(
        f"the plan of {item.index.fqn!r} says {plan}, but the state has {have}: a planner that caches plans kept one "
        "of another state; use pccheck_torch.dcp.SavePlanner, or enable_plan_caching=False"
    )


def _unlike(fqn: str, step: int, reason: str) -> UsageError:
    return UsageError(
        f"the plan differs from the state that was saved for step {step} in {fqn!r}: {reason}; a planner that changes "
        "the state works with dcp.save, or with a stager of its own (async_stager=DefaultStager())"
    )
