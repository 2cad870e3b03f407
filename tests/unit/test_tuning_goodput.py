"""Useful fraction, losses, ages, slowdown: printed digits, limits, and where one form passes into another."""

from __future__ import annotations

import math

import pytest

from pccheck import tuning


def useful(work, stall, lag, mtbf, restart=0.0, in_flight=None):
    return tuning.useful_fraction(
        work, stall_s=stall, durable_s=lag, mtbf_s=mtbf, restart_s=restart, in_flight=in_flight
    )


def loss(work, stall, lag, mtbf, in_flight=None):
    return tuning.loss_per_failure(work, stall_s=stall, durable_s=lag, mtbf_s=mtbf, in_flight=in_flight)


@pytest.mark.parametrize(
    ("setting", "fraction", "lost"),
    [
        ((600, 60, 60, 3600, 120), 0.801147463, 319.922311),
        ((60, 0.5, 150, 2700, 100), 0.894106097, 173.950099),
        ((20, 0.2, 70, 519, 60), 0.756108580, 74.081615),
        ((300, 5, 290, 960, 250), 0.478606091, 353.926131),
    ],
)
def test_vectors(setting, fraction, lost):
    assert f"{useful(*setting):.9f}" == f"{fraction:.9f}"
    assert f"{loss(*setting[:4]):.6f}" == f"{lost:.6f}"


@pytest.mark.parametrize(
    ("setting", "fraction"),
    [((10, 0.5, 60, 1000, 60, 4), 0.593750431), ((5, 0.1, 40, 300, 30, 2), 0.206215776)],
)
def test_vectors_while_training_waits(setting, fraction):
    assert f"{useful(*setting):.9f}" == f"{fraction:.9f}"
    work, stall, lag, mtbf, restart, n = setting
    simple = useful(lag / n - stall, stall, lag, mtbf, restart) * work / (lag / n - stall)
    assert 1.005 < fraction / simple < 1.09  # an even period is a lower bound


def test_in_flight_matters_only_where_training_waits():
    for n in (2, 3, 64):
        assert useful(60, 0.5, 120, 2700, 100, n) == useful(60, 0.5, 120, 2700, 100)
        assert loss(60, 0.5, 120, 2700, n) == loss(60, 0.5, 120, 2700)
    assert useful(60, 0.5, 130, 2700, 100, 2) < useful(60, 0.5, 130, 2700, 100)


def test_the_two_forms_meet_where_waiting_begins():
    for n in (1, 2, 5):
        edge = n * (10 + 0.5)
        for f in (useful, loss):
            below, above = f(10, 0.5, edge, 700, in_flight=n), f(10, 0.5, edge + 1e-9, 700, in_flight=n)
            assert below == pytest.approx(above, rel=1e-9)
        ages = [tuning.state_age(10, stall_s=0.5, durable_s=lag, in_flight=n) for lag in (edge, edge + 1e-9)]
        assert ages[0].mean_s == pytest.approx(ages[1].mean_s)
        assert ages[0].max_s == pytest.approx(ages[1].max_s)


def test_while_training_waits_longer_intervals_are_better():
    fractions = [useful(work, 0.1, 120, 900, 60, 3) for work in (1, 5, 10, 20, 30, 39)]
    assert fractions == sorted(fractions)


def test_without_failures_only_overhead_is_left():
    assert useful(60, 0.5, 150, math.inf) == 60 / 60.5
    assert useful(10, 0.5, 60, math.inf, 1e6, 4) == 10 / 15
    for n in (None, 4):
        assert useful(10, 0.5, 60, 1e15, in_flight=n) == pytest.approx(useful(10, 0.5, 60, math.inf, in_flight=n))


@pytest.mark.parametrize("n", [None, 1, 2, 4])
@pytest.mark.parametrize("mtbf", [1e6, 1e9, 1e12, 1e18, math.inf])
def test_losses_of_rare_failures_keep_their_digits(n, mtbf):
    """They tend to the mean age of what is durable, less the stall, from below."""
    limit = tuning.state_age(10, stall_s=0.5, durable_s=60, in_flight=n).mean_s - 0.5
    assert loss(10, 0.5, 60, mtbf, n) == pytest.approx(limit, rel=200 / mtbf + 1e-6)


def test_first_order_loss():
    first = tuning.loss_first_order(60, stall_s=0.5, durable_s=150)
    assert first == 149.5 + 60.5 / 2
    assert loss(60, 0.5, 150, 1e7) == pytest.approx(first, rel=1e-4)
    frequent = tuning.loss_first_order(300, stall_s=5, durable_s=290)
    assert loss(300, 5, 290, 960) / frequent - 1 == pytest.approx(-0.191, abs=0.001)  # (L + tau) / M = 0.6


def test_failures_more_frequent_than_checkpoints():
    assert useful(1e6, 1, 10, 1) == 0
    assert loss(1e6, 1, 10, 1) == 1
    assert loss(1000, 0, 0, 100) == pytest.approx(100 - 1000 / math.expm1(10), rel=1e-12)
    assert 0 < useful(1000, 1, 10, 10) < 1e-38
    assert useful(1, 0, 1e6, 1, in_flight=2) == 0


def test_state_age():
    assert tuning.state_age(50, stall_s=0, durable_s=50) == tuning.StateAge(mean_s=75, max_s=100)  # CheckFreq's bound
    assert tuning.state_age(50, stall_s=0, durable_s=0) == tuning.StateAge(mean_s=25, max_s=50)
    assert tuning.state_age(10, stall_s=2, durable_s=35) == tuning.StateAge(mean_s=41, max_s=47)
    one = tuning.state_age(10, stall_s=0, durable_s=35, in_flight=1)  # a period is as long as a checkpoint takes
    assert one == tuning.StateAge(mean_s=35 * 1.5, max_s=70)


def test_slowdown():
    given = {"step_s": 0.5, "durable_s": 20, "in_flight": 2}
    assert tuning.slowdown(10, **given) == 2
    assert tuning.slowdown(20, **given) == 1
    assert tuning.slowdown(100, **given) == 1
    assert tuning.slowdown(20, **given, stall_s=1) == 1.1
    assert tuning.slowdown(10, **given, stall_s=1) == 2  # the stall hides in the wait
