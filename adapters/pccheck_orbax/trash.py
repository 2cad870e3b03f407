"""Trash: folders vanish from sight by one rename and are removed later, by threads of ours (no orbax; layout, durable).

Orbax's own removal of a step is no atom: half of one was seen as a step.
"""

from __future__ import annotations

import logging
import os
import shutil
import threading
import uuid
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import final

from pccheck_orbax.durable import sync_names
from pccheck_orbax.layout import TRASH

_TRIES = 16


@final
class Trash:
    """Remove folders off the caller's path: renamed at once, their files unlinked by `threads` threads.

    At most `pending` removals wait; then `take` waits for the oldest, at most `timeout_s` seconds, so that a slow disk
    cannot pile up folders. What a removal leaves (or a crash) the next sweep takes again. `recycle`, if given, is first
    called with the folder, and may take files out of it: then it is there, and nowhere else, after any crash.
    Thread-safe.
    """

    def __init__(
        self, root: Path, *, threads: int = 1, pending: int = 4, timeout_s: float = 1200.0,
        recycle: Callable[[Path], None] | None = None,
    ) -> None:  # fmt: skip
        self.folder = root / TRASH
        self._recycle = recycle
        self._pending, self._timeout_s = pending, timeout_s
        self._threads = ThreadPoolExecutor(threads, thread_name_prefix="pccheck-trash")
        self._lock = threading.Lock()
        self._removals: deque[Future[None]] = deque()
        self._used = False

    def __repr__(self) -> str:
        return f"Trash({self.folder}, {sum(not r.done() for r in self._removals)} removals running or waiting)"

    def take(self, path: Path) -> bool:
        """Rename the folder `path` into the trash and have it removed; False where there is none."""
        if not self._hide(path):
            return False
        self.await_room(self._pending)
        return True

    def await_room(self, most: int) -> None:
        """Wait until at most `most` of the folders that were taken are there, at most `timeout_s` seconds for each."""
        while True:
            with self._lock:
                self._removals = deque(removal for removal in self._removals if not removal.done())
                if len(self._removals) <= most:
                    return
                oldest = self._removals[0]
            oldest.result(self._timeout_s)

    def sweep(self, root: Path, stale: Callable[[str], bool]) -> None:
        """Take every folder in `root` whose name is `stale`, and what an earlier process left in the trash; no wait."""
        self._used = True
        old = list(self.folder.iterdir()) if self.folder.is_dir() else []
        with self._lock:
            self._removals += [self._threads.submit(_remove, path) for path in old]
        for path in root.iterdir():
            if stale(path.name) and path.is_dir() and not path.is_symlink():
                self._hide(path)

    def drain(self) -> None:
        """Wait until what was taken is gone, at most `timeout_s` seconds a folder."""
        self.await_room(0)

    def close(self) -> None:
        """Drain, end the threads, and remove the trash itself where it was used and is empty."""
        try:
            self.drain()
        finally:
            self._threads.shutdown(wait=False)
        if not self._used:
            return
        try:
            self.folder.rmdir()
        except OSError:
            pass  # not there, or not empty: the next sweep goes on

    def _dispose(self, path: Path) -> None:
        if self._recycle is not None and not path.is_symlink():  # what a link leads to is somebody's
            try:
                sync_names(self.folder.parent)
                sync_names(self.folder)
                self._recycle(path)
            except Exception as error:  # it saves time; what it leaves is removed
                logging.getLogger(__name__).debug("nothing of %s is used again: %r", path, error)
        _remove(path)

    def _hide(self, path: Path) -> bool:
        self._used = True
        for _ in range(_TRIES):  # somebody else may remove the trash, empty, just when it was made
            self.folder.mkdir(exist_ok=True)
            target = self.folder / f"gone-{uuid.uuid4().hex}"
            try:
                os.rename(path, target)
            except FileNotFoundError:
                if not os.path.lexists(path):
                    return False
            else:
                with self._lock:
                    self._removals.append(self._threads.submit(self._dispose, target))
                return True
        raise FileNotFoundError(f"{path} cannot be moved to {self.folder}, which others keep removing: close these")


def _remove(path: Path) -> None:
    try:
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()
    except FileNotFoundError:
        pass  # somebody else empties the same trash
    except OSError as error:
        logging.getLogger(__name__).warning("%s is not removed (%s): the next job tries again", path, error)
