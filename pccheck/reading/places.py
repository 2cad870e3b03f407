"""What a path given by a person stands for: stores, or one slot file (floor 2: imports floor 1 and below, listing)."""

from __future__ import annotations

import os
import re
import stat
from pathlib import Path
from typing import final

from pccheck import format
from pccheck.errors import MediumError, UsageError
from pccheck.reading.listing import Listing, list_file, list_store
from pccheck.storage.directory import Directory
from pccheck.storage.medium import Medium

_PREFIX = "rank-"
RANK_FOLDER = re.compile(r"rank-[0-9]{5,10}")
RANK_FILE = re.compile(r"rank-[0-9]{5,7}\.pcc")


@final
class Place:
    """One store, or one slot file on its own, opened for reading. Thread-safe.

    Args:
        volume: the folder; owned and closed.
        name: the one slot file to look at; None = the folder is a store.
        rank: whose store it is under a job's folder, by its name.
    """

    def __init__(self, volume: Directory, name: str | None = None, rank: int = 0) -> None:
        self._volume, self.name, self.rank = volume, name, rank
        self.path = volume.path if name is None else os.path.join(volume.path, name)

    @classmethod
    def of_store(cls, path: str, rank: int = 0) -> Place:
        """Open the folder of a store; raises MediumError where that cannot be done."""
        return cls(Directory(path, create=False, write=False), rank=rank)

    def is_at(self, path: str | os.PathLike[str]) -> bool:
        """Tell whether this path is its own, not that of a folder above."""
        return os.path.abspath(os.fspath(path)) == self.path

    def look(self) -> Listing:
        """List what is there now."""
        return list_store(self._volume) if self.name is None else list_file(self._volume, self.name)

    def open(self, name: str) -> Medium:
        """Open a file of the listing for reading."""
        return self._volume.open(name)

    def close(self) -> None:
        """Close the folder."""
        self._volume.close()


def locate(path: str | os.PathLike[str]) -> list[Place]:
    """Give the store at a path, the stores of the ranks under it, or the one slot file that it is.

    Raises:
        UsageError: there is nothing there, or it is neither; says what was found.
        MediumError: it cannot be read.
    """
    where = Path(os.path.abspath(os.fspath(path)))
    try:
        status = os.lstat(where)
        if stat.S_ISLNK(status.st_mode) and where.is_dir():
            status = os.stat(where)
    except (FileNotFoundError, NotADirectoryError):
        raise UsageError(f"{where}: there is no such file or directory") from None
    except ValueError as error:
        raise UsageError(f"{os.fspath(path)!r} is not a path: {error}") from None
    except OSError as error:
        raise MediumError("status query", str(where), error) from error
    if stat.S_ISDIR(status.st_mode):
        return _locate_stores(where)
    if stat.S_ISLNK(status.st_mode):
        raise UsageError(f"{where} is a symbolic link, and links to slot files are not followed; name the file itself")
    if where.name == format.CHECK_NAME:
        raise UsageError(f"{where} is part of a store; name its folder, {where.parent}")
    if not stat.S_ISREG(status.st_mode) or not _may_be_slot(where):
        raise UsageError(f"{where} is not a pccheck slot file, nor a folder with one")
    return [Place(Directory(where.parent, create=False, write=False), where.name)]


def rank_stores(root: str | os.PathLike[str]) -> list[tuple[int, str]]:
    """Give rank and folder of each store at or under a job's root, in order of ranks; the root itself is of rank 0.

    Raises:
        MediumError: the folder cannot be read.
    """
    where = Path(root)
    volume = Directory(where, create=False, write=False)
    try:
        found = [(0, str(where))] if _is_store(volume) else []
    finally:
        volume.close()
    ranks = sorted((int(n[len(_PREFIX) :]), n) for n in _folders(where) if RANK_FOLDER.fullmatch(n))
    return found + [(rank, str(where / name)) for rank, name in ranks]


def _locate_stores(where: Path) -> list[Place]:
    stores = rank_stores(where)
    if len(stores) > 1 and stores[0][1] == str(where) and not _has_files(where):
        del stores[0]  # what a process alone left that only restored from the ranks' stores
    places = [Place.of_store(path, rank) for rank, path in stores]
    if not places and (files := [n for n in _files(where) if RANK_FILE.fullmatch(n)]):
        raise UsageError(f"{where} is a linked folder (it holds {files[0]}) that was never finished")
    if not places:
        raise UsageError(f"{where} is not a pccheck store: it holds no CHECK, no slot files and no rank folders")
    return places


def _is_store(volume: Directory) -> bool:
    return format.CHECK_NAME in volume.names() or _has_checkpoints(volume)


def _has_checkpoints(volume: Directory) -> bool:
    if any(format.parse_slot_name(n) is not None for n in volume.names()):
        return True
    return any(n.endswith(".pcc") for n in volume.names(format.KEPT_FOLDER))


def _files(where: Path) -> list[str]:
    volume = Directory(where, create=False, write=False)
    try:
        return volume.names()
    finally:
        volume.close()


def _has_files(where: Path) -> bool:
    volume = Directory(where, create=False, write=False)
    try:
        return _has_checkpoints(volume)
    finally:
        volume.close()


def _folders(where: Path) -> list[str]:
    try:
        return [entry.name for entry in os.scandir(where) if entry.is_dir(follow_symlinks=False)]
    except OSError as error:
        raise MediumError("listing", str(where), error) from error


def _may_be_slot(where: Path) -> bool:
    """Tell a slot file, though damaged, from a file of another kind: by its magic or its name."""
    try:
        with open(where, "rb") as file:
            head = file.read(len(format.RECORD_MAGIC))
    except OSError as error:
        raise MediumError("open", str(where), error) from error
    return where.suffix == ".pcc" or head == format.RECORD_MAGIC
