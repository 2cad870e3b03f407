"""Advice: the formulas' own answer for the rates, within the budgets, and explained."""

from __future__ import annotations

import itertools
import math
import re
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import pccheck
from pccheck.errors import OptionError
from pccheck.tuning.advice import Advice, advise
from pccheck.tuning.basis import Rates
from pccheck.tuning.goodput import loss_per_failure, state_age, useful_fraction
from pccheck.tuning.intervals import choose_interval
from pccheck.tuning.machine import Machine, Sample
from pccheck.tuning.planning import WORTH
from pccheck.tuning.storage import pipeline_times
from pccheck.tuning.wanted import FAILURE_RATES, Wanted, failures_of

GB = 10**9
SPOT = FAILURE_RATES["spot"].mtbf_s


def ask(machine: Machine | Rates | None = None, **wishes: Any) -> Advice:
    """Ask for the 7B model of the README, if nothing else is wished."""
    return advise(Wanted(**{"state_bytes": 80 * GB, "step_s": 2.0, "mtbf_s": SPOT, **wishes}), machine)


# What the assumed rates, 500 MB/s and copies of 10 GB/s, make of 80 GB: written down by hand.
DURABLE_S = 160 + 0.01
LAZY_S = 0.005 + 80 / 10 - 2.0
COPY_S = 0.005 + 80 / 10
RESTART_S = 60 + 160


def expected(stall_s: float, durable_s: float = DURABLE_S, in_flight: int = 1, **wishes: Any) -> Any:
    known = {"step_s": 2.0, "mtbf_s": SPOT, "restart_s": RESTART_S, "stall_fraction": 1 - 1e-9, **wishes}
    return choose_interval(stall_s=stall_s, durable_s=durable_s, in_flight=in_flight, **known)


def test_the_answer_for_a_7b_model_on_spot_machines_is_that_of_the_formulas() -> None:
    advice = ask()
    choice = expected(LAZY_S)
    work_s = choice.interval * 2.0
    seen = advice.outcome
    assert (advice.interval, advice.binds, advice.source) == (choice.interval, "waits", "assumed")
    assert advice.options == {
        "in_flight": 1, "keep": 1, "snapshot": "lazy", "writers": 2, "chunk_bytes": 16 << 20,
        "buffer_bytes": math.ceil(80 * GB / (16 << 20)) * (16 << 20),
    }  # fmt: skip
    known = {"stall_s": LAZY_S, "durable_s": DURABLE_S}
    assert seen.stall_s == pytest.approx(LAZY_S)
    assert seen.durable_s == pytest.approx(DURABLE_S)
    assert seen.slowdown == pytest.approx(1 + LAZY_S / work_s)
    assert seen.useful == pytest.approx(useful_fraction(work_s, mtbf_s=SPOT, restart_s=RESTART_S, **known))
    assert seen.lost_s == pytest.approx(loss_per_failure(work_s, mtbf_s=SPOT, **known))
    assert seen.age_max_s == pytest.approx(state_age(work_s, **known).max_s)
    assert (advice.plan.storage_bytes, advice.plan.outcome.useful) == (160 * GB, advice.plan.choice.useful)


def test_beside_it_stand_another_number_in_flight_and_blocking_saves() -> None:
    advice = ask()
    two, best, habit = advice.others
    assert (two.name, two.useful) == ("2 in flight", pytest.approx(advice.outcome.useful))
    blocking = {"stall_s": DURABLE_S, "durable_s": DURABLE_S, "mtbf_s": SPOT, "restart_s": RESTART_S}
    assert best.interval == expected(DURABLE_S).interval
    assert best.useful == pytest.approx(useful_fraction(best.interval * 2.0, **blocking))
    assert (habit.name, habit.interval) == ("blocking, untuned", 1000)
    assert habit.useful == pytest.approx(useful_fraction(2000.0, **blocking))
    assert advice.outcome.useful is not None
    assert advice.outcome.useful > best.useful > habit.useful  # type: ignore[operator]


