"""The job to simulate, from what is known of a machine (floor 0: imports tuning, and rooms of replay)."""

from __future__ import annotations

from pccheck.replay.job import Job
from pccheck.tuning.basis import Rates, basis_of
from pccheck.tuning.machine import Machine
from pccheck.tuning.planning import best_plan, plan_of
from pccheck.tuning.wanted import Wanted


def job_of(
    wanted: Wanted,
    machine: Machine | Rates | None,
    *,
    in_flight: int | None = None,
    storage_changes: tuple[tuple[float, float], ...] = (),
    jitter: float = 0.0,
    seed: int = 0,
) -> tuple[Job, int, tuple[str, ...]]:
    """Give the job that `advise` has in mind, how many checkpoints it may have in flight, and what was assumed.

    Storage, stall and restart are those that advice rests on, so that a replay shows what the advice is worth; storage
    is used in the way in which so many at once are written fastest.

    Args:
        wanted: the job and its wishes.
        machine: what a probe measured, rates told by hand, or None = assumed ones.
        in_flight: checkpoints at once, 1 or more; None = as many as are advised.
        storage_changes, jitter, seed: as of a Job.

    Raises OptionError for values out of range, and budgets without room.
    """
    basis = basis_of(wanted, machine)
    best = best_plan(wanted, basis, in_flight=in_flight)
    settings = [setting.of(best.in_flight) for setting in basis.settings]
    models = [basis.machine.model(**setting.cut) for setting in settings]
    fastest = min(range(len(models)), key=lambda i: models[i].durable_s(wanted.state_bytes, best.in_flight))
    plan = plan_of(wanted, basis, best.in_flight, settings[fastest], best.snapshot)
    read = basis.machine.read_bytes_per_s
    load_s = 0.0 if wanted.restart_s is not None or not read else wanted.state_bytes / read
    job = Job(
        step_s=wanted.step_s,
        state_bytes=wanted.state_bytes,
        storage=models[fastest],
        stall_s=plan.outcome.stall_s,
        restart_s=basis.restart_s - load_s,
        load_s=load_s,
        storage_changes=storage_changes,
        jitter=jitter,
        seed=seed,
    )
    return job, plan.in_flight, basis.assumptions
