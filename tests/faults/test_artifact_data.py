"""The defects D11 to D13 of the paper's artifact (data), each as a test that the same mistake here would fail."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest

import pccheck
from pccheck import format
from pccheck.errors import CapacityError
from pccheck.state.plan import lay_out
from pccheck.storage.directory import Directory
from tests.faults.helpers import CHUNK, WAIT_S

GIB = 1 << 30


def test_d11_every_dtype_comes_back_as_it_was(tmp_path):
    """D11: everything became float32: 2^24 + 1, int64, float64, bool, bfloat16 and strings did not survive."""
    import ml_dtypes

    state = {
        "odd": np.array([(1 << 24) + 1, (1 << 53) + 1, -(1 << 63)], np.int64),
        "f64": np.array([0.1, -0.0, np.inf, np.nan, 5e-324]),
        "bits": np.arange(65536, dtype=np.uint16).view(ml_dtypes.bfloat16),
        "half": np.arange(65536, dtype=np.uint16).view(np.float16),
        "bool": np.array([True, False]), "c": np.array([1 + 2j], np.complex64),
        "plain": ["text", None, 1 << 80, 0.1, b"bytes", True, (1, 2)],
    }  # fmt: skip
    with pccheck.Checkpointer(tmp_path, chunk_bytes=CHUNK) as ck:
        ck.save(1, state)
        ck.wait(WAIT_S)
        back = ck.restore().state
    assert back["plain"] == state["plain"]
    assert [type(x) for x in back["plain"]] == [type(x) for x in state["plain"]]
    for name in state.keys() - {"plain"}:
        assert back[name].dtype == state[name].dtype
        assert back[name].tobytes() == state[name].tobytes(), name


@pytest.mark.parametrize("pipeline", ["auto", "portable"])
def test_d12_remainders_of_every_size_around_chunk_borders(fast_path, pipeline):
    """D12: the remainder of a chunk was not saved, or the copy ran past its end into the next."""
    sizes = sorted({max(0, base + delta) for base in (0, 64, 128, 512, CHUNK, 2 * CHUNK, 3 * CHUNK, 65536)
                    for delta in (-65, -64, -63, -8, -2, -1, 0, 1, 2, 7, 63, 64, 65)})  # fmt: skip
    chance = np.random.default_rng(12)
    with pccheck.Checkpointer(fast_path / "s", chunk_bytes=CHUNK, in_flight=2, pipeline=pipeline) as ck:
        for step, size in enumerate(sizes):
            before, after = np.full(3, 0xAA, np.uint8), np.full(5, 0xBB, np.uint8)
            state = {"first": before, "odd": chance.integers(0, 256, size, np.uint8), "last": after}
            ck.save(step, state).durable.result(WAIT_S)
            with pccheck.open(fast_path / "s") as view:
                restored = view.restore()
            assert restored.step == step
            for name, array in state.items():
                assert restored.state[name].tobytes() == array.tobytes(), (size, name)


def test_d12_many_leaves_of_odd_sizes(fast_path):
    """D12: hundreds of leaves of 0 to 9,000 bytes, so that borders of leaves and chunks fall in every way."""
    chance = random.Random(12)
    with pccheck.Checkpointer(fast_path / "s", chunk_bytes=CHUNK) as ck:
        for step in range(5):
            sizes = chance.choices((0, 1, 3, 63, 64, 65, 1000, 4095, 4097, 9000), k=200)
            state = {str(i): np.frombuffer(chance.randbytes(size), np.uint8) for i, size in enumerate(sizes)}
            ck.save(step, state)
            ck.wait(WAIT_S)
            back = ck.restore().state
            assert all(back[k].tobytes() == v.tobytes() for k, v in state.items())


def test_d13_offsets_beyond_32_bits(tmp_path):
    """D13: sizes and offsets were of 32 bits. A layout of 27 GiB, and real chunks at such places in a sparse file."""
    layout = lay_out([20 * GIB, 100, 7 * GIB], GIB)
    assert layout.data_bytes > 27 * GIB
    assert layout.chunks[-1].file_offset > 26 * GIB
    assert all(b.file_offset > a.file_offset for a, b in zip(layout.chunks, layout.chunks[1:], strict=False))
    assert sum(chunk.data_bytes for chunk in layout.chunks) == layout.data_bytes
    volume = Directory(str(tmp_path), create=True, write=True)
    with (tmp_path / "slot-000.pcc").open("wb") as f:
        f.truncate(40 * GIB)
    medium = volume.open("slot-000.pcc", write=True)
    for offset in ((1 << 31) - CHUNK, 1 << 31, (1 << 32) - CHUNK, 1 << 32, 5 * GIB + 65536, 39 * GIB):
        data = np.full(CHUNK, offset >> 20 & 0xFF, np.uint8)
        medium.write_from(memoryview(data), offset)
        room = np.zeros(CHUNK, np.uint8)
        medium.read_into(memoryview(room), offset)
        assert np.array_equal(room, data)
        assert not pread(tmp_path / "slot-000.pcc", offset & 0xFFFF_FFFF, CHUNK).strip(b"\0") or offset < 1 << 32
    medium.close()
    volume.close()


def pread(path: Path, offset: int, length: int) -> bytes:
    with path.open("rb") as f:
        f.seek(offset)
        return f.read(length)


@pytest.mark.parametrize("pipeline", ["native", "portable"])
def test_d13_a_pipeline_writes_beyond_32_bits(tmp_path, pipeline):
    """D13: chunks whose place in the file lies beyond 4 GiB are written there, by both pipelines."""
    from pccheck.pipeline.choose import make_pipeline
    from pccheck.state.plan import Chunk, Layout, Piece

    if pipeline == "native":
        pytest.importorskip("pccheck._native")
    volume = Directory(str(tmp_path), create=True, write=True)
    with (tmp_path / "slot-000.pcc").open("wb") as f:
        f.truncate(9 * GIB)
    medium = volume.open("slot-000.pcc", write=True)
    source = np.arange(2 * CHUNK // 8, dtype=np.uint64)
    places = (format.PAYLOAD_OFFSET + 4 * GIB, format.PAYLOAD_OFFSET + 8 * GIB)
    layout = Layout((Piece(0, 2 * CHUNK),), CHUNK)
    chunks = tuple(Chunk(i * CHUNK, CHUNK, place, CHUNK) for i, place in enumerate(places))
    vars(layout)["chunks"] = chunks  # as they would lie in a checkpoint of 8 GiB
    threads = make_pipeline(pipeline, 2 * CHUNK, CHUNK, 2)
    job = threads.submit(layout, np.array([source.ctypes.data], np.uint64), source, medium)
    assert job.wait_written(WAIT_S)
    threads.close()
    for i, place in enumerate(places):
        assert pread(tmp_path / "slot-000.pcc", place, CHUNK) == source.tobytes()[i * CHUNK : (i + 1) * CHUNK]
        assert not pread(tmp_path / "slot-000.pcc", place & 0xFFFF_FFFF, CHUNK).strip(b"\0")
    medium.close()
    volume.close()


def test_d13_a_size_that_cannot_be_is_refused_with_numbers(tmp_path):
    """D13: the region had a fixed size that nobody checked. Here the disk is asked, for all slots, before anything."""
    huge = np.broadcast_to(np.zeros(1, np.uint8), (1 << 46,))  # 64 TiB that take one byte of memory
    with pccheck.Checkpointer(tmp_path) as ck:
        with pytest.raises((CapacityError, MemoryError)) as caught:
            ck.save(1, {"w": huge})
        assert "70,36" in str(caught.value) or isinstance(caught.value, MemoryError)
        ck.save(2, {"w": np.ones(10)}).durable.result(WAIT_S)
        assert ck.latest() == 2
