"""Real processes that are killed, interrupted or closed, and how the next report counts them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
import time

import numpy as np
import pytest

import pccheck
from pccheck.bill import deaths, history
from pccheck.bill.history import past_failures

WAIT_S = 60.0
TRAINER = """
    import json, os, signal, sys, threading, time
    import numpy as np
    import pccheck
    from pccheck.bill import recorder

    recorder.EVERY_S = 0.05
    store, options = sys.argv[1], json.loads(sys.argv[2])
    held = threading.Event()

    def at(point):
        if point == "written" and current[0] in options.get("never_durable", ()):
            held.wait()

    current = [None]
    ck = pccheck.Checkpointer(store, chunk_bytes=4096, keep=2, _at=at)
    if options.get("restore"):
        print("restored", ck.restore().step, flush=True)
    for step in options["steps"]:
        current[0] = step
        save = ck.save(step, {"w": np.full(1000, step)})
        if step not in options.get("never_durable", ()):
            save.durable.result(60)
    print("ready", flush=True)
    if options["end"] == "close":
        ck.close()
    elif options["end"] == "exit":
        sys.exit(0)
    elif options["end"] == "raise":
        raise RuntimeError("training failed")
    elif options["end"] == "with":
        try:
            with ck:
                print("inside", flush=True)
                time.sleep(60)
        except KeyboardInterrupt:
            sys.exit(5)
    time.sleep(60)
"""


def train(store, *steps, end="wait", **options):
    """Start a trainer that saves these steps; give its process once it has."""
    told = json.dumps({"steps": steps, "end": end, **options})
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(TRAINER), str(store), told], stdout=subprocess.PIPE, text=True,
        stderr=subprocess.PIPE,
    )  # fmt: skip
    for line in process.stdout:
        if line == "ready\n":
            return process
    raise AssertionError(process.stderr.read())


def noted(store, step):
    """Wait until a step is in the history."""
    end = time.monotonic() + WAIT_S
    while True:
        found = history.source(str(store)).found.runs
        if found and found[-1].last_step == step:
            return found[-1]
        assert time.monotonic() < end, found
        time.sleep(0.01)


def idle(store, seconds):
    """Wait until the history says that nothing was saved for so long."""
    end = time.monotonic() + WAIT_S
    while (run := history.source(str(store)).found.runs[-1]).uptime_s - run.returned_at_s < seconds:
        assert time.monotonic() < end, run
        time.sleep(0.01)


def train_on(store):
    """Start a trainer that makes a step each 10 ms, counts them in a file, and saves every 50 of them."""
    program = """
        import sys, time
        import numpy as np
        import pccheck
        from pccheck.bill import recorder

        recorder.EVERY_S = 0.2
        with pccheck.Checkpointer(sys.argv[1], chunk_bytes=4096) as ck, open(sys.argv[2], "r+b") as made:
            for step in range(6000):
                time.sleep(0.01)
                made.seek(0)
                made.write(b"%d" % step)
                made.flush()
                if step % 50 == 0:
                    ck.save(step, {"w": np.full(1000, step)})
    """
    steps = store.parent / "steps"
    steps.write_bytes(b"")
    return subprocess.Popen([sys.executable, "-c", textwrap.dedent(program), str(store), str(steps)]), steps


def end(process, number=None):
    if number is not None:
        process.send_signal(number)
    process.stdout.close()
    process.stderr.close()
    return process.wait(WAIT_S)


def test_a_killed_run_is_a_failure_with_its_lost_steps(tmp_path):
    store = tmp_path / "s"
    first = train(store, 10, 20, 30, 40, never_durable=[40])
    assert noted(store, 40).durable_step == 30
    (live,) = pccheck.report(store).runs
    assert (live.state, live.steps_lost, live.age.now_s > 0) == ("running", None, True)
    assert past_failures(store) == (0.0, 0), "what goes on is no past"
    idle(store, 1.0)  # longer than ever between saves: it is taken to hang
    assert end(first, signal.SIGKILL) == -signal.SIGKILL
    report = pccheck.report(store)
    assert [(run.state, run.reached_step, run.died_step, run.steps_lost) for run in report.runs] == [
        ("failed", 40, 50, 20)
    ]
    assert (report.failures, report.mtbf_s) == (1, report.uptime_s)
    seconds, failures = past_failures(store)
    assert (failures, seconds) == (1, report.runs[0].uptime_s)

    second = train(store, 40, 50, restore=True, never_durable=[50])
    noted(store, 50)
    assert past_failures(store)[1] == 1
    idle(store, 1.0)
    assert end(second, signal.SIGKILL) == -signal.SIGKILL
    third = train(store, 50, restore=True, end="close")
    limit = time.monotonic() + WAIT_S
    while not history.source(str(store)).found.runs[-1].ended:
        assert time.monotonic() < limit
        time.sleep(0.01)
    report = pccheck.report(store)
    assert [(run.state, run.restored_step, run.reached_step, run.steps_lost) for run in report.runs] == [
        ("failed", None, 40, 20), ("failed", 30, 50, 20), ("ended", 40, 50, None)
    ]  # fmt: skip
    assert (report.failures, report.steps_lost) == (2, 40)
    assert report.restart_s > 0
    assert report.runs[-1].loss.restart_s == report.restart_s
    end(third, signal.SIGKILL)
    assert pccheck.report(store).failures == 2, "it had closed its store before it was killed"


def test_steps_after_the_last_save_are_lost_too(tmp_path, monkeypatch):
    """Killed between two saves, after the last of which 40 steps were made."""
    monkeypatch.setattr(deaths, "EVERY_S", 0.2)
    process, steps = train_on(tmp_path / "s")
    limit = time.monotonic() + WAIT_S
    while not (text := steps.read_bytes()) or int(text) < 190:
        assert time.monotonic() < limit
        time.sleep(0.001)
    process.kill()
    process.wait(WAIT_S)
    died = int(steps.read_bytes())
    (run,) = pccheck.report(tmp_path / "s").runs
    assert run.state == "failed"
    assert run.died_step > run.reached_step, "something was done after the last save that is noted"
    assert run.steps_lost == run.died_step - run.durable_step
    assert abs(run.died_step - died) <= 35, "of the last note it is not known how long ago it was"


def test_a_run_that_died_is_known_by_whoever_comes_next(tmp_path):
    """Before the next run has saved, the name it left in CHECK tells that nobody goes on with the last one."""
    end(train(tmp_path / "s", 1, 2), signal.SIGKILL)
    with pccheck.Checkpointer(tmp_path / "s", chunk_bytes=4096) as ck:
        assert ck.restore().step == 2
        assert past_failures(tmp_path / "s")[1] == 1
        assert past_failures(ck._store._volume)[1] == 1
        ck.save(3, {"w": np.zeros(10)}).durable.result(WAIT_S)
    assert [run.state for run in pccheck.report(tmp_path / "s").runs] == ["failed", "ended"]


@pytest.mark.parametrize("how", ["close", "exit", "raise", "with"])
def test_a_run_that_closed_its_store_is_no_failure(tmp_path, how):
    """Also one that left that to the interpreter's exit, after an exception or not; and Ctrl-C in a `with` block."""
    process = train(tmp_path / "s", 1, 2, end=how)
    if how == "with":
        assert process.stdout.readline() == "inside\n"
        assert end(process, signal.SIGINT) == 5
    elif how == "close":
        noted(tmp_path / "s", 2)
        while pccheck.report(tmp_path / "s").runs[0].state == "running":
            time.sleep(0.01)
        end(process, signal.SIGKILL)
    else:
        assert end(process) == (1 if how == "raise" else 0)
    report = pccheck.report(tmp_path / "s")
    assert [(run.state, run.reached_step, run.durable_step) for run in report.runs] == [("ended", 2, 2)]
    assert (report.failures, report.mtbf_s, report.restart_s) == (0, None, None)


