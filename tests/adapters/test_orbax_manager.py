"""pccheck_orbax.CheckpointManager: what runs at once, what waits, what is kept, what is raised. No clock."""

from __future__ import annotations

import os
import signal
import threading
import time

import numpy as np
import orbax.checkpoint as ocp
import pytest
from orbax.checkpoint import checkpoint_managers as cms
from orbax.checkpoint.checkpoint_manager import StepAlreadyExistsError
from pccheck_orbax.manager import CheckpointManager

from pccheck.errors import OptionError
from tests.adapters.orbax_held import Call, Restore, Save, registry
from tests.adapters.orbax_shared import on_disk


@pytest.fixture
def make(tmp_path):
    """Make managers on one root that are closed at the end, their gates open."""
    made = []

    def manager(in_flight=3, handler_registry=registry, **options):
        given = ocp.CheckpointManagerOptions(**options)
        made.append(CheckpointManager(tmp_path, given, in_flight=in_flight, handler_registry=handler_registry))
        return made[-1]

    yield manager
    for one in made:
        try:
            one.close()
        except Exception:
            pass  # what a test leaves unraised on purpose


@pytest.fixture
def gates():
    """Events by step, all set at the end so that nothing stays held."""
    made = {step: threading.Event() for step in range(20)}
    yield made
    for gate in made.values():
        gate.set()


def becomes(root, steps):
    """Whether the disk comes to hold these steps: what is not kept is deleted in the background."""
    for _ in range(3000):
        if on_disk(root) == steps:
            return True
        time.sleep(0.01)
    return False


def shown(root):
    """What a stock manager of another process would list."""
    with ocp.CheckpointManager(root) as other:
        return other.all_steps()


def save(manager, step, gates=None, **kwargs):
    more = {name: kwargs.pop(name) for name in ("error", "refuse") if name in kwargs}
    gate = None if gates is None else gates[step]
    return manager.save(step, args=Save(np.full(4, step), gate=gate, **more), **kwargs)


def end(manager, gates, *steps):
    """Let saves end, and wait until they are booked."""
    for step in steps:
        gates[step].set()
    for step in steps:
        manager.metrics(step)


def test_isinstance_and_all_of_the_interface(make):
    manager = make()
    assert isinstance(manager, ocp.CheckpointManager)
    assert ocp.AbstractCheckpointManager in type(manager).__mro__
    missing = {n for n in vars(ocp.AbstractCheckpointManager) if n[0] != "_"} - set(dir(manager))
    assert not missing
    stock = {n for n in vars(ocp.CheckpointManager) if n[0] != "_"}
    assert not stock - set(dir(manager))


def test_saves_run_at_once_and_one_more_waits_for_whichever_ends(make, gates):
    manager = make(in_flight=3)
    for step in (1, 2, 3):
        assert save(manager, step, gates)
    assert manager.in_flight_steps() == [1, 2, 3]
    fourth = Call(save, manager, 4, gates)
    assert fourth.blocks()
    gates[2].set()
    assert fourth.ends() is True
    assert manager.in_flight_steps() == [1, 3, 4]
    assert manager.durable_steps() == [2]


def test_one_lane_is_one_save_at_a_time(make, gates):
    manager = make(in_flight=1)
    save(manager, 1, gates)
    second = Call(save, manager, 2, gates)
    assert second.blocks()
    gates[1].set()
    second.ends()


def test_lists_what_is_in_flight_as_stock_does_but_the_disk_shows_what_is_durable(make, gates, tmp_path):
    manager = make(in_flight=2)
    save(manager, 1)
    manager.wait_until_finished()
    save(manager, 2, gates)
    assert manager.all_steps() == [1, 2]
    assert manager.latest_step() == 2
    assert manager.durable_steps() == [1]
    assert manager.is_saving_in_progress()
    assert shown(tmp_path) == [1]
    end(manager, gates, 2)
    assert not manager.is_saving_in_progress()
    assert shown(tmp_path) == [1, 2]


def test_an_older_or_equal_step_is_skipped_and_forced_it_is_an_error(make, gates):
    manager = make()
    assert save(manager, 5, gates)
    assert save(manager, 5) is False
    assert save(manager, 4) is False
    with pytest.raises(StepAlreadyExistsError, match="step 5"):
        save(manager, 5, force=True)
    assert save(manager, 4, gates, force=True)
    assert manager.all_steps() == [4, 5]
    with pytest.raises(ValueError, match="args="):
        manager.save(6)


