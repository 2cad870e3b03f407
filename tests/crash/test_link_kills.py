"""SIGKILL at every named point of a real process with a store of links: every folder that was finished restores."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

import pccheck
from pccheck import links
from pccheck.audit import audit, exit_code
from pccheck.testing.scenario import fingerprint
from tests.crash.processes import POINTS, Server, Told

KILLED = -signal.SIGKILL
TRAINER = Path(__file__).with_name("link_trainer.py")
IN_FLIGHT = 2


@pytest.fixture(scope="module")
def server():
    server = Server(TRAINER)
    yield server
    server.close()


def test_killed_at_every_point(server, tmp_path):
    """One store, killed at each point in turn, each time at another save; between two kills it is always checked."""
    told = Told()
    for number, point in enumerate([*POINTS, "linked", "link-synced"]):
        options = {"directory": str(tmp_path), "point": point, "nth": 1 + number % 4, "in_flight": IN_FLIGHT}
        assert server.train(told, **options) == KILLED, point
        check_what_is_left(tmp_path, told)
    assert told.durable
    assert server.train(told, directory=str(tmp_path), in_flight=IN_FLIGHT) == 0
    check_what_is_left(tmp_path, told)
    store = tmp_path / ".pccheck/default/process-00000"
    assert sorted(os.listdir(store)) == ["CHECK", "runs.json"], "once it was closed, nothing that takes space is left"


def check_what_is_left(directory: Path, told: Told) -> None:
    said = [line.split() for line in told.lines]
    deleting = {int(words[1]) for words in said if words[0] == "deleting"}
    finished = {int(words[1]) for words in said if words[0] == "finished"} - deleting
    here = {int(f.name) for f in directory.iterdir() if (f / "pccheck.json").exists()}
    assert finished <= here, "a finished step is gone"
    for step in here - deleting:
        restored = links.load(directory / str(step))
        assert (restored.step, fingerprint(restored.state).hex()) == (step, told.saving[step])
    reports = audit(directory, verify=True)
    judged = [slot for report in reports for slot in report.slots if not on_its_way(slot, deleting)]
    assert all(slot.verdict != "damaged" for slot in judged)
    assert exit_code(reports) == 0 or deleting or not here
    slots = list((directory / ".pccheck/default/process-00000").glob("slot-*.pcc"))
    assert len(slots) <= IN_FLIGHT
    with pccheck.Checkpointer(directory / ".pccheck/default/process-00000", keep=0, lock_timeout_s=0):
        pass  # opening warns of nothing: warnings are errors in these tests


def on_its_way(slot, deleting: set[int]) -> bool:
    """Tell whether a file is of a step that was being removed when the process was killed."""
    return slot.name.partition("/")[0] in map(str, deleting)
