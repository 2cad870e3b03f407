"""Settings for a job on a machine, with what they bring and why (floor 0: imports tuning.*)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from pccheck.tuning import explaining
from pccheck.tuning.basis import Basis, Rates, basis_of
from pccheck.tuning.comparing import BLOCKING, compare
from pccheck.tuning.helping import Help, budget_that_binds, helps
from pccheck.tuning.machine import Machine
from pccheck.tuning.planning import Outcome, Plan, at_interval, best_plan
from pccheck.tuning.wanted import Wanted
from pccheck.version import __version__


@dataclass(frozen=True, kw_only=True)
class Advice:
    """How to save, and what comes of it: `Checkpointer(directory, **advice.options)`, every `advice.interval` steps.

    Args:
        wanted: what was asked.
        source: of the rates: a "probe", "rates" told by hand (some may be assumed), or all "assumed".
        plan: the best plan, with its interval, its outcome and its bill.
        others: what else could be done at the same rates: other numbers in flight, blocking saves.
        binds: what keeps it from being better.
        helps: what would help: what keeps a recovery point that is out of reach, then that which helps most.
        restart_s: seconds from a failure until training goes on that was counted with.
        headline: what was asked, in a sentence.
        meaning: what the figures mean.
        binding: what binds, in a sentence.
        helping: what would help, in sentences.
        assumptions: what was taken for granted, and how to replace it.
        basis: the rates that it rests on.
        unreachable: what was wished for and cannot be had, and the nearest that can; empty if all wishes are kept.
    """

    wanted: Wanted
    source: Literal["probe", "rates", "assumed"]
    plan: Plan
    others: tuple[Outcome, ...]
    binds: str
    helps: tuple[Help, ...]
    restart_s: float
    headline: str
    meaning: tuple[str, ...]
    binding: str
    helping: tuple[str, ...]
    assumptions: tuple[str, ...]
    unreachable: tuple[str, ...]
    basis: Basis = field(repr=False)

    @property
    def interval(self) -> int:
        """Steps from save to save."""
        return self.plan.choice.interval

    @property
    def options(self) -> dict[str, Any]:
        """Options of the Checkpointer, by name."""
        return dict(explaining.options_of(self.plan))

    @property
    def outcome(self) -> Outcome:
        """What the plan brings."""
        return self.plan.outcome

    @property
    def loop(self) -> str:
        """The lines to paste into a training script."""
        return explaining.loop_text(self.plan, ranks=self.wanted.ranks)

    def curve(self, intervals: Sequence[int], *, in_flight: int | None = None) -> list[Outcome]:
        """Give what other intervals would bring, with the options of the plan or of the best one of so many in flight.

        Raises OptionError if the budgets leave no room for so many.
        """
        plan = self.plan
        if in_flight is not None and in_flight != plan.in_flight:
            plan = best_plan(self.wanted, self.basis, in_flight=in_flight)
        return [at_interval(self.wanted, self.basis, plan, interval) for interval in intervals]

    def as_json(self) -> dict[str, Any]:
        """Give the same facts under the names that docs/cli.md lists; they are stable."""
        plan = self.plan
        return {
            "pccheck": __version__,
            "wanted": asdict(self.wanted),
            "source": self.source,
            "restart_s": self.restart_s,
            "interval": self.interval,
            "options": self.options,
            "storage_bytes": plan.storage_bytes,
            "dram_bytes": plan.buffer_bytes,
            "outcome": asdict(plan.outcome),
            "others": [asdict(other) for other in self.others],
            "terms": plan.choice.terms,
            "binds": self.binds,
            "helps": [asdict(help) for help in self.helps],
            "headline": self.headline,
            "meaning": list(self.meaning),
            "binding": self.binding,
            "helping": list(self.helping),
            "assumptions": list(self.assumptions),
            "unreachable": list(self.unreachable),
            "loop": self.loop,
        }


def advise(wanted: Wanted, machine: Machine | Rates | None = None, *, failures: str = "", whose: str = "") -> Advice:
    """Give the settings that get the most useful work out of a job, within its budgets.

    Of every number in flight, way to cut checkpoints that was measured, and snapshot mode, it takes the interval of
    `choose_interval` and predicts what comes of it (`predict`); the best is advised, of equals that which needs least.

    Args:
        wanted: the job and its wishes.
        machine: what `pccheck probe` measured (`Machine.from_json`), rates told by hand, or None = assumed ones.
        failures: where the mean time between failures comes from, to be told among the assumptions.
        whose: the failure rate is, for the headline, where it may be another job's.

    Raises OptionError for wishes out of their range, and for budgets without room for a single plan, with the least
    that would do. A recovery point out of reach is no error: `unreachable` says so, and the plan is the nearest.
    """
    basis = basis_of(wanted, machine)
    plan = best_plan(wanted, basis)
    budget = budget_that_binds(wanted, basis, plan)
    found = helps(wanted, basis, plan)
    return Advice(
        wanted=wanted,
        source=basis.source,
        plan=plan,
        others=compare(wanted, basis, plan),
        binds=budget or plan.choice.binds,
        helps=found,
        restart_s=basis.restart_s,
        headline=explaining.headline(wanted, whose),
        meaning=tuple(explaining.meaning(wanted, basis, plan, budget)),
        binding=explaining.binding(wanted, basis, plan, budget),
        helping=tuple(explaining.helping(plan, found)),
        assumptions=(*((f"failures: {failures}",) if failures else ()), *basis.assumptions, BLOCKING),
        unreachable=tuple(explaining.unreachable(wanted, plan)),
        basis=basis,
    )
