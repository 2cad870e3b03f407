"""What a probe measured: JSON in and out, what of it is believed, the models fitted to it, and predictions."""

from __future__ import annotations

import json
import math

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pccheck.errors import FormatError, OptionError, UsageError
from pccheck.tuning.machine import MAX_JSON_BYTES, Machine, Sample
from pccheck.tuning.prediction import predict

MIB = 1 << 20
GB = 10**9


def sample(state_bytes: int, in_flight: int, durable_s: float, **more) -> Sample:
    options = {"writers": 2, "writers_per_checkpoint": None, "chunk_bytes": 16 * MIB, "buffer_bytes": 32 * MIB}
    options |= {"saves": 5, "worst_durable_s": durable_s, "period_s": durable_s / in_flight} | more
    return Sample(state_bytes=state_bytes, in_flight=in_flight, durable_s=durable_s, **options)


def machine(*samples: Sample, **more) -> Machine:
    facts = {
        "path": "/data", "filesystem": "ext4, direct", "time_s": 1.7e9, "pccheck": "0.1.0", "pipeline": "native",
        "cpus": 8, "memory_bytes": 64 * GB, "free_bytes": 500 * GB, "seconds": 30.0, "copy_bytes_per_s": 10.0 * GB,
        "commit_s": 0.0, "save_s": 0.0,
    }  # fmt: skip
    return Machine(samples=samples, **(facts | more))


def disk(rate: float, *, burst: int = 0, commit_s: float = 0.0) -> Machine:
    """Give what a probe finds of a disk that one stream fills, and that takes the first bytes after a rest at once."""
    sizes = (64 * 1024, GB // 4, GB)
    rested = [sample(m, 1, commit_s + max(0, m - burst) / rate or 1e-6, pause_s=0.5) for m in sizes]
    busy = [sample(GB, n, commit_s + n * GB / rate) for n in (1, 2, 3)]
    return machine(*rested, *busy, commit_s=commit_s)


def network(stream: float, total: float) -> Machine:
    """Give what a probe finds of storage that limits each stream below its total."""
    each = [sample(GB, n, max(GB / stream, n * GB / total), writers=n, writers_per_checkpoint=1) for n in (1, 2, 3, 4)]
    usual = [sample(GB, n, n * GB / stream) for n in (1, 2, 3, 4)]  # the oldest first: one stream after the other
    return machine(*usual, *each)


# -- JSON -------------------------------------------------------------------------------------------------------------


def test_json_round_trip():
    found = machine(
        sample(GB, 1, 0.1), sample(GB, 2, 0.2, writers=2, writers_per_checkpoint=1, pause_s=0.25),
        read_bytes_per_s=2.0 * GB, read_past_cache=True, notes=("no time for: 4 at once",), interference=0.05,
        device_copy_bytes_per_s=20.0 * GB,
    )  # fmt: skip
    assert Machine.from_json(found.to_json()) == found
    assert json.loads(found.to_json())["samples"][1]["writers_per_checkpoint"] == 1


def test_a_file_of_an_older_probe_is_read():
    facts = json.loads(machine(sample(GB, 1, 0.1), read_bytes_per_s=2.0 * GB).to_json())
    for new in ("reads", "worst_read_bytes_per_s", "fresh_memory_bytes_per_s"):
        del facts[new]
    found = Machine.from_json(json.dumps(facts).encode())
    assert (found.read_bytes_per_s, found.reads) == (2.0 * GB, 0)
    assert found.worst_read_bytes_per_s is found.fresh_memory_bytes_per_s is None


def sample_json() -> bytes:
    return msgspec.json.encode(sample(GB, 1, 0.1))


def test_a_mark_before_the_text_is_no_matter():
    found = machine(sample(GB, 1, 0.1))
    assert Machine.from_json(b"\xef\xbb\xbf" + found.to_json()) == found


def plain() -> dict:
    return json.loads(machine(sample(GB, 1, 0.1)).to_json())


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"pccheck": None}, r"pccheck"),
        ({"cpus": 0}, r"cpus"),
        ({"copy_bytes_per_s": 0}, r"copy_bytes_per_s"),
        ({"copy_bytes_per_s": "fast"}, r"copy_bytes_per_s"),
        ({"copy_bytes_per_s": 1e-300}, r"copy_bytes_per_s"),
        ({"read_bytes_per_s": 1e300}, r"read_bytes_per_s"),
        ({"samples": [{**json.loads(sample_json()), "period_s": 1e-300}]}, r"period_s"),
        ({"commit_s": -1}, r"commit_s"),
        ({"interference": 1.5}, r"interference"),
        ({"version": 2}, r"version"),
        ({"samples": []}, r"samples"),
        ({"samples": [{}]}, r"state_bytes"),
        ({"surprise": 1}, r"surprise"),
    ],
)
def test_what_is_out_of_range_is_named(change, said):
    with pytest.raises(FormatError, match=rf"{said}.*pccheck probe DIR --json FILE"):
        Machine.from_json(json.dumps(plain() | change).encode())


