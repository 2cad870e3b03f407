"""The choice of the snapshot mode, in numbers: a pure policy."""

from __future__ import annotations

import itertools
import random

import pytest

from pccheck.saving.choice import LEAST_GAIN_S, PROBE_FLOOR_S, PROBE_SHARE, REMEASURE_EVERY, TRIALS, Choice

ALL = ("copy", "lazy", "device")


def run(choice, legal, stall, saves):
    """Make saves whose stall is what `stall(mode, i)` says; give the modes picked."""
    picked = []
    for i in range(saves):
        mode = choice.pick(legal).mode
        picked.append(mode)
        choice.note(mode, stall(mode, i))
    return picked


def fixed(**stalls):
    return lambda mode, i: stalls[mode]


@pytest.mark.parametrize("best", ALL)
def test_every_legal_mode_is_tried_and_the_cheapest_is_taken(best):
    stalls = dict.fromkeys(ALL, 0.010) | {best: 0.002}
    picked = run(Choice(), ALL, fixed(**stalls), 40)
    assert {mode: picked[: 3 * TRIALS].count(mode) for mode in ALL} == dict.fromkeys(ALL, TRIALS)
    assert set(picked[3 * TRIALS :]) == {best}


def test_only_what_is_legal_is_picked():
    assert set(run(Choice(), ("copy",), fixed(copy=1.0), 200)) == {"copy"}
    assert "lazy" not in run(Choice(), ("copy", "device"), fixed(copy=1.0, device=0.1, lazy=0.0), 200)


def test_the_first_measure_of_a_mode_is_not_counted():
    """It touches new memory: a mode that was slow once and is fast then is taken."""
    seen = []

    def stall(mode, i):
        seen.append(mode)
        return 1.0 if mode == "device" and seen.count("device") == 1 else {"copy": 0.010, "device": 0.001}[mode]

    assert run(Choice(), ("copy", "device"), stall, 20)[-1] == "device"


def test_noise_makes_no_swing():
    """Two modes of nearly the same stall: the choice stays, but for measuring again."""
    chance = random.Random(1)
    choice = Choice()
    picked = run(choice, ("lazy", "copy"), lambda mode, i: 0.010 * chance.uniform(0.9, 1.1), 1000)
    assert sum(a != b for a, b in itertools.pairwise(picked[10:])) <= 2 * 1000 // REMEASURE_EVERY


def test_a_gain_too_small_to_matter_changes_nothing():
    choice = Choice()
    run(choice, ("lazy", "copy"), fixed(lazy=0.0001, copy=0.0002), 20)
    tiny = LEAST_GAIN_S / 10
    picked = run(choice, ("lazy", "copy"), fixed(lazy=0.0001 + tiny, copy=0.0), 500)
    assert picked.count("copy") <= 500 // REMEASURE_EVERY + 1


def test_it_changes_its_mind_when_things_change():
    """Lazy was free while steps were long; then each fence waits: after a while copy is taken, and later lazy again."""
    choice = Choice()
    assert run(choice, ("lazy", "copy"), fixed(lazy=0.0, copy=0.020), 50)[-1] == "lazy"
    picked = run(choice, ("lazy", "copy"), fixed(lazy=0.100, copy=0.020), 300)
    assert picked[-1] == "copy"
    assert picked.index("copy") < 20, "the stall of the chosen mode is seen at once, the other's is known"
    picked = run(choice, ("lazy", "copy"), fixed(lazy=0.0, copy=0.020), 3000)
    assert picked[-1] == "lazy"


def test_measuring_again_costs_at_most_its_share():
    choice = Choice()
    run(choice, ALL, fixed(lazy=0.001, copy=0.200, device=0.050), 3 * TRIALS)
    saves, total = 20_000, 0.0
    for _ in range(saves):
        picked = choice.pick(ALL)
        stall = {"lazy": 0.001, "copy": 0.200, "device": 0.050}[picked.mode]
        total += stall
        choice.note(picked.mode, stall)
    extra = total / saves - 0.001
    assert 0 < extra <= 2.1 * max(PROBE_SHARE * 0.001, PROBE_FLOOR_S)  # two modes are measured again


def test_a_mode_that_becomes_illegal_is_left_and_taken_again():
    choice = Choice()
    assert run(choice, ALL, fixed(lazy=0.0, copy=0.02, device=0.01), 20)[-1] == "lazy"
    assert set(run(choice, ("copy", "device"), fixed(copy=0.02, device=0.01), 20)) == {"device"}
    assert run(choice, ALL, fixed(lazy=0.0, copy=0.02, device=0.01), 100)[-1] == "lazy"


def test_the_reason_tells_the_numbers():
    choice = Choice()
    run(choice, ("lazy", "copy"), fixed(lazy=0.0015, copy=0.25), 10)
    assert choice.pick(("lazy", "copy")).reason == "stall per save: lazy 1.50 ms, copy 250.00 ms"
