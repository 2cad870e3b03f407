"""The rules for the interval and the number in flight: printed digits, brute force, and what they say binds."""

from __future__ import annotations

import math

import numpy as np
import pytest

from pccheck import tuning
from pccheck.errors import OptionError
from pccheck.tuning import StorageModel


@pytest.mark.parametrize(
    ("durable", "n", "q", "step", "interval"),
    [
        (20, 2, 1.05, 0.5, 20),
        (20, 4, 1.05, 0.5, 10),
        (25.714285714285715, 3, 1.03, 0.37, 23),
        (26.666666666666668, 2, 1.2, 1.3, 9),
        (12, 2, 1.0, 0.6, 10),
        (4.2, 2, 1.0, 0.3, 7),  # 7.000000000000001 in floating point
        (1, 4, 1.05, 1, 1),
    ],
)
def test_pccheck_s_rule(durable, n, q, step, interval):
    """The vectors; and it is the shortest interval that keeps the slowdown, by the formula it was solved from."""
    assert tuning.pccheck_interval(durable, in_flight=n, step_s=step, slowdown=q) == interval
    assert tuning.slowdown(interval, step_s=step, durable_s=durable, in_flight=n) <= q * (1 + 1e-9)
    if interval > 1:
        assert tuning.slowdown(interval - 1, step_s=step, durable_s=durable, in_flight=n) > q


def test_stall_and_waits():
    assert tuning.stall_interval(1, step_s=1, fraction=0.05) == 20
    assert tuning.stall_interval(1.001, step_s=1, fraction=0.05) == 21
    assert tuning.stall_interval(0, step_s=1, fraction=0.05) == 1
    assert tuning.waitless_interval(120, in_flight=2, step_s=2.5, stall_s=1) == 24
    assert tuning.waitless_interval(120, in_flight=2, step_s=2.5) == 24
    assert tuning.waitless_interval(1, in_flight=2, step_s=2.5, stall_s=9) == 1


@pytest.mark.parametrize(
    ("setting", "interval", "binds"),
    [
        ((0.5, 0.1, 519, 60, 2, 1.05, 0.05, 5, 0.5, 1.0), 20, "failures"),
        ((0.5, 0.1, 519, 60, 4, 1.05, 0.05, 5, 0.5, 1.0), 20, "failures"),
        ((0.13, 0.004, 2700, 100, 4, 1.03, 0.03, 1.3, 0.4, 1.0), 36, "failures"),
        ((2.5, 1.0, 960, 250, 2, 1.05, 0.02, 54, 0.5, 0.9), 24, "waits"),
        ((62, 3, 43200, 600, 1, 1.05, 0.05, 75, 12, 12), 8, "failures"),
    ],
)
def test_vectors_of_the_combined_rule(setting, interval, binds):
    t, c, m, r, n, q, p, state, stream, total = setting
    disk = StorageModel(stream, total)
    chosen = tuning.choose_interval(
        step_s=t,
        stall_s=c,
        durable_s=max(state / stream, n * state / total),
        durable_alone_s=state / stream,
        in_flight=n,
        slowdown=q,
        stall_fraction=p,
        mtbf_s=m,
        restart_s=r,
    )
    assert (chosen.interval, chosen.binds) == (interval, binds)
    assert disk.durable_s(100, n) == max(100 / stream, n * 100 / total)
    assert chosen.useful == tuning.useful_fraction(
        interval * t, stall_s=c, durable_s=state / stream, mtbf_s=m, restart_s=r
    )
    if binds == "waits":
        assert chosen.terms == {"bandwidth": 23, "stall": 20, "waits": 24, "failures": 17}
        assert tuning.optimum(c, m) / t == pytest.approx(17.3, abs=0.05)


def settings(count):
    """Random settings in which each of the terms binds now and then."""
    draw = np.random.default_rng(8)
    for _ in range(count):
        step = draw.choice([0.05, 0.3, 1.0, 2.5])
        lag = step * 10 ** draw.uniform(-1, 2.2)
        yield {
            "step_s": step,
            "stall_s": draw.choice([0.0, step * 10 ** draw.uniform(-2, 0.8)]),
            "durable_s": lag,
            "durable_alone_s": lag * draw.uniform(0.2, 1),
            "in_flight": int(draw.integers(1, 6)),
            "slowdown": draw.choice([1.0, 1.03, 1.05, 1.5]),
            "stall_fraction": draw.choice([0.02, 0.05, 0.3]),
            "mtbf_s": draw.choice([None, step * 10 ** draw.uniform(2.3, 4.5)]),
            "restart_s": step * draw.uniform(0, 100),
            "rpo_s": draw.choice([None, None, lag + step * 10 ** draw.uniform(0, 2.5)]),
        }


