"""Processes that end, fork or are killed in the middle of a native job: no hang, no crash, no wrong byte.

Each case is a real process. "Stuck" jobs cannot end before the process does: every write of theirs fails with EIO.
"""

from __future__ import annotations

import errno
import os
import shutil
import signal
import subprocess
import sys

import pytest

pytest.importorskip("pccheck.pipeline.native", exc_type=ImportError, reason="the extension was not built")

LIMIT_S = 60  # nothing here takes more than a second or two

PRELUDE = """
import faulthandler, gc, mmap, os, signal, sys, threading, time
faulthandler.enable()
import numpy as np
import xxhash
from pccheck.errors import ForkedError, MediumError
from pccheck.pipeline.native import NativePipeline
from pccheck.state.plan import lay_out

CHUNK = 1 << 20
layout = lay_out([24 * CHUNK], CHUNK)
source = np.random.default_rng(0).integers(0, 256, 24 * CHUNK, dtype=np.uint8)

class Medium:
    alignment = 1

    def __init__(self, path, flags=os.O_CREAT):
        self.path, self.fd = path, os.open(path, os.O_RDWR | flags)

    def fileno(self):
        return self.fd

    def mapping(self):
        return None

file = Medium(sys.argv[1] + "/slot")
pipeline = NativePipeline(4 * CHUNK, CHUNK, retries=100)

def go(where=file, **more):
    return pipeline.submit(layout, [source.ctypes.data], source, where, **more)

def stuck():
    return go(Medium("/proc/self/mem", 0))

def is_right(job):
    found = memoryview(open(file.path, "rb").read())
    return job.digests() == b"".join(
        xxhash.xxh3_128_digest(found[c.file_offset : c.file_offset + c.stored_bytes]) for c in layout.chunks)
"""


def run(folder, body):
    command = [sys.executable, "-X", "dev", "-W", "ignore", "-c", PRELUDE + body, str(folder)]
    return subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=False)


ENDS = {
    "falls off the end": ("job = stuck()", 0),
    "falls off the end, the job dropped": ("stuck()", 0),
    "falls off the end while a real disk writes": ("jobs = [go() for _ in range(9)]", 0),
    "in a cycle": ("class A: pass\na = A(); a.a = a; a.p = pipeline; a.j = stuck(); del pipeline", 0),
    "sys.exit": ("job = stuck(); sys.exit(3)", 3),
    "an exception": ("job = stuck(); raise RuntimeError('on purpose')", 1),
    "os._exit": ("job = stuck(); os._exit(5)", 5),
    "SIGTERM": ("job = stuck(); os.kill(os.getpid(), signal.SIGTERM); time.sleep(60)", -signal.SIGTERM),
    "SIGKILL": ("jobs = [go() for _ in range(9)]; os.kill(os.getpid(), signal.SIGKILL)", -signal.SIGKILL),
    "a daemon thread waits": (
        "job = stuck(); threading.Thread(target=job.wait_written, daemon=True).start(); time.sleep(0.05)",
        0,
    ),
    "daemon threads submit": (
        "def loop():\n    while True: go().wait_written()\n"
        "for _ in range(3): threading.Thread(target=loop, daemon=True).start()\ntime.sleep(0.1)",
        0,
    ),
    "a thread waits": ("threading.Thread(target=go().wait_written).start()", 0),
    "everything is dropped": ("job = stuck(); del job, pipeline; gc.collect()", 0),
}


@pytest.mark.parametrize("name", ENDS)
def test_a_process_ends_in_the_middle_of_a_job(tmp_path, name):
    if not os.access("/proc/self/mem", os.W_OK):
        pytest.skip("no /proc/self/mem")
    body, status = ENDS[name]
    done = run(tmp_path, body)
    assert done.returncode == status, done.stderr
    assert "Fatal" not in done.stderr, done.stderr


def test_a_limit_of_the_file_size_is_one_error(tmp_path):
    done = run(
        tmp_path,
        "import resource\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (5 * CHUNK, 5 * CHUNK))\n"
        "job = go()\n"
        "assert job.wait_captured(30)\n"
        "try: job.wait_written(30)\n"
        "except MediumError as e: print(e.operation, e.errno, e.offset >= 4 * CHUNK, e.path == file.path)\n"
        "print(pipeline.free_buffers == pipeline.buffers)\n",
    )
    assert done.stdout.split() == ["write", str(errno.EFBIG), "True", "True", "True"], done.stderr


# -- forks -------------------------------------------------------------------------------------------------------------


