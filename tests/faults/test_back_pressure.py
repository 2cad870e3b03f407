"""Storage slower than the saves: bounded memory, waits that are counted and reported, nothing dropped unheard."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest

import pccheck
from pccheck import events
from pccheck.errors import DeadlineError, SkippedError
from pccheck.storage.directory import Directory
from pccheck.testing.throttle import Rate, ThrottledVolume
from tests.faults.helpers import CHUNK, WAIT_S, make_state, pool_of, step_of

KIB, MIB = 1 << 10, 1 << 20


def throttled(directory, bytes_per_s: float, **options):
    volume = ThrottledVolume(Directory(str(directory), create=True, write=True), total=Rate.steady(bytes_per_s))
    return pccheck.Checkpointer(volume, **{"chunk_bytes": CHUNK, **options})


def test_a_pool_of_two_chunks_carries_a_state_of_a_hundred(tmp_path):
    """The capture waits for storage; how long is counted, told in the event, and about what the storage needs."""
    heard = []
    with throttled(tmp_path, 2 * MIB, buffer_bytes=2 * CHUNK, observer=heard.append) as ck:
        ck.save(1, make_state(1, 100 * CHUNK)).durable.result(WAIT_S)
        stats = ck.stats()
        assert stats.pipeline == "portable"
        assert pool_of(ck) == (2, 2)
        assert stats.pool_wait_s > 0.05  # 100 chunks at 2 MiB/s take 0.2 s
        assert stats.fence_wait_s >= stats.pool_wait_s * 0.5
        assert step_of(ck.restore().state) == 1
    captured = next(e for e in heard if isinstance(e, events.Captured))
    assert captured.pool_wait_s > 0.05
    assert captured.seconds >= captured.pool_wait_s


def test_a_pool_of_one_state_makes_no_capture_wait(tmp_path):
    with throttled(tmp_path, 2 * MIB, buffer_bytes=101 * CHUNK, in_flight=1) as ck:
        save = ck.save(1, make_state(1, 100 * CHUNK))
        assert save.captured.done()
        assert not save.durable.done()
        save.durable.result(WAIT_S)
        assert ck.stats().pool_wait_s < 0.05


def test_saves_beyond_in_flight_wait_or_are_skipped_and_that_is_counted(tmp_path):
    """Offered more than storage takes: at most in_flight are under way, and every save has an outcome that adds up."""
    heard = []
    with throttled(tmp_path, MIB, in_flight=2, when_full="skip", observer=heard.append) as ck:
        saves = []
        for step in range(40):
            saves.append(ck.save(step, make_state(step, 8 * CHUNK)))
            with ck._flight._state:
                assert len(ck._flight._running) <= 2
            time.sleep(0.002)
        ck.wait(WAIT_S)
        stats = ck.stats()
        skipped = [s for s in saves if s.outcome == "skipped"]
        assert len(skipped) == stats.skipped > 0
        assert stats.committed + stats.superseded + stats.skipped == stats.saves == 40
        for save in skipped:
            with pytest.raises(SkippedError, match="2 checkpoints were under way"):
                save.durable.result()
        kept = [s.step for s in saves if s.outcome == "committed"]
        assert ck.latest() == max(kept)
        assert step_of(ck.restore().state) == max(kept)
    assert len([e for e in heard if isinstance(e, events.Skipped)]) == stats.skipped
    ended = [e for e in heard if isinstance(e, (events.Published, events.Superseded, events.Skipped))]
    assert len(ended) == 40


def test_blocked_saves_are_all_stored_in_the_end_and_the_wait_is_counted(tmp_path):
    with throttled(tmp_path, MIB, in_flight=2) as ck:
        for step in range(12):
            ck.save(step, make_state(step, 8 * CHUNK))
        ck.wait(WAIT_S)
        stats = ck.stats()
        assert (stats.saves, stats.skipped, stats.failed) == (12, 0, 0)
        assert stats.slot_wait_s > 0.05
        assert step_of(ck.restore().state) == 11


def test_max_block_s_bounds_the_wait(tmp_path):
    with throttled(tmp_path, 64 * KIB, in_flight=1, max_block_s=0.05) as ck:
        ck.save(0, make_state(0, 8 * CHUNK))
        blocked = ck.save(1, make_state(1, 8 * CHUNK))
        assert blocked.outcome == "skipped"
        ck.wait(WAIT_S)
        assert ck.latest() == 0


def test_what_a_wait_waits_for_is_told(tmp_path):
    """A deadline that passes names who waits for what, in the error and in repr()."""
    with throttled(tmp_path, 128 * KIB, in_flight=2, buffer_bytes=2 * CHUNK, snapshot="lazy") as ck:
        ck.save(7, make_state(7, 8 * CHUNK))
        with pytest.raises(DeadlineError) as caught:
            ck.wait(0.01)
        assert "1 of 2 in flight [7]" in str(caught.value)
        assert "buffers free" in repr(ck)
        with pytest.raises(DeadlineError, match="capture"):
            ck.fence(0.01)
        ck.wait(WAIT_S)
        assert ck.latest() == 7


def test_a_save_that_storage_cannot_take_in_time_fails_and_gives_everything_back(tmp_path):
    """`write_timeout_s`: storage that hangs fails the save, with a deadline error; the next works when it recovers."""
    volume = ThrottledVolume(
        Directory(str(tmp_path), create=True, write=True), total=Rate(((256 * KIB, 1.0), (64 * MIB, 1e6)))
    )
    with pccheck.Checkpointer(volume, chunk_bytes=CHUNK, in_flight=2, write_timeout_s=0.3) as ck:
        slow = ck.save(1, make_state(1, 60 * CHUNK))
        assert isinstance(slow.durable.exception(WAIT_S), DeadlineError)
        assert slow.outcome == "failed"
        with pytest.raises(DeadlineError):
            ck.wait(WAIT_S)
        deadline = time.monotonic() + WAIT_S
        while pool_of(ck)[0] != pool_of(ck)[1]:
            assert time.monotonic() < deadline, repr(ck)
            time.sleep(0.01)
        time.sleep(1.0)
        for step in (2, 3, 4):
            ck.save(step, make_state(step, 60 * CHUNK)).durable.result(WAIT_S)
        assert step_of(ck.restore().state) == 4


def test_the_trainer_is_not_held_up_by_storage_in_lazy_mode(tmp_path):
    """Lazy: the call returns while not a chunk is written; the fence is what waits, for captures only."""
    with throttled(tmp_path, MIB, in_flight=2, buffer_bytes=64 * CHUNK, snapshot="lazy") as ck:
        ck.save(0, {"x": 1}).durable.result(WAIT_S)
        state = make_state(1, 32 * CHUNK)
        save = ck.save(1, state)
        assert not save.durable.done()
        ck.fence(WAIT_S)
        assert not save.durable.done(), "the pool holds all of it: the fence does not wait for storage"
        save.durable.result(WAIT_S)


def test_many_threads_may_save_at_once(tmp_path):
    """Eight threads save into two places on slow storage: every save ends, counters are unique, the newest counts."""
    with throttled(tmp_path, 4 * MIB, in_flight=2) as ck:
        saves, lock = [], threading.Lock()

        def work(number: int) -> None:
            for k in range(5):
                step = 100 * number + k
                save = ck.save(step, make_state(step))
                with lock:
                    saves.append(save)

        threads = [threading.Thread(target=work, args=(n,)) for n in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(WAIT_S)
        ck.wait(WAIT_S)
        assert len({s.counter for s in saves}) == 40
        assert all(s.outcome in ("committed", "superseded") for s in saves)
        newest = max(saves, key=lambda s: s.counter)
        restored = ck.restore()
        assert (restored.counter, step_of(restored.state)) == (newest.counter, newest.step)


def test_storage_whose_rate_changes(tmp_path):
    """Slow and fast in turn: all saves end well, whichever phase they fall into."""
    rate = Rate(((512 * KIB, 0.05), (32 * MIB, 0.05)))
    volume = ThrottledVolume(Directory(str(tmp_path), create=True, write=True), total=rate, stream_bytes_per_s=8 * MIB)
    with pccheck.Checkpointer(volume, chunk_bytes=CHUNK, in_flight=3, buffer_bytes=4 * CHUNK) as ck:
        for step in range(15):
            array = np.full(4 * CHUNK, step, np.uint8)
            ck.save(step, {"w": array})
            array.fill(255)
        ck.wait(WAIT_S)
        assert (ck.restore().state["w"] == 14).all()
        assert pool_of(ck) == (4, 4)
