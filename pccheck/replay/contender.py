"""Who saves in a live replay: the protocol, who is installed, and pccheck itself (floor 4: imports the Checkpointer).

Others are found by entry point, in the group "pccheck.contenders", or named as FILE.py:CLASS.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, Protocol, final

from numpy.typing import NDArray

from pccheck.checkpointer import Checkpointer
from pccheck.errors import UsageError

GROUP = "pccheck.contenders"
NOTHING = "none"  # saves nothing: what an undisturbed step is measured with

State = dict[str, NDArray[Any]]


class Contender(Protocol):
    """A way to save, as a training loop uses it; one thread calls it.

    It is made with the directory, in a process that may be killed at any moment; the next process makes it again, with
    the same directory. Its module may import a framework: an ImportError there means that it cannot take part.
    """

    def restore(self, like: State) -> tuple[int, State] | None:
        """Give the newest (step, state) that is complete; None where nothing was saved.

        `like` has the keys, dtypes and shapes, and may be filled in place and given back.
        """

    def save(self, step: int, state: State) -> None:
        """Save, and return as soon as training may go on. It may read `state` until the next `fence`."""

    def fence(self) -> None:
        """Return as soon as the state may be changed."""

    def close(self) -> None:
        """Wait for what is under way, and close."""


@final
class Pccheck:
    """pccheck's Checkpointer: lazy copies with a fence before the update, two in flight.

    Args:
        directory: of the store.
    """

    def __init__(self, directory: Path) -> None:
        self._checkpointer = Checkpointer(directory, in_flight=2, snapshot="lazy")

    def restore(self, like: State) -> tuple[int, State] | None:
        """Give the newest checkpoint that verifies."""
        restored = self._checkpointer.restore()
        return None if restored is None else (restored.step, restored.state)

    def save(self, step: int, state: State) -> None:
        """Save; returns at once unless two saves are under way."""
        self._checkpointer.save(step, state)

    def fence(self) -> None:
        """Wait for the copies that still run."""
        self._checkpointer.fence()

    def close(self) -> None:
        """Close the store."""
        self._checkpointer.close()


@final
class Nothing:
    """Saves nothing, so that each process begins anew.

    Args:
        directory: is left alone.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def restore(self, like: State) -> tuple[int, State] | None:
        """Give nothing."""
        return None

    def save(self, step: int, state: State) -> None:
        """Do nothing."""

    def fence(self) -> None:
        """Do nothing."""

    def close(self) -> None:
        """Do nothing."""


def installed() -> tuple[str, ...]:
    """Give the names of those that are offered by entry points: pccheck first, then by name."""
    names = {entry.name for entry in entry_points(group=GROUP)}
    return tuple(sorted(names, key=lambda name: (name != "pccheck", name)))


def check(names: list[str]) -> None:
    """Raise UsageError if one of these is neither installed nor FILE.py:CLASS, or is named twice; imports nothing."""
    for name in names:
        if ".py:" in name:
            if not Path(name.rpartition(":")[0]).is_file():
                raise UsageError(f"contender {name}: there is no file {name.rpartition(':')[0]}")
        elif name not in installed():
            raise UsageError(
                f"there is no contender {name!r}: installed are {', '.join(installed()) or 'none'}. Another can be "
                "given as FILE.py:CLASS; docs/replay.md says what it must have"
            )
    if len(set(names)) < len(names) or not names:
        raise UsageError(f"contenders {', '.join(names) or '(none)'}: give one or more, each once")


def find(name: str) -> Callable[[Path], Contender]:
    """Give what makes a contender, given its directory; imports what it needs.

    Raises ImportError where a framework is not installed, UsageError for a name that is not known.
    """
    made: Callable[[Path], Contender]
    if name == NOTHING:
        return Nothing
    if ".py:" in name:
        file, _, attribute = name.rpartition(":")
        spec = importlib.util.spec_from_file_location("pccheck_contender", file)
        if spec is None or spec.loader is None:
            raise UsageError(f"contender {name}: {file} is no Python file")
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        made = getattr(module, attribute)
        return made
    check([name])
    made = next(iter(entry_points(group=GROUP, name=name))).load()
    return made