BINDING = [
    ("waits", {}, None, "Storage binds: every 78 steps is the most often that it takes without a wait, where every 37"),
    ("failures", {"mtbf_s": 50_000.0}, None, "The failure rate binds: every 385 steps is the optimum"),
    (
        "stall",
        {"stall_fraction": 0.03},
        None,
        "at most 3% of the time is allowed, so every 101 steps; for this failure rate",
    ),
    (
        "bandwidth",
        {"mtbf_s": None, "slowdown": 1.25, "stall_fraction": 0.5, "snapshot": "copy"},
        Rates(disk=GB / 10),
        "",
    ),
    (
        "recovery point",
        {"mtbf_s": 50_000.0, "rpo_s": 400.0},
        None,
        "every 116 steps is the least often that keeps it; for",
    ),
    ("every step", {"state_bytes": 10**6}, None, "Nothing binds: a save at every step"),
    (
        "DRAM budget",
        {"dram_bytes": 20 * GB},
        None,
        "The DRAM budget binds: with more than the 20 GB that this plan takes",
    ),
    ("storage budget", {"storage_bytes": 170 * GB}, Rates(disk=2e9, stream=5e8), "The storage budget binds: with more"),
]


@pytest.mark.parametrize(("binds", "wishes", "rates", "sentence"), BINDING, ids=[case[0] for case in BINDING])
def test_what_binds_is_found_and_said(binds: str, wishes: dict[str, Any], rates: Rates | None, sentence: str) -> None:
    advice = ask(rates, **wishes)
    assert (advice.binds, advice.unreachable) == (binds, ())
    assert sentence in advice.binding
    assert advice.as_json()["binds"] == binds


def test_the_bound_of_bandwidth_is_pcchecks_rule() -> None:
    """Without a failure rate: as often as the slowdown allows."""
    advice = ask(Rates(disk=1e9, copy=1e12), mtbf_s=None, slowdown=1.25)
    assert (advice.binds, advice.interval) == ("bandwidth", math.ceil(80.01 / (1.25 * 2)))
    assert advice.outcome.slowdown == pytest.approx(80.01 / (advice.interval * 2), rel=1e-6)
    assert "slows by no more than the factor 1.25" in advice.binding
    assert "saves wait for a slot" in " ".join(advice.meaning)
    assert advice.outcome.useful is None
    assert any("--mtbf" in sentence for sentence in advice.meaning)


WISHES: list[tuple[Rates | None, dict[str, Any]]] = [
    (None, {}),
    (None, {"mtbf_s": 2700.0}),
    (Rates(disk=2e9, stream=5e8), {"mtbf_s": 2700.0}),
    (Rates(disk=5e9, stream=1e9, copy=80e9), {"state_bytes": 20 * GB, "step_s": 0.5}),
    (Rates(disk=5e9), {"snapshot": "copy", "mtbf_s": 1e5}),
    (None, {"dram_bytes": 20 * GB}),
]


@pytest.mark.parametrize(("rates", "wishes"), WISHES)
def test_no_other_interval_or_number_in_flight_is_better(rates: Rates | None, wishes: dict[str, Any]) -> None:
    advice = ask(rates, **wishes)
    assert advice.outcome.useful is not None
    intervals = sorted(
        {*range(1, 200), *(advice.interval + d for d in range(-5, 6)), 500, 1000, 5000} - set(range(-5, 1))
    )
    for in_flight in (1, 2, 3, 4):
        try:
            others = advice.curve(intervals, in_flight=in_flight)
        except OptionError:
            continue  # no room for so many
        assert max(o.useful or 0.0 for o in others) <= advice.outcome.useful + WORTH + 1e-12


def test_more_in_flight_is_advised_where_one_stream_cannot_fill_the_storage() -> None:
    advice = ask(Rates(disk=2e9, stream=5e8, copy=80e9), mtbf_s=2700.0)
    assert advice.options["in_flight"] == 4
    assert (advice.options["writers"], advice.options["writers_per_checkpoint"]) == (4, 1)
    one = advice.others[0]
    assert one.name == "1 in flight"
    assert advice.outcome.useful > one.useful + WORTH  # type: ignore[operator]


def test_what_helps_is_the_advice_for_the_better_thing() -> None:
    advice = ask()
    said = {help.what: help for help in advice.helps}
    assert said["storage twice as fast"].useful == pytest.approx(ask(Rates(disk=1e9)).outcome.useful, abs=1e-3)
    assert said["copying twice as fast"].useful == pytest.approx(ask(Rates(copy=20e9)).outcome.useful)
    assert said["half as many failures"].useful == pytest.approx(
        ask(mtbf_s=2 * SPOT, restart_s=RESTART_S).outcome.useful
    )
    assert said["restarts in half the time, 110 s"].useful == pytest.approx(ask(restart_s=110).outcome.useful)
    assert said["a state of half the size"].useful == pytest.approx(ask(state_bytes=40 * GB).outcome.useful, abs=1e-3)
    assert not said["in_flight=2"].worth
    assert [h.useful for h in advice.helps] == sorted((h.useful or 0.0 for h in advice.helps), reverse=True)
    first = advice.helps[0]
    assert advice.helping[0].startswith(f"{first.what}: {first.useful:.1%} useful instead of 39.9%")
    assert advice.helping[-1] == "in_flight=2: next to nothing"


