"""The contract of a Checkpointer, on real files."""

import multiprocessing
import os
import threading
import time
import warnings
from pathlib import Path

import numpy as np
import pytest

import pccheck
from pccheck import errors, events
from pccheck.storage.directory import Directory
from pccheck.testing.throttle import Rate, ThrottledVolume

KIB = 1024


def state(step: int, n: int = 5000) -> dict:
    return {"w": np.full(n, step, np.float64), "step": step, "nested": [(step, "x"), {"b": np.arange(3) + step}]}


def same(a: dict, b: dict) -> bool:
    return (
        np.array_equal(a["w"], b["w"])
        and a["step"] == b["step"]
        and a["nested"][0] == b["nested"][0]
        and np.array_equal(a["nested"][1]["b"], b["nested"][1]["b"])
    )


@pytest.fixture
def make(tmp_path):
    """Open Checkpointers on one directory, small chunks, and close what the test left open."""
    opened = []

    def open_(**options):
        ck = pccheck.Checkpointer(options.pop("directory", tmp_path / "s"), **{"chunk_bytes": 16 * KIB, **options})
        opened.append(ck)
        return ck

    yield open_
    for ck in opened:
        ck.close()


def slot_files(tmp_path: Path) -> list[Path]:
    return sorted((tmp_path / "s").glob("slot-*.pcc"))


class Gate:
    """Stops every commit at a named point until it is opened."""

    def __init__(self, point: str) -> None:
        self.point, self.open, self.reached = point, threading.Event(), threading.Semaphore(0)

    def __call__(self, point: str) -> None:
        if point == self.point:
            self.reached.release()
            assert self.open.wait(30)


# -- save and restore ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("snapshot", ["copy", "lazy"])
@pytest.mark.parametrize("in_flight", [1, 3])
def test_what_was_saved_is_restored(make, snapshot, in_flight):
    ck = make(snapshot=snapshot, in_flight=in_flight)
    assert ck.restore() is None
    for step in range(5):
        save = ck.save(step, state(step), metadata={"loss": 1.5, "step": step})
        assert ck.fence() >= 0
    ck.wait()
    assert save.durable.result() == 4
    assert save.captured.result() == 4
    assert save.outcome == "committed"
    assert ck.latest() == 4
    restored = ck.restore()
    assert (restored.step, restored.metadata, restored.skipped) == (4, {"loss": 1.5, "step": 4}, ())
    assert same(restored.state, state(4))
    ck.close()
    restored = make().restore()
    assert restored.step == 4
    assert same(restored.state, state(4))


def test_copy_mode_is_done_with_the_callers_memory_when_save_returns(make):
    """Case 1: the value at the time of the call is stored, whatever is assigned afterwards."""
    with make(in_flight=2) as ck:
        for step in range(6):
            live = state(step)
            ck.save(step, live)
            live["w"].fill(-1)
            live["nested"][1]["b"].fill(-1)
        ck.wait()
        assert same(ck.restore().state, state(5))


def test_counters_grow_over_refusals_skips_and_restarts(make):
    ck = make()
    first = ck.save(0, state(0))
    with pytest.raises(errors.UnsupportedLeafError):
        ck.save(1, {"bad": object()})
    second = ck.save(2, state(2))
    ck.close()
    assert second.counter > first.counter + 1
    ck = make()
    assert ck.save(3, state(3)).counter > second.counter


@pytest.mark.parametrize("step", [1.5, "3", None, True, 1 << 63, -(1 << 63) - 1])
def test_a_step_is_a_whole_number_of_64_bits(make, step):
    with pytest.raises(errors.UsageError, match="step"):
        make().save(step, state(0))


def test_a_float_tensor_is_no_step(make):
    torch = pytest.importorskip("torch")
    with pytest.raises(errors.UsageError, match=r"4\.5"):
        make().save(torch.tensor(4.5), state(0))


