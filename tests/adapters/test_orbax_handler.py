"""The handler in Orbax's checkpointers and managers: what it saves, what it refuses, what a failed save leaves."""

from __future__ import annotations

import asyncio
import dataclasses
import errno
import gc
import json
import os
import shutil
import time
from concurrent.futures import CancelledError
from contextlib import suppress

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pccheck_orbax
import pytest
from flax import nnx
from flax.core import FrozenDict
from pccheck_orbax.commits import Commit
from pccheck_orbax.layout import Place, place_of
from pccheck_orbax.staging import Staged

import pccheck
from pccheck.errors import DeadlineError, MismatchError, OptionError, UnsupportedLeafError, UsageError
from tests.adapters.orbax_shared import held, same, slots, state

Save, Restore = pccheck_orbax.Save, pccheck_orbax.Restore


def manager(root, registry=None, **options):
    return ocp.CheckpointManager(
        root, options=ocp.CheckpointManagerOptions(**options), handler_registry=registry or pccheck_orbax.registry()
    )


def saves_with_a_folder_elsewhere(root, name, elsewhere):
    if os.stat(root).st_dev == os.stat(elsewhere).st_dev:
        pytest.skip("needs two file systems")
    (root / name).symlink_to(elsewhere, target_is_directory=True)
    with manager(root, max_to_keep=2) as made:
        for step in range(4):
            made.save(step, args=ocp.args.StandardSave(state(step)))
        made.wait_until_finished()
        assert made.all_steps() == [2, 3]
        assert same(made.restore(3), 3)


# -- where things lie ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("directory", "root", "item", "step"),
    [
        ("/r/7.orbax-checkpoint-tmp/state.orbax-checkpoint-tmp", "/r", "state", 7),
        ("/r/checkpoint_12.orbax-checkpoint-tmp/default.orbax-checkpoint-tmp", "/r", "default", 12),
        ("/r/2031-05-17.orbax-checkpoint-tmp/default.orbax-checkpoint-tmp", "/r", "default", 17),
        ("/r/best.orbax-checkpoint-tmp/x.orbax-checkpoint-tmp", "/r", "x", 0),
        ("/r/99999999999999999999.orbax-checkpoint-tmp/x.orbax-checkpoint-tmp", "/r", "x", 0),
        ("/r/step_3.orbax-checkpoint-tmp", "/r", "default", 3),
        ("/r/7/state", "/r", "state", 7),
    ],
)
def test_the_place_is_told_by_the_folder(directory, root, item, step):
    place = place_of(directory)
    assert (place.root, place.item, place.step) == (root, item, step)
    assert isinstance(place, Place)
    assert place.folder == directory


def test_a_bucket_is_refused():
    with pytest.raises(UsageError, match="file system"):
        place_of("gs://bucket/7/state")


