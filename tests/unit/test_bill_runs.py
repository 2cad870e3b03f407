"""The history file and its arithmetic, without a store: what is bounded, what is believed, what is counted."""

import json
import random
import statistics

import msgspec
import pytest

from pccheck import events
from pccheck.bill import durations, runs
from pccheck.bill.account import Account
from pccheck.bill.bills import report_of
from pccheck.bill.runs import JobRun, Point, Run


def a_run(incarnation=1, **known):
    fields = {"began_s": 1e9 + 1000.0 * incarnation, "uptime_s": 100.0, "first_step": 0, "last_step": 90, **known}
    return Run(incarnation=incarnation, **fields)


def packed(*some):
    return runs.pack([runs.encode(run) for run in some])


# -- the file ---------------------------------------------------------------------------------------------------------


def test_what_is_written_is_read():
    first = a_run(durable={-40: 3, 7: 1}, points=(Point(1.5, 10, 2.0, 0.5),), restored_step=-5, holder="pid 1 é")
    found = runs.read(packed(first, a_run(2, ended=True)))
    assert found.runs == (first, a_run(2, ended=True))
    assert (found.problem, found.ours) == (None, True)
    assert runs.read(None) == runs.Found()


def test_a_file_cut_anywhere_is_ours_and_no_run():
    whole = packed(a_run(), a_run(2))
    for length in range(len(whole) - 2):
        found = runs.read(whole[:length])
        assert found.ours, length
        assert not found.runs, length
        assert found.problem, length
    for length in (0, 10, 300):  # what some file systems leave after power loss: the length, and zeros
        assert runs.read(whole[:length] + bytes(500)).ours


@pytest.mark.parametrize(
    "data",
    [
        b"x", b"{}", b'{"runs": []}', b"[" * 100_000, b"\xff\xfe", b'{"format": "other", "version": 1}',
        bytes(1000) + b"mine", b'{"form' + bytes(30) + b"x", b'{"form\0at', bytes(runs.LIMIT_BYTES + 1),
    ],
)  # fmt: skip
def test_what_is_not_pcchecks_is_not_ours(data):
    found = runs.read(data)
    assert not found.ours
    assert found.problem


def test_a_newer_version_is_left_alone():
    found = runs.read(packed(a_run()).replace(b'"version":1', b'"version":2', 1))
    assert (found.runs, found.ours) == ((), False)
    assert "version is 2" in found.problem


def test_what_is_too_large_is_not_parsed():
    found = runs.read(packed(a_run()) + b" " * runs.LIMIT_BYTES)
    assert (found.runs, found.ours) == ((), False), "none of ours is so large, nor what a crash leaves of one"
    assert not runs.read(b"x" * (runs.LIMIT_BYTES + 1)).ours


def test_members_of_later_versions_are_passed_over():
    told = json.loads(packed(a_run()))
    told["runs"][0]["moon"] = told["moon"] = {"phase": [1, 2]}
    assert runs.read(json.dumps(told).encode()).runs == (a_run(),)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("uptime_s", -1.0), ("uptime_s", 1e300), ("saves", -1), ("durable", {"100000": 1}), ("durable", {"1": -1}),
        ("points", [[0.0, 0, 0.0, 0.0]] * 2000), ("points", [[0.0]]), ("holder", "x" * 1000), ("last_step", 1 << 64),
        ("restored_at_s", -3), ("age_s2", 1e300), ("uptime_s", None),
    ],
)  # fmt: skip
def test_numbers_that_cannot_be_are_no_history(field, value):
    told = json.loads(packed(a_run()))
    told["runs"][0][field] = value
    assert runs.read(json.dumps(told).encode()).problem


