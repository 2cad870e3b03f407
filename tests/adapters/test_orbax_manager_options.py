"""Every field of CheckpointManagerOptions: honoured as a stock manager does, or refused by its name; none ignored."""

from __future__ import annotations

import dataclasses
import datetime
import os
import stat
import threading

import numpy as np
import orbax.checkpoint as ocp
import pytest
from orbax.checkpoint import checkpoint_managers as cms
from pccheck_orbax.durable import DurableRename
from pccheck_orbax.manager import CheckpointManager

from pccheck.errors import OptionError
from tests.adapters.orbax_held import Save, registry

ZERO = datetime.timedelta(0)
LOSSES = [5.0, 1.0, 4.0, None, 3.0, 6.0, 2.0]
BEST = cms.BestN(get_metric_fn=lambda m: m["loss"], reverse=True, n=2, keep_checkpoints_without_metrics=False)
COMMIT_FILE = ocp.options.AtomicityOptions(mode=ocp.options.AtomicityMode.COMMIT_FILE)
RENAME = ocp.options.AtomicityOptions(mode=ocp.options.AtomicityMode.ATOMIC_RENAME)
ONE_PREFIX = ocp.options.MultiprocessingOptions(barrier_sync_key_prefix="mine")
EACH_ITS_OWN = ocp.options.MultiprocessingOptions(primary_host=None)
PREFIXED = ocp.path.step.standard_name_format(step_prefix="at", step_format_fixed_length=4)


def loss(metrics):
    return metrics["loss"]


# What a user may set, by the field that it is about. Each is run with a stock manager, too, and must come out alike.
SET = {
    "save_interval_steps": [{"save_interval_steps": 2}],
    "max_to_keep": [{"max_to_keep": 1}, {"max_to_keep": 3}, {"max_to_keep": None}],
    "keep_time_interval": [{"max_to_keep": 1, "keep_time_interval": ZERO}],
    "keep_period": [{"max_to_keep": 2, "keep_period": 3}],
    "best_fn": [{"best_fn": loss}, {"best_fn": loss, "max_to_keep": 2}],
    "best_mode": [{"best_fn": loss, "best_mode": "min", "max_to_keep": 2}],
    "keep_checkpoints_without_metrics": [
        {"best_fn": loss, "max_to_keep": 2, "keep_checkpoints_without_metrics": keep} for keep in (True, False)
    ],
    "step_prefix": [{"step_prefix": "at", "max_to_keep": 2}],
    "step_format_fixed_length": [{"step_format_fixed_length": 6, "max_to_keep": 2}],
    "step_name_format": [{"step_name_format": PREFIXED, "max_to_keep": 2}],
    "create": [{"create": True}],
    "cleanup_tmp_directories": [{"cleanup_tmp_directories": True}],
    "save_on_steps": [{"save_interval_steps": 5, "save_on_steps": {2, 3}}],
    "single_host_load_and_broadcast": [{"single_host_load_and_broadcast": True, "max_to_keep": 2}],
    "todelete_subdir": [{"todelete_subdir": "old", "max_to_keep": 2}],
    "enable_background_delete": [{"enable_background_delete": True, "max_to_keep": 2}],
    "num_deletion_threads": [{"num_deletion_threads": 3, "max_to_keep": 2}],
    "read_only": [{"read_only": True}],
    "enable_async_checkpointing": [{"enable_async_checkpointing": False, "max_to_keep": 2}],
    "async_options": [{"async_options": ocp.AsyncOptions(timeout_secs=60, create_directories_asynchronously=False)}],
    "multiprocessing_options": [{"multiprocessing_options": ONE_PREFIX, "max_to_keep": 2}],
    "should_save_fn": [{"should_save_fn": lambda step, latest: step % 3 == 1 or latest == 4}],
    "file_options": [{"file_options": ocp.options.FileOptions(path_permission_mode=0o750)}],
    "atomicity_options": [{"atomicity_options": COMMIT_FILE, "max_to_keep": 2}, {"atomicity_options": RENAME}],
    "save_root_metadata": [{"save_root_metadata": False}],
    "temporary_path_class": [
        {"temporary_path_class": ocp.path.atomicity.AtomicRenameTemporaryPath, "cleanup_tmp_directories": True},
        {"temporary_path_class": DurableRename},
    ],
    "save_decision_policy": [
        {"save_decision_policy": cms.AnySavePolicy([cms.FixedIntervalPolicy(3), cms.SpecificStepsPolicy([4])])},
        {"save_decision_policy": cms.InitialSavePolicy()},
    ],
    "preservation_policy": [
        {"preservation_policy": cms.LatestN(2)},
        {"preservation_policy": cms.AnyPreservationPolicy([cms.EveryNSteps(2), cms.LatestN(1)])},
        {"preservation_policy": cms.EveryNStepsClosest(3)},
        {"preservation_policy": cms.CustomSteps([1, 6])},
        {"preservation_policy": cms.EveryNSeconds(0)},
        {"preservation_policy": cms.LatestDuration(datetime.timedelta(days=1))},
    ],
    "prevent_write_metrics": [{"best_fn": loss, "max_to_keep": 2, "prevent_write_metrics": True}],
    "enable_should_save_is_saving_in_progress_check": [{"enable_should_save_is_saving_in_progress_check": False}],
    "enable_per_process_directory_creation": [
        {"enable_per_process_directory_creation": True, "multiprocessing_options": EACH_ITS_OWN}
    ],
    "lightweight_initialize": [{"lightweight_initialize": True, "max_to_keep": 2}],
}
# What cannot be honoured, and by which name it is refused.
REFUSED = {
    "todelete_full_path": {"todelete_full_path": "trash/"},
    "max_to_keep": {"max_to_keep": 2, "preservation_policy": cms.LatestN(2)},
    "keep_period": {"keep_period": 2, "preservation_policy": cms.LatestN(2)},
    "keep_time_interval": {"keep_time_interval": ZERO + datetime.timedelta(1), "preservation_policy": cms.LatestN(2)},
}
FIELDS = [field.name for field in dataclasses.fields(ocp.CheckpointManagerOptions)]


