"""Small files that are replaced whole, and folders that are removed when empty (floor 1: imports nothing)."""

from __future__ import annotations

import os
from contextlib import suppress


def replace_whole(path: str, temporary: str, data: bytes) -> None:
    """Put a file there by a rename, so that readers find the old one or the new one. Not durable. Raises OSError."""
    try:
        with open(temporary, "wb") as file:
            file.write(data)
        os.replace(temporary, path)
    except OSError:
        remove(temporary)
        raise


def read_whole(path: str, limit: int) -> bytes | None:
    """Give what is in a file, at most `limit` bytes; None where it is missing, or was replaced while it was read."""
    try:
        with open(path, "rb") as file:
            return file.read(limit)
    except OSError:
        return None


def remove(path: str) -> None:
    """Remove a file, if that can be done."""
    with suppress(OSError):
        os.unlink(path)


def remove_empty(folder: str) -> None:
    """Remove a folder, if that can be done: it stays where anything is in it."""
    with suppress(OSError):
        os.rmdir(folder)


def make_folder(path: str) -> None:
    """Make a folder and those above it where they are missing. Raises OSError."""
    os.makedirs(path, exist_ok=True)