def test_any_history_that_is_believed_can_be_reported():
    """Whatever passes the checks, the arithmetic takes it: extreme values in every field at once."""
    rng = random.Random(5)
    bounds = {int: (0, 1, 1 << 60), float: (0.0, 1e-9, 1e12), bool: (False, True), str: ("", "x" * 300)}
    for _ in range(300):
        some = []
        for number in range(3):
            values = {
                f.name: rng.choice(bounds[type(getattr(a_run(), f.name))])
                for f in msgspec.structs.fields(Run)
                if type(getattr(a_run(), f.name)) in bounds and f.name not in ("incarnation", "age_s2")
            }
            values |= {"age_s2": rng.choice((0.0, 1e24)), "durable": rng.choice(({}, {999: 1 << 60}, {-999: 1, 5: 0}))}
            values |= {"restored_step": rng.choice((None, -(1 << 63))), "durable_step": rng.choice((None, 1 << 62))}
            values |= {"points": rng.choice(((), (Point(1e12, 1 << 62, 1e12, 1e12),) * 3))}
            some.append(Run(incarnation=number, **values))
        found = runs.read(packed(*some))
        assert found.problem is None
        states = [rng.choice(("failed", "ended", "running")) for _ in found.runs]
        jobs = [JobRun(parts={0: run}, state=state) for run, state in zip(found.runs, states, strict=True)]
        json.dumps(report_of("x", jobs, (), 1e9).as_json(), allow_nan=False)


def test_the_file_is_bounded_however_much_there_was():
    points = tuple(Point(1e8 + i / 7, (1 << 60) + i, 1e7 + i / 3, 1e6 + i / 9) for i in range(runs.MOST_POINTS))
    fat = dict.fromkeys(range(-350, 600), 1 << 50)
    full = [a_run(n, points=points, stride=4, durable=fat, holder="h" * 300, ended=True) for n in range(200)]
    live = runs.encode(full[0])
    assert len(live) < 64 * 1024, "the run that is under way fits into its part"
    kept = runs.settle(full)
    assert len(runs.pack([*kept, live])) <= runs.LIMIT_BYTES
    read = runs.read(runs.pack([*kept, live]))
    assert read.problem is None
    assert [run.incarnation for run in read.runs][:-1] == list(range(200 - len(kept), 200)), "the newest stay"
    short = tuple(Point(10.0 * i, i, 12.5, 2.5) for i in range(100))
    thin = [a_run(n, points=short, ended=True) for n in range(200)]
    kept = [msgspec.json.decode(one, type=Run) for one in runs.settle(thin)]
    assert len(kept) == runs.MOST_RUNS - 1
    assert {(len(run.points), run.stride) for run in kept} == {(50, 2)}


def test_a_thinned_series_keeps_its_worst_and_its_end():
    points = [Point(float(i), i, float(i * 7 % 13), i / 100) for i in range(101)]
    thinned = runs.thin(points)
    assert len(thinned) == 51
    assert max(p.worst_s for p in thinned) == max(p.worst_s for p in points)
    assert thinned[-1] == points[-1]
    assert thinned[0] == Point(1.0, 1, 7.0, 0.01)


# -- durations --------------------------------------------------------------------------------------------------------


def test_quantiles_are_within_two_percent():
    rng, counts = random.Random(1), {}
    values = [rng.lognormvariate(0.0, 2.0) for _ in range(5000)]
    for value in values:
        counts[durations.bucket(value)] = counts.get(durations.bucket(value), 0) + 1
    worst, values = max(values), sorted(values)
    for part in (0.5, 0.9, 0.99):
        exact = values[round(part * len(values)) - 1]
        assert durations.quantile(counts, part, worst) == pytest.approx(exact, rel=0.0205)
    assert durations.quantile(counts, 1.0, worst) <= worst
    assert durations.quantile({}, 0.5, 0.0) is None


def test_there_are_few_buckets_for_any_duration():
    assert durations.bucket(0.0) == durations.bucket(-1.0) == durations.bucket(1e-300)
    assert durations.bucket(1e300) - durations.bucket(0.0) < 1000
    assert durations.quantile({durations.bucket(0.0): 4}, 0.5, 0.0) == 0.0


# -- counting ---------------------------------------------------------------------------------------------------------


def feed(account, step, at_s, *, save_s=0.1, durable_s=0.5, nbytes=1000, superseded=False):
    """Tell of one save that begins at a time and is durable so much later."""
    about = {"step": step, "counter": step + 1}
    account.heard(events.Returned(**about, seconds=save_s, slot_wait_s=0.0, copy_wait_s=save_s), at_s + save_s)
    account.heard(events.Persisted(**about, payload_bytes=nbytes, seconds=durable_s, retries=0), at_s + durable_s)
    kind = events.Superseded if superseded else events.Published
    account.heard(kind(**about, slot=0, seconds=durable_s), at_s + durable_s)


