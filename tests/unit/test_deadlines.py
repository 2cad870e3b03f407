"""What does not answer in time is given up, and what waits for it goes on."""

from __future__ import annotations

import threading

import pytest

from pccheck.deadlines import Calls, reached
from pccheck.errors import CoordinatorLostError, RanksError


def calls_within(timeout_s):
    return Calls(timeout_s, service="the ranks' board", host="its host")


def test_a_service_that_hangs_or_fails_is_lost_for_good():
    answer = threading.Event()
    calls = calls_within(0.05)
    assert calls.run(lambda: 3) == 3
    with pytest.raises(CoordinatorLostError, match="no answer within"):
        calls.run(answer.wait)
    answer.set()
    with pytest.raises(CoordinatorLostError, match="no answer within"):
        calls.run(lambda: 3)
    calls.end()
    calls = calls_within(30.0)
    with pytest.raises(RanksError, match="another"):
        calls.run(lambda: _raise(RanksError("another", [1])))
    assert calls.lost == ""
    with pytest.raises(CoordinatorLostError, match=r"the ranks' board is lost \(UNAVAILABLE: gone\): is its host gone"):
        calls.run(lambda: _raise(RuntimeError("UNAVAILABLE: gone\nmore")))
    calls.end()


def _raise(error):
    raise error


def test_it_is_asked_until_it_says_yes_or_time_is_up():
    answers = iter([False] * 9 + [True])
    assert reached(lambda: next(answers), 30.0)
    assert next(answers, "all were asked for") == "all were asked for"
    assert not reached(lambda: False, 0.01)
    assert reached(lambda: True, 0.0)
    assert not reached(lambda: False, -1.0)
    with pytest.raises(ValueError, match="of the device"):
        reached(lambda: _raise(ValueError("of the device")), 30.0)
