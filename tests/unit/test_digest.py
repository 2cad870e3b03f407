"""The digest is XXH3-128 in canonical form."""

from __future__ import annotations

import random

import pytest
import xxhash

from pccheck.storage.digest import DIGEST_BYTES, xxh3_128


def test_published_value_of_nothing():
    assert xxh3_128(b"").hex() == "99aa06d3014798d86001c324468d497f"


@pytest.mark.parametrize("length", [1, 16, 17, 240, 241, 1024, 4096, 1 << 20])
def test_canonical_form(length):
    data = random.Random(length).randbytes(length)
    digest = xxh3_128(memoryview(bytearray(data)))
    assert len(digest) == DIGEST_BYTES
    assert digest == xxhash.xxh3_128_intdigest(data).to_bytes(16, "big")


def test_every_byte_counts():
    data = bytearray(4096)
    whole = xxh3_128(data)
    for place in (0, 1, 63, 64, 1023, 1024, 4095):
        data[place] ^= 1
        assert xxh3_128(data) != whole
        data[place] ^= 1
