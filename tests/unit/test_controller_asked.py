"""A Controller that is asked wrongly, at the wrong moment, or by a loop that does other things than it should."""

import math
import os
import random
import signal
import threading
import time

import numpy as np
import pytest

import pccheck
from pccheck.control.flights import Flights
from pccheck.control.notice import Notice
from pccheck.errors import OptionError, UsageError
from pccheck.events import Failed, Published, Restored, Returned
from tests.unit.law_loop import Storage
from tests.unit.simulated_checkpointer import SimulatedCheckpointer

STATE = {"x": np.zeros(1000)}


@pytest.fixture
def ck(tmp_path):
    with pccheck.Checkpointer(tmp_path / "ck", in_flight=2, keep=3) as one:
        yield one


def simulated(rate=0.1, **options):
    ck = SimulatedCheckpointer(Storage(lambda now: rate, lambda now: rate), **options)
    return ck, pccheck.Controller(ck, clock=ck.clock)


# -- steps that go back -----------------------------------------------------------------------------------------------


def saved(ck, *steps):
    for step in steps:
        ck.save(step, STATE)
    ck.wait()


def test_what_was_saved_before_steps_went_back_is_not_this_state(ck):
    """The state was put back in memory, and nothing restored: step 20 is another one now."""
    controller = pccheck.Controller(ck)
    for step in range(21):
        controller.due(step)
    saved(ck, 10, 20)
    for step in range(10, 21):
        controller.due(step)
    before = ck.stats().saves
    answer = controller.save_by(20, STATE, 20.0, fresh_steps=15)
    assert (answer.action, answer.durable, answer.step) == ("saved", True, 20)
    assert ck.stats().saves == before + 1


def test_a_step_below_the_last_one_in_save_by_goes_back_as_well(ck):
    controller = pccheck.Controller(ck)
    assert controller.save_by(20, STATE, 20.0).durable
    assert controller.save_by(20, STATE, 20.0).action == "declined", "that one is durable"
    assert controller.save_by(9, STATE, 20.0).action == "saved"
    assert controller.save_by(20, STATE, 20.0).action == "saved", "and this one is another than before"


def test_saves_by_hand_of_greater_steps_are_of_what_was_left(ck):
    controller = pccheck.Controller(ck)
    saved(ck, 10, 20)
    answer = controller.save_by(11, STATE, 20.0)
    assert (answer.action, answer.durable, answer.step) == ("saved", True, 11)


def test_after_a_restore_only_what_was_saved_since_counts(ck):
    controller = pccheck.Controller(ck)
    for step in range(30):
        controller.due(step)
    saved(ck, 10, 20, 29)
    restored = ck.restore(step=10)
    answer = controller.save_by(restored.step + 1, STATE, 20.0)
    assert (answer.action, answer.durable, answer.step) == ("saved", True, 11)
    assert controller.save_by(29, STATE, 20.0).action == "saved"


def test_events_of_saves_that_were_left_may_come_late():
    flights = Flights(lambda: 0.0)
    flights(Returned(step=20, counter=5, seconds=0.0, slot_wait_s=0.0, copy_wait_s=0.0))
    flights.leave(6)
    assert [one.left for one in flights.running()] == [True]
    flights(Published(step=20, counter=5, slot=0, seconds=1.0))
    flights(Published(step=21, counter=6, slot=0, seconds=1.0))
    assert flights.newest is None
    assert flights.worst() is not None, "how long they took counts all the same"
    flights(Published(step=3, counter=7, slot=0, seconds=1.0))
    assert flights.newest == 3
    flights(Restored(step=2, counter=4, seconds=1.0))
    assert flights.newest == 2
    flights(Published(step=8, counter=9, slot=0, seconds=1.0))
    flights(Published(step=30, counter=8, slot=0, seconds=1.0))
    assert flights.newest == 8, "of the newest save, whichever is durable first"


# -- saves that ended without a word ----------------------------------------------------------------------------------


def test_a_save_of_which_nothing_more_is_heard_is_not_waited_for(ck):
    controller = pccheck.Controller(ck)
    saved(ck, 1, 2)
    for counter in (1000, 1001, 1002):
        ck.tell(Returned(step=8, counter=counter, seconds=0.0, slot_wait_s=0.0, copy_wait_s=0.0))
    began = time.monotonic()
    answer = controller.save_by(9, STATE, 120.0)
    assert (answer.action, answer.durable) == ("saved", True)
    assert time.monotonic() - began < 60, "not the whole notice"


