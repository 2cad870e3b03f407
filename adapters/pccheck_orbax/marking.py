"""Makes an item's folder a checkpoint, once every process has linked its file (may import pccheck, Orbax)."""

from __future__ import annotations

import json
import os
from pathlib import Path

from pccheck import links
from pccheck_orbax.durable import sync_names

# Orbax's newer interface takes a folder for a tree of arrays where this file is, and refuses it where it is not.
MARK = "_METADATA"
_MAX_BYTES = 4096  # ours has some 150; what is cut off here is no JSON, so not ours
_TEXT = {
    "saved_by": "pccheck_orbax",
    "restore_with": "a handler_registry=pccheck_orbax.registry(), or pccheck.open(this folder)",
}


def is_ours(folder: str) -> bool:
    """Tell whether the mark in an item's folder is ours, whatever else became of the folder; Orbax's has its name."""
    try:
        with open(os.path.join(folder, MARK), "rb") as file:
            told = json.loads(file.read(_MAX_BYTES))
    except (OSError, ValueError, RecursionError):
        return False
    return isinstance(told, dict) and told.get("saved_by") == _TEXT["saved_by"]


def finish(folder: str, world: int) -> None:
    """Write the list of the files of all processes, and the mark, both durable.

    Raises what `pccheck.links.finish` raises where a file is missing or of another save; then nothing is written.
    """
    links.finish(folder, world)
    descriptor = os.open(os.path.join(folder, MARK), os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o666)
    try:
        os.write(descriptor, json.dumps(_TEXT, indent=1).encode())
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    sync_names(Path(folder))
