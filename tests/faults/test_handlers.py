"""What a signal handler calls in the midst of another call on its thread: an error at once, and never a deadlock."""

from __future__ import annotations

import signal
import threading
from contextlib import contextmanager

import pytest

import pccheck
from pccheck.errors import ClosedError, UsageError
from tests.faults.helpers import CHUNK, WAIT_S, make_state, step_of

# What is interrupted: the call, and the method in whose midst the signal comes.
INTERRUPTED = {
    "counter": ("save", lambda ck: (ck._store.books.check, "use_counter")),  # under the lock of the books
    "place": ("save", lambda ck: (ck._flight, "_enter")),  # admitted, and nobody works on it yet
    "slot": ("save", lambda ck: (ck._store, "reserve")),
    "submitted": ("save", lambda ck: (ck._flight.pipelines, "filled")),
    "restore": ("restore", lambda ck: (ck._recovery, "restore")),
    "pin": ("pin", lambda ck: (ck._store._volume, "sync_names")),  # under the lock of the files
    "look": ("steps", lambda ck: (ck._store.books.ledger, "durable")),
}
CALLS = {
    "save": lambda ck: ck.save(50, make_state(50)),
    "wait": lambda ck: ck.wait(WAIT_S),
    "restore": lambda ck: ck.restore(),
    "pin": lambda ck: ck.pin(1),
    "close": lambda ck: ck.close(),
    "steps": lambda ck: ck.steps(),
}


@pytest.fixture
def handler():
    """Give a list of what the handler of SIGUSR1 is to call; what that raises takes the call's place."""
    todo = []

    def handle(number, frame):
        for place, call in enumerate(todo):
            try:
                todo[place] = call()
            except Exception as error:
                todo[place] = error

    before = signal.signal(signal.SIGUSR1, handle)
    yield todo
    signal.signal(signal.SIGUSR1, before)


@contextmanager
def interrupting(monkeypatch, owner, name):
    """Have a signal come, once, in the midst of a method."""
    method, armed = getattr(owner, name), [True]

    def amid(*args, **kwargs):
        if armed and threading.current_thread() is threading.main_thread():
            armed.clear()
            signal.raise_signal(signal.SIGUSR1)  # the handler runs before this returns
        return method(*args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(owner, name, amid)
        yield
    assert not armed, "the signal came"


@pytest.mark.timeout(60)
@pytest.mark.parametrize("call", ["save", "wait", "restore", "pin", "close"])
@pytest.mark.parametrize("interrupted", INTERRUPTED)
def test_a_call_amid_another_of_its_thread_is_refused(tmp_path, handler, monkeypatch, interrupted, call):
    outer, place = INTERRUPTED[interrupted]
    with pccheck.Checkpointer(tmp_path, in_flight=2, keep=2, chunk_bytes=CHUNK) as ck:
        ck.save(1, make_state(1)).durable.result(WAIT_S)
        handler.append(lambda: CALLS[call](ck))
        with interrupting(monkeypatch, *place(ck)):
            CALLS[outer](ck)
        assert isinstance(handler[0], UsageError), handler[0]
        assert "Set a flag in the handler" in str(handler[0])
        assert ck.stats().saves == (2 if outer == "save" else 1), "nothing was begun by what was refused"
        assert ck.save(60, make_state(60)).durable.result(WAIT_S) == 60
        assert step_of(ck.restore().state) == 60


@pytest.mark.timeout(60)
def test_a_save_amid_the_wait_for_anothers_copies_is_a_save(tmp_path, handler, monkeypatch):
    """Once a save is on its way, its thread only waits for the copies: who comes then waits for nothing of it."""
    with pccheck.Checkpointer(tmp_path, in_flight=2, keep=2, chunk_bytes=CHUNK) as ck:
        wait = ck._flight.await_snapshot

        def amid(*args):
            monkeypatch.undo()
            signal.raise_signal(signal.SIGUSR1)
            return wait(*args)

        handler.append(lambda: CALLS["save"](ck))
        monkeypatch.setattr(ck._flight, "await_snapshot", amid)
        saves = [ck.save(49, make_state(49)), handler[0]]
        assert [save.durable.result(WAIT_S) for save in saves] == [49, 50]
        assert ck.steps() == [49, 50]


@pytest.mark.timeout(60)
def test_a_save_amid_close_is_told_that_it_is_closed(tmp_path, handler, monkeypatch):
    ck = pccheck.Checkpointer(tmp_path, chunk_bytes=CHUNK)
    ck.save(1, make_state(1))
    close = ck._agreement.close

    def amid(timeout_s):
        signal.raise_signal(signal.SIGUSR1)
        close(timeout_s)

    handler.append(lambda: CALLS["save"](ck))
    monkeypatch.setattr(ck._agreement, "close", amid)
    ck.close()
    assert isinstance(handler[0], ClosedError)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("interrupted", INTERRUPTED)
def test_a_handler_may_look(tmp_path, handler, monkeypatch, interrupted):
    outer, place = INTERRUPTED[interrupted]
    with pccheck.Checkpointer(tmp_path, in_flight=2, keep=2, chunk_bytes=CHUNK) as ck:
        ck.save(1, make_state(1)).durable.result(WAIT_S)
        handler += [lambda: CALLS["steps"](ck), lambda: ck.latest(), lambda: ck.stats().committed, lambda: repr(ck)]
        with interrupting(monkeypatch, *place(ck)):
            CALLS[outer](ck)
        assert handler[:3] == [[1], 1, 1]
        assert "in flight" in handler[3]
