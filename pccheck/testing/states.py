"""States to save, and what a medium must hold of them, for checks of pipelines (beside the floors: floors 0 to 2)."""

from __future__ import annotations

import random
import threading
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import xxhash

from pccheck.format import PAYLOAD_OFFSET
from pccheck.pipeline.interface import Job
from pccheck.state.plan import Layout, Piece, lay_out
from pccheck.storage.media import address_of
from pccheck.storage.medium import Medium
from pccheck.testing.faults import FaultyMedium, Script
from pccheck.testing.promises import check, read

LONG_S = 60.0  # a wait that a healthy pipeline never uses up


@dataclass
class State:
    """A state to save: its layout, one array of bytes per piece, and what the file must hold."""

    layout: Layout
    arrays: list[np.ndarray[tuple[int], np.dtype[np.uint8]]]

    @property
    def addresses(self) -> list[int]:
        """Where each piece begins; a made-up place for empty ones, which nobody may read."""
        return [address_of(a.data) if a.size else 1 for a in self.arrays]

    @property
    def file_bytes(self) -> int:
        """Bytes that a medium for it must have."""
        return PAYLOAD_OFFSET + self.layout.payload_bytes

    def chunks(self) -> list[bytes]:
        """Give the stored bytes of each chunk."""
        space = bytearray(self.layout.data_bytes)
        for piece, array in zip(self.layout.pieces, self.arrays, strict=True):
            space[piece.offset : piece.offset + piece.length] = array.tobytes()
        return [bytes(space[c.start : c.start + c.data_bytes]).ljust(c.stored_bytes, b"\0") for c in self.layout.chunks]

    def overwrite(self) -> None:
        """Change every byte, as a training step would."""
        for array in self.arrays:
            np.invert(array, out=array)


def make_state(rng: random.Random, lengths: Sequence[int], chunk_bytes: int, *, gaps: bool = False) -> State:
    """Make a state of random bytes whose pieces begin at odd addresses.

    Args:
        rng: makes it the same each time.
        lengths: bytes of each piece.
        chunk_bytes: of the layout.
        gaps: leave room between pieces, up to a few chunks, in place of alignment only.
    """
    layout = lay_out(lengths, chunk_bytes)
    if gaps:
        pieces, offset = [], 0
        for length in lengths:
            offset += 64 * rng.choice((0, 0, 1, 100, 3000))
            pieces.append(Piece(offset, length))
            offset += -(-length // 64) * 64
        layout = Layout(tuple(pieces), chunk_bytes)
    arrays = []
    for length in lengths:
        lead = rng.randrange(64)
        arrays.append(np.frombuffer(bytearray(rng.randbytes(lead + length)), np.uint8)[lead:])
    return State(layout, arrays)


def check_file(state_chunks: list[bytes], layout: Layout, medium: Medium, job: Job) -> None:
    """Check stored bytes and digests of a job that was written."""
    digests = job.digests()
    check(len(digests) == 16 * len(state_chunks), "digests() gives 16 bytes for each chunk")
    for index, (chunk, want) in enumerate(zip(layout.chunks, state_chunks, strict=True)):
        check(read(medium, chunk.stored_bytes, chunk.file_offset) == want, f"chunk {index} is stored exactly, padded")
        digest = digests[16 * index : 16 * index + 16]
        check(digest == xxhash.xxh3_128_digest(want), f"the digest of chunk {index} is XXH3-128 of its stored bytes")


class Gate:
    """A medium whose writes wait until `open()` is called; everything else is the inner one's."""

    def __init__(self, inner: Medium) -> None:
        self.inner = inner
        self.path = inner.path
        self.gate = threading.Event()
        self.writes = 0
        self._script = FaultyMedium(inner, Script())

    def open(self) -> None:
        """Let writes through."""
        self.gate.set()

    def write_from(self, buffer: memoryview, offset: int) -> None:
        """Write once the gate is open; an error after LONG_S."""
        self.writes += 1
        check(self.gate.wait(LONG_S), "a check opens its gate")
        self.inner.write_from(buffer, offset)

    def __getattr__(self, name: str) -> object:
        return getattr(self._script, name)
