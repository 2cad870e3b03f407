"""XXH3-128 of bytes in memory (floor 1: imports nothing of pccheck)."""

from __future__ import annotations

import xxhash

DIGEST_BYTES = 16


def xxh3_128(data: bytes | bytearray | memoryview) -> bytes:
    """Give XXH3-128 of contiguous bytes in canonical (big-endian) form, 16 bytes.

    Thread-safe; the interpreter's lock is released for inputs of more than a few hundred KiB, so that threads
    digest at once. Algorithm: the XXH3 specification of xxHash, seed 0.
    """
    return xxhash.xxh3_128_digest(data)
