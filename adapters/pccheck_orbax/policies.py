"""Policies: when to save, what to keep, which options are served; from Orbax's options (imports orbax, pccheck)."""

from __future__ import annotations

import dataclasses
import datetime
import difflib
from collections.abc import Callable, Sequence
from typing import Any

import orbax.checkpoint as ocp
from orbax.checkpoint import checkpoint_managers as cms

import pccheck
from pccheck.errors import OptionError, UsageError

# Every option that is honoured here. One that is not in the list (of a later Orbax) must stay at its default.
SERVED = frozenset(
    {"save_interval_steps", "max_to_keep", "keep_time_interval", "keep_period", "best_fn", "best_mode"}
    | {"keep_checkpoints_without_metrics", "step_prefix", "step_format_fixed_length", "step_name_format", "create"}
    | {"cleanup_tmp_directories", "save_on_steps", "single_host_load_and_broadcast", "todelete_subdir"}
    | {"todelete_full_path", "enable_background_delete", "num_deletion_threads", "read_only"}
    | {"enable_async_checkpointing", "async_options", "multiprocessing_options", "should_save_fn", "file_options"}
    | {"atomicity_options", "save_root_metadata", "temporary_path_class", "save_decision_policy"}
    | {"preservation_policy", "prevent_write_metrics", "enable_should_save_is_saving_in_progress_check"}
    | {"enable_per_process_directory_creation", "lightweight_initialize"}
)
BEGINNING = datetime.datetime.min.replace(tzinfo=datetime.UTC)  # the time of steps whose metadata is not read
# What these decide depends on steps and metrics alone, not on a clock: processes decide alike without talking.
_CLOCKLESS = (cms.LatestN, cms.EveryNSteps, cms.EveryNStepsClosest, cms.CustomSteps, cms.BestN)
_METRICLESS = (*_CLOCKLESS[:-1], cms.EveryNSeconds, cms.LatestDuration)


@dataclasses.dataclass
class StepInfo:
    """What policies are told of a step: its number, the time it was saved or committed (UTC), its metrics."""

    step: int
    time: datetime.datetime
    metrics: Any = None

    @staticmethod
    def now(step: int, metrics: Any = None) -> StepInfo:
        """Give the info of a step that is saved now."""
        return StepInfo(step, datetime.datetime.now(datetime.UTC), metrics)


@dataclasses.dataclass
class _ShouldSave:
    """A user's `should_save_fn(step, latest step or None)` as a policy."""

    function: Callable[[int, int | None], bool]

    def should_save(self, step: Any, previous_steps: Sequence[Any], *, context: Any) -> bool:
        return self.function(step.step, previous_steps[-1].step if previous_steps else None)


def check(options: ocp.CheckpointManagerOptions, *, local: bool) -> None:
    """Raise OptionError, naming the field, for what cannot be honoured; `local`: the root is no bucket."""
    for field in dataclasses.fields(options):
        value = getattr(options, field.name)
        if field.name not in SERVED and not _is_default(field, value):
            raise OptionError(field.name, value, "left at its default: this version of pccheck_orbax does not know it")
    if options.todelete_full_path is not None and local:
        raise OptionError(
            "todelete_full_path", options.todelete_full_path, "None: it is for gs:// alone; use todelete_subdir"
        )
    if options.preservation_policy is not None:
        for name in ("max_to_keep", "keep_time_interval", "keep_period"):
            if getattr(options, name):
                raise OptionError(name, getattr(options, name), "None where a preservation_policy is given")
    if options.todelete_subdir is not None and not local:
        raise OptionError("todelete_subdir", options.todelete_subdir, "None on gs://, which has no folders to rename")


def check_engine(given: dict[str, Any]) -> None:
    """Raise OptionError for what is neither an argument of the manager nor an option of the engine."""
    known = {field.name for field in dataclasses.fields(pccheck.Options)} | {"observer"}
    for name in given:
        if name not in known:
            options = {field.name for field in dataclasses.fields(ocp.CheckpointManagerOptions)}
            names = sorted(known | {"handler_registry", "item_names", "item_handlers"})
            near = difflib.get_close_matches(name, names, 1)
            hint = f"; did you mean {near[0]}=?" if near else ""
            hint = "; it goes into options=ocp.CheckpointManagerOptions(...)" if name in options else hint
            raise OptionError(name, given[name], f"left out: CheckpointManager has no such argument{hint}")