def test_ages_are_exact():
    """Saves at 10, 20, 30 s, durable 2 s later: the age goes 0..12, 2..12, 2..12, and 2..9 until 39 s."""
    account = Account()
    for step, at_s in ((1, 10.0), (2, 20.0), (3, 30.0)):
        feed(account, step, at_s, durable_s=2.0)
    area, worst = account.age(39.0)
    assert area == pytest.approx(12 * 6 + 10 * 7 + 10 * 7 + 7 * 5.5)
    assert worst == 12.0
    assert account.age(60.0)[1] == 30.0, "it grows on"
    assert [tuple(getattr(p, n) for n in p.__struct_fields__) for p in account.points()] == [
        (12.0, 1, 12.0, 2.0), (22.0, 2, 12.0, 2.0), (32.0, 3, 12.0, 2.0)
    ]  # fmt: skip
    assert (account.durable_step, account.saved_at_s) == (3, 30.0)
    assert Account().age(7.0) == (24.5, 7.0), "before the first checkpoint all of the run would be lost"


def test_what_was_overtaken_is_no_younger_checkpoint():
    account = Account()
    feed(account, 2, 10.0, durable_s=1.0)
    feed(account, 1, 9.0, durable_s=5.0, superseded=True)
    assert (account.durable_step, account.saved_at_s, len(account.points())) == (2, 10.0, 1)
    assert sum(account.durable.values()) == 2


def test_the_newest_durable_checkpoint_is_not_the_last_that_was_told_of():
    """Committers tell of what they published in any order; a step that is saved again after a roll-back is newer."""
    account = Account()
    feed(account, 5, 10.0, durable_s=1.0)
    feed(account, 4, 9.0, durable_s=5.0)
    assert (account.durable_step, account.saved_at_s) == (5, 10.0)
    assert [point.step for point in account.points()] == [5, 5]
    account.heard(events.Published(step=2, counter=40, slot=0, seconds=1.0), 20.0)
    assert (account.durable_step, account.saved_at_s) == (2, 19.0)


def test_intervals_are_those_in_which_steps_grew():
    account = Account()
    for at, step in enumerate((0, 10, 20, 5, 15)):  # a roll-back after 20
        feed(account, step, 10.0 * at)
    assert (account.progress, account.climbs, account.climbed_s) == (30, 3, pytest.approx(30.0))
    assert (account.first_step, account.last_step, account.returned) == (0, 15, 5)


def test_the_first_restore_before_the_first_save_counts():
    account = Account()
    account.heard(events.Restored(step=40, counter=4, seconds=0.5), 3.0)
    feed(account, 50, 5.0)
    account.heard(events.Restored(step=10, counter=1, seconds=0.5), 9.0)
    assert (account.restored_step, account.restored_at_s) == (40, 3.0)


def test_ten_thousand_saves_take_no_more_room_than_a_thousand():
    account, sizes = Account(), []
    rng = random.Random(3)
    for step in range(10_000):
        feed(account, step, 10.0 * step, durable_s=rng.uniform(0.5, 4.0))
        if step in (999, 9_999):
            sizes.append(len(account.durable))
        assert len(account.points()) <= runs.MOST_POINTS
    assert account.stride == 32
    assert len(account.points()) >= runs.MOST_POINTS // 2
    assert account.points()[-1].step == 9_999, "the newest is always there"
    assert max(p.worst_s for p in account.points()) == pytest.approx(account.age(100_000.0)[1], abs=1e-3)
    assert sizes[1] <= sizes[0] + 5
    area, _ = account.age(100_000.0)
    assert area / 100_000 == pytest.approx(5 + statistics.mean((0.5, 4.0)), rel=0.01)


# -- the bill ---------------------------------------------------------------------------------------------------------


def bill(*jobs, now_s=0.0):
    return report_of("x", jobs, (), now_s)


def test_costs_are_split_by_cause_and_spread_over_steps():
    run = a_run(
        returned=11, progress=100, climbs=10, climbed_s=200.0, save_s=3.0, slot_wait_s=0.5, copy_wait_s=2.0,
        gate_wait_s=0.3, pool_wait_s=0.7, first_save_s=1.1,
    )  # fmt: skip
    (one,) = bill(JobRun(parts={0: run}, state="ended")).runs
    assert one.cost.total_s == pytest.approx(3.3)
    assert one.cost.other_s == pytest.approx(0.5)
    assert one.cost.ms_per_save == pytest.approx(300.0)
    assert one.cost.ms_per_step == pytest.approx(30.0)
    assert one.cost.percent == pytest.approx(1.5)
    assert (one.interval.steps, one.interval.seconds) == (10.0, 20.0)
    assert one.interval.step_s == pytest.approx((20.0 - 0.22) / 10), "a step without what saves cost after the first"