FURTHEST = 5000
ALL = np.arange(1, FURTHEST + 1)


def ratio_and_useful(of):
    """Slowdown, useful fraction and greatest age for every interval, written anew from their definitions."""
    work = ALL * of["step_s"]
    busy, n, late = work + of["stall_s"], of["in_flight"], of["durable_s"]
    ratio = np.maximum(busy / work, late / (n * work))
    lag = np.where(busy * n >= late * (1 - 1e-9), of["durable_alone_s"], late)
    m = of["mtbf_s"] or math.inf
    useful = work / m * np.exp(-(of["restart_s"] + lag - of["stall_s"]) / m) / np.expm1(busy / m) if of["mtbf_s"] else 0
    return ratio, useful, of["durable_alone_s"] + busy


def test_the_choice_is_what_brute_force_finds():
    """Of all intervals up to 5,000 that keep every bound: the greatest useful fraction, or without one the shortest."""
    seen = {}
    for of in settings(1500):
        chosen = tuning.choose_interval(**of)
        ratio, useful, age = ratio_and_useful(of)
        work, n = ALL * of["step_s"], of["in_flight"]
        allowed = of["durable_s"] <= n * work * of["slowdown"] * (1 + 1e-9)
        allowed &= of["stall_s"] <= of["stall_fraction"] * work * (1 + 1e-9)
        if of["mtbf_s"] or of["rpo_s"]:
            allowed &= n * (work + of["stall_s"]) >= of["durable_s"] * (1 - 1e-9)
        kept = allowed & (age <= (of["rpo_s"] or math.inf) * (1 + 1e-9))
        at = chosen.interval - 1
        assert chosen.feasible == kept.any()
        if not chosen.feasible:
            best = int(np.flatnonzero(allowed)[0])  # as near to the recovery point as the other bounds let it
        elif of["mtbf_s"]:
            best = int(np.argmax(np.where(kept, useful, -1)))
            assert useful[best] <= useful[at] * (1 + 1e-12)
        else:
            best = int(np.flatnonzero(kept)[0])
        assert at == best, of
        assert chosen.slowdown == pytest.approx(ratio[at])
        if allowed[at] and (of["mtbf_s"] or of["rpo_s"]):
            assert chosen.oldest_s == pytest.approx(age[at])
        if of["mtbf_s"]:
            assert chosen.useful == pytest.approx(useful[at])
        else:
            assert chosen.useful is None
        seen[chosen.binds] = seen.get(chosen.binds, 0) + 1
        assert bool(chosen.why) == (not chosen.feasible)
        seen["infeasible"] = seen.get("infeasible", 0) + (not chosen.feasible)
    assert min(seen.values()) >= 10
    assert seen.keys() == {"bandwidth", "stall", "failures", "waits", "recovery point", "every step", "infeasible"}


def test_ruling_out_waits_loses_next_to_nothing():
    """Were intervals with waits allowed, too, the best would be at most one step shorter (durable_s <= mtbf_s)."""
    compared = 0
    for of in settings(400):
        if of["mtbf_s"] is None or of["durable_s"] > of["mtbf_s"]:
            continue
        of.update(rpo_s=None, durable_alone_s=of["durable_s"], slowdown=1.5)
        chosen = tuning.choose_interval(**of)
        given = {k: of[k] for k in ("stall_s", "durable_s", "mtbf_s", "restart_s", "in_flight")}
        least = max(chosen.terms["bandwidth"], chosen.terms["stall"])
        intervals = range(least, max(least, chosen.interval) + 50)
        best = max(intervals, key=lambda f: tuning.useful_fraction(f * of["step_s"], **given))
        assert chosen.interval - 1 <= best <= chosen.interval
        compared += 1
    assert compared > 100


GIVEN = {"step_s": 1, "stall_s": 0.1, "durable_s": 42, "in_flight": 2}