def test_a_budget_in_the_way_is_named_with_what_would_do() -> None:
    advice = ask(dram_bytes=20 * GB)
    assert any(sentence.startswith("a DRAM budget of 80 GB: 39.9% useful") for sentence in advice.helping)
    assert advice.plan.buffer_bytes <= 20 * GB
    lost = ask(mtbf_s=None)
    assert any("lost per failure instead of" in sentence for sentence in lost.helping)


def test_a_recovery_point_out_of_reach_is_told_with_the_nearest() -> None:
    advice = ask(rpo_s=100.0)
    (sentence,) = advice.unreachable
    assert sentence.startswith("The recovery point of 100 s is out of reach: the nearest is 5 min 2")
    nearest = advice.outcome.age_max_s
    assert ask(rpo_s=nearest).unreachable == ()
    assert ask(rpo_s=nearest * 0.97).unreachable
    assert any(help.feasible and help.worth for help in ask(rpo_s=nearest * 0.6).helps)


@pytest.mark.parametrize("rates", [Rates(), Rates(disk=1e9, stream=5e8)])
def test_where_no_help_keeps_the_recovery_point_the_rate_of_storage_that_does_is_told(rates: Rates) -> None:
    advice = ask(rates, rpo_s=60.0, mtbf_s=6 * 3600.0)
    assert [help.what for help in advice.helps if help.feasible] == [advice.helps[0].what]
    found = re.fullmatch(r"storage ([0-9.]+) times as fast, ([0-9.]+) GB/s", advice.helps[0].what)
    assert found is not None
    times = float(found[1])
    assert float(found[2]) == pytest.approx(times * (rates.disk or 5e8) / GB, rel=0.01)
    assert "keeps the recovery point" in advice.helping[0]
    assert advice.helping[-1] == "nothing else here keeps the recovery point"
    for factor, reached in ((times, True), (0.95 * times, False)):
        faster = Rates(disk=factor * (rates.disk or 5e8), stream=factor * (rates.stream or 5e8))
        assert (ask(faster, rpo_s=60.0, mtbf_s=6 * 3600.0).unreachable == ()) is reached
    assert ask(rates, rpo_s=1.0).helping[-1] == "none of these, and no rate of storage, keeps the recovery point"


@pytest.mark.parametrize("snapshot", ["copy", "lazy"])
@pytest.mark.parametrize("ranks", [1, 4])
def test_a_pool_smaller_than_the_state_waits_for_one_stream_not_for_all_of_the_storage(
    snapshot: str, ranks: int
) -> None:
    """The stall is that of the pipeline at the rate at which one file is written, as is the time to durable."""
    rates = Rates(disk=4.8e9, stream=2e8)
    advice = ask(rates, state_bytes=80 * GB * ranks, dram_bytes=40 * GB, snapshot=snapshot, ranks=ranks)
    times = pipeline_times(
        80 * GB, pool_bytes=40 * GB, chunk_bytes=16 << 20, copy_bytes_per_s=10e9, write_bytes_per_s=2e8
    )
    assert times.capture_s == pytest.approx(200, rel=0.001)
    hidden_s = 2.0 if snapshot == "lazy" else 0.0
    assert advice.outcome.stall_s == pytest.approx(0.005 + times.capture_s - hidden_s)
    assert advice.outcome.durable_s == pytest.approx(400.01)


@pytest.mark.parametrize(
    ("ranks", "stream", "said"),
    [
        (1, None, "the 2 GB/s that storage gives"),
        (1, 1e9, "the 1 GB/s that one file gives"),
        (4, 1e8, "the 400 MB/s that one file of each rank gives"),
        (4, 1e9, "the 2 GB/s that storage gives"),
    ],
)
def test_a_restart_reads_each_file_at_the_rate_of_one(ranks: int, stream: float | None, said: str) -> None:
    advice = ask(Rates(disk=2e9, stream=stream), ranks=ranks)
    assert any(said in sentence for sentence in advice.assumptions)
    assert advice.restart_s == pytest.approx(60 + 80e9 / min(2e9, ranks * (stream or 2e9)))


