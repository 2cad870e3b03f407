"""The Controller: in simulated time, and over a real Checkpointer on real files."""

import contextlib
import itertools
import os
import time
import warnings

import numpy as np
import pytest

import pccheck
from pccheck.control.deciding import Decider, Glance
from pccheck.control.flights import Flights
from pccheck.control.meter import Meter
from pccheck.control.sensors import Sensors
from pccheck.errors import OptionError, UsageError
from pccheck.events import Failed, IntervalChosen, Published, Returned, Skipped
from pccheck.tuning.law import IntervalLaw
from tests.unit.law_loop import Storage
from tests.unit.simulated_checkpointer import Run, SimulatedCheckpointer


def shared(rate):
    return Storage(rate, rate)


def run(storage, *, in_flight=2, stall_s=lambda now: 0.0, options=None, **loop):
    ck = SimulatedCheckpointer(storage, in_flight=in_flight, stall_s=stall_s)
    return Run(ck, pccheck.Controller(ck, clock=ck.clock, **(options or {})), **loop)


def during(begin, end, value, usual):
    return lambda now: value if begin <= now < end else usual


# -- the closed loop, in simulated time -------------------------------------------------------------------------------


@pytest.mark.parametrize("noise", [0.0, 0.05])
@pytest.mark.parametrize("in_flight", [1, 2, 3])
def test_a_disk_slowed_to_a_third_and_restored(in_flight, noise):
    """Overhead is back under its bound within two intervals, and the interval within ten."""
    loop = run(shared(during(1000, 2500, 0.1 / 3, 0.1)), in_flight=in_flight, noise=noise)
    loop.until(1000)
    before = loop.controller.interval
    loop.until(2500)
    assert 27 <= loop.controller.interval <= 33, "what storage keeps up with"
    disturbed = [one for one in loop.intervals() if one[0] + one[1] > 1000]
    assert all(over <= 0.06 for _, _, over in disturbed[2:])
    while sum(at > 2500 for at, _ in loop.ck.saved) < 11:
        loop.until(loop.ck.now + 1)
    assert loop.controller.interval <= before + 1


def test_interference_raises_it_at_once_and_it_comes_back():
    loop = run(shared(lambda now: 0.2), in_flight=1, slowed=during(1000, 2500, 0.35, 0.0))
    loop.until(1000)
    before = loop.controller.interval
    loop.until(2500)
    over = [over for began, _, over in loop.intervals() if began > 1000]
    assert max(over[:2]) > 0.09
    assert max(over[2:]) <= 0.07
    assert sum(over[2:]) / len(over[2:]) <= 0.051
    loop.until(2800)
    assert loop.controller.interval == before


def test_a_save_that_would_wait_is_held_back_while_training_goes_on():
    loop = run(shared(during(300, 900, 0.01, 0.1))).until(900)
    assert loop.ck.waited_s < 1.0
    assert any("would have waited" in one.reason for one in loop.decisions)


def test_ten_percent_noise_keeps_it_in_a_band():
    loop = run(shared(lambda now: 0.1), noise=0.1).until(5000)
    steps = [b - a for (_, a), (_, b) in itertools.pairwise(loop.ck.saved[10:])]
    assert min(steps) >= 8
    assert sum(step > 14 for step in steps) <= len(steps) // 30, "some wait for clean steps"
    assert sum(steps) / len(steps) < 12


@pytest.mark.parametrize(
    "pause_s",
    [
        lambda step: 30.0 if step % 97 == 5 else 0.0,  # an evaluation
        lambda step: (60.0, 30.0, 10.0)[step] if step < 3 else 0.0,  # the first steps compile
        lambda step: 600.0 if step == 700 else 0.0,  # data stall
        lambda step: 2.0 if step % 4 == 3 else 0.0,  # gradients are accumulated
    ],
    ids=["evaluation", "compiling", "data stall", "accumulation"],
)
def test_a_pause_of_the_loop_is_not_the_checkpoints_fault(pause_s):
    loop = run(shared(lambda now: 0.1), noise=0.02, pause_s=pause_s).until(4000)
    assert max(one.interval for one in loop.decisions[2:]) <= 12
    assert loop.controller.interval >= 6


ALWAYS_IN_FLIGHT = {"in_flight": 2, "noise": 0.03, "step_s": lambda now: 0.04}