def test_retention_counts_durable_steps_only(make, gates, tmp_path):
    manager = make(in_flight=3, max_to_keep=1)
    save(manager, 1, gates)
    end(manager, gates, 1)
    save(manager, 2, gates)
    save(manager, 3, gates)
    assert on_disk(tmp_path) == [1]  # two newer ones are in flight, and none of them is worth it yet
    end(manager, gates, 3)
    save(manager, 4, gates)
    assert becomes(tmp_path, [3])
    end(manager, gates, 2, 4)
    assert manager.durable_steps() == [2, 3, 4]
    manager.wait_until_finished()
    assert on_disk(tmp_path) == [4] == manager.all_steps()


@pytest.mark.parametrize("tell", ["save", "wait_until_finished", "check_for_errors", "close", "restore"])
def test_a_failed_save_drops_its_own_step_and_is_raised_once(make, gates, tmp_path, tell):
    manager = make(in_flight=3, max_to_keep=1)
    save(manager, 1, gates)
    end(manager, gates, 1)
    save(manager, 2, gates, error=OSError("no space"))
    save(manager, 3, gates)
    gates[2].set()
    while manager.in_flight_steps() != [3]:
        pass
    assert manager.all_steps() == [1, 3]
    gates[3].set()
    asks = {
        "save": lambda: save(manager, 4),
        "restore": lambda: manager.restore(2),
    }
    with pytest.raises(OSError, match="no space") as failure:
        asks.get(tell, lambda: getattr(manager, tell)())()
    assert any("step 2" in note for note in failure.value.__notes__)
    if tell == "close":
        return
    manager.check_for_errors()  # once
    manager.wait_until_finished()
    assert manager.all_steps() == on_disk(tmp_path) == [3]
    assert not [n for n in os.listdir(tmp_path) if "tmp" in n], "the failed save's folder is gone"
    assert save(manager, 4)
    manager.wait_until_finished()
    assert shown(tmp_path) == [4]


def test_only_the_newest_good_step_stands_in_for_failed_ones(make, gates, tmp_path):
    manager = make(in_flight=2, max_to_keep=1)
    save(manager, 1)
    manager.wait_until_finished()
    for step in (2, 3):
        save(manager, step, gates, error=OSError(f"failed {step}"))  # held: a save raises what failed before it began
    for step in (2, 3):
        gates[step].set()
    with pytest.raises(BaseExceptionGroup) as group:
        manager.wait_until_finished()
    assert [str(e) for e in group.value.exceptions] == ["failed 2", "failed 3"]
    assert manager.all_steps() == shown(tmp_path) == [1]
    assert save(manager, 2), "a failed step may be tried again"
    manager.wait_until_finished()
    assert shown(tmp_path) == [2]


def test_what_save_itself_raises_costs_that_step_alone(make, gates, tmp_path):
    manager = make(in_flight=2)
    save(manager, 1, gates)
    for _ in range(3):
        with pytest.raises(TypeError, match="not this") as failure:
            save(manager, 2, refuse=TypeError("not this"))
        assert any("step 2" in note for note in failure.value.__notes__)
    assert manager.in_flight_steps() == [1]
    assert save(manager, 2)
    gates[1].set()
    manager.wait_until_finished()
    assert shown(tmp_path) == [1, 2]


def test_a_background_thread_that_is_cancelled_is_a_failure(make, tmp_path):
    manager = make()
    save(manager, 1, error=SystemExit("the handler's thread ended"))
    with pytest.raises(SystemExit) as failure:
        manager.wait_until_finished()
    assert any("step 1" in note for note in failure.value.__notes__)
    assert manager.all_steps() == shown(tmp_path) == []


@pytest.mark.parametrize("ask", ["restore", "delete", "metadata", "item_metadata", "metrics"])
def test_what_concerns_a_step_in_flight_waits_for_that_save_alone(make, gates, ask):
    manager = make(in_flight=3, best_fn=lambda m: m["loss"])
    for step in (1, 2, 3):
        save(manager, step, gates, metrics={"loss": float(step)})
    call = Call(getattr(manager, ask), 2)
    assert call.blocks()
    gates[2].set()
    result = call.ends()
    assert manager.in_flight_steps() == [1, 3]
    if ask == "restore":
        assert result.tolist() == [2, 2, 2, 2]
    if ask == "delete":
        assert manager.all_steps() == [1, 3]
    if ask == "metadata":
        assert result.metrics == {"loss": 2.0}
    if ask == "item_metadata":
        assert result == {"dtype": "int64"}
    if ask == "metrics":
        assert result == {"loss": 2.0}


