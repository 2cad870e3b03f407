"""Linked folders: checkpoints that live in folders of their user's, one file per process (floor 3: imports below).

`Checkpointer(directory, keep=0).save(step, state, link=os.path.join(folder, rank_name(0)))` puts a file there; `finish`
makes the files of all processes one checkpoint. From then on the folder is complete in itself: copy it, move it, delete
it as you like, or open it with `pccheck.open`.
"""

from __future__ import annotations

import os
from contextlib import closing
from typing import Any

from pccheck import format
from pccheck.errors import ContentError
from pccheck.reading.linked import LIST_NAME, LinkedFiles, list_files
from pccheck.reading.linked import rank_name as rank_name
from pccheck.reading.listing import read_check
from pccheck.reading.loading import load_files
from pccheck.reading.outline import Outline, outline_of
from pccheck.reading.restoring import Restored
from pccheck.storage import outside
from pccheck.storage.directory import Directory

__all__ = ["drop_stale", "finish", "load", "outline", "rank_name"]


def finish(folder: str | os.PathLike[str], world: int) -> None:
    """Make a folder into which every process has linked its file one checkpoint, durably.

    Called by one process, after `durable` of all processes' saves has resolved. It reads the files' records, and writes
    `pccheck.json`, which lists them; called again, it does so anew. Thread-safe for different folders.

    Args:
        folder: where the files are.
        world: number of processes, 1..1,048,576.

    Raises:
        RanksError: a process's file is missing, not whole, or of another step; `ranks` names them.
        MediumError, CapacityError: the folder cannot be read or written.
    """
    where = os.path.abspath(os.fspath(folder))
    outside.write_synced(os.path.join(where, LIST_NAME), list_files(where, world).encode())


def load(folder: str | os.PathLike[str], *, rank: int = 0, like: Any = None, partial: bool = False) -> Restored:
    """Give the state in a linked folder as a process restores it; every byte of it is verified. Thread-safe.

    The tree, and what belongs to one process, are those of process `rank % world`; arrays that were stored in parts are
    put together from all files. Only what is wanted is read.

    Args:
        folder: where it is; a copy will do.
        rank: of any number of processes, from 0.
        like: as in `Checkpointer.restore`.
        partial: as there.

    Raises:
        UsageError: the folder was never finished.
        FormatError: a file is missing, or is not the one that was listed; or a manifest claims what cannot be.
        DamagedError, MediumError: a file is damaged, or cannot be read.
        MismatchError: it does not fit `like`, and `partial` is off.
    """
    files = LinkedFiles(folder)
    return load_files(files, rank % files.world, like=like, partial=partial).restored


def outline(folder: str | os.PathLike[str], *, rank: int = 0) -> Outline:
    """Say what is in a linked folder, as `pccheck.outline` does of a store; only manifests are read. Thread-safe.

    Args:
        folder: where it is.
        rank: whose metadata is wanted: that of process `rank % world`.

    Raises as `load`.
    """
    files = LinkedFiles(folder)
    return outline_of(files, home=rank % files.world)


def drop_stale(folder: str | os.PathLike[str], store_dir: str | os.PathLike[str], rank: int = 0) -> int:
    """Remove a process's files of a store of links from a folder that will never be finished, and give how many.

    In the folder and below it every file `rank_name(rank)` goes that was made in that store, so that nothing holds its
    space; and before each file the list beside it, which cannot be true any more. No symbolic link is followed. Nobody
    may be saving into that folder. Where the folder is missing, or the store's own CHECK, nothing is removed.

    Args:
        folder: what a crash left: a temporary folder that was not committed.
        store_dir: the directory of the `Checkpointer`.
        rank: whose files.

    Raises MediumError where a file cannot be removed.
    """
    store_id = _store_id(os.fspath(store_dir))

    def made_there(head: bytes) -> bool:
        try:
            record = format.unpack_record(head)
        except ContentError:
            return False
        return record is not None and record.store_id == store_id and record.is_linked

    if store_id is None:
        return 0
    return outside.remove_below(os.fspath(folder), [rank_name(rank)], made_there, lister=LIST_NAME)


def _store_id(path: str) -> bytes | None:
    if not os.path.isdir(path):
        return None
    with closing(Directory(path, create=False, write=False)) as volume:
        return read_check(volume).store_id