@pytest.mark.parametrize("directory", [None, 3, b"/x", "", "a\0b"])
def test_a_directory_is_a_path(directory):
    with pytest.raises(errors.UsageError, match="directory="):
        pccheck.Checkpointer(directory)


@pytest.mark.parametrize("argument", ["coordinator", "observer"])
def test_what_is_called_must_be_callable(make, argument):
    with pytest.raises(errors.UsageError, match=f"{argument}=3"):
        make(**{argument: 3})


@pytest.mark.parametrize("metadata", ["hello", [1], 5])
def test_metadata_is_a_dict(make, metadata):
    with pytest.raises(errors.UsageError, match="metadata"):
        make().save(1, state(1), metadata=metadata)


def test_numpy_steps_and_negative_steps_are_whole_numbers(make):
    ck = make(keep=3)
    for step in (np.int64(7), -5):
        ck.save(step, state(1))
    ck.wait()
    assert ck.steps() == [-5, 7]


def test_an_empty_state_is_a_checkpoint(make):
    with make() as ck:
        ck.save(1, {})
        ck.wait()
        assert ck.restore().state == {}


def test_a_state_that_grows_gets_larger_slots(make, tmp_path):
    """Optimizer moments appear after the first step: all slots grow, and what was saved before stays whole."""
    with make(keep=2) as ck:
        ck.save(0, state(0, 100))
        ck.wait()
        small = slot_files(tmp_path)[0].stat().st_size
        ck.save(1, state(1, 200_000))
        ck.wait()
        sizes = {f.stat().st_size for f in slot_files(tmp_path)}
        assert len(sizes) == 1
        assert min(sizes) > small + 1_500_000
        assert same(ck.restore(0, branch=False).state, state(0, 100))
        assert same(ck.restore().state, state(1, 200_000))


def test_the_first_save_makes_every_slot(make, tmp_path):
    make(in_flight=3, keep=2).save(0, state(0))
    assert len(slot_files(tmp_path)) == 5
    allocated = [f.stat().st_blocks * 512 for f in slot_files(tmp_path)]
    assert min(allocated) >= 40_000


# -- keep, pins, deletion -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("in_flight", "keep"), [(1, 1), (2, 1), (3, 2), (1, 4)])
def test_exactly_keep_checkpoints_stay_and_slots_are_bounded(make, tmp_path, in_flight, keep):
    ck = make(in_flight=in_flight, keep=keep)
    for step in range(12):
        ck.save(step, state(step))
        ck.wait()
        assert ck.steps() == list(range(max(0, step + 1 - keep), step + 1))
        assert len(slot_files(tmp_path)) == in_flight + keep


def test_a_superseded_save_is_durable_but_not_kept(make):
    gate = Gate("record-synced")
    ck = make(in_flight=2, _at=lambda point: gate(point) if threading.current_thread() is held[0] else None)
    held = [None]
    first_thread = threading.Event()

    def at(point):
        if point == "record-synced" and not first_thread.is_set():
            first_thread.set()
            assert gate.open.wait(30)

    ck._flight._at = at
    slow = ck.save(1, state(1))
    assert first_thread.wait(30)
    fast = ck.save(2, state(2))
    assert fast.durable.result(30) == 2
    assert ck.latest() == 2
    gate.open.set()
    assert slow.durable.result(30) == 1
    assert (slow.outcome, fast.outcome) == ("superseded", "committed")
    assert ck.steps() == [2]
    assert ck.restore().step == 2


def test_pins_outlive_the_slots(make, tmp_path):
    ck = make(keep=1)
    for step in range(8):
        ck.save(step, state(step))
        ck.wait()
        if step in (2, 5):
            ck.pin(step)
            ck.pin(step)  # twice is once
    assert ck.steps() == [2, 5, 7]
    assert len(slot_files(tmp_path)) == 3
    assert sorted(f.name.split("-")[0] for f in (tmp_path / "s/kept").iterdir()) == ["2", "5"]
    assert same(ck.restore(2, branch=False).state, state(2))
    ck.close()
    ck = make()
    assert ck.restore().step == 7
    assert ck.steps() == [2, 5, 7]
    ck.unpin(2)
    ck.delete(5)
    assert ck.steps() == [7]
    for call in (ck.unpin, ck.delete, ck.pin):
        with pytest.raises(errors.StepNotFoundError, match="5"):
            call(5)


