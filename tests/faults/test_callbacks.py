"""What users hang onto the futures of a save cannot stop a commit, nor make it wait for itself."""

from __future__ import annotations

import asyncio
import threading

import pytest

import pccheck
from pccheck.errors import ClosedError, UsageError
from tests.faults.helpers import CHUNK, WAIT_S, Gate, make_state, step_of


def test_a_future_cannot_be_cancelled(tmp_path):
    """Neither by hand nor by asyncio's time-outs: a committer that cannot resolve it would be lost."""
    gate = Gate()
    gate.hold("written", 1)
    with pccheck.Checkpointer(tmp_path, in_flight=1, chunk_bytes=CHUNK, _at=gate) as ck:
        save = ck.save(1, make_state(1))
        gate.reached("written", 1)
        assert not save.durable.cancel()
        assert not save.captured.cancel()

        async def impatient():
            await asyncio.wait_for(asyncio.wrap_future(save.durable), 0.01)

        with pytest.raises(TimeoutError):
            asyncio.run(impatient())
        gate.let_go("written", 1)
        assert save.durable.result(WAIT_S) == 1
        for step in (2, 3):
            assert ck.save(step, make_state(step)).durable.result(WAIT_S) == step


@pytest.mark.parametrize("call", ["save", "wait", "restore", "close"])
def test_a_callback_that_would_wait_for_itself_is_told_so(tmp_path, call):
    gate, heard = Gate(), []
    gate.hold("written", 1)
    with pccheck.Checkpointer(tmp_path, in_flight=1, chunk_bytes=CHUNK, _at=gate) as ck:
        calls = {"save": lambda: ck.save(2, make_state(2)), "wait": ck.wait, "restore": ck.restore, "close": ck.close}

        def callback(future):
            try:
                calls[call]()
            except Exception as error:
                heard.append(error)

        save = ck.save(1, make_state(1))
        save.durable.add_done_callback(callback)
        gate.let_go("written", 1)
        assert save.durable.result(WAIT_S) == 1
        deadline = threading.Event()
        for _ in range(1000):
            if heard:
                break
            deadline.wait(0.01)
        assert isinstance(heard[0], UsageError)
        ck.wait(WAIT_S)
        assert ck.save(3, make_state(3)).durable.result(WAIT_S) == 3
        assert step_of(ck.restore().state) == 3


def test_a_callback_may_pin_and_look(tmp_path):
    heard = []
    with pccheck.Checkpointer(tmp_path, in_flight=1, chunk_bytes=CHUNK) as ck:

        def callback(future):
            ck.pin(future.result())
            heard.append((ck.latest(), ck.steps(), ck.stats().committed))

        for step in (1, 2):
            save = ck.save(step, make_state(step))
            save.durable.add_done_callback(callback)
            ck.wait(WAIT_S)
        assert heard == [(1, [1], 1), (2, [1, 2], 2)]
        assert ck.steps() == [1, 2]


def test_a_callback_that_raises_stops_nothing(tmp_path):
    with pccheck.Checkpointer(tmp_path, in_flight=2, chunk_bytes=CHUNK) as ck:
        for step in range(6):
            save = ck.save(step, make_state(step))
            save.durable.add_done_callback(lambda future: 1 / 0)
            save.captured.add_done_callback(lambda future: 1 / 0)
        ck.wait(WAIT_S)
        assert step_of(ck.restore().state) == 5


def test_closing_while_other_threads_save(tmp_path):
    """Each save is either refused, or ends; no thread hangs, and what was durable is there."""
    for number in range(40):
        ck = pccheck.Checkpointer(tmp_path / str(number), in_flight=1 + number % 3, chunk_bytes=CHUNK)
        saves, refused = [], []

        def work(ck=ck, saves=saves, refused=refused):
            for step in range(1000):
                try:
                    saves.append(ck.save(step, make_state(step)))
                except ClosedError as error:
                    refused.append(error)
                    return

        threads = [threading.Thread(target=work) for _ in range(3)]
        for thread in threads:
            thread.start()
        while len(saves) < 1 + number % 7:
            threading.Event().wait(0.001)
        ck.close()
        for thread in threads:
            thread.join(WAIT_S)
            assert not thread.is_alive()
        assert len(refused) == 3
        for save in saves:
            save.durable.result(WAIT_S)
            assert save.outcome in ("committed", "superseded")
        with pccheck.open(tmp_path / str(number)) as view:
            assert view.restore().counter == max(s.counter for s in saves)