def test_what_binds_is_named():
    def binds(**other):
        chosen = tuning.choose_interval(**{**GIVEN, **other})
        return chosen.binds, chosen.interval

    assert binds() == ("bandwidth", 20)
    assert binds(stall_s=2) == ("stall", 40)
    assert binds(durable_s=1, stall_s=0) == ("every step", 1)
    assert binds(mtbf_s=100) == ("waits", 21)
    assert binds(mtbf_s=10_000) == ("failures", 45)
    assert binds(mtbf_s=10_000, rpo_s=42 + 0.1 + 30) == ("recovery point", 30)
    assert binds(mtbf_s=10_000, rpo_s=42 + 0.1 + 300) == ("failures", 45)
    assert binds(rpo_s=100) == ("waits", 21)
    assert binds(mtbf_s=100, stall_s=0, durable_s=0) == ("every step", 1)


def test_where_checkpoints_wait_what_is_durable_is_older():
    chosen = tuning.choose_interval(**GIVEN, durable_alone_s=20)
    assert chosen.interval < chosen.terms["waits"]
    assert chosen.oldest_s == pytest.approx(42 + (42 - 20.1))
    assert tuning.choose_interval(**GIVEN, durable_alone_s=20, mtbf_s=100).oldest_s == pytest.approx(20 + 21.1)


def test_a_recovery_point_that_cannot_be_kept_is_said_with_what_helps():
    chosen = tuning.choose_interval(**GIVEN, rpo_s=60)
    assert (chosen.feasible, chosen.interval, chosen.binds) == (False, 21, "waits")
    assert chosen.oldest_s == pytest.approx(63.1)
    assert "63.1 s old, more than 60 s" in chosen.why
    assert "faster storage" in chosen.why
    stalls = tuning.choose_interval(**{**GIVEN, "stall_s": 5}, rpo_s=60)
    assert not stalls.feasible
    assert "stalls the trainer less" in stalls.why
    assert tuning.choose_interval(**GIVEN, rpo_s=10).terms["recovery point"] < 0


def test_a_free_checkpoint_is_bound_by_storage_alone():
    """A stall of 0 puts the optimum at 0: as often as storage keeps up."""
    chosen = tuning.choose_interval(**{**GIVEN, "stall_s": 0.0}, mtbf_s=1000)
    assert (chosen.interval, chosen.binds, chosen.terms["failures"]) == (21, "waits", 1)


def test_best_in_flight():
    disk = StorageModel(5, 20)
    times = {n: disk.durable_s(100, n) for n in range(1, 9)}
    assert tuning.best_in_flight(times) == 4
    assert tuning.best_in_flight(times, state_bytes=100, storage_bytes=499) == 3
    assert tuning.best_in_flight(times, state_bytes=100, storage_bytes=500) == 4
    assert tuning.best_in_flight(times, state_bytes=100, storage_bytes=500, keep=2) == 3
    assert tuning.best_in_flight({1: 1.0, 2: 1.99, 3: 2.9}) == 3
    assert tuning.best_in_flight({1: 1.0, 2: 1.99, 3: 2.98}) == 1  # a percent is noise
    assert tuning.best_in_flight({1: 1.0, 2: 1.99, 3: 2.98}, worth=0) == 3
    with pytest.raises(OptionError, match=r"storage_bytes=199 .* at least 200 for checkpoints"):
        tuning.best_in_flight(times, state_bytes=100, storage_bytes=199)
    with pytest.raises(OptionError, match="state_bytes"):
        tuning.best_in_flight(times, storage_bytes=199)
    with pytest.raises(OptionError, match="durable_s"):
        tuning.best_in_flight({})
    with pytest.raises(OptionError, match="worth"):
        tuning.best_in_flight(times, worth=-0.1)


def test_in_flight_needed():
    assert tuning.in_flight_needed(150, work_s=60, stall_s=0.5) == 3
    assert tuning.in_flight_needed(121, work_s=60, stall_s=0.5) == 2
    assert tuning.in_flight_needed(0, work_s=60) == 1
    n = tuning.in_flight_needed(150, work_s=60, stall_s=0.5)
    assert tuning.slowdown(60, step_s=1, durable_s=150, in_flight=n, stall_s=0.5) == 60.5 / 60
    assert tuning.slowdown(60, step_s=1, durable_s=150, in_flight=n - 1, stall_s=0.5) > 60.5 / 60
