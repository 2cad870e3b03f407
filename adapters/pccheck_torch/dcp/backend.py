"""DCP with many saves in flight: lanes, each with a process group of its own (imports torch, pccheck, this package)."""

from __future__ import annotations

import concurrent.futures
import os
import threading
import time
import warnings
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from functools import partial
from types import TracebackType
from typing import Any, Literal, Self, final

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_saver import AsyncSaveResponse, async_save, save

import pccheck
from pccheck.errors import ClosedError, DeadlineError, OptionError
from pccheck_torch.dcp.futures import Saving, cause_of
from pccheck_torch.dcp.lanes import Lane, coordinator, new_group
from pccheck_torch.dcp.load_planner import LoadPlanner
from pccheck_torch.dcp.loading import Loaded, load_newest
from pccheck_torch.dcp.plans import SavePlanner
from pccheck_torch.dcp.writer import Writer, patience_s


@final
class Backend:
    """Saves and loads state dicts through unmodified DCP, with several saves in flight, in a pccheck directory.

    Each save is a `dcp.async_save` with a writer of its own, in a lane of its own: a gloo process group, made here, and
    used by one save at a time. The k-th save takes lane k modulo `in_flight` on every rank, and waits until that lane's
    last save has ended. All ranks must make the same calls in the same order.

    Args:
        directory: the job's folder, the same on all ranks; or an open Checkpointer, which its owner closes.
        in_flight: saves that may be under way at once, 1..64, 2 unless told; a Checkpointer given has its own.
        process_group: the ranks that save; None = all. Each of them must make a Backend (it makes process groups).
        options: as of `pccheck.Checkpointer` (keep, snapshot, replicated, ...), with a directory only. Where several
            ranks save and no `coordinator` is given, they agree through the store of their process group.

    Raises:
        OptionError: an option is out of range, or given beside a Checkpointer.
        (any): as `pccheck.Checkpointer`.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str] | pccheck.Checkpointer,
        *,
        in_flight: int | None = None,
        process_group: dist.ProcessGroup | None = None,
        **options: Any,
    ) -> None:
        self._distributed = dist.is_available() and dist.is_initialized()
        self._rank = dist.get_rank(process_group) if self._distributed else 0
        if in_flight is not None:
            options["in_flight"] = in_flight
        self._owned = not isinstance(directory, pccheck.Checkpointer)
        if isinstance(directory, pccheck.Checkpointer):
            for name, value in options.items():
                raise OptionError(name, value, "left to the Checkpointer that was given")
            self.checkpointer = directory
        else:
            if self._distributed and "coordinator" not in options and dist.get_world_size(process_group) > 1:
                options["coordinator"] = coordinator(directory, process_group)
            self.checkpointer = pccheck.Checkpointer(directory, **options)
        self._patience_s = patience_s(self.checkpointer)
        self._lanes = [
            Lane(new_group(process_group, self._patience_s) if self._distributed else None)
            for _ in range(self.checkpointer.options.in_flight)
        ]
        self._count = 0
        self._saves: list[Saving] = []  # under way, or failed and nobody asked
        self._turn = threading.RLock()
        self._closed = False

    # -- saving -----------------------------------------------------------------------------------------------------

    def async_save(
        self,
        state_dict: Mapping[str, Any],
        step: int,
        *,
        metadata: Mapping[str, Any] | None = None,
        when_full: Literal["block", "skip"] | None = None,
    ) -> AsyncSaveResponse:
        """Start a save and return.

        The state must not change until `staging_completion`, which is at once with snapshot="copy"; the gate of an
        attached optimizer waits for it. `upload_completion` resolves when the checkpoint is durable on all ranks.

        Args:
            state_dict: as for `dcp.async_save`: DTensors, tensors, Python values, Stateful objects.
            step: your label, the same on all ranks.
            metadata: small JSON that `pccheck inspect` shows.
            when_full: as in `Checkpointer.save`.

        Raises:
            DeadlineError: the lane's last save did not end.
            (any): what this rank cannot save; the others hear of it in the future. Or, after this save was started, the
                first failure of an earlier one that nobody asked about (on_error="raise").
        """
        with self._next_lane(step) as (lane, saving):
            writer = Writer(self.checkpointer, step, metadata=metadata, when_full=when_full)
            started = async_save(
                dict(state_dict), storage_writer=writer, planner=SavePlanner(), process_group=lane.group,
                no_dist=not self._distributed,
            )  # fmt: skip
            upload = started.upload_completion if isinstance(started, AsyncSaveResponse) else started
            upload.add_done_callback(lambda done: self._end(saving, writer, done.exception()))
        if writer.refused is not None:
            saving.asked = True
            raise writer.refused
        assert writer.saved is not None
        staged: Future[None] = Future()  # in no mode earlier than the state may change
        writer.saved.captured.add_done_callback(lambda _: staged.set_result(None))
        self._report(saving)
        return AsyncSaveResponse(staging_completion=staged, upload_completion=saving)

    def save(self, state_dict: Mapping[str, Any], step: int, *, metadata: Mapping[str, Any] | None = None) -> None:
        """Save, and return when the checkpoint is durable on all ranks; arguments and errors as `async_save`."""
        with self._next_lane(step) as (lane, saving):
            writer = Writer(self.checkpointer, step, metadata=metadata)
            try:
                save(
                    dict(state_dict), storage_writer=writer, planner=SavePlanner(), process_group=lane.group,
                    no_dist=not self._distributed,
                )  # fmt: skip
            except (Exception, CheckpointException) as error:
                self._end(saving, writer, error)
            else:
                saving.end(None)
        saving.result(self._patience_s)
        self._report(saving)

    def _end(self, saving: Saving, writer: Writer, error: BaseException | None) -> None:
        """Note how a save ended. A collective of DCP that broke does not know why: what the ranks agree on tells."""
        if error is None or isinstance(error, CheckpointException) or writer.saved is None:
            saving.end(cause_of(error, self._rank))
        else:
            writer.saved.durable.add_done_callback(lambda done: saving.end(done.exception() or error))

    @contextmanager
    def _next_lane(self, step: int) -> Iterator[tuple[Lane, Saving]]:
        """Give the lane that this save has on all ranks, once its last save has ended."""
        with self._turn:
            self._assert_open()
            lane = self._lanes[self._count % len(self._lanes)]
            if lane.last is not None:
                self._await([lane.last], self._patience_s)
            saving = Saving(step)
            self._count += 1
            self._saves = [s for s in self._saves if not s.done() or (s.failure() is not None and not s.asked)]
            self._saves.append(saving)
            lane.last = saving
            try:
                yield lane, saving
            except BaseException as error:
                saving.asked = True
                saving.end(error)
                raise

    # -- waiting ----------------------------------------------------------------------------------------------------

    def wait(self, timeout: float | None = None) -> None:
        """Wait until every save has ended; raise the first failure that nobody asked about.

        Raises DeadlineError after `timeout` seconds; without it each save has its own deadlines.
        """
        self._assert_open()
        self._await(list(self._saves), self._patience_s if timeout is None else timeout)
        self._report(None)

    def _await(self, saves: list[Saving], timeout_s: float) -> None:
        began = time.monotonic()
        left = concurrent.futures.wait(saves, timeout_s).not_done
        if left:
            steps = sorted(s.step for s in left if isinstance(s, Saving))
            raise DeadlineError(f"the saves of steps {steps} to end; {self!r}", time.monotonic() - began)

    def _report(self, but: Saving | None) -> None:
        """Raise, or warn of, failures that nobody asked about, each once."""
        failed = [s for s in self._saves if s is not but and s.failure() is not None and not s.asked]
        for saving in failed:
            error = saving.exception()
            assert error is not None
            if self.checkpointer.options.on_error == "raise":
                raise error
            warnings.warn(f"the save of step {saving.step} failed: {error}", RuntimeWarning, stacklevel=3)
        if not self._closed:
            self.checkpointer.raise_errors()  # of saves that were not made here, and of captures that came too late

    # -- loading ----------------------------------------------------------------------------------------------------

    def load(
        self,
        state_dict: dict[str, Any],
        step: int | None = None,
        *,
        strict: bool = True,
        allow_partial_load: bool = False,
    ) -> Loaded | None:
        """Load the newest checkpoint that verifies into a state dict, in place; None where no checkpoint is.

        Waits for saves under way. Every rank of the process group must call it.

        Args:
            state_dict: as for `dcp.load`.
            step: None = the newest, or the newest before it that verifies on all ranks. A step older than the newest
                begins a branch (see `Checkpointer.restore`).
            strict: see `LoadPlanner`.
            allow_partial_load: likewise.

        Raises:
            StateDictError: the checkpoint does not fit; nothing was changed.
            StepNotFoundError, NoValidCheckpointError, DamagedError, MediumError: as `Checkpointer.restore`.
        """
        with self._turn:
            self._assert_open()
            self._await(list(self._saves), self._patience_s)
            planner = partial(LoadPlanner, strict=strict, allow_partial_load=allow_partial_load)
            return load_newest(self.checkpointer, state_dict, step, planner, self._lanes[0].group, self._rank)

    # -- the end ----------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Wait for what is under way, give up the process groups, close a Checkpointer of its own. Idempotent.

        Raises the first failure that nobody asked about.
        """
        with self._turn:
            if self._closed:
                return
            self._await(list(self._saves), self._patience_s)
            self._closed = True
            for lane in self._lanes:
                if lane.group is not None and dist.is_initialized():
                    dist.destroy_process_group(lane.group)
            if self._owned:
                self.checkpointer.close()
        self._report(None)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
            return
        try:
            self.close()
        except Exception as second:  # the exception under way is the one to see
            error.add_note(f"and closing the Backend raised {second!r}")

    def __repr__(self) -> str:
        steps = sorted(s.step for s in self._saves if not s.done())
        state = "closed" if self._closed else f"{len(steps)} of {len(self._lanes)} in flight {steps}"
        return f"<Backend of rank {self._rank}: {state}; {self.checkpointer!r}>"

    # -- inside -----------------------------------------------------------------------------------------------------

    def _assert_open(self) -> None:
        if self._closed:
            raise ClosedError("this Backend is closed; make a new one")