@pytest.mark.parametrize("mtbf_s", [None, 300.0])
@pytest.mark.parametrize("every", [20, 50, 90])
@pytest.mark.parametrize("pause_s", [0.1, 0.5, 1.0, 20.0])
def test_pauses_where_saves_are_always_in_flight(pause_s, every, mtbf_s):
    """25 MiB/s for 48 MB and steps of 40 ms: hardly a step is alone, and each pause is beside a save."""
    options = {"slowdown": 1.05, "mtbf_s": mtbf_s, "total_steps": 1000}
    loop = run(
        shared(lambda now: 1 / 1.8), pause_s=lambda step: pause_s if step % every == every - 1 else 0.0,
        options=options, **ALWAYS_IN_FLIGHT,
    )  # fmt: skip
    while loop.step < 2500:
        loop.until(loop.ck.now + 1)
    assert max(one.interval for one in loop.decisions) <= 50, "what storage keeps up with: 45"
    assert not any("cost" in one.reason for one in loop.decisions)


def test_a_stall_at_each_save_counts_though_nothing_tells_of_it():
    """As of a state that is gathered before `save()`; it is long each time, as no pause is."""
    loop = run(shared(lambda now: 1 / 1.8), options={"slowdown": 1.05, "total_steps": 1000}, **ALWAYS_IN_FLIGHT)
    save = loop.ck.save

    def gather_and_save(step, state):
        loop.ck.advance(loop.ck.now + 0.5)
        save(step, state)

    loop.ck.save = gather_and_save
    while loop.step < 4000:
        loop.until(loop.ck.now + 1)
    assert 180 <= loop.controller.interval <= 320, "0.5 s are 5 % of 250 steps"


def test_a_pause_that_is_told_is_taken_out_exactly():
    """At each save, so that without being told it would be a cost; with a wait in it, which is none either."""
    told, untold = (
        run(shared(lambda now: 0.2), in_flight=1, options={"slowdown": 1.05, "total_steps": 1000}) for _ in range(2)
    )
    for loop, tells in ((told, True), (untold, False)):
        for step in range(600):
            loop.ck.advance(loop.ck.now + 1.0)
            if loop.controller.due(step):
                loop.ck.save(step, None)
                with loop.controller.paused() if tells else contextlib.nullcontext():
                    with loop.controller.paused() if tells else contextlib.nullcontext():
                        loop.ck.advance(loop.ck.now + 3.0)
                    loop.ck.save(10_000 + step, None)  # waits for the one before
    assert not any("cost" in one.reason for one in told.decisions)
    assert told.controller._sensors._meter.step_s == pytest.approx(1.0)
    assert any("cost" in one.reason for one in untold.decisions)


def test_what_was_waited_before_a_pause_counts_and_a_step_may_end_in_one():
    ck = SimulatedCheckpointer(shared(lambda now: 1.0), stall_s=lambda now: 2.0)
    sensors = Sensors(ck, ck.clock)

    def step(began):
        sensors.count(1, ck.now - began, saved=True)
        return ck.now

    ck.save(1, None)
    with sensors.paused():
        ck.advance(12.0)
        ck.save(2, None)
        at = step(0.0)
        ck.advance(at + 5.0)
    ck.advance(ck.now + 1.0)
    step(at)
    window = sensors.word().window
    assert window.stall_s == pytest.approx(2.0)
    assert window.step_s == pytest.approx(0.5), "nothing is left of the first step, a second of the other"
    assert window.pause_s == pytest.approx(17.0)


def test_a_step_time_that_drifts_is_followed():
    up = run(shared(lambda now: 0.09), noise=0.02, step_s=lambda now: 1.0 if now < 2000 else 1.2).until(4500)
    assert up.controller.interval <= 12
    assert up.decisions[-1].step_s == pytest.approx(1.2, rel=0.05)
    down = run(shared(lambda now: 0.1), noise=0.02, step_s=lambda now: 1.0 if now < 2000 else 0.7).until(4500)
    assert 13 <= down.controller.interval <= 17
    assert down.decisions[-1].step_s == pytest.approx(0.7, rel=0.05)


def test_where_saves_are_always_in_flight_clean_steps_are_sought_now_and_then():
    loop = run(shared(lambda now: 0.1), in_flight=2, noise=0.01).until(3000)
    steps = [b - a for (_, a), (_, b) in itertools.pairwise(loop.ck.saved[10:])]
    long = sum(step >= 15 for step in steps)
    assert 2 <= long <= len(steps) // 20
    assert loop.ck.waited_s < 1.0


def test_before_the_first_save_is_durable_no_other_is_begun():
    loop = run(shared(lambda now: 0.002), in_flight=3).until(520)
    assert len(loop.ck.saved) == 1
    loop.until(540)
    assert len(loop.ck.saved) == 2