def test_restore_of_a_durable_step_waits_for_nobody(make, gates):
    manager = make(in_flight=2)
    save(manager, 1)
    manager.wait_until_finished()
    save(manager, 2, gates)
    assert manager.restore(1).tolist() == [1] * 4
    save(manager, 3, gates)
    assert manager.restore(1, args=Restore()).tolist() == [1] * 4  # all lanes are busy
    latest = Call(manager.restore, None)
    assert latest.blocks()
    gates[3].set()
    assert latest.ends().tolist() == [3] * 4


def test_restore_of_nothing_and_from_elsewhere(make, tmp_path):
    manager = make()
    with pytest.raises(FileNotFoundError, match="no steps"):
        manager.restore(None)
    save(manager, 7)
    manager.wait_until_finished()
    other = CheckpointManager(tmp_path / "other", handler_registry=registry)
    with other:
        assert other.restore(7, directory=tmp_path).tolist() == [7] * 4
        assert other.restore(None, directory=tmp_path).tolist() == [7] * 4
        assert other.all_steps() == []


def test_a_deleted_step_can_be_saved_again_on_any_lane(make, tmp_path):
    manager = make(in_flight=3)
    for _ in range(7):
        assert save(manager, 1)
        manager.wait_until_finished()
        manager.delete(1)
        assert on_disk(tmp_path) == [] == manager.all_steps()
        with pytest.raises(FileNotFoundError, match="step 1"):
            manager.delete(1)
    manager.wait_until_finished()
    assert os.listdir(tmp_path / ".pccheck_trash") == []


def test_steps_that_were_there_are_kept_deleted_and_restored_like_own_ones(make, tmp_path):
    with ocp.CheckpointManager(tmp_path, handler_registry=registry()) as stock:
        for step in (1, 2, 3):
            stock.save(step, args=Save(np.full(4, step)))
    manager = make(in_flight=2, max_to_keep=2)
    assert manager.durable_steps() == [1, 2, 3]
    assert manager.restore(2).tolist() == [2] * 4
    save(manager, 4)
    manager.wait_until_finished()
    assert manager.all_steps() == on_disk(tmp_path) == [3, 4]
    manager.delete(3)
    save(manager, 3, force=True)
    manager.wait_until_finished()
    assert shown(tmp_path) == [3, 4]


def test_reload_sees_what_others_did(make, gates, tmp_path):
    manager = make()
    save(manager, 1)
    manager.wait_until_finished()
    save(manager, 5, gates)
    with ocp.CheckpointManager(tmp_path, handler_registry=registry()) as stock:
        stock.save(2, args=Save(np.full(4, 2)))
        stock.wait_until_finished()
        stock.delete(1)
    assert manager.all_steps() == [1, 5]
    manager.reload()
    assert manager.all_steps() == [2, 5]
    assert manager.all_steps(read=True) == [2, 5]
    end(manager, gates, 5)
    manager.delete(2)
    assert on_disk(tmp_path) == [5]


def test_an_interrupted_wait_loses_no_step(make, gates, tmp_path):
    manager = make(max_to_keep=1)
    save(manager, 1, gates)
    waiting = threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT))
    waiting.start()
    with pytest.raises(KeyboardInterrupt):
        manager.wait_until_finished()
    assert manager.in_flight_steps() == [1]
    gates[1].set()
    manager.wait_until_finished()
    assert manager.durable_steps() == shown(tmp_path) == [1]
    save(manager, 2)
    manager.wait_until_finished()
    assert on_disk(tmp_path) == [2]


class Remember:
    """A policy that says yes, and remembers what it was told."""

    def __init__(self):
        self.told = []

    def should_save(self, step, previous_steps, *, context):
        self.told.append((step.step, [p.step for p in previous_steps], context.is_saving_in_progress))
        return True


def test_a_save_is_in_progress_means_that_all_lanes_are_busy(make, gates):
    policy = Remember()
    manager = make(in_flight=2, save_decision_policy=policy)
    for step in (1, 2):
        save(manager, step, gates)
    third = Call(save, manager, 3, gates)
    gates[1].set()
    third.ends()
    assert policy.told == [(1, [], False), (2, [1], False), (3, [1, 2], True)]


