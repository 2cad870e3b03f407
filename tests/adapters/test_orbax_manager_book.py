"""What the manager believes of the steps is what a stock manager of a new process finds."""

from __future__ import annotations

import json
import os
import shutil
import threading
import time

import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from pccheck_orbax.deleting import Deleter
from pccheck_orbax.manager import CheckpointManager

import pccheck
from pccheck.errors import UnsupportedLeafError, UsageError
from tests.adapters.orbax_shared import held, on_disk, same, state

COMMIT_FILE = ocp.options.AtomicityOptions(mode=ocp.options.AtomicityMode.COMMIT_FILE)


def open_manager(root, in_flight=2, cls=CheckpointManager, **options):
    given = ocp.CheckpointManagerOptions(**options)
    return cls(root, options=given, **({} if cls is ocp.CheckpointManager else {"in_flight": in_flight}))


def save(manager, step, metric=None):
    metrics = None if metric is None else {"v": metric}
    return manager.save(step, args=ocp.args.StandardSave({"w": np.full(1000, step)}), metrics=metrics)


def holds(manager, step):
    return bool((manager.restore(step, args=ocp.args.StandardRestore())["w"] == int(step)).all())


def told(call, *arguments, **options):
    """Call what may raise the error of a save; it must say which."""
    try:
        call(*arguments, **options)
    except Exception as error:
        return "was not saved" in str(error.__notes__)
    return True


def rank(metrics):
    return metrics["v"]


def test_reload_books_no_step_that_is_being_deleted(tmp_path, monkeypatch):
    """It came back into the book, and the policy kept it in place of newer ones that were there (seen)."""
    delete = Deleter._delete

    def slowly(self, step, lanes):
        time.sleep(0.1)
        delete(self, step, lanes)

    monkeypatch.setattr(Deleter, "_delete", slowly)
    with open_manager(tmp_path, 3, max_to_keep=1, best_fn=rank) as manager:
        save(manager, 0, metric=9.0)
        manager.wait_until_finished()
        for step in range(1, 12):
            save(manager, step, metric=5 - step / 100)
            manager.reload()
            booked = set(manager._fleet.durable_steps())
            manager._fleet.drain()
            assert booked <= set(on_disk(tmp_path))
        manager.wait_until_finished()
        assert manager.durable_steps() == on_disk(tmp_path)
        assert holds(manager, manager.best_step())


@pytest.mark.parametrize("cls", [ocp.CheckpointManager, CheckpointManager])
def test_what_opening_did_not_read_a_reload_reads(tmp_path, cls):
    options = {
        "best_fn": rank, "max_to_keep": 2, "keep_checkpoints_without_metrics": False, "lightweight_initialize": True,
    }  # fmt: skip
    with open_manager(tmp_path, cls=cls, **options) as manager:
        save(manager, 0, metric=9.0)
        save(manager, 1, metric=8.0)
    with open_manager(tmp_path, cls=cls, **options) as manager:
        assert (manager.all_steps(), manager.best_step()) == ([0, 1], None)
        manager.reload()
        assert manager.best_step() == 0
        save(manager, 2, metric=1.0)
        manager.wait_until_finished()
        assert (manager.all_steps(), manager.best_step()) == ([0, 1], 0)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"atomicity_options": COMMIT_FILE},
        {"temporary_path_class": ocp.path.atomicity.AtomicRenameTemporaryPath},
        {"temporary_path_class": ocp.path.atomicity.CommitFileTemporaryPath},
    ],
)
def test_failed_saves_leave_no_files_whatever_commits_a_step(tmp_path, options):
    with open_manager(tmp_path, max_to_keep=1, **options) as manager:
        for step in range(12):
            position = {1} if step % 2 else 1  # no JSON: its item fails, after the other was written
            args = ocp.args.Composite(a=ocp.args.StandardSave(state(step)), b=ocp.args.JsonSave(position))
            assert told(manager.save, step, args=args)
        for _ in range(2):
            assert told(manager.wait_until_finished)
        assert held(tmp_path) <= 1 + 2
        (kept,) = manager.durable_steps()
        assert same(manager.restore(kept, args=ocp.args.Composite(a=ocp.args.StandardRestore()))["a"], kept)
    assert held(tmp_path) == 1
    with ocp.CheckpointManager(tmp_path, options=ocp.CheckpointManagerOptions(**options)) as stock:
        assert stock.all_steps() == [kept]


