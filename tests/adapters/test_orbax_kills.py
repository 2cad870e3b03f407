"""SIGKILL at random moments, then a stock manager in a new process: all that it shows restores, bit for bit."""

from __future__ import annotations

import pytest

from tests.adapters.orbax_jobs import IN_FLIGHT, job

ROUNDS = 3  # of each case; run with 50 before a release


@pytest.mark.parametrize(
    ("handlers", "keep", "period"),
    [("ours", 1, None), ("ours", 3, None), ("ours", 1, 4), ("ours", 3, 4), ("orbax", 1, 4)],
)
def test_what_a_new_process_shows_after_a_kill_restores(tmp_path, handlers, keep, period):
    told = job(
        "kills", root=str(tmp_path / "root"), handlers=handlers, keep=keep, period=period, rounds=ROUNDS, seed=keep
    )
    seen = told["rounds"]
    assert len(seen) == ROUNDS
    assert not [each for each in seen if each["wrong"]], seen
    assert not [each for each in seen if each["bad"]], seen
    latest = [max(each["steps"], default=-1) for each in seen]
    assert latest == sorted(latest), "a kill took back what was shown"
    assert latest[-1] > 0, "nothing was ever committed: the rounds show nothing"
    for each in seen:  # a kill may come when all of what was in flight is durable, and nothing was dropped for it yet
        assert len(each["steps"]) <= keep + IN_FLIGHT + each["pinned"], each
        assert each["slots"] <= keep + IN_FLIGHT + each["pinned"], each
    settled = told["settled"]["result"]
    last = settled["steps"][-1]
    pinned = [] if period is None else range(0, last + 1, period)
    assert settled["bad"] == []
    assert set(settled["steps"]) <= {*pinned, *range(last - keep + 1, last + 1)}
    assert settled["slots"] <= len(settled["steps"]) + IN_FLIGHT
