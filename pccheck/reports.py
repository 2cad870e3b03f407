"""What an audit says of stores, and of the checkpoints that they hold together (floor 4: imports listing)."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any, Literal

from pccheck.reading.listing import CheckFacts

State = Literal[
    "published", "sealed", "filling", "withdrawn", "free", "kept", "abandoned", "unreadable", "linked", "unfinished",
    "of Orbax",
]  # fmt: skip
Verdict = Literal["ok", "damaged", "reused", "-"]

_MOST_RANKS = 1000  # a record may claim any world


@dataclass(frozen=True, kw_only=True)
class Damage:
    """One thing that is wrong: why, in which leaves, and where in the file."""

    reason: str
    offset: int = 0
    length: int = 0
    leaves: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class SlotReport:
    """One slot file, kept checkpoint, file of a linked folder, or item that Orbax's own handlers saved.

    What no record tells is None.
    """

    name: str
    state: State
    verdict: Verdict = "-"
    verified: bool = False  # every byte was read and digested
    counter: int | None = None
    step: int | None = None
    incarnation: int | None = None
    base: int | None = None
    rank: int | None = None
    world: int | None = None
    file_bytes: int = 0
    payload_bytes: int | None = None
    leaves: int | None = None
    time_ns: int | None = None
    metadata: dict[str, Any] | None = None
    damages: tuple[Damage, ...] = ()

    @property
    def identity(self) -> tuple[int | None, int | None, int | None]:
        """(incarnation, counter, step)."""
        return (self.incarnation, self.counter, self.step)


@dataclass(frozen=True, kw_only=True)
class StoreReport:
    """One store, one slot file on its own, or the linked folders at and under a path.

    `check` is None for all but stores; `rank` of a store under a job's folder. In `folders`, a slot's name begins with
    its folder's, relative to the path.
    """

    path: str
    check: CheckFacts | None
    slots: tuple[SlotReport, ...]
    rank: int | None = None
    folders: bool = False

    @property
    def kind(self) -> Literal["store", "file", "folders"]:
        """What it is of."""
        return "folders" if self.folders else "file" if self.check is None else "store"

    @property
    def is_of_links(self) -> bool:
        """Whether it is a store of links, of which nothing need be a checkpoint."""
        return self.check is not None and self.check.links

    @property
    def is_of_orbax(self) -> bool:
        """Whether there is nothing but what Orbax's own handlers saved, which is not judged."""
        return self.folders and bool(self.slots) and all(slot.state == "of Orbax" for slot in self.slots)

    @property
    def valid(self) -> int:
        """Checkpoints that are whole, each counted once; those on abandoned branches included."""
        if self.folders:
            ours = [slot for slot in self.slots if slot.state != "of Orbax"]
            broken = {_folder_of(slot) for slot in ours if slot.verdict != "ok"}
            return len({_folder_of(slot) for slot in ours} - broken)
        return len({slot.identity for slot in self.slots if slot.verdict == "ok"})

    @property
    def damaged(self) -> int:
        """Files that are damaged; CHECK counts as one."""
        broken = self.check is not None and self.check.damaged
        return sum(slot.verdict == "damaged" for slot in self.slots) + broken

    @property
    def published(self) -> SlotReport | None:
        """What CHECK_ADDR names, None where that is no checkpoint that is here."""
        return next((slot for slot in self.slots if slot.state == "published"), None)


@dataclass(frozen=True, kw_only=True)
class WorldReport:
    """One checkpoint as the stores of all of its ranks hold it.

    Args:
        step, counter, incarnation, world: which one.
        missing: ranks whose stores do not hold it.
        damaged: ranks whose part is damaged.
        abandoned: left behind by a roll-back.
    """

    step: int
    counter: int
    incarnation: int
    world: int
    missing: tuple[int, ...]
    damaged: tuple[int, ...]
    abandoned: bool

    @property
    def state(self) -> Literal["complete", "incomplete", "damaged", "abandoned"]:
        """What it is good for: only one that is complete is restored, and one that is abandoned when asked for."""
        if self.damaged or self.missing:
            return "damaged" if self.damaged else "incomplete"
        return "abandoned" if self.abandoned else "complete"


def exit_code(reports: list[StoreReport]) -> int:
    """Give 0 for no damage anywhere, and at least one valid checkpoint: under a job's folder, one of all its ranks.

    A store of links needs none of its own.
    """
    if any(report.damaged for report in reports):
        return 1
    if any(report.rank is not None for report in reports):
        return 0 if any(not c.missing for c in world_reports(reports)) else 1
    return 0 if all(report.valid for report in reports if not report.is_of_links) else 1


def world_reports(reports: list[StoreReport]) -> list[WorldReport]:
    """Say of each checkpoint under a job's folder which ranks hold it, newest first; none for a store on its own."""
    holders: dict[tuple[int, int, int, int], dict[int, bool]] = {}
    left: set[tuple[int, int, int, int]] = set()
    for report in reports:
        for slot in report.slots:
            judged = slot.verdict in ("ok", "damaged") and slot.counter is not None
            if not judged or report.rank is None or slot.rank != report.rank:
                continue
            key = (slot.counter or 0, slot.incarnation or 0, slot.step or 0, slot.world or 0)
            ranks = holders.setdefault(key, {})
            ranks[report.rank] = ranks.get(report.rank, False) or slot.verdict == "ok"
            if slot.state == "abandoned" or _is_abandoned(key[0], reports):
                left.add(key)
    found = []
    for key, ranks in sorted(holders.items(), reverse=True):
        counter, incarnation, step, world = key
        missing = tuple(itertools.islice((r for r in range(world) if r not in ranks), _MOST_RANKS))
        broken = tuple(sorted(rank for rank, whole in ranks.items() if not whole))
        found.append(
            WorldReport(
                step=step, counter=counter, incarnation=incarnation, world=world, missing=missing, damaged=broken,
                abandoned=key in left,
            )
        )  # fmt: skip
    return found


def _is_abandoned(counter: int, reports: list[StoreReport]) -> bool:
    return any(report.check is not None and counter in report.check.abandoned for report in reports)


def _folder_of(slot: SlotReport) -> str:
    return slot.name.rpartition("/")[0]