def test_continuous_checkpointing_skips_only_where_a_save_would_wait(make, gates):
    manager = make(in_flight=2, save_decision_policy=cms.ContinuousCheckpointingPolicy())
    assert [save(manager, step, gates) for step in (1, 2, 3)] == [True, True, False]
    end(manager, gates, 1)
    assert save(manager, 4, gates)


def test_metrics_of_a_policy_alone_are_kept_and_rank(make, tmp_path):
    best = cms.BestN(get_metric_fn=lambda m: m["loss"], reverse=True, n=1)
    manager = make(preservation_policy=cms.AnyPreservationPolicy([best, cms.LatestN(1)]))
    for step, loss in enumerate([3.0, 1.0, 2.0, 5.0]):
        save(manager, step, metrics={"loss": loss})
    manager.wait_until_finished()
    assert manager.all_steps() == [1, 3]
    manager.close()
    again = make(preservation_policy=cms.AnyPreservationPolicy([best, cms.LatestN(1)]))
    assert again.metrics(1) == {"loss": 1.0}
    assert again.best_step() == 1
    save(again, 4, metrics={"loss": 4.0})
    again.wait_until_finished()
    assert again.all_steps() == [1, 4]


def test_items_of_several_kinds_and_their_metadata(tmp_path):
    state, position = Save(np.arange(3)), ocp.args.JsonSave({"position": 7})
    args = ocp.args.Composite(state=state, data=position)
    with CheckpointManager(tmp_path, metadata={"run": "a"}, handler_registry=registry, in_flight=2) as manager:
        manager.save(1, args=args, custom_metadata={"lr": 0.1})
        back = manager.restore(1, args=ocp.args.Composite(state=Restore(), data=ocp.args.JsonRestore()))
        assert back.state.tolist() == [0, 1, 2]
        assert back.data == {"position": 7}
        assert manager.metadata(1).custom_metadata == {"lr": 0.1}
        assert manager.metadata().custom_metadata == {"run": "a"}
    with ocp.CheckpointManager(tmp_path) as stock:
        assert stock.restore(1, args=ocp.args.Composite(data=ocp.args.JsonRestore())).data == {"position": 7}


def test_orbax_own_handlers_shared_by_the_lanes_and_its_older_arguments(tmp_path):
    shared = ocp.handlers.DefaultCheckpointHandlerRegistry()
    handler = ocp.StandardCheckpointHandler()
    shared.add("default", ocp.args.StandardSave, handler)
    shared.add("default", ocp.args.StandardRestore, handler)
    ways = {
        "registry": ({"handler_registry": shared}, {"args": lambda x: ocp.args.StandardSave(x)}),
        "handlers": (
            {"item_handlers": ocp.StandardCheckpointHandler()},
            {"args": lambda x: ocp.args.StandardSave(x)},
        ),
        "checkpointers": ({"checkpointers": ocp.PyTreeCheckpointer()}, {"items": lambda x: x}),
    }
    for name, (arguments, how) in ways.items():
        ((keyword, wrap),) = how.items()
        with CheckpointManager(tmp_path / name, in_flight=3, **arguments) as manager:
            for step in range(6):
                tree = {"a": np.full(300, step), "b": np.arange(step, step + 9.0)}
                assert manager.save(step, **{keyword: wrap(tree)})
        with ocp.CheckpointManager(tmp_path / name, item_handlers=ocp.PyTreeCheckpointHandler()) as stock:
            for step in range(6):
                tree = stock.restore(step)
                assert (tree["a"] == step).all()
                assert (tree["b"] == np.arange(step, step + 9.0)).all()


def test_the_arguments_are_checked_where_they_are_given(tmp_path):
    for arguments in ({"in_flight": 0}, {"in_flight": 65}, {"in_flight": "2"}):
        with pytest.raises(OptionError, match="in_flight"):
            CheckpointManager(tmp_path, handler_registry=registry, **arguments)
    with pytest.raises(OptionError, match="item_handlers"):
        CheckpointManager(tmp_path, handler_registry=registry, item_handlers=ocp.StandardCheckpointHandler())
    with pytest.raises(OptionError, match="chunk_bytes"):
        CheckpointManager(tmp_path, handler_registry=registry, chunk_bytes=4096)
    options = ocp.CheckpointManagerOptions(max_to_keep=3)
    assert not os.listdir(tmp_path)
    with CheckpointManager(tmp_path, options, handler_registry=registry) as second:
        assert second.in_flight == 2
        assert "durable []" in repr(second)
