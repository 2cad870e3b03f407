"""SIGKILL of real processes at every named point of the commit and at random moments: nothing durable is ever lost."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading

import pytest

from tests.crash.processes import POINTS, Server, Told, check_what_is_left, torch_trainer, wait_for

KILLED = -signal.SIGKILL


@pytest.fixture(scope="module")
def server():
    server = Server()
    yield server
    server.close()


@pytest.mark.parametrize(("in_flight", "keep"), [(n, keep) for n in (1, 2, 3) for keep in (1, 2)])
def test_killed_at_every_point(server, tmp_path, in_flight, keep):
    """One store, killed at each point in turn, each time at another save; between two kills it is always checked."""
    told, options = Told(), {"in_flight": in_flight, "keep": keep}
    for number, point in enumerate(POINTS):
        nth = 1 + number % 4
        assert server.train(told, directory=str(tmp_path), point=point, nth=nth, **options) == KILLED, point
        check_what_is_left(tmp_path, told, **options)
    assert told.durable


@pytest.mark.parametrize("point", POINTS)
def test_killed_at_the_very_first_save(server, tmp_path, point):
    told = Told()
    assert server.train(told, directory=str(tmp_path), point=point, nth=1, in_flight=1) == KILLED
    check_what_is_left(tmp_path, told, save_step=1000)


@pytest.mark.parametrize("pipeline", ["native", "portable"])
def test_both_pipelines(server, tmp_path, pipeline):
    if pipeline == "native":
        pytest.importorskip("pccheck._native")
    told = Told()
    for point in ("filling", "written", "sealed", "published"):
        assert server.train(told, directory=str(tmp_path), point=point, nth=2, pipeline=pipeline) == KILLED
        check_what_is_left(tmp_path, told)


def test_killed_while_pinning(server, tmp_path):
    told = Told()
    for nth in (1, 2, 3):
        assert server.train(told, directory=str(tmp_path), point="pinned", nth=nth, keep_every=2) == KILLED
        check_what_is_left(tmp_path, told, keep_every=2)


@pytest.mark.parametrize("seed", [1, 2])
def test_killed_at_random_moments(server, tmp_path, seed):
    """Ten lives, each ended some milliseconds after its start or after one of its first saves became durable."""
    chance, told = random.Random(seed), Told()
    for _ in range(10):
        killing = Killing(after=chance.randrange(6), delay_s=chance.uniform(0.0, 0.02))
        status = server.train(told, killing.hear, directory=str(tmp_path), in_flight=3, keep=2, saves=1000)
        killing.timer.join()
        assert status == KILLED
        check_what_is_left(tmp_path, told, in_flight=3, keep=2)
    assert told.durable


class Killing:
    """Kills a trainer `delay_s` after it told of so many durable saves."""

    def __init__(self, after: int, delay_s: float) -> None:
        self.left, self.delay_s = after, delay_s

    def hear(self, word: str, rest: list[str]) -> None:
        if word == "pid":
            self.timer = threading.Timer(self.delay_s, os.kill, (int(rest[0]), signal.SIGKILL))
        elif word == "durable":
            self.left -= 1
        else:
            return
        if self.left == 0:
            self.timer.start()


def test_inspect_says_that_a_killed_store_is_whole(server, tmp_path):
    told = Told()
    assert server.train(told, directory=str(tmp_path), point="sealed", nth=3) == KILLED
    command = [sys.executable, "-m", "pccheck.cli", "inspect", str(tmp_path), "--verify"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr


# -- with torch and DataLoader workers ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "point", ["sealed", *(pytest.param(p, marks=pytest.mark.slow) for p in POINTS if p != "sealed")]
)
def test_a_torch_trainer_killed_at_a_point(tmp_path, point):
    pytest.importorskip("torch")
    told = Told()
    # The fifth: two are in flight, and the first is durable before the trainer tells of any.
    with torch_trainer(told, directory=str(tmp_path), point=point, nth=5) as (process, _):
        assert process.wait(60) == KILLED
    assert told.durable
    check_what_is_left(tmp_path, told)


def test_workers_hold_neither_lock_nor_pool(tmp_path):
    """The trainer is killed while its DataLoader workers live on: the lock is free at once, the pool was not forked."""
    pytest.importorskip("torch")
    told = Told()
    with torch_trainer(told, directory=str(tmp_path), linger=True) as (process, words):
        wait_for(lambda: "lingering" in words, "the trainer")
        workers = [int(pid) for pid in words["workers"]]
        pools = not_forked(process.pid)
        assert pools, "the trainer has no mapping with MADV_DONTFORK"
        for worker in workers:
            assert not store_files(worker, tmp_path), "a worker holds files of the store"
            assert not pools & ranges(worker), "a worker has the pool"
        assert store_files(process.pid, tmp_path)
        process.kill()
        process.wait(60)
        for worker in workers:
            os.kill(worker, 0)  # still there
        check_what_is_left(tmp_path, told, save_step=1000)


def ranges(pid: int) -> set[str]:
    with open(f"/proc/{pid}/maps") as maps:
        return {line.split()[0] for line in maps}


def not_forked(pid: int) -> set[str]:
    """Give the address ranges of a process that its children do not get."""
    found, here = set(), ""
    with open(f"/proc/{pid}/smaps") as smaps:
        for line in smaps:
            first, *rest = line.split()
            if not first.endswith(":"):
                here = first
            elif first == "VmFlags:" and "dc" in rest:
                found.add(here)
    return found


def store_files(pid: int, directory) -> list[str]:
    found = []
    for number in os.listdir(f"/proc/{pid}/fd"):
        try:
            target = os.readlink(f"/proc/{pid}/fd/{number}")
        except FileNotFoundError:
            continue
        if target.startswith(str(directory)):
            found.append(target)
    return found
