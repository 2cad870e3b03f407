"""The crash explorer over stores of links: whatever was linked durably is whole after any crash."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable

import pytest

from pccheck.testing.crash import explore
from pccheck.testing.link_system import LinkSaver, LinkSystem
from pccheck.testing.scenario import WAIT_S, Run, Scenario


def in_turn(count: int) -> Scenario:
    """Saves one after the other; every link is promised to be there from the moment that its save is durable."""

    def scenario(run: Run) -> None:
        with run.open() as saver:
            assert run.restore(saver) is None
            for step in range(count):
                run.save(saver, step, wait=True)
                run.disk.mark("pinned", step)

    return scenario


def forget_each(run: Run, count: int, forget: Callable[[LinkSaver, int], object]) -> None:
    """Save so many steps, and forget each, in whatever way, once the next is there."""
    with run.open() as saver:
        for step in range(count):
            run.save(saver, step, wait=True)
            run.disk.mark("pinned", step)
            if step >= 1:
                run.disk.mark("unpinning", step - 1)
                forget(saver, step - 1)


def deleting(run: Run) -> None:
    """Each step is deleted by its user, not durably, some saves later, as a manager of checkpoints does."""
    forget_each(run, 4, LinkSaver.delete)


def recycling(run: Run) -> None:
    """Each step is deleted, durably, and its file becomes a slot again, which a later step is written to."""

    def recycle(saver: LinkSaver, step: int) -> None:
        until = time.monotonic() + WAIT_S
        while not saver.recycle(step):  # the slots of what was saved are given up a little later
            assert time.monotonic() < until
            time.sleep(0.001)

    forget_each(run, 5, recycle)
    created = [op for op in run.disk.log if op.kind == "create" and op.name.startswith("slot-")]
    assert len(created) == 2, created


def at_once(run: Run) -> None:
    """Two saves at once, each held up a little at each point."""
    chance = random.Random(1)
    run.system.inner.at = lambda point: time.sleep(chance.uniform(0, 0.003))
    with run.open() as saver:
        for step in range(4):
            run.save(saver, step)
    run.system.inner.at = None


def restarting(run: Run) -> None:
    for base in (0, 10):
        with run.open() as saver:
            run.restore(saver)
            for step in range(base, base + 2):
                run.save(saver, step, wait=True)
                run.disk.mark("pinned", step)


def growing(run: Run) -> None:
    with run.open() as saver:
        for step, data_bytes in enumerate((4000, 40_000, 40_000)):
            run.save(saver, step, wait=True, data_bytes=data_bytes)


def held(report) -> None:
    assert report.ok, "\n\n".join(map(str, report.violations[:3]))  # pytest cuts long objects short
    assert report.positions > 50
    assert report.images >= report.distinct > 10


@pytest.mark.parametrize(("in_flight", "links"), [(1, True), (1, False), (2, True)])
def test_saves_in_turn(in_flight, links):
    held(explore(in_turn(in_flight + 2), LinkSystem(in_flight=in_flight, links=links)))


@pytest.mark.parametrize("links", [True, False], ids=["linked", "copied"])
@pytest.mark.parametrize(
    ("scenario", "in_flight"), [(deleting, 1), (at_once, 2), (restarting, 1), (growing, 1)],
    ids=lambda value: getattr(value, "__name__", ""),
)  # fmt: skip
def test_other_histories(scenario, in_flight, links):
    held(explore(scenario, LinkSystem(in_flight=in_flight, links=links), resumes=()))


def test_files_that_become_slots_again():
    held(explore(recycling, LinkSystem(in_flight=2), after_power_loss=20))


@pytest.mark.parametrize("sync", ["gone", "emptied"])
def test_a_file_becomes_a_slot_again_once_its_old_name_and_record_are_gone_for_ever(sync):
    """Else a power loss brings the name back, over what was written since; or a slot that calls itself sealed."""
    report = explore(recycling, LinkSystem(in_flight=2), mutate=sync, stop_at="I2")
    assert report.violated["I2"], report


def test_power_loss_during_recovery_from_power_loss():
    held(explore(in_turn(3), LinkSystem(in_flight=1), after_power_loss=30))


@pytest.mark.parametrize(
    ("sync", "links", "invariant"),
    [
        ("data", True, "I2"),
        ("record", True, "I1"),
        ("link", True, "I1"),
        ("word", True, "I1"),  # a counter would be used again
        ("copy", False, "I1"),
        ("link", False, "I1"),
    ],
)
def test_each_sync_is_needed(sync, links, invariant):
    report = explore(in_turn(3), LinkSystem(in_flight=1, links=links), mutate=sync, stop_at=invariant)
    assert report.violated[invariant], report


def test_bytes_that_were_linked_are_never_written_again():
    """Of every file that ever had a name outside of the store, no byte changes after the first such name was made."""
    taken, done = [], threading.Event()

    def scenario(run: Run) -> None:
        with run.open() as saver:
            for step in range(6):
                run.save(saver, step, wait=True)
                saver.delete(step)
        taken.extend(run.disk.log)
        done.set()

    explore(scenario, LinkSystem(in_flight=1), resumes=(), limit=1, samples=1)
    assert done.is_set()
    linked = set()
    for op in taken:
        if op.kind == "link" and op.name.startswith("out-"):
            linked.add(op.inode)
        assert not (op.kind in ("write", "size") and op.inode in linked), op
    assert len(linked) == 6
