"""The handler for `orbax.checkpoint.v1` (may import pccheck, Orbax, JAX)."""

from __future__ import annotations

import asyncio
import os
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Generator
from contextvars import ContextVar
from types import TracebackType
from typing import Any, final

import jax
from orbax.checkpoint import v1 as ocp

import pccheck
from pccheck import links
from pccheck.errors import DeadlineError
from pccheck.leaves import StoredLeaf
from pccheck_orbax import earlier
from pccheck_orbax.args import Restore
from pccheck_orbax.cycles import contains_itself
from pccheck_orbax.engine import Engine
from pccheck_orbax.handler import Handler as OlderHandler
from pccheck_orbax.handler import load
from pccheck_orbax.layout import place_of
from pccheck_orbax.marking import finish
from pccheck_orbax.metadata import dtype_of
from pccheck_orbax.paths import Path, plain
from pccheck_orbax.requests import beside
from pccheck_orbax.shardings import Recorder
from pccheck_orbax.staging import Staged
from pccheck_orbax.wants import abstract

_WAIT_S = 1200.0  # for the files of other processes: what Orbax gives a whole save by default
_POLL_S = 0.01


class TreeHandler(ABC):
    """Saves and loads one checkpointable of Orbax's v1 interface: any tree that pccheck stores.

    Orbax makes one for each save and load, of a class that stands in a registry; `registry()` gives one with such a
    class in it. Several saves may be under way, of different steps.
    """

    @property
    @abstractmethod
    def engine(self) -> Engine:
        """What saves."""

    async def save(self, directory: ocp.path.PathAwaitingCreation, checkpointable: Any) -> Awaitable[None]:
        """Capture the tree, and give what waits until it is durable and linked."""
        place = place_of(directory.path)
        staged = self.engine.stage(place.root, place.item)
        step = place.step
        try:
            shardings = None if contains_itself(checkpointable) else Recorder().record(checkpointable)  # refused below
            metadata = beside(None, place.label, step, shardings)
            save = self.engine.save(place.root, place.item, step, checkpointable, staged.path, metadata=metadata)
        except BaseException:
            staged.drop()
            raise
        commit = _Commit(directory, place.folder, save, staged)
        self.engine.watch(commit, staged, moved=False)
        return commit

    async def load(self, directory: ocp.path.Path, abstract_checkpointable: Any = None) -> Awaitable[Any]:
        """Give what loads the tree, with the structure, dtypes and shardings of the abstract one if there is one.

        What Orbax's own handler saved is loaded by that.
        """
        if earlier.is_of_orbax(os.fspath(directory)):
            return await ocp.handlers.PyTreeHandler().load(directory, abstract_checkpointable)  # type: ignore[no-any-return]
        return asyncio.to_thread(load, os.fspath(directory), Restore(abstract_checkpointable))

    async def metadata(self, directory: ocp.path.Path) -> Any:
        """Give the tree with `jax.ShapeDtypeStruct` for arrays, and numbers and small text as they are."""
        if earlier.is_of_orbax(os.fspath(directory)):
            return await ocp.handlers.PyTreeHandler().metadata(directory)
        process = jax.process_index()
        outline = links.outline(os.fspath(directory), rank=process)
        return plain(outline.trees[process % outline.world], _abstract)

    def is_handleable(self, checkpointable: Any) -> bool:
        """Tell whether it can be a tree; what exactly it holds, `save` finds out."""
        return checkpointable is not None

    def is_abstract_handleable(self, abstract_checkpointable: Any) -> bool | None:
        """Say yes: Orbax asks this of the handler that the name, or the checkpoint itself, calls for."""
        return True


_DEFAULT = Engine()


@final
class Handler(TreeHandler):
    """The handler over an engine with the defaults, whose stores stay open until the process ends."""

    @property
    def engine(self) -> Engine:
        """What saves."""
        return _DEFAULT


def handler_class(engine: Engine) -> type[TreeHandler]:
    """Give a class of handlers over an engine; checkpoints do not tell it from `Handler`."""

    @final
    class Bound(TreeHandler):
        @property
        def engine(self) -> Engine:
            return engine

    Bound.__qualname__ = Handler.__qualname__  # Orbax writes it down, and looks for it when it loads
    return Bound