def check_metrics(options: ocp.CheckpointManagerOptions, step: int, metrics: Any) -> None:
    """Raise, with a note, what the function that ranks steps raises for these metrics: later, nothing could be kept."""
    ranked = ranking(options)
    if ranked is None or metrics is None:
        return
    try:
        ranked[0](metrics)
    except Exception as error:
        error.add_note(
            f"best_fn (or get_metric_fn of a BestN) raised this for the metrics of step {step}, {metrics!r}: "
            "the step was not saved; pass the metrics that the function reads"
        )
        raise


def save_policy(options: ocp.CheckpointManagerOptions) -> Any:
    """Give what decides when to save: the user's, or what a stock manager makes of these options."""
    if options.save_decision_policy is not None:
        return options.save_decision_policy
    if options.should_save_fn is not None:
        return cms.AnySavePolicy([_ShouldSave(options.should_save_fn), cms.PreemptionCheckpointingPolicy()])
    policies: list[Any] = []
    if options.save_interval_steps is not None:
        policies.append(cms.FixedIntervalPolicy(options.save_interval_steps))
    if options.save_on_steps is not None:
        policies.append(cms.SpecificStepsPolicy(options.save_on_steps))
    return cms.AnySavePolicy([*policies, cms.PreemptionCheckpointingPolicy(), cms.InitialSavePolicy()])


def keep_policy(options: ocp.CheckpointManagerOptions) -> Any:
    """Give what decides which steps are kept: the user's, or what a stock manager makes of these options."""
    if options.preservation_policy is not None:
        return options.preservation_policy
    policies: list[Any] = []
    if options.keep_period is not None:
        policies.append(cms.EveryNSteps(options.keep_period))
    if options.keep_time_interval is not None:
        policies.append(cms.EveryNSeconds(int(options.keep_time_interval.total_seconds())))
    if options.best_fn is None:
        policies.append(cms.LatestN(options.max_to_keep))
    else:
        policies.append(
            cms.BestN(
                get_metric_fn=options.best_fn,
                reverse=options.best_mode == "min",
                n=options.max_to_keep,
                keep_checkpoints_without_metrics=options.keep_checkpoints_without_metrics,
            )
        )
    return cms.AnyPreservationPolicy(policies)


def dropped(policy: Any, infos: Sequence[StepInfo]) -> list[int]:
    """Give the steps of `infos` (in the order of steps) that `policy` does not keep."""
    if not infos:
        return []
    try:
        kept = policy.should_preserve(infos, context=cms.PreservationContext())
    except Exception as error:
        error.add_note(f"raised by what decides which of steps {[info.step for info in infos]} are kept: none is gone")
        raise
    if len(kept) != len(infos):
        raise UsageError(f"{policy} gave {len(kept)} answers for {len(infos)} checkpoints: it must give one for each")
    return [info.step for info, keep in zip(infos, kept, strict=True) if not keep]


def clockless(policy: Any) -> bool:
    """Tell whether processes that know the same steps and metrics decide alike, whatever their clocks say."""
    return _all(policy, _CLOCKLESS)


def keeps_metrics(options: ocp.CheckpointManagerOptions) -> bool:
    """Tell whether metrics go to disk: where they may decide what is kept, by `best_fn` or by a policy."""
    policy = options.preservation_policy
    return options.best_fn is not None or (policy is not None and not _all(policy, _METRICLESS))


def ranking(options: ocp.CheckpointManagerOptions) -> tuple[Callable[[Any], Any], bool] | None:
    """Give (metric function, whether less is better) of the options, or of a BestN among the policies; else None."""
    if options.best_fn is not None:
        return options.best_fn, options.best_mode == "min"
    policies = [options.preservation_policy]
    while policies:
        policy = policies.pop(0)
        if isinstance(policy, cms.BestN):
            return policy.get_metric_fn, policy.reverse
        policies += getattr(policy, "policies", ())
    return None


def _all(policy: Any, kinds: tuple[type, ...]) -> bool:
    if isinstance(policy, cms.AnyPreservationPolicy):
        return all(_all(p, kinds) for p in policy.policies)
    return isinstance(policy, kinds)


def _is_default(field: Any, value: Any) -> bool:
    if field.default is not dataclasses.MISSING:
        return bool(value is field.default or value == field.default)
    return bool(field.default_factory is not dataclasses.MISSING and value == field.default_factory())