def test_unpinning_what_is_still_in_a_slot_leaves_it_to_keep(make, tmp_path):
    ck = make()
    ck.save(1, state(1))
    ck.wait()
    ck.pin(1)
    ck.unpin(1)
    assert ck.steps() == [1]
    ck.save(2, state(2))
    ck.wait()
    assert ck.steps() == [2]
    assert not list((tmp_path / "s/kept").iterdir())


def test_keep_every_pins_by_itself(make):
    ck = make(keep_every=3)
    for step in range(8):
        ck.save(step, state(step))
    ck.wait()
    assert {0, 3, 6, 7} <= set(ck.steps()) <= {0, 3, 5, 6, 7}
    assert same(ck.restore(3, branch=False).state, state(3))


def test_deleting_the_newest_moves_the_word_first(make):
    ck = make(keep=2)
    for step in (1, 2):
        ck.save(step, state(step))
        ck.wait()
    ck.delete(2)
    assert (ck.steps(), ck.latest()) == ([1], 1)
    ck.close()
    ck = make(keep=2)
    assert ck.restore().step == 1
    ck.delete(1)
    assert ck.steps() == []
    assert ck.restore() is None
    ck.save(3, state(3))
    ck.wait()
    assert ck.restore().step == 3


def test_the_same_step_may_be_saved_again(make):
    ck = make(keep=2)
    ck.save(1, state(1))
    ck.wait()
    ck.save(1, state(9))
    ck.wait()
    assert same(ck.restore(1).state, state(9))
    assert ck.steps() == [1]


# -- branches -------------------------------------------------------------------------------------------------------


def test_a_roll_back_abandons_what_is_newer(make):
    ck = make(keep=3)
    for step in (10, 20, 30):
        ck.save(step, state(step))
        ck.wait()
    assert ck.restore(10, branch=False).step == 10
    assert ck.steps() == [10, 20, 30]
    assert same(ck.restore(10).state, state(10))
    assert (ck.steps(), ck.latest()) == ([10], 10)
    ck.close()
    ck = make(keep=3)  # durably so
    assert ck.steps() == [10]
    assert ck.restore().step == 10
    ck.save(15, state(15))
    ck.wait()
    assert ck.steps() == [10, 15]


def test_a_roll_back_to_a_pinned_checkpoint(make):
    ck = make(keep=1)
    for step in range(5):
        ck.save(step, state(step))
        ck.wait()
        if step == 1:
            ck.pin(1)
    assert same(ck.restore(1).state, state(1))
    assert ck.steps() == [1]
    ck.close()
    ck = make(keep=1)
    assert ck.restore().step == 1
    for step in range(2, 6):
        ck.save(step, state(-step))
    ck.wait()
    assert ck.latest() == 5
    assert same(ck.restore().state, state(-5))


def test_a_step_that_is_not_there(make):
    ck = make()
    with pytest.raises(errors.StepNotFoundError):
        ck.restore(5)
    ck.save(1, state(1))
    ck.wait()
    with pytest.raises(errors.StepNotFoundError, match=r"\[1\]") as caught:
        ck.restore(5)
    assert caught.value.available == (1,)


# -- damage -----------------------------------------------------------------------------------------------------------


def flip(path: Path, offset: int) -> None:
    with path.open("r+b") as f:
        f.seek(offset)
        byte = f.read(1)[0]
        f.seek(offset)
        f.write(bytes([byte ^ 0x40]))