# -- options and args ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "field"),
    [({"keep": 2}, "keep"), ({"coordinator": None}, "coordinator"), ({"in_flight": 0}, "in_flight"),
     ({"snapshot": "fast"}, "snapshot")],
)  # fmt: skip
def test_the_engine_refuses_options_where_it_is_made(options, field):
    with pytest.raises(OptionError) as caught:
        pccheck_orbax.Engine(**options)
    assert caught.value.field == field


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A step with one of each sort of leaf, and a reader of it."""
    root = tmp_path_factory.mktemp("saved")
    tree = {"a": jnp.arange(6.0).reshape(2, 3), "n": np.arange(4), "i": 3, "deep": {"b": jnp.ones(2), "s": "text"}}
    with manager(root) as made:
        made.save(1, args=ocp.args.StandardSave(tree, custom_metadata={"lr": 0.5}))
        made.wait_until_finished()
        yield made


def restored(reader, item, **kwargs):
    return reader.restore(1, args=ocp.args.StandardRestore(item, **kwargs))


LIKE = {"a": jnp.zeros((2, 3)), "n": np.zeros(4, np.int64), "i": 0, "deep": {"b": jnp.zeros(2), "s": ""}}


@pytest.mark.parametrize(
    ("change", "problem", "path"),
    [
        ({"a": jnp.zeros((3, 2))}, "shape", "a"),
        ({"extra": 1}, "missing", "extra"),
        ({"deep": {"b": jnp.zeros(2)}}, "unexpected", "deep/s"),
        ({"a": 0}, "kind", "a"),
        ({"deep": {"b": jnp.zeros(2), "s": 5}}, "type", "deep/s"),
    ],
)
def test_what_does_not_fit_is_a_value_error_that_names_it(saved, change, problem, path):
    with pytest.raises(ValueError, match=path) as caught:
        restored(saved, LIKE | change)
    assert isinstance(caught.value, MismatchError)
    assert [(m.problem, m.path) for m in caught.value.mismatches] == [(problem, path)]


def test_a_placeholder_is_left_out(saved):
    got = restored(saved, LIKE | {"a": ocp.PLACEHOLDER, "deep": {"b": jnp.zeros(2), "s": ...}})
    assert got["a"] is ...
    assert got["deep"]["s"] is ...
    assert (got["deep"]["b"] == 1).all()


def test_a_part_of_the_tree(saved):
    got = saved.restore(1, args=Restore({"deep": {"b": jnp.zeros(2, jnp.bfloat16)}}, partial=True))
    assert set(got) == {"deep"}
    assert got["deep"]["b"].dtype == jnp.bfloat16
    args = ocp.args.PyTreeRestore({"i": 0, "new": 7}, partial_restore=True)
    assert saved.restore(1, args=args) == {"i": 3, "new": 7}


def test_not_strict_cuts_and_pads(saved):
    got = restored(saved, LIKE | {"a": jnp.zeros((3, 2)), "n": np.zeros(6, np.int64)}, strict=False)
    assert np.asarray(got["a"]).tolist() == [[0, 1], [3, 4], [0, 0]]
    assert isinstance(got["a"], jax.Array)
    assert got["n"].tolist() == [0, 1, 2, 3, 0, 0]
    with pytest.raises(MismatchError):
        restored(saved, LIKE | {"a": jnp.zeros(6)}, strict=False)


def test_restore_args_of_pytree_restore(saved):
    sharding = jax.sharding.SingleDeviceSharding(jax.devices()[3])
    how = {
        "a": ocp.ArrayRestoreArgs(sharding=sharding, dtype=jnp.bfloat16),
        "n": ocp.RestoreArgs(restore_type=np.ndarray, dtype=np.float32),
        "i": ocp.RestoreArgs(restore_type=np.ndarray),
        "deep": {"b": ocp.RestoreArgs(restore_type=np.ndarray), "s": ocp.RestoreArgs()},
    }
    for item in (None, LIKE):
        got = saved.restore(1, args=ocp.args.PyTreeRestore(item, restore_args=how))
        assert (got["a"].dtype, got["a"].sharding) == (jnp.bfloat16, sharding)
        assert (type(got["n"]), got["n"].dtype) == (np.ndarray, np.float32)
        assert type(got["deep"]["b"]) is np.ndarray
        assert got["deep"]["s"] == "text"
        assert got["i"] == 3


@pytest.mark.parametrize(
    ("args", "name"),
    [
        (ocp.args.PyTreeRestore(LIKE, transforms={}), "transforms"),
        (ocp.args.PyTreeRestore(LIKE, legacy_transform_fn=print), "legacy_transform_fn"),
        (ocp.args.StandardRestore(LIKE, support_layout=True), "support_layout"),
    ],
)
def test_what_is_not_honoured_is_refused_by_name(saved, args, name):
    with pytest.raises(UsageError, match=name):
        saved.restore(1, args=args)


def test_metadata_describes_the_item_and_is_a_target(saved):
    found = saved.item_metadata(1)
    assert found.custom_metadata == {"lr": 0.5}
    assert (found["a"].shape, found.tree["a"].dtype, found["n"].dtype) == ((2, 3), jnp.float32, np.int64)
    assert isinstance(found["a"], ocp.metadata.ArrayMetadata)
    assert isinstance(found["i"], ocp.metadata.ScalarMetadata)
    assert isinstance(found["deep"]["s"], ocp.metadata.StringMetadata)
    assert found["deep"]["b"].name == "deep.b"
    got = restored(saved, found)
    assert type(got["n"]) is np.ndarray
    assert got["deep"]["s"] == "text"
    assert np.asarray(got["a"]).tolist() == [[0, 1, 2], [3, 4, 5]]
    cast = jax.tree.map(lambda leaf: leaf, found)
    cast["a"].dtype = jnp.bfloat16
    assert restored(saved, cast)["a"].dtype == jnp.bfloat16


def test_save_args_cast_and_a_missing_item_is_refused(tmp_path):
    with manager(tmp_path) as made:
        how = {"x": ocp.SaveArgs(dtype=jnp.bfloat16), "y": None}
        made.save(1, args=ocp.args.PyTreeSave({"x": jnp.ones(3), "y": np.ones(3)}, save_args=how))
        made.wait_until_finished()
        got = made.restore(1)
        assert (got["x"].dtype, got["y"].dtype) == (jnp.bfloat16, np.float64)
        with pytest.raises(ValueError, match="no item"):
            made.save(2, args=ocp.args.StandardSave(None))


# -- saving ----------------------------------------------------------------------------------------------------------


def test_errors_of_leaves_come_out_of_save(tmp_path):
    gone = jnp.arange(4.0)
    gone.delete()
    with manager(tmp_path) as made:
        # Each a step of its own: of a save that raised, Orbax goes on to make the folder, and a retry may meet that.
        for step, bad in enumerate((gone, {1, 2}, np.array([object()]))):
            with pytest.raises(UnsupportedLeafError, match="deep/bad"):
                made.save(step, args=ocp.args.StandardSave({"fine": jnp.ones(3), "deep": {"bad": bad}}))
        made.wait_until_finished()
        made.save(3, args=ocp.args.StandardSave(state(3)))
        made.wait_until_finished()
        assert made.all_steps() == [3]
        assert same(made.restore(3), 3)
    assert held(tmp_path) == 1


@pytest.mark.parametrize("kind", [ocp.Checkpointer, ocp.AsyncCheckpointer])
def test_a_checkpointer_alone(tmp_path, kind):
    with kind(pccheck_orbax.Handler()) as alone:
        for step in range(3):
            alone.save(tmp_path / f"step_{step}", args=Save(state(step)))
        if kind is ocp.AsyncCheckpointer:
            alone.wait_until_finished()
        assert same(alone.restore(tmp_path / "step_1"), 1)
        assert same(alone.restore(tmp_path / "step_1", args=Restore(state(0))), 1)
        with pytest.raises(ValueError, match="exists"):
            alone.save(tmp_path / "step_1", args=Save(state(9)))
            alone.wait_until_finished()
        alone.save(tmp_path / "step_1", args=Save(state(9)), force=True)
        if kind is ocp.AsyncCheckpointer:
            alone.wait_until_finished()
        assert same(alone.restore(tmp_path / "step_1"), 9)
    assert held(tmp_path) == 3
    with pccheck.open(tmp_path / "step_1") as view:
        assert view.latest() == 1
        assert (view["w"] == 9).all()


def test_the_standard_checkpointer(tmp_path):
    with pccheck_orbax.StandardCheckpointer() as alone:
        alone.save(tmp_path / "a", {"x": jnp.ones(3)}, custom_metadata={"run": 7})
        alone.wait_until_finished()
        like = {"x": jax.ShapeDtypeStruct((3,), jnp.float16)}
        assert alone.restore(tmp_path / "a", like)["x"].dtype == jnp.float16
        assert alone.metadata(tmp_path / "a").custom_metadata == {"run": 7}
        with pytest.raises(ValueError, match="shape"):
            alone.restore(tmp_path / "a", {"x": jnp.ones(2)})


def test_without_async_checkpointing(tmp_path):
    with manager(tmp_path, enable_async_checkpointing=False, max_to_keep=1) as made:
        for step in (1, 2):
            made.save(step, args=ocp.args.StandardSave(state(step)))
            assert same(made.restore(step), step)
    assert held(tmp_path) == 1


def test_a_root_on_which_links_are_impossible(tmp_path, fast_path):
    saves_with_a_folder_elsewhere(tmp_path, ".pccheck", fast_path)
    assert (tmp_path / "3" / "default" / "rank-00000.pcc").stat().st_nlink == 1
    assert len(slots(tmp_path)) <= 2  # free again, and used again


# -- stores ----------------------------------------------------------------------------------------------------------


def test_managers_of_one_process_share_a_store(tmp_path):
    first, second = manager(tmp_path), manager(tmp_path)
    first.save(1, args=ocp.args.StandardSave(state(1)))
    first.wait_until_finished()
    second.reload()
    second.save(2, args=ocp.args.StandardSave(state(2)))  # the first one is still open
    second.wait_until_finished()
    other = pccheck_orbax.registry(engine=pccheck_orbax.Engine(in_flight=5))
    third = manager(tmp_path, other)
    with pytest.raises(UsageError, match="are asked for"):
        third.save(3, args=ocp.args.StandardSave(state(3)))
    for each in (first, second):
        each.close()
    # A stock manager's own first metadata of the save that was refused may come late, and fail its next one (seen).
    fourth = manager(tmp_path, other)
    fourth.save(3, args=ocp.args.StandardSave(state(3)))
    fourth.wait_until_finished()
    assert fourth.all_steps() == [1, 2, 3]
    fourth.close()
    with suppress(FileNotFoundError):
        third.close()


def test_a_root_that_was_removed_and_made_again(tmp_path):
    root = tmp_path / "run"
    first = manager(root)
    first.save(1, args=ocp.args.StandardSave(state(1)))
    first.wait_until_finished()
    shutil.rmtree(root)  # without closing, as notebooks do
    with manager(root) as second:
        second.save(2, args=ocp.args.StandardSave(state(2)))
        second.wait_until_finished()
        assert same(second.restore(2), 2)
    first.close()
    assert held(root) == 1


def test_a_registry_may_be_used_again_after_its_manager_was_closed(tmp_path):
    registry = pccheck_orbax.registry("state")
    for step in (1, 2):
        with manager(tmp_path, registry) as made:
            made.save(step, args=ocp.args.Composite(state=ocp.args.StandardSave(state(step))))
    assert held(tmp_path) == 2


def until(reached):
    deadline = time.monotonic() + 30
    while not reached() and time.monotonic() < deadline:
        time.sleep(0.005)
    assert reached()


# -- saves that Orbax gives up ---------------------------------------------------------------------------------------


class Failing(ocp.AsyncCheckpointHandler):
    """Another item's handler: fails at once, or in the background."""

    async def async_save(self, directory, args):
        if args.when == "now":
            raise OSError("no connection")
        return [self] if args.when == "later" else []

    def result(self, timeout=None):
        raise OSError("connection lost")

    def cancel(self):
        return False

    def save(self, directory, args):
        raise NotImplementedError

    def restore(self, directory, args=None):
        return None


