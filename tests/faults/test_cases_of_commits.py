"""Public bug reports of other libraries, each as a test of its whole kind: commits, and errors that get lost."""

from __future__ import annotations

import os
import time

import pytest

import pccheck
from pccheck.audit import audit, exit_code
from pccheck.errors import MediumError
from pccheck.testing.faults import FOREVER, Fault, Script
from tests.faults.helpers import (
    CHUNK,
    ROOT,
    WAIT_S,
    Gate,
    faulty,
    make_state,
    records,
    run_python,
    step_of,
)

# -- B. kills, commit, pointer files ----------------------------------------------------------------------------------


def damage_in_turn(store):
    """Give each way to lose or cut each file of the newest checkpoint: name, function of the folder."""
    newest = max((r.counter, f.name) for f, r in records(store).items())[1]
    yield "slot deleted", lambda d: (d / newest).unlink()
    for left in (0, 1, 511, 512, 4096, 65536, 65537, 70_000):
        yield f"slot cut to {left}", lambda d, left=left: os.truncate(d / newest, left)
    for left in (None, 0, 1, 4096):

        def cut(d, left=left):
            (d / "CHECK").unlink() if left is None else os.truncate(d / "CHECK", left)

        yield f"CHECK cut to {left}", cut


@pytest.mark.filterwarnings("ignore:.*which CHECK names")
def test_case_9_an_incomplete_newest_checkpoint_is_passed_over(tmp_path):
    """Case 9: each file of the newest is lost or cut in turn: the one before comes back, and what was skipped."""
    import shutil

    good = tmp_path / "good"
    with pccheck.Checkpointer(good, keep=2, in_flight=1, chunk_bytes=CHUNK) as ck:
        for step in (1, 2):
            ck.save(step, make_state(step)).durable.result(WAIT_S)
    for number, (name, damage) in enumerate(damage_in_turn(good)):
        store = tmp_path / str(number)
        shutil.copytree(good, store)
        damage(store)
        about_slot = name.startswith("slot")
        with pccheck.open(store) as view:
            assert step_of(view.restore().state) == (1 if about_slot else 2), name
        rebuilt = pytest.warns(RuntimeWarning, match="rebuilt") if not about_slot else _nothing()
        with rebuilt:
            ck = pccheck.Checkpointer(store, keep=2, in_flight=1, chunk_bytes=CHUNK)
        with ck:
            restored = ck.restore()
            assert step_of(restored.state) == (1 if about_slot else 2), name
            if about_slot and "cut" in name and not name.endswith((" 0", " 1", " 511")):
                assert restored.skipped, name
                assert "slot-" in str(restored.skipped[0])
            for step in (3, 4):
                assert ck.save(step, make_state(step)).durable.result(WAIT_S) == step
            assert ck.steps() == [3, 4]
        assert exit_code(audit(store, verify=True)) == 0, name


class _nothing:
    def __enter__(self):
        return self

    def __exit__(self, *_):
        return None


@pytest.mark.parametrize("operation", ["write", "sync", "check_sync"])
def test_case_10_the_books_are_what_the_disk_is(tmp_path, operation):
    """Case 10: a step whose commit failed is in no list; lower and equal steps are saved, each with an outcome."""
    script = Script()
    with faulty(tmp_path, script, keep=2) as ck:
        ck.save(10, make_state(10)).durable.result(WAIT_S)
        script.arm(Fault(operation, {"write": 5, "sync": 3, "check_sync": 1}[operation], times=FOREVER))
        failed = ck.save(20, make_state(20))
        assert failed.durable.exception(WAIT_S) is not None
        script.arm()
        assert (failed.outcome, ck.latest(), ck.steps()) == ("failed", 10, [10])
        with pytest.raises(MediumError):
            ck.wait(WAIT_S)
        lower = ck.save(18, make_state(18))
        assert lower.durable.result(WAIT_S) == 18
        assert (lower.outcome, ck.latest()) == ("committed", 18)
        again = ck.save(20, make_state(20))
        assert again.durable.result(WAIT_S) == 20
        assert (again.outcome, ck.latest()) == ("committed", 20)
        assert step_of(ck.restore(20).state) == 20


