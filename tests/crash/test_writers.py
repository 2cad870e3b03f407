"""Two writers, a writer that lost its lock, and a store that is removed under its writer."""

from __future__ import annotations

import contextlib
import os
import shutil
import threading

import pytest

import pccheck
from pccheck.audit import audit, exit_code
from pccheck.errors import MediumError, StoreGoneError, StoreTaken
from pccheck.storage.directory import Directory
from pccheck.testing.checkpointer_system import CheckpointerSystem
from pccheck.testing.disk import SimulatedDisk
from pccheck.testing.scenario import fingerprint, make_state
from pccheck.testing.simulated import SimulatedVolume
from tests.crash.processes import Server, Told, wait_for

CHUNK = 64 * 1024


def test_the_second_writer_is_told_who_the_first_is(tmp_path):
    with pccheck.Checkpointer(tmp_path) as first:
        first.save(0, make_state(0)).durable.result(30)
        with pytest.raises(StoreTaken, match=f"pid {os.getpid()}") as caught:
            pccheck.Checkpointer(tmp_path)
        assert str(tmp_path) in caught.value.path
        first.save(1, make_state(1)).durable.result(30)
    with pccheck.Checkpointer(tmp_path) as second:
        assert second.restore().step == 1


def test_a_writer_in_another_process(tmp_path):
    server, told, seen = Server(), Told(), []

    def open_too(word, rest):
        if word == "pid":
            seen.append(rest[0])
        elif word == "durable" and len(seen) == 1:
            with pytest.raises(StoreTaken) as caught:
                pccheck.Checkpointer(tmp_path, lock_timeout_s=0)
            seen.append(caught.value.holder)

    assert server.train(told, open_too, directory=str(tmp_path), saves=200) == 0
    server.close()
    assert f"pid {seen[0]}," in seen[1]


ZOMBIE_POINTS = ["captured", "written", "data-synced", "sealed", "record-synced", "published"]


@pytest.mark.parametrize("point", ZOMBIE_POINTS)
def test_a_zombie_loses_to_the_new_writer(tmp_path, point):
    """A writer is held back in the middle of a commit; its lock goes; another opens, saves; then it goes on."""
    volume = Directory(str(tmp_path), create=True, write=True)

    def damaged() -> int:
        return exit_code(audit(tmp_path, verify=True))

    take_over(point, volume, lambda: tmp_path, damaged)


@pytest.mark.parametrize("point", ZOMBIE_POINTS)
def test_a_zombie_loses_where_there_are_no_locks(point):
    """The same on a file system without flock: the fence alone."""
    disk = SimulatedDisk(locks=False)
    system = CheckpointerSystem()
    take_over(point, SimulatedVolume(disk), lambda: SimulatedVolume(disk), lambda: system.audit(SimulatedVolume(disk)))


def take_over(point, volume, elsewhere, damaged) -> None:
    held, go_on, armed = threading.Event(), threading.Event(), threading.Event()

    def at(here: str) -> None:
        if here == point and armed.is_set():
            held.set()
            assert go_on.wait(30)

    options = {"in_flight": 1, "keep": 1, "chunk_bytes": CHUNK}
    zombie = pccheck.Checkpointer(volume, **options, _at=at)
    zombie.save(0, make_state(0)).durable.result(30)
    armed.set()
    late = zombie.save(1, make_state(1, "zombie"))
    assert held.wait(30)
    volume.unlock()
    with pccheck.Checkpointer(elsewhere(), **options) as new:
        restored = new.restore()
        assert fingerprint(restored.state) == fingerprint(make_state(restored.step, "zombie" if restored.step else ""))
        state = make_state(1, "new")
        new.save(1, state).durable.result(30)
        go_on.set()
        if point == "published":  # it was durable before the other came, who adopted it
            assert restored.step == 1
            late.durable.result(30)
        else:
            with pytest.raises(StoreTaken):
                late.durable.result(30)
            assert late.outcome == "failed"
        with pytest.raises(StoreTaken):
            zombie.save(2, make_state(2, "zombie")).durable.result(30)
        assert not damaged()
        assert fingerprint(new.restore().state) == fingerprint(state)
        new.save(3, make_state(3, "new")).durable.result(30)
        assert not damaged()
    with contextlib.suppress(StoreTaken):  # where it was not raised by a save
        zombie.close()
    assert not damaged()
    with pccheck.Checkpointer(elsewhere(), **options) as after:
        assert fingerprint(after.restore().state) == fingerprint(make_state(3, "new"))


@pytest.mark.parametrize("in_flight", [1, 3])
def test_a_store_that_is_removed_under_its_writer(tmp_path, in_flight):
    directory = tmp_path / "store"
    ck = pccheck.Checkpointer(directory, in_flight=in_flight)
    for step in range(in_flight + 1):
        ck.save(step, make_state(step)).durable.result(30)
    shutil.rmtree(directory)
    late = ck.save(10, make_state(10))
    with pytest.raises((StoreGoneError, MediumError)):
        late.durable.result(30)
    assert late.outcome == "failed"
    with pytest.raises(MediumError):
        ck.close()


def test_a_store_that_is_removed_during_a_save(tmp_path):
    directory = tmp_path / "store"
    ck = pccheck.Checkpointer(directory, _at=lambda point: point == "sealed" and shutil.rmtree(directory))
    save = ck.save(0, make_state(0))
    wait_for(save.durable.done, "the save to end")
    assert isinstance(save.durable.exception(), MediumError)
    with pytest.raises(MediumError):
        ck.close()
