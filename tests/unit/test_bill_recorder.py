"""The history beside real stores: when it is written, and that nothing about it reaches a save."""

from __future__ import annotations

import errno
import json
import os
import shutil
import threading
import time
import warnings
from contextlib import contextmanager

import numpy as np
import pytest

import pccheck
from pccheck.audit import audit, exit_code
from pccheck.bill import history, recorder, runs
from pccheck.bill.history import past_failures
from pccheck.errors import CapacityError, ForkedError, MediumError, StoreTaken
from pccheck.storage.directory import Directory
from pccheck.testing.fault_script import FOREVER, Fault, Guard, Script
from pccheck.testing.simulated import SimulatedVolume

WAIT_S = 60.0
STATE = {"w": np.arange(3000.0)}


def opened(where, **options):
    return pccheck.Checkpointer(where, **{"chunk_bytes": 4096, **options})


def save(ck, *steps):
    for step in steps:
        ck.save(step, STATE).durable.result(WAIT_S)


def noted(store):
    with reading_of(store) as volume:
        return history.look(volume).runs


@contextmanager
def reading_of(store):
    volume = Directory(store, create=False, write=False)
    try:
        yield volume
    finally:
        volume.close()


def until(condition, what):
    end = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < end, f"waited in vain for {what}"
        time.sleep(0.01)


@pytest.fixture
def quick(monkeypatch):
    monkeypatch.setattr(recorder, "EVERY_S", 0.02)


# -- what is written --------------------------------------------------------------------------------------------------


def test_a_run_is_noted_soon_after_its_first_save_and_at_its_end(tmp_path):
    with opened(tmp_path / "s", in_flight=3) as ck:
        assert not (tmp_path / "s/runs.json").exists(), "opening writes nothing: it may be for a restore only"
        save(ck, 10)
        until(lambda: (tmp_path / "s/runs.json").exists(), "the first note")
        (run,) = noted(tmp_path / "s")
        assert (run.ended, run.first_step, run.incarnation, run.rank, run.world) == (False, 10, 1, 0, 1)
        assert run.in_flight == 3
        assert history.source(str(tmp_path / "s")).states() == ["running"]
        save(ck, 20, 30)
    (run,) = noted(tmp_path / "s")
    assert (run.ended, run.last_step, run.durable_step, run.committed, run.saves) == (True, 30, 30, 3, 3)
    assert (run.progress, run.climbs, run.returned, sum(run.durable.values())) == (20, 2, 3, 3)
    assert run.written_bytes == 3 * run.state_bytes > 0
    assert run.save_s >= run.copy_wait_s >= 0
    assert [point.step for point in run.points] == [10, 20, 30]
    assert 0 < run.age_s2 <= run.uptime_s**2
    assert run.pipeline in ("native", "portable")
    assert history.source(str(tmp_path / "s")).states() == ["ended"]
    assert not [name for name in os.listdir(tmp_path / "s") if name.startswith(".")], "no half-written file stays"


def test_runs_add_up(tmp_path):
    for _ in range(3):
        with opened(tmp_path / "s", keep=2) as ck:
            restored = ck.restore()
            start = 0 if restored is None else restored.step + 1
            save(ck, start, start + 1)
    assert [(run.restored_step, run.first_step, run.last_step) for run in noted(tmp_path / "s")] == [
        (None, 0, 1), (1, 2, 3), (3, 4, 5)
    ]  # fmt: skip
    seconds, failures = past_failures(tmp_path / "s")
    assert (seconds > 0, failures) == (True, 0)


def test_a_run_that_saved_nothing_is_no_run(tmp_path):
    with opened(tmp_path / "s") as ck:
        save(ck, 1)
    before = (tmp_path / "s/runs.json").read_bytes()
    with opened(tmp_path / "s") as ck:
        assert ck.restore().step == 1
    assert (tmp_path / "s/runs.json").read_bytes() == before