def slot_of(tmp_path: Path, step: int) -> Path:
    from pccheck import format

    for file in slot_files(tmp_path):
        record = format.unpack_record(file.read_bytes()[:512])
        if record and record.state == format.SlotState.SEALED and record.step == step:
            return file
    raise AssertionError(f"no slot holds step {step}")


@pytest.mark.parametrize("where", ["payload", "record", "manifest"])
def test_restore_falls_back_past_damage_and_says_so(make, tmp_path, where):
    """Cases 9 and 24: one flipped byte anywhere costs that one checkpoint, and is named."""
    from pccheck import format

    ck = make(keep=2)
    for step in (1, 2):
        ck.save(step, state(step))
        ck.wait()
    ck.close()
    victim = slot_of(tmp_path, 2)
    record = format.unpack_record(victim.read_bytes()[:512])
    flip(victim, {"payload": 65536 + 100, "record": 200, "manifest": record.manifest_offset + 10}[where])
    ck = make(keep=2)
    if where != "record":
        with pytest.raises(errors.ContentError):
            ck.restore(fallback=False)
    restored = ck.restore()
    assert restored.step == 1
    assert same(restored.state, state(1))
    assert victim.name in restored.skipped[0].name
    for step in (3, 4, 5):  # what was passed over goes first, what was restored stays until it is superseded
        ck.save(step, state(step))
        ck.wait()
    assert ck.steps() == [4, 5]


def test_records_of_which_none_verifies_are_an_error(make, tmp_path):
    """Otherwise a job would start from scratch and overwrite them."""
    ck = make()
    ck.save(1, state(1))
    ck.close()
    flip(slot_of(tmp_path, 1), 65536)
    ck = make()
    with pytest.raises(errors.NoValidCheckpointError, match="slot-"):
        ck.restore()


def test_a_reason_says_nothing_to_do_about_what_was_passed_over(make, tmp_path):
    ck = make(keep=2)
    for step in (1, 2):
        ck.save(step, state(step))
    ck.close()
    flip(slot_of(tmp_path, 2), 65536)
    (skipped,) = make(keep=2).restore().skipped
    assert "is damaged" in skipped.reason
    assert "PATH" not in skipped.reason + str(skipped)


def test_a_lost_check_is_rebuilt_from_the_records(make, tmp_path):
    ck = make(keep=2)
    for step in (1, 2):
        ck.save(step, state(step))
    ck.close()
    for damage in (lambda p: p.unlink(), lambda p: p.write_bytes(b"x" * 65536), lambda p: p.write_bytes(b"")):
        damage(tmp_path / "s/CHECK")
        with pytest.warns(RuntimeWarning, match="rebuilt"):
            ck = make(keep=2)
        assert ck.restore().step == 2
        ck.close()
    assert make().restore().step == 2


def test_without_a_restore_the_newest_is_verified_before_anything_is_overwritten(make, tmp_path):
    """A damaged newest checkpoint must not stand in for the older one that is whole."""
    ck = make(keep=2, in_flight=1)
    for step in (1, 2, 3):
        ck.save(step, state(step))
        ck.wait()
    ck.close()
    flip(slot_of(tmp_path, 3), 65536)
    grew = []
    ck = make(keep=1, in_flight=1, observer=lambda e: grew.append(e) if isinstance(e, events.Grew) else None)
    gate = Gate("data-synced")
    ck._flight._at = gate
    ck.save(4, state(4))
    assert gate.reached.acquire(timeout=30)
    assert same(pccheck.open(tmp_path / "s").restore().state, state(2))
    gate.open.set()
    ck.wait()
    assert ck.latest() == 4


# -- back-pressure ----------------------------------------------------------------------------------------------------


