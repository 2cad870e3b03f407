"""No more files than of the steps that are kept and of `in_flight` more, at any moment, however slow removals are."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import orbax.checkpoint as ocp
import pytest
from pccheck_orbax.manager import CheckpointManager
from pccheck_orbax.trash import Trash

from tests.adapters.orbax_shared import held, state

KEEP = 2


def files(root):
    """Count slot files under any name; one that is renamed as this looks may be missed, but none counts twice."""
    found = set()
    for folder, _, names in os.walk(root):
        for name in names:
            if name.endswith(".pcc"):
                try:
                    found.add(os.stat(os.path.join(folder, name)).st_ino)
                except FileNotFoundError:
                    pass
    return len(found)


class Watch:
    """The most files that were there at once."""

    def __init__(self, root):
        self.most, self._root, self._over = 0, root, threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)

    def _look(self):
        while not self._over.is_set():
            self.most = max(self.most, files(self._root))

    def __enter__(self):
        self._thread.start()
        return self

    def __exit__(self, *error):
        self._over.set()
        self._thread.join()


@pytest.fixture
def slow(monkeypatch):
    """Removals that take longer than saves."""
    dispose = Trash._dispose

    def slowly(self, path):
        time.sleep(0.05)
        dispose(self, path)

    monkeypatch.setattr(Trash, "_dispose", slowly)


def open_manager(root, in_flight):
    return CheckpointManager(
        root, options=ocp.CheckpointManagerOptions(max_to_keep=KEEP), in_flight=in_flight, chunk_bytes=64 << 10
    )


@pytest.mark.parametrize("in_flight", [1, 2, 3])
def test_a_save_waits_for_removals_rather_than_take_one_file_too_many(tmp_path, slow, in_flight):
    with Watch(tmp_path) as watch, open_manager(tmp_path, in_flight) as manager:
        for step in range(20):
            manager.save(step, args=ocp.args.StandardSave(state(step)))
    assert watch.most <= KEEP + in_flight
    assert held(tmp_path) == KEEP


def test_what_a_crash_left_is_gone_before_the_first_save_makes_its_files(tmp_path, slow):
    options = ocp.CheckpointManagerOptions(max_to_keep=None)
    with CheckpointManager(tmp_path, options=options, in_flight=2, chunk_bytes=64 << 10) as manager:
        for step in range(KEEP + 4):
            manager.save(step, args=ocp.args.StandardSave(state(step)))
    (tmp_path / ".pccheck_trash").mkdir()
    (tmp_path / "0").rename(tmp_path / ".pccheck_trash" / "gone-0")
    (tmp_path / "5").rename(tmp_path / "5.orbax-checkpoint-tmp")
    assert files(tmp_path) == KEEP + 4
    (tmp_path / "1").rename(tmp_path / ".pccheck_trash" / "1")  # what Orbax renames there and was about to remove
    assert files(tmp_path) == KEEP + 4
    with open_manager(tmp_path, 2) as manager:
        manager.save(6, args=ocp.args.StandardSave(state(6)))
        assert files(tmp_path) <= KEEP + 2
        manager.wait_until_finished()
        assert manager.all_steps() == [4, 6]


def test_the_trash_waits_for_room(tmp_path, slow):
    trash = Trash(tmp_path, pending=8)
    for i in range(3):
        (tmp_path / str(i)).mkdir()
        trash.take(tmp_path / str(i))
    trash.await_room(1)
    assert len(os.listdir(trash.folder)) <= 1
    trash.await_room(0)
    assert os.listdir(trash.folder) == []
    trash.close()


def test_a_file_in_the_trash_that_cannot_be_removed_stops_no_save(tmp_path):
    with open_manager(tmp_path, 2) as manager:
        manager.save(0, args=ocp.args.StandardSave(state(0)))
    (tmp_path / ".pccheck_trash").mkdir()
    stuck = tmp_path / ".pccheck_trash" / "gone-0"
    (tmp_path / "0").rename(stuck)
    (kept,) = stuck.rglob("*.pcc")
    if subprocess.run(["chattr", "+i", kept], check=False, capture_output=True).returncode:
        pytest.skip("this file system, or this user, makes no file immutable")
    try:
        with open_manager(tmp_path, 2) as manager:
            for step in range(1, 5):
                manager.save(step, args=ocp.args.StandardSave(state(step)))
            manager.wait_until_finished()
            assert manager.all_steps() == [3, 4]
    finally:
        subprocess.run(["chattr", "-i", kept], check=True)
    with open_manager(tmp_path, 2) as manager:
        manager.save(5, args=ocp.args.StandardSave(state(5)))
    assert not stuck.exists()


def test_an_interrupted_wait_for_a_deletion_does_not_forget_it(tmp_path):
    with open_manager(tmp_path, 2) as manager, ThreadPoolExecutor(1) as threads:
        deleter, over = manager._fleet._deleter, threading.Event()
        deleter._deletions.append((7, threads.submit(over.wait)))
        threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT)).start()
        try:
            with pytest.raises(KeyboardInterrupt):
                deleter.await_room(0)
            assert [step for step, _ in deleter._deletions] == [7]
        finally:
            over.set()
        deleter.await_room(0)
        assert deleter._deletions == []