def test_a_missing_member_is_named():
    facts = plain()
    del facts["commit_s"]
    with pytest.raises(FormatError, match="commit_s"):
        Machine.from_json(json.dumps(facts).encode())


@pytest.mark.parametrize("data", [b"", b"{", b"[]", b"\xff\xfe", b"[" * 100_000, b" " * (MAX_JSON_BYTES + 1)])
def test_what_is_no_probe_is_refused(data):
    with pytest.raises(FormatError, match="not the JSON of a probe"):
        Machine.from_json(data)


# -- models -----------------------------------------------------------------------------------------------------------


def test_a_disk_that_one_stream_fills():
    model = disk(0.5 * GB, commit_s=0.01).model()
    assert model.stream_bytes_per_s == pytest.approx(0.5 * GB)
    assert model.saturating_in_flight == 1
    for n in (1, 2, 3):
        assert model.durable_s(3 * GB, n) == pytest.approx(0.01 + n * 6.0)


def test_two_sizes_tell_the_fixed_cost_from_the_rate():
    probed = machine(*(sample(m, 1, 0.05 + m / GB) for m in (GB, GB // 4)), commit_s=0.01)
    model = probed.model()
    assert model.stream_bytes_per_s == pytest.approx(GB)
    assert model.commit_s == pytest.approx(0.05)
    assert probed.alone_s(10 * GB) == pytest.approx(10.05)


@pytest.mark.parametrize("smaller_s", [0.05, 0.9, 1.0, 5.0])
def test_noise_in_the_smaller_of_two_sizes_is_bounded(smaller_s):
    probed = machine(sample(GB, 1, 1.0), sample(GB // 4, 1, smaller_s), commit_s=0.01)
    model = probed.model()
    assert GB / 0.99 <= model.stream_bytes_per_s * 1.000001 <= 1.26 * GB / 0.99
    assert model.durable_s(GB, 1) == pytest.approx(1.0)


def test_storage_that_limits_streams_is_told_by_samples_with_a_writer_each():
    probed = network(0.3 * GB, 1.0 * GB)
    streams, usual = probed.model(writers=4, writers_per_checkpoint=1), probed.model()
    assert streams.stream_bytes_per_s == pytest.approx(0.3 * GB)
    assert streams.total_bytes_per_s == pytest.approx(1.0 * GB)
    assert streams.saturating_in_flight == 4
    assert usual.total_bytes_per_s == pytest.approx(0.3 * GB)


def test_one_slow_spell_does_not_make_the_disk_slow():
    probed = machine(*(sample(GB, n, n * (5.0 if n == 4 else 2.0)) for n in (1, 2, 3, 4)))
    assert probed.model().total_bytes_per_s == pytest.approx(GB / 2)


def test_the_nearest_options_stand_in_for_what_was_not_measured():
    probed = machine(
        sample(GB, 1, 1.0), sample(GB, 1, 3.0, chunk_bytes=4 * MIB), sample(GB, 1, 0.5, writers=4),
        sample(GB, 2, 1.5, writers_per_checkpoint=1),
    )  # fmt: skip
    rate = {
        (writers, chunk): probed.model(writers=writers, chunk_bytes=chunk).stream_bytes_per_s
        for writers, chunk in ((2, None), (8, None), (2, 5 * MIB), (2, 64 * MIB))
    }
    assert rate == pytest.approx({(2, None): GB, (8, None): 2 * GB, (2, 5 * MIB): GB / 3, (2, 64 * MIB): GB})
    assert [s.in_flight for s in probed.of(writers_per_checkpoint=1)] == [2]
    assert all(s.writers_per_checkpoint is None for s in probed.of(writers_per_checkpoint=3))
    assert probed.model(writers_per_checkpoint=1).stream_bytes_per_s == pytest.approx(GB)  # that of one at a time


def test_a_single_checkpoint_after_a_rest_follows_what_was_measured():
    probed = disk(0.5 * GB, burst=GB // 10, commit_s=0.01)
    assert probed.alone_s(GB) == pytest.approx(0.01 + 1.8)
    assert probed.alone_s(GB // 4) == pytest.approx(0.01 + 0.3)
    assert 0.3 < probed.alone_s(GB // 2) < 1.8
    assert probed.alone_s(101 * GB) == pytest.approx(0.01 + 1.8 + 200, rel=1e-3)  # the burst is there once
    assert probed.alone_s(1) == pytest.approx(0.01, rel=1e-3)


def test_noise_makes_no_larger_checkpoint_durable_sooner():
    probed = machine(*(sample(m, 1, s, pause_s=0.1) for m, s in ((GB, 1.0), (2 * GB, 0.9), (4 * GB, 2.0))))
    times = [probed.alone_s(m) for m in range(1, 5 * GB, GB // 7)]
    assert times == sorted(times)


def test_without_a_single_checkpoint_nothing_can_be_said():
    with pytest.raises(UsageError, match="one checkpoint at a time"):
        machine(sample(GB, 2, 1.0)).model()


SAMPLES = st.builds(
    sample,
    st.integers(1, 1 << 40), st.integers(1, 16), st.floats(1e-6, 1e6),
    writers=st.integers(1, 8), writers_per_checkpoint=st.sampled_from([None, 1, 2]),
    chunk_bytes=st.sampled_from([4 * MIB, 16 * MIB]), pause_s=st.sampled_from([0.0, 0.1]),
)  # fmt: skip


@given(
    st.lists(SAMPLES, max_size=6), st.floats(0, 10), st.integers(1, 1 << 45), st.integers(1, 8), st.integers(1, 1000),
    st.floats(1e-4, 1e3), st.sampled_from(["copy", "lazy"]),
)  # fmt: skip
def test_whatever_was_measured_gives_a_prediction_that_holds_together(
    samples, commit_s, state_bytes, in_flight, interval, step_s, snapshot
):
    probed = machine(sample(GB, 1, 1.0), *samples, commit_s=commit_s)
    found = predict(
        probed, state_bytes=state_bytes, in_flight=in_flight, interval=interval, step_s=step_s, snapshot=snapshot
    )
    assert all(math.isfinite(value) and value >= 0 for value in msgspec.to_builtins(found).values())
    assert found.slowdown >= 1
    assert found.period_s == pytest.approx(interval * step_s + found.stall_s + found.slot_wait_s)
    assert found.slowdown == pytest.approx(found.period_s / (interval * step_s))
    assert found.keeps_up == (found.slot_wait_s == 0)


# -- predictions ------------------------------------------------------------------------------------------------------


def test_storage_that_keeps_up_costs_no_more_than_the_stall():
    probed = machine(*disk(0.5 * GB).samples, save_s=0.002)
    found = predict(probed, state_bytes=GB, in_flight=2, interval=100, step_s=0.1)
    assert found.keeps_up
    assert found.stall_s == pytest.approx(0.002)  # lazily, the copy is over within the next step
    assert found.slowdown == pytest.approx(1.0002)
    assert found.durable_s == pytest.approx(2.0)
    copied = predict(probed, state_bytes=GB, in_flight=2, interval=100, step_s=0.1, snapshot="copy")
    assert copied.stall_s == pytest.approx(0.102)


@pytest.mark.parametrize("in_flight", [1, 2, 3])
def test_storage_that_does_not_keep_up_sets_the_period(in_flight):
    found = predict(disk(0.5 * GB), state_bytes=GB, in_flight=in_flight, interval=10, step_s=0.1)
    assert not found.keeps_up
    assert found.slowdown == pytest.approx(2.0)  # max(1, T_w(N) / (N f t))
    assert found.durable_s == pytest.approx(2.0 * in_flight)
    assert found.slot_wait_s == pytest.approx(1.0)


@pytest.mark.parametrize(("in_flight", "slowdown"), [(1, 10 / 3), (2, 5 / 3), (3, 10 / 9), (4, 1.0)])
def test_several_streams_fill_what_one_cannot(in_flight, slowdown):
    found = predict(
        network(0.3 * GB, 1.2 * GB), state_bytes=GB, in_flight=in_flight, interval=10, step_s=0.1, writers=in_flight,
        writers_per_checkpoint=1,
    )  # fmt: skip
    assert found.slowdown == pytest.approx(slowdown, rel=0.01)
    assert found.durable_s == pytest.approx(10 / 3)


def test_what_overlaps_shares_the_storage_only_as_far_as_it_overlaps():
    probed = network(0.3 * GB, 0.45 * GB)  # two streams would take 4.44 s each
    options = {"state_bytes": GB, "in_flight": 4, "step_s": 0.1, "writers": 4, "writers_per_checkpoint": 1}
    assert predict(probed, interval=40, **options).durable_s == pytest.approx(10 / 3)
    assert predict(probed, interval=25, **options).durable_s == pytest.approx(2 / 0.45)


def test_a_small_pool_turns_writing_into_waiting():
    probed = disk(0.5 * GB)
    options = {"state_bytes": 4 * GB, "in_flight": 1, "interval": 200, "step_s": 0.1}
    assert predict(probed, **options).stall_s == pytest.approx(0.3)  # 0.4 s of copying, less a step
    assert predict(probed, buffer_bytes=GB, **options).stall_s == pytest.approx(5.9, rel=0.02)


def test_what_no_probe_knows_can_be_entered():
    slow = machine(*disk(0.5 * GB).samples, device_copy_bytes_per_s=1.0 * GB, interference=0.1)
    found = predict(slow, state_bytes=GB, in_flight=1, interval=100, step_s=0.1)
    assert found.capture_s == pytest.approx(1.0)
    assert found.stall_s == pytest.approx(0.9 + 0.1 * 2.0)


@pytest.mark.parametrize(
    "wrong", [{"state_bytes": 0}, {"in_flight": 0}, {"interval": True}, {"interval": 1.5}, {"step_s": 0.0},
              {"step_s": math.nan}, {"step_s": math.inf}]
)  # fmt: skip
def test_arguments_out_of_range_are_named(wrong):
    options = {"state_bytes": GB, "in_flight": 1, "interval": 10, "step_s": 0.1} | wrong
    with pytest.raises(OptionError, match=next(iter(wrong))):
        predict(disk(GB), **options)
