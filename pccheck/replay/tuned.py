"""What a contender's saves cost, measured, and how often it should save then (floor 4: imports replay, tuning)."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import mean, median

import msgspec

from pccheck.replay import places
from pccheck.replay.process import Trainer
from pccheck.replay.told import Job, Missing, Saved, Stepped
from pccheck.tuning.goodput import useful_fraction
from pccheck.tuning.optimum import optimum

_PASSES = 4
_LEAST_S = 1e-4  # that a save is taken to cost: less cannot be measured
_WARM = 2  # saves that are not measured: the first ones allocate and plan
_ENOUGH = 3  # saves that are
_LONGEST_S = 60.0  # that one measurement may take
MOST_STEPS = 10_000  # of an interval


@dataclass(frozen=True)
class Measured:
    """Seconds of a step: the median, and the mean, which is the one with the costs of saves in it."""

    median_s: float
    mean_s: float


def measure(job: Job, folder: Path, seconds: float) -> Measured | Missing:
    """Have it train for a while, and measure its steps once it is warm.

    It takes longer where too few saves come in that time, at most a minute. Raises TrainerError.
    """
    with Trainer(job, folder) as trainer:
        ready = trainer.await_ready()
        if isinstance(ready, Missing):
            return ready
        trainer.go({})
        trainer.await_began()
        told, until = [], time.monotonic() + _LONGEST_S
        while time.monotonic() < until:
            told += trainer.follow(min(until, time.monotonic() + seconds))
            if sum(isinstance(one, Saved) for one in told) >= _WARM + _ENOUGH:
                break
        told += trainer.kill()
    saves, stepped = 0, []
    for one in told:
        saves += isinstance(one, Saved)
        if isinstance(one, Stepped) and saves >= _WARM:
            stepped.append(one.at)
    whole = (len(stepped) - 1) // job.every * job.every  # whole intervals: each with the cost of one save
    lasted = [b - a for a, b in pairwise(stepped[: whole + 1] if whole else stepped)]
    if not lasted:
        lasted = [b.at - a.at for a, b in pairwise([one for one in told if isinstance(one, Stepped)])] or [math.inf]
    return Measured(median(lasted), mean(lasted))


def interval(job: Job, folder: Path, step_s: float, mtbf_s: float, seconds: float) -> int | Missing:
    """Give the interval, in steps, that a contender's own costs call for: of those measured, the one to get farthest.

    What a save costs is the time that it adds to its interval, interference and waits included; from it follow the
    exact optimum, which is measured next, and the useful fraction. The optimum alone is not enough: a save costs more
    where saves follow each other more closely, so that what looks cheap at one interval is dear at the next.

    Args:
        job: `every` is where it begins.
        folder: for what it prints.
        step_s: seconds of an undisturbed step, the mean.
        mtbf_s: mean seconds between kills.
        seconds: of each measurement.
    """
    every, useful = job.every, dict[int, float]()
    for _ in range(_PASSES):
        places.emptied(Path(job.directory))
        measured = measure(msgspec.structs.replace(job, every=every), folder, seconds)
        if isinstance(measured, Missing):
            return measured
        cost_s = max(every * (measured.mean_s - step_s), _LEAST_S)
        useful[every] = useful_fraction(every * step_s, stall_s=cost_s, durable_s=cost_s, mtbf_s=mtbf_s)
        every = min(MOST_STEPS, max(1, round(optimum(cost_s, mtbf_s) / step_s)))
        if every in useful:  # known already: look between it and the best one
            every = round(math.sqrt(every * max(useful, key=useful.__getitem__)))
        if every in useful:
            break
    places.emptied(Path(job.directory))
    return max(useful, key=useful.__getitem__)
