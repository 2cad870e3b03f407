"""Finding: which steps lie on the disk, and what they are called (imports orbax; lanes, policies)."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import orbax.checkpoint as ocp

from pccheck_orbax.lanes import Lane, steady
from pccheck_orbax.policies import BEGINNING, StepInfo, keeps_metrics


def step_names(options: Any) -> Any:
    """Give Orbax's format of the names of steps that `options` ask for."""
    return options.step_name_format or ocp.path.step.standard_name_format(
        step_prefix=options.step_prefix,
        step_format_fixed_length=options.step_format_fixed_length,
        single_host_load_and_broadcast=options.single_host_load_and_broadcast,
        temporary_path_cls=options.temporary_path_class,
        atomicity_options=options.atomicity_options,
    )


def assert_there(step: int, known: Collection[int], names: Any, directory: Any) -> None:
    """Raise FileNotFoundError for a step that is not on the disk, `known` or not: others may have deleted it.

    A stock manager keeps what it was asked of such a step: its lane then refused every save of other args (seen).
    """
    try:
        names.find_step(directory, step)
    except ValueError:
        raise missing(step, known, directory) from None


def missing(step: int, known: Collection[int], directory: Any) -> FileNotFoundError:
    """Give the error of a step that is not there."""
    gone = " as of the last look, so others deleted it: reload()" if step in known else ""
    return FileNotFoundError(f"there is no step {step} in {directory}: it has {sorted(known)}{gone}")


def find_steps(
    directory: Any, names: Any, options: Any, lane: Lane, known: Mapping[int, StepInfo] | None
) -> list[StepInfo]:
    """Give the steps that are committed in a directory, in order.

    Args:
        directory: that of the lane's manager.
        names: Orbax's format of the steps' names.
        options: as of `ocp.CheckpointManager`.
        lane: whose manager reads metrics.
        known: those of which nothing is to be read anew; None: opening, which may be told to read next to nothing
            (`lightweight_initialize`).
    """

    def info(found: Any) -> StepInfo:
        if known is None and options.lightweight_initialize:
            return StepInfo(found.step, BEGINNING)
        told = (known or {}).get(found.step)
        if told is not None and told.time != BEGINNING:
            return told
        metrics = lane.manager.metrics(found.step) if keeps_metrics(options) else None
        return StepInfo(found.step, found.commit_timestamp, metrics)

    def look() -> Sequence[StepInfo]:
        return sorted(threads.map(info, names.find_all(directory)), key=lambda info: info.step)

    with ThreadPoolExecutor(8, thread_name_prefix="pccheck-steps") as threads:
        return list(steady(look))
