"""The defects D14 to D20 of the paper's artifact (liveness), each as a test that the same mistake here would fail."""

from __future__ import annotations

import resource
import subprocess
import sys
import time

import numpy as np
import pytest

import pccheck
from pccheck.storage.directory import Directory
from pccheck.testing.faults import Fault, FaultyVolume, Script
from pccheck.testing.throttle import Rate, ThrottledVolume
from tests.faults.helpers import CHUNK, WAIT_S, Gate, make_state, pool_of, run_python, slot_files, step_of

KIB = 1 << 10


@pytest.mark.filterwarnings("ignore:a save failed")
def test_d14_buffers_of_superseded_failed_and_cancelled_saves_come_back(tmp_path):
    """D14: a stale chunk kept its buffer, the pool drained, and the trainer span for ever."""
    script, gate = Script(), Gate()
    volume = FaultyVolume(Directory(str(tmp_path), create=True, write=True), script)
    with pccheck.Checkpointer(
        volume,
        in_flight=3,
        chunk_bytes=CHUNK,
        buffer_bytes=4 * CHUNK,
        on_error="warn",
        write_timeout_s=WAIT_S,
        _at=gate,
    ) as ck:
        ck.save(0, make_state(0, 8 * CHUNK)).durable.result(WAIT_S)
        gate.hold("record-synced", 2)
        stale = ck.save(1, make_state(1, 8 * CHUNK))
        gate.reached("record-synced", 2)
        ck.save(2, make_state(2, 8 * CHUNK)).durable.result(WAIT_S)
        gate.let_go("record-synced", 2)
        stale.durable.result(WAIT_S)
        assert stale.outcome == "superseded"
        for nth in range(1, 13):  # every write and sync of a save in turn, its last chunks included
            for operation in ("write", "sync"):
                script.arm(Fault(operation, nth, errno=28))
                ck.save(100 + nth, make_state(nth, 8 * CHUNK)).durable.exception(WAIT_S)
                script.arm()
                ck.wait(WAIT_S)
                assert pool_of(ck) == (4, 4), (operation, nth)
        assert ck.stats().failed >= 12
        assert ck.save(200, make_state(200, 8 * CHUNK)).durable.result(WAIT_S) == 200


@pytest.mark.parametrize("waits", ["save", "fence", "wait", "idle"])
def test_d15_waiting_takes_no_processor_time(tmp_path, waits):
    """D15: threads span on a free slot, a free buffer, a start flag. Here all of them sleep."""
    volume = ThrottledVolume(
        Directory(str(tmp_path), create=True, write=True), total=Rate.steady(256 * KIB)
    )  # half a second for a save
    with pccheck.Checkpointer(
        volume, in_flight=1, chunk_bytes=CHUNK, buffer_bytes=2 * CHUNK, snapshot="lazy", writers=2
    ) as ck:
        ck.save(0, {"w": np.zeros(8)}).durable.result(WAIT_S)
        state = {"w": np.zeros(160 * KIB, np.uint8)}
        if waits != "idle":
            ck.save(1, state)
        began, cpu = time.monotonic(), time.process_time()
        if waits == "save":
            ck.save(2, state, when_full="block")  # waits for the place of save 1
        elif waits == "fence":
            ck.fence(WAIT_S)
        elif waits == "wait":
            ck.wait(WAIT_S)
        else:
            time.sleep(0.5)
        waited, used = time.monotonic() - began, time.process_time() - cpu
        assert waited > 0.2
        assert used < waited / 3, f"{used:.3f} s of processor time in {waited:.3f} s of waiting"


def test_d15_no_error_of_a_thread_is_lost_and_none_ends_the_process(tmp_path):
    """D15: `exit(1)` in a helper, errors in threads that never reached the trainer."""
    with pccheck.Checkpointer(tmp_path, in_flight=2, chunk_bytes=CHUNK) as ck:
        for point in ("captured", "written", "data-synced", "sealed", "record-synced", "published", "word-synced",
                      "agreed", "released"):  # fmt: skip

            def at(here, point=point):
                if here == point:
                    raise SystemExit(f"at {point}")

            ck.save(0, make_state(0)).durable.result(WAIT_S)
            ck._flight._at = at
            save = ck.save(1, make_state(1))
            with pytest.raises(SystemExit, match=point):
                save.durable.result(WAIT_S)
            ck._flight._at = lambda point: None
            with pytest.raises(SystemExit, match=point):
                ck.wait(WAIT_S)
            assert ck.save(2, make_state(2)).durable.result(WAIT_S) == 2
            assert step_of(ck.restore().state) == 2
            assert pool_of(ck)[0] == pool_of(ck)[1]
            assert len(slot_files(tmp_path)) == 3


def test_d18_no_thread_is_bound_to_a_core_and_no_core_is_assumed(tmp_path):
    """D18: threads were pinned to a table of 12 cores. Here one core is enough, and affinities stay as they were."""
    done = run_python(
        """
        import os, sys
        os.sched_setaffinity(0, {sorted(os.sched_getaffinity(0))[0]})
        import numpy as np, pccheck
        before = os.sched_getaffinity(0)
        with pccheck.Checkpointer(sys.argv[1], in_flight=3, writers=4) as ck:
            for step in range(6):
                ck.save(step, {"w": np.full(100_000, step)})
            ck.wait(60)
            for task in os.listdir("/proc/self/task"):
                assert os.sched_getaffinity(int(task)) == before
            assert (ck.restore().state["w"] == 5).all()
        """,
        tmp_path,
    )
    assert done.returncode == 0, done.stderr


def test_d19_what_is_saved_can_resume_an_optimizer(tmp_path):
    """D19: parameters and gradients were stored, the moments never. Here training goes on exactly as it would have."""
    torch = pytest.importorskip("torch")

    def fresh():
        torch.manual_seed(1)
        model = torch.nn.Linear(32, 8)
        return model, torch.optim.AdamW(model.parameters(), lr=0.1)

    def train(model, optimizer, steps):
        for step in steps:
            optimizer.zero_grad()
            model(torch.full((4, 32), float(step))).square().sum().backward()
            optimizer.step()

    model, optimizer = fresh()
    train(model, optimizer, range(5))
    with pccheck.Checkpointer(tmp_path, chunk_bytes=CHUNK) as ck:
        ck.save(4, {"model": model.state_dict(), "optimizer": optimizer.state_dict()})
        train(model, optimizer, range(5, 9))
        ck.wait(WAIT_S)
    other, its = fresh()
    restored = pccheck.open(tmp_path).restore()
    other.load_state_dict(restored.state["model"])
    its.load_state_dict(restored.state["optimizer"])
    train(other, its, range(restored.step + 1, 9))
    for a, b in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(a, b)


def test_d20_nothing_is_printed(tmp_path):
    """Prints on the hot path, and helpers that print and exit: the core prints nothing."""
    done = subprocess.run(
        [sys.executable, "-c",
         "import sys, numpy, pccheck\n"
         "with pccheck.Checkpointer(sys.argv[1]) as ck:\n"
         "    ck.save(1, {'w': numpy.ones(10)})\n"
         "    ck.wait(); ck.restore(); ck.pin(1); ck.unpin(1); ck.steps()\n", str(tmp_path)],
        capture_output=True, text=True, timeout=60, check=True,
    )  # fmt: skip
    assert (done.stdout, done.stderr) == ("", "")
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss > 0
