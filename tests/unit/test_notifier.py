"""Events arrive in order, on their own thread, and a slow observer loses the oldest, counted."""

import threading
import time

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
