"""What would help, and by how much: the same advice with one thing better (floor 0: imports tuning.*)."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

import msgspec

from pccheck.errors import OptionError
from pccheck.tuning import limits
from pccheck.tuning.basis import Basis
from pccheck.tuning.machine import Machine
from pccheck.tuning.planning import WORTH, WORTH_LOST, Plan, best_plan
from pccheck.tuning.units import bytes_text, rate_text, seconds_text
from pccheck.tuning.wanted import MOST_IN_FLIGHT, Wanted

Budget = Literal["storage budget", "DRAM budget"]

_MOST_TIMES = 1e6  # as fast: memory is no faster


@dataclass(frozen=True, kw_only=True)
class Help:
    """One thing that could be better, and the best plan then.

    Args:
        what: it is.
        interval: steps from save to save then.
        in_flight: then.
        useful: share of the time that is useful work then; None where it is not known how often the job fails.
        lost_s: mean seconds lost per failure then.
        feasible: whether the recovery point is kept then.
        worth: whether it changes more than rates differ from run to run.
    """

    what: str
    interval: int
    in_flight: int
    useful: float | None
    lost_s: float
    feasible: bool
    worth: bool


def helps(wanted: Wanted, basis: Basis, plan: Plan) -> tuple[Help, ...]:
    """Give what could help: what keeps a recovery point that is out of reach, then that which helps most."""
    found = []
    for what, find in _changes(wanted, basis, plan):
        try:
            then = find()
        except OptionError:
            continue  # there is no room for it
        found.append(
            Help(
                what=what,
                interval=then.choice.interval,
                in_flight=then.in_flight,
                useful=then.outcome.useful,
                lost_s=then.outcome.lost_s,
                feasible=then.choice.feasible,
                worth=better(then, plan),
            )
        )
    return tuple(sorted(found, key=lambda h: (not h.feasible, -(h.useful or 0.0), h.lost_s)))


def better(then: Plan, plan: Plan) -> bool:
    """Say whether a plan is better by more than rates differ from run to run."""
    if plan.choice.feasible != then.choice.feasible:
        return then.choice.feasible
    if then.outcome.useful is None or plan.outcome.useful is None:
        return then.outcome.lost_s < (1 - WORTH_LOST) * plan.outcome.lost_s
    return then.outcome.useful > plan.outcome.useful + WORTH


def budget_that_binds(wanted: Wanted, basis: Basis, plan: Plan) -> Budget | None:
    """Give the budget without which a better plan would be possible; None if none is in the way."""
    for budget, any_wanted, any_basis in _unlimited(wanted, basis):
        if better(best_plan(any_wanted, any_basis), plan):
            return budget
    return None


def _unlimited(wanted: Wanted, basis: Basis) -> Iterator[tuple[Budget, Wanted, Basis]]:
    """Give the same wishes without one of the budgets."""
    yield "DRAM budget", replace(wanted, dram_bytes=None), replace(basis, memory_bytes=None)
    yield "storage budget", replace(wanted, storage_bytes=None), replace(basis, free_bytes=None)


def _changes(wanted: Wanted, basis: Basis, plan: Plan) -> Iterator[tuple[str, Callable[[], Plan]]]:
    """Give what could be better, and how to find the best plan for it."""

    def of(basis: Basis = basis, **changes: object) -> Callable[[], Plan]:
        return lambda: best_plan(replace(wanted, **changes), basis)  # type: ignore[arg-type]

    yield "storage twice as fast", of(_faster_storage(wanted, basis, 2))
    looser = None if plan.choice.feasible else limits.least_that_keep_it(wanted, basis)
    if not plan.choice.feasible:
        yield from _what_keeps_it(wanted, basis, looser)
    if plan.in_flight < MOST_IN_FLIGHT:
        more = plan.in_flight + 1
        yield f"in_flight={more}", lambda: best_plan(replace(wanted, max_in_flight=more), basis, in_flight=more)
    yield "copying twice as fast", of(replace(basis, machine=_faster_copies(basis.machine)))
    if wanted.state_bytes > 1:
        less = replace(basis, restart_s=_sooner(wanted, basis, 2))
        yield "a state of half the size", of(less, state_bytes=wanted.state_bytes // 2)
    for budget, any_wanted, any_basis in _unlimited(wanted, basis):
        free = best_plan(any_wanted, any_basis)
        if better(free, plan):
            size = free.buffer_bytes if budget == "DRAM budget" else free.storage_bytes
            yield f"a {budget} of {bytes_text(size)}", partial(best_plan, any_wanted, any_basis)
    if wanted.snapshot == "copy":
        yield 'snapshot="lazy"', of(snapshot="lazy")
    if plan.choice.binds == "stall" and looser is None and wanted.stall_allowed <= 0.25:
        share = 2 * wanted.stall_allowed
        if wanted.slowdown_limits_stalls:
            yield f"a slowdown of up to {limits.ratio_text(1 + share)} allowed", of(slowdown=1 + share)
        else:
            yield f"stalls of up to {100 * share:g}% allowed", of(stall_fraction=share)
    if wanted.mtbf_s is not None:
        if basis.restart_s:
            half = basis.restart_s / 2
            yield f"restarts in half the time, {seconds_text(half)}", of(replace(basis, restart_s=half))
        yield "half as many failures", of(mtbf_s=2 * wanted.mtbf_s)


def _what_keeps_it(
    wanted: Wanted, basis: Basis, looser: tuple[str, Wanted] | None
) -> Iterator[tuple[str, Callable[[], Plan]]]:
    """Give what keeps a recovery point that is out of reach: storage's rate, looser limits, or the two together."""
    times = _times_needed(wanted, basis)
    if looser is not None:
        yield looser[0], partial(best_plan, looser[1], basis)
    also, free = "", wanted
    if times is None and looser is None and limits.are_set(wanted):
        free = limits.lifted(wanted)
        times, also = _times_needed(free, basis), f", and no limit on {limits.names(wanted)}"
    if times is not None:
        rate = rate_text(times * wanted.ranks * total_rate(basis))
        what = f"storage {times:.3g} times as fast, {rate}{also}"
        yield what, partial(best_plan, free, _faster_storage(wanted, basis, times))


