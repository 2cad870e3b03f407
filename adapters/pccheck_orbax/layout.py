"""Where things lie under an Orbax root, told from the folder that Orbax hands out (may import pccheck; durable)."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import final

from pccheck.errors import UsageError
from pccheck_orbax.durable import TEMPORARY

# Under the root, where Orbax lists and deletes only what is named like a step:
STORES, STAGED, TRASH = ".pccheck", ".pccheck_staged", ".pccheck_trash"
DEFAULT_ITEM = "default"  # what a CheckpointManager calls its item where there is only one
_MAX_STEP = 2**63 - 1


@final
@dataclass(frozen=True, slots=True)
class Place:
    """The folder of one item of one step.

    Args:
        root: the folder that holds the steps, and the stores that their slot files belong to.
        item: the item's name.
        label: the step folder's final name.
        step_folder: the step's folder, as it is called now.
        folder: the item's folder, as it is called now.
    """

    root: str
    item: str
    label: str
    step_folder: str
    folder: str

    @property
    def step(self) -> int:
        """The step as a number; 0 where its name has no digits, or too many.

        Names such as "checkpoint_7" and "2031-05-17" are taken by their last digits. It is a label only: Orbax knows
        its steps by their folders.
        """
        digits = re.findall(r"\d+", self.label)
        return int(digits[-1]) if digits and int(digits[-1]) <= _MAX_STEP else 0

    @property
    def is_temporary(self) -> bool:
        """Tell whether Orbax renames it once it is whole."""
        return TEMPORARY in os.path.basename(self.step_folder)


def place_of(directory: os.PathLike[str] | str) -> Place:
    """Give the place of the folder that a handler was asked to save into.

    That of a manager's or a composite's item is `<root>/<step>/<item>`, with a suffix while it is made; that of a
    Checkpointer used alone is `<root>/<step>`.

    Raises:
        UsageError: it is not in a file system: links cannot be made there.
    """
    text = os.fspath(directory)
    if "://" in text:
        raise UsageError(f"{text} is not in a file system; pccheck saves under folders only")
    folder = os.path.abspath(text)
    above, name = os.path.split(folder)
    if TEMPORARY in name and TEMPORARY not in os.path.basename(above):
        return Place(above, DEFAULT_ITEM, _final(name), folder, folder)
    root, step = os.path.split(above)
    return Place(root, _final(name), _final(step), above, folder)


def unfinished(root: str, item: str) -> Iterator[str]:
    """Give the folders under a root in which a save of this item may have been left by a crash.

    Those are what Orbax had not renamed yet. Where it commits by a file instead (AtomicityMode.COMMIT_FILE), those are
    folders that its own record says were begun and not committed. A folder that merely lacks `pccheck.json` may be a
    committed step that was damaged, or a copy of one that somebody is making: it is let be.
    """
    for entry in _folders(root):
        if TEMPORARY in entry.name:
            yield entry.path
            continue
        of_item = os.path.join(entry.path, item)
        if os.path.isdir(of_item) and is_uncommitted(entry.path):
            yield of_item


def is_uncommitted(step_folder: str) -> bool:
    """Tell whether Orbax's own record in a step's folder says that it was begun, and nothing that it was committed."""
    if os.path.lexists(os.path.join(step_folder, _COMMITTED)):
        return False
    try:
        with open(os.path.join(step_folder, _RECORD), "rb") as file:
            told = json.loads(file.read())
    except (OSError, ValueError, RecursionError):
        return False
    began = isinstance(told, dict) and isinstance(told.get("init_timestamp_nsecs"), int)
    return began and "commit_timestamp_nsecs" in told and told["commit_timestamp_nsecs"] is None


LISTING = "pccheck.json"  # what `pccheck.links.finish` writes
_RECORD, _COMMITTED = "_CHECKPOINT_METADATA", "commit_success.txt"  # what Orbax writes into a step's folder


def _folders(root: str) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(root) as entries:
            return [entry for entry in entries if entry.is_dir(follow_symlinks=False)]
    except FileNotFoundError:
        return []


def _final(name: str) -> str:
    return name.partition(TEMPORARY)[0]
