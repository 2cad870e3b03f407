"""Public bug reports of other checkpoint libraries, each as a test of its whole kind: memory and retention."""

from __future__ import annotations

import random
import threading

import pytest

import pccheck
from pccheck.errors import SkippedError
from pccheck.testing.faults import Fault, Script
from tests.faults.helpers import (
    CHUNK,
    WAIT_S,
    Gate,
    faulty,
    make_state,
    run_python,
    slot_files,
    step_of,
)

MIB = 1 << 20


# -- F. memory --------------------------------------------------------------------------------------------------------

PEAK = """
import re, sys
import numpy as np
import pccheck

MIB = 1 << 20
directory, what, pool = sys.argv[1], sys.argv[2], int(sys.argv[3]) * MIB

def peak(field="VmHWM"):
    with open("/proc/self/status") as status:
        return int(re.search(field + r":\\s+(\\d+)", status.read())[1]) * 1024

def reset():
    with open("/proc/self/clear_refs", "w") as refs:
        refs.write("5")

def shared():
    return peak("RssFile") + peak("RssShmem")

ck = pccheck.Checkpointer(directory, in_flight=2, keep=1, buffer_bytes=pool, chunk_bytes=4 * MIB, pipeline=sys.argv[4])
if what == "save":
    state = {f"layer{i}": np.full(4 * MIB, i + 1, np.float32) for i in range(16)}
    ck.save(0, {"x": 1})
    ck.wait()
    reset()
    before = peak()
    for step in range(3):
        ck.save(step, state)
    ck.wait()
else:
    ck.save(0, {"x": 1}) if what == "nothing" else None
    reset()
    before = peak()
    restored = ck.restore()
    assert all((restored.state[f"layer{i}"][::4096] == i + 1).all() for i in range(16))
print(peak() - before)
ck.close()
"""


@pytest.mark.parametrize("pipeline", ["auto", "portable"])
def test_case_28_memory_is_bounded_by_the_pool(tmp_path, pipeline):
    """Case 28: 256 MiB of state, a pool of 32: a save takes the pool and little more, a restore the state and that."""
    pool, fixed, state = 32, 32, 256
    saved = run_python(PEAK, tmp_path, "save", pool, pipeline)
    assert saved.returncode == 0, saved.stderr
    restored = run_python(PEAK, tmp_path, "restore", pool, pipeline)
    assert restored.returncode == 0, restored.stderr
    extra, taken = int(saved.stdout) / MIB, int(restored.stdout) / MIB
    assert extra <= pool + fixed, f"a save took {extra:.0f} MiB more"
    assert taken <= state + pool + fixed, f"a restore took {taken:.0f} MiB"


# -- I. retention and meaning -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("in_flight", "keep"), [(1, 1), (2, 1), (2, 3)])
def test_case_39_exact_counts_after_every_commit_and_every_failure(tmp_path, in_flight, keep):
    """Case 39: the old is never deleted before the new is safe, `keep` of them stay, failures or not."""
    script, chance = Script(), random.Random(39)
    kept: list[int] = []
    with faulty(tmp_path, script, in_flight=in_flight, keep=keep, on_error="warn") as ck:
        ck.save(0, make_state(0)).durable.result(WAIT_S)
        kept.append(0)
        for step in range(1, 40):
            fails = chance.random() < 0.4
            if fails:
                script.arm(Fault(chance.choice(("write", "sync")), chance.randrange(1, 4), errno=28))
            save = ck.save(step, make_state(step))
            outcome = save.durable.exception(WAIT_S)
            script.arm()
            assert (outcome is not None) == fails
            if fails:
                with pytest.warns(RuntimeWarning, match="failed"):
                    ck.raise_errors()
            else:
                kept = [*kept, step][-keep:]
            assert ck.steps() == kept
            assert len(slot_files(tmp_path)) <= in_flight + keep
            with pccheck.open(tmp_path) as view:
                assert step_of(view.restore().state) == kept[-1]
                assert set(kept) <= set(view.steps())


def test_case_39_the_same_step_twice_is_two_checkpoints_of_which_the_newer_counts(tmp_path):
    """Case 39: there is no option to forget: a step is a label, the newer of two is what a restore of it gives."""
    with pccheck.Checkpointer(tmp_path, keep=3, chunk_bytes=CHUNK) as ck:
        for value in (5, 6, 7):
            ck.save(1, make_state(value)).durable.result(WAIT_S)
        assert ck.steps() == [1]
        assert step_of(ck.restore(1, branch=False).state) == 7
        assert [e.step for e in pccheck.open(tmp_path).checkpoints] == [1, 1, 1]
        ck.delete(1)
        assert (ck.steps(), ck.latest(), ck.restore()) == ([], None, None)


def test_case_39_a_skipped_save_says_so(tmp_path):
    """Case 39: what is not stored is never silently not stored."""
    gate, threads = Gate(), threading.active_count()
    gate.hold("written", 1)
    with pccheck.Checkpointer(tmp_path, in_flight=1, when_full="skip", chunk_bytes=CHUNK, _at=gate) as ck:
        ck.save(1, make_state(1))
        gate.reached("written", 1)
        skipped = ck.save(2, make_state(2))
        assert skipped.outcome == "skipped"
        assert isinstance(skipped.durable.exception(), SkippedError)
        gate.let_go("written", 1)
        ck.wait(WAIT_S)
        assert (ck.steps(), ck.stats().skipped) == ([1], 1)
    assert threading.active_count() <= threads
