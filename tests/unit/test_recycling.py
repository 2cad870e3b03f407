"""Files that nobody wants any more become slots of their store of links again, and only where they are nobody's."""

from __future__ import annotations

import mmap
import os
import shutil
import subprocess
import time
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import numpy as np
import pytest

import pccheck
from pccheck import format, links
from pccheck.errors import ClosedError, UsageError
from pccheck.storage import outside
from pccheck.storage.directory import Directory

WAIT_S = 30


def state(step: int) -> dict[str, object]:
    return {"w": np.full(50_000, step, np.float32), "step": step}


@pytest.fixture
def ck(tmp_path):
    (tmp_path / "s").mkdir()
    volume = Directory(tmp_path / "s", create=False, write=False)
    volume.close()
    if volume.storage != "direct":
        pytest.skip("needs a file system that tells whose a file is")
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


def test_it_is_a_slot_that_was_never_used(ck):
    put(ck, 0)
    assert ck.recycle(put(ck, 1))
    [slot] = Path(ck.path).glob("slot-*")
    assert format.unpack_record(slot.read_bytes()[: format.RECORD_BYTES]) is None


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


def before_the_rename(monkeypatch, what):
    """Have something done at the moment when the file still has its old name, and was found to be nobody's."""
    rename = os.rename

    def hooked(old, new, **kwargs):
        if str(new).startswith(".slot-"):
            what()
        rename(old, new, **kwargs)

    monkeypatch.setattr(outside.os, "rename", hooked)


def test_who_opens_it_while_it_is_looked_at_gets_whole_bytes(ck, monkeypatch):
    """Its open waits for the answer, and succeeds once that is given: the file is not taken then."""
    path = put(ck, 0)
    before, readers = path.read_bytes(), []

    def read():
        readers.append(subprocess.Popen(["cat", path], stdout=subprocess.PIPE))
        time.sleep(0.5)

    before_the_rename(monkeypatch, read)
    assert not ck.recycle(path)
    assert readers[0].communicate(timeout=WAIT_S)[0] == before
    assert os.listdir(ck.path).count(".slot-000.pcc.half") == 0


def test_what_is_on_its_way_to_somebody_stays_whole(ck):
    """Sent by sendfile, and closed: the pages in the pipe or socket belong to no open file."""
    path = put(ck, 0)
    before = path.read_bytes()
    read, write = os.pipe()
    with path.open("rb") as file:
        assert os.splice(file.fileno(), write, 8192) == 8192
    assert ck.recycle(path)
    put(ck, 1)
    put(ck, 2)
    assert os.read(read, 8192) == before[:8192]
    os.close(read)
    os.close(write)


def test_another_file_in_its_place_is_not_taken_for_it(ck, monkeypatch, tmp_path):
    """It was moved out of the trash, to be kept, and something else put there."""
    path = put(ck, 0)
    before = path.read_bytes()

    def rescue():
        os.link(path, tmp_path / "rescued")
        path.unlink()
        path.write_bytes(b"something else")

    before_the_rename(monkeypatch, rescue)
    assert not ck.recycle(path)
    put(ck, 1)
    put(ck, 2)
    assert (tmp_path / "rescued").read_bytes() == before


def test_a_slot_that_is_being_made_is_nobody_elses(ck):
    """Its number was free for both, and the save whose file came second failed (seen, one kill in a hundred)."""
    path, slots = put(ck, 0), ck._store.slots
    make, taken = slots._volume.create, []

    def create(name, size):
        taken.append(slots.take_in(str(path), ck._store._store_id))
        return make(name, size)

    slots._volume.create = create
    made = slots.create(1)
    assert taken[0] is not None
    assert taken[0] not in made


def test_who_links_it_while_it_is_looked_at_keeps_whole_bytes(ck, monkeypatch, tmp_path):
    path = put(ck, 0)
    before = path.read_bytes()
    before_the_rename(monkeypatch, lambda: os.link(path, tmp_path / "mine"))
    assert not ck.recycle(path)
    put(ck, 1)
    put(ck, 2)
    assert (tmp_path / "mine").read_bytes() == before


@pytest.mark.parametrize("change", ["mode", "owner", "attribute"])
def test_a_file_that_was_changed_for_somebody_is_left(ck, change):
    """The next step would be readable, or not, by others than its user meant."""
    path = put(ck, 0)
    if change == "mode":
        path.chmod(0o604)
    elif change == "owner" and os.getuid():
        pytest.skip("needs root")
    elif change == "owner":
        os.chown(path, 12345, -1)
    else:
        os.setxattr(path, "user.sha256", b"of step 0")
    assert not ck.recycle(path)
    assert_whole(path, 0)


def test_no_symbolic_link_is_followed(ck, tmp_path):
    """A step that was archived, and left a link behind, is not the store's."""
    path = put(ck, 0)
    path.parent.rename(tmp_path / "archive")
    path.parent.symlink_to(tmp_path / "archive")
    assert not ck.recycle(path)
    assert_whole(tmp_path / "archive" / path.name, 0)


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


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_what_a_fork_has_of_it_keeps_nobody_waiting(ck, monkeypatch):
    """A child that was forked meanwhile has the descriptor, too, and with it the lease, unless that is given back."""
    path, children = put(ck, 0), []

    def fork_and_fail():
        child = os.fork()
        if not child:
            time.sleep(60)
            os._exit(0)
        children.append(child)
        raise OSError("no rename today")

    before_the_rename(monkeypatch, fork_and_fail)
    try:
        assert not ck.recycle(path)
        os.close(os.open(path, os.O_RDONLY | os.O_NONBLOCK))  # one that would have to wait is an error
    finally:
        os.kill(children[0], 9)
        os.waitpid(children[0], 0)


@pytest.mark.parametrize("call", ["rename", "fsync", "fdatasync"])
def test_what_fails_half_way_leaves_nothing_that_counts(ck, monkeypatch, call):
    put(ck, 0)
    path, real = put(ck, 1), getattr(os, call)
    failed = []

    def fails(*args, **kwargs):
        if not failed:
            failed.append(args)
            raise OSError(5, "the disk is gone")
        return real(*args, **kwargs)

    with monkeypatch.context() as patch:
        before_the_rename(patch, lambda: patch.setattr(os, call, fails))
        assert not ck.recycle(path)
    assert failed
    for step in range(2, 6):
        assert_whole(put(ck, step), step)
    ck.close()
    assert not [name for name in os.listdir(ck.path) if "slot" in name and not name.endswith(".half")]


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