def test_one_that_is_awaited_and_never_ends_is_given_up(ck):
    controller = pccheck.Controller(ck)
    saved(ck, 1)
    ck.tell(Returned(step=9, counter=1000, seconds=0.0, slot_wait_s=0.0, copy_wait_s=0.0))
    answer = controller.save_by(9, STATE, 120.0)
    assert answer.durable
    assert answer.waited_s < 60


def test_failed_ones_are_forgotten():
    flights = Flights(lambda: 0.0)
    flights(Failed(step=1, counter=1, error=OSError()))  # given up, it never returned
    flights(Returned(step=2, counter=2, seconds=0.0, slot_wait_s=0.0, copy_wait_s=0.0))
    flights(Failed(step=2, counter=2, error=OSError()))
    assert flights.running() == []
    flights(Returned(step=3, counter=3, seconds=0.0, slot_wait_s=0.0, copy_wait_s=0.0))
    flights.forget()
    assert flights.running() == []
    flights(Published(step=3, counter=3, slot=0, seconds=1.0))  # it came after all
    assert (flights.running(), flights.newest) == ([], 3)


# -- at the wrong moment ----------------------------------------------------------------------------------------------


def test_a_call_while_another_is_at_work_is_refused_and_the_first_goes_on(ck):
    controller, refused = pccheck.Controller(ck), []

    def make_state():
        for call in (lambda: controller.due(7), lambda: controller.save_by(7, STATE, 5.0)):
            with pytest.raises(UsageError, match=r"signal handler.*set a flag") as caught:
                call()
            refused.append(caught.value)
        return STATE

    assert controller.save_by(6, make_state, 20.0).durable
    assert len(refused) == 2
    assert controller.due(7) in (True, False), "and it can be asked again"


def test_a_handler_that_asks_in_the_middle_of_due_gets_an_error_and_no_deadlock():
    ck, controller = simulated()
    ck_clock, raised = ck.clock, []

    def handler(number, frame):
        try:
            controller.save_by(99, STATE, 1.0)
        except UsageError as error:
            raised.append(error)

    def clock():
        if ck.now == 5.0 and not raised:
            signal.raise_signal(signal.SIGUSR1)
        return ck_clock()

    before = signal.signal(signal.SIGUSR1, handler)
    try:
        controller = pccheck.Controller(ck, clock=clock)
        for step in range(10):
            controller.due(step)
            ck.advance(ck.now + 1)
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert len(raised) == 1


def test_a_ctrl_c_within_the_lock_of_the_flights_leaves_it_free(monkeypatch):
    flights = Flights(lambda: 0.0)
    enter = threading.Condition.__enter__

    def interrupted(self):
        enter(self)
        raise KeyboardInterrupt

    monkeypatch.setattr(threading.Condition, "__enter__", interrupted)
    calls = [flights.running, flights.worst, flights.left_s, flights.cut, flights.forget, lambda: flights.leave(1)]
    calls += [lambda: flights.await_told(0, lambda: 0, 0.0), lambda: flights.await_end(0, 0.0)]
    calls += [lambda: flights.quickest_s]
    for call in calls:
        call()  # none enters a condition
    monkeypatch.undo()
    heard = threading.Thread(target=flights, args=(Published(step=1, counter=2, slot=0, seconds=1.0),))
    heard.start()
    heard.join(20)
    assert flights.newest == 1


# -- loops ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("in_flight", [1, 2])
@pytest.mark.parametrize("rate", [0.1, 2.0])
def test_a_loop_that_saves_every_step_by_hand_gets_an_answer(rate, in_flight):
    """The profile ends, and a save is due now and then, though places are never free and no step is alone."""
    ck, controller = simulated(rate, in_flight=in_flight)
    due = []
    for step in range(400):
        ck.advance(ck.now + 1)
        ck.save(step, None)
        if controller.due(step):
            due.append(step)
            ck.save(step, None)
    assert due
    assert due[0] <= 100
    assert len(due) >= 3


