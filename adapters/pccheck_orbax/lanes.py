"""Lanes: stock managers on one root, each with at most one save in flight (imports orbax; and what is below)."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, final

import orbax.checkpoint as ocp
from orbax.checkpoint import checkpoint_managers as cms

from pccheck_orbax.durable import DurableRename
from pccheck_orbax.layout import TRASH
from pccheck_orbax.policies import StepInfo, keeps_metrics
from pccheck_orbax.waiting import Call

_POLL_S = 0.002
_LOOKS = 20
_ERRORS = 8  # a stock manager keeps one of its thread and one for each file of metadata, of which there are few


@final
class Lane:
    """One stock manager, and the step that it has in flight.

    A stock manager runs one save at a time, and so do its checkpointer and its composite handler, whose state is that
    of one save; several of them on one root do not disturb each other: each has its own barrier keys, and they are told
    to keep all steps, to skip no save, and to delete nothing by themselves. `options` must be this lane's own.

    A lane is in flight from before its manager is called until `release()`. The manager's `save` runs on the lane's
    thread, so that no KeyboardInterrupt strikes within it.
    """

    def __init__(self, manager: ocp.CheckpointManager, options: ocp.CheckpointManagerOptions) -> None:
        self.manager = manager
        self.info: StepInfo | None = None
        self.has_saved = False
        self._options, self._best_fn = options, options.best_fn
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="pccheck-lane")
        self._call = Call(_nothing)
        self._call.run()
        self._failed = self._interrupted = self._taken = False
        self._failure: BaseException | None = None

    def __repr__(self) -> str:
        return "Lane(idle)" if self.info is None else f"Lane(saving step {self.info.step})"

    @property
    def step(self) -> int | None:
        """The step in flight."""
        info = self.info
        return None if info is None else info.step

    @property
    def running(self) -> bool:
        """Whether a save has been started that has not ended."""
        if self.info is None:
            return False
        return self._call.running or (self._call.error is None and bool(self.manager.is_saving_in_progress()))

    @property
    def refusal(self) -> BaseException | None:
        """What the manager's `save` has raised for the step in flight: then there is nothing to wait for."""
        return None if self.info is None else self._call.error

    @property
    def taken(self) -> bool:
        """Whether somebody has waited until the copy of the state was taken, so that it is of one moment."""
        return self._taken

    def start(self, info: StepInfo, save: dict[str, Any]) -> None:
        """Start to save with what `save` of a stock manager takes; whatever that raises, which is `refusal` then.

        An interrupt is raised when the copy of the state is taken, and the save goes on; a second one at once.
        """
        self._failure, self._taken = None, False
        self._call = call = Call(partial(self._save, info, save))
        self.info = info
        try:
            self._thread.submit(call.run)
            call.wait()
        except BaseException:
            if call.withdraw():
                self.info = None
                raise
            call.wait()
            self._taken = True
            raise
        self._taken = True
        if call.error is not None:
            raise call.error

    def _save(self, info: StepInfo, save: dict[str, Any]) -> None:
        if self._failed:
            self._forget_failure()
        if info.step in self.manager.all_steps():  # deleted meanwhile, by another lane or by hand: the disk decides
            self.manager.reload()
        # Orbax writes metrics where a best_fn is set, and warns there where none are given.
        self._options.best_fn = self._best_fn if info.metrics is not None else None
        try:
            self.manager.save(info.step, metrics=info.metrics, force=True, **save)
        except BaseException:
            self._failed = True
            self.settle_files()
            raise
        finally:
            self._options.best_fn = self._best_fn
        self.has_saved = True

    def finish(self) -> BaseException | None:
        """Wait for the save in flight, and give what it failed with, also when asked again.

        A KeyboardInterrupt only interrupts the wait.
        """
        if self._failure is not None:
            return self._failure
        if self._call.withdraw():
            return None  # interrupted before it began: it was told by that, and `taken` says no
        self._call.wait()
        if self._call.error is not None:
            return self._call.error
        try:
            # CPython 3.11 takes a thread whose join() was interrupted for ended: Orbax then waits for nothing more.
            while self._interrupted and self.running:
                time.sleep(_POLL_S)
            self.manager.wait_until_finished()
        except KeyboardInterrupt:
            self._interrupted = True
            raise
        except BaseException as error:  # a save's thread may end with CancelledError or SystemExit
            self._failure, self._failed, self._interrupted = error, True, False
            self.settle_files()
            return error
        self._interrupted = False
        return None

    def release(self) -> None:
        """Be idle: what came of the step in flight is in the books."""
        self.info = None

    def settle_files(self) -> None:
        """Wait for the small files of a failed save, and forget what an idle lane's manager would raise of it."""
        # Orbax writes a step's first metadata in the background: into a folder that is about to be removed. What it
        # keeps of that, or of a thread that failed, would be raised by the next restore, of another step. It tells
        # one error at a time.
        for _ in range(_ERRORS):
            try:
                self.manager.check_for_errors()
                return
            except Exception:
                pass

    def knows(self, step: int) -> bool:
        """Tell whether the manager lists `step`."""
        return step in self.manager.all_steps()

    def close(self) -> None:
        """Close the manager; an error of a save that was reported stays reported."""
        self._call.wait()
        self._thread.shutdown()
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
        self.settle_files()


def lane_options(
    options: ocp.CheckpointManagerOptions, name: str, *, processes: set[int] | None, local: bool
) -> ocp.CheckpointManagerOptions:
    """Give the options of the lane `name`, made from a user's.

    Arguments: processes: who takes part, where that is several (barriers then go by the coordination service, which has
    time-outs, not by a collective, which has none and waits for the devices); local: whether folders can be renamed.
    """
    multi = options.multiprocessing_options
    multi = dataclasses.replace(
        multi,
        barrier_sync_key_prefix=f"{multi.barrier_sync_key_prefix or ''}pccheck-{name}",
        active_processes=processes if processes is not None else multi.active_processes,
    )
    writes, ours = not options.read_only, renames(options, local=local)
    trash = TRASH if local and writes else None
    return dataclasses.replace(
        options,
        multiprocessing_options=multi,
        # Orbax changes the object that it is given; one of our own, and a lane's own.
        async_options=dataclasses.replace(options.async_options or ocp.AsyncOptions()),
        temporary_path_class=DurableRename if ours else options.temporary_path_class,
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
        # Names that a class of the user's made only that class knows: Orbax cleans up then, when it is opened.
        cleanup_tmp_directories=options.cleanup_tmp_directories and not ours and name == "0",
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
    given = handlers()

    def make() -> ocp.CheckpointManager:
        return ocp.CheckpointManager(directory, options=options, metadata=metadata, logger=logger, **given)

    return Lane(steady(make), options)


def steady(look: Callable[[], Any]) -> Any:
    """Give what `look` finds in the root; again where a step vanished as it looked, as a job's that keeps few does."""
    for _ in range(_LOOKS):
        try:
            return look()
        except (FileNotFoundError, NotADirectoryError):
            pass
    return look()


def _kept_only(metrics: Any) -> float:
    return 0.0  # never compared: a lane keeps all steps


def _nothing() -> None:
    """Before the first save."""


_COMMIT_FILE = ocp.options.AtomicityMode.COMMIT_FILE