def test_a_roll_back_is_the_restored_step(tmp_path):
    with opened(tmp_path / "s", keep=3) as ck:
        save(ck, 1, 2, 3)
    with opened(tmp_path / "s", keep=3) as ck:
        assert ck.restore(1, branch=False).step == 1
        assert ck.restore(2).step == 2
        save(ck, 3)
    assert noted(tmp_path / "s")[-1].restored_step == 2, "to look is not to go on from there"


def test_waits_are_told_by_cause(tmp_path):
    """One place in flight, held by a commit that is held: the next save waits for it; a fence waits for a capture."""
    go = threading.Event()
    with opened(tmp_path / "s", in_flight=1, _at=lambda point: point == "written" and go.wait(WAIT_S)) as ck:
        ck.save(1, STATE)
        threading.Timer(0.2, go.set).start()
        ck.save(2, STATE)
        ck.wait(WAIT_S)
    (run,) = noted(tmp_path / "s")
    assert run.slot_wait_s >= 0.15
    assert run.cost_s >= run.slot_wait_s
    (bill,) = pccheck.report(tmp_path / "s").runs
    assert bill.cost.slot_wait_s == run.slot_wait_s
    assert bill.cost.total_s == pytest.approx(
        bill.cost.copy_wait_s + bill.cost.slot_wait_s + bill.cost.gate_wait_s + bill.cost.other_s
    )


def test_skipped_and_failed_saves_are_counted(tmp_path):
    def at(point):
        if point == "captured":
            if fail:
                raise MediumError("write", "x", OSError(errno.EIO, "made to fail"))
            go.wait(WAIT_S)

    go, fail = threading.Event(), []
    with opened(tmp_path / "s", in_flight=1, on_error="warn", _at=at) as ck:
        ck.save(1, STATE)
        assert ck.save(2, STATE, when_full="skip").outcome == "skipped"
        go.set()
        ck.wait(WAIT_S)
        fail.append(True)
        assert ck.save(3, STATE).durable.exception(WAIT_S) is not None
        with pytest.warns(RuntimeWarning, match="a save failed"):
            ck.wait(WAIT_S)
    (run,) = noted(tmp_path / "s")
    assert (run.saves, run.committed, run.skipped, run.failed, run.durable_step) == (3, 1, 1, 1, 1)


def test_a_run_that_saves_seldom_says_that_it_lives(tmp_path, quick):
    with opened(tmp_path / "s") as ck:
        save(ck, 1)
        until(lambda: (tmp_path / "s/runs.json").exists(), "the first note")
        first = noted(tmp_path / "s")[0].uptime_s
        until(lambda: noted(tmp_path / "s")[0].uptime_s > first + 0.2, "a sign of life without a save")


def test_the_start_of_its_thread_counts_as_time_of_the_save(tmp_path, monkeypatch):
    """It was on nobody's bill: up to 20 ms where the machine was busy (seen)."""
    start = threading.Thread.start

    def slowly(thread):
        if thread.name == "pccheck-notify":
            time.sleep(0.2)
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", slowly)
    with pccheck.Checkpointer(tmp_path, chunk_bytes=64 << 10) as ck:
        ck.save(0, STATE)
        assert ck.stats().save_s >= 0.2


def test_it_can_be_switched_off(tmp_path):
    with opened(tmp_path / "s", history=False) as ck:
        save(ck, 1, 2)
    assert not (tmp_path / "s/runs.json").exists()
    found = pccheck.report(tmp_path / "s")
    assert found.runs == ()
    assert "history=False" in found.notes[0]


def test_a_volume_without_side_files_has_no_history():
    with opened(SimulatedVolume()) as ck:
        save(ck, 1, 2)
        assert ck._recorder._sides is None
    assert past_failures(SimulatedVolume()) == (0.0, 0)


# -- what nothing of it may do ----------------------------------------------------------------------------------------


def test_inspect_and_views_see_a_store_as_before(tmp_path):
    with opened(tmp_path / "s") as ck:
        save(ck, 1, 2)
    assert (tmp_path / "s/runs.json").exists()
    (report,) = audit(tmp_path / "s", verify=True)
    assert [slot.name for slot in report.slots] == ["slot-000.pcc", "slot-001.pcc", "slot-002.pcc"]
    assert exit_code([report]) == 0
    with pccheck.open(tmp_path / "s") as view:
        assert view.restore().step == 2
    (tmp_path / "s/runs.json").write_bytes(os.urandom(5000))
    assert exit_code(audit(tmp_path / "s", verify=True)) == 0


