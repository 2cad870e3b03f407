"""How each save ended is told once: by an event, and to a training loop that never looks at what `save()` returned."""

from __future__ import annotations

import errno
import shutil
from collections import Counter

import pytest

import pccheck
from pccheck import errors, events
from tests.faults.helpers import CHUNK, WAIT_S, Gate, make_state

ENDS = (events.Published, events.Superseded, events.Skipped, events.Failed)


def opened(where, **options):
    return pccheck.Checkpointer(where, **{"chunk_bytes": CHUNK, "history": False, **options})


def lose(store, how):
    """Take a store away from who has it open: its folder is removed, or another CHECK is put there."""
    if how == "removed":
        shutil.rmtree(store)
    else:
        shutil.copy(store / "CHECK", store / "other")
        (store / "other").rename(store / "CHECK")


@pytest.mark.parametrize("how", ["removed", "replaced"])
def test_a_loop_that_looks_at_nothing_is_told_that_its_store_is_gone(tmp_path, how):
    heard, told = [], []
    ck = opened(tmp_path / "s", observer=heard.append)
    for step in range(5):
        ck.save(step, make_state(step))
    ck.wait(WAIT_S)
    lose(tmp_path / "s", how)
    for step in range(5, 55):
        try:
            ck.save(step, make_state(step))
        except errors.StoreGoneError as error:
            told.append((step, error))
    assert [step for step, _ in told] == list(range(6, 55)), "each save tells of the one before it"
    assert len({id(error) for _, error in told}) == 49, "each error is told once"
    assert ck.stats().failed == 50
    with pytest.raises(errors.StoreGoneError):
        ck.close()
    assert sorted(e.step for e in heard if isinstance(e, events.Failed)) == list(range(5, 55))


def test_what_is_only_warned_about_is_warned_about_at_the_next_save(tmp_path):
    ck = opened(tmp_path / "s", on_error="warn")
    ck.save(1, make_state(1)).durable.result(WAIT_S)
    lose(tmp_path / "s", "removed")
    assert ck.save(2, make_state(2)).outcome == "failed"
    with pytest.warns(RuntimeWarning, match="a save failed"):
        ck.save(3, make_state(3))
    with pytest.warns(RuntimeWarning, match="a save failed"):
        ck.close()


def test_who_asked_for_no_report_is_told_by_the_save_alone(tmp_path):
    with opened(tmp_path / "s") as ck:
        ck.save(1, make_state(1)).durable.result(WAIT_S)
        lose(tmp_path / "s", "removed")
        saves = [ck.save(step, make_state(step), report=False) for step in range(2, 10)]
        assert {type(save.durable.exception(WAIT_S)) for save in saves} == {errors.StoreGoneError}


def test_a_skipped_save_tells_of_an_earlier_failure_too(tmp_path):
    gate, trouble = Gate(), [errors.MediumError("write", "x", OSError(errno.EIO, "made to fail"))]

    def at(point):
        gate(point)
        if point == "sealed" and trouble:
            raise trouble.pop()

    gate.hold("written", 2)
    with opened(tmp_path / "s", in_flight=1, _at=at) as ck:
        assert ck.save(1, make_state(1)).durable.exception(WAIT_S) is not None
        ck.save(2, make_state(2), report=False)
        gate.reached("written", 2)
        with pytest.raises(errors.MediumError, match="made to fail"):
            ck.save(3, make_state(3), when_full="skip")
        assert ck.stats().skipped == 1
        gate.let_go("written", 2)


def test_each_save_that_returned_has_exactly_one_end(tmp_path, monkeypatch):
    """Over all outcomes; what failed in `save()` itself has an end but did not return, what was refused has neither."""
    gate, heard, trouble = Gate(), [], {}

    def at(point):
        gate(point)
        if point in trouble:
            raise trouble.pop(point)

    def fail(point):
        trouble[point] = errors.MediumError("write", "x", OSError(errno.EIO, "made to fail"))

    def save(step, **options):
        return ck.save(step, make_state(step), report=False, **options)

    gate.hold("written", 1)
    gate.hold("written", 3)
    ck = opened(tmp_path / "s", in_flight=2, observer=heard.append, _at=at)
    first = save(1)
    gate.reached("written", 1)
    second = save(2)
    assert second.durable.result(WAIT_S) == 2
    third = save(3)
    gate.reached("written", 3)
    saves = [first, second, third, save(4, when_full="skip")]
    gate.let_go("written", 1)
    gate.let_go("written", 3)
    ck.wait(WAIT_S)
    fail("sealed")
    saves.append(save(5))
    ck.wait(WAIT_S)
    fail("filling")
    with pytest.raises(errors.MediumError):
        save(6)
    with pytest.raises(errors.UnsupportedLeafError):
        ck.save(7, {"what": object()})
    fail("captured")
    with monkeypatch.context() as patch:
        patch.setattr(ck._store, "fail", lambda *args, **options: 1 / 0)  # a slot that cannot be taken back
        saves.append(save(8))
        ck.wait(WAIT_S)
    lose(tmp_path / "s", "removed")
    saves.append(save(9))
    ck.close()
    outcomes = ["superseded", "committed", "committed", "skipped", "failed", "failed", "failed"]
    assert [each.outcome for each in saves] == outcomes
    assert Counter(e.step for e in heard if isinstance(e, events.Returned)) == Counter([1, 2, 3, 4, 5, 8, 9])
    assert sorted((e.step, type(e).__name__) for e in heard if isinstance(e, ENDS)) == [
        (1, "Superseded"), (2, "Published"), (3, "Published"), (4, "Skipped"), (5, "Failed"), (6, "Failed"),
        (8, "Failed"), (9, "Failed"),
    ]  # fmt: skip
    assert not [e for e in heard if e.step == 7]
    stats = ck.stats()
    assert (stats.committed, stats.superseded, stats.skipped, stats.failed, stats.saves) == (2, 1, 1, 4, 8)
