"""The closed loop over the interval, in simulated time: what it asks for, how fast it goes up, how it comes back."""

import itertools
import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pccheck.errors import OptionError
from pccheck.tuning import choose_interval
from pccheck.tuning.law import IntervalLaw
from pccheck.tuning.stalls import Stalls
from pccheck.tuning.windows import Window
from tests.unit.law_loop import Loop, Storage


def window(steps=10, *, over=0.0, durable_s=5.0, **facts):
    """A window of steps of a second."""
    return Window(steps=steps, step_s=1.0, window_s=steps * (1 + over), durable_s=durable_s, **facts)


def settled(law, **facts):
    """Take a law past its profile, to the interval for these facts."""
    law.observed(window(law.interval, durable_s=None, saves=0))
    for _ in range(3):
        law.observed(window(law.interval, **facts))
    return law


def during(begin, end, value, usual):
    return lambda now: value if begin <= now < end else usual


def shared(rate):
    """Storage of which one checkpoint can take all."""
    return Storage(rate, rate)


# -- what it asks for -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "wrong",
    [
        {"in_flight": 0}, {"slowdown": 0.95}, {"stall_fraction": 0.0}, {"mtbf_s": 0}, {"prior_failures": 0},
        {"restart_s": -1}, {"rpo_s": 0}, {"profile_steps": 0}, {"max_interval": 0}, {"uptime_s": -1},
    ],
    ids=lambda wrong: next(iter(wrong)),
)  # fmt: skip
def test_options_out_of_range_are_named(wrong):
    with pytest.raises(OptionError) as caught:
        IntervalLaw(**{"in_flight": 2, **wrong})
    assert caught.value.field == next(iter(wrong))


def test_half_the_profile_takes_a_minute_at_most_and_less_where_failures_are_frequent():
    left = [IntervalLaw(in_flight=2).steps_to_go(3, step_s) for step_s in (0.1, 2.0, 2.5, 10.0, 90.0)]
    assert left == [22, 22, 21, 3, 0]
    assert IntervalLaw(in_flight=2, mtbf_s=200.0).steps_to_go(0, 2.0) == 10
    assert IntervalLaw(in_flight=2, profile_steps=4).steps_to_go(0, 1.0) == 2
    law = IntervalLaw(in_flight=2)
    law.observed(Window(steps=6, step_s=10.0, window_s=60.0, saves=0))
    assert law.interval == 6, "its other half is as long"
    assert law.steps_to_go(1, 10.0) == 0


def test_half_the_profile_without_a_save_then_one():
    law = IntervalLaw(in_flight=2, profile_steps=20)
    assert law.interval == 10
    assert law.observed(window(10, saves=0, durable_s=None)) is None
    assert law.interval == 10
    decision = law.observed(window(10, over=3.0, stall_s=30.0, durable_s=4.0))
    assert (decision.before, decision.interval, law.interval) == (10, 3, 3), "what the first save stalls is not counted"
    assert decision.reason.startswith("measured in the profile")


@pytest.mark.parametrize("mtbf_s", [None, 500.0, 5000.0, 500_000.0])
@pytest.mark.parametrize("stall_s", [0.0, 0.3, 2.0])
def test_it_settles_at_the_combined_rule(mtbf_s, stall_s):
    law = IntervalLaw(in_flight=2, mtbf_s=mtbf_s, prior_failures=1e9)
    Loop(law, shared(lambda now: 0.1), 2, stall_s=lambda now: stall_s, holds=True).run(14)
    wanted = choose_interval(step_s=1.0, stall_s=stall_s, durable_s=20.0, in_flight=2, mtbf_s=mtbf_s).interval
    assert 0.8 * wanted - 1 <= law.interval <= 1.2 * wanted + 1


def test_a_store_that_never_gets_durable_is_saved_to_less_and_less():
    law = IntervalLaw(in_flight=1, profile_steps=10)
    intervals = []
    for saves in (0, 1, 1, 1):
        law.observed(window(law.interval, saves=saves, durable_s=None))
        intervals.append(law.interval)
    assert intervals == [5, 10, 20, 40]


def test_the_rate_of_failures_is_learnt():
    law = IntervalLaw(in_flight=1, mtbf_s=1000.0, prior_failures=2, failures=3, uptime_s=600.0)
    assert law.mtbf_s == pytest.approx((2 * 1000 + 600) / 5)
    law.failed()
    law.observed(window(10, pause_s=90.0))
    assert law.mtbf_s == pytest.approx((2 * 1000 + 600 + 100) / 6)


def test_without_an_expectation_two_failures_make_one():
    law = IntervalLaw(in_flight=1, failures=1, uptime_s=100.0)
    assert law.mtbf_s is None
    law.failed()
    assert law.mtbf_s == 50.0


def test_a_recovery_point_limits_it_and_says_where_it_cannot_be_kept():
    law = IntervalLaw(in_flight=1, mtbf_s=1e6, rpo_s=40.0)
    Loop(law, shared(lambda now: 0.2), 1, stall_s=lambda now: 0.1, holds=True).run(12)
    assert 5 < law.interval <= 35
    law = IntervalLaw(in_flight=1, rpo_s=4.0)
    loop = Loop(law, shared(lambda now: 0.2), 1, holds=True).run(3)
    assert "more than 4 s" in loop.history[1].decision.reason


