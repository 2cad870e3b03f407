"""Interrupts, no memory, no threads, no descriptors, files that go away: one save fails, saving goes on."""

from __future__ import annotations

import _thread
import os
import threading
import time

import numpy as np
import pytest

import pccheck
from pccheck import format
from pccheck.errors import ContentError, MediumError, PccheckError
from pccheck.saving import pipelines
from pccheck.storage.directory import Directory
from pccheck.testing.slotfiles import check_file, slot_file
from pccheck.testing.throttle import Rate, ThrottledVolume
from tests.faults.helpers import CHUNK, WAIT_S, make_state, pool_of, run_python, slot_files, step_of

MIB = 1 << 20


def test_an_interrupted_save_never_stores_what_was_assigned_afterwards(tmp_path):
    """Ctrl-C while `save()` waits for the copy, as in a notebook: the state changes next, that save must not count."""
    volume = ThrottledVolume(Directory(str(tmp_path), create=True, write=True), total=Rate.steady(MIB))
    with pccheck.Checkpointer(volume, chunk_bytes=CHUNK, buffer_bytes=2 * CHUNK, in_flight=1) as ck:
        ck.save(0, {"w": np.zeros(8, np.uint8)}).durable.result(WAIT_S)
        array = np.full(100 * CHUNK, 1, np.uint8)
        timer = threading.Timer(0.1, _thread.interrupt_main)
        timer.start()
        with pytest.raises(KeyboardInterrupt):
            ck.save(1, {"w": array})
        array.fill(2)
        with pytest.raises(MediumError, match="cancel"):
            ck.wait(WAIT_S)
        assert (ck.latest(), ck.stats().failed) == (0, 1)
        assert pool_of(ck) == (2, 2)
        ck.save(3, {"w": array[:CHUNK]}).durable.result(WAIT_S)
        assert (ck.restore().state["w"] == 2).all()
        assert len(slot_files(tmp_path)) == 2


def test_an_interrupt_while_a_save_waits_for_its_place_starts_nothing(tmp_path):
    volume = ThrottledVolume(Directory(str(tmp_path), create=True, write=True), total=Rate.steady(MIB))
    with pccheck.Checkpointer(volume, chunk_bytes=CHUNK, in_flight=1) as ck:
        ck.save(1, make_state(1, 100 * CHUNK))
        timer = threading.Timer(0.05, _thread.interrupt_main)
        timer.start()
        with pytest.raises(KeyboardInterrupt):
            ck.save(2, make_state(2, 100 * CHUNK))
        ck.wait(WAIT_S)
        assert ck.steps() == [1]
        ck.save(3, make_state(3)).durable.result(WAIT_S)


def test_no_memory_for_a_larger_pool(tmp_path, monkeypatch):
    """A much larger state needs a larger pool; there is no memory for it: that save fails, smaller ones go on."""
    make, refusals = pipelines.make_pipeline, [1]

    def refuse(*args):
        if refusals:
            refusals.pop()
            raise MemoryError("no memory for the pool")
        return make(*args)

    with pccheck.Checkpointer(tmp_path, chunk_bytes=CHUNK, pipeline="portable") as ck:
        ck.save(0, make_state(0)).durable.result(WAIT_S)
        monkeypatch.setattr(pipelines, "make_pipeline", refuse)
        monkeypatch.setattr(ck._flight.pipelines, "_pool_bytes", CHUNK)
        with pytest.raises(MemoryError):
            ck.save(1, make_state(1, 64 * CHUNK))
        for step in (2, 3):
            assert ck.save(step, make_state(step)).durable.result(WAIT_S) == step
        assert ck.save(4, make_state(4, 64 * CHUNK)).durable.result(WAIT_S) == 4
        assert len(slot_files(tmp_path)) == 3
        ck.wait(WAIT_S)


def test_no_thread_for_a_commit(tmp_path, monkeypatch):
    """The system refuses another thread: that save fails and holds nothing, the next works."""
    start = threading.Thread.start

    def refuse(thread):
        if thread.name == "pccheck-commit":
            raise RuntimeError("can't start new thread")
        start(thread)

    with pccheck.Checkpointer(tmp_path, chunk_bytes=CHUNK, in_flight=2) as ck:
        for _ in range(4):
            with monkeypatch.context() as patch:
                patch.setattr(threading.Thread, "start", refuse)
                with pytest.raises(RuntimeError, match="new thread"):
                    ck.save(0, make_state(0))
        for step in (1, 2, 3):
            assert ck.save(step, make_state(step)).durable.result(WAIT_S) == step
        assert len(slot_files(tmp_path)) == 3
        assert (ck.stats().saves, ck.stats().failed) == (7, 4)