def registry(*names: str, engine: Engine | None = None) -> ocp.handlers.CheckpointableHandlerRegistry:
    """Give a registry with Orbax's own handlers in which "state", or these checkpointables, are pccheck's.

    What pccheck's handler for `orbax.checkpoint` has saved is loaded as well.

    Args:
        names: the checkpointables; none given = "state", which is what `save` and `save_async` save.
        engine: what saves; None = one of the process, with the defaults.
    """
    table = ocp.handlers.local_registry(include_global_registry=False)
    everywhere = ocp.handlers.global_registry()
    bound = names or ("state",)
    for theirs, name in everywhere.get_all_entries():
        if name not in bound:  # a name can be registered once
            table.add(theirs, checkpointable_name=name, secondary_typestrs=everywhere.get_secondary_typestrs(theirs))
    ours = Handler if engine is None else handler_class(engine)
    for name in bound:
        table.add(ours, checkpointable_name=name, secondary_typestrs=[OlderHandler.typestr()])
    return table


def context(*names: str, engine: Engine | None = None) -> ocp.Context:
    """Give a context, for `with` and for `training.Checkpointer(context=)`, that has `registry(*names)`.

    As any context of Orbax's it holds for the thread that has entered it. Unlike Orbax's, it may be entered again while
    it is: a `training.Checkpointer` made within it does so at each call.
    """
    made = _Context()
    made.checkpointables.registry = registry(*names, engine=engine)
    return made


# Each time that a context was entered and not left yet, the innermost last: of a thread, or of a task.
_ENTERED: ContextVar[tuple[tuple[ocp.Context, Any], ...]] = ContextVar("pccheck_orbax_entered", default=())


@final
class _Context(ocp.Context):  # marked as final there, but nowhere else can it be mended
    """A context that can be entered while it is entered.

    Orbax keeps in the context itself what is to leave it: entered again, as `training.Checkpointer` does with the one
    around it, it forgets the first, whose generator Python then ends, so that the `with` block goes on without its
    context. (Seen: saves after the first one of a Checkpointer were Orbax's own, without a word.)
    """

    def __enter__(self) -> ocp.Context:
        entered = self.__contextmanager__()
        _ENTERED.set((*_ENTERED.get(), (self, entered)))
        return entered.__enter__()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        all_of_them = _ENTERED.get()
        last = max(n for n, (context, _) in enumerate(all_of_them) if context is self)
        _ENTERED.set(all_of_them[:last] + all_of_them[last + 1 :])
        all_of_them[last][1].__exit__(kind, error, traceback)


def _abstract(path: Path, value: Any) -> Any:
    if not isinstance(value, StoredLeaf):
        return value
    if value.spec.kind in ("str", "bytes"):
        return {"str": str, "bytes": bytes}[value.spec.kind]
    return abstract(value.spec.shape, dtype_of(value))


@final
class _Commit:
    """What Orbax awaits in the background; no coroutine, since it awaits nothing where its folders cannot be made."""

    def __init__(self, directory: Any, folder: str, save: pccheck.Save, staged: Staged) -> None:
        self._directory, self._folder, self._save, self._staged = directory, folder, save, staged

    def __await__(self) -> Generator[Any, None, None]:
        return self._run().__await__()

    async def _run(self) -> None:
        try:
            await self._directory.await_creation()
            await asyncio.wrap_future(self._save.durable)
            await asyncio.to_thread(self._staged.move, self._folder)
        except BaseException:
            self._staged.drop()
            raise
        if ocp.multihost.is_primary_host(0):
            await _files_of_all(self._folder)
            await asyncio.to_thread(finish, self._folder, jax.process_count())


async def _files_of_all(folder: str) -> None:
    """Wait for the files of all processes; Orbax has no barrier here, but a file is linked only once it is durable."""
    names = [os.path.join(folder, links.rank_name(rank)) for rank in range(jax.process_count())]
    for _ in range(int(_WAIT_S / _POLL_S)):
        names = [name for name in names if not os.path.lexists(name)]
        if not names:
            return
        await asyncio.sleep(_POLL_S)
    raise DeadlineError(f"other processes to link {', '.join(names[:8])}", _WAIT_S)
