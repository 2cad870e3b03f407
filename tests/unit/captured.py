"""The bytes of a prepared state in host memory, as a pipeline captures them and a reader finds them."""

from __future__ import annotations

import ctypes

from pccheck.state import manifest


def space_of(prepared):
    """Give the byte space."""
    space = bytearray(prepared.layout.data_bytes)
    for piece, address in zip(prepared.layout.pieces, prepared.addresses, strict=True):
        if piece.length:
            space[piece.offset : piece.offset + piece.length] = ctypes.string_at(int(address), piece.length)
    return space


def stored_by(prepared):
    """Give {path: (entry, stored bytes)}."""
    space, digests = space_of(prepared), bytes(16 * len(prepared.layout.chunks))
    found = manifest.decode(
        prepared.encode_manifest(counter=1, incarnation=1, rank=0, world=9, base=0, digests=digests)
    )
    return {e.path: (e, bytes(space[e.offset : e.offset + e.nbytes])) for e in found.leaves}
