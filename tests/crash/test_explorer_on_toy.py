"""The explorer itself, on a toy store: it finds nothing where nothing is wrong, and every fault that is planted."""

from __future__ import annotations

import warnings

import pytest

from pccheck.testing.crash import explore
from pccheck.testing.scenario import Run
from tests.crash.toy_store import ToySystem


def three_saves(run: Run) -> None:
    with run.open() as store:
        assert run.restore(store) is None
        for step in range(3):
            run.save(store, step)


def test_a_right_store_is_found_right():
    report = explore(three_saves, ToySystem())
    assert report.ok, report
    assert report.positions > 300
    assert report.images > report.distinct > 50
    assert report.reopened > 20
    print(report)


class WarningSystem(ToySystem):
    """A toy at whose opening something is warned of."""

    def __init__(self, warn):
        super().__init__()
        self.warn = warn

    def open(self, volume):
        self.warn()
        return super().open(volume)


async def left_behind():
    pass


def warn():
    warnings.warn("damaged", RuntimeWarning, stacklevel=1)


@pytest.mark.filterwarnings("ignore:damaged", "ignore:coroutine 'left_behind' was never awaited")  # of the run itself
def test_what_recovery_warns_of_is_a_fault_and_what_others_left_is_none():
    found = explore(three_saves, WarningSystem(warn), stop_at="")
    assert {v.fault for v in found.violations} == {"I2: recovery warns: damaged"}
    assert explore(three_saves, WarningSystem(left_behind), resumes=()).ok


@pytest.mark.parametrize(
    "fault",
    ["record before data", "durable before sync", "overwrites the newest", "trusts records, record before data"],
)
def test_planted_faults_are_found(fault):
    report = explore(three_saves, ToySystem(*fault.split(", ")), stop_at="")
    assert not report.ok
    print(report)


@pytest.mark.parametrize(
    "sync",
    [
        "file after opening",
        "file after filling",
        "file after data",
        "file after record",
        "names after opening",
        "check after word",
    ],
)
def test_each_removed_sync_is_found(sync):
    report = explore(three_saves, ToySystem(), mutate=sync, stop_at="")
    assert not report.ok
    print(report)