@ocp.args.register_with_handler(Failing, for_save=True, for_restore=True)
@dataclasses.dataclass
class Fail(ocp.args.CheckpointArgs):
    when: str = "never"


@pytest.mark.parametrize("when", ["now", "later"])
@pytest.mark.parametrize("again", [3, 2], ids=["the next step", "the same step"])
def test_what_another_item_spoilt_gives_its_slot_back(tmp_path, when, again):
    def save(step, fails="never"):
        made.save(step, args=ocp.args.Composite(state=ocp.args.StandardSave(state(step)), x=Fail(fails)))

    with manager(tmp_path) as made:
        save(1)
        with pytest.raises(OSError, match="connection"):
            save(2, when)
            made.wait_until_finished()
        until((tmp_path / "2.orbax-checkpoint-tmp" / "x.orbax-checkpoint-tmp").exists)  # or two make it at once
        for step in (again, 4, 5):
            gc.collect()  # Orbax holds its futures until the next save, and the error's traceback does in a circle
            save(step)
            made.wait_until_finished()
        assert same(made.restore(again).state, again)
        assert held(tmp_path) == len(made.all_steps()) == 4
    assert held(tmp_path) == 4


def test_a_missing_file_fails_the_step(tmp_path):
    handler = pccheck_orbax.Handler()
    with pytest.raises(pccheck.errors.RanksError):
        handler.finalize(tmp_path)
    with pytest.raises(UsageError, match=r"pccheck\.json"):
        handler.restore(tmp_path)
    handler.close()