def test_no_descriptor_is_left(tmp_path):
    """Out of descriptors at opening, at the first save, when pinning, when restoring: errors, and nothing is stuck."""
    done = run_python(
        """
        import os, resource, sys
        import numpy as np, pccheck
        from pccheck.errors import PccheckError
        hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        def used():
            return len(os.listdir("/proc/self/fd")) - 1
        def limit(more):
            free = [fd for fd in range(3, 4000) if not os.path.exists(f"/proc/self/fd/{fd}")]
            resource.setrlimit(resource.RLIMIT_NOFILE, (free[more], hard))
        def unlimited():
            resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 4096), hard))
        unlimited()
        pccheck.Checkpointer(sys.argv[1] + "/warm").close()
        before, refused = used(), 0
        for more in range(6):
            limit(more)
            try:
                ck = pccheck.Checkpointer(sys.argv[1] + "/a")
            except PccheckError:
                refused += 1
            else:
                ck.close()
            finally:
                unlimited()
            assert used() == before, more
        assert refused >= 3, refused
        for what in ("save", "pin", "restore"):
            ck = pccheck.Checkpointer(sys.argv[1] + "/" + what, chunk_bytes=4096)
            if what != "save":
                ck.save(1, {"w": np.ones(5000)}).durable.result(60)
            for more in range(5):
                limit(more)
                try:
                    if what == "save":
                        ck.save(2, {"w": np.ones(5000)}).durable.result(60)
                    elif what == "pin":
                        ck.pin(1)
                    else:
                        ck.restore()
                except (PccheckError, OSError) as error:
                    assert isinstance(error, PccheckError), error
                finally:
                    unlimited()
                try:
                    ck.wait(60)
                except PccheckError:
                    pass
            for step in (5, 6):
                ck.save(step, {"w": np.full(5000, step)}).durable.result(60)
            assert (ck.restore().state["w"] == 6).all()
            ck.close()
        """,
        tmp_path,
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("which", ["free", "newest"])
def test_a_slot_file_that_is_deleted_under_the_writer(tmp_path, which):
    """Somebody tidies up: no save is lost, another file takes its place."""
    with pccheck.Checkpointer(tmp_path, chunk_bytes=CHUNK, in_flight=2) as ck:
        for step in range(4):
            ck.save(step, make_state(step)).durable.result(WAIT_S)
        held = {format.slot_name(e.slot): e.record for e in ck._store.books.entries()}
        doomed = next(file for file in slot_files(tmp_path) if (held[file.name] is None) == (which == "free"))
        doomed.unlink()
        for step in range(10, 20):
            assert ck.save(step, make_state(step)).durable.result(WAIT_S) == step
        with pccheck.open(tmp_path) as view:
            assert step_of(view.restore().state) == 19
        assert len(slot_files(tmp_path)) == 3


def test_check_that_is_cut_short_under_the_writer(tmp_path):
    """A page of CHECK that is gone would be SIGBUS for whoever touches it: an error instead, the data stays."""
    ck = pccheck.Checkpointer(tmp_path, chunk_bytes=CHUNK)
    ck.save(1, make_state(1)).durable.result(WAIT_S)
    os.truncate(tmp_path / "CHECK", 0)
    for _ in range(2):
        with pytest.raises(ContentError, match="CHECK"):
            ck.save(2, make_state(2))
    ck.close()
    with pytest.warns(RuntimeWarning, match="rebuilt"):
        ck = pccheck.Checkpointer(tmp_path, chunk_bytes=CHUNK)
    with ck:
        assert step_of(ck.restore().state) == 1
        ck.save(2, make_state(2)).durable.result(WAIT_S)


def test_the_last_counter_is_used_up(tmp_path):
    """A store made to run out of counters: an error of ours, nothing is overwritten."""
    (tmp_path / "CHECK").write_bytes(check_file())
    (tmp_path / "slot-000.pcc").write_bytes(slot_file({"x": 1}, counter=format.MAX_COUNTER))
    with pccheck.Checkpointer(tmp_path, chunk_bytes=CHUNK) as ck:
        assert ck.restore().state == {"x": 1}
        with pytest.raises(PccheckError, match="counter"):
            ck.save(1, make_state(1))
        assert ck.restore().state == {"x": 1}


def test_waiting_with_a_deadline_of_nothing(tmp_path):
    with pccheck.Checkpointer(tmp_path, chunk_bytes=CHUNK) as ck:
        began = time.monotonic()
        ck.wait(0)
        assert ck.fence(0) >= 0
        assert time.monotonic() - began < WAIT_S
