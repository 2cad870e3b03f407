"""The closed forms against simulated failures: another program, no formula, and they agree within 1 %.

A stretch of training without a failure is played step by step: steps, checkpoints in slots, waits for a slot. Where
failures fall in it is drawn at random, from strata of equal probability so that few are enough. What was durable then
is what the stretch has gained. That 1 % tells a right formula from a wrong one is shown with wrong ones.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass

import numpy as np
import pytest

from pccheck import tuning

FAILURES = 200_000
NEAR = 0.01


@dataclass(frozen=True)
class Setting:
    """A step and an interval, what a checkpoint costs and takes, how many at once, failures and restarts; seconds."""

    step: float
    interval: int
    stall: float
    lag: float
    slots: int
    mtbf: float
    restart: float

    @property
    def given(self):
        return {"stall_s": self.stall, "durable_s": self.lag, "mtbf_s": self.mtbf}

    @property
    def work(self):
        return self.step * self.interval


SETTINGS = {
    "blocking": Setting(1, 600, 120, 120, 1, 1800, 120),
    "blocking, often": Setting(2, 30, 4, 4, 1, 100, 30),
    "one in flight": Setting(0.5, 120, 0.5, 30, 1, 270, 100),
    "three in flight": Setting(0.5, 120, 0.5, 150, 3, 900, 100),
    "failures within the lag": Setting(5, 60, 5, 290, 2, 960, 250),
    "free checkpoints": Setting(0.2, 100, 0, 70, 4, 519, 60),
    "waits, one in flight": Setting(1, 10, 1, 40, 1, 300, 30),
    "waits, two in flight": Setting(0.5, 10, 0.1, 40, 2, 300, 30),
    "waits, four in flight": Setting(1, 10, 0.5, 60, 4, 1000, 60),
}


def stretch(of, until):
    """Train without a failure; give, for each checkpoint, when it is durable, the steps in it, and when its stall ends.

    A state is taken when its steps are done and a slot is free, and is durable `lag` later.
    """
    now, steps, under_way, told = 0.0, 0, [], []
    while now < until:
        now += of.step
        steps += 1
        if steps % of.interval:
            continue
        while under_way and under_way[0] <= now:
            heapq.heappop(under_way)
        if len(under_way) == of.slots:
            now = heapq.heappop(under_way)
        taken = now
        heapq.heappush(under_way, taken + of.lag)
        now += of.stall
        told.append((taken + of.lag, steps, now, taken))
    return np.array(told).T


def simulated(of, seed=3):
    """Give useful fraction, and mean seconds that one failure throws away."""
    draw = np.random.default_rng(seed)
    uniform = (np.arange(FAILURES) + draw.random(FAILURES)) / FAILURES
    lived = -of.mtbf * np.log1p(-uniform)
    durable, steps, ended, _ = stretch(of, lived.max())
    count = np.searchsorted(durable, lived, side="right")
    gained = np.concatenate([[0], steps])[count] * of.step
    kept = np.concatenate([[0], ended])[count]
    down = np.zeros(FAILURES)
    restarting = np.arange(FAILURES)
    while restarting.size:
        next_failure = draw.exponential(of.mtbf, restarting.size)
        down[restarting] += np.minimum(next_failure, of.restart)
        restarting = restarting[next_failure < of.restart]
    return gained.sum() / (lived.sum() + down.sum()), (lived - kept).mean()


def away(formula, simulation):
    return abs(formula / simulation - 1)


@pytest.mark.parametrize("of", SETTINGS.values(), ids=SETTINGS.keys())
def test_useful_fraction_and_losses(of):
    useful, lost = simulated(of)

    def formulas(lag, slots=of.slots):
        given = {**of.given, "durable_s": lag, "in_flight": slots}
        return (
            tuning.useful_fraction(of.work, **given, restart_s=of.restart),
            tuning.loss_per_failure(of.work, **given),
        )

    right = formulas(of.lag)
    assert away(right[0], useful) < NEAR
    assert away(right[1], lost) < NEAR
    half = formulas(of.lag / 2)  # as the model that comes with PCcheck's artifact has it
    assert away(half[0], useful) > NEAR
    assert away(half[1], lost) > NEAR
    if of.lag > of.slots * (of.work + of.stall):
        without_waits = formulas(of.lag, None)
        assert away(without_waits[0], useful) > NEAR
        assert away(without_waits[1], lost) > NEAR
    no_restart = tuning.useful_fraction(of.work, **of.given, in_flight=of.slots)
    assert away(no_restart, useful) > NEAR


def test_first_order_loss_where_failures_are_rare():
    of = Setting(0.5, 120, 0.5, 150, 3, 60_000, 0)
    _, lost = simulated(of)
    assert away(tuning.loss_first_order(of.work, stall_s=of.stall, durable_s=of.lag), lost) < NEAR
    assert away(tuning.loss_first_order(of.work, stall_s=of.stall, durable_s=of.lag / 2), lost) > NEAR


@pytest.mark.parametrize("of", SETTINGS.values(), ids=SETTINGS.keys())
def test_age_of_what_is_durable(of):
    durable, _, _, taken = stretch(of, 300 * (of.work + of.stall + of.lag))
    at = np.linspace(durable[len(durable) // 2], durable[-1], 1_000_000, endpoint=False)
    ages = at - taken[np.searchsorted(durable, at, side="right") - 1]
    formula = tuning.state_age(of.work, stall_s=of.stall, durable_s=of.lag, in_flight=of.slots)
    assert away(formula.mean_s, ages.mean()) < NEAR
    assert away(formula.max_s, ages.max()) < NEAR
    half = tuning.state_age(of.work, stall_s=of.stall, durable_s=of.lag / 2, in_flight=of.slots)
    assert away(half.mean_s, ages.mean()) > NEAR


def shared(interval, step, stall, slots, state, stream, total, checkpoints=600):
    """Train on storage that all checkpoints under way share; give time over time without them, and the worst lag.

    Storage gives each the same, `stream` at most and `total` together. What happens next is a step's worth of work
    that ends, a checkpoint that is durable, or a stall that ends.
    """
    now, left, stalled, trained, ready = 0.0, interval * step, 0.0, 0.0, False
    writing: dict[int, list[float]] = {}
    lags, begun, marks = [], 0, []
    while len(lags) < checkpoints:
        rate = min(stream, total / len(writing)) if writing else 0.0
        events = [bytes_left / rate for bytes_left, _ in writing.values()]
        if not ready:
            events.append(stalled if stalled > 0 else left)
        passed = min(events)
        now += passed
        for entry in writing.values():
            entry[0] -= rate * passed
        for done in [k for k, (bytes_left, _) in writing.items() if bytes_left <= 1e-9 * state]:
            lags.append(now - writing.pop(done)[1])
        if not ready and stalled > 0:
            stalled -= passed
            stalled = 0.0 if stalled < 1e-12 else stalled
        elif not ready:
            left -= passed
            trained += passed
            ready = left <= 1e-12
        if ready and len(writing) < slots:
            writing[begun] = [float(state), now]
            begun, left, stalled, ready = begun + 1, interval * step, stall, False
            marks.append((now, trained))
    half = len(marks) // 2
    return (marks[-1][0] - marks[half][0]) / (marks[-1][1] - marks[half][1]), max(lags[half:])


@pytest.mark.parametrize("stall", [0, 0.4])
@pytest.mark.parametrize(
    ("interval", "step", "slots", "state", "stream", "total"),
    [
        (20, 0.5, 1, 100, 5, 20),
        (20, 0.5, 2, 100, 5, 20),
        (20, 0.5, 4, 100, 5, 20),
        (8, 0.5, 4, 100, 5, 20),
        (8, 0.5, 8, 100, 5, 20),
        (5, 0.5, 6, 100, 5, 20),
        (60, 0.5, 1, 100, 5, 20),
        (22, 0.37, 3, 60, 3, 7),
        (8, 1.3, 2, 200, 10, 15),
    ],
)
def test_slowdown_on_storage_that_is_shared(stall, interval, step, slots, state, stream, total):
    ratio, worst = shared(interval, step, stall, slots, state, stream, total)
    disk = tuning.StorageModel(stream, total)
    lag = disk.durable_s(state, slots)
    formula = tuning.slowdown(interval, step_s=step, durable_s=lag, in_flight=slots, stall_s=stall)
    assert away(formula, ratio) < NEAR
    assert worst <= lag * (1 + 1e-9)  # T_w(N) is the worst case
    busy = interval * step + stall
    if lag > slots * busy:
        assert worst == pytest.approx(lag, rel=1e-6)
    if lag > 1.05 * slots * busy:
        half = tuning.slowdown(interval, step_s=step, durable_s=lag / 2, in_flight=slots, stall_s=stall)
        assert away(half, ratio) > NEAR
    if slots >= disk.saturating_in_flight and state / total < busy:
        assert worst == pytest.approx(state / stream, rel=1e-6)  # storage keeps up: each is as fast as alone


@pytest.mark.parametrize(
    ("step", "state", "stream", "total", "slots", "q"),
    [(0.5, 100, 5, 20, 2, 1.05), (0.5, 100, 5, 20, 4, 1.05), (0.37, 60, 3, 7, 3, 1.03), (1.3, 200, 10, 15, 2, 1.2)],
)
def test_pccheck_s_rule_is_the_shortest_interval_within_the_slowdown(step, state, stream, total, slots, q):
    lag = tuning.StorageModel(stream, total).durable_s(state, slots)
    interval = tuning.pccheck_interval(lag, in_flight=slots, step_s=step, slowdown=q)
    assert shared(interval, step, 0, slots, state, stream, total)[0] <= q * (1 + 1e-6)
    assert shared(interval - 1, step, 0, slots, state, stream, total)[0] > q
