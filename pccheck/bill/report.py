"""The bill of a store's runs, from what lies in it (floor 4: imports bill; looks, and never writes)."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence

from pccheck.bill import history
from pccheck.bill.bills import Report as Report
from pccheck.bill.bills import report_of
from pccheck.bill.history import Source
from pccheck.bill.runs import FILE_NAME, JobRun

_RANKS_NAMED = 16


def report(path: str | os.PathLike[str]) -> Report:
    """Tell what checkpoints cost in the runs of a store, and what failures took; nothing is locked or written.

    Args:
        path: a store; a job's folder of rank-00000, ...: costs are those of the rank that waited longest, bytes of all
            ranks together, times of rank 0; or a folder of Orbax steps: those of process 0 of the item that is there.

    The runs are there that saved at least once, the last 64, up to about two seconds ago. The store may be in use.

    Raises:
        UsageError: there is no store at the path; or stores of several Orbax items, which it names.
        MediumError: the folder cannot be read.
    """
    found = history.sources(path)
    runs = history.job(found)
    return report_of(os.path.abspath(os.fsdecode(path)), runs, _notes(found, runs), time.time())


def _notes(found: Sequence[Source], runs: Sequence[JobRun]) -> Iterator[str]:
    for each in found:
        if each.found.problem:
            yield f"{each.path}/{FILE_NAME} cannot be read: {each.found.problem}"
    if not runs and not any(each.found.problem for each in found):
        yield (
            "no run is noted here: none has saved yet (the first note comes up to two seconds after the first save), "
            "the store was written with history=False, or by a version of pccheck without a history"
        )
    if not runs:
        return
    last = runs[-1]
    missing = [rank for rank in range(min(last.first.world, 1 << 20)) if rank not in last.parts][:_RANKS_NAMED]
    if missing:
        yield f"of the last run nothing is known of rank {', '.join(map(str, missing))}: sums leave them out"
    apart = [each.path for each in found if each.rank and any(run.world == 1 for run in each.found.runs)]
    if apart:
        yield (
            f"{len(apart) + 1} processes save here on their own, and these are the runs of the first; "
            f"those of another are told of its own store, such as {apart[0]}"
        )