@pytest.mark.parametrize("left", [b"", bytes(4096), b'{"format":"pccheck runs","version":1,"ru'])
def test_what_a_crash_left_is_replaced(tmp_path, left):
    with opened(tmp_path / "s") as ck:
        save(ck, 1)
    (tmp_path / "s/runs.json").write_bytes(left)
    (tmp_path / "s/.runs.json.half").write_bytes(b"half")
    with opened(tmp_path / "s") as ck:
        save(ck, 2)
    assert [run.first_step for run in noted(tmp_path / "s")] == [2]
    assert not (tmp_path / "s/.runs.json.half").exists()


NEWER = b'{"format":"pccheck runs","version":7,"runs":[]}'
FOREIGN = {"newer": NEWER, "foreign": b'{"my": "runs"}', "binary": b"\x80" * 100, "huge": b"x" * (1 << 20)}
FOREIGN |= {"zeros": bytes(1 << 20), "sparse": bytes(5000) + b"mine", "large": NEWER[:36] + b"1" + bytes(1 << 20)}


@pytest.mark.parametrize("kind", [*FOREIGN, "link", "folder", "dangling"])
def test_what_is_not_ours_is_left_alone_with_one_warning(tmp_path, kind, quick):
    store = tmp_path / "s"
    store.mkdir()
    (tmp_path / "elsewhere").write_bytes(b"mine")
    if kind in FOREIGN:
        (store / "runs.json").write_bytes(FOREIGN[kind])
    elif kind == "folder":
        (store / "runs.json").mkdir()
    else:
        (store / "runs.json").symlink_to(tmp_path / ("elsewhere" if kind == "link" else "nothing"))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with opened(store) as ck:
            save(ck, *range(20))
            until(lambda: caught, "the warning")
            save(ck, *range(20, 40))
    assert len(caught) == 1
    assert "only `pccheck report` reads" in str(caught[0].message)
    assert (tmp_path / "elsewhere").read_bytes() == b"mine"
    assert not (tmp_path / "nothing").exists()
    if kind in FOREIGN:
        assert (store / "runs.json").read_bytes() == FOREIGN[kind]
    assert pccheck.report(store).runs == ()
    assert exit_code(audit(store)) == 0
    assert past_failures(store) == (0.0, 0)


class SidesThatFail:
    """A real folder whose side files fail by a script; everything else is the folder's own."""

    def __init__(self, path, script):
        self._inner, self._script, self.path = Directory(path, create=True, write=True), script, str(path)

    def __getattr__(self, name):
        return getattr(self._inner, name)

    def read_side(self, name, limit):
        Guard(self._script, "read", name).done()
        return self._inner.read_side(name, limit)

    def replace_side(self, name, data):
        guard = Guard(self._script, "create", name)
        if guard.fault is not None and guard.fault.how == "short":  # as a disk that is full in the midst
            self._inner.replace_side(name, data[: len(data) // 2])
        guard.done()
        self._inner.replace_side(name, data)


@pytest.mark.parametrize("how", ["before", "short"])
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO, errno.EROFS, errno.EDQUOT])
def test_a_history_that_cannot_be_written_costs_one_warning(tmp_path, code, how, quick, monkeypatch):
    monkeypatch.setattr(recorder, "BACK_OFF_S", 0.0)
    script = Script(Fault("create", errno=code, times=FOREVER, how=how))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with opened(SidesThatFail(tmp_path / "s", script)) as ck:
            save(ck, *range(10))
            until(lambda: script.failed >= 3, "tries to write it")
            save(ck, *range(10, 20))
            ck.raise_errors()
    assert len(caught) == 1, [str(each.message) for each in caught]
    assert ck.stats().committed == 20
    assert pccheck.report(tmp_path / "s").runs == ()


