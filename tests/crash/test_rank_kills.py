"""SIGKILL of one rank, or of all, at every named point of the commit: all go on from one step, and none is lost."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from pccheck.audit import audit
from tests.crash.processes import POINTS, Server

TRAINER = Path(__file__).with_name("rank_trainer.py")


@dataclass
class Told:
    """What the ranks of one root told, over several lives of the job."""

    saving: dict[tuple[int, int], str] = field(default_factory=dict)  # (rank, step) -> fingerprint
    durable: int = 0  # the greatest counter that any rank was told to be durable
    restored: dict[int, tuple[int, int, str] | None] = field(default_factory=dict)  # of this life, by rank
    exits: dict[int, int] = field(default_factory=dict)
    failed: dict[int, dict[int, list[str]]] = field(default_factory=dict)  # rank -> step -> error and ranks it names
    committed: dict[int, set[int]] = field(default_factory=dict)  # rank -> steps

    def hear(self, line: str) -> bool:
        rank, *words = line.split()
        if rank == "over":
            return False
        r, what = int(rank), words[0]
        if what == "saving":
            assert self.saving.setdefault((r, int(words[1])), words[2]) == words[2]
        elif what == "durable":
            self.durable = max(self.durable, int(words[1]))
            self.committed.setdefault(r, set()).add(int(words[2]))
        elif what == "restored":
            self.restored[r] = (int(words[1]), int(words[2]), words[3])
        elif what == "fresh":
            self.restored[r] = None
        elif what == "failed":
            self.failed.setdefault(r, {})[int(words[1])] = words[2:]
        elif what == "exit":
            self.exits[r] = int(words[1])
        return True


class Ranks:
    """Starts all ranks of a job, again and again."""

    def __init__(self) -> None:
        self.server = Server(TRAINER, deadline_s=120.0)

    def live(self, told: Told, directory: Path, world: int, **options: object) -> None:
        """Run one life of a job, and hold what it restored against what was told before."""
        due = told.durable
        told.restored, told.exits, told.failed, told.committed = {}, {}, {}, {}
        self.server.ask({"directory": str(directory), "world": world, "victims": [], **options}, told.hear)
        found = set(told.restored.values())
        assert len(found) <= world
        steps = {None if f is None else f[:2] for f in found}
        assert len(steps) <= 1, f"ranks went on from different steps: {told.restored}"
        for rank, one in told.restored.items():
            assert (one[0] if one else 0) >= due, f"{due} was durable, {one} was restored"
            if one:
                saved = [told.saving[key] for key in told.saving if key[1] == one[1]]
                assert one[2] in saved, f"rank {rank} restored what nobody saved"


@pytest.fixture(scope="module")
def ranks():
    ranks = Ranks()
    yield ranks
    ranks.server.close()


def check_no_damage(root: Path) -> None:
    assert not [report for report in audit(root, verify=True) if report.damaged]


@pytest.mark.parametrize("victims", [[0], [1], [0, 1, 2]], ids=["first", "one", "all"])
@pytest.mark.parametrize(
    ("in_flight", "keep"),
    [(2, 1), pytest.param(1, 1, marks=pytest.mark.slow), pytest.param(3, 2, marks=pytest.mark.slow)],
)
def test_killed_at_every_point(ranks, tmp_path, victims, in_flight, keep):
    """One root, its job killed at each point in turn, each time at another save."""
    told = Told()
    for number, point in enumerate(POINTS):
        nth = 1 + number % 3
        ranks.live(told, tmp_path, 3, point=point, nth=nth, victims=victims, in_flight=in_flight, keep=keep)
        assert any(told.exits[v] for v in victims), f"nobody was killed at {point}: {told.exits}"
        check_no_damage(tmp_path)
    ranks.live(told, tmp_path, 3, saves=2, leave=True)
    assert told.exits == {0: 0, 1: 0, 2: 0}
    assert set(told.restored) == {0, 1, 2}
    assert told.durable


def test_killed_at_the_very_first_save(ranks, tmp_path):
    for point in ("filling", "sealed", "published", "reported", "agreed"):
        told, root = Told(), tmp_path / point
        ranks.live(told, root, 2, point=point, victims=[1], in_flight=1)
        ranks.live(told, root, 2, saves=1, leave=True)
        assert told.exits == {0: 0, 1: 0}


def test_killed_while_pinning(ranks, tmp_path):
    told = Told()
    for nth in (1, 2):
        ranks.live(told, tmp_path, 2, point="pinned", nth=nth, victims=[1], keep_every=2)
    ranks.live(told, tmp_path, 2, saves=2, leave=True)
    assert told.exits == {0: 0, 1: 0}


def test_killed_and_started_again_with_another_number_of_ranks(ranks, tmp_path):
    told, rnd = Told(), random.Random(3)
    for world in (3, 2, 4, 1, 3):
        point, nth = rnd.choice(POINTS), rnd.randint(2, 4)
        ranks.live(told, tmp_path, world, point=point, nth=nth, victims=[world - 1])
    ranks.live(told, tmp_path, 2, saves=3, leave=True)
    assert told.exits == {0: 0, 1: 0}
    assert not (tmp_path / "rank-00002").exists()


@pytest.mark.slow
def test_killed_at_random_moments(ranks, tmp_path):
    told, rnd = Told(), random.Random(5)
    for _ in range(40):
        victims = rnd.choice([[0], [1], [2], [0, 1, 2]])
        options = {"point": rnd.choice(POINTS), "nth": rnd.randint(1, 6), "in_flight": rnd.choice([1, 2, 3])}
        ranks.live(told, tmp_path, 3, victims=victims, **options)
    ranks.live(told, tmp_path, 3, saves=2, leave=True)
    assert told.exits == {0: 0, 1: 0, 2: 0}


def test_a_rank_that_sleeps_for_ever_is_named_and_the_next_steps_commit(ranks, tmp_path):
    """Case 32: four ranks, of which one never ends one save: the others say so in time, and commit what comes after."""
    told = Told()
    ranks.live(
        told, tmp_path, 4, saves=5, point="sealed", nth=2, victims=[2], sleep=True, agree_timeout_s=2.0, in_flight=2
    )  # fmt: skip
    slept = set.intersection(*(set(told.failed.get(r, {})) for r in (0, 1, 3)))
    assert len(slept) == 1, told.failed
    step = slept.pop()
    for rank in (0, 1, 3):
        assert told.failed[rank][step] == ["RankTimeoutError", "2"]
        assert 4 in told.committed[rank]
        assert step not in told.committed[rank]
    ranks.live(told, tmp_path, 4, saves=1, leave=True)
    assert {one[1] for one in told.restored.values()} == {4}
