"""What a caller may pass is checked where it is passed, not where it is used."""

from __future__ import annotations

import threading

import pytest

import pccheck
from pccheck import arguments, events
from pccheck.errors import UsageError


@pytest.mark.parametrize("observer", [None, 3, "print", []])
def test_an_observer_can_be_called(tmp_path, observer):
    heard = []
    with pccheck.Checkpointer(tmp_path, observer=heard.append) as ck:
        with pytest.raises(UsageError, match=r"observer=.*it has no __call__"):
            ck.subscribe(observer)
        ck.save(1, {"step": 1}).durable.result(60)
    assert [e.step for e in heard if isinstance(e, events.Published)] == [1]


@pytest.mark.parametrize("event", [None, 3, "saved", events.Failed])
def test_an_event_is_one(tmp_path, event):
    heard = []
    with pccheck.Checkpointer(tmp_path, observer=heard.append) as ck:
        with pytest.raises(UsageError, match=r"event=.*pccheck\.events\.Event"):
            ck.tell(event)
        ck.tell(events.Skipped(step=7, counter=0, reason="of my own"))
    assert [(e.step, e.reason) for e in heard] == [(7, "of my own")]


def test_a_call_is_the_outermost_unless_its_own_thread_has_the_turn():
    first, second = (threading.Condition(threading.RLock()) for _ in range(2))
    arguments.assert_outermost(first, second)
    with second:
        with pytest.raises(UsageError, match="Set a flag in the handler"):
            arguments.assert_outermost(first, second)
        arguments.assert_outermost(first)
        found = []
        thread = threading.Thread(target=lambda: found.append(arguments.assert_outermost(first, second)))
        thread.start()
        thread.join(60)
        assert found == [None], "what another thread does is waited for"
    arguments.assert_outermost(first, second)
