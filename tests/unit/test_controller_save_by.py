"""Saving before an announced end: by numbers, and over a real Checkpointer whose disk has a known rate."""

import os
import queue
import signal
import threading
import time

import numpy as np
import pytest

import pccheck
from pccheck.control.notice import Notice
from pccheck.control.rescue import MARGIN, Prospect, decide, joined, predicted
from pccheck.errors import OptionError, UsageError
from pccheck.events import Published
from pccheck.storage.directory import Directory
from pccheck.testing.throttle import Rate, ThrottledVolume

MIB = 1 << 20


def prospect(**facts):
    usual = {"step": 9, "left_s": 10.0, "running": 0, "enough": False, "durable": False}
    return Prospect(**{**usual, "finish_s": None, "best_s": None, "sure_s": None, **facts})


# -- the numbers ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("facts", "move"),
    [
        ({"durable": True, "enough": True}, "decline"),
        ({"left_s": 0.0}, "decline"),
        ({"left_s": -1.0, "running": 1, "enough": True}, "decline"),
        ({"running": 1, "enough": True}, "await"),
        ({}, "save"),  # nothing is known: it costs nothing to try
        ({"running": 1}, "await"),
        ({"best_s": 4.0, "sure_s": 5.0}, "save"),
        ({"best_s": 8.0, "sure_s": 12.0}, "save"),  # perhaps
        ({"best_s": 11.0, "sure_s": 14.0}, "decline"),
        ({"best_s": 4.0, "sure_s": 5.0, "running": 1, "finish_s": 1.0}, "save"),  # both are surely in time
        ({"best_s": 8.0, "sure_s": 12.0, "running": 1, "finish_s": 3.0}, "await"),  # not at the cost of the other
        ({"best_s": 30.0, "sure_s": 40.0, "running": 2, "finish_s": 20.0}, "await"),  # it may still be
    ],
)
def test_what_is_done(facts, move):
    done, reason = decide(prospect(**facts))
    assert done == move
    assert reason


def test_what_is_in_flight_comes_first():
    assert predicted([], None, None) == (None, None, None)
    assert predicted([], 4.0, 5.0) == (0.0, 4.0, MARGIN * 5.0)
    assert predicted([1.0, 0.0], 4.0, 5.0) == (7.0, 11.0, MARGIN * 11.0)
    finish_s, _, _ = predicted([9.0], 4.0, 5.0)
    assert finish_s == pytest.approx(0.4), "one that is late already needs a little yet"


def test_the_worst_of_all_ranks_counts():
    both = joined([
        prospect(left_s=5.0, running=1, enough=True, best_s=2.0, sure_s=3.0),
        prospect(left_s=9.0, durable=False, best_s=4.0, sure_s=None),
    ])  # fmt: skip
    assert both == prospect(left_s=5.0, running=1, best_s=4.0)


# -- over a disk of a known rate --------------------------------------------------------------------------------------


