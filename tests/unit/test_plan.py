"""The layout of the byte space: aligned, disjoint, and covered by its chunks."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from pccheck import format
from pccheck.state.plan import Layout, Piece, lay_out

LENGTHS = st.lists(st.integers(0, 40_000), max_size=30)
CHUNKS = st.sampled_from([4096, 8192, 65_536, 1 << 20])


@settings(deadline=None, derandomize=True, database=None)
@given(LENGTHS, CHUNKS)
def test_pieces_are_aligned_and_apart_and_chunks_cover_them(lengths, chunk_bytes):
    layout = lay_out(lengths, chunk_bytes)
    assert [p.length for p in layout.pieces] == lengths
    end = 0
    for piece in layout.pieces:
        assert piece.offset % format.LEAF_ALIGN == 0
        assert end <= piece.offset < end + format.LEAF_ALIGN
        end = piece.offset + piece.length
    assert layout.data_bytes == end
    start, file_end = 0, format.PAYLOAD_OFFSET
    for chunk in layout.chunks:
        assert chunk.start == start
        assert 0 < chunk.data_bytes <= chunk_bytes
        assert chunk.stored_bytes == format.padded(chunk.data_bytes)
        assert chunk.file_offset % format.CHUNK_ALIGN == 0
        assert chunk.file_offset >= file_end
        start += chunk.data_bytes
        file_end = chunk.file_offset + chunk.stored_bytes
    assert start == end
    assert layout.payload_bytes == file_end - format.PAYLOAD_OFFSET
    assert layout.payload_bytes % format.PAGE == 0


def test_a_state_without_bytes_has_no_chunks():
    for layout in (lay_out([], 4096), lay_out([0, 0], 4096)):
        assert layout.chunks == ()
        assert layout.data_bytes == 0
        assert layout.payload_bytes == 0


def test_a_known_layout():
    layout = lay_out([10, 0, 64, 5000], 4096)
    assert layout == Layout((Piece(0, 10), Piece(64, 0), Piece(64, 64), Piece(128, 5000)), 4096)
    assert layout.data_bytes == 5128
    assert [(c.start, c.data_bytes, c.file_offset, c.stored_bytes) for c in layout.chunks] == [
        (0, 4096, 65_536, 4096),
        (4096, 1032, 131_072, 4096),
    ]
    assert layout.payload_bytes == 65_536 + 4096
