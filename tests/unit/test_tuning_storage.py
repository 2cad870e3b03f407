"""The model of storage, the pipeline of one checkpoint, and the bills."""

from __future__ import annotations

import pytest

from pccheck import tuning
from pccheck.errors import OptionError
from pccheck.tuning import Bill, StorageModel

GIB = 1 << 30


def test_time_to_durable():
    disk = StorageModel(5, 20)
    assert [disk.durable_s(100, n) for n in (1, 2, 4, 5, 8)] == [20, 20, 20, 25, 40]
    assert StorageModel(5, 20, commit_s=0.5).durable_s(100, 8) == 40.5
    assert disk.durable_s(0, 3) == 0


@pytest.mark.parametrize(("stream", "total", "fills"), [(5, 20, 4), (5, 21, 5), (3, 7, 3), (12, 12, 1), (0.5, 0.9, 2)])
def test_what_fills_the_storage(stream, total, fills):
    disk = StorageModel(stream, total)
    assert disk.saturating_in_flight == fills
    assert disk.best_in_flight(100, 16) == fills
    assert disk.best_in_flight(100, 2) == min(2, fills)
    assert disk.durable_s(100, fills) / fills == pytest.approx(100 / total)


def test_a_commit_s_gain_must_be_worth_it():
    disk = StorageModel(10, 10, commit_s=0.5)  # each more in flight shares the 0.5 s out a little further
    assert disk.best_in_flight(100, 64) == 5
    assert disk.best_in_flight(100, 64, worth=0.1) == 1
    assert disk.best_in_flight(100, 64, worth=0) == 64


def test_a_total_below_a_stream_is_refused():
    with pytest.raises(OptionError, match=r"total_bytes_per_s=5 .* no less than stream_bytes_per_s"):
        StorageModel(20, 5)


def flow(chunks, buffers, copy, write):
    """Chunk after chunk: a copy needs the copier and an empty buffer, a write the writer and a full one."""
    copied, written = [], []
    for i in range(chunks):
        begin = max(copied[-1] if copied else 0, written[i - buffers] if i >= buffers else 0)
        copied.append(begin + copy)
        written.append(max(copied[i], written[-1] if written else 0) + write)
    return copied[-1], written[-1]


@pytest.mark.parametrize("chunks", [1, 2, 3, 8, 10])
@pytest.mark.parametrize("buffers", [1, 2, 3, 4, 10, 20])
@pytest.mark.parametrize(("copy", "write"), [(10, 1), (12, 5), (3, 3), (1, 10)])
def test_the_pipeline_follows_its_recurrence(chunks, buffers, copy, write):
    found = tuning.pipeline_times(
        chunks * 100, pool_bytes=buffers * 100 + 99, chunk_bytes=100, copy_bytes_per_s=copy, write_bytes_per_s=write
    )
    assert found == pytest.approx(flow(chunks, buffers, 100 / copy, 100 / write))


def test_pipeline_vectors():
    """C = 10 chunks of 1 s to write and 0.1 s to copy: a pool of the whole state hides the disk, one below does not."""
    times = {
        k: tuning.pipeline_times(10, pool_bytes=k, chunk_bytes=1, copy_bytes_per_s=10, write_bytes_per_s=1)
        for k in (10, 4, 2, 1)
    }
    assert {k: round(v.capture_s, 9) for k, v in times.items()} == {10: 1.0, 4: 6.2, 2: 8.2, 1: 10.0}
    assert {k: round(v.persist_s, 9) for k, v in times.items()} == {10: 10.1, 4: 10.1, 2: 10.1, 1: 11.0}


def test_a_state_smaller_than_a_chunk_and_a_pool_smaller_than_one():
    found = tuning.pipeline_times(50, pool_bytes=1, chunk_bytes=100, copy_bytes_per_s=10, write_bytes_per_s=5)
    assert found == (5, 15)


def test_the_bills_of_the_paper_s_table():
    m = 3 * GIB
    assert tuning.bills(m, in_flight=2, buffer_bytes=GIB) == {
        "CheckFreq": Bill(device_bytes=m, dram_bytes=m, storage_bytes=2 * m),
        "GPM": Bill(device_bytes=m, dram_bytes=0, storage_bytes=2 * m),
        "Gemini": Bill(device_bytes=4 * GIB, dram_bytes=m, storage_bytes=0),
        "PCcheck": Bill(device_bytes=m, dram_bytes=2 * m, storage_bytes=3 * m),
    }
    mine = tuning.bills(m, in_flight=4, keep=2, pool_bytes=m)["PCcheck"]
    assert mine == Bill(device_bytes=m, dram_bytes=m, storage_bytes=6 * m)
