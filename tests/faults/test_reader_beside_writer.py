"""One process restores and inspects in a loop while another saves every few milliseconds into the same store."""

from __future__ import annotations

import mmap
import struct
import subprocess
import sys
import time
from pathlib import Path

import pytest

import pccheck
from pccheck.audit import audit, exit_code
from tests.faults.helpers import WAIT_S, open_files, step_of

ROOT = Path(__file__).parents[2]
SECONDS = 3.0

WRITER = """
import mmap, os, struct, sys, time
import pccheck
from pccheck.errors import StepNotFoundError
from tests.faults.helpers import make_state

directory, board, keep, pipeline = sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.argv[4]
with open(board, "r+b") as f:
    shared = mmap.mmap(f.fileno(), 4096)

def durable(save):
    if save.durable.exception() is None:
        shared[0:8] = struct.pack("<Q", max(save.counter, struct.unpack("<Q", shared[0:8])[0]))

with pccheck.Checkpointer(directory, in_flight=3, keep=keep, chunk_bytes=4096, pipeline=pipeline) as ck:
    step = 0
    while not shared[8]:
        step += 1
        save = ck.save(step, make_state(step, 4096 * (1 + step % 8)))
        save.durable.add_done_callback(lambda _, save=save: durable(save))
        if step % 50 == 7:
            try:
                ck.pin(ck.latest()) if not ck.steps()[0] < ck.latest() - 20 else ck.unpin(ck.steps()[0])
            except StepNotFoundError:
                pass  # it was superseded meanwhile
        time.sleep(0.002)
print(step)
"""


@pytest.fixture
def writer(fast_path):
    """Start a writer, give its directory and what it has promised; end it, and see that it ended well."""
    board = fast_path / "board"
    board.write_bytes(bytes(4096))
    with board.open("r+b") as f:
        shared = mmap.mmap(f.fileno(), 4096)
    started = []

    def start(directory: Path, keep: int, pipeline: str):
        command = [sys.executable, "-c", WRITER, str(directory), str(board), str(keep), pipeline]
        started.append(subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True))

        def promised() -> int:
            return struct.unpack("<Q", shared[0:8])[0]

        deadline = time.monotonic() + WAIT_S
        while not promised():
            assert started[0].poll() is None, started[0].stderr.read()
            assert time.monotonic() < deadline
            time.sleep(0.01)
        return promised

    def stop() -> int:
        shared[8:9] = b"\1"
        out, err = started[0].communicate(timeout=WAIT_S)
        assert (started[0].returncode, err) == (0, "")
        return int(out)

    yield start, stop
    for process in started:
        if process.poll() is None:
            process.kill()
            process.communicate(timeout=WAIT_S)
    shared.close()


@pytest.mark.parametrize(
    ("place", "keep", "pipeline"), [("memory", 1, "auto"), ("disk", 1, "auto"), ("disk", 2, "portable")]
)
def test_every_look_is_whole_and_as_new_as_was_promised(fast_path, tmp_path, writer, place, keep, pipeline):
    """Each restore is one whole step, not older than what was durable before it began; no look ever sees damage."""
    start, stop = writer
    directory = (fast_path if place == "memory" else tmp_path) / "s"
    promised = start(directory, keep, pipeline)
    restores, newest, fds = 0, 0, len(open_files())
    until = time.monotonic() + SECONDS
    with pccheck.open(directory) as view:
        while time.monotonic() < until:
            before = promised()
            restored = view.restore()
            assert restored is not None
            assert restored.counter >= max(before, newest)
            assert restored.skipped == ()
            assert step_of(restored.state) == restored.step
            newest, restores = restored.counter, restores + 1
            (report,) = audit(directory, verify=True)
            assert exit_code([report]) == 0, report
            leaf = view["w"]
            assert (leaf == leaf[0]).all()
    assert restores > 10
    assert len(open_files()) <= fds
    steps = stop()
    assert steps > 100
    with pccheck.open(directory) as view:
        assert step_of(view.restore().state) == steps
    with pccheck.Checkpointer(directory, in_flight=3, keep=keep, chunk_bytes=4096) as ck:
        assert step_of(ck.restore().state) == steps