def ours(root, options, **arguments):
    return CheckpointManager(root, options, in_flight=3, handler_registry=registry, **arguments)


def stock(root, options, **arguments):
    return ocp.CheckpointManager(root, options=options, handler_registry=registry(), **arguments)


def story(make, root, given):
    """Save seven steps, one after the other, and tell all that a user can see; then again from the disk."""
    told = []
    for losses in (LOSSES, []):
        with make(root, ocp.CheckpointManagerOptions(**given), metadata={"run": 1}) as manager:
            told.append((list(manager.all_steps()), manager.latest_step(), manager.best_step()))
            for step, value in enumerate(losses):
                metrics = None if value is None else {"loss": value}
                told.append((step, manager.should_save(step), manager.save(step, args=Save([step]), metrics=metrics)))
                manager.wait_until_finished()
                told.append((list(manager.all_steps()), manager.latest_step(), manager.best_step()))
            if not given.get("enable_background_delete"):  # the stock manager's disk is behind then
                manager.reload()
            told.append([(step, manager.metrics(step)) for step in manager.all_steps()])
            told.append(manager.metadata().custom_metadata)
    return told, tree(root)


def tree(root):
    """Names and modes of all that is in the root, but for what each of the two has for itself."""
    found = {}
    for folder, folders, files in os.walk(root):
        folders[:] = [name for name in folders if not name.startswith(".pccheck")]
        for name in (*folders, *files):
            path = os.path.join(folder, name)
            found[os.path.relpath(path, root)] = stat.filemode(os.stat(path).st_mode)
    return found


def test_no_field_is_left_out():
    assert set(FIELDS) == {*SET, *REFUSED}


@pytest.mark.parametrize(("name", "given"), [(name, given) for name in FIELDS for given in SET.get(name, [])])
def test_what_a_field_does_is_what_it_does_in_a_stock_manager(fast_path, name, given):
    assert name in given
    for root in ("ours", "stock"):
        (fast_path / root).mkdir(exist_ok="create" not in given) if given.get("read_only") else None
    assert story(ours, fast_path / "ours", given) == story(stock, fast_path / "stock", given)


@pytest.mark.parametrize(("name", "given"), REFUSED.items())
def test_what_cannot_be_honoured_is_refused_by_name(tmp_path, name, given):
    with pytest.raises(OptionError, match=name) as error:
        ours(tmp_path / "root", ocp.CheckpointManagerOptions(**given))
    assert error.value.field == name
    assert not (tmp_path / "root").exists()


def test_a_field_of_a_later_orbax_is_refused_unless_left_alone(tmp_path):
    @dataclasses.dataclass
    class Later(ocp.CheckpointManagerOptions):
        delete_on_sundays: bool = False
        hosts: list = dataclasses.field(default_factory=list)

    with ours(tmp_path / "a", Later(max_to_keep=2)) as manager:
        assert manager.save(1, args=Save([1]))
    for name, value in (("delete_on_sundays", True), ("hosts", [1])):
        with pytest.raises(OptionError, match=name):
            ours(tmp_path / "b", Later(**{name: value}))


