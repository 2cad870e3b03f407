"""The simulated job: by hand where it is short, by closed forms where failures are random, and what always holds."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pccheck.errors import OptionError
from pccheck.replay.comparing import sweep
from pccheck.replay.job import Job
from pccheck.replay.policies import Fixed, ideal
from pccheck.replay.policy import Policy
from pccheck.replay.simulation import simulate
from pccheck.replay.steptimes import DRAWN_STEPS, StepTimes
from pccheck.replay.trace import Trace, exponential_trace
from pccheck.tuning import StorageModel, useful_fraction
from pccheck.tuning.law import Window

DISK = StorageModel(10.0, 20.0)  # one checkpoint of 100 bytes takes 10 s, two at once as long, three 15 s


def job(**changes) -> Job:
    return Job(**{"step_s": 1.0, "state_bytes": 100, "storage": DISK} | changes)


def trace(*losses: float, end: float, gains: tuple[float, ...] = ()) -> Trace:
    return Trace(losses=losses, gains=gains, end_s=end, killed_at_end=losses[-1:] == (end,))


def shown(outcome) -> list[tuple[str, float, float, int, int]]:
    return [(s.kind, s.start_s, s.end_s, s.first, s.last) for s in outcome.timeline.segments]


# -- by hand -----------------------------------------------------------------------------------------------------------


def test_a_kill_drops_what_is_under_way_and_the_newest_durable_step_is_gone_back_to():
    # Saves at 5 (durable 15), 10 (20), 15 (25); the kill at 21.5 drops the third.
    kill = trace(21.5, end=30.0)
    outcome = simulate(job(restart_s=2.0, load_s=1.0), kill, Fixed("f", 5, in_flight=2), timeline=True)
    assert outcome.timeline.flights[:4] == (
        (5.0, 15.0, True),
        (10.0, 20.0, True),
        (15.0, 21.5, False),
        (20.0, 21.5, False),
    )
    assert outcome.timeline.kills == ((21.5, 21, 10),)
    assert outcome.timeline.saves == ((5.0, 5), (10.0, 10), (15.0, 15), (20.0, 20), (29.5, 15))
    assert shown(outcome) == [
        ("work", 0.0, 5.0, 0, 5),
        ("work", 5.0, 10.0, 5, 10),
        ("lost", 10.0, 15.0, 10, 15),
        ("lost", 15.0, 20.0, 15, 20),
        ("lost", 20.0, 21.5, 20, 21),
        ("down", 21.5, 23.5, 10, 10),
        ("load", 23.5, 24.5, 10, 10),
        ("work", 24.5, 29.5, 10, 15),
        ("work", 29.5, 30.0, 15, 15),
    ]
    assert outcome.steps == 15  # the trace ends with the job alive: all that it did counts, whole steps of it
    assert outcome.goodput == pytest.approx(0.5)
    assert outcome.lost_s == pytest.approx(12.0)  # 11.5 s by the kill, and the half step at the end
    assert outcome.down_s == 3.0
    assert (outcome.saves, outcome.durable, outcome.kills, outcome.kills_down) == (5, 2, 1, 0)


def test_at_the_last_kill_only_what_is_durable_counts():
    outcome = simulate(job(), trace(21.5, end=21.5), Fixed("f", 5, in_flight=2))
    assert outcome.steps == 10
    assert outcome.goodput == pytest.approx(10 / 21.5)
    assert outcome.lost_s == pytest.approx(11.5)


def test_a_save_waits_for_a_slot():
    # One in flight: saves at 4, then 8 must wait until 14.
    outcome = simulate(job(), trace(end=30.0), Fixed("f", 4), timeline=True)
    assert outcome.timeline.saves[:3] == ((4.0, 4), (8.0, 8), (18.0, 12))
    assert outcome.timeline.flights[:2] == ((4.0, 14.0, True), (14.0, 24.0, True))
    assert outcome.slot_wait_s == pytest.approx(6.0 + 6.0 + 2.0)  # the last one is still waiting
    assert outcome.stall_s == outcome.slot_wait_s
    assert outcome.steps == 16


def test_a_stall_is_part_of_the_time_until_durable():
    outcome = simulate(job(stall_s=3.0), trace(end=20.0), Fixed("f", 5), timeline=True)
    assert shown(outcome)[:3] == [("work", 0.0, 5.0, 0, 5), ("stall", 5.0, 8.0, 5, 5), ("work", 8.0, 13.0, 5, 10)]
    assert outcome.timeline.flights == ((5.0, 15.0, True),)
    long = simulate(job(stall_s=12.0), trace(end=20.0), Fixed("f", 5), timeline=True)
    assert long.timeline.flights == ((5.0, 17.0, True),)  # never durable before the state has been captured


def test_synchronous_saves_wait_until_durable():
    outcome = simulate(job(), trace(end=40.0), Fixed("f", 5, waits=True), timeline=True)
    assert outcome.timeline.flights == ((5.0, 15.0, True), (20.0, 30.0, True))
    assert outcome.steps == 15
    assert outcome.stall_s == pytest.approx(25.0)


def test_writes_share_storage_and_a_commit_has_its_own_time():
    disk = StorageModel(10.0, 10.0, commit_s=0.5)
    outcome = simulate(job(storage=disk), trace(end=60.0), Fixed("f", 5, in_flight=2), timeline=True)
    # From 5 to 10 alone: 50 left; then two at 5/s each: the first ends at 20, and is durable half a second later.
    assert outcome.timeline.flights[0] == pytest.approx((5.0, 20.5, True))
    # Alone from 20 to 20.5 but for the save that waited since 15: 50 left at 20, 45 at 20.5, and 9 s of two.
    assert outcome.timeline.flights[1] == pytest.approx((10.0, 30.0, True))


def test_storage_may_change_its_rate():
    changed = job(storage_changes=((7.0, 0.5), (9.0, 2.0)))
    outcome = simulate(changed, trace(end=40.0), Fixed("f", 5, in_flight=4), timeline=True)
    # 20 bytes by 7, 10 more by 9, then 20/s: two at once get 20 each.
    assert outcome.timeline.flights[0] == pytest.approx((5.0, 12.5, True))
    assert outcome.timeline.flights[1] == pytest.approx((10.0, 15.0, True))


def test_a_kill_during_a_restart_begins_it_anew():
    outcome = simulate(job(restart_s=4.0, load_s=2.0), trace(20.0, 23.0, 28.0, end=40.0), Fixed("f", 5), timeline=True)
    assert outcome.kills == 3
    assert outcome.kills_down == 2
    assert outcome.down_s == pytest.approx(3.0 + 5.0 + 6.0)
    assert [s[:3] for s in shown(outcome) if s[0] in ("down", "load")] == [
        ("down", 20.0, 23.0),
        ("down", 23.0, 27.0),
        ("load", 27.0, 28.0),
        ("down", 28.0, 32.0),
        ("load", 32.0, 34.0),
    ]


def test_a_kill_before_anything_is_durable_loses_all_and_loads_nothing():
    outcome = simulate(job(restart_s=1.0, load_s=5.0), trace(9.0, 13.0, end=15.0), Fixed("f", 5))
    assert outcome.steps == 1
    assert outcome.lost_s == pytest.approx(9.0 + 3.0)
    assert outcome.down_s == pytest.approx(2.0)


def test_a_kill_in_the_moment_of_durability_comes_after_it():
    outcome = simulate(job(), trace(15.0, end=20.0), Fixed("f", 5, in_flight=2), timeline=True)
    assert outcome.timeline.kills == ((15.0, 15, 5),)


def test_gains_restart_a_job_that_wants_to_without_loss():
    gains = trace(end=60.0, gains=(7.5, 9.0, 30.0))
    assert simulate(job(), gains, Fixed("f", 5)).restarts == 0
    outcome = simulate(job(restart_s=2.0, load_s=1.0), gains, Fixed("f", 20), gains=True, timeline=True)
    # At the end of the step under way at 7.5 a save is made, durable at 18; the machines of 9.0 are there by then.
    assert shown(outcome)[:4] == [
        ("work", 0.0, 8.0, 0, 8),
        ("stall", 8.0, 18.0, 8, 8),
        ("down", 18.0, 20.0, 8, 8),
        ("load", 20.0, 21.0, 8, 8),
    ]
    assert outcome.restarts == 2
    assert outcome.lost_s == 0.0
    assert outcome.kills == 0


class Holding(Policy):
    """Keeps what it was told."""

    name, in_flight = "holding", 1
    interval = 4

    def __init__(self) -> None:
        self.windows: list[Window] = []
        self.restarts: list[tuple[float, int]] = []

    def asked(self, watch):
        if watch.running:
            watch.held_back = True
            return 1
        self.windows.append(watch.window())
        return super().asked(watch)

    def restarted(self, *, up_s, failures):
        self.restarts.append((up_s, failures))


def test_a_policy_that_holds_saves_back_works_on_and_is_told():
    policy = Holding()
    outcome = simulate(job(stall_s=0.25), trace(40.0, end=45.0), policy, timeline=True)
    # Saved at 4, durable at 14; at 8.25 there is no place, so that it works on to 14.25, and saves there.
    assert outcome.timeline.saves[:2] == ((4.0, 4), (14.25, 14))
    first, second = policy.windows[:2]
    assert first == Window(steps=4, step_s=1.0, window_s=4.0, saves=0)
    assert second == Window(
        steps=10, step_s=1.0, window_s=10.25, durable_s=10.0, service_s=10.0, stall_s=0.25, held_back=True
    )
    assert outcome.slot_wait_s == 0.0
    assert policy.restarts == [(40.0, 1)]


# -- always ------------------------------------------------------------------------------------------------------------


@st.composite
def runs(draw):
    """Draw a job, a trace, and a way to save."""
    at = sorted(draw(st.sets(st.integers(1, 400), min_size=1, max_size=25)))
    losses = tuple(float(t) for t in at if draw(st.booleans()))
    gains = tuple(float(t) for t in at if float(t) not in losses)
    end = float(at[-1] + draw(st.integers(0, 50)))
    stream = draw(st.sampled_from([2.0, 10.0, 50.0]))
    drawn = job(
        step_s=draw(st.sampled_from([0.3, 1.0, 7.0])),
        storage=StorageModel(stream, stream * draw(st.sampled_from([1, 2, 4])), draw(st.sampled_from([0.0, 0.5]))),
        stall_s=draw(st.sampled_from([0.0, 0.4, 5.0])),
        restart_s=draw(st.sampled_from([0.0, 3.0, 60.0])),
        load_s=draw(st.sampled_from([0.0, 4.0])),
        jitter=draw(st.sampled_from([0.0, 0.2, 1.0])),
        seed=draw(st.integers(0, 3)),
        storage_changes=draw(st.sampled_from([(), ((0.0, 0.5), (90.0, 3.0))])),
    )
    policy = Fixed("f", draw(st.integers(1, 40)), in_flight=draw(st.integers(1, 4)), waits=draw(st.booleans()))
    return drawn, trace(*losses, end=end, gains=gains), policy, draw(st.booleans())


@given(runs())
@settings(max_examples=150, deadline=None)
def test_time_adds_up_and_the_timeline_tells_the_same(run):
    drawn, failing, policy, gains = run
    outcome = simulate(drawn, failing, policy, gains=gains, timeline=True)
    segments = outcome.timeline.segments
    assert segments[0].start_s == 0.0
    assert segments[-1].end_s == pytest.approx(failing.end_s)
    assert all(a.end_s == b.start_s for a, b in itertools.pairwise(segments))
    spent = {kind: sum(s.end_s - s.start_s for s in segments if s.kind == kind) for kind in ("lost", "stall", "work")}
    kept = sum(s.last - s.first for s in segments if s.kind == "work")
    assert kept == outcome.steps
    assert spent["stall"] == pytest.approx(outcome.stall_s, abs=1e-6)
    total = outcome.useful_s + outcome.lost_s + outcome.stall_s + outcome.down_s
    assert total == pytest.approx(outcome.wall_s)
    # What is lost is what kills undid, and at the very end a step that was not finished.
    unfinished_s = StepTimes(drawn.step_s, drawn.jitter, drawn.seed).seconds(outcome.steps, outcome.steps + 1)
    assert spent["lost"] - 1e-6 <= outcome.lost_s <= spent["lost"] + unfinished_s + 1e-6
    best = ideal(drawn, failing)
    assert outcome.steps <= best.steps
    assert outcome.goodput - 1e-9 <= best.goodput <= 1
    assert outcome.kills == failing.failures == len(outcome.timeline.kills)
    assert outcome.slot_wait_s <= outcome.stall_s + 1e-9
    assert outcome.durable == sum(durable for *_, durable in outcome.timeline.flights) <= outcome.saves
    assert all(back <= reached for _, reached, back in outcome.timeline.kills)
    under_way = [(begun, 1) for begun, *_ in outcome.timeline.flights]
    under_way += [(ended, -1) for _, ended, _ in outcome.timeline.flights]
    most = now = 0
    for _, step in sorted(under_way):
        now += step
        most = max(most, now)
    assert most <= policy.in_flight


def test_the_same_arguments_give_the_same_outcome():
    noisy, failing = job(jitter=0.3, seed=4), exponential_trace(50.0, failures=20, seed=1)
    outcomes = [simulate(noisy, failing, Fixed("f", 5, in_flight=2), timeline=True) for _ in range(2)]
    assert outcomes[0] == outcomes[1]
    other = simulate(job(jitter=0.3, seed=5), failing, Fixed("f", 5, in_flight=2), timeline=True)
    assert other != outcomes[0]


@pytest.mark.parametrize("seed", range(3))
def test_jitter_averages_out_over_many_steps_so_that_the_best_interval_is_no_lucky_one(seed):
    day_s = 86400.0
    rare = trace(day_s, 2.3 * day_s, end=7 * day_s)  # 60,000 steps, two losses

    def run(jitter):
        asked = job(step_s=10.0, stall_s=0.5, restart_s=60.0, jitter=jitter, seed=seed)
        outcomes = sweep(asked, rare, in_flight=1)
        return max(o.goodput for o in outcomes), {o.policy: o.goodput for o in outcomes}, ideal(asked, rare).goodput

    (calm, calms, _), (noisy, noisies, top) = run(0.0), run(0.3)
    assert noisy <= top <= 1
    assert noisy == pytest.approx(calm, abs=5e-4)
    # What short intervals come to is that of the steps, whose noise is within five standard errors.
    short = [name for name in calms.keys() & noisies.keys() if int(name.split()[1]) <= 100]
    assert len(short) > 10
    assert all(noisies[name] == pytest.approx(calms[name], abs=2e-3) for name in short)


@pytest.mark.parametrize("steps", [1, 25, 400])
def test_the_times_of_steps_vary_by_the_jitter_over_the_root_of_their_number(steps):
    times = StepTimes(2.0, 0.3, 7)
    sums = [times.seconds(at, at + steps) / steps for at in range(0, DRAWN_STEPS - steps, steps)]
    mean_s = sum(sums) / len(sums)
    spread = math.sqrt(sum((s - mean_s) ** 2 for s in sums) / len(sums)) / mean_s
    assert mean_s == pytest.approx(2.0, rel=0.01)
    assert spread == pytest.approx(0.3 / math.sqrt(steps), rel=0.15)


@given(
    first=st.integers(0, 5 * DRAWN_STEPS), steps=st.integers(0, 2 * DRAWN_STEPS), part=st.floats(0.01, 0.99),
    jitter=st.sampled_from([0.0, 0.3, 1.0]), seed=st.integers(0, 1),
)  # fmt: skip
def test_steps_are_found_by_their_times(first, steps, part, jitter, seed):
    times = StepTimes(0.3, jitter, seed)
    until_s, next_s = (times.seconds(first, first + n) for n in (steps, steps + 1))
    assert until_s + (next_s - until_s) > until_s
    assert (times.done(first, until_s), times.begun(first, until_s)) == (steps, steps)
    within_s = until_s + part * (next_s - until_s)
    assert (times.done(first, within_s), times.begun(first, within_s)) == (steps, steps + 1)
    assert times.begun(first, -1.0) == times.done(first, -1.0) == 0
    if not jitter:
        assert until_s == 0.3 * steps


@pytest.mark.parametrize(
    "wrong",
    [
        {"step_s": 0.0},
        {"step_s": math.inf},
        {"state_bytes": 0},
        {"stall_s": -1.0},
        {"restart_s": math.inf},
        {"load_s": -1.0},
        {"jitter": 1.5},
        {"storage_changes": ((5.0, 1.0), (4.0, 2.0))},
        {"storage_changes": ((5.0, 0.0),)},
    ],
)
def test_a_job_is_checked_where_it_is_made(wrong):
    with pytest.raises(OptionError, match=next(iter(wrong))):
        job(**wrong)


@pytest.mark.parametrize("at_s", [1e10, 1e12, 1e15])
def test_the_clock_goes_on_however_late_it_is(at_s):
    """Where a write ends between two times that the clock can tell apart."""
    late = trace(end=at_s + 1e3)
    outcome = simulate(job(step_s=at_s / 3, state_bytes=1, storage=StorageModel(3e6, 3e6)), late, Fixed("f", 1))
    assert outcome.durable == outcome.saves > 0


def test_a_trace_too_long_for_the_steps_is_refused():
    with pytest.raises(OptionError, match="step_s"):
        simulate(job(step_s=1e-9), trace(end=1e6), Fixed("f", 5))


# -- random failures ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("work_s", "stall_s", "durable_s", "mtbf_s", "restart_s", "in_flight", "failures"),
    [
        (600.0, 60.0, 60.0, 3600.0, 120.0, 1, 20_000),  # blocking: Daly's model
        (60.0, 0.5, 150.0, 2700.0, 100.0, 8, 4_000),
        (20.0, 0.2, 70.0, 519.0, 60.0, 8, 8_000),
        (300.0, 5.0, 290.0, 960.0, 250.0, 2, 20_000),
        (10.0, 0.5, 60.0, 1000.0, 60.0, 4, 5_000),  # saves wait for a slot: the saturated form
        (5.0, 0.1, 40.0, 300.0, 30.0, 2, 10_000),
    ],
)
def test_the_simulation_agrees_with_the_closed_forms(
    work_s, stall_s, durable_s, mtbf_s, restart_s, in_flight, failures
):
    simulated = Job(
        step_s=work_s / 1000,  # so small that the step under way at a kill does not matter
        state_bytes=1000,
        storage=StorageModel(1000 / durable_s, 1e9),
        stall_s=stall_s,
        restart_s=restart_s,
    )
    failing = exponential_trace(mtbf_s, failures=failures, seed=11)
    outcome = simulate(simulated, failing, Fixed("f", 1000, in_flight=in_flight))
    expected = useful_fraction(
        work_s, stall_s=stall_s, durable_s=durable_s, mtbf_s=mtbf_s, restart_s=restart_s, in_flight=in_flight
    )
    # Against the mean that this trace has; five standard errors of the rest are within 1 %.
    assert outcome.goodput == pytest.approx(expected, rel=0.01)
