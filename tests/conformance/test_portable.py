"""What the portable pipeline does beyond the shared checks: forks, the end of the interpreter, references, choice."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import threading
import weakref

import numpy as np
import pytest

from pccheck.errors import DeadlineError, ForkedError, MediumError, OptionError, UsageError
from pccheck.format import PAYLOAD_OFFSET
from pccheck.pipeline import choose
from pccheck.pipeline.choose import make_pipeline, native_missing
from pccheck.pipeline.portable import PortablePipeline
from pccheck.state.plan import lay_out
from pccheck.storage.memory import MemoryMedium
from pccheck.testing.states import Gate

CHUNK = 1 << 16
LONG_S = 60.0


class Source:
    """Something that owns the memory which is saved."""

    def __init__(self, length):
        self.array = np.arange(length, dtype=np.uint8)
        self.layout = lay_out([length], CHUNK)

    def submit(self, pipeline, medium):
        return pipeline.submit(self.layout, [self.array.ctypes.data], self, medium)


@pytest.fixture
def pipeline():
    pipeline = PortablePipeline(4 * CHUNK, CHUNK)
    yield pipeline
    pipeline.close(LONG_S)


def test_what_is_saved_is_let_go_of_once_it_is_captured(pipeline):
    gate = Gate(MemoryMedium(1 << 20))
    source = Source(3 * CHUNK)
    job = source.submit(pipeline, gate)
    gone = threading.Event()
    weakref.finalize(source, gone.set)
    del source
    assert job.wait_captured(LONG_S)
    assert gone.wait(LONG_S)
    assert "captured, waits for storage" in repr(job)
    gate.open()
    assert job.wait_written(LONG_S)
    assert "ended" in repr(job)


def test_no_payload_byte_is_stored_before_the_prologue_is_synced(pipeline):
    """On mapped media too, where the store is the write; and none at all when that sync fails."""

    class Watched:
        def __init__(self, fails):
            self.inner, self.fails, self.early = MemoryMedium(1 << 20), fails, None

        def __getattr__(self, name):
            return getattr(self.inner, name)

        def sync(self):
            threading.Event().wait(0.02)
            bytes_ = bytes(self.inner.mapping())
            self.early = bytes_[:4096] != b"p" * 4096 or any(bytes_[PAYLOAD_OFFSET:])
            if self.fails:
                raise MediumError("sync", self.path, OSError(errno.EIO, "told to"))

    for fails in (False, True):
        medium, source = Watched(fails), Source(3 * CHUNK)
        job = pipeline.submit(source.layout, [source.array.ctypes.data], source, medium, prologue=b"p" * 4096)
        assert job.wait_captured(LONG_S)
        if fails:
            with pytest.raises(MediumError):
                job.wait_written(LONG_S)
        else:
            assert job.wait_written(LONG_S)
        assert medium.early is False
        assert any(bytes(medium.mapping())[PAYLOAD_OFFSET:]) != fails


def test_threads_are_daemons_with_names(pipeline):
    named = {t.name for t in threading.enumerate()}  # also those that other tests left behind
    assert named >= {"pccheck-capture", "pccheck-writer-0", "pccheck-writer-1"}
    assert all(t.daemon for t in threading.enumerate() if t.name.startswith("pccheck-"))


def test_a_forked_child_may_call_nothing(pipeline):
    gate = Gate(MemoryMedium(1 << 20))
    job = Source(3 * CHUNK).submit(pipeline, gate)
    pid = os.fork()
    if pid == 0:
        code = 3
        try:
            for call in (
                lambda: Source(8).submit(pipeline, gate), pipeline.close, lambda: pipeline.free_buffers,
                lambda: job.wait_captured(0), lambda: job.wait_written(0), job.digests, job.cancel, job.stats,
            ):  # fmt: skip
                with pytest.raises(ForkedError):
                    call()
            pipeline._dropped()  # as when the child drops its copy: no lock may be waited for
            code = 0
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    gate.open()
    assert job.wait_written(LONG_S)


STUCK = """
import sys, threading
import numpy as np
from pccheck.storage.memory import MemoryMedium
from pccheck.pipeline.portable import PortablePipeline
from pccheck.state.plan import lay_out
class Stuck:
    path = "stuck"
    def mapping(self): return None
    def write_from(self, data, offset): threading.Event().wait(600)
