"""Slot files and CHECK files of any content, wrong ones too, for tests of readers (beside: imports floor 0)."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Mapping
from typing import Any

import msgspec
import numpy as np
import xxhash

from pccheck import format
from pccheck.format import Abandoned, Record, SlotState
from pccheck.state import tree
from pccheck.state.plan import lay_out

STORE_ID = b"store-for-tests!"
Edit = Callable[[dict[str, Any]], None]


def slot_file(
    state: Any,
    /,
    *,
    step: int = 10,
    counter: int = 1,
    slot: int = 0,
    incarnation: int = 1,
    chunk_bytes: int = 4096,
    metadata: Mapping[str, Any] | None = None,
    edit: Edit | None = None,
    **record: Any,
) -> bytearray:
    """Give the bytes of a sealed slot file.

    Args:
        state: any nesting of containers and small values, with NumPy arrays of numbers as leaves.
        step: the label.
        counter: the order.
        slot: which slot the record says.
        incarnation: of the writer.
        chunk_bytes: bytes per chunk.
        metadata: beside the state.
        edit: changes the manifest's dict before it is encoded; its digest will be right all the same.
        record: fields of the record that are to differ.
    """
    skeleton, arrays, paths = tree.flatten(state, lambda value: isinstance(value, np.ndarray))
    layout = lay_out([array.nbytes for array in arrays], chunk_bytes)
    space = bytearray(format.padded(layout.data_bytes))
    leaves = []
    for path, array, piece in zip(paths, arrays, layout.pieces, strict=True):
        space[piece.offset : piece.offset + piece.length] = array.tobytes()
        leaves.append(
            {
                "path": path,
                "kind": "numpy",
                "dtype": array.dtype.str,
                "shape": list(array.shape),
                "offset": piece.offset,
                "nbytes": piece.length,
            }
        )
    data, chunks = bytearray(format.PAYLOAD_OFFSET + layout.payload_bytes), []
    for chunk in layout.chunks:
        stored = bytes(space[chunk.start : chunk.start + chunk.data_bytes]).ljust(chunk.stored_bytes, b"\0")
        data[chunk.file_offset : chunk.file_offset + chunk.stored_bytes] = stored
        chunks.append(
            {
                "start": chunk.start,
                "data": chunk.data_bytes,
                "offset": chunk.file_offset,
                "stored": chunk.stored_bytes,
                "digest": xxhash.xxh3_128_hexdigest(stored),
            }
        )
    manifest = {
        "version": format.VERSION, "step": step, "counter": counter, "incarnation": incarnation,
        "rank": record.get("rank", 0), "world": record.get("world", 1), "base": record.get("base", 0),
        "chunk_bytes": chunk_bytes, "data_bytes": layout.data_bytes, "metadata": dict(metadata or {}),
        "tree": msgspec.to_builtins(skeleton), "leaves": leaves, "chunks": chunks,
    }  # fmt: skip
    if edit:
        edit(manifest)
    encoded = json.dumps(manifest).encode()
    fields = {
        "store_id": STORE_ID, "slot": slot, "state": SlotState.SEALED, "incarnation": incarnation, "counter": counter,
        "step": step, "payload_bytes": layout.payload_bytes, "manifest_offset": len(data),
        "manifest_bytes": len(encoded), "manifest_digest": xxhash.xxh3_128_digest(encoded),
        "time_ns": 1_700_000_000 * 10**9,
    }  # fmt: skip
    data[: format.RECORD_BYTES] = format.pack_record(Record(**{**fields, **record}))
    data += encoded.ljust(format.padded(len(encoded)), b"\0")
    return data


def check_file(
    *, word: int = format.NO_WORD, abandoned: Abandoned | None = None, store_id: bytes = STORE_ID, holder: str = ""
) -> bytearray:
    """Give the bytes of a CHECK file."""
    data = bytearray(format.CHECK_BYTES)
    data[: format.SECTOR] = format.pack_superblock(store_id)
    struct.pack_into("<4Q", data, format.CHECK_ADDR_OFFSET, word, word, 1, format.word_counter(word))
    if abandoned is not None:
        at = format.ABANDONED_OFFSETS[abandoned.sequence % 2]
        data[at : at + format.PAGE] = format.pack_abandoned(abandoned)
    if holder:
        data[format.HOLDER_OFFSET : format.HOLDER_OFFSET + format.SECTOR] = format.pack_holder(holder)
    return data