def test_forks_in_the_middle_of_jobs_change_no_byte(tmp_path):
    done = run(
        tmp_path,
        "for turn in range(10):\n"
        "    job = go()\n"
        "    child = os.fork()\n"
        "    if not child: time.sleep(0.02); os._exit(0)\n"
        "    assert job.wait_captured(30)\n"
        "    source[:] ^= 255\n"  # the child shares these pages: they are copied now
        "    assert job.wait_written(30)\n"
        "    assert is_right(job), turn\n"
        "    os.waitpid(child, 0)\n"
        "print('right')\n",
    )
    assert done.stdout.split() == ["right"], done.stderr


def test_a_child_is_turned_away_and_lets_go(tmp_path):
    """Every call raises there, dropping does nothing, and the descriptors of the jobs are closed."""
    done = run(
        tmp_path,
        "def fds(): return sum(os.readlink(f'/proc/self/fd/{n}').endswith(('/slot', '/mem'))\n"
        "    for n in os.listdir('/proc/self/fd') if os.path.lexists(f'/proc/self/fd/{n}'))\n"
        "job, ended = stuck(), None\n"
        "before = fds()\n"
        "child = os.fork()\n"
        "if not child:\n"
        "    refused = 0\n"
        "    for call in (go, job.wait_captured, job.wait_written, job.digests, job.cancel, job.stats,\n"
        "                 pipeline.close, lambda: pipeline.free_buffers):\n"
        "        try: call()\n"
        "        except ForkedError: refused += 1\n"
        "    print(refused, fds(), flush=True)\n"
        "    del job, pipeline\n"
        "    gc.collect()\n"
        "    fresh = NativePipeline(4 * CHUNK, CHUNK)\n"  # a pipeline of its own works
        "    own = Medium(sys.argv[1] + '/own')\n"
        "    job = fresh.submit(layout, [source.ctypes.data], source, own)\n"
        "    print(job.wait_written(30), flush=True)\n"
        "    sys.exit(0)\n"
        "print(os.waitpid(child, 0)[1], before, fds(), job.wait_written(0))\n"
        "job.cancel()\n",
    )
    # Two media, and in the parent the job's duplicate of one of them.
    assert done.stdout.split() == ["8", "2", "True", "0", "3", "3", "False"], done.stderr


def test_pools_of_processes_and_spawned_ones(tmp_path):
    done = run(
        tmp_path,
        "import multiprocessing, subprocess\n"
        "jobs = [go() for _ in range(6)]\n"
        "with multiprocessing.get_context('fork').Pool(2) as pool:\n"
        "    print(pool.map(abs, [-1, 2]))\n"
        "print(subprocess.run([sys.executable, '-c', 'import pccheck._native as n; print(n.isa() != 0)'],\n"
        "    capture_output=True, text=True).stdout.strip())\n"
        "print(all(job.wait_written(30) for job in jobs), is_right(jobs[-1]))\n",
    )
    assert done.stdout.split() == ["[1,", "2]", "True", "True", "True"], done.stderr


# -- a disk that answers no more ---------------------------------------------------------------------------------------

SLEEPING_PWRITE = """
#include <sys/types.h>
#include <unistd.h>
ssize_t pwrite(int fd, const void *data, size_t length, off_t offset) { for (;;) pause(); }
ssize_t pwrite64(int fd, const void *data, size_t length, off_t offset) { for (;;) pause(); }
"""


@pytest.mark.slow
def test_a_write_that_never_returns_keeps_nobody(tmp_path, monkeypatch):
    """A dropped pipeline waits 5 s for it, then leaves pool and sources to the stuck thread; the process can end."""
    compiler = shutil.which("gcc") or shutil.which("cc")
    if compiler is None or not sys.platform.startswith("linux"):
        pytest.skip("needs a C compiler and LD_PRELOAD")
    (tmp_path / "sleeping.c").write_text(SLEEPING_PWRITE)
    library = str(tmp_path / "sleeping.so")
    subprocess.run([compiler, "-shared", "-fPIC", str(tmp_path / "sleeping.c"), "-o", library], check=True)
    monkeypatch.setenv("LD_PRELOAD", library)
    done = run(
        tmp_path,
        "import weakref\n"
        "from pccheck.errors import DeadlineError\n"
        "class Memory(np.ndarray): pass\n"
        "source = source.view(Memory)\n"
        "alive = weakref.ref(source)\n"
        "job, behind = go(), go()\n"
        "while pipeline.free_buffers: time.sleep(0.01)\n"
        "job.cancel()\n"
        "print(job.wait_captured(30), job.wait_written(0.2), behind.wait_captured(0.2))\n"
        "try: pipeline.close(0.2)\n"
        "except DeadlineError: print('deadline')\n"
        "del pipeline, behind, source\n"
        "try: job.wait_written(0)\n"
        "except MediumError: print('never')\n"
        "print(alive() is not None, flush=True)\n"
        "sys.exit(7)\n",
    )
    assert done.stdout.split() == ["True", "False", "False", "deadline", "True"], done.stderr
    assert done.returncode == 7