def test_saves_that_all_fail_become_rare_and_come_back():
    loop = run(shared(lambda now: 1.0))
    loop.ck.fails = True
    loop.until(300)
    assert 2 <= len(loop.ck.saved) <= 6
    loop.ck.fails = False
    loop.until(3000)
    assert loop.controller.interval <= 2


def test_a_loop_that_saves_elsewhere_as_well_is_no_matter():
    loop = run(shared(lambda now: 0.1), in_flight=3)
    for _ in range(60):
        loop.until(loop.ck.now + 20)
        loop.ck.save(10_000 + loop.step, None)
    assert loop.controller.interval <= 25


def test_known_failures_make_it_the_optimum():
    options = {"mtbf_s": 5000.0, "prior_failures": 1e6}
    loop = run(shared(lambda now: 0.1), stall_s=lambda now: 0.3, options=options).until(3000)
    assert 45 <= loop.controller.interval <= 66
    assert any("rate of failures" in one.reason for one in loop.decisions)


def test_total_steps_shorten_the_profile():
    ck = SimulatedCheckpointer(shared(lambda now: 0.1))
    assert pccheck.Controller(ck).interval == 25
    assert pccheck.Controller(ck, total_steps=1000).interval == 5
    assert pccheck.Controller(ck, total_steps=10).interval == 1
    assert pccheck.Controller(ck, total_steps=10_000_000).interval == 25


@pytest.mark.parametrize("total", [100, 300])
def test_a_profile_of_a_few_steps_does(total):
    loop = run(shared(lambda now: 0.1), noise=0.02, options={"total_steps": total}).until(600)
    assert loop.controller.interval in (9, 10, 11, 12)


# -- what it is asked -------------------------------------------------------------------------------------------------


def test_the_same_step_gets_the_same_answer():
    loop = run(shared(lambda now: 0.1)).until(60)
    step, ck, controller = loop.step, loop.ck, loop.controller
    while not controller.due(step):
        ck.advance(ck.now + 1)
        step += 1
    assert controller.due(step)
    assert controller.due(step)
    ck.advance(ck.now + 1)
    assert not controller.due(step + 1)


def test_a_step_back_begins_a_new_interval():
    loop = run(shared(lambda now: 0.1)).until(500)
    interval = loop.controller.interval
    ck, due = loop.ck, []
    for step in range(100, 100 + 2 * interval + 2):
        if loop.controller.due(step):
            due.append(step)
            ck.save(step, None)
        ck.advance(ck.now + 1)
    assert due[0] == 100 + interval


def test_steps_may_be_counted_in_strides():
    ck = SimulatedCheckpointer(shared(lambda now: 0.1))
    controller = pccheck.Controller(ck, clock=ck.clock)
    for step in range(0, 8000, 4):
        ck.advance(ck.now + 4)
        if controller.due(step):
            ck.save(step, None)
    assert controller.decisions[-1].step_s == pytest.approx(1.0)
    assert 8 <= controller.interval <= 12


@pytest.mark.parametrize(
    "wrong",
    [
        {"slowdown": 0.5}, {"stall_fraction": 2.0}, {"mtbf_s": -1.0}, {"rpo_s": 0.0}, {"profile_steps": 1},
        {"total_steps": 0}, {"total_steps": 1.5}, {"max_interval": 0}, {"restart_s": -1.0}, {"prior_failures": 0.0},
    ],
    ids=lambda wrong: next(iter(wrong)),
)  # fmt: skip
def test_options_out_of_range_are_named(wrong):
    with pytest.raises(OptionError) as caught:
        pccheck.Controller(SimulatedCheckpointer(shared(lambda now: 1.0)), **wrong)
    assert caught.value.field == next(iter(wrong))


def test_it_is_of_a_checkpointer():
    with pytest.raises(UsageError, match="given str"):
        pccheck.Controller("x")


# -- over a real Checkpointer -----------------------------------------------------------------------------------------


def test_it_saves_when_it_is_due_and_tells_why(tmp_path):
    told, made = [], itertools.count()
    with pccheck.Checkpointer(tmp_path / "ck", observer=told.append) as ck:
        controller = pccheck.Controller(ck, profile_steps=4, max_interval=40)
        saves, step = [], 0
        while len(saves) < 4 or not controller.decisions:
            step += 1
            time.sleep(0.0005)
            save = controller.save_if_due(step, lambda: {"x": np.zeros(1000), "n": next(made)}, metadata={"a": 1})
            if save is not None:
                saves.append(save)
        ck.wait()
        assert next(made) == len(saves), "a state is made only if it is saved"
        assert controller.decisions
        last = controller.decisions[-1]
        assert last.reason in repr(controller)
        assert f"every {controller.interval} steps" in repr(controller)
        assert last.interval == controller.interval
        restored = ck.restore()
        assert restored.step == saves[-1].step
        assert restored.metadata == {"a": 1}
    assert [one for one in told if isinstance(one, IntervalChosen)] == list(controller.decisions)
    assert all(one.reason and one.counter == 0 and one.step_s > 0 for one in controller.decisions)


