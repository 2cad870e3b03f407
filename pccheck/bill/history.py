"""Reads the runs that stores under a path have had (floor 2: imports bill.runs, reading, storage; never a writer)."""

from __future__ import annotations

import os
import re
import time
from collections import Counter
from collections.abc import Iterable
from contextlib import closing
from dataclasses import dataclass
from typing import final

from pccheck import holders
from pccheck.bill import runs
from pccheck.bill.runs import Found, JobRun, Run, State
from pccheck.errors import ContentError, MediumError, UsageError
from pccheck.reading.linkplaces import find_linked
from pccheck.reading.listing import read_check
from pccheck.reading.places import rank_stores
from pccheck.storage.directory import Directory
from pccheck.storage.volume import SideFiles, Volume

SILENT_S = 120.0  # a run on another machine that was not heard of for so long is over; it tells every 2 s


@final
@dataclass(frozen=True, kw_only=True)
class Source:
    """The history of one store.

    Args:
        rank: whose store it is; 0 for a store on its own.
        path: its folder.
        found: its runs.
        holder: who has it open for writing, or died with it open; None = nobody.
    """

    rank: int
    path: str
    found: Found
    holder: str | None = None

    def states(self) -> list[State]:
        """Tell how each run stands; "failed" = it never said that it ended, and nobody goes on with it."""
        every: list[State] = ["ended" if run.ended else "failed" for run in self.found.runs]
        if every and every[-1] == "failed" and self._goes_on(self.found.runs[-1]):
            every[-1] = "running"
        return every

    def _goes_on(self, run: Run) -> bool:
        """Tell whether a run's process is alive and has the store: whoever comes after it leaves a name of its own."""
        if not run.holder or run.holder != self.holder or not holders.is_alive(run.holder):
            return False
        return holders.is_of_here(run.holder) or time.time() - run.began_s - run.uptime_s < SILENT_S


def sources(path: str | os.PathLike[str]) -> list[Source]:
    """Give the histories of a store, of the stores of all ranks, or of the processes of an Orbax item, by rank.

    Nothing is locked or written, and the stores may be in use.

    Raises:
        UsageError: there is no store there; or there are stores of several Orbax items, which it names.
        MediumError: it cannot be read.
    """
    where = os.path.abspath(os.fsdecode(path))
    if not os.path.isdir(where):
        what = "is a file: name the folder of its store" if os.path.exists(where) else "there is no such folder"
        raise UsageError(f"{where}: {what}")
    stores = rank_stores(where) or _stores_of_orbax(where)
    if not stores:
        raise UsageError(f"{where} is not a pccheck store: it holds no CHECK, no slot files and no rank folders")
    found = [source(path, rank) for rank, path in stores]
    if all(path != where for _, path in stores):  # a process alone was here before the ranks: its runs are the job's
        before = source(where)
        found[:0] = [before] if before.found.runs else []
    return found


def source(path: str, rank: int = 0) -> Source:
    """Give the history of one store; one that cannot be read has a problem."""
    with closing(Directory(path, create=False, write=False)) as volume:
        try:
            return Source(rank=rank, path=path, found=look(volume), holder=read_check(volume).holder)
        except (ContentError, MediumError) as error:
            return Source(rank=rank, path=path, found=Found(problem=str(error), ours=False))


def look(volume: SideFiles) -> Found:
    """Give the runs of a store; raises ContentError or MediumError where the file cannot be read."""
    return runs.read(volume.read_side(runs.FILE_NAME, runs.LIMIT_BYTES + 1))


def past_failures(store: str | os.PathLike[str] | Volume) -> tuple[float, int]:
    """Count the failures of a store's earlier runs: give how long they ran together, in seconds, and how many failed.

    A run that is under way counts in neither. Of several ranks rank 0's runs are told, and any rank's failure. With a
    prior mean M0 that weighs as much as `a` failures, M is estimated as (a M0 + seconds) / (a + failures).

    Args:
        store: as for `pccheck.report`; or the volume of one store.

    Raises UsageError and MediumError as `pccheck.report`; a history that cannot be read counts as none.
    """
    if isinstance(store, (str, os.PathLike)):
        found = sources(store)
    elif isinstance(store, SideFiles):
        found = [Source(rank=0, path=store.path, found=look(store), holder=read_check(store).holder)]
    else:
        return 0.0, 0
    over = [run for run in job(found) if run.state != "running"]
    return sum(run.first.uptime_s for run in over), sum(run.state == "failed" for run in over)


def job(found: Iterable[Source]) -> list[JobRun]:
    """Put the runs of all ranks together, oldest first. Of processes that save on their own, rank 0's are taken."""
    parts: dict[tuple[int, ...], dict[int, tuple[Run, State]]] = {}
    for each in found:
        often: Counter[tuple[int, int]] = Counter()
        for run, state in reversed(list(zip(each.found.runs, each.states(), strict=True))):
            if run.world > 1 or each.rank == 0:
                often[run.incarnation, run.world] += 1  # more than once in a store that was made anew
                key = (run.world, run.incarnation, often[run.incarnation, run.world])
                parts.setdefault(key, {}).setdefault(each.rank, (run, state))
    made = [
        JobRun(parts={rank: ranks[rank][0] for rank in sorted(ranks)}, state=_of_all({s for _, s in ranks.values()}))
        for ranks in parts.values()
    ]
    return sorted(made, key=lambda run: run.first.began_s)


def _of_all(states: set[State]) -> State:
    return "failed" if "failed" in states else "running" if "running" in states else "ended"


def _stores_of_orbax(where: str) -> list[tuple[int, str]]:
    """Give process and folder of each store of links that lies hidden in a folder of Orbax steps."""
    items: dict[str, list[tuple[int, str]]] = {}
    for path in find_linked(where).stores:
        process = re.search(r"[0-9]{1,9}$", os.path.basename(path))
        items.setdefault(os.path.dirname(path), []).append((int(process[0]) if process else 0, path))
    if len(items) > 1:
        names = ", ".join(sorted(path for stores in items.values() for _, path in stores)[:8])
        raise UsageError(f"{where} holds the stores of {len(items)} Orbax items, a history each; name one: {names}")
    return sorted(*items.values()) if items else []
