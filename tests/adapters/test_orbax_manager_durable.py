"""A step's rename comes after the syncs of all that it names, and is synced itself before the step counts."""

from __future__ import annotations

import asyncio
import errno
import gc
import os
import weakref

import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from etils import epath
from pccheck_orbax.durable import DurableRename, is_live
from pccheck_orbax.manager import CheckpointManager
from pccheck_orbax.trash import Trash

from pccheck.audit import audit
from pccheck.reports import exit_code
from tests.adapters.orbax_held import Save, registry


def args(step):
    return ocp.args.Composite(state=Save(np.full(4, step)), position=ocp.args.JsonSave({"step": step}))


class Syncs:
    """The real fsync and rename, and what was synced when."""

    def __init__(self, monkeypatch):
        self.synced, self.told, self.refuse = {}, [], None
        self._fsync, self._rename = os.fsync, os.rename
        monkeypatch.setattr(os, "fsync", self.fsync)
        monkeypatch.setattr(os, "rename", self.rename)

    def fsync(self, fd):
        path = os.readlink(f"/proc/self/fd/{fd}")
        if self.refuse is not None and path.endswith(self.refuse):
            raise OSError(errno.EIO, "the disk is gone", path)
        self._fsync(fd)
        self.synced[path] = state(path)
        self.told.append(("sync", path))

    def rename(self, old, new, **kwargs):
        old, new = str(old), str(new)
        if os.path.basename(new).isdigit():
            late = [path for path in below(old) if self.synced.get(path) != state(path)]
            self.told.append(("commit", new, late))
        self._rename(old, new, **kwargs)


def state(path):
    found = os.stat(path)
    return found.st_ino, found.st_size, found.st_mtime_ns


def below(folder):
    return [path for at, _, files in os.walk(folder) for path in (at, *(os.path.join(at, name) for name in files))]


@pytest.fixture
def syncs(monkeypatch):
    return Syncs(monkeypatch)


def test_nothing_of_a_step_is_unsynced_when_it_gets_its_name(tmp_path, syncs):
    root = tmp_path / "root"
    with CheckpointManager(root, in_flight=2, handler_registry=registry) as manager:
        for step in (1, 2):
            manager.save(step, args=args(step))
    assert ("sync", str(tmp_path)) in syncs.told, "the root's own name"
    commits = [each for each in syncs.told if each[0] == "commit"]
    assert sorted(new for _, new, _ in commits) == [str(root / "1"), str(root / "2")], "either may be the first"
    for commit in commits:
        assert commit[2] == [], "written, not synced, and named"
        after = syncs.told[syncs.told.index(commit) :]
        assert ("sync", str(root)) in after
    assert (root / "1" / "commit_success.txt").is_file()


@pytest.mark.parametrize("file", ["commit_success.txt", "_CHECKPOINT_METADATA", "array.npy", "state"])
def test_a_sync_that_fails_is_a_failed_save(tmp_path, syncs, file):
    options = ocp.CheckpointManagerOptions(max_to_keep=1)
    manager = CheckpointManager(tmp_path, options, handler_registry=registry)
    manager.save(1, args=args(1))
    manager.wait_until_finished()
    syncs.refuse = file
    manager.save(2, args=args(2))
    with pytest.raises(OSError, match="disk is gone"):
        manager.wait_until_finished()
    syncs.refuse = None
    assert manager.all_steps() == [1]
    manager.close()
    with ocp.CheckpointManager(tmp_path) as stock:
        assert stock.all_steps() == [1]
    assert not [name for name in os.listdir(tmp_path) if "tmp" in name]


def test_a_path_class_of_the_users_is_synced_before_its_step_counts(tmp_path, syncs):
    for name, chosen in {
        "class": {"temporary_path_class": ocp.path.atomicity.AtomicRenameTemporaryPath},
        "mode": {"atomicity_options": ocp.options.AtomicityOptions(mode=ocp.options.AtomicityMode.COMMIT_FILE)},
    }.items():
        root = tmp_path / name
        with CheckpointManager(root, ocp.CheckpointManagerOptions(**chosen), handler_registry=registry) as manager:
            manager.save(1, args=args(1))
            manager.wait_until_finished()
            late = [path for path in below(root / "1") if syncs.synced.get(path, (0,))[1:] != state(path)[1:]]
            assert late == []
            assert str(root) in syncs.synced
            syncs.refuse = "commit_success.txt"
            manager.save(2, args=args(2))
            with pytest.raises(OSError, match="disk is gone"):
                manager.wait_until_finished()
            assert manager.durable_steps() == [1]
            syncs.refuse = None


def test_a_stock_manager_may_take_the_path_class_too(tmp_path, syncs):
    options = ocp.CheckpointManagerOptions(temporary_path_class=DurableRename, cleanup_tmp_directories=True)
    (tmp_path / "5.orbax-checkpoint-tmp-whole" / "old").mkdir(parents=True)
    with ocp.CheckpointManager(tmp_path, options=options, handler_registry=registry()) as stock:
        stock.save(5, args=args(5))
    assert [each[2] for each in syncs.told if each[0] == "commit"] == [[]]
    assert sorted(os.listdir(tmp_path)) == ["5"]