def test_it_is_written_once_that_can_be_done(tmp_path, quick, monkeypatch):
    monkeypatch.setattr(recorder, "BACK_OFF_S", 0.0)
    script = Script(Fault("create", errno=errno.ENOSPC, times=3), Fault("read", times=2))
    with pytest.warns(RuntimeWarning, match="could not be written"):  # noqa: PT031
        with opened(SidesThatFail(tmp_path / "s", script)) as ck:
            save(ck, 1, 2)
            until(lambda: script.count("create") > 3, "a try that succeeds")
    assert noted(tmp_path / "s")[0].ended


def test_an_old_history_that_cannot_be_read_now_is_not_overwritten(tmp_path, quick):
    with opened(tmp_path / "s") as ck:
        save(ck, 1)
    before = (tmp_path / "s/runs.json").read_bytes()
    with pytest.warns(RuntimeWarning):
        with opened(SidesThatFail(tmp_path / "s", Script(Fault("read", times=FOREVER)))) as ck:
            save(ck, 2)
    assert (tmp_path / "s/runs.json").read_bytes() == before


def test_warnings_that_are_errors_reach_no_save_either(tmp_path, quick):
    (tmp_path / "s").mkdir()
    (tmp_path / "s/runs.json").write_bytes(b"mine")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with opened(tmp_path / "s") as ck:
            save(ck, 1, 2)
            until(lambda: ck._recorder._sides is None, "the recorder to give up")
            heard = []
            ck.subscribe(heard.append)
            save(ck, 3)
    assert heard, "the notifier's thread is alive"


def test_a_history_that_hangs_holds_up_no_save_and_no_close(tmp_path, quick, monkeypatch):
    monkeypatch.setattr(recorder, "END_S", 0.1)
    go = threading.Event()

    class Hanging(SidesThatFail):
        def replace_side(self, name, data):
            stuck.set()
            go.wait(WAIT_S)

    stuck = threading.Event()
    try:
        with opened(Hanging(tmp_path / "s", Script())) as ck:
            save(ck, 1)
            assert stuck.wait(WAIT_S)
            save(ck, *range(2, 20))
            assert ck.restore().step == 19
            monkeypatch.setattr(ck._notifier, "close", lambda: None)  # which waits 5 s for its thread
    finally:
        go.set()
    assert not ck._life.is_open
    ck._notifier._closing = True


def test_a_writer_that_lost_its_store_writes_no_history(tmp_path, quick):
    """Where locks do not work a second writer takes the store: from then on the file is its own."""
    first = opened(tmp_path / "s")
    save(first, 1)
    until(lambda: (tmp_path / "s/runs.json").exists(), "the first note")
    first._store._volume.unlock()
    with opened(tmp_path / "s", lock_timeout_s=0) as second:
        save(second, 2)
        until(lambda: len(noted(tmp_path / "s")) == 2, "the second run's note")
        first._recorder._changed = True
        first._recorder.tick()
        assert first._recorder._sides is None
        with pytest.raises(StoreTaken):
            first.save(3, STATE).durable.result(WAIT_S)
            first.wait()
    kept = noted(tmp_path / "s")
    assert [(run.first_step, run.ended) for run in kept] == [(1, False), (2, True)]
    first.close()
    assert noted(tmp_path / "s") == kept


def test_a_store_that_is_gone_is_not_made_again(tmp_path, quick):
    ck = opened(tmp_path / "s")
    save(ck, 1)
    until(lambda: (tmp_path / "s/runs.json").exists(), "the first note")
    shutil.rmtree(tmp_path / "s")
    ck._recorder._changed = True
    until(lambda: ck._recorder._sides is None, "the recorder to see that")
    (tmp_path / "s").mkdir()
    ck.close()
    assert os.listdir(tmp_path / "s") == []


