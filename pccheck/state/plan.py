"""Where the bytes of each leaf lie, and which chunks they make (floor 0: imports errors, format)."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from pccheck import format


@dataclass(frozen=True)
class Piece:
    """One run of bytes in host memory and its place in the checkpoint's byte space."""

    offset: int
    length: int


@dataclass(frozen=True)
class Chunk:
    """One chunk: `start..start + data_bytes` of the byte space, stored zero-padded at `file_offset`."""

    start: int
    data_bytes: int
    file_offset: int
    stored_bytes: int


@dataclass(frozen=True)
class Layout:
    """The byte space of a checkpoint: pieces in ascending order, each 64-byte aligned, cut into chunks.

    Args:
        pieces: disjoint, ascending, aligned to LEAF_ALIGN; zero-length pieces are legal.
        chunk_bytes: bytes of byte space per chunk, a multiple of PAGE.
    """

    pieces: tuple[Piece, ...]
    chunk_bytes: int

    @cached_property
    def data_bytes(self) -> int:
        """Bytes of byte space up to the end of the last piece."""
        return max((p.offset + p.length for p in self.pieces), default=0)

    @cached_property
    def chunks(self) -> tuple[Chunk, ...]:
        """The chunks in order; chunk i begins in the file at PAYLOAD_OFFSET + i * stride."""
        stride = format.padded(self.chunk_bytes, format.CHUNK_ALIGN)
        starts = range(0, self.data_bytes, self.chunk_bytes)
        lengths = [min(self.chunk_bytes, self.data_bytes - s) for s in starts]
        return tuple(
            Chunk(s, n, format.PAYLOAD_OFFSET + i * stride, format.padded(n))
            for i, (s, n) in enumerate(zip(starts, lengths, strict=True))
        )

    @cached_property
    def tables(self) -> tuple[bytes, bytes]:
        """Pieces and chunks as native code reads them: 64-bit numbers, each dataclass's fields in order."""
        pieces = array("Q", (n for p in self.pieces for n in (p.offset, p.length)))
        chunks = array("Q", (n for c in self.chunks for n in (c.start, c.data_bytes, c.file_offset, c.stored_bytes)))
        return pieces.tobytes(), chunks.tobytes()

    @cached_property
    def payload_bytes(self) -> int:
        """Bytes of the slot file from PAYLOAD_OFFSET to the end of the last chunk, a multiple of PAGE."""
        if not self.chunks:
            return 0
        last = self.chunks[-1]
        return last.file_offset + last.stored_bytes - format.PAYLOAD_OFFSET


def lay_out(lengths: Sequence[int], chunk_bytes: int) -> Layout:
    """Place runs of these lengths one after the other, each aligned to LEAF_ALIGN."""
    pieces, offset = [], 0
    for length in lengths:
        pieces.append(Piece(offset, length))
        offset = format.padded(offset + length, format.LEAF_ALIGN)
    return Layout(tuple(pieces), chunk_bytes)