def staged(root):
    return sorted((root / ".pccheck_staged").iterdir())


def test_a_save_that_was_called_off_leaves_nothing(tmp_path):
    """Orbax cancels the future, or is never there to move the file."""
    engine, folder = pccheck_orbax.Engine(), tmp_path / "1.tmp"
    place = engine.stage(str(tmp_path), "x")
    save = engine.save(str(tmp_path), "x", 1, state(1), place.path)
    commit = Commit(save, place, str(folder))
    save.durable.result(30)
    assert held(tmp_path) == 1
    with pytest.raises(DeadlineError, match="to make"):
        commit.result(timeout=0.02)  # nobody makes its folder
    assert not commit.cancel()
    assert (held(tmp_path), staged(tmp_path)) == (0, [])
    folder.mkdir()
    with pytest.raises(CancelledError):
        commit.result(timeout=30)
    engine.close()


def test_a_save_whose_place_is_gone_fails(tmp_path):
    engine = pccheck_orbax.Engine()
    place = engine.stage(str(tmp_path), "x")
    place.drop()
    save = engine.save(str(tmp_path), "x", 1, state(1), place.path)
    with pytest.raises(pccheck.errors.MediumError):
        Commit(save, place, str(tmp_path)).result(timeout=30)
    engine.close()
    assert held(tmp_path) == 0


