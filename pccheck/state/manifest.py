"""The manifest of a checkpoint: readable JSON that says what every byte is (floor 0: imports floor 0).

What a file claims is believed only as far as `decode` has checked it: afterwards no number in it can lead a reader out
of the bytes that are there, nor into more memory than they justify.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import msgspec

from pccheck import format
from pccheck.errors import FormatError, UsageError
from pccheck.state import tree
from pccheck.state.boxes import Box
from pccheck.state.entries import LeafEntry as LeafEntry
from pccheck.state.entries import check_sharing, firsts
from pccheck.state.nodes import Node

MAX_METADATA_BYTES = 64 * 1024
MAX_DIMENSIONS = 64
MAX_NUMBER = (1 << 63) - 1
MAX_CHUNK_BYTES = 1 << 30
_DIGEST = re.compile(r"[0-9a-f]{32}")


class ChunkEntry(msgspec.Struct, frozen=True, gc=False):
    """One chunk: `start`, `data` in the byte space; `offset`, `stored` in the file; digest of the stored bytes."""

    start: int
    data: int
    offset: int
    stored: int
    digest: str  # XXH3-128, 32 hex digits
    codec: str = "none"


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """All that a reader needs beside the record."""

    version: int
    step: int
    counter: int
    incarnation: int
    rank: int
    world: int
    base: int
    chunk_bytes: int
    data_bytes: int
    metadata: dict[str, Any]
    tree: Node
    leaves: list[LeafEntry]
    chunks: list[ChunkEntry]
    link: str | None = None
    writer: str = ""


def encode(manifest: Manifest) -> bytes:
    """Give a manifest as JSON."""
    return msgspec.json.encode(manifest)


def decode(data: bytes) -> Manifest:
    """Give the manifest that these bytes hold, with everything that it claims checked.

    Each leaf lies within `data_bytes`, aligned, and overlaps no other unless both have the same place; the chunks cover
    the byte space in order, stored zero-padded and apart from each other; the tree can be put together. That
    `data_bytes` and the chunks fit the file is for the caller to check, as only it knows the file's size.

    Raises:
        FormatError: it is no such manifest.
    """
    try:
        manifest = _DECODER.decode(data)
        _check_numbers(manifest)
        _check_chunks(manifest)
        _check_leaves(manifest)
        tree.check(manifest.tree, firsts(manifest.leaves))
    except (msgspec.DecodeError, UnicodeError) as error:
        raise FormatError(f"the manifest cannot be read: {error}") from None
    except RecursionError:
        raise FormatError("the manifest is nested too deeply") from None
    return manifest


_DECODER = msgspec.json.Decoder(Manifest)


def _check_numbers(m: Manifest) -> None:
    if m.version != format.VERSION:
        raise FormatError(f"the manifest is of version {m.version}; this release reads {format.VERSION}")
    if not 0 < m.chunk_bytes <= MAX_CHUNK_BYTES or m.chunk_bytes % format.PAGE:
        raise FormatError(f"the manifest claims chunks of {m.chunk_bytes} bytes")
    numbers = (m.counter, m.incarnation, m.rank, m.world, m.base, m.data_bytes)
    if (
        not all(0 <= n <= MAX_NUMBER for n in numbers)
        or not -MAX_NUMBER - 1 <= m.step <= MAX_NUMBER
        or m.rank >= m.world
    ):
        raise FormatError("the manifest claims an impossible step, counter, rank or length")


def _check_chunks(m: Manifest) -> None:
    start, end = 0, format.PAYLOAD_OFFSET
    for index, c in enumerate(m.chunks):
        if c.codec != "none":
            raise FormatError(f"chunk {index} is stored with codec {c.codec[:40]!r}; this release reads 'none'")
        if c.start != start or not 0 < c.data <= m.chunk_bytes or c.stored != format.padded(c.data):
            raise FormatError(f"chunk {index} does not follow the one before, or has an impossible length")
        if c.offset < end or c.offset % format.CHUNK_ALIGN or c.offset > MAX_NUMBER or not _DIGEST.fullmatch(c.digest):
            raise FormatError(f"chunk {index} has an impossible place or digest")
        if c.data < m.chunk_bytes and index + 1 < len(m.chunks):
            raise FormatError(f"chunk {index} is shorter than the others")
        start, end = start + c.data, c.offset + c.stored
    if start != m.data_bytes:
        raise FormatError(f"the chunks hold {start} bytes of data, the manifest claims {m.data_bytes}")


def _check_leaves(m: Manifest) -> None:
    paths: set[str] = set()
    places: set[tuple[int, int]] = set()
    end, before = 0, None
    for e in m.leaves:
        if e.path in paths and e.path != before:
            raise FormatError(f"two leaves have the path {e.path[:200]!r}")
        paths.add(e.path)
        before = e.path
        if len(e.shape) > MAX_DIMENSIONS or not all(0 <= n <= MAX_NUMBER for n in e.shape):
            raise FormatError(f"leaf {e.path[:200]!r} has an impossible shape")
        if e.box is not None:
            _check_box(e, Box(*e.box))
        if e.offset % format.LEAF_ALIGN or not 0 <= e.offset <= e.offset + e.nbytes <= m.data_bytes:
            raise FormatError(f"leaf {e.path[:200]!r} reaches out of the data")
        if e.nbytes and (e.offset, e.nbytes) not in places:
            if e.offset < end:
                raise FormatError(f"leaf {e.path[:200]!r} reaches into another leaf")
            places.add((e.offset, e.nbytes))
            end = e.offset + e.nbytes
    if len(paths) < len(m.leaves):
        check_sharing(m.leaves)


def _check_box(e: LeafEntry, box: Box) -> None:
    """A box's numbers lead a reader into global arrays: each must lie within its own."""
    if not box.fits(e.shape):
        raise FormatError(f"leaf {e.path[:200]!r} claims a part that reaches out of its shape {e.shape}")
    if "stride" in e.extra and box != Box.whole(e.shape):
        raise FormatError(f"leaf {e.path[:200]!r} claims both a part of an array and an order of its own")
    elements = box.elements
    if e.nbytes % elements if elements else e.nbytes:
        raise FormatError(f"leaf {e.path[:200]!r} has {e.nbytes} bytes for a part of {elements} elements")


