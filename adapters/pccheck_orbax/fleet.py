"""Fleet: which steps there are, and which lane saves which; decided alike in all processes (imports orbax, jax)."""

from __future__ import annotations

import os
import time
from functools import partial
from pathlib import Path
from typing import Any, final

import jax
import numpy as np
import orbax.checkpoint as ocp

from pccheck_orbax import policies
from pccheck_orbax.deleting import Deleter
from pccheck_orbax.durable import make_root, sync_names, sync_tree
from pccheck_orbax.finding import assert_there, find_steps, missing, step_names
from pccheck_orbax.lanes import Lane, lane_options, open_lane, renames
from pccheck_orbax.policies import StepInfo
from pccheck_orbax.waiting import meet

_POLL_S = 0.002


@final
class Fleet:
    """The lanes on one root, and the book of its steps: durable ones, those in flight, failures not told yet.

    One process takes whichever lane is free. Several take lanes in turn and learn of an end by waiting for it, in the
    same order everywhere, so that the books of all processes are equal at each call. `handlers` makes a lane's handler
    arguments, may be told what was deleted (`recycle`, or None), and has `close()`.
    """

    def __init__(
        self, directory: Any, options: Any, *, in_flight: int, metadata: Any, logger: Any, handlers: Any
    ) -> None:
        root = str(directory)
        self._options, self._handlers, self._logger = options, handlers, logger
        self._local = "://" not in root
        multi = options.multiprocessing_options
        processes = multi.active_processes or set(range(jax.process_count()))
        self._processes: set[int] | None = set(processes) if len(processes) > 1 else None
        self._primary = ocp.multihost.is_primary_host(multi.primary_host)
        self._turn = 0
        self._names = step_names(options)
        self._root = Path(root)
        if options.create and self._primary:
            make_root(root, options.file_options)
        self._swept = False
        self._deleter = Deleter(
            self._root, options, self._names, local=self._local, primary=self._primary, pending=in_flight,
            recycle=None if handlers.recycle is None else partial(handlers.recycle, root),
        )  # fmt: skip
        self._meet("open")
        count = 1 if options.read_only else in_flight
        self.in_flight = in_flight
        self.lanes = [self._open(directory, str(i), metadata if i == 0 else None) for i in range(count)]
        self.directory = self.lanes[0].manager.directory
        self._reader: Lane | None = None
        self._durable = {info.step: info for info in self._on_disk(None)}
        self._kept: set[int] = set()  # durable steps that retention has seen, and kept
        self._failures: list[tuple[int, BaseException]] = []
        self._refused: set[int] = set()

    def __repr__(self) -> str:
        return f"lanes {self.lanes}"

    # -- the book ---------------------------------------------------------------------------------------------------

    @property
    def _saving(self) -> dict[int, StepInfo]:
        return {info.step: info for lane in self.lanes if (info := lane.info) is not None}

    def infos(self) -> list[StepInfo]:
        """Give what is durable or in flight, in the order of steps."""
        return [info for _, info in sorted({**self._durable, **self._saving}.items())]

    def durable_steps(self) -> list[int]:
        """Give the durable steps in order."""
        return sorted(self._durable)

    def in_flight_steps(self) -> list[int]:
        """Give the steps in flight in order."""
        return sorted(self._saving)

    def reload(self) -> None:
        """Read the disk: steps that came or went by other hands."""
        self._deleter.await_gone()  # a step on its way out would be booked, and be kept in place of one that is there
        self.poll()
        self._durable = {i.step: i for i in self._on_disk(self._durable) if i.step not in self._saving}

    def raise_failures(self) -> None:
        """Raise the errors that were not raised yet: one as it is, several as a group."""
        failures, self._failures = self._failures, []
        if len(failures) == 1:
            raise failures[0][1]
        if failures:
            steps = ", ".join(str(step) for step, _ in failures)
            raise BaseExceptionGroup(f"checkpoints of steps {steps} were not saved", [error for _, error in failures])

    # -- saving -----------------------------------------------------------------------------------------------------

    def poll(self) -> None:
        """Book the saves that have ended; with several processes only waiting books."""
        if self._processes is None:
            for lane in self.lanes:
                if lane.step is not None and not lane.running:
                    self._finish(lane)

    def would_wait(self) -> bool:
        """Tell whether a save would have to wait for a lane."""
        self.poll()
        if self._processes is not None:
            return self.lanes[self._turn % len(self.lanes)].running
        return all(lane.step is not None for lane in self.lanes)

    def running(self) -> bool:
        """Tell whether any save is running."""
        return any(lane.running for lane in self.lanes)

    def take(self) -> Lane:
        """Give an idle lane, after a wait where there is none: for any; with several processes for the next in turn."""
        began = time.monotonic()
        if self._processes is not None:
            lane = self.lanes[self._turn % len(self.lanes)]
            self._turn += 1
            if lane.step is not None:
                self._finish(lane)
            if not self._failures:  # else all processes are about to raise: a lane fails for all or for none
                self._meet("save")
        else:
            while (free := self._free()) is None:
                time.sleep(_POLL_S)
            lane = free
        jax.monitoring.record_event_duration_secs("/jax/pccheck/save/wait_for_lane_secs", time.monotonic() - began)
        return lane

    def start(self, lane: Lane, info: StepInfo, save: dict[str, Any]) -> None:
        """Start a save on the lane that was taken; whatever it raises, with the step in its notes."""
        self._deleter.settle(info.step)
        try:
            lane.start(info, save)
        except BaseException as error:
            if lane.refusal is not None:
                self._refuse(lane, info.step, error)
            raise
        if self._processes is None:
            self._turn += 1  # a lane that refused is tried again
        if not self._swept:  # after: the save has its store's lock, so that no other process writes here
            in_flight = {self._names.build_name(step) for step in self.in_flight_steps()}
            self._deleter.sweep(in_flight)
            self._swept = True
        if not self._options.enable_async_checkpointing:
            self._finish(lane)
        self.poll()  # a save that had nothing to do in the background has ended by now

    def _refuse(self, lane: Lane, step: int, error: BaseException) -> None:
        error.add_note(f"the checkpoint of step {step} was not saved")
        self._refused.add(step)
        if self._primary:
            self._deleter.await_folders(step)
        lane.settle_files()
        lane.release()

    def finish_all(self) -> None:
        """Wait for all saves in flight, oldest step first."""
        for lane in sorted((lane for lane in self.lanes if lane.step is not None), key=lambda lane: lane.step or 0):
            self._finish(lane)

    def settle(self, step: int) -> None:
        """Wait for the save of `step` where it is in flight; raise its error, at once and not again."""
        for lane in self.lanes:
            if lane.step == step:
                self._finish(lane)
        error = next((error for failed, error in self._failures if failed == step), None)
        if error is not None:
            self._failures = [(s, e) for s, e in self._failures if e is not error]
            raise error

    def _free(self) -> Lane | None:
        self.poll()
        turn = self._turn % len(self.lanes)
        lanes = self.lanes[turn:] + self.lanes[:turn]
        return next((lane for lane in lanes if lane.step is None), None)

    def _finish(self, lane: Lane) -> None:
        # An interrupt may strike between any two lines: the lane is released last, and all before may be done again.
        info: Any = lane.info
        error, step = lane.finish(), info.step
        if not lane.taken and self._processes is None:  # interrupted while the copy was made: save() has told that
            self._deleter.discard(step, published=True)
            lane.release()
            return
        if error is None:
            try:
                self._sync(step)
            except OSError as failed:
                error = failed
        if error is None:
            self._durable[step] = info
        else:
            if all(failed != step for failed, _ in self._failures):
                error.add_note(f"the checkpoint of step {step} was not saved")
                self._failures.append((step, error))
            self._deleter.discard(step)
        lane.release()

    def _sync(self, step: int) -> None:
        """See that a commit is there, and make it durable where it was not ours to rename; OSError if not."""
        if not (self._local and self._primary):
            return
        folder = self._root / self._names.build_name(step)
        os.stat(folder)
        if not renames(self._options, local=True):
            sync_tree(folder)
            sync_names(self._root)

    def _discard_refused(self) -> None:
        """Remove what a save left that raised at once: its folder was still being made then, and until lanes close."""
        for step in self._refused:
            self._deleter.discard(step, refused=True)
        self._refused.clear()

    # -- reading ----------------------------------------------------------------------------------------------------

    def knowing(self) -> Lane:
        """Give a lane whose handlers know the items, as they have saved them; the first where none has."""
        return next((lane for lane in self.lanes if lane.has_saved), self.lanes[0])

    def reader(self) -> Lane:
        """Give an idle lane to restore with, best one that has saved; where all are busy, one that never saves."""
        idle = [lane for lane in self.lanes if lane.step is None]
        if not idle:
            self._reader = self._reader or self._open(self.directory, "reader", None)
            return self._reader
        lane = next((lane for lane in idle if lane.has_saved), idle[0])
        lane.settle_files()  # its manager may keep the error of a save that was refused: not of the step to restore
        return lane

    def assert_there(self, step: int) -> None:
        """Raise FileNotFoundError for a step that is not on the disk."""
        assert_there(step, self._durable, self._names, self.directory)

    def _on_disk(self, known: dict[int, StepInfo] | None) -> list[StepInfo]:
        if self._local and not self._root.is_dir():
            return []
        return find_steps(self.directory, self._names, self._options, self.lanes[0], known)

    # -- deleting ---------------------------------------------------------------------------------------------------

    def retain(self, policy: Any) -> None:
        """Delete the durable steps that `policy` does not keep."""
        infos = [info for _, info in sorted(self._durable.items())]
        gone = policies.dropped(policy, infos)
        if infos and self._processes is not None and not policies.clockless(policy):
            mine = np.array([info.step in gone for info in infos])
            agreed = ocp.multihost.broadcast_one_to_all(mine, is_source=self._primary)
            gone = [info.step for info, drop in zip(infos, np.asarray(agreed), strict=True) if drop]
        self._deleter.drop(gone, self.lanes)  # first: what an interrupt keeps from it stays in the book
        for step in gone:
            self._durable.pop(step, None)
        self._kept = set(self._durable)

    def make_room(self, policy: Any) -> None:
        """See that a save that is started now leaves no more files than what `policy` keeps and `in_flight` ones.

        What is in flight, what became durable since `retain` was called, and what is being removed, each has its file.
        Where they leave no room for another one, the steps are deleted, and removals awaited, before and not after the
        save has begun; the first save needs room for `in_flight` files, since it makes as many. Several processes meet
        at each deletion: one whose last save was refused there alone must not wait here for others, which wait for it.
        """
        if self._processes is not None:
            return
        needed = len(self._saving) + 1 if self._swept else self.in_flight
        try:
            if needed + len(self._durable.keys() - self._kept) > self.in_flight:
                self.retain(policy)
        finally:  # a policy that chokes leaves more than there is room for
            self._deleter.await_room(max(0, self.in_flight - needed - len(self._durable.keys() - self._kept)))

    def delete(self, step: int) -> None:
        """Rename a durable step away, and have it removed. FileNotFoundError where there is none."""
        if step not in self._durable:
            raise missing(step, self._durable, self.directory)
        self._deleter.delete(step, self.lanes)
        del self._durable[step]

    def drain(self) -> None:
        """Wait until what was deleted is removed."""
        self._deleter.drain()

    # -- opening and closing ------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Close lanes, handlers and trash, each whatever the others raise; the first error is raised at the end."""
        errors: list[BaseException] = []
        lanes = [lane.close for lane in [*self.lanes, self._reader] if lane is not None]
        for close in [self._deleter.drain, *lanes, self._handlers.close, self._discard_refused, self._deleter.close]:
            try:
                close()
            except Exception as error:
                errors.append(error)
        if errors:
            raise errors[0]

    def _open(self, directory: Any, name: str, metadata: Any) -> Lane:
        options = lane_options(self._options, name, processes=self._processes, local=self._local)
        return open_lane(directory, options, metadata=metadata, logger=self._logger, handlers=self._handlers)

    def _meet(self, what: str) -> None:
        meet(self._options, self._processes, what, self._turn, self._root)