def test_no_interval_is_longer_than_allowed():
    assert settled(IntervalLaw(in_flight=1, max_interval=7), durable_s=100.0).interval == 7


# -- up at once -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("over", "interval"), [(0.07, 14), (0.1, 20), (0.35, 70), (0.9, 80)])
def test_it_goes_up_at_once_by_what_it_cost(over, interval):
    law = settled(IntervalLaw(in_flight=1), durable_s=10.0)
    assert law.interval == 10
    decision = law.observed(window(10, over=over, durable_s=10.0))
    assert law.interval == decision.interval == interval, "ceil(f * measured / bound), at most 8 times as long"
    assert "checkpoints cost" in decision.reason


def test_waits_for_a_place_ask_for_what_storage_keeps_up_with():
    law = settled(IntervalLaw(in_flight=2), durable_s=20.0, service_s=10.0)
    assert law.interval == 10
    decision = law.observed(window(10, over=2.0, slot_wait_s=20.0, durable_s=60.0))
    assert law.interval == math.ceil(60 / (2 * 1.05))
    assert decision.overhead == pytest.approx(2.0)


def test_so_does_a_save_that_was_held_back():
    law = settled(IntervalLaw(in_flight=2), durable_s=20.0, service_s=10.0)
    decision = law.observed(window(28, held_back=True, durable_s=58.0))
    assert law.interval == math.ceil(58 / (2 * 1.05))
    assert "would have waited" in decision.reason


def test_noise_within_its_error_is_no_cost_but_what_was_waited_is():
    law = settled(IntervalLaw(in_flight=1), durable_s=10.0)
    assert law.observed(window(10, over=0.1, error_s=0.4, durable_s=10.0)) is None
    decision = law.observed(window(10, over=0.1, stall_s=1.0, error_s=0.4, durable_s=10.0))
    assert decision.interval == 20


# -- down again -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("in_flight", [1, 2, 3])
@pytest.mark.parametrize("holds", [True, False])
def test_a_disk_slowed_to_a_third_and_back(in_flight, holds):
    """The rate is cut to a third, and restored: under the bound within two intervals, back within ten."""
    law = IntervalLaw(in_flight=in_flight)
    loop = Loop(law, shared(during(1000, 2500, 0.1 / 3, 0.1)), in_flight, holds=holds)
    loop.run_until(1000)
    before = law.interval
    loop.run_until(2500)
    slow = [one for one in loop.history if one.began_s >= 1000]
    assert 27 <= law.interval <= 33
    late = slow[2:] if holds else slow[2 + in_flight :]  # those in flight at the cut are waited for where none is held
    assert all(one.overhead <= 0.06 for one in (slow if holds else [])), "held back: nothing ever waits"
    assert sum(one.overhead > 0.06 for one in late) <= len(late) // 8
    loop.run(10)
    assert law.interval <= before + 1


def test_interference_that_comes_and_goes():
    law = IntervalLaw(in_flight=1)
    loop = Loop(law, shared(lambda now: 0.2), 1, slowed=during(1000, 2500, 0.35, 0.0), noise=0.05, holds=True)
    loop.run_until(950)
    before = law.interval
    loop.run_until(2500)
    slow = [one.overhead for one in loop.history if one.began_s >= 1000]
    assert max(slow[:2]) > 0.05
    assert sum(slow[2:]) / len(slow[2:]) < 0.06
    loop.run(10)
    assert abs(law.interval - before) <= 1


def test_a_hiccup_of_one_save_is_forgotten():
    law = settled(IntervalLaw(in_flight=1), durable_s=10.0)
    law.observed(window(10, over=5.0, stall_s=50.0, durable_s=10.0))
    assert law.interval == 80
    for _ in range(10):
        law.observed(window(law.interval, durable_s=10.0))
    assert law.interval == 10


@pytest.mark.parametrize("mtbf_s", [None, 5000.0])
@pytest.mark.parametrize("seed", range(4))
def test_ten_percent_noise_does_not_make_it_wander(mtbf_s, seed):
    rate = random.Random(seed).uniform
    law = IntervalLaw(in_flight=2, mtbf_s=mtbf_s, prior_failures=1e6)
    storage = shared(lambda now: 0.1 * rate(0.9, 1.1))
    loop = Loop(law, storage, 2, stall_s=lambda now: 0.3, noise=0.1, holds=True, seed=seed).run(300)
    steps = [one.steps for one in loop.history[30:]]
    wanted = choose_interval(step_s=1.0, stall_s=0.3, durable_s=20.0, in_flight=2, mtbf_s=mtbf_s).interval
    assert min(steps) >= 0.7 * wanted
    assert max(steps) <= 1.4 * wanted


# -- what storage can do ----------------------------------------------------------------------------------------------


