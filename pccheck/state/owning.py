"""Who promises to wait before which bytes are changed, and which bytes are copied aside (floor 1: imports floor 0)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, final

import numpy as np
from numpy.typing import NDArray

from pccheck import format
from pccheck.state.plan import Layout

NOBODY, NEVER = -1, -2  # owners of pieces: who may change at any time, and who cannot change
Indices = NDArray[np.intp]
Numbers = NDArray[np.uint64]


class Copier(Protocol):
    """Copies runs of host memory."""

    def __call__(self, addresses: Numbers, lengths: Numbers, targets: Numbers) -> object:
        """Copy `lengths[i]` bytes from `addresses[i]` to `targets[i]`, for all i."""


@final
@dataclass(frozen=True, eq=False)
class PieceSet:
    """Some pieces of a layout that others can change, those with bytes only.

    Args:
        host: those in host memory.
        lengths: bytes of each of these.
        places: where each goes in one buffer of `host_bytes` bytes that holds them all, 64-byte aligned.
        host_bytes: size of that buffer.
        device: those on devices.
        device_bytes: bytes of these.
        chunks: how many leading chunks hold them all.
    """

    host: Indices
    lengths: Numbers
    places: Numbers
    host_bytes: int
    device: tuple[int, ...]
    device_bytes: int
    chunks: int

    @property
    def total_bytes(self) -> int:
        """Bytes of all of them."""
        return self.host_bytes + self.device_bytes


@final
@dataclass(frozen=True, eq=False)
class Ownership:
    """Who owns which pieces.

    Args:
        owners: of each piece: a number from 0, NOBODY, or NEVER where nobody can change its bytes.
        chunks: of each owner: how many leading chunks hold all pieces that it owns.
        unowned: the pieces that nobody owns.
    """

    owners: NDArray[np.int64]
    chunks: Mapping[int, int]
    unowned: PieceSet


@final
class Pieces:
    """The pieces of a layout as arrays, so that questions about all of them cost no loop. Immutable.

    Args:
        layout: whose pieces.
        stable: which of them nobody else can change.
        on_device: which of them lie on devices.
    """

    def __init__(self, layout: Layout, stable: Sequence[bool], on_device: Sequence[bool]) -> None:
        offsets = np.array([p.offset for p in layout.pieces], np.int64)
        self._lengths = np.array([p.length for p in layout.pieces], np.int64)
        self._changeable = (self._lengths > 0) & ~np.array(stable, bool)
        self._on_device = np.array(on_device, bool)
        self._ends = np.where(self._lengths > 0, (offsets + self._lengths - 1) // layout.chunk_bytes + 1, 0)
        self.changeable = self.chosen(self._changeable)

    def chosen(self, mask: NDArray[np.bool_]) -> PieceSet:
        """Give the changeable pieces of a mask as a set."""
        mask = mask & self._changeable
        host, device = np.flatnonzero(mask & ~self._on_device), np.flatnonzero(mask & self._on_device)
        lengths = self._lengths[host]
        room = padded(lengths)
        ends = np.cumsum(room)
        return PieceSet(
            host=host, lengths=lengths.astype(np.uint64), places=(ends - room).astype(np.uint64),
            host_bytes=int(ends[-1]) if host.size else 0, device=tuple(device.tolist()),
            device_bytes=int(self._lengths[device].sum()), chunks=self.chunks_of(np.flatnonzero(mask)),
        )  # fmt: skip

    def chunks_of(self, pieces: Indices | Sequence[int]) -> int:
        """Give how many leading chunks hold all of these pieces."""
        return int(self._ends[np.asarray(pieces, np.intp)].max(initial=0))

    def smallest(self, pieces: PieceSet, nbytes: int) -> tuple[PieceSet, int]:
        """Give the smallest of some pieces, together at most `nbytes`, and the leading chunks that hold the others."""
        every = np.concatenate([pieces.host, np.array(pieces.device, np.intp)])
        by_size = every[np.argsort(self._lengths[every], kind="stable")]
        count = int(np.searchsorted(np.cumsum(padded(self._lengths[by_size])), nbytes, "right"))
        mask = np.zeros(len(self._lengths), bool)
        mask[by_size[:count]] = True
        return self.chosen(mask), self.chunks_of(by_size[count:])

    def owned(self, pieces: Indices, owners: NDArray[np.int64]) -> Ownership:
        """Give who owns each piece: the owner that all of its leaves have; NOBODY where these differ.

        Args:
            pieces: of each leaf.
            owners: of each leaf.
        """
        low = np.full(len(self._lengths), np.iinfo(np.int64).max)
        high = np.full(len(self._lengths), NOBODY, np.int64)
        np.minimum.at(low, pieces, owners)
        np.maximum.at(high, pieces, owners)
        found = np.where((low == high) & (low >= 0), low, NOBODY)
        found[~self._changeable] = NEVER
        chunks = {
            owner: int(self._ends[found == owner].max()) for owner in np.unique(found[found >= 0]).tolist()
        }  # as many rounds as there are owners, which are optimizers
        return Ownership(found, chunks, self.chosen(found == NOBODY))


def padded(lengths: NDArray[np.int64]) -> NDArray[np.int64]:
    """Give the room that leaves of these lengths take, each 64-byte aligned."""
    return (lengths + format.LEAF_ALIGN - 1) // format.LEAF_ALIGN * format.LEAF_ALIGN
