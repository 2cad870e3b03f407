"""Traces read from files (floor 1: imports errors, replay.trace)."""

from __future__ import annotations

import os
from pathlib import Path

from pccheck.errors import MediumError
from pccheck.replay.trace import Trace, TraceError, parse_trace

_MOST_BYTES = 64 << 20


def read_trace(path: str | os.PathLike[str]) -> Trace:
    """Read a trace of losses from a CSV file; `pccheck.replay.trace.parse_trace` says which forms there are.

    Raises TraceError for a file that is no trace or has more than 64 MiB, MediumError for one that cannot be read.
    """
    place = Path(path)
    try:
        with place.open("rb") as file:
            raw = file.read(_MOST_BYTES + 1)
    except OSError as error:
        raise MediumError("reading the trace", str(place), error) from error
    if len(raw) > _MOST_BYTES:
        raise TraceError(place.name, 1, f"the file has more than {_MOST_BYTES >> 20} MiB")
    try:
        return parse_trace(raw.decode(), name=place.name)
    except UnicodeDecodeError as error:
        raise TraceError(place.name, raw.count(b"\n", 0, error.start) + 1, "not UTF-8 text") from None