def test_one_in_flight_is_explained_by_what_one_stream_reaches() -> None:
    enough = "One checkpoint at a time is enough at these rates."
    assert any(sentence.startswith(enough) for sentence in ask(mtbf_s=6 * 3600.0).meaning)
    narrow = ask(Rates(disk=1.2e9, stream=2e8), mtbf_s=6 * 3600.0)
    (why,) = [sentence for sentence in narrow.meaning if "in_flight=2" in sentence]
    assert narrow.options["in_flight"] == 1
    assert why.startswith(
        "One stream cannot fill this storage, but one checkpoint at a time is enough at this interval"
    )
    assert narrow.others[0].useful == pytest.approx(narrow.outcome.useful, abs=WORTH), "as the sentence says"


def test_a_save_at_every_step_is_told_with_its_cost() -> None:
    dear = ask(state_bytes=GB, mtbf_s=30.0)
    assert dear.interval == 1
    assert dear.binding == "Nothing binds: a save at every step is best, though it costs 5.2% of the training time."
    assert any(sentence.startswith("Failures come so often that a restart (62 s)") for sentence in dear.meaning)
    cheap = ask(state_bytes=10**6, step_s=20.0, mtbf_s=300.0)
    assert cheap.interval == 1
    assert cheap.binding == "Nothing binds: a save at every step is best, and costs next to nothing."


@pytest.mark.parametrize(
    ("wishes", "field", "text"),
    [
        ({"storage_bytes": 100 * GB}, "storage_bytes", "at least 160 GB: slots for 1 under way and 1 to keep"),
        ({"storage_bytes": 200 * GB, "keep": 2}, "storage_bytes", "at least 240 GB"),
        ({"dram_bytes": 10**6}, "dram_bytes", "at least 33.6 MB, two chunks"),
        ({"slowdown": 0.05}, "slowdown", "at least 1"),
        ({"stall_fraction": 0}, "stall_fraction", "fraction"),
        ({"step_s": 0}, "step_s", "greater than 0"),
        ({"mtbf_s": math.inf}, "mtbf_s", "finite"),
        ({"state_bytes": 0}, "state_bytes", "whole number"),
        ({"snapshot": "device"}, "snapshot", "'lazy'"),
        ({"max_in_flight": 9}, "max_in_flight", "1 to 8"),
    ],
)
def test_wishes_that_cannot_be_are_refused_with_what_could(wishes: dict[str, Any], field: str, text: str) -> None:
    with pytest.raises(OptionError) as caught:
        ask(**wishes)
    assert caught.value.field == field
    assert text in str(caught.value)


@pytest.mark.parametrize("rates", [{"disk": 0}, {"disk": 1e9, "stream": 2e9}, {"stream": 1e9}, {"copy": math.nan}])
def test_rates_that_cannot_be_are_refused(rates: dict[str, float]) -> None:
    with pytest.raises(OptionError):
        Rates(**rates)


# -- of a probe --------------------------------------------------------------------------------------------------------


def sample(in_flight: int, durable_s: float, **changes: Any) -> Sample:
    known = {
        "state_bytes": GB, "in_flight": in_flight, "writers": 2, "writers_per_checkpoint": None,
        "chunk_bytes": 16 << 20, "buffer_bytes": in_flight * GB, "saves": 5, "durable_s": durable_s,
        "worst_durable_s": durable_s * 1.1, "period_s": durable_s / in_flight,
    }  # fmt: skip
    return Sample(**{**known, **changes})