def test_the_root_is_not_made_where_that_is_not_asked_for(tmp_path):
    with ours(tmp_path / "none", ocp.CheckpointManagerOptions(create=False)) as manager:
        assert manager.all_steps() == []
    assert not (tmp_path / "none").exists()


def test_read_only_neither_saves_nor_deletes_nor_cleans(tmp_path):
    with stock(tmp_path, ocp.CheckpointManagerOptions()) as writer:
        writer.save(1, args=Save([1]))
    (tmp_path / "2.orbax-checkpoint-tmp").mkdir()
    (tmp_path / ".pccheck_trash").mkdir()
    before = sorted(os.listdir(tmp_path))
    with ours(tmp_path, ocp.CheckpointManagerOptions(read_only=True)) as manager:
        assert manager.save(3, args=Save([3]), force=True) is False
        manager.delete(1)
        assert manager.all_steps() == [1]
        assert manager.restore(None).tolist() == [1]
    assert sorted(os.listdir(tmp_path)) == before


def test_the_first_save_removes_what_a_crash_left_where_that_is_asked_for_and_opening_nothing(tmp_path):
    left = ["3.orbax-checkpoint-tmp", "4.orbax-checkpoint-tmp-whole", "notes.orbax-checkpoint-tmp.txt"]

    def leave():
        for name in ("3.orbax-checkpoint-tmp/default", "4.orbax-checkpoint-tmp-whole", ".pccheck_trash/gone-1/default"):
            (tmp_path / name).mkdir(parents=True, exist_ok=True)
        (tmp_path / "notes.orbax-checkpoint-tmp.txt").touch()

    leave()
    with ours(tmp_path, None) as manager:
        assert manager.all_steps() == []
    assert sorted(os.listdir(tmp_path)) == [".pccheck_trash", *left]
    with ours(tmp_path, ocp.CheckpointManagerOptions(cleanup_tmp_directories=False)) as manager:
        assert manager.save(1, args=Save([1]))
        manager.wait_until_finished()
        assert sorted(os.listdir(tmp_path)) == [".pccheck_trash", "1", *left]
        for step in (3, 4):
            assert manager.save(step, args=Save([step]))
    assert {"3", "4"} <= set(os.listdir(tmp_path))
    leave()
    with ours(tmp_path, None) as manager:
        assert manager.save(5, args=Save([5]))
    assert sorted(os.listdir(tmp_path)) == ["1", "3", "4", "5", "notes.orbax-checkpoint-tmp.txt"]


def test_a_class_of_the_users_has_its_left_folders_removed_as_in_a_stock_manager(tmp_path):
    chosen = ocp.path.atomicity.AtomicRenameTemporaryPath
    options = ocp.CheckpointManagerOptions(temporary_path_class=chosen, cleanup_tmp_directories=True)
    (tmp_path / "3.orbax-checkpoint-tmp").mkdir()
    with ours(tmp_path, options) as manager:
        assert manager.all_steps() == []
        for step in (5, 6, 7):  # one on each lane, while the first may still be cleaning
            assert manager.save(step, args=Save([step]))
        manager.wait_until_finished()
        assert manager.durable_steps() == [5, 6, 7]
    assert sorted(os.listdir(tmp_path)) == ["5", "6", "7"]


@pytest.mark.parametrize("saves", [False, True])
def test_whoever_opens_the_root_meanwhile_takes_nothing_of_what_is_in_flight(tmp_path, saves):
    gate = threading.Event()
    with ours(tmp_path, None) as job:
        assert job.save(1, args=Save([1], gate))
        try:
            with ours(tmp_path, None) as other:
                assert other.all_steps() == []
                if saves:
                    assert other.save(2, args=Save([2]))
        finally:
            gate.set()
        job.wait_until_finished()
        assert job.durable_steps() == [1]
        assert job.restore(1).tolist() == [1]


def test_a_users_callback_and_permission_mode_hold_for_all_lanes(tmp_path):
    seen = []
    options = ocp.CheckpointManagerOptions(
        async_options=ocp.AsyncOptions(post_finalization_callback=lambda: seen.append(1)),
        file_options=ocp.options.FileOptions(path_permission_mode=0o700),
    )
    with ours(tmp_path / "root", options) as manager:
        for step in range(5):
            manager.save(step, args=Save(np.arange(3)))
    assert len(seen) == 5
    for path in (tmp_path / "root", *(tmp_path / "root" / str(step) for step in range(5))):
        assert stat.S_IMODE(path.stat().st_mode) == 0o700
