"""Ctrl-C at any moment of save(): the Checkpointer goes on, no place is lost, and what is restored is whole."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest

import pccheck
from pccheck.saving import captures, flight, shadow, snapshot

WAIT_S = 30

LOOP = """
import os, random, signal, sys, threading, time
import numpy as np, pccheck

path, seed, in_flight = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
chance = random.Random(seed)
state = {"w": np.zeros(300_000)}
ck = pccheck.Checkpointer(path, in_flight=in_flight, chunk_bytes=65536)
ck.save(0, state)
ck.wait(30)
step, interrupts = 0, 0
for trial in range(8):
    timer = threading.Timer(chance.uniform(0.0, 0.03), lambda: os.kill(os.getpid(), signal.SIGINT))
    try:
        timer.start()
        until = time.monotonic() + 1
        while time.monotonic() < until:
            step += 1
            state["w"][:] = step
            ck.save(step, state)
    except KeyboardInterrupt:
        interrupts += 1
    timer.join()
    for _ in range(4):  # what the interrupt ended is told of once
        try:
            ck.wait(30)
            break
        except pccheck.errors.DeadlineError:
            print("HANG", ck, flush=True)
            os._exit(3)
        except pccheck.errors.PccheckError:
            pass
    step += 1
    state["w"][:] = step
    ck.save(step, state).durable.result(30)
ck.close()
print("ok", interrupts, step, flush=True)
"""


@pytest.mark.parametrize(("seed", "in_flight"), [(1, 1), (2, 2), (3, 1), (4, 3)])
def test_ctrl_c_at_random_moments(tmp_path, seed, in_flight):
    command = [sys.executable, "-c", LOOP, str(tmp_path / "s"), str(seed), str(in_flight)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=150, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    word, interrupts, step = done.stdout.split()
    assert (word, int(interrupts) > 0) == ("ok", True)
    restored = pccheck.open(tmp_path / "s").restore()
    assert restored.step == int(step)
    assert np.all(restored.state["w"] == int(step))


def lines_of(function):
    code = function.__code__
    return {line for _, _, line in code.co_lines() if line is not None and line > code.co_firstlineno}


FUNCTIONS = (pccheck.Checkpointer.save, flight.Flight.launch, flight.Flight._admit, flight.Flight._submit)
FUNCTIONS += (pccheck.Checkpointer._prepare, flight.Flight._take, flight.Flight.await_snapshot, captures.Captures._wait)
PLACES = [("copy", f, line) for f in FUNCTIONS for line in sorted(lines_of(f))]
ASIDE = (snapshot.Snapshots.take, snapshot.Snapshots._take_aside, shadow.HostShadow.ready, shadow.HostShadow.room)
ASIDE += (shadow.HostShadow.used_by, snapshot.Snapshots.captured_by)
PLACES += [("device", f, line) for f in ASIDE for line in sorted(lines_of(f))]


@pytest.mark.parametrize(("mode", "function", "line"), PLACES, ids=lambda x: getattr(x, "__name__", x))
def test_ctrl_c_at_every_line_of_save(tmp_path, mode, function, line):
    """An interrupt raised at one line: no place is lost, nothing hangs, the next save works."""
    state = {"w": np.full(5000, 1.0)}
    with pccheck.Checkpointer(tmp_path, in_flight=1, chunk_bytes=4096, snapshot=mode) as ck:
        ck.save(1, state)
        ck.wait(WAIT_S)
        hit = []

        def trace(frame, event, argument):
            if frame.f_code is not function.__code__:
                return trace if event == "call" else None
            if event == "line" and frame.f_lineno == line and not hit:
                hit.append(True)
                raise KeyboardInterrupt
            return trace

        sys.settrace(trace)
        try:
            ck.save(2, state)
        except KeyboardInterrupt:
            pass
        finally:
            sys.settrace(None)
        told = []
        for _ in range(2):
            try:
                ck.wait(WAIT_S)
            except pccheck.errors.MediumError:
                told.append(True)  # the save that the interrupt cancelled
        assert len(told) <= len(hit)
        state["w"][:] = 3
        assert ck.save(3, state).durable.result(WAIT_S) == 3
        assert np.all(ck.restore().state["w"] == 3)
    assert len(list(tmp_path.glob("slot-*"))) <= 3
