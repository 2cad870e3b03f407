"""Lanes: stock managers on one root, each with at most one save in flight (imports orbax; durable, trash, policies)."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from typing import Any, final

import orbax.checkpoint as ocp
from orbax.checkpoint import checkpoint_managers as cms

from pccheck_orbax.durable import DurableRename
from pccheck_orbax.policies import keeps_metrics
from pccheck_orbax.trash import TRASH

_POLL_S = 0.002


@final
class Lane:
    """One stock manager, and the step that it has in flight.

    A stock manager runs one save at a time, and so do its checkpointer and its composite handler, whose state is that
    of one save; several of them on one root do not disturb each other: each has its own barrier keys, and they are told
    to keep all steps, to skip no save, and to delete nothing by themselves. `options` must be this lane's own.
    """

    def __init__(self, manager: ocp.CheckpointManager, options: ocp.CheckpointManagerOptions) -> None:
        self.manager = manager
        self.step: int | None = None
        self.has_saved = False
        self._options, self._best_fn = options, options.best_fn
        self._failed = self._interrupted = False

    def __repr__(self) -> str:
        return "Lane(idle)" if self.step is None else f"Lane(saving step {self.step})"

    @property
    def running(self) -> bool:
        """Whether a save has been started that has not ended."""
        return self.step is not None and bool(self.manager.is_saving_in_progress())

    def start(self, step: int, *, metrics: Any, **save: Any) -> None:
        """Start to save `step` with what `save` of a stock manager takes; whatever that raises."""
        if self._failed:
            self._forget_failure()
        if step in self.manager.all_steps():  # deleted meanwhile, by another lane or by hand: the disk decides
            self.manager.reload()
        # Orbax writes metrics where a best_fn is set, and warns there where none are given.
        self._options.best_fn = self._best_fn if metrics is not None else None
        try:
            self.manager.save(step, metrics=metrics, force=True, **save)
        finally:
            self._options.best_fn = self._best_fn
        self.step, self.has_saved = step, True

    def finish(self) -> BaseException | None:
        """Wait for the save in flight, and give what it failed with; a KeyboardInterrupt only interrupts the wait."""
        try:
            # CPython 3.11 takes a thread whose join() was interrupted for ended: Orbax then waits for nothing more.
            while self._interrupted and self.running:
                time.sleep(_POLL_S)
            self.manager.wait_until_finished()
        except KeyboardInterrupt:
            self._interrupted = True
            raise
        except BaseException as error:  # a save's thread may end with CancelledError or SystemExit
            self._failed, self._interrupted, self.step = True, False, None
            self._settle_files()
            return error
        self._interrupted, self.step = False, None
        return None

    def _settle_files(self) -> None:
        # Orbax writes a step's first metadata in the background: into a folder that is about to be removed.
        try:
            self.manager.check_for_errors()
        except Exception:
            pass

    def knows(self, step: int) -> bool:
        """Tell whether the manager lists `step`."""
        return step in self.manager.all_steps()

    def close(self) -> None:
        """Close the manager; an error of a save that was reported stays reported."""
        if self._failed:
            self._forget_failure()
        self.manager.close()

    def _forget_failure(self) -> None:
        # A stock manager raises a failed save's error once in *each* thread that waits.
        self._failed = False
        try:
            self.manager.wait_until_finished()
        except Exception:
            pass


def lane_options(
    options: ocp.CheckpointManagerOptions, name: str, *, processes: set[int] | None, local: bool, cleans: bool
) -> ocp.CheckpointManagerOptions:
    """Give the options of the lane `name`, made from a user's.

    Arguments: processes: who takes part, where that is several (barriers then go by the coordination service, which has
    time-outs, not by a collective, which has none and waits for the devices); local: whether folders can be renamed;
    cleans: whether this lane's manager removes temporary folders (those that only a class of the user's knows).
    """
    multi = options.multiprocessing_options
    multi = dataclasses.replace(
        multi,
        barrier_sync_key_prefix=f"{multi.barrier_sync_key_prefix or ''}pccheck-{name}",
        active_processes=processes if processes is not None else multi.active_processes,
    )
    writes = not options.read_only
    trash = TRASH if local and writes else None
    return dataclasses.replace(
        options,
        multiprocessing_options=multi,
        # Orbax changes the object that it is given; one of our own, and a lane's own.
        async_options=dataclasses.replace(options.async_options or ocp.AsyncOptions()),
        temporary_path_class=DurableRename if renames(options, local=local) else options.temporary_path_class,
        preservation_policy=cms.LatestN(None),
        max_to_keep=None,
        keep_period=None,
        keep_time_interval=None,
        best_fn=_kept_only if keeps_metrics(options) else None,
        save_decision_policy=None,
        should_save_fn=None,
        save_interval_steps=1 if writes else 0,
        save_on_steps=None,
        create=False,
        cleanup_tmp_directories=cleans,
        todelete_subdir=options.todelete_subdir or trash,
        enable_background_delete=options.enable_background_delete and not local,
        num_deletion_threads=options.num_deletion_threads or 1,
        save_root_metadata=options.save_root_metadata and name == "0",
        lightweight_initialize=True,
    )


def renames(options: ocp.CheckpointManagerOptions, *, local: bool) -> bool:
    """Tell whether steps are committed by our durable rename: always, but for a class or a mode that a user chose."""
    chosen = options.atomicity_options is not None and options.atomicity_options.mode == _COMMIT_FILE
    return local and options.temporary_path_class is None and not chosen


def open_lane(
    directory: Any,
    options: ocp.CheckpointManagerOptions,
    *,
    metadata: Any,
    logger: Any,
    handlers: Callable[[], dict[str, Any]],
) -> Lane:
    """Open one stock manager; `handlers` makes its `handler_registry=` (or Orbax's older arguments), anew per lane."""
    manager = ocp.CheckpointManager(directory, options=options, metadata=metadata, logger=logger, **handlers())
    return Lane(manager, options)


def _kept_only(metrics: Any) -> float:
    return 0.0  # never compared: a lane keeps all steps


_COMMIT_FILE = ocp.options.AtomicityMode.COMMIT_FILE
