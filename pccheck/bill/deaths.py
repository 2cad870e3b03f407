"""What is known of the end of a run that failed, which nobody was told (floor 0: imports bill.runs)."""

from __future__ import annotations

import msgspec

from pccheck.bill.runs import EVERY_S, JobRun, Run


def restart_s(run: Run, then: Run) -> float:
    """Give the seconds from the last sign of life of a run that failed to what the next one had restored."""
    return max(0.0, then.began_s - run.began_s - run.uptime_s) + (then.restored_at_s or 0.0)


def at_least(run: Run, then: JobRun | None) -> Run:
    """Give a run that failed, whose last note is up to EVERY_S old, with what the next one's restore says of it.

    A lower incarnation is that of another store, which was made anew in the same place.
    """
    restored = None if then is None or then.first.incarnation <= run.incarnation else then.first.restored_step
    if restored is None:
        return run
    durable = restored if run.durable_step is None else max(restored, run.durable_step)
    return msgspec.structs.replace(run, last_step=max(restored, run.last_step), durable_step=durable)


def died_step(run: Run, usual: Run | None) -> int:
    """Estimate the step at which a run was killed: after its last save it went on at its mean pace, pauses included.

    It died half the time between notes after the last one, on average. Whoever is silent for longer than ever between
    two saves hangs, or waits for something. A run with one save had the pace of the `usual` one.
    """
    known = run if run.progress else usual
    if run.returned_at_s is None or known is None or not known.climbed_s:
        return run.last_step
    per_s = known.progress / known.climbed_s
    steps = max(0.0, run.uptime_s - run.returned_at_s) * per_s
    if steps >= known.longest:
        return run.last_step + known.longest
    return run.last_step + int(steps + (0.0 if run.ended else EVERY_S / 2 * per_s))


def steps_lost(run: Run, died_step: int | None, then: JobRun | None) -> int | None:
    """Count the steps from where a run that failed was gone on from to where it was killed."""
    if died_step is None:
        return None
    from_step = run.durable_step if then is None or then.first.restored_step is None else then.first.restored_step
    return None if from_step is None else max(0, died_step - from_step)
