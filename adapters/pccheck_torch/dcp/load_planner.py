"""Plans a load: the whole checkpoint against the whole state dict (imports torch, pccheck's public names, fitting)."""

from __future__ import annotations

import io
from typing import Any, final

from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import LoadPlan, ReadItem
from torch.distributed.checkpoint.planner import LoadPlanner as DcpLoadPlanner

from pccheck.errors import UsageError
from pccheck_torch import kind
from pccheck_torch.dcp.fitting import Fit, StateDictError, fit
from pccheck_torch.dcp.merging import Part


@final
class LoadPlanner(DcpLoadPlanner):
    """Loads into a state dict, in place, with every difference told in one error before anything is touched.

    Python values come back as they were saved: a tuple is a tuple, an int key an int. For `pccheck_torch.dcp.Reader`.

    Args:
        strict: keys of the checkpoint that the state dict lacks are an error; without, they are left.
        allow_partial_load: keys of the state dict that the checkpoint lacks keep their values; without, an error.
            Another shape or dtype, or a tensor where there was none, is always an error.

    Raises (from dcp.load, within DCP's CheckpointException):
        StateDictError: the checkpoint does not fit.
        UsageError: the reader is not ours.
    """

    def __init__(self, *, strict: bool = True, allow_partial_load: bool = False) -> None:
        self.strict, self.allow_partial_load = strict, allow_partial_load
        self.fit = Fit()
        self._target: dict[str, Any] = {}
        self._reader: Any = None

    def set_up_planner(
        self, state_dict: dict[str, Any], metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        """Take the state dict, and the reader by what it says of the checkpoint."""
        self._reader = getattr(getattr(metadata, "storage_meta", None), "reader", None)
        if self._reader is None:
            raise UsageError("pccheck_torch.dcp.LoadPlanner plans for pccheck_torch.dcp.Reader only, no other reader")
        self._reader.serve(self)
        self._target = state_dict

    def create_local_plan(self) -> LoadPlan:
        """Hold the state dict against the checkpoint; raises StateDictError.

        Keys of the checkpoint that are not used here may be so by another rank: the plan lists them.
        """
        self.fit = fit(self._target, self._reader.merged.tree)
        passed = {"unused"} if not self.strict else set()
        passed |= {"missing"} if self.allow_partial_load else set()
        differences = [d for d in self.fit.differences if d.problem not in passed]
        if any(d.problem != "unused" for d in differences):
            raise StateDictError(self._reader.outline.step, differences)
        return LoadPlan([], planner_data=differences)

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        """Raise StateDictError for what no rank uses."""
        unused = [d for d in global_plan[0].planner_data if all(d in plan.planner_data for plan in global_plan[1:])]
        if unused:
            raise StateDictError(self._reader.outline.step, unused)
        return global_plan

    def wanted(self) -> dict[Part, Any]:
        """Give the parts to read: live tensors say which, all else comes back as it was saved."""
        parts: dict[Part, Any] = {Part(keys): tensor for keys, tensor in self.fit.tensors.items()}
        return parts | {Part(keys): leaf for keys, leaf in self.fit.as_saved.items()}

    def take(self, values: dict[Part, Any]) -> None:
        """Load what was read: tensors in place, values into the containers that they were in."""
        for keys, tensor in self.fit.tensors.items():
            if tensor.device.type != "meta":
                kind.assign(tensor, values[Part(keys)])
        self.fit.load(lambda keys: values[Part(keys)])

    def finish_plan(self, central_plan: LoadPlan) -> LoadPlan:
        """Give it back."""
        return central_plan

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Refuse: the plan has no items."""
        raise UsageError(f"pccheck_torch.dcp.LoadPlanner has no item {read_item.dest_index}")

    def resolve_tensor(self, read_item: ReadItem) -> Tensor:
        """Refuse: the plan has no items."""
        raise UsageError(f"pccheck_torch.dcp.LoadPlanner has no item {read_item.dest_index}")

    def commit_tensor(self, read_item: ReadItem, tensor: Tensor) -> None:
        """Refuse: the plan has no items."""
        raise UsageError(f"pccheck_torch.dcp.LoadPlanner has no item {read_item.dest_index}")