def test_when_full_skips_or_blocks(make):
    gate = Gate("written")
    ck = make(in_flight=2, _at=gate)
    running = [ck.save(s, state(s)) for s in (1, 2)]
    skipped = ck.save(3, state(3), when_full="skip")
    assert skipped.outcome == "skipped"
    with pytest.raises(errors.SkippedError, match="2 checkpoints"):
        skipped.durable.result()
    assert "2 of 2 in flight [1, 2]" in repr(ck)
    ck2 = threading.Thread(target=lambda: running.append(ck.save(4, state(4))))
    ck2.start()
    assert len(running) == 2
    gate.open.set()
    ck2.join(30)
    ck.wait()
    assert [s.outcome for s in running][-1] == "committed"
    stats = ck.stats()
    assert (stats.saves, stats.skipped, stats.failed) == (4, 1, 0)
    assert stats.committed + stats.superseded == 3
    assert stats.slot_wait_s > 0


def test_max_block_s_skips_in_the_end(make):
    gate = Gate("written")
    ck = make(in_flight=1, max_block_s=0.05, _at=gate)
    ck.save(1, state(1))
    assert ck.save(2, state(2)).outcome == "skipped"
    gate.open.set()


def test_a_close_that_was_interrupted_can_be_called_again(make, monkeypatch):
    """Ctrl-C in a notebook while close() waits: nothing is closed by halves, and the store is not locked for ever."""
    gate = Gate("written")
    ck = make(in_flight=1, _at=gate)
    ck.save(1, state(1))
    assert gate.reached.acquire(timeout=30)
    drain = ck._flight.drain

    def interrupted(*args, **kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr(ck._flight, "drain", interrupted)
    with pytest.raises(KeyboardInterrupt):
        ck.close()
    monkeypatch.setattr(ck._flight, "drain", drain)
    assert "1 of 1 in flight" in repr(ck)
    gate.open.set()
    ck.close()
    assert make().restore().step == 1


def test_waits_have_deadlines(make):
    gate = Gate("written")
    ck = make(in_flight=1, _at=gate)
    ck.save(1, state(1))
    with pytest.raises(errors.DeadlineError, match="1 of 1 in flight"):
        ck.wait(0.05)
    gate.open.set()
    ck.wait(30)


# -- events -----------------------------------------------------------------------------------------------------------


def test_an_observer_hears_the_life_of_a_save_in_order(make):
    heard = []
    with make(observer=heard.append) as ck:
        ck.save(1, state(1))
    kinds = [type(e) for e in heard if not isinstance(e, events.Returned)]
    assert kinds == [events.Captured, events.Persisted, events.Sealed, events.Published]
    [returned] = [e for e in heard if isinstance(e, events.Returned)]
    assert 0 <= returned.copy_wait_s + returned.slot_wait_s <= returned.seconds == ck.stats().save_s
    assert {e.step for e in heard} == {1}


def test_one_more_observer_hears_what_comes_between_subscribe_and_unsubscribe(make):
    first, second = [], []
    with make(observer=first.append) as ck:
        ck.save(1, state(1)).durable.result(60)
        ck.subscribe(second.append)
        ck.save(2, state(2)).durable.result(60)
        while not any(isinstance(e, events.Published) and e.step == 2 for e in second):
            time.sleep(0.001)
        ck.unsubscribe(second.append)
        ck.save(3, state(3))
    assert {e.step for e in first} == {1, 2, 3}
    heard = {e.step for e in second}  # of step 1 what came after it was durable, perhaps
    assert heard | {1} == {1, 2}


def test_an_observer_that_raises_or_hangs_delays_nothing(make):
    release = threading.Event()

    def observer(event):
        release.wait(30)
        raise RuntimeError("observer's own fault")

    with warnings.catch_warnings(record=True):
        warnings.simplefilter("always")
        ck = make(observer=observer)
        ck.save(1, state(1))
        ck.wait(30)
        assert ck.latest() == 1
        release.set()
        ck.close()


# -- the end ----------------------------------------------------------------------------------------------------------


def test_after_close_every_call_is_an_error(make):
    ck = make()
    ck.save(1, state(1))
    ck.close()
    ck.close()
    assert "closed" in repr(ck)
    for call in (ck.wait, ck.fence, ck.steps, ck.latest, ck.restore, ck.raise_errors, lambda: ck.save(2, state(2))):
        with pytest.raises(errors.ClosedError):
            call()


def test_the_exception_of_the_with_block_is_the_one_to_see(make):
    with pytest.raises(ZeroDivisionError), make() as ck:
        ck.save(1, state(1))
        raise ZeroDivisionError
    assert make().restore().step == 1


def _call_in_child(ck, pipe):
    answers = []
    for name in ("wait", "fence", "steps", "latest", "restore", "close", "raise_errors"):
        try:
            getattr(ck, name)()
            answers.append(name)
        except errors.ForkedError:
            pass
    pipe.send(answers)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_forked_child_may_call_nothing(make):
    ck = make()
    ck.save(1, state(1))
    here, there = multiprocessing.Pipe()
    child = multiprocessing.get_context("fork").Process(target=_call_in_child, args=(ck, there))
    child.start()
    assert here.poll(30)
    assert here.recv() == []
    child.join()
    assert child.exitcode == 0
    ck.wait()
    assert ck.latest() == 1


def test_a_second_writer_is_told_who_is_first(make, tmp_path):
    make()
    with pytest.raises(errors.StoreTaken, match=rf"pid {os.getpid()}.*this very process.*close\(\)"):
        pccheck.Checkpointer(tmp_path / "s")


def test_bad_options_name_field_value_and_range(tmp_path):
    for option in ({"in_flight": 0}, {"keep": -1}, {"chunk_bytes": 5000}, {"snapshot": "later"}, {"when_full": "x"}):
        with pytest.raises(errors.OptionError) as caught:
            pccheck.Checkpointer(tmp_path / "s", **option)
        assert caught.value.field in option
        assert caught.value.field in str(caught.value)
    assert not (tmp_path / "s").exists()


def test_a_store_whose_records_all_vanished_is_an_error_not_an_empty_one(make, tmp_path):
    """Else a job would start from scratch and overwrite what could still be looked at."""
    ck = make()
    for step in range(4):
        ck.save(step, state(step))
    ck.close()
    for file in slot_files(tmp_path):
        with file.open("r+b") as f:
            f.write(bytes(512))
    for _ in range(2):  # opening does not wipe out the last sign of it
        with pytest.warns(RuntimeWarning, match="counter 4, which CHECK names"):
            ck = make()
        with pytest.raises(errors.NoValidCheckpointError, match="CHECK_ADDR names counter 4"):
            ck.restore()
        ck.close()
    with pytest.warns(RuntimeWarning, match="counter 4, which CHECK names"):
        ck = make()
    assert ck.save(9, state(9)).counter > 4
    ck.wait()
    assert ck.restore().step == 9


@pytest.mark.parametrize("loss", ["record", "file"])
def test_a_newest_checkpoint_that_vanished_is_noticed(make, tmp_path, loss):
    """The word names what its slot does not hold: that is no crash, and neither inspect nor opening keeps silent."""
    from pccheck.audit import audit, exit_code

    ck = make(keep=2)
    for step in (1, 2):
        ck.save(step, state(step))
        ck.wait()
    ck.close()
    victim = slot_of(tmp_path, 2)
    if loss == "file":
        victim.unlink()
    else:
        with victim.open("r+b") as f:
            f.write(bytes(512))
    reports = audit(tmp_path / "s")
    assert exit_code(reports) == 1
    assert [s.name for s in reports[0].slots if s.verdict == "damaged"] == [victim.name]
    seen = pccheck.open(tmp_path / "s").restore()
    assert (seen.step, [s.name for s in seen.skipped]) == (1, [victim.name])
    with pytest.warns(RuntimeWarning, match="counter 2, which CHECK names"):
        ck = make(keep=2)
    assert ck.restore().step == 1


# -- what an adversary found -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("pinned", [False, True])
def test_going_back_to_an_abandoned_step_makes_it_count_again(make, pinned):
    """A run that goes on from it must find it after a crash, and its slot must not be given to the next save."""
    ck = make(in_flight=1, keep=1)
    for step in (5, 8):
        ck.save(step, state(step))
        ck.wait()
        if pinned and step == 8:
            ck.pin(8)
    ck.restore(5)
    if pinned:
        ck.save(6, state(6))
        ck.wait()
    assert ck.latest() == (6 if pinned else 5)
    assert same(ck.restore(8).state, state(8))
    assert ck.latest() == 8
    ck.close()
    ck = make(in_flight=1, keep=1)  # durably so
    assert ck.latest() == 8
    assert same(ck.restore().state, state(8))
    gate = Gate("data-synced")
    ck._flight._at = gate
    ck.save(9, state(9))
    assert gate.reached.acquire(timeout=30)
    with pccheck.open(ck._store.path) as view:
        assert same(view.restore().state, state(8))  # still whole while 9 is not yet durable
    gate.open.set()
    ck.wait()
    assert ck.latest() == 9


def test_a_writer_whose_check_is_gone_touches_no_slot(make, tmp_path):
    """Whoever opens the store then has another CHECK and another lock: the first writer must not write to its slots."""
    first = make()
    first.save(1, state(1))
    first.wait()
    (tmp_path / "s/CHECK").unlink()
    with pytest.warns(RuntimeWarning, match="rebuilt"):
        second = make()
    second.restore()
    second.save(100, state(100))
    second.wait()
    for step in range(2, 7):
        with pytest.raises(errors.StoreGoneError, match="open it anew"):
            first.save(step, state(step)).durable.result(30)
        with pytest.raises(errors.StoreGoneError):
            first.wait()
    assert same(second.restore().state, state(100))


def test_files_that_were_moved_away_are_not_durable_here(make, tmp_path):
    ck = make()
    ck.save(1, state(1))
    ck.wait()
    (tmp_path / "elsewhere").mkdir()
    gate = Gate("sealed")
    ck._flight._at = gate
    save = ck.save(2, state(2))
    assert gate.reached.acquire(timeout=30)
    for file in slot_files(tmp_path):
        file.rename(tmp_path / "elsewhere" / file.name)
    gate.open.set()
    with pytest.raises(errors.StoreGoneError):
        save.durable.result(30)
    with pytest.raises(errors.StoreGoneError):
        ck.wait()


def test_a_folder_that_was_renamed_takes_on_nothing_that_is_durable(make, tmp_path, monkeypatch):
    """A restart at the path would find another folder there, or none; the path counts as it was at opening."""
    monkeypatch.chdir(tmp_path)
    ck = make(directory="s")
    monkeypatch.chdir("/")
    ck.save(1, state(1)).durable.result(30)
    here, there = tmp_path / "s", tmp_path / "t"
    here.rename(there)
    for step, put in ((2, lambda: None), (3, here.mkdir)):
        put()
        with pytest.raises(errors.StoreGoneError, match=r"renamed or moved away.* open it anew"):
            ck.save(step, state(step)).durable.result(30)
        with pytest.raises(errors.StoreGoneError):
            ck.wait()
    here.rmdir()
    here.symlink_to(there)  # it leads there again: what mounts and links are for
    ck.save(4, state(4)).durable.result(30)
    ck.close()
    assert same(make().restore().state, state(4))


def test_saves_that_time_out_leave_no_slot_behind(make, tmp_path):
    """Their files are removed as soon as nobody writes to them any more."""
    slow = ThrottledVolume(Directory(tmp_path / "s", create=True, write=True), total=Rate.steady(300 * KIB))
    ck = make(directory=slow, in_flight=1, write_timeout_s=0.05)
    for step in range(1, 6):
        with pytest.raises(errors.DeadlineError):
            ck.save(step, state(step)).durable.result(30)
        with pytest.raises(errors.DeadlineError):
            ck.wait()
    deadline = time.monotonic() + 30
    while len(slot_files(tmp_path)) > 2 and time.monotonic() < deadline:
        time.sleep(0.05)
        ck._store.release()
    assert len(slot_files(tmp_path)) <= 2


def test_a_kept_file_whose_record_is_damaged_is_not_overwritten(make, tmp_path):
    ck = make(in_flight=1)
    ck.save(5, state(5))
    ck.wait()
    ck.pin(5)
    ck.close()
    kept = next((tmp_path / "s/kept").iterdir())
    flip(kept, 200)
    before = kept.read_bytes()
    ck = make(in_flight=1)
    for step in (6, 7, 8):
        ck.save(step, state(step))
        ck.wait()
    assert kept.read_bytes() == before
    ck.close()


def test_one_damaged_copy_of_the_abandoned_ranges_does_not_undo_a_roll_back(make, tmp_path):
    from pccheck import format

    ck = make(keep=3)
    for step in (1, 2, 3):
        ck.save(step, state(step))
        ck.wait()
    ck.restore(2)
    ck.close()
    for offset in format.ABANDONED_OFFSETS:
        flip(tmp_path / "s/CHECK", offset + 30)
        assert pccheck.open(tmp_path / "s").restore().step == 2
        flip(tmp_path / "s/CHECK", offset + 30)


def test_deleting_an_older_step_does_not_move_the_word_back(make):
    gate = Gate("published")
    ck = make(keep=3)
    for step in (1, 2):
        ck.save(step, state(step))
        ck.wait()
    ck._flight._at = gate
    ck.save(3, state(3))
    assert gate.reached.acquire(timeout=30)
    word = ck._store.books.check.word
    ck.delete(1)
    assert ck._store.books.check.word == word
    gate.open.set()
    ck.wait()
    assert ck.steps() == [2, 3]


def test_a_pin_does_not_trust_what_already_has_its_name(make, tmp_path):
    ck = make()
    save = ck.save(5, state(5))
    ck.wait()
    (tmp_path / "s/kept").mkdir()
    (tmp_path / f"s/kept/5-c{save.counter}.pcc").write_bytes(b"something else" * 100)
    ck.pin(5)
    for step in (6, 7, 8, 9):
        ck.save(step, state(step))
        ck.wait()
    assert same(ck.restore(5, branch=False).state, state(5))


def test_a_save_that_is_overtaken_while_it_is_pinned_keeps_its_own_bytes(make):
    """Its slot must not be given away between its record and its name under kept/ (seen: the name led to another)."""
    gate, first = Gate("record-synced"), []

    def at(point):
        if not first:
            first.append(threading.current_thread())
        if threading.current_thread() is first[0]:
            gate(point)

    ck = make(in_flight=2, keep=1, keep_every=3, _at=lambda point: point != "filling" and at(point))
    pinned = ck.save(3, state(3))
    assert gate.reached.acquire(timeout=30)
    for step in (4, 5, 7, 8):
        ck.save(step, state(step)).durable.result(30)
    gate.open.set()
    pinned.durable.result(30)
    ck.wait()
    assert same(ck.restore(3, branch=False).state, state(3))


def test_a_slot_file_that_nobody_noted_is_in_nobodys_way(make, tmp_path):
    """A Ctrl-C between making a file and noting it: later saves take another number (seen: File exists, for ever)."""
    ck = make(in_flight=1)
    ck.save(1, state(1))
    ck.wait()
    (tmp_path / "s/slot-002.pcc").write_bytes(b"")
    free = next(e.slot for e in ck._store.books.entries() if e.state.value == "free")
    reader = Directory(tmp_path / "s", create=False, write=False).open(f"slot-{free:03d}.pcc")
    assert reader.lock_shared()  # so the store must take one slot more
    assert ck.save(2, state(2)).durable.result(30) == 2
    reader.close()
    assert (tmp_path / "s/slot-003.pcc").exists()
    ck.close()
    assert make(in_flight=1).restore().step == 2