array = np.zeros(1 << 20, np.uint8)
pipeline = PortablePipeline(1 << 18, 1 << 16)
job = pipeline.submit(lay_out([array.nbytes], 1 << 16), [array.ctypes.data], array, Stuck())
assert not job.wait_captured(0.05)
print("at the end")
"""


def test_a_stuck_disk_does_not_keep_the_interpreter():
    done = subprocess.run([sys.executable, "-c", STUCK], capture_output=True, text=True, timeout=LONG_S)
    assert (done.returncode, done.stdout, done.stderr) == (0, "at the end\n", "")


def test_close_says_what_it_waits_for(pipeline):
    gate = Gate(MemoryMedium(1 << 20))
    Source(3 * CHUNK).submit(pipeline, gate)
    with pytest.raises(DeadlineError, match="PortableJob on memory") as caught:
        pipeline.close(0.01)
    assert caught.value.waited_s == 0.01
    gate.open()


def test_an_error_that_is_no_medium_error_is_told_as_well(pipeline):
    class Broken:
        path = "broken"

        def mapping(self):
            return None

        def write_from(self, data, offset):
            raise ZeroDivisionError("a bug of a medium")

    job = Source(9 * CHUNK).submit(pipeline, Broken())
    assert job.wait_captured(LONG_S)
    with pytest.raises(ZeroDivisionError):
        job.wait_written(LONG_S)
    assert pipeline.free_buffers == pipeline.buffers
    healthy = Source(9 * CHUNK).submit(pipeline, MemoryMedium(2 << 20))
    assert healthy.wait_written(LONG_S)


def test_a_medium_that_is_too_short_fails_its_job(pipeline):
    job = Source(9 * CHUNK).submit(pipeline, MemoryMedium(1 << 16))
    assert job.wait_captured(LONG_S)
    with pytest.raises(UsageError, match="allocate"):
        job.wait_written(LONG_S)


@pytest.mark.parametrize(
    "arguments",
    [
        {"buffer_bytes": CHUNK}, {"chunk_bytes": 0}, {"chunk_bytes": 5000}, {"writers": 0}, {"writers": 65},
        {"retries": -1},
    ],
)  # fmt: skip
def test_options_that_are_refused(arguments):
    threads = threading.active_count()
    with pytest.raises(OptionError):
        PortablePipeline(**{"buffer_bytes": 4 * CHUNK, "chunk_bytes": CHUNK, **arguments})
    assert threading.active_count() == threads


def test_choice(monkeypatch):
    portable = make_pipeline("portable", 2 * CHUNK, CHUNK, 1)
    assert portable.name == "portable"
    portable.close()
    best = make_pipeline("auto", 2 * CHUNK, CHUNK, 1)
    assert best.name == ("portable" if native_missing() else "native")
    best.close()
    monkeypatch.setattr(choose, "native_missing", lambda: "no compiler")
    fallback = make_pipeline("auto", 2 * CHUNK, CHUNK, 1)
    assert fallback.name == "portable"
    fallback.close()
    with pytest.raises(UsageError, match="no compiler"):
        make_pipeline("native", 2 * CHUNK, CHUNK, 1)


def test_cancelled_jobs_say_so(pipeline):
    gate = Gate(MemoryMedium(1 << 20))
    job = Source(3 * CHUNK).submit(pipeline, gate)
    job.cancel()
    gate.open()
    with pytest.raises(OSError, match="memory") as caught:
        job.wait_written(LONG_S)
    assert caught.value.errno == errno.ECANCELED
