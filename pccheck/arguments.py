"""What a caller may pass, checked before anything is changed (floor 2: imports below)."""

from __future__ import annotations

import operator
import os
from typing import cast

from pccheck.errors import UsageError
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


def volume(directory: object) -> Volume:
    """Give the volume to write to: a folder's path is opened, and made where it is missing; raises UsageError."""
    if isinstance(directory, (str, os.PathLike)):
        path = os.fspath(directory)
        if not isinstance(path, str) or not path or "\0" in path:
            raise UsageError(f"directory={directory!r} is not allowed: it must be the path of a folder, as text")
        return Directory(path, create=True, write=True)
    if not hasattr(directory, "check_page"):
        raise UsageError(f"directory={directory!r} is not allowed: it must be a path, or a pccheck Volume")
    return cast(Volume, directory)


def check_callable(**given: tuple[object, str]) -> None:
    """Raise UsageError for an argument (`name=(value, method)`) that is neither None nor has the method."""
    for name, (value, method) in given.items():
        if value is not None and not hasattr(value, method):
            raise UsageError(f"{name}={value!r} is not allowed: it has no {method}")
