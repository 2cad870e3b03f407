"""How a state leaves the caller's hands: guards and fences, states copied aside, and the choice among modes."""

from __future__ import annotations

import collections
import copy

import numpy as np
import pytest

import pccheck
from pccheck import events
from pccheck.errors import ChangedError, DeadlineError, UsageError
from pccheck.saving import sizing
from pccheck.saving.shadow import HostShadow
from tests.faults.helpers import CHUNK, WAIT_S, throttled

KIB, MIB = 1 << 10, 1 << 20
SLOW = 256 * KIB  # bytes per second: each chunk takes 16 ms


class ByIdentity:
    """A guard that owns arrays it was given: `owned[i]` are those of owner i."""

    def __init__(self, *owned):
        self.owned, self.asked, self.now = owned, 0, 0

    def version(self):
        return self.now

    def owners(self, kind, values):
        self.asked += 1
        return [next((i for i, mine in enumerate(self.owned) if any(v is m for m in mine)), -1) for v in values]


def filled(value, chunks=4):
    return np.full(chunks * CHUNK // 8, value, np.int64)


def slow(directory, rate=SLOW, **options):
    return throttled(directory, rate, **{"buffer_bytes": 2 * CHUNK, **options})


def assert_restores(ck, step, **expected):
    state = ck.restore(step, branch=False).state
    for name, value in expected.items():
        assert np.all(state[name] == value), f"{name} holds {set(np.unique(state[name]).tolist())}, not {value}"


# -- guards and fences ------------------------------------------------------------------------------------------------


def test_what_the_guard_owns_is_captured_later_and_the_rest_by_value(tmp_path):
    first, second, other = filled(1), filled(2), filled(3)
    with slow(tmp_path) as ck:
        ck.guarded_by(ByIdentity([first], [second]))
        save = ck.save(1, {"first": first, "other": other, "second": second})
        other[:] = -3  # nobody promised anything
        assert ck.fence(WAIT_S, owner=0) > 0
        first[:] = -1
        assert not save.captured.done(), "the second owner's array comes later, and nobody waited for it"
        assert ck.fence(WAIT_S, owner=1) > 0
        assert save.captured.result(WAIT_S) == 1
        second[:] = -2
        save.durable.result(WAIT_S)
        assert_restores(ck, 1, first=1, second=2, other=3)


def test_without_the_fence_what_the_guard_owns_is_torn(tmp_path):
    """What the test above would see if a fence did not wait."""
    mine = filled(1, chunks=10)
    with slow(tmp_path) as ck:
        ck.guarded_by(ByIdentity([mine]))
        save = ck.save(1, {"mine": mine})
        mine[:] = -1
        save.durable.result(WAIT_S)
        assert -1 in ck.restore().state["mine"]


def test_an_owner_of_nothing_waits_for_nothing(tmp_path):
    mine = filled(1)
    with slow(tmp_path, SLOW // 4) as ck:
        ck.guarded_by(ByIdentity([mine]))
        save = ck.save(1, {"mine": mine})
        ck.fence(WAIT_S, owner=7)
        assert not save.captured.done()
        with pytest.raises(DeadlineError, match="capture"):
            ck.fence(0.001, owner=0)


def test_without_a_guard_every_fence_waits_for_all(tmp_path):
    mine = filled(1)
    with slow(tmp_path, snapshot="lazy") as ck:
        save = ck.save(1, {"mine": mine})
        assert not save.captured.done()
        ck.fence(WAIT_S, owner=3)
        assert save.captured.result(WAIT_S) == 1


def test_what_nobody_owns_and_is_too_large_is_waited_for(tmp_path, monkeypatch):
    monkeypatch.setattr("pccheck.saving.snapshot.BY_VALUE_BYTES", CHUNK)
    small, large, mine = filled(1, chunks=1), filled(2, chunks=6), filled(3, chunks=6)
    with slow(tmp_path) as ck:
        ck.guarded_by(ByIdentity([mine]))
        save = ck.save(1, {"large": large, "mine": mine, "small": small})
        small[:] = large[:] = -1
        assert ck.stats().fence_wait_s > 0
        assert not save.captured.done(), "what is behind the large one is captured later, the small one was copied"
        ck.fence(WAIT_S)
        mine[:] = -1
        save.durable.result(WAIT_S)
        assert_restores(ck, 1, small=1, large=2, mine=3)


def test_the_guard_is_asked_again_only_when_its_version_changes(tmp_path):
    mine, other = filled(1), filled(2)
    guard = ByIdentity([mine])
    with pccheck.Checkpointer(tmp_path, chunk_bytes=CHUNK) as ck:
        ck.guarded_by(guard)
        for step in range(4):
            ck.save(step, {"mine": mine, "other": other})
            ck.fence(WAIT_S, owner=0)
        assert guard.asked == 1
        guard.owned, guard.now = ([other],), 1
        ck.save(9, {"mine": mine, "other": other})
        assert guard.asked == 2
        mine[:] = -1
        ck.fence(WAIT_S, owner=0)
        other[:] = -2
        ck.wait(WAIT_S)
        assert_restores(ck, 9, mine=1, other=2)


def test_a_guard_comes_and_goes(tmp_path):
    mine = filled(1)
    heard = []
    with slow(tmp_path / "a", observer=heard.append) as ck:
        guard = ByIdentity([mine])
        ck.guarded_by(guard)
        with pytest.raises(UsageError, match="already"):
            ck.guarded_by(guard)
        assert not ck.save(1, {"mine": mine}).captured.done()
        ck.fence(WAIT_S)
        ck.guarded_by(None)
        assert ck.save(2, {"mine": mine}).captured.done()
        ck.guarded_by(None)
        with pytest.raises(UsageError, match="owners"):
            ck.guarded_by("no guard")
    with pccheck.Checkpointer(tmp_path / "b", snapshot="device") as ck, pytest.raises(UsageError, match="'auto'"):
        ck.guarded_by(guard)
    picked = [(e.step, e.mode) for e in heard if isinstance(e, events.SnapshotPicked)]
    assert picked == [(1, "lazy"), (2, "copy")]


def test_a_state_that_cannot_change_waits_for_nothing(tmp_path):
    for snapshot in ("copy", "lazy", "device"):
        with slow(tmp_path / snapshot, snapshot=snapshot) as ck:
            ck.save(1, {"text": "x" * 50_000, "n": 3})
            assert ck.fence(WAIT_S) == 0
            assert ck.stats().fence_wait_s == 0


def test_an_object_may_stand_for_its_state(tmp_path):
    class Training:
        def __init__(self):
            self.asked = 0

        def __pccheck_state__(self):
            self.asked += 1
            return {"w": filled(5), "n": self.asked}

    training = Training()
    with pccheck.Checkpointer(tmp_path, chunk_bytes=CHUNK) as ck:
        ck.save(1, training)
        ck.save(2, training).durable.result(WAIT_S)
        assert training.asked == 2
        restored = ck.restore()
        assert restored.state["n"] == 2
        assert np.all(restored.state["w"] == 5)


# -- device mode, for host memory -------------------------------------------------------------------------------------


def test_device_mode_lets_go_at_once_and_the_next_save_waits_for_the_shadow(tmp_path):
    array = filled(0, chunks=12)
    with slow(tmp_path, SLOW * 4, snapshot="device", in_flight=3, keep=4) as ck:
        saves = []
        for step in range(4):
            array[:] = step
            saves.append(ck.save(step, {"w": array}))
            assert saves[-1].captured.done()
            if step == 0:
                assert not saves[0].durable.done()
                assert ck.fence(WAIT_S) == 0, "nothing of the caller's memory is read any more"
        array[:] = -1
        ck.wait(WAIT_S)
        for step in range(4):
            assert_restores(ck, step, w=step)


def test_the_shadow_is_kept_and_grows_with_the_state(tmp_path):
    with pccheck.Checkpointer(tmp_path, chunk_bytes=CHUNK, snapshot="device") as ck:
        shadow = ck._flight.snapshots._shadow
        seen = []
        for step, chunks in enumerate([4, 4, 2, 9, 9]):
            ck.save(step, {"w": filled(step, chunks)})
            seen.append(shadow._buffer)
        ck.wait(WAIT_S)
        assert seen[0] is seen[1] is seen[2]
        assert seen[3] is seen[4] is not seen[0]
        assert_restores(ck, 4, w=4)
    assert shadow._buffer is None


def test_without_room_copy_takes_the_place_of_device_and_an_event_says_so(tmp_path, monkeypatch):
    monkeypatch.setattr(sizing, "available_bytes", lambda: 4 * 4 * CHUNK - 1)
    heard = []
    array = filled(1, chunks=4)
    with slow(tmp_path, snapshot="device", observer=heard.append) as ck:
        save = ck.save(1, {"w": array})
        assert save.captured.done()
        array[:] = -1
        save.durable.result(WAIT_S)
        assert_restores(ck, 1, w=1)
        assert ck.stats().fence_wait_s > 0
        monkeypatch.setattr(sizing, "available_bytes", lambda: 4 * 4 * CHUNK)
        ck.save(2, {"w": array})
    told = [e for e in heard if isinstance(e, events.SnapshotPicked)]
    assert [e.mode for e in told] == ["copy", "device"]
    assert f"{4 * CHUNK:,} bytes" in told[0].reason


def test_a_shadow_that_is_still_read_is_waited_for_with_a_deadline():
    class Stuck:
        def wait_captured(self, timeout_s, *, chunks=None):
            return False

    shadow = HostShadow()
    shadow.used_by(Stuck())
    with pytest.raises(DeadlineError):
        shadow.ready(0.01)
    shadow.close()


# -- auto -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("guarded", [False, True])
def test_auto_tries_every_legal_mode_and_each_checkpoint_is_right(tmp_path, guarded):
    array = filled(0, chunks=3)
    heard = []
    with slow(tmp_path, 8 * MIB, snapshot="auto", in_flight=3, keep=20, observer=heard.append) as ck:
        if guarded:
            ck.guarded_by(ByIdentity([array]))
        for step in range(20):
            ck.fence(WAIT_S, owner=0)
            array[:] = step
            ck.save(step, {"w": array})
        ck.wait(WAIT_S)
        for step in range(20):
            assert_restores(ck, step, w=step)
    told = [e for e in heard if isinstance(e, events.SnapshotPicked)]
    assert {e.mode for e in told} == {"copy", "device"} | ({"lazy"} if guarded else set())
    assert collections.Counter(e.reason.split()[0] for e in told)["trial"] >= 2
    assert told[-1].reason.startswith(("stall per save: ", "trial"))


def test_auto_takes_what_makes_the_trainer_wait_least(tmp_path):
    """Storage so slow that a capture takes 100 ms, through a pool of two chunks: all but the shadow wait for it."""
    array = filled(0, chunks=6)
    heard = []
    with slow(tmp_path, SLOW, snapshot="auto", in_flight=1, when_full="block", observer=heard.append) as ck:
        for step in range(9):
            ck.save(step, {"w": array})
            ck.wait(WAIT_S)  # a long step: storage is done when the next state is saved
    modes = [e.mode for e in heard if isinstance(e, events.SnapshotPicked)]
    assert modes == ["device", "copy", "device"]


# -- watched captures -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("pipeline", ["native", "portable"])
def test_debug_names_what_changed_before_its_fence(tmp_path, pipeline):
    if pipeline == "native":
        pytest.importorskip("pccheck._native")
    first, second, other = filled(1), filled(2), filled(3)
    with pccheck.Checkpointer(tmp_path, chunk_bytes=CHUNK, pipeline=pipeline, debug_captures=True) as ck:
        ck.guarded_by(ByIdentity([first], [second]))
        state = {"a": {"first": first}, "second": second, "other": other}
        ck.save(1, state)
        first[5] += 1
        other[:] = 0
        ck.fence(WAIT_S, owner=1)
        second[:] = 0
        with pytest.raises(ChangedError) as caught:
            ck.fence(WAIT_S, owner=0)
        assert (caught.value.step, caught.value.paths) == (1, ("a/first",))
        ck.fence(WAIT_S)
        ck.save(2, state)
        ck.fence(WAIT_S)
        first[:] = second[:] = 9
        ck.save(3, state)


def test_debug_without_a_guard_watches_everything(tmp_path):
    array = filled(1)
    with pccheck.Checkpointer(tmp_path, chunk_bytes=CHUNK, snapshot="lazy", debug_captures=True) as ck:
        ck.save(1, {"w": array})
        array[7] = 0
        with pytest.raises(ChangedError, match=r"step 1 .*changed before the fence.*: w"):
            ck.save(2, {"w": array})
        ck.wait(WAIT_S)
        assert ck.latest() == 2
    with pccheck.Checkpointer(tmp_path, chunk_bytes=CHUNK, debug_captures=True) as ck:
        ck.save(3, {"w": array})  # copied: it may change at once
        array[7] = 5
        ck.save(4, {"w": copy.copy(array)})


# -- little that can change, beside much that cannot -------------------------------------------------------------------


def test_what_little_can_change_beside_what_cannot_is_copied_and_not_waited_for(tmp_path):
    counter, much = filled(1, chunks=1), filled(7, chunks=64)
    with slow(tmp_path) as ck:
        save = ck.save(1, {"much": much[::2], "counter": counter})  # of every second element there is a copy already
        counter[:] = -1
        assert save.captured.done()
        assert ck.stats().fence_wait_s == 0
        save.durable.result(WAIT_S)
        assert_restores(ck, 1, much=7, counter=1)
        ck.save(2, {"much": much[::2], "counter": filled(2, chunks=8)}).durable.result(WAIT_S)
        assert ck.stats().fence_wait_s > 0, "more than an eighth is waited for, not copied"
        assert_restores(ck, 2, much=7, counter=2)
