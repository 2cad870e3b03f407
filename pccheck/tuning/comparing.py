"""The same job saved in other ways: one or two in flight, and by blocking saves (floor 0: imports tuning.*)."""

from __future__ import annotations

from pccheck.errors import OptionError
from pccheck.tuning.basis import Basis
from pccheck.tuning.intervals import choose_interval
from pccheck.tuning.planning import Outcome, Plan, best_plan, outcome
from pccheck.tuning.wanted import ANY_STALL, Wanted

HABIT = 1000  # steps: what is written where nobody has computed it
BLOCKING = (
    f"a blocking save, as torch.save and fsync, holds the trainer until it is durable; untuned = every {HABIT:,} steps"
)


def compare(wanted: Wanted, basis: Basis, plan: Plan) -> tuple[Outcome, ...]:
    """Give what else could be done, at the same rates: another number in flight, and blocking saves.

    A blocking save, as `torch.save` and an fsync, holds the trainer until it is durable: for as long as one checkpoint
    takes storage. It comes at its best interval, and untuned: every 1,000 steps, which nobody computed.
    """
    others = []
    if plan.in_flight > 1:
        others.append(best_plan(wanted, basis, in_flight=1).outcome)
    elif wanted.max_in_flight > 1:
        try:
            others.append(best_plan(wanted, basis, in_flight=2).outcome)
        except OptionError:
            pass  # there is no room for two
    return (*others, *_blocking(wanted, basis))


def _blocking(wanted: Wanted, basis: Basis) -> tuple[Outcome, ...]:
    model = basis.machine.model(writers=basis.settings[0].writers, chunk_bytes=basis.settings[0].chunk_bytes)
    seconds = model.durable_s(wanted.part_bytes, 1)
    best = choose_interval(
        step_s=wanted.step_s,
        stall_s=seconds,
        durable_s=seconds,
        in_flight=1,
        slowdown=wanted.slowdown_allowed,
        stall_fraction=wanted.stall_allowed if wanted.mtbf_s is None or wanted.slowdown is not None else ANY_STALL,
        mtbf_s=wanted.mtbf_s,
        restart_s=basis.restart_s,
    ).interval
    return tuple(
        outcome(
            f"blocking, {name}",
            wanted,
            basis.restart_s,
            interval=interval,
            stall_s=seconds,
            durable_s=seconds,
            slowdown=1 + seconds / (interval * wanted.step_s),
            in_flight=1,
        )
        for name, interval in (("at its best", best), ("untuned", HABIT))
    )
