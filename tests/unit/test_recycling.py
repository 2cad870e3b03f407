"""Files that nobody wants any more become slots of their store of links again, and only where they are nobody's."""

from __future__ import annotations

import mmap
import os
import shutil
import subprocess
import sys
import textwrap
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import numpy as np
import pytest

import pccheck
from pccheck import format, links
from pccheck.errors import ClosedError, UsageError
from pccheck.storage import outside

WAIT_S = 30


def state(step: int) -> dict[str, object]:
    return {"w": np.full(50_000, step, np.float32), "step": step}


@pytest.fixture
def ck(tmp_path):
    with pccheck.Checkpointer(tmp_path / "s", keep=0, chunk_bytes=65536) as checkpointer:
        yield checkpointer


def put(ck: pccheck.Checkpointer, step: int, **how) -> Path:
    """Save a step, and give its file once the store has given up its own name of it."""
    path = Path(ck.path).parent / str(step) / links.rank_name(0)
    path.parent.mkdir(exist_ok=True)
    ck.save(step, how.get("state", state(step)), link=path).durable.result(WAIT_S)
    ck._store.tidy()
    links.finish(path.parent, 1)
    return path


def assert_whole(path: Path, step: int) -> None:
    restored = links.load(path.parent)
    assert restored.step == restored.state["step"] == step
    np.testing.assert_array_equal(restored.state["w"], state(step)["w"])


def test_files_of_deleted_steps_are_written_again(ck):
    inodes = set()
    for step in range(8):
        path = put(ck, step)
        inodes.add(path.stat().st_ino)
        if step:
            old = path.parent.parent / str(step - 1) / path.name
            assert ck.recycle(old)
            assert not old.exists()
        assert_whole(path, step)
        assert path.stat().st_nlink == 1
    assert len(inodes) == 2
    assert len(list(Path(ck.path).glob("slot-*"))) <= 2


def test_what_it_held_is_withdrawn(ck):
    put(ck, 0)
    assert ck.recycle(put(ck, 1))
    [slot] = Path(ck.path).glob("slot-*")
    record = format.unpack_record(slot.read_bytes()[: format.RECORD_BYTES])
    assert record.state is format.SlotState.WITHDRAWN
    assert format.slot_name(record.slot) == slot.name


def test_no_more_than_the_slots_that_saves_need(ck):
    files = [put(ck, step) for step in range(5)]
    assert [ck.recycle(path) for path in files] == [True, True, False, False, False]
    assert [path.exists() for path in files] == [False, False, True, True, True]
    assert_whole(files[4], 4)


@contextmanager
def opened(path, mode):
    with path.open(mode):
        yield


@contextmanager
def mapped(path):
    with path.open("rb") as file:
        room = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
    yield
    room.close()


@contextmanager
def opened_by_another(path):
    with path.open("rb") as file:
        child = subprocess.Popen(["sleep", "60"], stdin=file)
    yield
    child.kill()
    child.wait()


@contextmanager
def named_twice(path):
    other = path.parent.parent / "mine"
    os.link(path, other)
    yield
    other.unlink()


HOLDERS = {
    "open": partial(opened, mode="rb"),
    "open for writing": partial(opened, mode="r+b"),
    "mapped": mapped,
    "open in another process": opened_by_another,
    "under another name": named_twice,
}


@pytest.mark.parametrize("held", HOLDERS)
def test_what_somebody_has_is_left(ck, held):
    path = put(ck, 0)
    before = path.read_bytes()
    with HOLDERS[held](path):
        assert not ck.recycle(path)
        put(ck, 1)
        assert path.read_bytes() == before
        assert_whole(path, 0)
    assert ck.recycle(path)


def test_what_is_no_file_of_this_store_is_left(ck, tmp_path):
    mine = put(ck, 0)
    (tmp_path / "0" / "link").symlink_to(mine)
    (tmp_path / "zeros").write_bytes(bytes(mine.stat().st_size))
    (tmp_path / "garbage").write_bytes(os.urandom(mine.stat().st_size))
    (tmp_path / "short").write_bytes(b"x")
    os.mkfifo(tmp_path / "fifo")
    with pccheck.Checkpointer(tmp_path / "other" / "s", keep=0, chunk_bytes=65536) as other:
        shutil.copy(put(other, 1), tmp_path / "foreign")
    there = ("0/link", "0", "zeros", "garbage", "short", "fifo", "foreign")
    for name in (*there, "nowhere", "0/pccheck.json/x"):
        assert not ck.recycle(tmp_path / name), name
    assert all(os.path.lexists(tmp_path / name) for name in there)
    assert_whole(mine, 0)


def test_a_file_of_another_size_is_left(ck):
    large = put(ck, 0, state={"w": np.zeros(3_000_000, np.float32), "step": 0})
    ck.close()
    with pccheck.Checkpointer(ck.path, keep=0, chunk_bytes=65536) as again:
        assert not again.recycle(large), "nothing was saved yet: no size is known"
        small = put(again, 1)
        assert not again.recycle(large), "a small state would take the space of a large one for ever"
        assert again.recycle(small)


def test_where_the_file_system_has_no_leases_nothing_is_used_again(ck, monkeypatch):
    path = put(ck, 0)
    monkeypatch.delattr(outside.fcntl, "F_SETLEASE")
    assert not ck.recycle(path)
    assert_whole(path, 0)


def test_what_cannot_be_asked(ck, tmp_path):
    with pccheck.Checkpointer(tmp_path / "keeps") as keeps, pytest.raises(UsageError, match="keep=0"):
        keeps.recycle(tmp_path / "x")
    with pytest.raises(UsageError, match="path=7"):
        ck.recycle(7)
    path = put(ck, 0)
    ck.close()
    with pytest.raises(ClosedError):
        ck.recycle(path)


def test_whoever_opens_a_file_while_it_is_looked_at_waits_and_does_no_harm(tmp_path):
    """The kernel signals that somebody waits; by the signal that it takes unless told, the process would end."""
    (tmp_path / "file").write_bytes(b"x")
    program = f"""
        import fcntl, os, subprocess, sys, time
        from pccheck.storage import outside
        fd = os.open({str(tmp_path / "file")!r}, os.O_RDWR)
        assert outside._is_nobodys(fd)
        reader = subprocess.Popen([sys.executable, "-c", "print(open({str(tmp_path / "file")!r}).read(), flush=True)"])
        time.sleep(1)
        assert reader.poll() is None, "it did not wait"
        fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_UNLCK)
        assert reader.wait({WAIT_S}) == 0
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(program)], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "x\n"), done.stderr