def test_sigterm_is_a_failure(tmp_path):
    """Nobody handles it unless the program does: it ends the process as a preemption does."""
    assert end(train(tmp_path / "s", 1), signal.SIGTERM) == -signal.SIGTERM
    assert pccheck.report(tmp_path / "s").failures == 1


def test_killed_at_any_moment_of_a_write_the_history_is_whole(tmp_path):
    """The file is replaced by a rename: what a killed process leaves is the old one or the new one."""
    program = """
        import sys
        import numpy as np
        import pccheck
        from pccheck.bill import recorder

        recorder.EVERY_S = 0.0002
        ck = pccheck.Checkpointer(sys.argv[1], chunk_bytes=4096, keep=2)
        restored = ck.restore()
        step = restored.step + 1 if restored else 0
        print("ready", flush=True)
        while True:
            ck.save(step, {"w": np.zeros(500)})
            step += 1
    """
    for life in range(6):
        process = subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(program), str(tmp_path / "s")], stdout=subprocess.PIPE
        )
        assert process.stdout.readline() == b"ready\n"
        began = time.monotonic()
        while len(history.source(str(tmp_path / "s")).found.runs) <= life:
            assert time.monotonic() < began + WAIT_S
        time.sleep(0.003 * life)
        os.kill(process.pid, signal.SIGKILL)
        process.stdout.close()
        process.wait(WAIT_S)
        found = history.source(str(tmp_path / "s")).found
        assert found.problem is None
        assert len(found.runs) == life + 1
    report = pccheck.report(tmp_path / "s")
    assert [run.state for run in report.runs] == ["failed"] * 6
    with pccheck.Checkpointer(tmp_path / "s", chunk_bytes=4096) as ck:
        assert ck.restore() is not None
    assert not [name for name in os.listdir(tmp_path / "s") if name.startswith(".")], "half-written files are swept"