def test_what_was_staged_before_a_crash_is_removed_at_the_next_start(tmp_path):
    engine = pccheck_orbax.Engine()
    for item in ("x", "y"):
        place = engine.stage(str(tmp_path), item)
        engine.save(str(tmp_path), item, 1, state(1), place.path).durable.result(30)
    engine.close()
    for step in ("2.orbax-checkpoint-tmp", "3"):  # what renames commit, and what a file does (COMMIT_FILE)
        (tmp_path / step / "x").mkdir(parents=True)
        (tmp_path / step / "_CHECKPOINT_METADATA").write_text(
            json.dumps({"init_timestamp_nsecs": 1, "commit_timestamp_nsecs": None})
        )
        os.link(next(tmp_path.glob(".pccheck_staged/x.0.*/*")), tmp_path / step / "x" / "rank-00000.pcc")
    assert held(tmp_path) == 2
    engine.open(str(tmp_path), "x")
    engine.close()
    assert [folder.name[:4] for folder in staged(tmp_path)] == ["y.0."]
    assert [file.parts[-2][:4] for file in tmp_path.rglob("rank-*.pcc")] == ["y.0."]


def test_many_steps_keep_the_slots_few(tmp_path):
    with manager(tmp_path, max_to_keep=2) as made:
        for step in range(12):
            made.save(step, args=ocp.args.StandardSave(state(step)))
        made.wait_until_finished()
        until(lambda: len(slots(tmp_path)) <= 2 + 2)  # max_to_keep + in_flight
    assert held(tmp_path) == 2


