"""The engine behind the handlers: one store per item and process (may import pccheck; JAX for who we are)."""

from __future__ import annotations

import logging
import os
import threading
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Self, final

import jax

import pccheck
from pccheck import links
from pccheck.errors import MediumError, OptionError
from pccheck_orbax.layout import STORES, TRASH, unfinished
from pccheck_orbax.staging import Staged, clear
from pccheck_orbax.stores import OPEN, assert_no_checkpointer

_OURS: dict[str, Any] = {"keep": 0}
_FIXED = ("keep", "keep_every", "coordinator")


@dataclass(frozen=True)
class _Watched:
    """What Orbax was given of a save; while Orbax holds that, it has not given up the step, or its error is held."""

    future: weakref.ref[Any]
    staged: Staged
    moved: bool
    by: tuple[int, str, str] | None  # handler, root and item

    def is_over(self, by: tuple[int, str, str] | None) -> bool:
        future = self.future()
        return future is None or (by is not None and self.by == by and bool(future.is_forsaken()))


@final
class Engine:
    """Saves items of Orbax steps through pccheck, several at once. Thread-safe.

    Stores are opened when they are first saved to, and are shared by all engines of the process with the same options.
    A closed engine opens them again when it is used again.

    Args:
        in_flight: saves of one item under way at once, 1..64.
        **options: options of `pccheck.Checkpointer`, apart from keep, keep_every and coordinator: Orbax decides what is
            kept, and when all processes are done.

    Raises:
        OptionError: an option is out of range, or not to be chosen here.
    """

    def __init__(self, *, in_flight: int = 2, **options: Any) -> None:
        for name in _FIXED:
            if name in options:
                raise OptionError(name, options[name], "left out: Orbax decides it")
        self._options: dict[str, Any] = {"in_flight": in_flight, **options}
        told = {name: value for name, value in self._options.items() if name != "observer"}
        self.options = pccheck.Options(**_OURS, **told)  # refuses here what the first save would choke on
        self._lock = threading.Lock()
        self._used: set[str] = set()
        self._watched: list[_Watched] = []

    def save(
        self,
        root: str,
        item: str,
        step: int,
        state: Any,
        link: str | Callable[[], str],
        *,
        metadata: Mapping[str, Any] | None = None,
    ) -> pccheck.Save:
        """Start saving a state; its file is linked where `link` says before `durable` resolves.

        Args:
            root: the folder that holds the steps.
            item: the item's name.
            step: a label.
            state: see `pccheck.Checkpointer.save`.
            link: the path of the link, or what gives it once its folder is there; called on another thread.
            metadata: small JSON.

        Raises:
            UnsupportedLeafError: a leaf cannot be stored exactly.
            StoreTaken: another process saves this item under this root.
            CapacityError, MediumError: the root cannot be used.
        """
        checkpointer = self.open(root, item)
        return checkpointer.save(step, state, metadata=metadata, link=link, report=False)

    def stage(self, root: str, item: str, handler: object = None) -> Staged:
        """Give a place for the file of one save of an item.

        What Orbax gave up meanwhile is removed: a step of which another item failed, or whose folder could not be made,
        is never spoken of again by Orbax, and its file would take its place on the disk until the next start.

        Args:
            root: the folder that holds the steps.
            item: the item's name.
            handler: who saves; Orbax is done with its last save of this item when it starts another. So what Orbax did
                not come for is removed even where an error that somebody holds still holds the save's future.
        """
        self._sweep(None if handler is None else (id(handler), root, item))
        self.open(root, item)  # first: opening clears away what was staged before
        return Staged(root, item, jax.process_index())

    def watch(self, future: object, staged: Staged, *, moved: bool, by: tuple[object, str, str] | None = None) -> None:
        """Remove a staged file once nobody holds its future, and if it was not moved when this engine is closed.

        Args:
            future: what Orbax was given for it.
            staged: the file's place.
            moved: also where it was moved to, unless that folder was renamed by then: Orbax holds the future until it
                has renamed it, or gave up.
            by: handler, root and item, of a `Commit`.
        """
        whose = None if by is None else (id(by[0]), by[1], by[2])
        with self._lock:
            self._watched.append(_Watched(weakref.ref(future), staged, moved, whose))

    def _sweep(self, by: tuple[int, str, str] | None = None) -> None:
        with self._lock:
            kept: list[_Watched] = []
            over: list[_Watched] = []
            for each in self._watched:
                (over if each.is_over(by) else kept).append(each)
            self._watched = kept
        for each in over:
            each.staged.drop()
            if each.moved:
                each.staged.drop_moved()

    def open(self, root: str, item: str) -> pccheck.Checkpointer:
        """Give the Checkpointer of an item, opened if it was not.

        What a crash had left in folders that never became steps gives its slots back then: a stock manager does not
        remove these folders by default. So do steps that were being removed.
        """
        process = jax.process_index()
        folder = os.path.join(root, STORES, item, f"process-{process}")

        def make() -> pccheck.Checkpointer:
            assert_no_checkpointer(root)
            checkpointer = pccheck.Checkpointer(folder, **_OURS, **self._options)
            try:
                clear(root, item, process, folder)
                for left in unfinished(root, item):
                    links.drop_stale(left, folder, process)
                _empty_trash(root, folder, process)
            except BaseException:
                checkpointer.close()
                raise
            return checkpointer

        checkpointer = OPEN.take(folder, self, self._options, make)
        with self._lock:
            self._used.add(folder)
        return checkpointer

    def recycle(self, root: str, step_folder: str | os.PathLike[str]) -> None:
        """Give the files of a step that was deleted back to their stores, as far as these want them.

        Args:
            root: the folder that holds the steps.
            step_folder: where the step's folder lies by now, durably.
        """
        process = jax.process_index()
        with self._lock:
            used = [folder for folder in self._used if folder.startswith(os.path.join(root, STORES, ""))]
        for folder in used:
            checkpointer = OPEN.look(folder)
            if checkpointer is not None:
                item = os.path.basename(os.path.dirname(folder))
                checkpointer.recycle(os.path.join(step_folder, item, links.rank_name(process)))

    def close(self) -> None:
        """Wait for what is under way and close the stores that nobody else in this process uses. Idempotent.

        Files that Orbax never came for are removed: an error that somebody holds may hold their futures for ever.
        """
        self._sweep()
        with self._lock:
            used, self._used = sorted(self._used), set()
        first: BaseException | None = None
        for folder in used:
            try:
                OPEN.give_back(folder, self)
            except Exception as error:  # the others are closed first
                first = first or error
        with self._lock:
            watched, self._watched = self._watched, []
        for each in watched:
            each.staged.drop()
        if first is not None:
            raise first

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<Engine with {self._options}, {len(self._used)} store(s) in use>"


def _empty_trash(root: str, store: str, process: int) -> None:
    """Remove this process's files of steps that a crash kept from being removed; what stays there stops no save."""
    trash = os.path.join(root, TRASH)
    try:
        links.drop_stale(trash, store, process)
    except MediumError as error:
        logging.getLogger(__name__).warning("deleted steps stay in %s (%s): the next job tries again", trash, error)
