"""How often, and how many at once: the formulas of checkpointing, as pure functions (floor 0: imports tuning.*).

Seconds everywhere; intervals in steps; a slowdown is a ratio of at least 1, a fraction lies between 0 and 1.
"""

from pccheck.tuning.advice import Advice, advise
from pccheck.tuning.basis import Rates
from pccheck.tuning.bills import Bill, bills
from pccheck.tuning.checkfreq import (
    CheckFreq,
    checkfreq,
    checkfreq_as_coded,
    checkfreq_retuned,
    checkfreq_retuned_as_coded,
)
from pccheck.tuning.goodput import (
    StateAge,
    loss_first_order,
    loss_per_failure,
    slowdown,
    state_age,
    useful_fraction,
)
from pccheck.tuning.intervals import (
    Choice,
    best_in_flight,
    choose_interval,
    in_flight_needed,
    pccheck_interval,
    stall_interval,
    waitless_interval,
)
from pccheck.tuning.optimum import daly, daly_first_order, lambert_w0, optimum, young
from pccheck.tuning.storage import PipelineTimes, StorageModel, pipeline_times
from pccheck.tuning.wanted import FAILURE_RATES, Wanted, failures_of

__all__ = [
    "FAILURE_RATES",
    "Advice",
    "Bill",
    "CheckFreq",
    "Choice",
    "PipelineTimes",
    "Rates",
    "StateAge",
    "StorageModel",
    "Wanted",
    "advise",
    "best_in_flight",
    "bills",
    "checkfreq",
    "checkfreq_as_coded",
    "checkfreq_retuned",
    "checkfreq_retuned_as_coded",
    "choose_interval",
    "daly",
    "daly_first_order",
    "failures_of",
    "in_flight_needed",
    "lambert_w0",
    "loss_first_order",
    "loss_per_failure",
    "optimum",
    "pccheck_interval",
    "pipeline_times",
    "slowdown",
    "stall_interval",
    "state_age",
    "useful_fraction",
    "waitless_interval",
    "young",
]