def test_a_state_is_taken_as_it_is(tmp_path):
    with pccheck.Checkpointer(tmp_path / "ck") as ck:
        controller = pccheck.Controller(ck, profile_steps=2)
        for step in range(6):
            controller.save_if_due(step, {"step": step})
        ck.wait()
        assert ck.restore().state["step"] == ck.latest()


def test_saves_that_are_skipped_or_not_made_do_no_harm(tmp_path):
    with pccheck.Checkpointer(tmp_path / "ck", in_flight=1, when_full="skip") as ck:
        controller = pccheck.Controller(ck, profile_steps=2, max_interval=3)
        for step in range(60):
            if controller.due(step) and step % 2:
                ck.save(step, {"x": np.zeros(100_000)})
                ck.save(step, {"x": np.zeros(100_000)})
        ck.wait()
        assert ck.latest() is not None


def test_failures_of_earlier_runs_count(tmp_path):
    for _ in range(3):
        pid = os.fork()
        if pid == 0:
            try:
                ck = pccheck.Checkpointer(tmp_path / "ck")
                ck.save(1, {"x": 1}).durable.result(10)
                time.sleep(0.3)
            finally:
                os._exit(9)  # no close: it died
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            os.waitpid(pid, 0)
    with pccheck.Checkpointer(tmp_path / "ck") as ck:
        controller, step = pccheck.Controller(ck, profile_steps=4, max_interval=10), 0
        while not controller.decisions:
            step += 1
            time.sleep(0.001)
            controller.save_if_due(step, {"x": 1})
        ck.wait()
        assert controller.decisions[-1].mtbf_s is not None
        assert controller.decisions[-1].mtbf_s < 60


def test_a_closed_controller_hears_nothing_more(tmp_path):
    with pccheck.Checkpointer(tmp_path / "ck") as ck:
        controller = pccheck.Controller(ck, profile_steps=2)
        controller.close()
        for step in range(6):
            controller.save_if_due(step, {"step": step})
        ck.wait()
        assert controller.save_by(9, {}, 5.0).action == "saved"


# -- its parts --------------------------------------------------------------------------------------------------------


def returned(counter, seconds=0.0, wait=0.0):
    return Returned(step=counter, counter=counter, seconds=seconds, slot_wait_s=wait, copy_wait_s=0.0)


def published(counter, seconds):
    return Published(step=counter, counter=counter, slot=0, seconds=seconds)


def test_what_a_save_takes_of_storage_does_not_grow_beside_others():
    now = [0.0]
    flights = Flights(lambda: now[0])
    flights(returned(1))
    now[0] = 5.0
    flights(returned(2))
    now[0] = 15.0  # 5 s alone, 10 s as one of two
    flights(published(1, 15.0))
    now[0] = 20.0
    flights(published(2, 15.0))
    worst = flights.cut()
    assert (worst.durable_s, worst.service_s) == (15.0, 10.0)
    assert flights.cut() is None
    assert flights.newest == 2
    assert not flights.busy


def test_one_that_takes_longer_than_ever_tells_so_before_it_ends():
    now = [0.0]
    flights = Flights(lambda: now[0])
    flights(returned(1))
    now[0] = 10.0
    flights(published(1, 10.0))
    flights.cut()
    flights(returned(2))
    now[0] = 15.0
    assert flights.cut() is None
    assert flights.left_s() == 5.0
    now[0] = 25.0
    assert flights.cut().durable_s == 15.0
    assert flights.left_s() is None


def test_events_may_come_in_any_order():
    flights = Flights(lambda: 0.0)
    flights(published(1, 0.0))
    flights(returned(1))
    flights(Skipped(step=2, counter=2, reason="full"))
    flights(returned(2))
    flights(returned(3))
    flights(Failed(step=3, counter=3, error=OSError()))
    assert not flights.busy
    assert flights.ends == 3
    assert flights.running() == []