def test_case_13_leftovers_of_a_dead_save_are_no_obstacle(tmp_path):
    """Case 13: killed during the save of step 7; the restarted job reaches 7 and saves it, without any clean-up."""
    for point in ("filling", "captured", "written", "sealed", "published"):
        store = tmp_path / point
        done = run_python(
            """
            import os, signal, sys
            from tests.faults.helpers import make_state
            import pccheck
            def at(point):
                if point == sys.argv[2] and armed:
                    os.kill(os.getpid(), signal.SIGKILL)
            armed = []
            ck = pccheck.Checkpointer(sys.argv[1], chunk_bytes=4096, in_flight=1, _at=at)
            ck.save(6, make_state(6)).durable.result(60)
            armed.append(True)
            ck.save(7, make_state(7)).durable.result(60)
            """,
            store, point, cwd=ROOT,
        )  # fmt: skip
        assert done.returncode == -9, done.stderr
        with pccheck.Checkpointer(store, chunk_bytes=CHUNK, in_flight=1) as ck:
            assert ck.restore().step in (6, 7)
            assert ck.save(7, make_state(7)).durable.result(WAIT_S) == 7
            assert ck.steps() == [7]
        assert sorted(p.name for p in store.iterdir()) == ["CHECK", "runs.json", "slot-000.pcc", "slot-001.pcc"]


# -- D. errors that get lost ------------------------------------------------------------------------------------------


def test_case_20_a_background_failure_is_told_of_once_and_harms_no_other_save(tmp_path):
    """Case 20: save 1 fails; save 2 tells of it, once, and is itself durable."""
    script = Script()
    with faulty(tmp_path, script) as ck:
        ck.save(0, make_state(0)).durable.result(WAIT_S)
        script.arm(Fault("write", 3, errno=28))
        first = ck.save(1, make_state(1))
        error = first.durable.exception(WAIT_S)
        with pytest.raises(MediumError) as caught:
            ck.save(2, make_state(2))
        assert caught.value is error
        ck.wait(WAIT_S)
        ck.raise_errors()
        assert ck.latest() == 2
        assert step_of(ck.restore().state) == 2


def test_case_20_a_save_does_not_raise_its_own_failure(tmp_path):
    """Case 20: however quickly it fails, its caller gets the Save, and the next call tells of it."""
    script = Script()
    with faulty(tmp_path, script) as ck:
        await_snapshot = ck._flight.await_snapshot

        def slowly(save, launched):
            await_snapshot(save, launched)
            save.durable.exception(WAIT_S)

        ck._flight.await_snapshot = slowly
        script.arm(Fault("sync", 1))
        failed = ck.save(1, make_state(1))
        assert failed.outcome == "failed"
        with pytest.raises(MediumError) as caught:
            ck.save(2, make_state(2))
        assert caught.value is failed.durable.exception()
        ck.wait(WAIT_S)
        assert ck.steps() == [2]


def test_case_20_several_failures_are_told_of_one_by_one(tmp_path):
    script, gate = Script(), Gate()
    with faulty(tmp_path, script, in_flight=3, writers=1, _at=gate) as ck:
        ck.save(0, make_state(0)).durable.result(WAIT_S)
        for nth in (2, 3, 4):
            gate.hold("captured", nth)
        script.arm(Fault("sync", 4, times=3))  # three records "filling" are synced, then the data of each fails
        saves = [ck.save(step, make_state(step)) for step in (1, 2, 3)]
        for nth in (2, 3, 4):
            gate.reached("captured", nth)
        while script.count("sync") < 3:
            time.sleep(0.001)
        for nth in (2, 3, 4):
            gate.let_go("captured", nth)
        errors = [save.durable.exception(WAIT_S) for save in saves]
        heard = []
        for _ in range(3):
            with pytest.raises(MediumError) as caught:
                ck.wait(WAIT_S)
            heard.append(caught.value)
        ck.wait(WAIT_S)
        assert {id(e) for e in heard} == {id(e) for e in errors}
        assert ck.latest() == 0


