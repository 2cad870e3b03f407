"""pccheck_orbax.CheckpointManager: interrupts, refused saves and bad arguments cost no step but their own."""

from __future__ import annotations

import functools
import os
import random
import signal
import threading

import jax
import numpy as np
import orbax.checkpoint as ocp
import pccheck_orbax
import pytest
from pccheck_orbax.manager import CheckpointManager
from pccheck_orbax.waiting import Call

from pccheck.errors import ClosedError, OptionError
from tests.adapters.orbax_held import Save, registry
from tests.adapters.orbax_shared import on_disk

_OPTIONS = ocp.CheckpointManagerOptions


def args(step):
    return ocp.args.Composite(
        state=ocp.args.StandardSave({"w": np.full(2000, step), "s": step}), data=ocp.args.JsonSave({"s": step})
    )


@pytest.fixture
def interrupts():
    """Give what sets when the next KeyboardInterrupt strikes; None: none any more."""
    armed = False

    def strike(*_):
        if armed:
            raise KeyboardInterrupt

    def arm(after):
        nonlocal armed
        armed = after is not None
        signal.setitimer(signal.ITIMER_REAL, after or 0)

    before = signal.signal(signal.SIGALRM, strike)
    yield arm
    arm(None)
    signal.signal(signal.SIGALRM, before)


@pytest.mark.parametrize("keep", [None, 2])
def test_saves_that_are_interrupted_anywhere_leave_whole_steps_that_the_manager_knows(tmp_path, interrupts, keep):
    chance, struck = random.Random(1), 0
    with CheckpointManager(tmp_path, _OPTIONS(max_to_keep=keep), in_flight=3) as manager:
        for step in range(80):
            try:
                try:
                    interrupts(chance.random() * 0.02 + 1e-6)
                    manager.save(step, args=args(step), force=True)
                    if step % 5 == 4:
                        manager.wait_until_finished()
                finally:
                    interrupts(None)
            except KeyboardInterrupt:
                struck += 1
        manager.save(100, args=args(100))  # no error of an earlier one
        manager.wait_until_finished()
        known = manager.all_steps()
        assert known == manager.durable_steps() == on_disk(tmp_path)
        assert 100 in known
        assert struck
    items = registry_of_items()
    with ocp.CheckpointManager(tmp_path, options=_OPTIONS(read_only=True), handler_registry=items) as stock:
        assert stock.all_steps() == known
        for step in known:
            wanted = ocp.args.Composite(state=ocp.args.StandardRestore(), data=ocp.args.JsonRestore())
            found = stock.restore(step, args=wanted)
            assert (found.state["w"] == step).all()
            assert found.state["s"] == found.data["s"] == step
    assert not [name for name in os.listdir(tmp_path) if "tmp" in name]


def registry_of_items():
    return pccheck_orbax.registry("state")


class Slow:
    """What a handler reads slowly: a copy that takes as long as a test wants."""

    def __init__(self):
        self.begun, self.go = threading.Event(), threading.Event()

    def __array__(self, dtype=None, copy=None):
        self.begun.set()
        assert self.go.wait(60)
        return np.array([1])


@pytest.mark.parametrize("strikes", [1, 2])
def test_an_interrupt_waits_for_the_copy_and_a_second_one_drops_the_step(tmp_path, request, strikes):
    state, struck = Slow(), threading.Semaphore(0)

    def handle(number, frame):
        struck.release()
        raise KeyboardInterrupt

    def strike():
        assert state.begun.wait(60)
        for _ in range(strikes):
            for _ in range(20):  # one that comes just before the main thread falls asleep does not wake it
                signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
                if struck.acquire(timeout=3):  # two signals at once would be one
                    break
        state.go.set()

    request.addfinalizer(functools.partial(signal.signal, signal.SIGINT, signal.signal(signal.SIGINT, handle)))
    with CheckpointManager(tmp_path, in_flight=2, handler_registry=registry) as manager:
        thread = threading.Thread(target=strike)
        thread.start()
        try:
            with pytest.raises(KeyboardInterrupt):
                manager.save(1, args=Save(state))
                thread.join()
        finally:
            thread.join()
        manager.save(2, args=Save([2]))
        manager.wait_until_finished()
        steps = [1, 2] if strikes == 1 else [2]
        assert manager.durable_steps() == steps
        assert on_disk(tmp_path) == steps


