"""Leaves that are captured lazily, digested before and after, for `debug_captures` (floor 2: imports below)."""

from __future__ import annotations

import threading
from typing import Any, final

import numpy as np
from numpy.typing import NDArray

from pccheck.devices import Device, Run
from pccheck.errors import ChangedError, DeadlineError
from pccheck.pipeline.gather import digest_pieces
from pccheck.state.planner import Prepared

ANYBODY = -1  # owns every leaf where there is no guard
_COPY_S = 600.0
_Digests = NDArray[np.void]


@final
class _Watch:
    """The leaves of one checkpoint that are captured after `save()` has returned, as they were in it.

    Args:
        prepared: before anything was copied aside; its arrays are kept alive.
    """

    def __init__(self, prepared: Prepared) -> None:
        self.step, self._keep = prepared.step, prepared.keep
        owners = prepared.owners
        pieces = np.concatenate([prepared.changeable.host, np.asarray(prepared.changeable.device, np.intp)])
        pieces = pieces if owners is None else pieces[owners[pieces] >= 0]
        self._pieces = pieces
        self._owners = np.full(len(pieces), ANYBODY) if owners is None else owners[pieces]
        self._paths = prepared.piece_paths
        self._lengths = {n: prepared.layout.pieces[n].length for n in pieces.tolist()}
        self._addresses = np.array(prepared.addresses)  # 0 = on a device
        filler = prepared.filler
        devices = () if filler is None else pieces[self._addresses[pieces] == 0].tolist()
        self._places: dict[int, tuple[Device, Any, int]] = {n: filler.place_of(n) for n in devices if filler}
        self._before = self._digest(pieces)

    def _digest(self, pieces: NDArray[np.intp]) -> _Digests:
        found = np.empty(len(pieces), np.dtype("V16"))
        on_host = self._addresses[pieces] != 0
        host = pieces[on_host]
        lengths = [self._lengths[n] for n in host.tolist()]
        found[on_host] = np.frombuffer(digest_pieces(self._addresses[host].tolist(), lengths), found.dtype)
        for at in np.flatnonzero(~on_host).tolist():
            device, source, first = self._places[int(pieces[at])]
            length = self._lengths[int(pieces[at])]
            scratch, capture = np.empty(length, np.uint8), device.begin()
            try:
                run = Run(source, first, length, 0)
                if not capture.copy(scratch.ctypes.data, length, [run]).wait(_COPY_S):
                    raise DeadlineError(f"{device.name} to copy {length:,} bytes", _COPY_S)
            finally:
                capture.end()
            found[at] = np.frombuffer(digest_pieces([scratch.ctypes.data], [length]), found.dtype)[0]
        return found

    def check(self, owner: int | None) -> ChangedError | None:
        """Compare the leaves of an owner (None = all) with what they were; they are not watched any longer."""
        mine = np.ones(len(self._pieces), bool) if owner is None else np.isin(self._owners, (owner, ANYBODY))
        pieces = self._pieces[mine]
        changed = pieces[self._digest(pieces) != self._before[mine]]
        self._pieces, self._owners, self._before = (a[~mine] for a in (self._pieces, self._owners, self._before))
        paths = list(dict.fromkeys(self._paths[n] for n in changed.tolist()))  # a leaf may have several pieces
        return ChangedError(self.step, paths) if paths else None


@final
class Watches:
    """The watched leaves of all checkpoints whose fence was not reached yet. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._open: list[_Watch] = []

    def __len__(self) -> int:
        return len(self._open)

    def begin(self, prepared: Prepared) -> None:
        """Watch the leaves of a state that is about to be captured lazily."""
        watch = _Watch(prepared)
        with self._lock:
            self._open.append(watch)

    def check(self, owner: int | None = None) -> list[ChangedError]:
        """Give what was changed of an owner's leaves (None = all) before its fence was reached; told once."""
        with self._lock:
            found = [error for watch in self._open if (error := watch.check(owner)) is not None]
            if owner is None:
                self._open.clear()
        return found