@pytest.mark.parametrize("record", [True, False])
def test_a_committed_step_that_lost_its_list_and_a_copy_in_progress_are_let_be(tmp_path, record):
    with manager(tmp_path) as made:
        made.save(1, args=ocp.args.StandardSave(state(1)))
        made.wait_until_finished()
    (tmp_path / "1" / "default" / "pccheck.json").unlink()
    (tmp_path / "backup" / "default").mkdir(parents=True)  # cp -r, which has not come to the other files yet
    shutil.copy(tmp_path / "1" / "default" / "rank-00000.pcc", tmp_path / "backup" / "default")
    if record:
        shutil.copy(tmp_path / "1" / "_CHECKPOINT_METADATA", tmp_path / "backup")
    with manager(tmp_path) as made:
        made.save(2, args=ocp.args.StandardSave(state(2)))
        made.wait_until_finished()
    for step in ("1", "2", "backup"):
        assert (tmp_path / step / "default" / "rank-00000.pcc").is_file()
    handler = pccheck_orbax.Handler()
    handler.finalize(tmp_path / "1" / "default")  # all of it was there
    assert same(handler.restore(tmp_path / "1" / "default"), 1)


def test_a_step_that_lost_all_our_files_is_told_as_ours(tmp_path):
    with manager(tmp_path) as made:
        made.save(1, args=ocp.args.StandardSave(state(1)))
        made.wait_until_finished()
        for name in ("pccheck.json", "rank-00000.pcc"):
            (tmp_path / "1" / "default" / name).unlink()
        with pytest.raises(UsageError, match=r"pccheck\.json"):
            made.restore(1, args=ocp.args.StandardRestore(state(1)))


@pytest.mark.parametrize("by", ["close", "save"])
def test_what_orbax_never_came_for_goes_though_an_error_holds_it(tmp_path, by):
    handler = pccheck_orbax.Handler()

    def begin(step):
        folder = tmp_path / f"{step}.orbax-checkpoint-tmp" / "x.orbax-checkpoint-tmp"
        (commit,) = asyncio.run(handler.async_save(folder, Save(state(step))))
        until(lambda: any(place.iterdir() for place in staged(tmp_path)))
        return commit

    held_by_an_error = begin(1)  # Orbax could not make its folder, and says so to others
    held_by_an_error._save.durable.result(30)
    later = begin(2) if by == "save" else None
    if later is not None:
        later._save.durable.result(30)
        assert (held(tmp_path), len(staged(tmp_path))) == (1, 1)
    handler.close()
    assert (held(tmp_path), staged(tmp_path)) == (0, [])
    with pytest.raises(CancelledError):
        held_by_an_error._staged.move(str(tmp_path))


def test_a_step_whose_folder_is_removed_fails_at_once(tmp_path):
    engine, folder = pccheck_orbax.Engine(), tmp_path / "1.orbax-checkpoint-tmp" / "x.orbax-checkpoint-tmp"
    folder.parent.mkdir()
    place = engine.stage(str(tmp_path), "x")
    commit = Commit(engine.save(str(tmp_path), "x", 1, state(1), place.path), place, str(folder))
    commit._save.durable.result(30)
    with pytest.raises(DeadlineError):
        commit.result(timeout=0.05)
    folder.parent.rmdir()
    with pytest.raises(CancelledError, match="was removed"):
        commit.result()  # not after 300 s
    place.drop()
    engine.close()


def test_a_staging_folder_on_another_file_system(tmp_path, fast_path):
    saves_with_a_folder_elsewhere(tmp_path, ".pccheck_staged", fast_path)
    names = {file.name for file in (tmp_path / "3" / "default").iterdir()} - {"commit_success.txt"}
    assert sorted(names) == [
        "_METADATA", "pccheck.json", "rank-00000.pcc",
    ]  # fmt: skip
    assert list(fast_path.iterdir()) == []