def _times_needed(wanted: Wanted, basis: Basis) -> float | None:
    """Give how many times as fast storage must be to keep the recovery point; None = no rate keeps it."""

    def keeps(times: float) -> bool:
        return best_plan(wanted, _faster_storage(wanted, basis, times)).choice.feasible

    low, high = 1.0, 2.0
    while not keeps(high):
        low, high = high, 2 * high
        if high > _MOST_TIMES:
            return None
    while high > 1.01 * low:
        middle = math.sqrt(low * high)
        low, high = (low, middle) if keeps(middle) else (middle, high)
    return math.ceil(high * 10) / 10


def total_rate(basis: Basis) -> float:
    """Give what storage takes of one rank, all its checkpoints together, in the fastest way that is known."""
    return max(basis.machine.model(**setting.cut).total_bytes_per_s for setting in basis.settings)


def _faster_storage(wanted: Wanted, basis: Basis, times: float) -> Basis:
    """Give the same with storage that writes and reads so much faster, with the same fixed cost of a checkpoint."""
    machine = basis.machine

    def sooner(seconds: float) -> float:
        fixed_s = min(machine.commit_s, seconds / 2)
        return fixed_s + (seconds - fixed_s) / times

    samples = tuple(
        msgspec.structs.replace(
            sample,
            durable_s=sooner(sample.durable_s),
            worst_durable_s=sooner(sample.worst_durable_s),
            period_s=sooner(sample.in_flight * sample.period_s) / sample.in_flight,
        )
        for sample in machine.samples
    )
    read = machine.read_bytes_per_s
    faster = msgspec.structs.replace(machine, samples=samples, read_bytes_per_s=None if read is None else times * read)
    return replace(basis, machine=faster, restart_s=_sooner(wanted, basis, times))


def _sooner(wanted: Wanted, basis: Basis, times: float) -> float:
    """Give the restart's time where the state is read in so much less time; what the user told stays."""
    if wanted.restart_s is not None or not basis.machine.read_bytes_per_s:
        return basis.restart_s
    return basis.restart_s - wanted.part_bytes / basis.machine.read_bytes_per_s * (1 - 1 / times)


def _faster_copies(machine: Machine) -> Machine:
    """Give a machine that copies states to the pool twice as fast."""
    device = machine.device_copy_bytes_per_s
    return msgspec.structs.replace(
        machine,
        copy_bytes_per_s=2 * machine.copy_bytes_per_s,
        device_copy_bytes_per_s=None if device is None else 2 * device,
    )
