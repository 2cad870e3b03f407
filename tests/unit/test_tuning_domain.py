"""What is out of range is refused, by name and with what to give instead; and the facade is whole."""

from __future__ import annotations

import inspect
import math
import re
from pathlib import Path

import numpy as np
import pytest

from pccheck import tuning
from pccheck.errors import OptionError, UsageError
from pccheck.tuning.wanted import Wanted

SECONDS = (-1.0, math.nan, math.inf, "3", None, True, 1j, 10**400)
TIMES = (0.0, *SECONDS)
MTBF = tuple(bad for bad in TIMES if bad != math.inf)
WHOLE = (0, -1, 2.5, "3", True, math.nan, 1 << 70)
FRACTION = (0.0, 1.0, 5, -0.1, math.nan, "0.1", True, 1e-300)
RATIO = (0.05, 0.999, 0.0, -1.0, math.nan, math.inf, "1.05", True, 1e300)

WORK = {"work_s": (60, TIMES), "stall_s": (0.5, SECONDS), "durable_s": (150, SECONDS)}
CALLS = [
    (tuning.young, {"stall_s": (1, SECONDS), "mtbf_s": (100, MTBF)}),
    (tuning.daly, {"stall_s": (1, SECONDS), "mtbf_s": (100, MTBF)}),
    (tuning.optimum, {"stall_s": (1, SECONDS), "mtbf_s": (100, MTBF)}),
    (tuning.daly_first_order, {"stall_s": (1, SECONDS), "mtbf_s": (100, MTBF), "restart_s": (1, SECONDS)}),
    (tuning.useful_fraction, {**WORK, "mtbf_s": (100, MTBF), "restart_s": (1, SECONDS), "in_flight": (2, WHOLE)}),
    (tuning.loss_per_failure, {**WORK, "mtbf_s": (100, MTBF), "in_flight": (2, WHOLE)}),
    (tuning.loss_first_order, WORK),
    (tuning.state_age, {**WORK, "in_flight": (2, WHOLE)}),
    (
        tuning.slowdown,
        {
            "interval": (10, WHOLE),
            "step_s": (0.5, TIMES),
            "durable_s": (9, SECONDS),
            "in_flight": (2, WHOLE),
            "stall_s": (1, SECONDS),
        },
    ),
    (
        tuning.pccheck_interval,
        {"durable_s": (9, SECONDS), "in_flight": (2, WHOLE), "step_s": (0.5, TIMES), "slowdown": (1.05, RATIO)},
    ),
    (tuning.stall_interval, {"stall_s": (1, SECONDS), "step_s": (0.5, TIMES), "fraction": (0.05, FRACTION)}),
    (
        tuning.waitless_interval,
        {"durable_s": (9, SECONDS), "in_flight": (2, WHOLE), "step_s": (0.5, TIMES), "stall_s": (1, SECONDS)},
    ),
    (tuning.in_flight_needed, {"durable_s": (9, SECONDS), "work_s": (1, TIMES), "stall_s": (1, SECONDS)}),
    (
        tuning.choose_interval,
        {
            "step_s": (0.5, TIMES),
            "stall_s": (0.1, SECONDS),
            "durable_s": (9, SECONDS),
            "in_flight": (2, WHOLE),
            "slowdown": (1.05, RATIO),
            "stall_fraction": (0.05, FRACTION),
            "mtbf_s": (500, TIMES),
            "restart_s": (60, SECONDS),
            "rpo_s": (100, TIMES),
            "durable_alone_s": (4, (9.5, *SECONDS)),
        },
    ),
    (
        tuning.checkfreq,
        {
            "step_s": (1, TIMES),
            "update_s": (0, SECONDS),
            "device_copy_s": (1, SECONDS),
            "host_copy_s": (2, SECONDS),
            "storage_s": (1, SECONDS),
            "device_has_room": (False, ()),
            "fraction": (0.05, FRACTION),
        },
    ),
    (
        tuning.checkfreq_as_coded,
        {
            "step_s": (1, TIMES),
            "device_copy_s": (1, SECONDS),
            "host_copy_s": (2, SECONDS),
            "storage_s": (1, SECONDS),
        },
    ),
    (
        tuning.checkfreq_retuned,
        {
            "interval": (10, WHOLE),
            "measured": (0.1, (math.nan, math.inf)),
            "bound": (0.05, FRACTION),
            "least": (1, WHOLE),
        },
    ),
    (
        tuning.checkfreq_retuned_as_coded,
        {"interval": (10, WHOLE), "measured": (0.1, (math.nan, math.inf)), "bound": (0.05, FRACTION)},
    ),
    (
        tuning.StorageModel,
        {"stream_bytes_per_s": (5, TIMES), "total_bytes_per_s": (20, TIMES), "commit_s": (0, SECONDS)},
    ),
    (tuning.StorageModel(5, 20).durable_s, {"state_bytes": (5, (-1, 2.5)), "in_flight": (2, WHOLE)}),
    (tuning.StorageModel(5, 20).best_in_flight, {"state_bytes": (5, (-1, 0, 2.5)), "max_in_flight": (2, WHOLE)}),
    (
        tuning.pipeline_times,
        {
            "state_bytes": (100, WHOLE),
            "pool_bytes": (100, WHOLE),
            "chunk_bytes": (10, WHOLE),
            "copy_bytes_per_s": (10, TIMES),
            "write_bytes_per_s": (10, TIMES),
        },
    ),
    (
        tuning.bills,
        {
            "state_bytes": (100, WHOLE),
            "in_flight": (2, WHOLE),
            "keep": (1, WHOLE),
            "pool_bytes": (100, WHOLE),
            "buffer_bytes": (0, (-1, 0.5, True)),
        },
    ),
]