def test_a_single_save_has_no_interval():
    (one,) = bill(JobRun(parts={0: a_run(returned=1, save_s=0.2)}, state="ended")).runs
    assert (one.cost.ms_per_step, one.cost.percent, one.interval.steps) == (None, None, None)
    assert one.cost.ms_per_save == pytest.approx(200.0)


def test_failures_lose_what_the_next_run_had_not_restored():
    killed = a_run(1, last_step=90, durable_step=80, uptime_s=600.0)
    again = a_run(2, began_s=killed.began_s + 660.0, restored_step=70, restored_at_s=5.0, first_step=80, last_step=200,
                  durable_step=195, uptime_s=1200.0)  # fmt: skip
    found = bill(JobRun(parts={0: killed}, state="failed"), JobRun(parts={0: again}, state="failed"))
    assert [run.steps_lost for run in found.runs] == [20, 5], "the last by what was durable: nobody has restored yet"
    assert (found.steps_lost, found.failures, found.uptime_s, found.mtbf_s) == (25, 2, 1800.0, 900.0)
    assert found.restart_s == pytest.approx(65.0)
    found = bill(JobRun(parts={0: killed}, state="ended"), JobRun(parts={0: again}, state="running"))
    assert ([run.steps_lost for run in found.runs], found.failures, found.mtbf_s) == ([None, None], 0, None)


def test_the_step_that_a_killed_run_died_at_is_estimated():
    """A step each 2 s, all included; notes each 2 s: a kill comes, on average, one second after the last."""

    def died(**known):
        run = a_run(last_step=90, durable_step=80, uptime_s=200.0, returned_at_s=180.0, progress=90, climbs=3,
                    climbed_s=180.0, longest=40)  # fmt: skip
        (one,) = bill(JobRun(parts={0: msgspec.structs.replace(run, **known)}, state="failed")).runs
        return one.died_step, one.steps_lost

    assert died() == (100, 20)
    assert died(uptime_s=203.0) == (102, 22)
    assert died(uptime_s=9000.0) == (130, 50), "it hung: it never went on for longer without a save"
    assert died(returned_at_s=None) == (90, 10), "a version that noted no times"
    assert died(progress=0, climbs=0, climbed_s=0.0) == (90, 10), "nothing tells its pace"
    running = bill(JobRun(parts={0: a_run(returned_at_s=1.0, progress=9, climbs=1, climbed_s=9.0)}, state="running"))
    assert (running.runs[0].died_step, running.runs[0].steps_lost) == (None, None)


def test_what_the_next_run_restored_was_reached():
    """A killed run's last note is up to two seconds old, in which a short run does most of what it does."""

    def killed(restored, incarnation=2, state="failed", **known):
        run = a_run(last_step=30, durable_step=20, **known)
        then = a_run(incarnation, began_s=run.began_s + 500.0, restored_step=restored, first_step=80, last_step=90)
        first = bill(JobRun(parts={0: run}, state=state), JobRun(parts={0: then}, state="ended")).runs[0]
        return first.reached_step, first.durable_step, first.died_step, first.steps_lost

    assert killed(79) == (79, 79, 79, 0)
    assert killed(25) == (30, 25, 30, 5), "and no less than what is noted"
    assert killed(10) == (30, 20, 30, 20), "an older checkpoint was gone back to"
    assert killed(None) == (30, 20, 30, 10), "it is not known"
    assert killed(79, incarnation=1)[:2] == (30, 20), "another store, made anew in the same place"
    assert killed(79, state="ended") == (30, 20, None, None), "its last note says all"
    pace = {"uptime_s": 12.0, "returned_at_s": 10.0, "progress": 30, "climbs": 3, "climbed_s": 10.0, "longest": 10}
    assert killed(None, **pace)[2] == 39, "3 steps a second, until one second after the last note"
    assert killed(35, **pace) == (35, 35, 39, 4), "the pace counts from what was noted"
    assert killed(60, **pace) == (60, 60, 60, 0)