def test_asking_for_a_step_that_is_not_there_spoils_no_save(tmp_path):
    """A stock manager keeps what it was asked, and refuses all that fits it not (seen)."""
    with open_manager(tmp_path, 1) as manager:
        with pytest.raises(FileNotFoundError, match="there is no step 1"):
            manager.restore(1, args=ocp.args.StandardRestore())
        assert save(manager, 0)
        manager.wait_until_finished()
        with pytest.raises(FileNotFoundError, match=r"there is no step 5 in .*: it has \[0\]"):
            manager.restore(5, args=ocp.args.StandardRestore())
        assert save(manager, 1)
    with open_manager(tmp_path) as looking, open_manager(tmp_path) as manager:
        shutil.rmtree(tmp_path / "0")
        with pytest.raises(FileNotFoundError, match=r"no step 0 in .*: it has \[0, 1\] .* reload"):
            looking.restore(0, args=ocp.args.StandardRestore())
        save(manager, 2)
        manager.wait_until_finished()
        assert holds(looking, 2)  # of which it has not heard


@pytest.mark.parametrize("of", [int, np.int64, jnp.int32])
def test_a_step_may_be_any_whole_number(tmp_path, of):
    with open_manager(tmp_path) as manager:
        for step in range(3):
            assert save(manager, of(step))
        manager.delete(of(1))
        manager.wait_until_finished()
        assert manager.all_steps() == on_disk(tmp_path) == [0, 2]
        assert holds(manager, of(2))


def test_a_save_that_ends_at_once_counts_at_once(tmp_path):
    """With a synchronous checkpointer of Orbax's older kind: as many steps are left as of a stock manager."""
    for cls in (ocp.CheckpointManager, CheckpointManager):
        root, options = tmp_path / cls.__module__, ocp.CheckpointManagerOptions(max_to_keep=2)
        with cls(root, ocp.PyTreeCheckpointer(), options) as manager:
            for step in range(4):
                manager.save(step, {"a": np.full(3, step)})
            assert manager.all_steps() == [2, 3], cls


def test_where_steps_of_orbax_lie_no_checkpointer_saves(tmp_path):
    with open_manager(tmp_path, cls=ocp.CheckpointManager) as stock:
        save(stock, 100)
    with pytest.raises(UsageError, match="holds steps of Orbax"):
        pccheck.Checkpointer(tmp_path)
    assert os.listdir(tmp_path) == ["100"]


def test_where_a_checkpointer_saves_no_steps_of_orbax_are_laid(tmp_path):
    """The Checkpointer was refused after that (seen)."""
    with pccheck.Checkpointer(tmp_path) as ck:
        ck.save(0, {"a": np.ones(3)})
    with open_manager(tmp_path) as manager, pytest.raises(UsageError, match=r"holds checkpoints of a pccheck\.Check"):
        save(manager, 0)
    with pccheck.Checkpointer(tmp_path) as ck:
        assert ck.restore().step == 0


def test_an_exported_model_beside_is_no_step(tmp_path):
    with ocp.StandardCheckpointer() as single:
        single.save(tmp_path / "base_model", {"w": np.ones(4)})
    (tmp_path / "CHECK").mkdir()
    with open_manager(tmp_path) as manager:
        assert save(manager, 0)
    other = tmp_path / "other"
    with ocp.StandardCheckpointer() as single:
        single.save(other / "base_model", {"w": np.ones(4)})
    with pccheck.Checkpointer(other) as ck:
        ck.save(0, {"a": np.ones(3)}).durable.result(60)


@pytest.mark.parametrize(
    "options",
    [{"atomicity_options": COMMIT_FILE}, {"temporary_path_class": ocp.path.atomicity.AtomicRenameTemporaryPath}],
)
def test_closing_after_a_refused_save_takes_nothing_of_another_managers(tmp_path, options, monkeypatch):
    """It took the folder of that manager's save in flight, which had the same step (seen)."""
    dumps, over = json.dumps, threading.Event()

    def slowly(value, *arguments, **given):
        if value == {"n": 1}:
            over.wait(60)
        return dumps(value, *arguments, **given)

    monkeypatch.setattr(json, "dumps", slowly)
    refused, other = open_manager(tmp_path, **options), open_manager(tmp_path, **options)
    try:
        with pytest.raises(UnsupportedLeafError):
            refused.save(5, args=ocp.args.Composite(a=ocp.args.StandardSave({"w": object()}), j=ocp.args.JsonSave({})))
        args = ocp.args.Composite(a=ocp.args.StandardSave(state(5)), j=ocp.args.JsonSave({"n": 1}))
        assert other.save(5, args=args)
        refused.close()
    finally:
        over.set()
    with other:
        other.wait_until_finished()
        assert other.durable_steps() == on_disk(tmp_path) == [5]
