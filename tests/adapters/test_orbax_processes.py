"""Two processes with two devices each through pccheck_orbax.CheckpointManager: alike, bounded, exact, resharded."""

from __future__ import annotations

import pytest

from tests.adapters.orbax_jobs import job

ROUNDS = [{}, {"absent": 1}, {"kill": 1}, {"kill": 0}, {}]  # each pair resumes what the one before left
TIMEOUT_S = 2
SAVES = 50


@pytest.fixture(scope="module")
def told(tmp_path_factory):
    root = tmp_path_factory.mktemp("processes")
    arguments = {"handlers": "ours", "rounds": ROUNDS, "timeout_s": TIMEOUT_S, "saves": SAVES}
    return job("processes", root=str(root / "root"), log=str(root / "log"), **arguments)


def test_fifty_saves_under_random_delays_end_alike_in_both_processes(told):
    for pair in (told[0], told[-1]):
        first, second = (member["result"] for member in pair["members"])
        assert first == second
        assert first["devices"] == 4
        last = first["steps"][-1]
        assert first["steps"] == sorted({*range(0, last + 1, 20), last - 1, last})
    resumed = told[-1]["members"][0]["result"]
    assert resumed["resumed"] == max(told[-2]["readers"][0]["result"]["steps"])
    assert resumed["steps"][-1] == resumed["resumed"] + SAVES


def test_a_process_that_does_not_come_is_a_time_out_that_says_so(told):
    (left,) = told[1]["members"]
    assert "not all of the processes [0, 1] came to save in" in left["error"]
    assert f"within {TIMEOUT_S} s (AsyncOptions.timeout_secs)" in left["error"]


def test_who_loses_a_process_does_not_hang(told):
    """It raises; or JAX ends it: without process 0 at once, and where a barrier of Orbax's own waits, by heartbeat."""
    for pair, each in zip(told, ROUNDS, strict=True):
        if "kill" in each:
            (left,) = pair["members"]
            assert "hung" not in left
            assert "result" not in left
            assert left == {"died": True} or "Timeout" in left["error"] or "JaxRuntimeError" in left["error"], left


def test_what_is_shown_is_exact_on_one_three_and_two_by_two_devices(told):
    for pair in told:
        one, three = (reader["result"] for reader in pair["readers"])
        assert (one["devices"], three["devices"]) == (1, 3)
        assert one["bad"] == three["bad"] == []
        assert one["steps"] == three["steps"] != []
        assert not [m for m in pair["members"] if "is not what was saved" in m.get("error", "")]


def test_slots_are_bounded(told):
    for pair in told:
        steps = pair["readers"][0]["result"]["steps"]
        pinned = len([s for s in steps if s % 20 == 0])
        for process, slots in pair["readers"][0]["result"]["slots"].items():
            assert slots <= 2 + 3 + 1 + pinned, (process, steps)