def test_an_end_that_was_interrupted_is_noted_by_the_next_close(tmp_path):
    """Ctrl-C while close() writes the mark: without it a clean run would count as failed."""
    main, armed = threading.current_thread(), []

    class Interrupted(SidesThatFail):
        def replace_side(self, name, data):
            if armed and threading.current_thread() is main:
                armed.pop()
                raise KeyboardInterrupt
            super().replace_side(name, data)

    ck = opened(Interrupted(tmp_path / "s", Script()))
    save(ck, 1)
    armed += [True, True]
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            ck.close()
    ck.close()
    assert not ck._life.is_open
    assert history.source(str(tmp_path / "s")).states() == ["ended"]
    assert past_failures(tmp_path / "s")[1] == 0
    with opened(tmp_path / "s", lock_timeout_s=0) as again:
        assert again.restore().step == 1


def test_a_forked_child_writes_nothing(tmp_path, quick):
    with opened(tmp_path / "s") as ck:
        save(ck, 1)
        until(lambda: (tmp_path / "s/runs.json").exists(), "the first note")
        pid = os.fork()
        if pid == 0:
            try:
                ck.close()
            except ForkedError:
                ck._recorder.tick()
                ck._recorder.end()
                os._exit(0)
            os._exit(1)
        assert os.waitpid(pid, 0)[1] == 0
        (run,) = noted(tmp_path / "s")
        assert (run.ended, f"pid {os.getpid()}," in run.holder) == (False, True)
        save(ck, 2)
    assert noted(tmp_path / "s")[0].ended


def test_a_reader_beside_a_fast_writer_never_trips(tmp_path, quick, monkeypatch):
    monkeypatch.setattr(recorder, "EVERY_S", 0.0005)
    stop, seen, errors = threading.Event(), [], []

    def look():
        while not stop.is_set():
            try:
                for found in (pccheck.report(tmp_path / "s"), *history.sources(tmp_path / "s")):
                    problem = found.notes if isinstance(found, pccheck.Report) else found.found.problem
                    if problem and "no run" not in str(problem):
                        errors.append(problem)
                    seen.append(found)
            except Exception as error:
                errors.append(error)

    with opened(tmp_path / "s") as ck:
        save(ck, 0)
        reader = threading.Thread(target=look)
        reader.start()
        save(ck, *range(1, 200))
        stop.set()
        reader.join(WAIT_S)
    assert not errors
    assert len(seen) > 20


def test_the_files_json_is_plain(tmp_path):
    with opened(tmp_path / "s") as ck:
        save(ck, 1, 2)
    data = (tmp_path / "s/runs.json").read_bytes()
    told = json.loads(data)
    assert (told["format"], told["version"], len(told["runs"])) == ("pccheck runs", runs.VERSION, 1)
    assert len(data) < 5000
    assert (tmp_path / "s/runs.json").stat().st_mode & 0o111 == 0


# -- side files of a folder -------------------------------------------------------------------------------------------


def test_side_files_are_replaced_whole(tmp_path):
    volume = Directory(tmp_path / "s", create=True, write=True)
    assert volume.read_side("note", 10) is None
    volume.replace_side("note", b"one")
    volume.replace_side("note", b"second")
    assert (volume.read_side("note", 3), volume.read_side("note", 100)) == (b"sec", b"second")
    assert volume.names() == ["note"]
    (tmp_path / "s/.note.half").symlink_to(tmp_path / "other")
    with pytest.raises(pccheck.errors.FormatError):
        volume.replace_side("note", b"third")
    assert volume.read_side("note", 100) == b"second"
    volume.close()
    reader = Directory(tmp_path / "s", create=False, write=False)
    assert reader.read_side("note", 100) == b"second"
    with pytest.raises(pccheck.errors.UsageError):
        reader.replace_side("note", b"fourth")
    reader.close()


def test_a_side_file_that_cannot_be_written_leaves_the_old_one(tmp_path, monkeypatch):
    volume = Directory(tmp_path / "s", create=True, write=True)
    volume.replace_side("note", b"one")
    real = os.pwrite

    def full(fd, data, offset):
        if offset:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(fd, data[:10], offset)

    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises((MediumError, CapacityError)):
        volume.replace_side("note", bytes(100))
    monkeypatch.undo()
    assert volume.read_side("note", 100) == b"one"
    assert os.listdir(tmp_path / "s") == ["note"]
    volume.close()
