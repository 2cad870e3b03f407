"""Advice in sentences: what the figures mean, what binds, what would help (floor 0: imports tuning.*)."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence

from pccheck.tuning import limits
from pccheck.tuning.basis import Basis
from pccheck.tuning.helping import Budget, Help, total_rate
from pccheck.tuning.planning import Outcome, Plan
from pccheck.tuning.units import bytes_text, seconds_text
from pccheck.tuning.wanted import Wanted

_MUCH = 0.25  # of the time between failures: from here on no interval helps much
_FULL = 0.8  # of the rate of storage
_ROUNDING = 2e-9  # of a slowdown: the least that can be told from 1 is twice that above it
_LITTLE = 0.001  # of the time: less is next to nothing
_VARIES = 1.5  # worst over median: from here on a second checkpoint in flight bridges slow spells


def headline(wanted: Wanted, whose: str) -> str:
    """Say what was asked, and whose failure rate it is where that is no matter of course."""
    rate = "how often it fails is not known"
    if wanted.mtbf_s is not None:
        rate = f"a failure every {seconds_text(wanted.mtbf_s)} on average{whose and ', ' + whose}"
    ranks = f" on {wanted.ranks:,} ranks" if wanted.ranks > 1 else ""
    return f"{bytes_text(wanted.state_bytes)} of state{ranks}, {seconds_text(wanted.step_s)} a step, {rate}."


def meaning(wanted: Wanted, basis: Basis, plan: Plan, budget: Budget | None) -> Iterator[str]:
    """Say what the figures of a plan mean for the job."""
    seen = plan.outcome
    steps = seen.durable_s / wanted.step_s
    late = f" ({steps:,.0f} steps)" if steps >= 1.5 else ""
    yield (
        f"A checkpoint is durable {seconds_text(seen.durable_s)}{late} after its save. A failure throws away "
        f"{seconds_text(seen.lost_s)} of work on average, at most {seconds_text(seen.age_max_s)}: what came after the "
        "newest durable checkpoint."
    )
    share = seen.stall_s / seen.work_s
    if share >= _LITTLE:
        yield _stall(wanted, basis, plan, share)
    yield from limits.cost(wanted, basis, plan)
    if seen.slowdown > 1 + share + 1e-6:
        yield (
            f"Storage sets the pace: saves wait for a slot, and training takes {seen.slowdown:.3f} times as long, "
            f"within the {wanted.slowdown_allowed:g} that is allowed."
        )
    if wanted.mtbf_s is None:
        yield (
            "Tell how often the job fails (`--mtbf 45m`, `--mtbf spot`): without it this is as often as the overhead "
            f"that is allowed permits (slowdown {wanted.slowdown_allowed:g}, stalls {100 * wanted.stall_allowed:g}%), "
            "not the best."
        )
    elif (
        seen.useful is not None
        and budget is None
        and plan.choice.binds in ("waits", "failures", "every step")
        and seen.durable_s + basis.restart_s > _MUCH * wanted.mtbf_s
    ):
        yield (
            f"Failures come so often that a restart ({seconds_text(basis.restart_s)}) and the wait until a checkpoint "
            f"is durable ({seconds_text(seen.durable_s)}) are "
            f"{_of_time(seen.durable_s + basis.restart_s, wanted.mtbf_s)}: no interval gets much more than "
            f"{seen.useful:.0%} useful work out of this storage."
        )
    if plan.in_flight == 1 and budget is None:
        yield from _why_one(wanted, basis, plan)
    if plan.keep == 1:
        yield (
            "keep=1 survives crashes, but leaves no checkpoint to fall back to if the newest is damaged on storage: "
            f"`--keep 2` takes another {bytes_text(wanted.state_bytes)} of storage."
        )


def _stall(wanted: Wanted, basis: Basis, plan: Plan, share: float) -> str:
    """Say what holds the trainer up: copies, and that training runs slower while a checkpoint is under way."""
    seen, machine = plan.outcome, basis.machine
    alone_s = machine.alone_s(wanted.part_bytes, **plan.setting.cut)
    slower_s = min(seen.stall_s, (machine.interference or 0.0) * alone_s)
    copying_s = seen.stall_s - slower_s
    beyond = "beyond what one step hides, " if plan.snapshot == "lazy" else ""
    if not slower_s:
        return (
            f"Copying the state out of the trainer's memory holds it up: {beyond}{seconds_text(copying_s)} per "
            f"checkpoint, {share:.1%} of the training time."
        )
    return (
        f"A checkpoint costs the trainer {seconds_text(seen.stall_s)}, {share:.1%} of the training time: interference, "
        f"as training runs {machine.interference:.1%} slower while one is under way, {seconds_text(slower_s)}; copying "
        f"the state out of its memory, {beyond}{seconds_text(copying_s)}."
    )


def _of_time(seconds: float, mtbf_s: float) -> str:
    part = seconds / mtbf_s
    return f"{part:.0%} of the time between them" if part <= 1 else "longer than the time between them"


def _why_one(wanted: Wanted, basis: Basis, plan: Plan) -> Iterator[str]:
    varies = max(sample.worst_durable_s / sample.durable_s for sample in basis.machine.samples)
    more = f"{bytes_text(wanted.state_bytes)} more of storage and of memory"
    if wanted.ranks > 1:
        more = (
            f"{bytes_text(wanted.state_bytes)} more of storage and {bytes_text(wanted.part_bytes)} of memory per rank"
        )
    if varies > _VARIES:
        yield (
            f"The rate of this storage varies (the slowest of the probe's checkpoints took {varies:.1f} times the "
            f"median): in_flight=2 bridges slow spells, for {more}."
        )
    elif wanted.max_in_flight > 1 and _one_fills(basis, plan):
        yield (
            f"One checkpoint at a time is enough at these rates. in_flight=2 takes {more}, and pays where the rate "
            "changes, or one stream cannot fill the storage."
        )
    elif wanted.max_in_flight > 1:
        yield (
            "One stream cannot fill this storage, but one checkpoint at a time is enough at this interval: in_flight=2 "
            f"would gain next to nothing. It takes {more}, and pays where saves come before the last one is durable, "
            "or the rate changes."
        )


def _one_fills(basis: Basis, plan: Plan) -> bool:
    """Say whether one checkpoint gets about all that storage takes; rates that were measured differ by as much."""
    return basis.machine.model(**plan.setting.cut).stream_bytes_per_s >= _FULL * total_rate(basis)


def binding(wanted: Wanted, basis: Basis, plan: Plan, budget: Budget | None) -> str:
    """Say what keeps the plan from being better."""
    if budget is not None:
        given = {"DRAM budget": plan.buffer_bytes, "storage budget": plan.storage_bytes}[budget]
        name = f"The {budget} binds"
        if budget == "DRAM budget" and wanted.dram_bytes is None:
            name = f"Memory binds, a quarter of the {bytes_text(basis.memory_bytes or 0)} that the probe found for it"
        elif budget == "storage budget" and wanted.storage_bytes is None:
            name = f"Storage space binds, the {bytes_text(basis.free_bytes or 0)} that the probe found free"
        return f"{name}: with more than the {bytes_text(given)} that this plan takes a better one would be possible."
    choice, seen, terms = plan.choice, plan.outcome, plan.choice.terms
    every = _every(choice.interval)
    match choice.binds:
        case "waits":
            best = terms.get("failures")
            wish = f", where {_every(best)} would be best for this failure rate" if best else ""
            return f"Storage binds: {every} is the most often that it takes without a wait{wish}."
        case "bandwidth":
            return (
                f"Storage binds: {every} is the most often at which training slows by no more than the factor "
                f"{wanted.slowdown_allowed:g}."
            )
        case "stall":
            best = terms.get("failures")
            wish = f"; for this failure rate {_every(best)} would be best" if best else ""
            return (
                f"The stall binds: each checkpoint costs the trainer {seconds_text(seen.stall_s)}, and "
                f"{_limit(wanted)} is allowed, so {every}{wish}."
            )
        case "failures":
            return (
                f"The failure rate binds: {every} is the optimum. More often, checkpoints cost more "
                f"({seconds_text(seen.stall_s)} of the trainer each) than they save; less often, failures do."
            )
        case "recovery point":
            best = terms.get("failures")
            wish = f"; for this failure rate {_every(best)} would be best" if best else ""
            return f"The recovery point binds: {every} is the least often that keeps it{wish}."
        case _:
            cost = seen.stall_s / seen.work_s
            costs = (
                f"though it costs {cost:.1%} of the training time" if cost >= _LITTLE else "and costs next to nothing"
            )
            return f"Nothing binds: a save at every step is best, {costs}."


def _limit(wanted: Wanted) -> str:
    if wanted.slowdown_limits_stalls:
        return f"a slowdown of at most {limits.ratio_text(1 + wanted.stall_allowed)}"
    return f"at most {100 * wanted.stall_allowed:g}% of the time"


def _every(interval: int) -> str:
    return f"every {interval:,} steps" if interval > 1 else "every step"


def unreachable(wanted: Wanted, plan: Plan) -> Iterator[str]:
    """Say what was wished for and cannot be had, and the nearest that can."""
    choice = plan.choice
    if wanted.rpo_s is not None and not choice.feasible:
        yield (
            f"The recovery point of {seconds_text(wanted.rpo_s)} is out of reach: the nearest is "
            f"{seconds_text(choice.oldest_s)}, with a save {_every(choice.interval)}, durable after "
            f"{seconds_text(plan.outcome.durable_s)}."
        )
    # Only 1 itself is: any other is reached by saving rarely enough.
    if wanted.slowdown is not None and plan.outcome.slowdown > wanted.slowdown + _ROUNDING:
        yield (
            f"A slowdown of {limits.ratio_text(wanted.slowdown)} is out of reach, as every save costs the trainer "
            f"{seconds_text(plan.outcome.stall_s)}: this is one of {plan.outcome.slowdown:.4f}, and any above 1 can be "
            "asked for."
        )


def helping(plan: Plan, found: Sequence[Help]) -> Iterator[str]:
    """Say what would help, and by how much; and what would not."""
    for help in found:
        if help.worth:
            how = f"{_every(help.interval)}, {help.in_flight} in flight"
            keeps = "keeps the recovery point, " * (help.feasible and not plan.choice.feasible)
            yield f"{help.what}: {keeps}{_gain(plan.outcome, help)} ({how})"
    nothing = [help.what for help in found if not help.worth]
    if nothing:
        yield f"{'; '.join(nothing)}: next to nothing"
    if not all(help.feasible for help in found):
        none = (
            "nothing else here keeps"
            if any(help.feasible for help in found)
            else "none of these, and no rate of storage, keeps"
        )
        yield f"{none} the recovery point"


def _gain(outcome: Outcome, help: Help) -> str:
    if help.useful is None or outcome.useful is None:
        return f"{seconds_text(help.lost_s)} lost per failure instead of {seconds_text(outcome.lost_s)}"
    return f"{help.useful:.1%} useful instead of {outcome.useful:.1%}"


def loop_text(plan: Plan, directory: str = "ckpt", *, ranks: int = 1) -> str:
    """Give the lines to paste into a training script; of several ranks, each runs them."""
    options = ", ".join(f"{name}={_source(value)}" for name, value in options_of(plan).items())
    indent, save = "        ", "ck.save(step, state)"
    if ranks > 1:
        options += ", coordinator=pccheck_torch.StoreCoordinator()"
    arguments = textwrap.wrap(f'"{directory}", {options}', 100, break_long_words=False, break_on_hyphens=False)
    lines = ["with pccheck.Checkpointer(", *(f"    {line}" for line in arguments), ") as ck:"]
    if ranks > 1:
        lines = [
            f"# on each of the {ranks:,} ranks, in one directory: each saves its part of the state, with its own pool;",
            "# what all of them hold alike is divided among them if replicated=[...] names it",
            *lines,
        ]
    if plan.snapshot == "lazy":
        lines += [
            "    # lazy: the state may not change while it is being copied; attach sees to that with torch,",
            "    # elsewhere call ck.fence() right before each change",
            "    pccheck_torch.attach(ck, optimizer)",
        ]
    lines += ["    for step in range(start, steps):", f"{indent}train_step()"]
    if plan.choice.interval > 1:
        lines.append(f"{indent}if step % {plan.choice.interval} == 0:")
        indent += "    "
    return "\n".join([*lines, indent + save])


def _source(value: int | str) -> str:
    return f'"{value}"' if isinstance(value, str) else f"{value:_}"


def options_of(plan: Plan) -> dict[str, int | str]:
    """Give the options of the Checkpointer by name."""
    options: dict[str, int | str] = {"in_flight": plan.in_flight, "keep": plan.keep, "snapshot": plan.snapshot}
    options["writers"] = plan.setting.writers
    if plan.setting.writers_per_checkpoint is not None:
        options["writers_per_checkpoint"] = plan.setting.writers_per_checkpoint
    return {**options, "chunk_bytes": plan.setting.chunk_bytes, "buffer_bytes": plan.buffer_bytes}
