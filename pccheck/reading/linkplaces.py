"""Where linked folders, their stores, and items of Orbax's own are (floor 2: imports linked, places and below)."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from typing import final

from pccheck import format
from pccheck.errors import MediumError
from pccheck.reading.linked import LIST_NAME, is_linked
from pccheck.reading.places import RANK_FILE, RANK_FOLDER
from pccheck.storage.directory import Directory
from pccheck.storage.outside import folders_in

LEVELS = 2  # below what a person named: <root>/<step>/<item>, as pccheck_orbax lays them out
HIDDEN = ".pccheck"  # <root>/.pccheck/<item>/process-<p> are the stores there
_OF_STEP, _OF_TREE = "_CHECKPOINT_METADATA", "_METADATA"  # Orbax's, in the folder of a step; in that of an item
_TEMPORARY = ".orbax-checkpoint-tmp"
_DIGITS = re.compile(r"([0-9]+)")


@final
@dataclass(frozen=True, kw_only=True)
class LinkPlaces:
    """What is at a path and below it.

    Args:
        path: where was looked.
        folders: linked folders, finished or not, relative to the path ("" = itself), in the order of their numbers.
        stores: stores of links that lie hidden beside them.
        foreign: folders of items that Orbax's own handlers saved, likewise relative.
    """

    path: str
    folders: tuple[str, ...]
    stores: tuple[str, ...]
    foreign: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.folders or self.stores or self.foreign)

    def at(self, folder: str) -> str:
        """Give the absolute path of one of the folders."""
        return os.path.join(self.path, folder) if folder else self.path

    def how_to_open(self) -> str:
        """Say what of it `pccheck.open` takes, the last one first."""
        places = [self.at(folder) for folder in self.folders]
        finished = [where for where in places if is_linked(where) and not is_temporary(where)]
        if finished:
            return (
                f"{self.path} holds {len(finished)} linked folder(s), and each is opened on its own: "
                f"<root>/<step>/<item>, such as {finished[-1]}"
            )
        if self.foreign:
            return (
                f"{self.at(self.foreign[-1])} is of Orbax's own handlers: restore it with Orbax, or with pccheck_orbax"
            )
        return f"{self.path} holds stores of links, but no folder <root>/<step>/<item> that was finished"


def find_linked(path: str | os.PathLike[str]) -> LinkPlaces:
    """Look for linked folders and items of Orbax at a path and two levels below it, and for stores in `.pccheck/*/*`.

    No symbolic link below the path is followed; what may not be looked at is left out.
    """
    where = os.path.abspath(os.fspath(path))
    above = _marks_in(os.path.dirname(where))
    marks = {folder: _marks_in(folder) for folder in _walk(where, LEVELS)}
    folders = [folder for folder, found in marks.items() if LIST_NAME in found]
    foreign = [
        folder
        for folder, found in marks.items()
        if LIST_NAME not in found and _is_of_orbax(folder, found, marks.get(os.path.dirname(folder), above))
    ]
    stores = [folder for folder in _walk(os.path.join(where, HIDDEN), LEVELS) if _has(folder, format.CHECK_NAME)]

    def named(found: list[str]) -> tuple[str, ...]:
        relative = ("" if folder == where else os.path.relpath(folder, where) for folder in found)
        return tuple(sorted(relative, key=_as_counted))

    return LinkPlaces(path=where, folders=named(folders), stores=tuple(sorted(stores)), foreign=named(foreign))


def holds_stores(path: str | os.PathLike[str]) -> bool:
    """Tell whether stores of links lie hidden in a folder: whether it is one of Orbax's steps and items."""
    hidden = os.path.join(path, HIDDEN)
    return os.path.isdir(hidden) and not os.path.islink(hidden)


def holds_steps(path: str | os.PathLike[str]) -> bool:
    """Tell whether steps that Orbax committed lie in a folder, under names that end with their numbers.

    Ranks' stores are not looked into: each of a thousand ranks, as it opens its own, would look into all.
    """
    names = (name for name in folders_in(os.fspath(path)) if not RANK_FOLDER.fullmatch(name))
    return any(name[-1:].isdecimal() and _has(os.path.join(path, name), _OF_STEP) for name in names)


def step_of(path: str) -> int | None:
    """Give the step of an Orbax item by the digits at the end of its step folder's name; None where it has none."""
    above = os.path.dirname(path)
    found = re.search(r"[0-9]+$", os.path.basename(above if _has(above, _OF_STEP) else path))
    return None if found is None or len(found[0]) > 18 else int(found[0])


def _is_of_orbax(folder: str, marks: set[str], above: set[str]) -> bool:
    """Tell a folder that a handler of Orbax's own filled: a tree, or whatever else is an item of a step, as JSON is.

    It is told by the marks in it and in the folder above.
    """
    if is_temporary(folder):
        return False
    return _OF_TREE in marks or (_OF_STEP in above and _OF_TREE not in above and _OF_STEP not in marks)


def is_temporary(folder: str) -> bool:
    """Tell whether Orbax has yet to commit the step or the item that a folder is of, by renaming it.

    Whatever it holds is no checkpoint: it is being filled, or is what a crash left of it, and whoever clears it away
    removes its files one by one.
    """
    above, name = os.path.split(folder)
    return _TEMPORARY in name or _TEMPORARY in os.path.basename(above)


def is_any_linked(folder: str) -> bool:
    """Tell whether a folder is a linked folder, finished or not."""
    return LIST_NAME in _marks_in(folder)


def _marks_in(folder: str) -> set[str]:
    """Give the names in a folder that tell what it is; LIST_NAME stands for any of a linked folder."""
    names = names_in(folder)
    marks = {_OF_STEP, _OF_TREE}.intersection(names)
    if any(name == LIST_NAME or RANK_FILE.fullmatch(name) for name in names):
        marks.add(LIST_NAME)
    return marks


def names_in(folder: str) -> list[str]:
    """Give the names of the regular files in a folder; none where it is gone or may not be looked at."""
    try:
        with closing(Directory(folder, create=False, write=False)) as volume:
            return volume.names()
    except MediumError:
        return []


def _has(folder: str, name: str) -> bool:
    return name in names_in(folder)


def _walk(folder: str, levels: int) -> Iterator[str]:
    yield folder
    if levels:
        for name in folders_in(folder):
            if not name.startswith("."):
                yield from _walk(os.path.join(folder, name), levels - 1)


def _as_counted(text: str) -> list[tuple[int, str]]:
    """Sort 9 before 10."""
    parts = _DIGITS.split(text)
    return [(int(part), "") if part.isdecimal() else (0, part) for part in parts]
