"""Manager: an Orbax CheckpointManager with several saves in flight (imports orbax, jax, pccheck; lanes and below)."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any, Self, final

import orbax.checkpoint as ocp
from orbax.checkpoint import checkpoint_managers as cms
from orbax.checkpoint.checkpoint_manager import StepAlreadyExistsError

from pccheck.errors import ClosedError, OptionError
from pccheck_orbax import policies
from pccheck_orbax.engine import Engine
from pccheck_orbax.fleet import Fleet
from pccheck_orbax.policies import StepInfo
from pccheck_orbax.registry import registry as pccheck_registry


@final
class CheckpointManager(ocp.AbstractCheckpointManager):
    """Save and restore steps as `ocp.CheckpointManager` does, with up to `in_flight` saves running at once.

    Steps lie on disk as Orbax lays them, and any stock manager reads them. What differs:

    * `save()` waits only where `in_flight` saves are running. `all_steps()` and `latest_step()` list, as a stock
      manager does within the process that saves, what is still in flight, too; `durable_steps()` lists what would
      survive.
    * What is kept is decided among durable steps only, when a save starts and in `wait_until_finished()`; a step
      vanishes by one rename, its files are removed in the background (`enable_background_delete` changes nothing). A
      save that would leave files of more than `in_flight` steps beside those that are kept waits for that (in one
      process).
    * A save that fails drops its own step and no other. Its error is raised once, with a note that tells the step, by
      the next `save` (which then saves nothing), `wait_until_finished`, `check_for_errors`, `close`, or by whatever
      asks for that very step.
    * `restore`, `delete`, `metadata`, `item_metadata`, `metrics` of a step in flight wait for that save alone.
    * A step counts as durable when its files, its folders and its name are synced: then it survives power loss, as far
      as its handlers' files were written by this host or synced by their own. (With a `temporary_path_class` or
      `AtomicityMode.COMMIT_FILE` of the user's, they are synced after the commit, and before older steps go.)
    * Metrics are written to disk also where only a `preservation_policy` ranks by them, and `best_step()` follows a
      `BestN` in it.

    Arguments as of `ocp.CheckpointManager`, in its order, and
        options: may also come second, as most code has it by keyword; None: `CheckpointManagerOptions(
            cleanup_tmp_directories=True)`. An option that is not served raises pccheck.errors.OptionError.
        in_flight: saves that may run at once, 1 to 64.
        handler_registry: a registry, which all lanes share (its handlers may then keep nothing of a save but by its
            directory: Orbax's and pccheck's do so), or a function that makes one per lane; None: pccheck's handlers for
            StandardSave/Restore, PyTreeSave/Restore and pccheck's own args, of `item_names` or of any item.
        **engine: what `pccheck_orbax.Engine` takes (`chunk_bytes`, `snapshot`, `writers`, ...), for those handlers.

    Like the stock one it is for one thread at a time, and every process of the job calls it alike: all take the same
    lane and delete the same steps. A process that does not come to `save` is a TimeoutError in the others after
    `AsyncOptions.timeout_secs`; one that goes within the milliseconds of Orbax's own barriers, after Orbax's 300 s or
    when JAX's heartbeat misses it.
    """

    def __init__(
        self,
        directory: Any,
        checkpointers: Any = None,
        options: Any = None,
        metadata: Any = None,
        item_names: Sequence[str] | None = None,
        item_handlers: Any = None,
        logger: Any = None,
        handler_registry: Any = None,
        *,
        in_flight: int = 2,
        **engine: Any,
    ) -> None:
        ocp.CheckpointManager.register(CheckpointManager)  # isinstance(m, ocp.CheckpointManager): trainers ask
        if isinstance(checkpointers, ocp.CheckpointManagerOptions) and options is None:
            checkpointers, options = None, checkpointers
        if not isinstance(in_flight, int) or not 1 <= in_flight <= 64:
            raise OptionError("in_flight", in_flight, "an integer from 1 to 64")
        policies.check_engine(engine)
        self._options = options or ocp.CheckpointManagerOptions(cleanup_tmp_directories=True)
        policies.check(self._options, local="://" not in str(directory))
        self._save_policy = policies.save_policy(self._options)
        self._keep_policy = policies.keep_policy(self._options)
        self._closed = False
        self._fleet = Fleet(
            directory,
            self._options,
            in_flight=in_flight,
            metadata=metadata,
            logger=logger,
            handlers=_Handlers(
                checkpointers, item_names, item_handlers, handler_registry, {"in_flight": in_flight, **engine}
            ),
        )

    def __repr__(self) -> str:
        return f"CheckpointManager({self.directory}, durable {self._fleet.durable_steps()}, {self._fleet})"

    # -- what there is ----------------------------------------------------------------------------------------------

    @property
    def directory(self) -> Any:
        """The folder that holds the steps."""
        return self._fleet.directory

    @property
    def in_flight(self) -> int:
        """How many saves may run at once."""
        return self._fleet.in_flight

    def all_steps(self, read: bool = False) -> list[int]:
        """Give the steps that are durable or in flight, in order; `read` reads the disk first."""
        if read:
            self.reload()
        return [info.step for info in self._fleet.infos()]

    def latest_step(self) -> int | None:
        """Give the greatest of `all_steps()`, None where there is none."""
        return max(self.all_steps(), default=None)

    def durable_steps(self) -> list[int]:
        """Give the steps that are committed, in order: what a new process would find (several processes: did agree)."""
        self._fleet.poll()
        return self._fleet.durable_steps()

    def in_flight_steps(self) -> list[int]:
        """Give the steps whose saves are running, in order."""
        self._fleet.poll()
        return self._fleet.in_flight_steps()

    def best_step(self) -> int | None:
        """Give the step of the best metrics; the latest where nothing ranks them, None where none has metrics."""
        ranking = policies.ranking(self._options)
        if ranking is None:
            return self.latest_step()
        metric, less_is_better = ranking
        infos = [info for info in self._fleet.infos() if info.metrics is not None]
        infos.sort(key=lambda info: metric(info.metrics), reverse=less_is_better)
        return infos[-1].step if infos else None

    def reload(self) -> None:
        """Read from disk which steps there are; what is in flight stays."""
        self._fleet.reload()

    def metadata(self, step: int | None = None) -> Any:
        """Give a step's `StepMetadata`, or the `RootMetadata` where `step` is None."""
        if step is None:
            return self._fleet.lanes[0].manager.metadata()
        self._fleet.settle(step)
        return self._fleet.knowing().manager.metadata(step)

    def item_metadata(self, step: int) -> Any:
        """Give the metadata of a step's items, or of its only item."""
        self._fleet.settle(step)
        return self._fleet.knowing().manager.item_metadata(step)

    def metrics(self, step: int) -> Any:
        """Give the metrics that were saved with a step, None where none were."""
        self._fleet.settle(step)
        return self._fleet.lanes[0].manager.metrics(step)

    # -- saving -----------------------------------------------------------------------------------------------------

    def reached_preemption(self, step: int) -> bool:
        """Tell whether the job is to end after `step`."""
        return bool(self._fleet.lanes[0].manager.reached_preemption(step))

    def should_save(self, step: int) -> bool:
        """Tell whether `save(step)` would save, by the policy; "a save is in progress" means: `save` would wait."""
        latest = self.latest_step()
        if self._options.read_only or (latest is not None and latest >= step):
            return False
        busy = self._options.enable_should_save_is_saving_in_progress_check and self._fleet.would_wait()
        context = cms.DecisionContext(
            is_saving_in_progress=busy,
            reached_preemption=self.reached_preemption(step),
            multiprocessing_options=self._options.multiprocessing_options,
        )
        infos = self._fleet.infos()
        return bool(self._save_policy.should_save(StepInfo.now(step), previous_steps=infos, context=context))

    def save(
        self,
        step: int,
        items: Any = None,
        save_kwargs: Any = None,
        metrics: Any = None,
        force: bool | None = False,
        args: Any = None,
        custom_metadata: dict[str, Any] | None = None,
    ) -> bool:
        """Start to save a step; give whether one was started (False: the policy says no, or `step` is not the latest).

        Arguments as of `ocp.CheckpointManager.save`. Waits where `in_flight` saves are running, and as long as the
        handler needs to take its copy. A KeyboardInterrupt is raised when that is taken, and the save goes on; a second
        one at once, and the step is dropped.

        Errors: ClosedError after `close()`; with `force` StepAlreadyExistsError where the step is there; the error of
        an earlier save, with its step in the notes: then this one is not started; whatever the handler raises.
        """
        if self._closed:
            raise ClosedError(f"save({step}) on a closed CheckpointManager({self.directory}): open another one")
        if items is None and args is None:
            raise ValueError("save() was given nothing to save: pass args=, e.g. ocp.args.StandardSave(state)")
        step = int(step)  # a jax.Array of a step is taken by the stock manager, too
        if self._options.read_only or not (force or self.should_save(step)):
            return False
        policies.check_metrics(self._options, step, metrics)
        lane = self._fleet.take()
        self._fleet.raise_failures()
        if step in self.all_steps():
            raise StepAlreadyExistsError(
                f"step {step} is already in {self.directory}: delete it first, or save another"
            )
        save = {"items": items, "save_kwargs": save_kwargs, "args": args, "custom_metadata": custom_metadata}
        self._unless_it_chokes(self._fleet.make_room)
        self._fleet.start(lane, StepInfo.now(step, metrics), save)
        self._unless_it_chokes(self._fleet.retain)  # now: deletions hold up the making of folders, which save() awaits
        return True

    def _unless_it_chokes(self, delete: Callable[[Any], None]) -> None:
        """Delete by the policy; one that chokes on an older step must not stop the job's saves."""
        try:
            delete(self._keep_policy)
        except Exception as error:
            logging.getLogger(__name__).warning("no step is deleted in %s: %r", self.directory, error)

    def is_saving_in_progress(self) -> bool:
        """Tell whether a save is running."""
        self._fleet.poll()
        return self._fleet.running()

    def wait_until_finished(self) -> None:
        """Wait until no save is in flight and what is not kept is gone; then raise the errors not raised yet."""
        self._fleet.finish_all()
        try:
            if not self._options.read_only:
                self._fleet.retain(self._keep_policy)
        finally:
            self._fleet.drain()
            self._fleet.raise_failures()

    def check_for_errors(self) -> None:
        """Raise the errors of failed saves that were not raised yet; without waiting."""
        self._fleet.poll()
        self._fleet.raise_failures()

    # -- restoring, deleting, closing ---------------------------------------------------------------------------------

    def restore(
        self, step: int | None, items: Any = None, restore_kwargs: Any = None, directory: Any = None, args: Any = None
    ) -> Any:
        """Give what a step holds; None: the latest. Arguments and results as of `ocp.CheckpointManager.restore`.

        Waits for `step` alone where it is in flight, and raises its error; FileNotFoundError where there is none.
        """
        if directory is None:
            step = self.latest_step() if step is None else int(step)
            if step is None:
                raise FileNotFoundError(f"no steps in {self.directory}: nothing was saved there")
            self._fleet.settle(step)
            self._fleet.assert_there(step)
        reader = self._fleet.reader().manager
        return reader.restore(step, items, restore_kwargs=restore_kwargs, directory=directory, args=args)

    def delete(self, step: int) -> None:
        """Remove a step, after its save where that runs. FileNotFoundError where there is none."""
        if self._options.read_only:
            return
        step = int(step)
        self._fleet.settle(step)
        self._fleet.delete(step)

    def close(self) -> None:
        """Wait for all saves, remove what is not kept, release everything; raise the errors not raised yet."""
        try:
            self.wait_until_finished()
        finally:
            self._closed = True
            self._fleet.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