def test_case_22_the_failure_of_the_last_save_is_raised_by_the_with_block(tmp_path):
    """Case 22: the run does not look successful; of several failures none is lost."""
    script, gate = Script(), Gate()
    with pytest.raises(MediumError) as caught, faulty(tmp_path, script, in_flight=2, _at=gate) as ck:
        ck.save(0, make_state(0)).durable.result(WAIT_S)
        for nth in (2, 3):
            gate.hold("written", nth)
        saves = [ck.save(1, make_state(1)), ck.save(2, make_state(2))]
        for nth in (2, 3):
            gate.reached("written", nth)
        script.arm(Fault("sync", times=FOREVER))
        for nth in (2, 3):
            gate.let_go("written", nth)
    errors = [save.durable.exception(WAIT_S) for save in saves]
    assert caught.value in errors
    told = str(caught.value) + "".join(getattr(caught.value, "__notes__", []))
    assert all(str(e) in told for e in errors)
    with pccheck.open(tmp_path) as view:
        assert step_of(view.restore().state) == 0


EXIT = """
import sys, time
import numpy as np
import pccheck
from pccheck.storage.directory import Directory
from pccheck.testing.faults import Fault, FaultyVolume, Script
from pccheck.testing.throttle import Rate, ThrottledVolume
from tests.faults.helpers import make_state

volume = Directory(sys.argv[1], create=True, write=True)
script = Script()
if sys.argv[2] == "slow":
    volume = ThrottledVolume(volume, total=Rate.steady(float(sys.argv[3])))
else:
    volume = FaultyVolume(volume, script)
ck = pccheck.Checkpointer(volume, chunk_bytes=65536, in_flight=2, snapshot="lazy", **eval(sys.argv[4]))
if sys.argv[2] != "slow":
    script.arm(Fault("sync", 2))
state = make_state(1, 1 << 20)
save = ck.save(1, state)
if sys.argv[2] == "slow":
    assert not save.durable.done()
print("main is over")
"""


def test_case_22_a_pending_save_is_drained_at_interpreter_exit(tmp_path):
    """Case 22: the program just ends, without close, with a save under way: it becomes durable."""
    done = run_python(EXIT, tmp_path, "slow", 2 << 20, "{}", cwd=ROOT)
    assert (done.returncode, done.stdout, done.stderr) == (0, "main is over\n", "")
    with pccheck.open(tmp_path) as view:
        assert step_of(view.restore().state) == 1
    with pccheck.Checkpointer(tmp_path, lock_timeout_s=0) as ck:
        assert ck.latest() == 1


def test_case_22_a_failed_save_is_told_of_at_interpreter_exit(tmp_path):
    """Case 22: the last save fails and nobody asks: standard error says so."""
    done = run_python(EXIT, tmp_path, "faulty", 0, "{}", cwd=ROOT)
    assert done.stdout == "main is over\n"
    assert "MediumError" in done.stderr
    assert "sync failed" in done.stderr
    warned = run_python(EXIT, tmp_path / "w", "faulty", 0, "{'on_error': 'warn'}", cwd=ROOT)
    assert "sync failed" in warned.stderr


def test_case_22_exit_waits_no_longer_than_it_was_told(tmp_path):
    """Case 22: storage that hangs cannot keep the process from ending; standard error tells what was lost."""
    began = time.monotonic()
    done = run_python(EXIT, tmp_path, "slow", 1 << 10, "{'exit_timeout_s': 0.2}", cwd=ROOT, timeout_s=60)
    assert time.monotonic() - began < 55
    assert done.stdout == "main is over\n"
    assert "DeadlineError" in done.stderr
    with pccheck.open(tmp_path) as view:
        assert view.restore() is None
    with pccheck.Checkpointer(tmp_path, chunk_bytes=CHUNK, lock_timeout_s=0) as ck:
        assert ck.save(2, make_state(2)).durable.result(WAIT_S) == 2


@pytest.mark.parametrize("way", ["sys.exit(3)", "raise ValueError('of the trainer')"])
def test_case_22_other_ways_to_end_keep_their_status(tmp_path, way):
    done = run_python(EXIT + way, tmp_path, "slow", 4 << 20, "{}", cwd=ROOT)
    assert done.returncode == (3 if "exit" in way else 1)
    with pccheck.open(tmp_path) as view:
        assert step_of(view.restore().state) == 1