@pytest.mark.parametrize(("function", "arguments"), CALLS, ids=lambda value: getattr(value, "__name__", ""))
def test_each_argument_out_of_range_is_refused_by_name(function, arguments):
    good = {name: value for name, (value, _) in arguments.items()}
    function(**good)
    assert set(inspect.signature(function).parameters) - {"worth"} == set(good), "an argument without a test"
    for name, (_, refused) in arguments.items():
        for bad in refused:
            if bad is None and inspect.signature(function).parameters[name].default is None:
                continue
            with pytest.raises(OptionError) as caught:
                function(**{**good, name: bad})
            assert caught.value.field == name
            assert caught.value.value is bad


def test_numbers_of_numpy_are_numbers():
    assert tuning.optimum(np.float32(5), np.int64(2700)) == tuning.optimum(5, 2700)
    assert tuning.slowdown(np.int32(10), step_s=np.float64(1), durable_s=40, in_flight=np.uint8(2)) == 2


@pytest.mark.parametrize("field", ["step_s", "mtbf_s", "restart_s", "rpo_s"])
@pytest.mark.parametrize("bad", [1e-300, 1e300, -1.0, math.nan, math.inf, "3", True, 10**400])
def test_durations_that_are_told_are_bound(field, bad):
    good = {"state_bytes": 1 << 30, "step_s": 1.0}
    for fine in (1e-9, 1e10):
        assert getattr(Wanted(**{**good, field: fine}), field) == fine
    with pytest.raises(OptionError) as caught:
        Wanted(**{**good, field: bad})
    assert caught.value.field == field


def test_a_slowdown_below_1_is_told_what_to_give():
    with pytest.raises(UsageError, match=r"slowdown=0\.05 .*a ratio.*for at most 5\.0% slower give 1\.05"):
        tuning.pccheck_interval(20, in_flight=2, step_s=0.5, slowdown=0.05)


def test_every_formula_of_the_docs_is_there():
    text = (Path(__file__).parents[2] / "docs" / "tuning.md").read_text().split("## Formulas", 1)[1]
    named = re.findall(r"^\|.*\| `(\w+)[^|]*` \|$", text, re.M)
    functions = {
        name for name in tuning.__all__ if getattr(inspect.getmodule(getattr(tuning, name)), "__name__", "") in ROOMS
    }
    classes = {"Bill", "CheckFreq", "Choice", "PipelineTimes", "StateAge"}  # what the functions give
    assert set(named) == functions - classes


ROOMS = {f"pccheck.tuning.{room}" for room in ("optimum", "goodput", "intervals", "checkfreq", "storage", "bills")}