@final
class _Handlers:
    """What makes a lane's handler arguments; owns the engine where the handlers are ours."""

    def __init__(
        self, checkpointers: Any, item_names: Any, item_handlers: Any, registry: Any, engine: dict[str, Any]
    ) -> None:
        given = {"checkpointers": checkpointers, "item_handlers": item_handlers, "handler_registry": registry}
        given = {name: value for name, value in given.items() if value is not None}
        if len(given) > 1:
            raise OptionError(min(given), given[min(given)], f"None beside {max(given)}")
        if given and len(engine) > 1:
            name = next(name for name in engine if name != "in_flight")
            raise OptionError(name, engine[name], f"left out beside {min(given)}=: it is for pccheck's own handlers")
        self._given, self._names = given, item_names
        self._engine = None if given else Engine(**engine)
        self.recycle = None if self._engine is None else self._engine.recycle

    def __call__(self) -> dict[str, Any]:
        """Give a new lane's arguments."""
        if self._engine is not None:
            # For any item: one that is named in it would take no other args, and names say nothing of these.
            return {"handler_registry": pccheck_registry(engine=self._engine)}
        given = dict(self._given)
        make = given.get("handler_registry")
        if callable(make):
            given["handler_registry"] = make()
        return given if self._names is None else {**given, "item_names": self._names}

    def close(self) -> None:
        """Close the engine."""
        if self._engine is not None:
            self._engine.close()
