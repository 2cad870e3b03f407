"""Events arrive in order, on their own thread, and a slow observer loses the oldest, counted."""

import threading
import time
import warnings

import pytest

from pccheck.events import Skipped
from pccheck.saving import notifier
from pccheck.saving.notifier import Notifier


def event(n: int) -> Skipped:
    return Skipped(step=n, counter=n, reason="test")


def test_events_arrive_in_order_on_another_thread():
    heard = []
    notify = Notifier(lambda e: heard.append((e.step, threading.current_thread().name)))
    for n in range(100):
        notify(event(n))
    notify.close()
    assert heard == [(n, "pccheck-notify") for n in range(100)]


def test_a_full_queue_drops_the_oldest(monkeypatch):
    monkeypatch.setattr(notifier, "QUEUE_EVENTS", 10)
    go, heard = threading.Event(), []

    def observer(e):
        go.wait(10)
        heard.append(e.step)

    notify = Notifier(observer)
    notify(event(0))
    while notify._queue:
        time.sleep(0.001)  # until the observer has it
    for n in range(1, 31):
        notify(event(n))
    assert notify.dropped == 20
    go.set()
    notify.close()
    assert heard == [0, *range(21, 31)]


def test_without_an_observer_there_is_no_thread():
    before = threading.active_count()
    notify = Notifier(None)
    notify(event(1))
    assert threading.active_count() == before
    notify.close()


def test_an_observer_may_close_its_own_notifier():
    done = threading.Event()
    notify = Notifier(lambda e: (notify.close(), done.set()))
    notify(event(1))
    assert done.wait(10)


def test_a_recorder_hears_at_once_and_ticks_on_the_thread():
    heard, ticked = [], []
    notify = Notifier(None)
    notify.record(
        lambda e: heard.append((e.step, threading.current_thread().name)) or e.step == 3,
        lambda: ticked.append(threading.current_thread().name), 0.01,
    )  # fmt: skip
    for n in range(3):
        notify(event(n))
    assert not notify._thread.is_alive(), "no thread before there is anything to note"
    notify(event(3))
    while len(ticked) < 3:
        time.sleep(0.001)  # it goes on without events
    notify.close()
    assert heard == [(n, threading.current_thread().name) for n in range(4)]
    assert set(ticked) == {"pccheck-notify"}
    count = len(ticked)
    time.sleep(0.05)
    assert len(ticked) == count


def test_a_recorder_that_raises_is_heard_by_nobody():
    heard = []
    notify = Notifier(heard.append)
    notify.record(lambda e: 1 / 0, lambda: 1 / 0, 0.001)
    for n in range(20):
        notify(event(n))
    notify.close()
    assert [e.step for e in heard] == list(range(20))


def test_where_no_thread_can_be_had_the_next_event_asks_again(monkeypatch):
    ticked = threading.Event()
    notify = Notifier(None)
    notify.record(lambda e: e.step == 0, ticked.set, 1000.0)

    def refuse(self):
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        notify(event(0))
    notify(event(1))
    assert ticked.wait(10)
    notify.close()


def test_a_ctrl_c_within_a_condition_leaves_nothing_locked(monkeypatch):
    """Entering one runs Python code: an interrupt right after the lock was taken has left it locked for ever."""
    heard = []
    notify = Notifier(heard.append)
    enter = threading.Condition.__enter__

    def interrupted(self):
        entered = enter(self)
        if self is notify._wake:
            raise KeyboardInterrupt
        return entered

    monkeypatch.setattr(threading.Condition, "__enter__", interrupted)
    for n in range(20):
        notify(event(n))
    notify.add(lambda e: None)
    notify.remove(heard.clear)
    notify.close()
    assert [e.step for e in heard] == list(range(20))
    assert not notify._thread.is_alive()


@pytest.mark.parametrize("fault", [ValueError("mine"), SystemExit(3), KeyboardInterrupt(), GeneratorExit()])
@pytest.mark.parametrize("action", ["error", "ignore"])
def test_the_thread_outlives_whatever_an_observer_raises(fault, action):
    """A sys.exit() in one, and a warning that is an error, too."""
    first, second, ticked = [], [], threading.Event()

    def observer(e):
        first.append(e.step)
        raise fault

    def tick():
        ticked.set()
        raise fault

    with warnings.catch_warnings():
        warnings.simplefilter(action)
        notify = Notifier(observer)
        notify.record(lambda e: e.step == 0, tick, 1000.0)
        notify.add(lambda e: second.append(e.step))
        for n in range(5):
            notify(event(n))
        assert ticked.wait(10)
        notify.close()
    assert first == second == [0, 1, 2, 3, 4]
