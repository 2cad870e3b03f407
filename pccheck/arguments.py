"""What a caller may pass, checked before anything is changed (floor 2: imports below)."""

from __future__ import annotations

import operator
import os
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any, cast

from pccheck.errors import UsageError
from pccheck.events import Event
from pccheck.format import CHECK_NAME
from pccheck.options import Options, WhenFull
from pccheck.reading.linkplaces import HIDDEN, holds_steps, holds_stores
from pccheck.saving.save import Link
from pccheck.storage.directory import Directory
from pccheck.storage.volume import Volume


def step(value: object) -> int:
    """Give a step as an int of 64 bits; raises UsageError for anything that is no whole number."""
    try:
        number = operator.index(value)  # type: ignore[arg-type]
    except (TypeError, RuntimeError):  # what is no whole number; torch raises its own
        number = None
    if number is None or isinstance(value, bool) or not -(1 << 63) <= number < 1 << 63:
        raise UsageError(f"step={value!r} is not allowed: a step is a whole number of 64 bits")
    return number


def tree_of(state: Any) -> Any:
    """Give the state itself, or the tree that it stands for (see `leaves.StateSource`)."""
    source = getattr(type(state), "__pccheck_state__", None)
    return state if source is None else source(state)


def own_paths(state: Any) -> tuple[str, ...]:
    """Give the paths at or under which a state says that ranks differ (see `leaves.StateSource`)."""
    return tuple(state.__pccheck_own__) if hasattr(type(state), "__pccheck_own__") else ()


def path(directory: object, name: str = "directory") -> str:
    """Give the absolute path of a folder; raises UsageError, which calls the argument `name`."""
    if isinstance(directory, (str, os.PathLike)):
        text = os.fspath(directory)
        if isinstance(text, str) and text and "\0" not in text:
            return os.path.abspath(text)
    raise UsageError(f"{name}={directory!r} is not allowed: it must be the path of a folder, as text")


def assert_no_orbax_root(root: str) -> None:
    """Raise UsageError for a folder of Orbax steps: two that save there would not see each other's checkpoints."""
    mixed = os.path.isfile(os.path.join(root, CHECK_NAME))
    if holds_stores(root):
        raise UsageError(
            f"{root} holds the steps of pccheck_orbax's managers (it has a folder {HIDDEN}), and nothing was changed: "
            "go on with pccheck_orbax.CheckpointManager there, or give the Checkpointer another directory"
            + ("; checkpoints of a Checkpointer lie there, too: `pccheck.open` reads them" if mixed else "")
        )
    if not mixed and os.path.isdir(root) and holds_steps(root):
        raise UsageError(
            f"{root} holds steps of Orbax, which a Checkpointer does not read, and nothing was changed: go on with "
            "pccheck_orbax.CheckpointManager there, or give the Checkpointer another directory"
        )


def volume(directory: object) -> Volume:
    """Give the volume to write to: a folder's path is opened, and made where it is missing; raises UsageError."""
    if isinstance(directory, (str, os.PathLike)):
        return Directory(path(directory), create=True, write=True)
    if not hasattr(directory, "check_page"):
        raise UsageError(f"directory={directory!r} is not allowed: it must be a path, or a pccheck Volume")
    return cast(Volume, directory)


def when_full(options: Options, given: WhenFull | None) -> WhenFull:
    """Give what a save does where it finds no place; raises UsageError."""
    return options.when_full if given is None else replace(options, when_full=given).when_full


def link(options: Options, given: Link | None) -> Link | None:
    """Give where a save is linked to, as an absolute path or what will give one; raises UsageError."""
    if options.keep and given is not None:
        raise UsageError("link= needs a store of links: open it with keep=0, or leave link= out")
    if not options.keep and given is None:
        raise UsageError("a store of links (keep=0) needs link=: the path at which the checkpoint is to live")
    return given if given is None or callable(given) else path(given, "link")


def recycled(options: Options, given: object) -> str:
    """Give the path of a file that was linked out of the store; raises UsageError."""
    if options.keep:
        raise UsageError("recycle() needs a store of links, opened with keep=0: others use their slots again anyway")
    return path(given, "path")


def check_callable(**given: tuple[object, str]) -> None:
    """Raise UsageError for an argument (`name=(value, method)`) that is neither None nor has the method."""
    for name, (value, method) in given.items():
        if value is not None and not hasattr(value, method):
            raise UsageError(f"{name}={value!r} is not allowed: it has no {method}")


def observer(given: object) -> Callable[[Event], object]:
    """Give an observer itself; raises UsageError for what cannot be called."""
    if not callable(given):
        raise UsageError(f"observer={given!r} is not allowed: it has no __call__")
    return given


def event(given: object) -> Event:
    """Give an event itself; raises UsageError for anything else, which observers could make nothing of."""
    if not isinstance(given, Event):
        raise UsageError(f"event={given!r} is not allowed: it must be a pccheck.events.Event")
    return given


def assert_outermost(*turns: threading.Condition) -> None:
    """Raise UsageError if this thread is in a call already that has one of these turns: it would wait for itself.

    That is a signal handler's call: a handler runs on the main thread, in the midst of whatever that does.
    """
    for turn in turns:
        try:
            turn.notify(0)  # wakes nobody; documented to raise where this thread has not the lock
        except RuntimeError:
            continue
        raise UsageError(
            "this call comes from within another one of the same thread, from a signal handler for one, and would wait "
            "for what it interrupted; nothing was changed. Set a flag in the handler, and save in the loop"
        )