def test_a_move_that_fails_otherwise_is_told(tmp_path):
    place = Staged(str(tmp_path), "x", 0)
    (tmp_path / "to").mkdir()
    with pytest.raises(FileNotFoundError) as caught:
        place.move(str(tmp_path / "to"))
    assert caught.value.errno == errno.ENOENT


# -- keys, cycles, words ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "keys", [[("a", "b"), ("a", "c")], [None], [1, 2], [1.5, 2.0], [True, False], [b"x"], ["a/b", ""]], ids=repr
)
def test_trees_of_all_sorts_of_keys_are_their_own_target(tmp_path, keys):
    tree = FrozenDict({key: jnp.arange(3.0) + n for n, key in enumerate(keys)})
    with manager(tmp_path) as made:
        made.save(1, args=ocp.args.StandardSave({"deep": tree}))
        made.wait_until_finished()
        got = made.restore(1, args=ocp.args.StandardRestore({"deep": tree}))["deep"]
        assert jax.tree.structure(got) == jax.tree.structure(tree)
        for key in keys:
            assert (got[key] == tree[key]).all()
        assert sorted(map(repr, made.restore(1)["deep"])) == sorted(map(repr, tree))


@pytest.mark.parametrize("args", [ocp.args.StandardSave, ocp.args.PyTreeSave])
def test_a_module_that_contains_itself_is_refused(tmp_path, args):
    model = nnx.Linear(2, 2, rngs=nnx.Rngs(0))
    model.me = model
    with manager(tmp_path) as made:
        with pytest.raises(UnsupportedLeafError, match="contains itself"):
            made.save(1, args=args({"model": model}))
        made.save(2, args=ocp.args.StandardSave(state(2)))
        made.wait_until_finished()
        assert made.all_steps() == [2]


def test_save_args_beside_none(tmp_path):
    item = {"a": None, "b": jnp.ones(3)}
    with manager(tmp_path) as made:
        narrow = jax.tree.map(lambda _: ocp.SaveArgs(dtype=jnp.bfloat16), item)
        for step, how in enumerate((narrow, {"a": None, "b": None})):
            made.save(step, args=ocp.args.PyTreeSave(item, save_args=how))
            made.wait_until_finished()
        assert made.restore(0)["a"] is None
        assert [made.restore(step)["b"].dtype for step in (0, 1)] == [jnp.bfloat16, jnp.float32]


def test_a_mismatch_is_told_in_the_words_of_orbax(saved):
    for args in (ocp.args.StandardRestore({"a": 0}), ocp.args.StandardRestore(LIKE | {"deep": {"b": "", "s": 5}})):
        with pytest.raises(MismatchError) as caught:
            saved.restore(1, args=args)
        assert "like" not in str(caught.value)
        assert "the target" in str(caught.value)
        assert "partial_restore=True" in str(caught.value)


def test_complex_numbers_never_become_real_ones(tmp_path):
    values = {"jax": jnp.ones(1, jnp.complex64), "numpy": np.ones(1, np.complex128), "number": 1j}
    targets = [jnp.ones(1), np.ones(1), 1.0, jax.ShapeDtypeStruct((1,), jnp.int32)]
    with manager(tmp_path) as made:
        made.save(1, args=ocp.args.StandardSave(values))
        made.wait_until_finished()
        for name in values:
            for target in targets:
                if name == "number" and not isinstance(target, float):
                    target = target[0] if hasattr(target, "__getitem__") else jax.ShapeDtypeStruct((), target.dtype)
                with pytest.raises(MismatchError) as caught:
                    made.restore(1, args=ocp.args.StandardRestore(values | {name: target}))
                assert [m.path for m in caught.value.mismatches] == [name]
        wide = made.restore(1, args=ocp.args.StandardRestore(values | {"jax": np.ones(1, np.complex128)}))
        assert wide["jax"].dtype == np.complex128
