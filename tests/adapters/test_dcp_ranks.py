"""pccheck's DCP backend on several ranks, in real processes over gloo; what each rank does is in dcp_ranks.py."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.adapters.jobs import free_port, outputs

PROGRAM = Path(__file__).with_name("dcp_ranks.py")
pytestmark = pytest.mark.slow


def run(scenes, world, folder):
    """Run scenes on some ranks; give what each rank found, by scene."""
    port = free_port()
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-W", "ignore", str(PROGRAM), ",".join(scenes), *map(str, (rank, world, port, folder))],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment,
        )
        for rank in range(world)
    ]  # fmt: skip
    ended = outputs(ranks, 250)
    told = "\n".join(f"rank {i}: {err[-6000:]}" for i, (_, err) in enumerate(ended) if ranks[i].returncode)
    assert not told, told
    found = [json.loads(out.splitlines()[-1]) for out, _ in ended]
    return {scene: [of_rank[scene] for of_rank in found] for scene in scenes}


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory):
    """What two ranks did, one scene after the other, and where."""
    folder = tmp_path_factory.mktemp("dcp")
    return folder, run(["stock_hang", "many_in_flight", "strict_and_failing"], 2, folder)


def test_stock_saves_at_once_over_one_group_fail(two_ranks):
    _, found = two_ranks
    assert all(rank["failed"] for rank in found["stock_hang"]), "stock DCP mixes up saves that share a process group"


def test_ours_are_in_flight_at_once_in_any_order(two_ranks):
    _, found = two_ranks
    for rank in found["many_in_flight"]:
        assert sorted(rank["ends"]) == list(range(1, 9))
        assert rank["ends"].index(1) > rank["ends"].index(2), "the second save overtook the first"
        assert rank["steps"] == [*range(1, 9), 100]
        assert rank["wrong"] == {str(step): [] for step in rank["steps"]}


@pytest.mark.parametrize("world", [1, 2, 3])
def test_what_two_ranks_saved_loads_on_others(two_ranks, world):
    folder, _ = two_ranks
    for rank in run(["load"], world, folder)["load"]:
        assert rank["wrong"] == {f"{step} {how}": [] for step in (8, 100) for how in ("ours", "stock", "restore")}


def test_what_one_rank_cannot_do_all_hear_of(two_ranks):
    _, found = two_ranks
    for number, rank in enumerate(found["strict_and_failing"]):
        assert "cannot save w of type object" in rank["refused"]
        assert "ranks save different steps: [3, 4]" in rank["odd"]
        assert f"own-{0}: the checkpoint has" in rank["unused"]
        assert "own-1: the checkpoint has" in rank["unused"]
        assert rank["untouched"] == [0] * 4
        assert rank["step"] == 5
        assert rank["mine"] == [[1] * 4, number, [number] * 2]
        assert rank["other"] == [1 - number] * 2, "what only another rank saved can be loaded"
        assert "2 ranks save, but the Checkpointer is of 1" in rank["alone"]
        assert rank["no_dist"] == []
        assert rank["stock"] == []
        assert rank["twice"] == []


def test_damage_of_one_rank_keeps_all_from_loading(tmp_path):
    for rank in run(["damaged"], 2, tmp_path)["damaged"]:
        assert "is damaged" in rank["error"]
        assert not rank["touched"]
        assert rank["step"] == [1, [2]]
        assert rank["wrong"] == []


def test_a_rank_that_dies_costs_the_save_under_way(tmp_path):
    alive, dead = run(["death"], 2, tmp_path)["death"]
    assert dead is None
    assert "rank 1" in alive["failed"]
    assert alive["loaded"] == [[1], 0]


def test_replicas_are_stored_once(tmp_path):
    for number, rank in enumerate(run(["replicas"], 4, tmp_path)["replicas"]):
        assert rank["wrong"] == []
        assert rank["step"] == 2
        assert rank["stored"] == rank["whole"]
        assert rank["half"] == [number, [number] * 3], "groups of some of the ranks save for themselves"
