"""Deleting: steps vanish by one rename, in one order, on a thread of ours (imports orbax; lanes, trash, durable)."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, final

import orbax.checkpoint as ocp

from pccheck_orbax.durable import TEMPORARY, WHOLE, is_live
from pccheck_orbax.lanes import Lane, renames
from pccheck_orbax.layout import TRASH, is_uncommitted
from pccheck_orbax.trash import Trash

_FOLDERS_POLL_S, _FOLDERS_POLLS = 0.005, 100  # Orbax takes milliseconds; a save refused before it began makes none


@final
class Deleter:
    """Deletes steps through the lanes, one after the other in the order of the calls, off the caller's path.

    One thread, so that with several processes, which meet at each deletion, all come in the same order. At most
    `pending` removals of what was deleted wait; then a deletion waits for the oldest. `recycle` is as of `Trash`.
    """

    def __init__(
        self, root: Path, options: Any, names: Any, *, local: bool, primary: bool, pending: int,
        recycle: Callable[[Path], None] | None,
    ) -> None:  # fmt: skip
        self._root, self._names = root, names
        self._subdir = options.todelete_subdir
        self._timeout_s = float((options.async_options or ocp.AsyncOptions()).timeout_secs)
        self._ours = renames(options, local=local)
        self._cleans = self._ours and bool(options.cleanup_tmp_directories)  # else a lane's manager does it
        self._deletions: list[tuple[int, Future[None]]] = []
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="pccheck-delete")
        self._trash: Trash | None = None
        if local and primary and not options.read_only and root.is_dir():
            threads = options.num_deletion_threads or 1
            self._trash = Trash(
                root, threads=threads, pending=pending, timeout_s=self._timeout_s, recycle=recycle
            )  # fmt: skip

    def sweep(self, in_flight: set[str]) -> None:
        """Remove what crashes have left; call it once this process is the one that writes, not where it only looks.

        A manager that was opened to look at a running job took the folders of its saves in flight for left ones, and
        both their saves and the job waited for these. `in_flight`: names of steps that stay.
        """
        if self._trash is None:
            return

        def stale(name: str) -> bool:
            step, suffix, _ = name.partition(TEMPORARY)
            return bool(suffix) and self._cleans and not (step in in_flight or is_live(self._root / step))

        self._trash.sweep(self._root, stale)

    def delete(self, step: int, lanes: Sequence[Lane]) -> None:
        """Delete a step; return when its name is gone. Raises what it failed with."""
        self._thread.submit(self._delete, step, lanes).result(self._timeout_s)

    def drop(self, steps: Sequence[int], lanes: Sequence[Lane]) -> None:
        """Delete steps behind the caller's back, once those of the call before are gone; a failure is a warning."""
        self.await_gone()
        self._deletions += [(step, self._thread.submit(self._delete, step, lanes)) for step in steps]

    def settle(self, step: int) -> None:
        """Wait where `step` is being deleted: it may be saved again then."""
        for deleted, deletion in self._deletions:
            if deleted == step:
                self._end(deleted, deletion)

    def discard(self, step: int, *, published: bool = False, refused: bool = False) -> None:
        """Have the folder of a failed save removed: it may hold names of slots, which are then not free.

        That is a temporary one, or one with the step's name that was not committed by its file; with `published`, also
        one that was committed. Of a save that was `refused` at once there may be nothing, and what has that name may be
        another manager's save in flight: only what is committed by our rename is removed then.
        """
        if self._trash is None or (refused and not self._ours):
            return
        name = self._names.build_name(step)
        if published or is_uncommitted(os.path.join(self._root, name)):
            self._trash.take(self._root / name)
        self._trash.take(self._root / (name + TEMPORARY))
        self._trash.take(self._root / (name + TEMPORARY + WHOLE))

    def await_folders(self, step: int) -> None:
        """Wait, briefly, for the folders of a save that raised at once: Orbax still makes them, and a retry of that
        step would meet them half made (it then fails, or waits 300 s for a signal that does not come)."""
        folder, seen = self._root / (self._names.build_name(step) + TEMPORARY), None
        for _ in range(_FOLDERS_POLLS if self._ours else 0):
            names = sorted(os.listdir(folder)) if folder.is_dir() else []
            if names == seen and any(TEMPORARY in name for name in names) and len(names) > 1:
                return
            seen = names
            time.sleep(_FOLDERS_POLL_S)

    def await_gone(self) -> None:
        """Wait until what was deleted has lost its name; what fails is a warning."""
        while self._deletions:  # forgotten after the wait: an interrupt of that has not ended them
            self._end(*self._deletions[0])
            del self._deletions[0]

    def await_room(self, most: int) -> None:
        """Wait until at most `most` of the steps that were deleted still have their files."""
        self.await_gone()
        if self._trash is not None:
            self._trash.await_room(most)

    def drain(self) -> None:
        """Wait until all that was deleted is removed."""
        self.await_gone()
        if self._trash is not None:
            self._trash.drain()

    def close(self) -> None:
        """Drain and end the threads."""
        self.drain()
        self._thread.shutdown()
        if self._trash is not None:
            self._trash.close()

    def _delete(self, step: int, lanes: Sequence[Lane]) -> None:
        lane = next((lane for lane in lanes if lane.knows(step)), None)
        if lane is None:  # an interrupted wait made the stock manager forget it
            lane = lanes[0]
            lane.manager.reload()
        name = self._names.build_name(step)
        if lane.knows(step):
            try:
                lane.manager.delete(step)
            except FileNotFoundError:  # the trash may have been removed, empty, under its rename
                if self._trash is None or self._subdir is not None or not self._trash.take(self._root / name):
                    raise
                lane.manager.reload()
        if self._trash is not None and self._subdir is None:
            self._trash.take(self._root / TRASH / name)

    def _end(self, step: int, deletion: Future[None]) -> None:
        try:
            deletion.result(self._timeout_s)
        except Exception as error:
            logging.getLogger(__name__).warning("step %d in %s is not deleted: %r", step, self._root, error)