def test_storage_that_gives_more_to_several_is_found_out():
    """One stream gets a tenth of a checkpoint per second, two get two tenths: every 5 steps can be kept up with."""
    law = IntervalLaw(in_flight=2)
    loop = Loop(law, Storage(lambda now: 0.1, lambda now: 0.2), 2, holds=True).run(2)
    assert law.interval == 6, "a try, from the start"
    assert "it may serve 2 side by side" in loop.history[-1].decision.reason
    loop.run(30)
    assert law.interval in (5, 6)


def test_storage_that_comes_to_give_more_to_several_is_found_out():
    law = IntervalLaw(in_flight=2)
    loop = Loop(law, Storage(lambda now: 0.1, lambda now: 0.1 if now < 200 else 0.2), 2, holds=True).run(12)
    assert law.interval in (10, 11)
    loop.run(60)
    assert law.interval in (5, 6)
    assert any("storage may serve more" in one.decision.reason for one in loop.history if one.decision)


def test_where_it_does_not_it_is_tried_more_and_more_rarely():
    law = IntervalLaw(in_flight=2)
    loop = Loop(law, shared(lambda now: 0.1), 2, holds=True).run(130)
    tries = [n for n, one in enumerate(loop.history) if one.decision and "may serve" in one.decision.reason]
    assert 2 <= len(tries) <= 5
    assert all(b - a > a for a, b in itertools.pairwise(tries))
    assert all(one.overhead < 0.06 for one in loop.history)


def test_one_in_flight_tries_nothing():
    loop = Loop(IntervalLaw(in_flight=1), shared(lambda now: 0.1), 1, holds=True).run(100)
    assert len([one for one in loop.history if one.decision]) == 1


# -- whatever comes ---------------------------------------------------------------------------------------------------

SECONDS = st.floats(0, 1e4)
WINDOWS = st.builds(
    Window, steps=st.integers(1, 10_000), step_s=st.floats(1e-4, 100), window_s=SECONDS, saves=st.integers(0, 5),
    durable_s=st.none() | SECONDS, service_s=st.none() | SECONDS, stall_s=SECONDS, slot_wait_s=SECONDS,
    held_back=st.booleans(), error_s=SECONDS, shared_error_s=SECONDS, pause_s=SECONDS,
)  # fmt: skip


@given(
    st.lists(WINDOWS, max_size=30), st.integers(1, 4), st.floats(1, 2), st.none() | st.floats(1, 1e6),
    st.none() | st.floats(1, 1e4),
)  # fmt: skip
def test_it_always_decides_within_its_range(windows, in_flight, slowdown, mtbf_s, rpo_s):
    law = IntervalLaw(in_flight=in_flight, slowdown=slowdown, mtbf_s=mtbf_s, rpo_s=rpo_s, max_interval=5000)
    for one in windows:
        before = law.interval
        decision = law.observed(one)
        assert 1 <= law.interval <= 5000
        assert (decision is not None) == (law.interval != before)
        if decision:
            assert (decision.before, decision.interval) == (before, law.interval)
            assert decision.reason


def test_a_slowdown_next_to_none_is_no_error_in_a_running_job():
    law = IntervalLaw(in_flight=1, slowdown=math.nextafter(1.0, 2.0), max_interval=5000)
    for _ in range(30):
        law.observed(Window(steps=10, step_s=1.0, window_s=10.5, durable_s=1.0, stall_s=0.5))
    assert law.interval == 5000


# -- the cost of a checkpoint -----------------------------------------------------------------------------------------


def test_a_cost_counts_as_far_as_it_is_beyond_its_error():
    stalls = Stalls()
    assert stalls.each_s == 0.0
    stalls.add(saves=2, known_s=0.4, other_s=1.0, error_s=1.0)
    assert stalls.each_s == pytest.approx(0.2)
    for _ in range(8):
        stalls.add(saves=2, known_s=0.4, other_s=1.0, error_s=1.0)
    assert stalls.each_s == pytest.approx(0.2 + (1 - 1 / 9) * 0.5)


def test_a_cost_that_may_be_noise_raises_no_interval_to_an_optimum():
    def after(**facts):
        law = settled(IntervalLaw(in_flight=1, slowdown=1.05, mtbf_s=300.0, prior_failures=1e9), durable_s=10.0)
        assert law.interval == 10
        for _ in range(6):
            law.observed(window(10, durable_s=10.0, **facts))
        return law

    unsure = after(over=0.04, error_s=0.38)
    assert unsure.choice().interval >= 12, "it would be the optimum"
    assert unsure.interval == 10
    assert after(stall_s=0.4, over=0.04).interval >= 12, "what is known raises it"
    stalls = Stalls()
    for known_s in (2.0, 2.0, 2.0, 0.1):
        stalls.add(saves=1, known_s=known_s, other_s=0.0, error_s=0.0)
    assert stalls.surely_s == pytest.approx(0.1), "the last window tells otherwise"


def test_the_error_of_the_step_time_does_not_go_away():
    stalls = Stalls()
    for _ in range(30):
        stalls.add(saves=1, known_s=0.0, other_s=0.5, error_s=0.1, shared_s=0.5)
    assert stalls.each_s < 0.01
    assert stalls.too_much(0.01) == (0.0, False)