def test_a_call_is_made_once_or_withdrawn_with_what_its_maker_set():
    seen = []
    with jax.enable_x64(True), jax.default_device(jax.devices()[0]):
        call = Call(lambda: seen.append((jax.config.jax_enable_x64, jax.config.jax_default_device)))
    assert not call.ended
    threads = [threading.Thread(target=call.run) for _ in range(2)]
    for thread in threads:
        thread.start()
    call.wait()
    for thread in threads:
        thread.join()
    assert seen == [(True, jax.devices()[0])]
    assert not call.withdraw()
    other = Call(seen.clear)
    assert other.withdraw()
    assert other.withdraw()
    other.run()
    other.wait()
    assert len(seen) == 1
    assert "ended" in repr(other)


def test_restore_raises_no_error_of_a_save_that_was_refused(tmp_path, monkeypatch):
    from orbax.checkpoint._src.metadata import checkpoint

    write, full = checkpoint._MetadataStoreImpl.write, []

    def fail(self, path, metadata):
        if full:
            raise OSError(28, "No space left on device", str(path))
        return write(self, path, metadata)

    with CheckpointManager(tmp_path, in_flight=1, handler_registry=registry) as manager:
        manager.save(1, args=Save([1]))
        manager.wait_until_finished()
        monkeypatch.setattr(checkpoint._MetadataStoreImpl, "write", fail)
        full.append(True)
        for step in (2, 3):
            with pytest.raises(OSError, match="no room") as caught:
                manager.save(step, args=Save([step], refuse=OSError("no room")))
            assert f"step {step}" in caught.value.__notes__[0]
            assert manager.restore(1).tolist() == [1]
        full.clear()
        assert manager.save(4, args=Save([4]))
        manager.wait_until_finished()
        assert manager.durable_steps() == [1, 4]


def test_a_best_fn_that_raises_is_told_before_the_save_and_holds_up_no_other(tmp_path):
    options = _OPTIONS(max_to_keep=1, best_fn=lambda metrics: metrics["loss"], best_mode="min")
    with CheckpointManager(tmp_path, options, handler_registry=registry) as manager:
        with pytest.raises(KeyError, match="loss") as caught:
            manager.save(1, args=Save([1]), metrics={"accuracy": 1})
        assert "step 1" in caught.value.__notes__[0]
        assert manager.all_steps() == []
        for step in (2, 3):
            assert manager.save(step, args=Save([step]), metrics={"loss": step})
        manager.wait_until_finished()
        assert manager.durable_steps() == [2]
    other = CheckpointManager(
        tmp_path, _OPTIONS(max_to_keep=1, best_fn=lambda metrics: metrics["other"]), handler_registry=registry
    )
    assert other.save(4, args=Save([4]), metrics={"other": 4})  # what older steps have must not stop a job
    with pytest.raises(KeyError, match="other") as caught:
        other.wait_until_finished()
    assert "none is gone" in caught.value.__notes__[0]
    with pytest.raises(KeyError, match="other"):
        other.close()
    assert sorted(os.listdir(tmp_path)) == ["2", "4"]


def test_save_after_close_names_the_manager(tmp_path):
    manager = CheckpointManager(tmp_path, handler_registry=registry)
    manager.close()
    with pytest.raises(ClosedError, match=str(tmp_path)):
        manager.save(1, args=Save([1]))
    manager.close()


@pytest.mark.parametrize(
    ("name", "hint"), [("in_flite", "in_flight="), ("chunk_byte", "chunk_bytes="), ("max_to_keep", "options=")]
)
def test_an_unknown_argument_is_refused_with_what_was_meant(tmp_path, name, hint):
    with pytest.raises(OptionError, match=hint) as caught:
        CheckpointManager(tmp_path, **{name: 3})
    assert caught.value.field == name


def test_opening_looks_again_where_a_job_deletes_a_step_meanwhile(tmp_path, monkeypatch):
    with CheckpointManager(tmp_path, handler_registry=registry) as manager:
        for step in (1, 2):
            manager.save(step, args=Save([step]))
    names, vanished = type(ocp.path.step.standard_name_format()), []
    find = names.find_all

    def vanish(self, *args, **kwargs):
        if len(vanished) < 3:
            vanished.append(True)
            raise (FileNotFoundError if len(vanished) % 2 else NotADirectoryError)("a job deleted that step")
        return find(self, *args, **kwargs)

    monkeypatch.setattr(names, "find_all", vanish)
    with CheckpointManager(tmp_path, _OPTIONS(read_only=True), handler_registry=registry) as manager:
        assert manager.all_steps() == [1, 2]
    assert len(vanished) == 3
