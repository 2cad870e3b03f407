"""The handler that saves and restores Orbax items through pccheck (may import pccheck, Orbax, JAX)."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any, final

import jax
import orbax.checkpoint as ocp
from etils import epath

import pccheck
from pccheck import links
from pccheck.errors import MismatchError
from pccheck_orbax import earlier
from pccheck_orbax.commits import Commit
from pccheck_orbax.cycles import contains_itself
from pccheck_orbax.engine import Engine
from pccheck_orbax.layout import Place, place_of
from pccheck_orbax.marking import finish
from pccheck_orbax.metadata import describe
from pccheck_orbax.requests import beside, request_of, state_of
from pccheck_orbax.shardings import Recorder
from pccheck_orbax.targets import Target


@final
class Handler(ocp.AsyncCheckpointHandler):
    """Saves and restores one item of a step: works in Orbax's managers, checkpointers and composites.

    It takes the args `pccheck_orbax.Save` and `Restore`, and those of Standard and PyTree (see
    `pccheck_orbax.registry`). Errors of leaves that cannot be stored come out of `save()`. Several saves may be under
    way, also of several managers. Items that Orbax's own handlers saved are restored by these. Thread-safe.

    Args:
        engine: what saves; None = one of its own, with the defaults, closed with the handler.
    """

    def __init__(self, engine: Engine | None = None) -> None:
        self._engine, self._owned = engine or Engine(), engine is None
        self._recorder = Recorder()
        self._sound: set[tuple[str, type]] = set()  # items, and classes of their trees, of which one was looked through

    @classmethod
    def typestr(cls) -> str:
        """What names this handler in a checkpoint's metadata."""
        return "pccheck_orbax.Handler"

    # -- saving -----------------------------------------------------------------------------------------------------

    async def async_save(self, directory: epath.Path, args: Any = None) -> list[ocp.Future]:
        """Capture the item, in the caller's thread, and give the future of its commit."""
        place = place_of(directory)
        staged = self._engine.stage(place.root, place.item, self)
        try:
            commit = Commit(self._save(place, args, staged.path), staged, place.folder)
        except BaseException:
            staged.drop()
            raise
        self._engine.watch(commit, staged, moved=place.is_temporary, by=(self, place.root, place.item))
        return [commit]

    def save(self, directory: epath.Path, args: Any = None) -> None:
        """Save the item into a folder that is there, and wait until it is durable."""
        place = place_of(directory)
        file = os.path.join(place.folder, links.rank_name(jax.process_index()))
        self._save(place, args, file).durable.result()

    def finalize(self, directory: epath.Path) -> None:
        """Check that every process's file is there, and write what makes the folder a checkpoint."""
        finish(os.fspath(directory), jax.process_count())

    def _save(self, place: Place, args: Any, link: str) -> pccheck.Save:
        if (place.item, type(args.item)) not in self._sound:  # it takes as long as the rest of a save
            if contains_itself(args.item):  # which the core refuses, with the path
                return self._engine.save(place.root, place.item, place.step, args.item, link)
            self._sound.add((place.item, type(args.item)))
        step, state = place.step, state_of(args)
        metadata = beside(args, place.label, step, self._recorder.record(state))
        return self._engine.save(place.root, place.item, step, state, link, metadata=metadata)

    # -- restoring --------------------------------------------------------------------------------------------------

    def restore(self, directory: epath.Path, args: Any = None) -> Any:
        """Give the item, verified, as the args ask for it; raises a ValueError where it does not fit them."""
        return load(os.fspath(directory), args)

    def metadata(self, directory: epath.Path) -> Any:
        """Give the `TreeMetadata` of the item, a description in place of each leaf; only manifests are read."""
        folder = os.fspath(directory)
        if earlier.is_of_orbax(folder):
            return earlier.metadata(folder)
        outline = links.outline(folder, rank=jax.process_index())
        return describe(outline.trees[jax.process_index() % outline.world], folder, outline.metadata)

    def close(self) -> None:
        """Wait for what is under way, and close the engine unless it was given."""
        if self._owned:
            self._engine.close()

    def __repr__(self) -> str:
        return f"<pccheck_orbax.Handler over {self._engine!r}>"


def load(folder: str, args: Any) -> Any:
    """Give the item of a finished folder as args for restoring ask for it."""
    if earlier.is_of_orbax(folder):
        return earlier.restore(folder, args)
    rank = jax.process_index()
    target = Target(request_of(args), lambda: links.outline(folder, rank=rank).metadata)
    try:
        restored = links.load(folder, rank=rank, like=target)
    except MismatchError as error:  # in the words of Orbax's users, who have given no `like`
        found = [replace(each, side="the target") for each in error.mismatches if isinstance(each, pccheck.Mismatch)]
        raise MismatchError(found, partly="partial_restore=True (of PyTreeRestore) to restore what fits") from None
    return target.made_of(restored.state)
