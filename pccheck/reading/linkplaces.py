"""Where linked folders are, and the stores that they were linked from (floor 2: imports linked, places and below)."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from typing import final

from pccheck import format
from pccheck.errors import MediumError
from pccheck.reading.linked import LIST_NAME
from pccheck.storage.directory import Directory
from pccheck.storage.outside import folders_in

LEVELS = 2  # below what a person named: <root>/<step>/<item>, as pccheck_orbax lays them out
_HIDDEN = ".pccheck"  # <root>/.pccheck/<item>/process-<p> are the stores there
_RANK = re.compile(r"rank-[0-9]{5,7}\.pcc")
_DIGITS = re.compile(r"([0-9]+)")


@final
@dataclass(frozen=True, kw_only=True)
class LinkPlaces:
    """What is at a path and below it.

    Args:
        path: where was looked.
        folders: linked folders, finished or not, relative to the path ("" = itself), in the order of their numbers.
        stores: stores of links that lie hidden beside them.
    """

    path: str
    folders: tuple[str, ...]
    stores: tuple[str, ...]


def find_linked(path: str | os.PathLike[str]) -> LinkPlaces:
    """Look for linked folders at a path and at most two levels below it, and for stores in `.pccheck/*/*`.

    No symbolic link below the path is followed; what may not be looked at is left out.
    """
    where = os.path.abspath(os.fspath(path))
    folders = [folder for folder in _walk(where, LEVELS) if is_any_linked(folder)]
    stores = [folder for folder in _walk(os.path.join(where, _HIDDEN), LEVELS) if _has(folder, format.CHECK_NAME)]
    relative = ("" if folder == where else os.path.relpath(folder, where) for folder in folders)
    return LinkPlaces(path=where, folders=tuple(sorted(relative, key=_as_counted)), stores=tuple(sorted(stores)))


def is_any_linked(folder: str) -> bool:
    """Tell whether a folder is a linked folder, finished or not."""
    return any(name == LIST_NAME or _RANK.fullmatch(name) for name in names_in(folder))


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
