"""FSDP2 on four ranks that are killed, one or all, anywhere: they resume where all ranks agreed, or later, together."""

from __future__ import annotations

import itertools
import json
import random
import re
import signal
import threading
from dataclasses import dataclass, field

import pytest

pytest.importorskip("torch")

import pccheck
from pccheck.audit import audit
from pccheck.errors import UsageError
from tests.adapters.fsdp_jobs import Jobs

WORLD = 4
POINTS = [
    "filling", "captured", "written", "data-synced", "sealed", "record-synced",
    "published", "word-synced", "reported", "agreed", "released",
]  # fmt: skip
COORDINATORS = ["store", "directory"]
MISSED = re.compile("closed by peer|reset by peer|Broken pipe|RanksError|RankTimeoutError|CoordinatorLostError")


@pytest.fixture(scope="module")
def jobs():
    jobs = Jobs()
    yield jobs
    jobs.close()


@dataclass
class Run:
    """What the ranks of one folder told, over several lives."""

    saving: dict[tuple[int, int], str] = field(default_factory=dict)  # (rank, step) -> digest of all that the rank has
    agreed: int = -1
    begun: dict[int, tuple[int, str]] = field(default_factory=dict)  # in this life: rank -> step to go on with, digest
    errors: list[str] = field(default_factory=list)

    def hear(self, word: str, rest: list[str]) -> None:
        if word == "saving":
            rank, step, digest = rest
            known = self.saving.setdefault((int(rank), int(step)), digest)
            assert known == digest, f"step {step} was trained differently on rank {rank} than before"
        elif word == "durable":
            self.agreed = max(self.agreed, int(rest[1]))
        elif word == "begin":
            self.begun[int(rest[0])] = (int(rest[1]), rest[2])
        elif word == "error":
            self.errors.append(json.loads(rest[1]))

    def check_begun(self, agreed: int) -> None:
        """Hold what the ranks of a life began with against what those of earlier ones told."""
        assert len({step for step, _ in self.begun.values()}) <= 1, f"the ranks began apart: {self.begun}"
        for rank, (start, digest) in self.begun.items():
            assert start > agreed, f"all ranks had agreed on step {agreed}, and begin with {start}"
            assert start == 0 or digest == self.saving[rank, start - 1], f"rank {rank} has another state"
        self.begun = {}


class Killing:
    """Kills ranks of a job: some time after a word was heard so often, or as the job itself does at a point.

    What is left when the first has died is killed some time later: a launcher needs time to notice.
    """

    def __init__(self, jobs: Jobs, chance: random.Random) -> None:
        self.jobs = jobs
        self.victims = [chance.randrange(WORLD)] if chance.random() < 0.7 else list(range(WORLD))
        self.point = chance.choice(POINTS) if chance.random() < 0.5 else None
        self.nth = chance.randrange(1, 6)
        self.word = chance.choice(["pids", "begin", "durable", "durable"])
        self.count = {"pids": 1, "begin": 1}.get(self.word, chance.randrange(1, 9))
        self.delay_s = chance.uniform(0.0, 1.0 if self.word == "pids" else 0.1)
        self.grace_s = chance.choice([0.0, chance.uniform(0.0, 1.0)])
        self.timers: list[threading.Timer] = []

    def hear(self, word: str, rest: list[str]) -> None:
        if word == self.word and self.point is None:
            self.count -= 1
            if self.count == 0:
                self._later(self.delay_s, self.victims)
        elif word == "exit" and len(self.timers) < 2:
            self._later(self.grace_s, range(WORLD))

    def _later(self, delay_s: float, ranks) -> None:
        self.timers.append(threading.Timer(delay_s, self.jobs.kill, [ranks]))
        self.timers[-1].start()

    def __str__(self) -> str:
        where = f"at the {self.nth}. {self.point!r}" if self.point else f"{self.delay_s:.3f} s after {self.word!r}"
        return f"SIGKILL of {self.victims} {where}, of the rest {self.grace_s:.3f} s later"


def live(jobs, folder, told, killing=None, **job):
    """One life of the job, held against the ones before; give the status of each rank."""
    agreed = told.agreed

    def hear(word, rest):
        told.hear(word, rest)
        if killing:
            killing.hear(word, rest)

    if killing:
        job |= {"point": killing.point, "nth": killing.nth, "victims": killing.victims}
    ended = jobs.run(hear, scene="train_until_killed", world=WORLD, folder=folder, **job)
    for timer in killing.timers if killing else []:
        timer.join()
    told.check_begun(agreed)
    return ended


def check_what_is_left(folder, told):
    """Nothing is damaged, and the newest checkpoint that all ranks hold is no older than what they agreed on."""
    try:
        reports = audit(folder / "ckpt", verify=True)
    except UsageError:  # it died before there was a store
        assert told.agreed == -1
        return
    assert not any(report.damaged for report in reports), reports
    if told.agreed >= 0:
        with pccheck.open(folder / "ckpt") as view:
            assert view.latest() >= told.agreed


def killed_again_and_again(jobs, folder, coordinators, seed, kills):
    chance, told = random.Random(seed), Run()
    for number, coordinator in zip(range(kills), itertools.cycle(coordinators), strict=False):
        killing = Killing(jobs, chance)
        in_flight = chance.choice([1, 2, 3])
        ended = live(jobs, folder, told, killing, coordinator=coordinator, in_flight=in_flight, steps=1000)
        about = f"kill {number} of seed {seed} over {coordinator}, {in_flight} in flight: {killing}"
        assert any(ended[victim] == -signal.SIGKILL for victim in killing.victims), f"{about}: {ended} {told.errors}"
        for error in told.errors:  # of those that live on for a while: the dead are missed
            assert MISSED.search(error.splitlines()[-1]), f"{about}: {error}"
        check_what_is_left(folder, told)
        told.errors.clear()
    ended = live(jobs, folder, told, coordinator=coordinators[0], in_flight=2, steps=2)
    assert not told.errors, told.errors[0]
    assert ended == dict.fromkeys(range(WORLD), 0)
    assert told.agreed > 0


def test_killed_four_times(jobs, tmp_path):
    """Over a torch store that outlives the ranks, and over a shared directory, in turn: no life knows of the last."""
    killed_again_and_again(jobs, tmp_path, COORDINATORS, 3, 4)


@pytest.mark.slow
@pytest.mark.parametrize("coordinator", COORDINATORS)
def test_killed_twenty_times(jobs, tmp_path, coordinator):
    killed_again_and_again(jobs, tmp_path, [coordinator], 5, 20)