def test_steps_that_only_jump_end_the_profile_and_teach_no_step_time():
    ck, controller = simulated()
    step, dice, due = 0, random.Random(1), 0
    for _ in range(400):
        ck.advance(ck.now + 1)
        step += dice.choice([2, 7, 2000, 10**9])
        if controller.due(step):
            due += 1
            ck.save(step, None)
    assert due > 0
    assert all(one.step_s >= 0.5 for one in controller.decisions)


def test_jumps_among_steps_count_for_nothing():
    ck, controller = simulated()
    step, dice = 0, random.Random(1)
    for _ in range(2000):
        ck.advance(ck.now + 1)
        step += dice.choice([1, 1, 1, 1, 1, 1, 1, 1, 1, 50_000, 10**9])
        if controller.due(step):
            ck.save(step, None)
    assert controller.decisions
    assert all(one.step_s == pytest.approx(1.0) for one in controller.decisions)


# -- arguments --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("step", ["a", None, 1.5, math.nan, math.inf, True, 1 << 70, -(1 << 70), np.float64(4)])
def test_a_step_is_a_whole_number_of_64_bits(ck, step):
    controller = pccheck.Controller(ck)
    for _ in range(2):
        for call in (lambda: controller.due(step), lambda: controller.save_by(step, STATE, 1.0)):
            with pytest.raises(UsageError, match="whole number of 64 bits"):
                call()
        controller.due(3)
    assert not controller.due(np.int64(4))
    assert not controller.due(5)


@pytest.mark.parametrize(
    ("field", "wrong"),
    [
        ("clock", None), ("clock", "now"), ("clock", lambda: "x"), ("clock", lambda: math.nan), ("mtbf_s", 10**400),
        ("profile_steps", 10**30), ("profile_steps", 1), ("total_steps", 10**40), ("max_interval", 10**40),
        ("prior_failures", math.nan), ("restart_s", ""), ("slowdown", 1e300), ("stall_fraction", 1e-300),
    ],
)  # fmt: skip
def test_options_are_checked_where_they_are_given(field, wrong):
    with pytest.raises(OptionError) as caught:
        pccheck.Controller(SimulatedCheckpointer(Storage(lambda now: 1.0, lambda now: 1.0)), **{field: wrong})
    assert caught.value.field == field
    assert field != "prior_failures" or "seconds" not in str(caught.value)


def test_endless_seconds_may_be_any_number(ck):
    assert pccheck.Controller(ck).save_by(1, STATE, 10**400).durable


# -- the notice -------------------------------------------------------------------------------------------------------


def test_a_notice_is_entered_once_and_gives_the_handler_back():
    def mine(number, frame): ...

    before = signal.signal(signal.SIGTERM, mine)
    try:
        notice = Notice(5.0)
        with notice:
            with pytest.raises(UsageError, match="entered already"), notice:
                raise AssertionError("not reached")
            os.kill(os.getpid(), signal.SIGTERM)
            assert notice.given, "it still hears"
        assert signal.getsignal(signal.SIGTERM) is mine
        with notice:
            pass
        assert signal.getsignal(signal.SIGTERM) is mine
        with Notice(5.0), Notice(5.0):
            pass
        assert signal.getsignal(signal.SIGTERM) is mine
    finally:
        signal.signal(signal.SIGTERM, before)


@pytest.mark.parametrize("signals", [15, None, "SIGTERM", (), (15, 15), ("15",), (True,), (15.0,)])
def test_its_signals_are_numbers_each_once(signals):
    with pytest.raises(OptionError) as caught:
        Notice(5.0, signals=signals)
    assert caught.value.field == "signals"


def test_an_interrupt_while_it_is_entered_leaves_no_handler(monkeypatch):
    before, set_handler = signal.getsignal(signal.SIGTERM), signal.signal

    def interrupted(number, handler):
        found = set_handler(number, handler)
        if number == signal.SIGUSR1 and handler is not signal.SIG_DFL:
            raise KeyboardInterrupt
        return found

    monkeypatch.setattr(signal, "signal", interrupted)
    with pytest.raises(KeyboardInterrupt), Notice(5.0, signals=(signal.SIGTERM, signal.SIGUSR1)):
        raise AssertionError("not reached")
    assert signal.getsignal(signal.SIGTERM) is before
    assert signal.getsignal(signal.SIGUSR1) is signal.SIG_DFL