def probed(*samples: Sample, **changes: Any) -> Machine:
    usual = (sample(1, 0.51), sample(1, 0.135, state_bytes=GB // 4), sample(2, 1.01), sample(3, 1.51))
    known = {
        "path": "/data", "filesystem": "ext4, direct", "time_s": 1.7e9, "pccheck": "0.1.0", "pipeline": "native",
        "cpus": 8, "memory_bytes": 64 * GB, "free_bytes": 100 * GB, "seconds": 20.0, "copy_bytes_per_s": 10e9,
        "read_bytes_per_s": 2e9, "commit_s": 0.01, "save_s": 0.002,
        "samples": samples or usual,
    }  # fmt: skip
    return Machine(**{**known, **changes})


def test_a_probe_is_what_the_advice_rests_on() -> None:
    advice = ask(probed(), state_bytes=2 * GB, step_s=0.25)
    assert advice.source == "probe"
    assert advice.restart_s == 60 + 1.0
    assert advice.outcome.durable_s == pytest.approx(1.01, rel=0.02)
    assert advice.plan.buffer_bytes <= 16 * GB  # a quarter of the memory, as the Checkpointer's own choice
    assert not any("is assumed" in sentence or "cloud SSD" in sentence for sentence in advice.assumptions)


def test_what_a_probes_rate_of_reading_is_is_said() -> None:
    def said(**changes: Any) -> str:
        (sentence,) = [s for s in ask(probed(**changes), state_bytes=2 * GB).assumptions if "restart" in s]
        return sentence

    known = {"reads": 7, "worst_read_bytes_per_s": 1.5e9, "fresh_memory_bytes_per_s": 2e8, "read_past_cache": True}
    assert said(**known) == (
        "a restart takes a minute until the program runs, and reading the state at the 2 GB/s that the probe read "
        "(median of 7, 1.5 GB/s at worst; fresh memory, which came at 200 MB/s there, is not counted) (`--restart`)"
    )
    assert "through the page cache" in said(**{**known, "read_past_cache": False})
    assert "through the page cache" not in said(**known)
    assert "2 GB/s that the probe read (once; " in said(**{**known, "reads": 1})
    assert "(an older probe, fresh memory may be in it: probe anew)" in said()


def test_what_a_probe_did_not_measure_is_said() -> None:
    far = " ".join(ask(probed(), state_bytes=40 * GB).assumptions)
    assert "the probe wrote checkpoints of 1 GB; 40 GB go at the same rate" in far
    assert "device_copy_bytes_per_s" in far
    near = ask(probed(device_copy_bytes_per_s=20e9), state_bytes=2 * GB).assumptions
    assert not any("the probe wrote" in sentence or "device_copy" in sentence for sentence in near)


def test_the_free_space_that_a_probe_saw_is_the_budget_for_storage() -> None:
    with pytest.raises(OptionError, match=r"the probe found only 100 GB free at /data .*: it must be at least 160 GB"):
        ask(probed())
    with pytest.raises(OptionError, match="a quarter of the memory that the probe found is only 16 MB for each pool"):
        ask(probed(memory_bytes=64 * 10**6), state_bytes=GB)
    bound = ask(probed(memory_bytes=4 * GB), state_bytes=4 * GB, step_s=0.1)
    assert bound.binding.startswith("Memory binds, a quarter of the 4 GB that the probe found for it")
    assert ask(probed(), storage_bytes=200 * GB).plan.storage_bytes == 160 * GB


def test_of_the_settings_that_were_probed_the_best_is_taken_and_the_default_if_it_is_as_good() -> None:
    usual = (sample(1, 0.51), sample(2, 1.01))
    fast = (sample(1, 0.26, writers=4), sample(2, 0.51, writers=4))
    same = (sample(1, 0.51, writers=4), sample(2, 1.01, writers=4))
    wishes = {"state_bytes": 20 * GB, "step_s": 0.5}
    assert ask(probed(*usual, *fast), **wishes).options["writers"] == 4
    assert ask(probed(*usual, *same), **wishes).options["writers"] == 2


def test_what_may_be_luck_of_few_saves_makes_no_interval_shorter() -> None:
    usual = (sample(1, 0.51), sample(2, 1.01))

    def bandwidth(saves: int) -> int:
        fast = (sample(1, 0.44, writers=4, saves=saves), sample(2, 0.87, writers=4, saves=saves))
        advice = ask(probed(*usual, *fast), state_bytes=20 * GB, step_s=0.5, snapshot="lazy")
        assert advice.options["writers"] == 4
        return advice.plan.choice.terms["bandwidth"]

    default = ask(probed(*usual), state_bytes=20 * GB, step_s=0.5, snapshot="lazy").plan.choice.terms["bandwidth"]
    assert bandwidth(40) < default <= bandwidth(6)


def test_a_rate_that_varies_is_told_with_what_bridges_it() -> None:
    steady, varying = probed(), probed(sample(1, 0.51, worst_durable_s=1.4), sample(2, 1.01))
    assert not any("varies" in sentence for sentence in ask(steady, state_bytes=2 * GB).meaning)
    told = [sentence for sentence in ask(varying, state_bytes=2 * GB).meaning if "varies" in sentence]
    assert len(told) == 1
    assert "in_flight=2 bridges slow spells, for 2 GB more of storage and of memory" in told[0]


def test_interference_is_named_beside_the_copies() -> None:
    advice = ask(probed(interference=0.1, device_copy_bytes_per_s=1e9), state_bytes=8 * GB)
    told = " ".join(advice.meaning)
    assert "interference, as training runs 10.0% slower while one is under way, 401 ms; copying" in told
    rests = " ".join(advice.assumptions)
    assert "10.0% slower while a checkpoint is under way (the probe's `interference`)" in rests
    assert "copied to host memory at 1 GB/s" in rests
    assert "runs no slower while a checkpoint" in " ".join(ask().assumptions)


# -- several ranks -----------------------------------------------------------------------------------------------------


def test_each_of_several_ranks_saves_its_part_from_a_pool_of_its_own() -> None:
    """80 GB of 64 ranks: a pool for 80 GB on each would have been 5 TB."""
    advice = ask(ranks=64)
    assert advice.options["buffer_bytes"] == math.ceil(80 * GB / 64 / (16 << 20)) * (16 << 20)
    assert advice.outcome.durable_s == pytest.approx(DURABLE_S)  # the storage is shared
    assert advice.outcome.stall_s == pytest.approx(0.005 + 80 / 64 / 10)  # the copies are not
    assert (advice.plan.storage_bytes, advice.restart_s) == (160 * GB, RESTART_S)
    assert "coordinator=pccheck_torch.StoreCoordinator()" in advice.loop
    assert "on each of the 64 ranks" in advice.loop
    assert "80 GB of state on 64 ranks" in advice.headline
    assert "they share one storage" in " ".join(advice.assumptions)
    assert "coordinator" not in ask().loop
    assert "one process saves all of the state (`--ranks N`" in " ".join(ask().assumptions)


def test_ranks_fill_a_storage_that_one_stream_cannot_fill() -> None:
    one, four = (ask(Rates(disk=2e9, stream=5e8), ranks=n, max_in_flight=1).outcome.durable_s for n in (1, 4))
    assert (one, four) == (pytest.approx(160, rel=0.01), pytest.approx(40, rel=0.01))


def test_a_probe_is_shared_by_the_ranks() -> None:
    one, many = ask(probed(), state_bytes=2 * GB), ask(probed(), state_bytes=2 * GB, ranks=4)
    assert many.outcome.durable_s == pytest.approx(one.outcome.durable_s, rel=0.05)
    assert many.restart_s == pytest.approx(one.restart_s)
    assert many.plan.buffer_bytes <= 4 * GB  # of 64 GB of memory, a quarter among four


# -- the slowdown ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mtbf_s", [None, SPOT, 50_000.0])
def test_the_slowdown_limits_all_that_checkpoints_cost(mtbf_s: float | None) -> None:
    advice = ask(mtbf_s=mtbf_s, slowdown=1.01)
    assert advice.outcome.slowdown <= 1.01 + 1e-9
    assert advice.unreachable == ()
    if mtbf_s != 50_000.0:  # there the best interval is within it
        assert advice.binds == "stall"
        assert "a slowdown of at most 1.01 is allowed" in advice.binding
    (sentence,) = ask(mtbf_s=mtbf_s, slowdown=1.0).unreachable
    assert sentence.startswith("A slowdown of 1 is out of reach")


@pytest.mark.parametrize("slowdown", [1.0009, 1.00002])
def test_a_small_slowdown_is_reached_by_saving_rarely(slowdown: float) -> None:
    advice = ask(mtbf_s=6 * 3600.0, slowdown=slowdown)
    assert advice.unreachable == ()
    assert advice.interval == math.ceil(advice.outcome.stall_s / ((slowdown - 1) * 2.0) - 1e-6)
    assert f"a slowdown of at most {slowdown} is allowed" in advice.binding


def test_a_slowdown_of_1_itself_is_told_to_be_out_of_reach_with_the_nearest_that_is_advised() -> None:
    advice = ask(mtbf_s=6 * 3600.0, slowdown=1.0)
    (sentence,) = advice.unreachable
    assert sentence.endswith(
        "as every save costs the trainer 6 s: this is one of 1.0010, and any above 1 can be asked for."
    )
    assert 1 < advice.outcome.slowdown <= 1.001


SIX_HOURS = {"mtbf_s": 6 * 3600.0, "rpo_s": 120.0}


@pytest.mark.parametrize("slowdown", [1.0, 1.01, 1.05])
def test_where_a_limit_on_the_slowdown_is_what_breaks_the_recovery_point_the_least_that_keeps_it_is_told(
    slowdown: float,
) -> None:
    advice = ask(Rates(disk=3e9), slowdown=slowdown, **SIX_HOURS)
    assert advice.unreachable
    (found,) = [help for help in advice.helps if "slowdown" in help.what]
    assert found.what == "a slowdown of up to 1.07 allowed"
    assert (found.feasible, found.worth) == (True, True)
    assert any(said.startswith(f"{found.what}: keeps the recovery point") for said in advice.helping)
    assert not any("no rate of storage" in said for said in advice.helping)
    assert ask(Rates(disk=3e9), slowdown=1.07, **SIX_HOURS).unreachable == ()
    assert ask(Rates(disk=3e9), slowdown=1.068, **SIX_HOURS).unreachable


def test_the_same_is_told_of_a_limit_on_stalls_and_of_both() -> None:
    stalls = ask(Rates(disk=3e9), stall_fraction=0.01, **SIX_HOURS)
    assert "stalls of up to 7% allowed" in [help.what for help in stalls.helps if help.feasible]
    both = ask(Rates(disk=3e9), stall_fraction=0.01, slowdown=1.02, **SIX_HOURS)
    assert "a slowdown of up to 1.07 and stalls of up to 7% allowed" in [h.what for h in both.helps if h.feasible]
    usual = ask(Rates(disk=3e9), mtbf_s=None, rpo_s=120.0)
    assert "a slowdown of up to 1.07 allowed" in [help.what for help in usual.helps if help.feasible]


SMALL_POOL = {**SIX_HOURS, "dram_bytes": 40 * GB}


def test_what_a_wish_for_a_slowdown_costs_is_told_with_the_useful_time_without_it() -> None:
    rates = Rates(disk=1.2e9, stream=2e8)
    advice = ask(rates, slowdown=1.01, **SMALL_POOL)
    free, none = ask(rates, **SMALL_POOL), ask(rates, **{**SMALL_POOL, "rpo_s": None})
    (said,) = [sentence for sentence in advice.meaning if "slowdown of at most 1.01" in sentence]
    assert f"without it {free.outcome.useful:.1%} of the time would be useful instead of" in said
    assert f"without the recovery point, too, which is out of reach, {none.outcome.useful:.1%}" in said
    kept = ask(rates, slowdown=1.01, mtbf_s=6 * 3600.0, dram_bytes=40 * GB)
    (said,) = [sentence for sentence in kept.meaning if "slowdown of at most 1.01" in sentence]
    assert f"without it {none.outcome.useful:.1%} of the time would be useful" in said
    assert "recovery point" not in said
    (said,) = [s for s in ask(rates, stall_fraction=0.01, **SMALL_POOL).meaning if "stalls of at most 1%" in s]
    assert f"without it {free.outcome.useful:.1%} of the time would be useful" in said


@pytest.mark.parametrize("wishes", [{}, {"slowdown": 1.2}, {"slowdown": 1.01, "mtbf_s": None}])
def test_a_wish_that_costs_little_is_not_held_against(wishes: dict[str, Any]) -> None:
    assert not any(
        "costs useful time" in sentence for sentence in ask(Rates(disk=3e9), **{"mtbf_s": 21600.0, **wishes}).meaning
    )


def test_storage_and_slowdown_together_are_tried_where_neither_alone_keeps_the_recovery_point() -> None:
    rates = Rates(disk=1.2e9, stream=2e8)
    advice = ask(rates, slowdown=1.01, **SMALL_POOL)
    (kept,) = [help for help in advice.helps if help.feasible]
    found = re.fullmatch(r"storage ([0-9.]+) times as fast, [0-9.]+ GB/s, and no limit on the slowdown", kept.what)
    assert found is not None
    assert "a slowdown of up to 1.02 allowed" in [help.what for help in advice.helps if help.worth]
    times = float(found[1])
    for factor, reached in ((times, True), (0.95 * times, False)):
        faster = Rates(disk=factor * 1.2e9, stream=factor * 2e8)
        assert (ask(faster, **SMALL_POOL).unreachable == ()) is reached


# -- everything else ---------------------------------------------------------------------------------------------------


def test_named_failure_rates_scale_with_the_machines() -> None:
    assert failures_of("spot")[0] == pytest.approx(518.5, abs=0.1)
    mtbf_s, source = failures_of("spot", machines=8)
    assert mtbf_s == pytest.approx(518.54 * 46.65 / 8, rel=1e-4)
    assert source.endswith("scaled to 8 nodes")
    assert failures_of("shared")[0] == 2700
    with pytest.raises(OptionError, match="left out"):
        failures_of("shared", machines=8)
    with pytest.raises(OptionError, match="'spot' or 'shared' or 'dedicated'"):
        failures_of("moon")


@pytest.mark.parametrize("wishes", [{"snapshot": "copy"}, {"snapshot": "copy", "state_bytes": 10**9, "mtbf_s": 1e6}])
def test_the_lines_to_paste_run(tmp_path: Any, monkeypatch: pytest.MonkeyPatch, wishes: dict[str, Any]) -> None:
    monkeypatch.chdir(tmp_path)
    advice = ask(**{"state_bytes": 10**6, **wishes, "dram_bytes": 64 << 20})
    names = {"pccheck": pccheck, "start": 0, "steps": 8, "state": {"w": np.ones(1000)}, "train_step": lambda: None}
    exec(advice.loop, names)
    with pccheck.open("ckpt") as view:
        assert view.latest() == 7 - 7 % advice.interval


def test_lazy_snapshots_come_with_what_keeps_them_right() -> None:
    assert "pccheck_torch.attach(ck, optimizer)" in ask(snapshot="lazy").loop
    assert "attach" not in ask(snapshot="copy").loop


@settings(max_examples=60, deadline=None)
@given(
    state_bytes=st.integers(1, 10**12),
    step_s=st.floats(0.01, 100),
    mtbf_s=st.none() | st.floats(60, 1e7),
    dram=st.none() | st.integers(32 << 20, 10**12),
    slots=st.none() | st.integers(2, 9),
    slowdown=st.none() | st.floats(1.00001, 2),
    stall_fraction=st.none() | st.floats(0.001, 0.5),
    rpo_s=st.none() | st.floats(1, 1e5),
    disk=st.floats(1e7, 1e11),
    part=st.floats(0.1, 1),
    ranks=st.sampled_from([1, 2, 64]),
)
def test_advice_is_whole_and_keeps_what_was_wished(
    state_bytes: int, step_s: float, mtbf_s: float | None, dram: int | None, slots: int | None, slowdown: float | None,
    stall_fraction: float | None, rpo_s: float | None, disk: float, part: float, ranks: int,
) -> None:  # fmt: skip
    room = None if slots is None else slots * state_bytes
    wanted = Wanted(
        state_bytes=state_bytes, step_s=step_s, mtbf_s=mtbf_s, dram_bytes=dram, storage_bytes=room, slowdown=slowdown,
        stall_fraction=stall_fraction, rpo_s=rpo_s, ranks=ranks,
    )  # fmt: skip
    advice = advise(wanted, Rates(disk=disk, stream=part * disk))
    pccheck.Options(**advice.options)  # in their ranges
    seen, plan = advice.outcome, advice.plan
    assert dram is None or plan.buffer_bytes <= dram
    assert room is None or plan.storage_bytes <= room
    assert (rpo_s is None or seen.age_max_s <= rpo_s * (1 + 1e-6)) == (not advice.unreachable)
    limit = stall_fraction if stall_fraction is not None else None if mtbf_s is not None or slowdown else 0.05
    assert slowdown is None or seen.slowdown <= slowdown + 1e-6 * (
        slowdown - 1
    )  # all that checkpoints cost, as in the table
    assert limit is None or seen.stall_s / seen.work_s <= limit * (1 + 1e-6)
    waits = seen.slowdown - 1 - seen.stall_s / seen.work_s
    if mtbf_s is not None:
        assert waits <= 1e-6
        assert seen.useful is not None
        assert 0 <= seen.useful <= 1
    else:
        assert waits <= max(0.0, (slowdown or 1.05) - 1) + 1e-6
    msgspec.json.encode(advice.as_json())
    assert all(itertools.chain(advice.meaning, advice.helping, [advice.headline, advice.binding]))
