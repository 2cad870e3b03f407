"""Finding: which steps lie on the disk (imports orbax; lanes, policies)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from pccheck_orbax.lanes import Lane, steady
from pccheck_orbax.policies import BEGINNING, StepInfo, keeps_metrics


def find_steps(directory: Any, names: Any, options: Any, lane: Lane, known: Mapping[int, StepInfo]) -> list[StepInfo]:
    """Give the steps that are committed in a directory, in order.

    Args:
        directory: that of the lane's manager.
        names: Orbax's format of the steps' names.
        options: as of `ocp.CheckpointManager`.
        lane: whose manager reads metrics.
        known: those of which nothing is to be read.
    """

    def info(found: Any) -> StepInfo:
        if found.step in known:
            return known[found.step]
        if options.lightweight_initialize:
            return StepInfo(found.step, BEGINNING)
        metrics = lane.manager.metrics(found.step) if keeps_metrics(options) else None
        return StepInfo(found.step, found.commit_timestamp, metrics)

    def look() -> Sequence[StepInfo]:
        return sorted(threads.map(info, names.find_all(directory)), key=lambda info: info.step)

    with ThreadPoolExecutor(8, thread_name_prefix="pccheck-steps") as threads:
        return list(steady(look))