def test_trash_hides_at_once_and_survives_who_empties_it_too(tmp_path):
    trash = Trash(tmp_path, pending=2)
    for i in range(8):
        (tmp_path / "a" / "b").mkdir(parents=True)
        (tmp_path / "a" / "b" / "file").write_text("x")
        assert trash.take(tmp_path / "a")
        assert not (tmp_path / "a").exists(), i
    assert not trash.take(tmp_path / "a")
    (tmp_path / ".pccheck_trash" / "gone-before").mkdir(exist_ok=True)
    trash.sweep(tmp_path, lambda name: False)
    assert "Trash(" in repr(trash)
    trash.close()
    assert os.listdir(tmp_path) == []


def test_files_of_deleted_steps_are_written_again_once_their_names_are_gone_for_ever(tmp_path, syncs):
    """Each save would else take a new file and free an old one, which costs more than writing it."""
    folders = {str(tmp_path), str(tmp_path / ".pccheck_trash")}
    inodes = set()
    link = os.link

    def watched(old, new, **kwargs):
        if str(new).startswith("slot-"):
            renamed = max(i for i, each in enumerate(syncs.told) if each[0] == "hide")
            assert folders <= {path for kind, path, *_ in syncs.told[renamed:] if kind == "sync"}
        link(old, new, **kwargs)

    def hidden(old, new, **kwargs):
        syncs.rename(old, new, **kwargs)
        if ".pccheck_trash" in str(new):
            syncs.told.append(("hide", str(new)))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "link", watched)
        patch.setattr(os, "rename", hidden)
        with CheckpointManager(tmp_path, ocp.CheckpointManagerOptions(max_to_keep=1)) as manager:
            for step in range(8):
                manager.save(step, args=ocp.args.StandardSave({"x": jnp.full(5000, step)}))
                manager.wait_until_finished()
                inodes.add(os.stat(tmp_path / str(step) / "default" / "rank-00000.pcc").st_ino)
                assert np.array_equal(manager.restore(step)["x"], np.full(5000, step))
    assert len(inodes) == 2
    assert os.listdir(tmp_path / ".pccheck" / "default" / "process-0" / "..") == ["process-0"]
    assert not [name for name in os.listdir(tmp_path / ".pccheck/default/process-0") if name.startswith("slot-")]


def test_who_has_a_deleted_step_open_keeps_whole_bytes(tmp_path):
    with CheckpointManager(tmp_path, ocp.CheckpointManagerOptions(max_to_keep=1)) as manager:
        file = None
        for step in range(4):
            manager.save(step, args=ocp.args.StandardSave({"x": jnp.full(5000, step)}))
            manager.wait_until_finished()
            if step == 0:
                path = tmp_path / "0" / "default" / "rank-00000.pcc"
                before, file = path.read_bytes(), path.open("rb")
        with file:
            assert os.fstat(file.fileno()).st_nlink == 0
            assert file.read() == before


def test_nothing_of_a_state_is_held_once_its_save_is_over(tmp_path):
    """A lane kept what its last save was given: one state in memory for each that may be in flight."""
    with CheckpointManager(tmp_path, ocp.CheckpointManagerOptions(max_to_keep=1)) as manager:
        state = {"x": jnp.arange(5000.0)}
        alive = weakref.ref(state["x"])
        manager.save(0, args=ocp.args.StandardSave(state))
        del state
        manager.wait_until_finished()
        gc.collect()
        assert alive() is None


def test_a_step_of_which_an_item_is_not_whole_is_not_committed(tmp_path):
    path = DurableRename.from_final(epath.Path(tmp_path / "7"))
    (tmp_path / path.get().name / "data.orbax-checkpoint-tmp").mkdir(parents=True)
    assert is_live(tmp_path / "7")
    with pytest.raises(RuntimeError, match=r"data\.orbax-checkpoint-tmp"):
        asyncio.run(path.finalize())
    assert os.listdir(tmp_path) == ["7.orbax-checkpoint-tmp"]
    del path
    gc.collect()
    assert not is_live(tmp_path / "7")


@pytest.mark.parametrize("cut", [False, True], ids=["whole", "cut short as it was removed"])
def test_a_crash_before_the_rename_is_no_damage_and_leaves_nothing_at_the_next_save(tmp_path, cut):
    options = ocp.CheckpointManagerOptions(max_to_keep=3)  # as most jobs have it: nobody cleans up

    def save(*steps):
        with CheckpointManager(tmp_path, options) as manager:
            for step in steps:
                manager.save(step, args=ocp.args.StandardSave({"w": np.full(100, step)}))

    def told():
        reports = audit(tmp_path)
        return exit_code(reports), sum(report.damaged for report in reports)

    save(1, 2)
    crashed = tmp_path / "2.orbax-checkpoint-tmp-whole"
    os.rename(tmp_path / "2", crashed)
    if cut:
        (crashed / "default" / "rank-00000.pcc").unlink()
    assert told() == (0, 0)
    save(3)
    assert told() == (0, 0)
    left = {path.name for path in crashed.rglob("*") if path.is_file()}
    assert "rank-00000.pcc" not in left
    assert cut or "pccheck.json" not in left
    with ocp.CheckpointManager(tmp_path) as stock:
        assert stock.all_steps() == [1, 3]