def test_a_run_with_one_save_has_the_pace_of_another():
    usual = a_run(1, last_step=90, progress=90, climbs=9, climbed_s=180.0, longest=10, returned_at_s=180.0)
    once = a_run(2, began_s=usual.began_s + 500.0, restored_step=90, first_step=100, last_step=100, durable_step=100,
                 uptime_s=17.0, returned_at_s=10.0)  # fmt: skip
    found = bill(JobRun(parts={0: usual}, state="ended"), JobRun(parts={0: once}, state="failed"))
    assert (found.runs[1].died_step, found.steps_lost) == (104, 4)


def test_a_step_is_the_median_so_that_pauses_are_none_of_it():
    """A step takes 0.5 s, saves each 10 steps take 0.1 s, and after every fourth one an evaluation 60 s."""
    account, at_s = Account(), 0.0
    for number in range(41):
        feed(account, 10 * number, at_s)
        at_s += 5.1 + 60.0 * (number % 4 == 3)
    run = a_run(
        returned=41, progress=account.progress, climbs=account.climbs, climbed_s=account.climbed_s, save_s=4.1,
        paces=dict(account.paces), longest=account.longest,
    )  # fmt: skip
    (one,) = bill(JobRun(parts={0: run}, state="ended")).runs
    assert one.interval.step_s == pytest.approx(0.5, rel=0.02)
    assert one.interval.seconds == pytest.approx(5.1 + 15.0)
    assert account.longest == 10


def test_the_predicted_loss_is_what_was_measured_and_the_model_is_told_beside_it():
    from pccheck.tuning.goodput import loss_per_failure

    run = a_run(
        uptime_s=3600.0, age_s2=3600.0 * 12.0, returned=361, progress=3600, climbs=360, climbed_s=3600.0,
        save_s=36.1, first_save_s=0.1, durable={durations.bucket(4.0): 361}, durable_worst_s=9.0, in_flight=2,
    )  # fmt: skip
    calm = bill(JobRun(parts={0: run}, state="ended")).runs[0].loss
    assert (calm.work_s, calm.model_s, calm.restart_s, calm.total_s) == (12.0, None, None, 12.0)
    again = msgspec.structs.replace(run, incarnation=2, began_s=run.began_s + 3630.0, restored_at_s=2.0)
    loss = bill(JobRun(parts={0: run}, state="failed"), JobRun(parts={0: again}, state="ended")).runs[1].loss
    expected = loss_per_failure(9.9, stall_s=0.1, durable_s=4.0, mtbf_s=7200.0, in_flight=2)
    assert loss.model_s == pytest.approx(expected, rel=0.01)
    assert loss.restart_s == pytest.approx(32.0)
    assert loss.total_s == pytest.approx(12.0 + 32.0), "the measured age, whatever the model says"


def test_of_several_ranks_the_dearest_costs_and_rank_0_times():
    parts = {
        0: a_run(rank=0, world=3, save_s=1.0, written_bytes=10, state_bytes=1, retries=1, durable_step=5),
        1: a_run(rank=1, world=3, save_s=1.0, gate_wait_s=3.0, written_bytes=30, state_bytes=3, retries=0, failed=2),
        2: a_run(rank=2, world=3, save_s=2.0, written_bytes=20, state_bytes=2, retries=5, last_step=7, uptime_s=1.0),
    }
    (one,) = bill(JobRun(parts=parts, state="running"), now_s=0.0).runs
    assert (one.cost.rank, one.cost.gate_wait_s, one.ranks) == (1, 3.0, (0, 1, 2))
    assert (one.written_bytes, one.state_bytes, one.saves.retries, one.saves.failed) == (60, 6, 6, 2)
    assert (one.reached_step, one.durable_step, one.uptime_s) == (90, 5, 100.0)


def test_the_age_now_is_told_of_a_run_that_goes_on():
    run = a_run(durable_step=5, saved_at_s=90.0)
    assert bill(JobRun(parts={0: run}, state="running"), now_s=run.began_s + 97.0).runs[0].age.now_s == 7.0
    assert bill(JobRun(parts={0: run}, state="ended"), now_s=run.began_s + 97.0).runs[0].age.now_s is None