def test_a_meter_knows_the_step_time_from_clean_steps_in_a_row():
    meter = Meter()
    for _ in range(10):
        meter.step(1.0, beside=False)
    for _ in range(5):
        meter.step(1.5, beside=True, waited_s=0.1)
    sums = meter.cut()
    found = meter.measured(sums)
    assert found.step_s == pytest.approx(1.0)
    assert found.window_s == pytest.approx(10 + 5 * 1.5)
    assert sums.waited_s == pytest.approx(0.5)
    for _ in range(3):
        meter.step(0.2, beside=False)
        meter.step(1.5, beside=True)
    assert meter.measured(meter.cut()).step_s == pytest.approx(1.0), "single clean steps tell nothing"


def costs(long, *, windows=6, beside=8, saving=0):
    """Give what windows of ten steps cost by a meter; `long` tells of each step, by its number, by how much."""
    meter, counted = Meter(), []
    for _ in range(20):
        meter.step(1.0, beside=False)
    meter.measured(meter.cut())
    for window in range(windows):
        for n in range(10):
            meter.step(1.0 + long(10 * window + n), beside=n < beside, saving=n == saving)
        counted.append(meter.measured(meter.cut()).window_s - 10)
    return counted


@pytest.mark.parametrize("pause_s", [0.5, 3.0, 100.0])
@pytest.mark.parametrize("every", [7, 10, 23])
def test_pauses_beside_saves_are_no_cost(every, pause_s):
    assert costs(lambda n: pause_s if n % every == every - 1 else 0.0, beside=10) == pytest.approx([0.0] * 6)


@pytest.mark.parametrize("stall_s", [0.5, 3.0, 100.0])
def test_what_is_long_at_each_save_is_a_cost_whatever_its_length(stall_s):
    counted = costs(lambda n: stall_s if n % 10 == 0 else 0.0)
    assert counted[0] == pytest.approx(0.0), "once tells nothing"
    assert counted[1:] == pytest.approx([stall_s] * 5)


@pytest.mark.parametrize("slowed_s", [0.35, 3.0])
def test_what_slows_many_steps_beside_saves_is_a_cost_at_once(slowed_s):
    assert costs(lambda n: slowed_s if n % 10 < 8 else 0.0) == pytest.approx([8 * slowed_s] * 6)


def test_what_was_waited_for_saves_is_a_cost_however_rare():
    meter = Meter()
    for _ in range(20):
        meter.step(1.0, beside=False)
    for n in range(10):
        meter.step(31.0 if n == 5 else 1.0, beside=True, waited_s=30.0 if n == 5 else 0.0)
    assert meter.measured(meter.cut()).window_s == pytest.approx(60.0)


def test_the_decider_holds_for_a_place_for_the_first_and_for_clean_steps():
    law = IntervalLaw(in_flight=2, profile_steps=20)
    decider = Decider(law, in_flight=2, slowdown=1.05)
    assert decider.held_for([Glance(running=1, left_s=None, steps=10, clean=0)]), "the first is not durable yet"
    assert not decider.held_for([Glance(running=0, left_s=None, steps=10, clean=0)])
    from tests.unit.test_law import settled

    settled(law, durable_s=20.0, service_s=10.0)
    assert law.interval == 10
    assert not decider.held_for([Glance(running=1, left_s=None, steps=10, clean=0)])
    assert decider.held_for([Glance(running=2, left_s=0.4, steps=10, clean=0)])
    free, full = (Glance(running=n, left_s=None, steps=10, clean=0) for n in (0, 2))
    soon = Glance(running=2, left_s=0.4, steps=10, clean=0)
    assert not decider.held_for([free, soon]), "several ranks may wait a little"
    assert decider.held_for([free, full]), "one rank without a place is enough"


def test_it_decides_for_a_training_state_behind_an_attached_optimizer(tmp_path):
    torch = pytest.importorskip("torch")
    import pccheck_torch

    model = torch.nn.Linear(64, 64)
    optimizer = torch.optim.AdamW(model.parameters())
    state = pccheck_torch.TrainingState(model=model, optimizer=optimizer, rng=False, seen=0)
    with pccheck.Checkpointer(tmp_path / "ck", snapshot="lazy") as ck:
        pccheck_torch.attach(ck, optimizer)
        controller = pccheck.Controller(ck, profile_steps=4, max_interval=10)
        saved, step = {}, 0
        while len(saved) < 5:
            step += 1
            model(torch.ones(1, 64)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            state.extras["seen"] = step
            if controller.save_if_due(step, state) is not None:
                saved[step] = model.weight.detach().clone()
        ck.wait()
        assert state.restore(ck) - 1 == max(saved) == state.extras["seen"]
        assert torch.equal(model.weight, saved[max(saved)])