# -- metadata --------------------------------------------------------------------------------------------------------


def encode_metadata(metadata: Mapping[str, Any] | None) -> bytes:
    """Give the user's metadata as JSON.

    Raises:
        UsageError: it is not JSON (str keys; None, bool, int of 64 bits, finite float, str, list, tuple, dict), or
            longer than MAX_METADATA_BYTES; the text names the place.
    """
    if metadata is None:
        return b"{}"
    if not isinstance(metadata, Mapping):
        raise UsageError(f"metadata is a {tree.type_name(metadata)}; it must be a dict with str keys")
    data = msgspec.json.encode(_plain(metadata, "metadata", 0))
    if len(data) > MAX_METADATA_BYTES:
        raise UsageError(
            f"metadata takes {len(data):,} bytes, at most {MAX_METADATA_BYTES:,} are allowed; put large things into "
            "the state"
        )
    return data


def _plain(value: Any, place: str, depth: int) -> Any:
    if value is None or isinstance(value, bool):
        return value
    if depth > 20:
        raise UsageError(f"{place} is nested more than 20 levels deep")
    if isinstance(value, str):
        return _text(value, place)
    if isinstance(value, int) and -(1 << 63) <= value < 1 << 63:
        return int(value)
    if isinstance(value, float):
        if value - value == 0:  # neither nan nor inf
            return float(value)
        raise UsageError(f"{place} is {value!r}, which JSON cannot hold; store str(...) of it, or None")
    if isinstance(value, Mapping):
        for key in value:
            if not isinstance(key, str):
                raise UsageError(f"{place} has the key {key!r:.80}; keys of metadata are str")
        return {_text(k, place): _plain(v, f"{place}[{k!r:.80}]", depth + 1) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(v, f"{place}[{i}]", depth + 1) for i, v in enumerate(value)]
    raise UsageError(
        f"{place} is a {tree.type_name(value)}; metadata is JSON (str, int, float, bool, None, list, dict): convert "
        "it, or put it into the state"
    )


def _text(value: str, place: str) -> str:
    try:
        value.encode()
    except UnicodeEncodeError:
        raise UsageError(f"{place} holds {value!r:.80}, which is no Unicode text") from None
    return str(value)