class Trainer:
    """Saves a state of 2 MiB to a disk of 8 MiB/s: a quarter of a second each, in turn."""

    def __init__(self, tmp_path, **options):
        disk = ThrottledVolume(Directory(tmp_path / "ck", create=True, write=True), total=Rate.steady(8 * MIB))
        self.state = {"x": np.arange(2 * MIB, dtype=np.uint8)}
        self.ck = pccheck.Checkpointer(disk, in_flight=2, chunk_bytes=MIB // 4, on_error="warn", **options)
        self.controller = pccheck.Controller(self.ck)
        self.published = queue.SimpleQueue()
        self.ck.subscribe(lambda event: self.published.put(event) if isinstance(event, Published) else None)

    def saved(self, *steps):
        """Save, and wait until the controller has heard of it, too: events come after what they tell of."""
        for step in steps:
            self.ck.save(step, self.state).durable.result(10)
            while self.published.get(timeout=10).step != step:
                pass
        return self

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.ck.close()


@pytest.fixture
def trainer(tmp_path):
    with Trainer(tmp_path) as one:
        yield one


def test_with_enough_time_it_saves_and_waits(trainer):
    answer = trainer.saved(1, 2).controller.save_by(9, trainer.state, 20.0)
    assert (answer.action, answer.durable, answer.step) == ("saved", True, 9)
    assert answer.save.outcome == "committed"
    assert trainer.ck.latest() == 9
    assert answer.waited_s > 0.1


def test_a_state_is_made_only_if_it_is_saved(trainer):
    made = []
    trainer.saved(1, 2)
    assert trainer.controller.save_by(9, lambda: made.append(9), 0.0).action == "declined"
    assert made == []
    assert trainer.controller.save_by(9, lambda: made.append(9) or trainer.state, 20.0).durable
    assert made == [9]


def test_without_time_it_declines_and_says_what_it_needs(trainer):
    trainer.saved(1, 2)
    before = trainer.ck.stats().saves
    none = trainer.controller.save_by(9, trainer.state, 0.0)
    assert (none.action, none.durable, none.step, none.save) == ("declined", False, 2, None)
    assert "no time" in none.reason
    little = trainer.controller.save_by(9, trainer.state, 0.05)
    assert (little.action, little.durable) == ("declined", False)
    assert "needs at least" in little.reason
    assert trainer.controller.save_by(9, trainer.state, -5.0).action == "declined"
    assert trainer.ck.stats().saves == before, "nothing was begun"


def test_before_anything_was_measured_it_tries_and_says_so(trainer):
    answer = trainer.controller.save_by(0, trainer.state, 20.0)
    assert (answer.action, answer.durable) == ("saved", True)
    assert "not known" in answer.reason


def test_one_in_flight_that_is_in_time_is_not_disturbed(trainer):
    trainer.saved(1, 2)
    running = trainer.ck.save(8, trainer.state)
    answer = trainer.controller.save_by(9, trainer.state, 0.45)  # for one, not for two
    assert running.outcome in ("committed", None)
    assert answer.action in ("awaited", "saved")
    assert running.durable.result(10) == 8
    if answer.action == "awaited":
        assert answer.step == 8
        assert not answer.durable, "step 9 is not, and the answer says which is"


def test_one_in_flight_and_time_for_both(trainer):
    trainer.saved(1, 2)
    running = trainer.ck.save(8, trainer.state)
    answer = trainer.controller.save_by(9, trainer.state, 20.0)
    assert (answer.action, answer.durable, answer.step) == ("saved", True, 9)
    assert running.durable.result(0) == 8


def test_one_in_flight_that_is_fresh_enough_is_awaited(trainer):
    trainer.saved(1, 2)
    trainer.ck.save(8, trainer.state)
    answer = trainer.controller.save_by(9, trainer.state, 20.0, fresh_steps=1)
    assert (answer.durable, answer.step, answer.save) == (True, 8, None)
    assert trainer.ck.latest() == 8


def test_the_very_state_in_flight_is_awaited_and_a_durable_one_is_known(trainer):
    trainer.saved(1)
    trainer.ck.save(9, trainer.state)
    answer = trainer.controller.save_by(9, trainer.state, 20.0)
    assert (answer.durable, answer.step, answer.save) == (True, 9, None)
    again = trainer.controller.save_by(9, trainer.state, 0.0)
    assert (again.action, again.durable) == ("declined", True)
    assert "durable already" in again.reason


def test_where_all_places_are_taken_the_first_to_end_makes_one(trainer):
    trainer.saved(1, 2)
    saves = [trainer.ck.save(step, trainer.state) for step in (7, 8)]
    answer = trainer.controller.save_by(9, trainer.state, 20.0)
    assert (answer.action, answer.durable) == ("saved", True)
    assert [save.durable.result(0) for save in saves] == [7, 8]


def test_one_that_is_not_durable_in_time_goes_on(trainer):
    answer = trainer.controller.save_by(5, trainer.state, 0.02)  # nothing is known: it tries
    assert (answer.action, answer.durable) == ("saved", False)
    assert "not durable in time" in answer.reason
    assert answer.save.durable.result(10) == 5


def test_an_older_branch_does_not_count_as_this_one(trainer):
    trainer.saved(10, 20)
    trainer.ck.restore(step=10) if 10 in trainer.ck.steps() else trainer.ck.restore()
    trainer.saved(30)
    trainer.ck.restore(step=30)
    assert trainer.controller.save_by(31, trainer.state, 20.0).durable


@pytest.mark.filterwarnings("ignore:a save failed")
def test_a_save_that_fails_is_an_answer(trainer):
    trainer.saved(1)
    answer = trainer.controller.save_by(9, {"x": object()}, 20.0)
    assert (answer.action, answer.durable, answer.step) == ("declined", False, 1)
    assert "could not be begun" in answer.reason


@pytest.mark.parametrize("wrong", ["soon", None, True, float("nan")])
def test_seconds_are_a_number(trainer, wrong):
    with pytest.raises(OptionError):
        trainer.controller.save_by(1, {}, wrong)


def test_endless_time_is_allowed(trainer):
    assert trainer.controller.save_by(1, trainer.state, float("inf")).durable


# -- the notice -------------------------------------------------------------------------------------------------------


def test_a_notice_notes_the_signal_and_goes(tmp_path):
    before = signal.getsignal(signal.SIGTERM)
    with Notice(seconds=20.0) as notice:
        assert (notice.given, notice.remaining()) == (False, float("inf"))
        assert "none" in repr(notice)
        os.kill(os.getpid(), signal.SIGTERM)
        deadline = time.monotonic() + 10
        while not notice.given and time.monotonic() < deadline:
            time.sleep(0.001)
        assert notice.given
        first = notice.remaining()
        assert 0 < first <= 20
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(0.01)
        assert notice.remaining() < first, "a second one brings no more time"
        assert "remain" in repr(notice)
    assert signal.getsignal(signal.SIGTERM) is before
    assert notice.given, "the block is over, what came stays known"


def test_no_handler_is_set_unless_it_is_entered():
    before = signal.getsignal(signal.SIGTERM)
    Notice(seconds=1.0)
    assert signal.getsignal(signal.SIGTERM) is before


def test_several_signals_and_their_own_handlers_come_back():
    def mine(number, frame): ...

    old = signal.signal(signal.SIGUSR1, mine)
    try:
        with pytest.raises(ZeroDivisionError), Notice(0.0, signals=(signal.SIGUSR1, signal.SIGUSR2)) as notice:
            signal.raise_signal(signal.SIGUSR2)
            assert notice.remaining() == 0.0
            raise ZeroDivisionError
        assert signal.getsignal(signal.SIGUSR1) is mine
        assert signal.getsignal(signal.SIGUSR2) is signal.SIG_DFL
    finally:
        signal.signal(signal.SIGUSR1, old)


@pytest.mark.parametrize("seconds", [-1.0, "30", True, float("nan")])
def test_its_seconds_are_checked(seconds):
    with pytest.raises(OptionError):
        Notice(seconds)


@pytest.mark.parametrize("signals", [(signal.SIGTERM, signal.SIGKILL), (signal.SIGTERM, 9999)])
def test_signals_that_cannot_be_handled_are_named_and_nothing_is_left(signals):
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(OptionError), Notice(1.0, signals=signals):
        raise AssertionError("not reached")
    assert signal.getsignal(signal.SIGTERM) is before


def test_it_is_of_the_main_thread():
    raised = []

    def other():
        try:
            with Notice(1.0):
                pass
        except UsageError as error:
            raised.append(error)

    thread = threading.Thread(target=other)
    thread.start()
    thread.join()
    assert "main thread" in str(raised[0])
