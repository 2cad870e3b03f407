"""The bytes of a prepared state in host memory, as a pipeline captures them and a reader finds them."""

from __future__ import annotations

import ctypes

import xxhash

from pccheck import format
from pccheck.format import Record, SlotState
from pccheck.state import manifest
from pccheck.testing.slotfiles import STORE_ID


def space_of(prepared):
    """Give the byte space."""
    space = bytearray(prepared.layout.data_bytes)
    for piece, address in zip(prepared.layout.pieces, prepared.addresses, strict=True):
        if piece.length:
            space[piece.offset : piece.offset + piece.length] = ctypes.string_at(int(address), piece.length)
    return space


def slot_of(prepared, rank=0, world=1):
    """Give the slot file that a commit would have made of it: step 10, counter 1."""
    layout, space, digests = prepared.layout, space_of(prepared), b""
    data = bytearray(format.PAYLOAD_OFFSET + layout.payload_bytes)
    for chunk in layout.chunks:
        stored = bytes(space[chunk.start : chunk.start + chunk.data_bytes]).ljust(chunk.stored_bytes, b"\0")
        data[chunk.file_offset : chunk.file_offset + chunk.stored_bytes] = stored
        digests += xxhash.xxh3_128_digest(stored)
    encoded = prepared.encode_manifest(counter=1, incarnation=1, rank=rank, world=world, base=0, digests=digests)
    record = Record(
        store_id=STORE_ID, slot=0, state=SlotState.SEALED, incarnation=1, counter=1, step=10, rank=rank, world=world,
        payload_bytes=layout.payload_bytes, manifest_offset=len(data), manifest_bytes=len(encoded),
        manifest_digest=xxhash.xxh3_128_digest(encoded), time_ns=10**18,
    )  # fmt: skip
    data[: format.RECORD_BYTES] = format.pack_record(record)
    return bytes(data) + encoded.ljust(format.padded(len(encoded)), b"\0")


def stored_by(prepared):
    """Give {path: (entry, stored bytes)}."""
    space, digests = space_of(prepared), bytes(16 * len(prepared.layout.chunks))
    found = manifest.decode(
        prepared.encode_manifest(counter=1, incarnation=1, rank=0, world=9, base=0, digests=digests)
    )
    return {e.path: (e, bytes(space[e.offset : e.offset + e.nbytes])) for e in found.leaves}
