"""The crash explorer over the real commit: no crash breaks I1, I2 or I3, and without any one sync some crash does."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable

import pytest

from pccheck.testing.checkpointer_system import CheckpointerSystem
from pccheck.testing.crash import explore
from pccheck.testing.scenario import Run, Scenario, make_state, restore_and_save, save_blindly

CONFIGURATIONS = [(n, keep) for n in (1, 2, 3) for keep in (1, 2)]


# -- scenarios ---------------------------------------------------------------------------------------------------------


def in_turn(count: int) -> Scenario:
    """Saves one after the other, each durable before the next: every slot is used, and some twice."""

    def scenario(run: Run) -> None:
        with run.open() as ck:
            assert run.restore(ck) is None
            for step in range(count):
                run.save(ck, step, wait=True)

    return scenario


def at_once(in_flight: int) -> Scenario:
    """Saves that do not wait for each other, as many under way as may be, each held up a little at each point."""

    def scenario(run: Run) -> None:
        assert isinstance(run.system, CheckpointerSystem)
        chance = random.Random(in_flight)
        run.system.at = lambda point: time.sleep(chance.uniform(0, 0.003))
        with run.open() as ck:
            for step in range(2 * in_flight):
                run.save(ck, step)
        run.system.at = None

    return scenario


def overtaken(point: str) -> Scenario:
    """The first save is held back at a named point until the second is durable: it is superseded."""

    def scenario(run: Run) -> None:
        assert isinstance(run.system, CheckpointerSystem)
        held, go_on = threading.Event(), threading.Event()

        def at(here: str) -> None:
            if here == point and not held.is_set():
                held.set()
                assert go_on.wait(30)

        with run.open() as ck:
            run.save(ck, 0, wait=True)
            run.system.at = at
            slow = run.save(ck, 1)
            assert held.wait(30)
            run.save(ck, 2, wait=True)
            go_on.set()
            slow.durable.result(30)
            run.system.at = None
            assert slow.outcome == "superseded"
            run.save(ck, 3, wait=True)

    return scenario


def pinning(run: Run) -> None:
    with run.open() as ck:
        run.save(ck, 0, wait=True)
        run.pin(ck, 0)
        for step in (1, 2, 3):
            run.save(ck, step, wait=True)
        run.unpin(ck, 0)
        run.save(ck, 4, wait=True)


def keeping_every_second(run: Run) -> None:
    with run.open() as ck:
        for step in range(5):
            run.save(ck, step, wait=True)
            if step % 2 == 0:
                run.disk.mark("pinned", step)


def rolling_back(run: Run) -> None:
    with run.open() as ck:
        for step in range(3):
            run.save(ck, step, wait=True)
        assert run.roll_back(ck, 1).step == 1
        for step in (2, 3):
            run.save(ck, step, wait=True)


def deleting(run: Run) -> None:
    with run.open() as ck:
        for step in range(2):
            run.save(ck, step, wait=True)
        run.delete(ck, 1)
        run.save(ck, 2, wait=True)


def growing(run: Run) -> None:
    """The state is ten times larger after its first step: the slots grow while one of them holds a checkpoint."""
    with run.open() as ck:
        run.save(ck, 0, wait=True, data_bytes=4000)
        run.save(ck, 1, wait=True, data_bytes=40_000)
        run.save(ck, 2, wait=True, data_bytes=40_000)


def restarting(run: Run) -> None:
    for base in (0, 10, 20):
        with run.open() as ck:
            run.restore(ck)
            for step in range(base, base + 2):
                run.save(ck, step, wait=True)


# -- no crash does harm ------------------------------------------------------------------------------------------------


def held(report) -> None:
    assert report.ok, "\n\n".join(map(str, report.violations[:3]))  # pytest cuts long objects short
    print(report)
    assert report.positions > 50
    assert report.images >= report.distinct > 10


@pytest.mark.parametrize(("in_flight", "keep"), CONFIGURATIONS)
def test_saves_in_turn(in_flight, keep):
    held(explore(in_turn(in_flight + keep + 1), CheckpointerSystem(in_flight=in_flight, keep=keep)))


@pytest.mark.parametrize(("in_flight", "keep"), CONFIGURATIONS)
def test_saves_at_once(in_flight, keep):
    held(explore(at_once(in_flight), CheckpointerSystem(in_flight=in_flight, keep=keep)))


@pytest.mark.parametrize(
    ("in_flight", "keep", "count"),
    [(1, 1, 40), (2, 1, 20), *(pytest.param(n, k, 200, marks=pytest.mark.slow) for n, k in CONFIGURATIONS)],
)
def test_power_loss_during_recovery_from_power_loss(in_flight, keep, count):
    system = CheckpointerSystem(in_flight=in_flight, keep=keep)
    held(explore(in_turn(in_flight + keep + 1), system, after_power_loss=count))


@pytest.mark.parametrize("point", ["captured", "data-synced", "sealed", "record-synced"])
def test_a_save_that_is_overtaken(point):
    held(explore(overtaken(point), CheckpointerSystem(in_flight=2, keep=1), resumes=()))


@pytest.mark.parametrize(
    ("scenario", "options"),
    [
        (pinning, {"in_flight": 1, "keep": 1}),
        (keeping_every_second, {"in_flight": 1, "keep": 1, "keep_every": 2}),
        (rolling_back, {"in_flight": 1, "keep": 2}),
        (deleting, {"in_flight": 1, "keep": 2}),
        (growing, {"in_flight": 1, "keep": 1}),
        (restarting, {"in_flight": 2, "keep": 1}),
    ],
    ids=lambda value: value.__name__ if isinstance(value, Callable) else "",
)
def test_other_histories(scenario, options):
    held(explore(scenario, CheckpointerSystem(**options)))


@pytest.mark.parametrize(("in_flight", "keep"), [(1, 1), (2, 2)])
def test_a_restart_that_restores_nothing(in_flight, keep):
    system = CheckpointerSystem(in_flight=in_flight, keep=keep)
    held(explore(in_turn(in_flight + keep + 1), system, resumes=(save_blindly,)))


@pytest.mark.parametrize("data_bytes", [0, 100, 4096, 4096 * 3 + 1])
def test_other_sizes(data_bytes):
    def scenario(run: Run) -> None:
        with run.open() as ck:
            for step in range(3):
                run.save(ck, step, wait=True, data_bytes=data_bytes)

    held(explore(scenario, CheckpointerSystem(in_flight=1, keep=1), resumes=()))


# -- and every sync is needed ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sync", "scenario", "invariant"),
    [
        ("filling", in_turn(3), "I2"),
        ("data", in_turn(3), "I1"),
        ("data", in_turn(3), "I2"),
        ("record", in_turn(3), "I1"),
        ("record", in_turn(3), "I3"),
        ("word", in_turn(3), "I3"),
        ("names", in_turn(3), "I1"),
        ("names of kept", pinning, "I1"),
        ("adopted", in_turn(3), "I1"),
        ("names adopted", in_turn(3), "I1"),
        ("superblock", in_turn(2), "I2"),
        ("opening", in_turn(3), "I3"),
        ("pointed", rolling_back, "I3"),
        (lambda info, purpose: purpose in ("abandoned", "pointed"), rolling_back, "I1"),
        ("withdrawn", deleting, "I1"),
    ],
)
def test_each_sync_is_needed(sync, scenario, invariant):
    """Without it some crash breaks this invariant: the sync does work, and the explorer sees it."""
    report = explore(scenario, CheckpointerSystem(in_flight=1, keep=1), mutate=sync, stop_at=invariant)
    assert report.violated[invariant], report


def test_states_differ_in_every_sector():
    one, other = (make_state(1)["weights"].tobytes(), make_state(2)["weights"].tobytes())
    assert all(one[i : i + 512] != other[i : i + 512] for i in range(0, len(one), 512))
    assert restore_and_save.__doc__
