"""Writes the history of the run under way, off the critical path (floor 2: imports bill, saving, store and below)."""

from __future__ import annotations

import threading
import time
import warnings
from collections.abc import Callable
from typing import final

from pccheck import holders
from pccheck.bill import history, runs
from pccheck.bill.account import Account
from pccheck.bill.runs import Run
from pccheck.errors import PccheckError
from pccheck.events import Event
from pccheck.options import Options
from pccheck.ranks.agreement import Agreement
from pccheck.saving.notifier import Notifier
from pccheck.saving.stats import Stats
from pccheck.store.store import Store

EVERY_S = runs.EVERY_S
BACK_OFF_S = 60.0  # after a file that could not be written
END_S = 5.0  # how long the end of a run waits for a file that is being written


@final
class Recorder:
    """Keeps the entry of one opening of a store in its history. Thread-safe.

    It begins with the first `save()`, is replaced whole on the notifier's thread, and has the mark of its end from
    `end()`. Nothing that happens to it reaches a checkpoint or the trainer: what fails is warned about, once, and tried
    again later. Where the volume has no side files, or somebody else's file has the name, there is none.

    Args:
        store: whose history it is; only while this process has it is anything written.
        options: of the Checkpointer; `history` switches it off.
        agreement: with the other ranks, who keep theirs in their stores.
        notifier: tells of all events.
        stats: gives what was done so far.
    """

    def __init__(
        self, store: Store, options: Options, agreement: Agreement, notifier: Notifier, stats: Callable[[], Stats]
    ) -> None:
        self._store, self._options, self._agreement = store, options, agreement
        self._stats = stats
        self._sides = store.side_files if options.history else None
        self._writing = threading.RLock()  # never waited for by a save
        self._counting = threading.RLock()  # guards the account; nothing waits under it
        self._account = Account()
        self._began_s, self._began = time.time(), time.monotonic()
        self._holder = holders.describe_self()[:300]
        self._old: list[bytes] | None = None  # the JSON of earlier runs, once it was read
        self._due_s = 0.0  # on the monotonic clock: nothing is written before
        self._pipeline, self._warned = "", False
        if self._sides is not None:
            notifier.record(self.hear, self.tick, EVERY_S)

    def hear(self, event: Event) -> bool:
        """Count an event, when it comes, on the thread that it comes from; True with the first save that returned."""
        with self._counting:
            known = self._account.returned
            self._account.heard(event, time.monotonic() - self._began)
            if known or not self._account.returned:
                return False
            self._pipeline = self._stats().pipeline  # not told any more when the run ends
            return True

    def tick(self) -> None:
        """Write what happened, if that is due; called on the notifier's thread."""
        with self._writing:
            now_s = time.monotonic()
            if now_s >= self._due_s:  # even if nothing happened: the steps that a kill takes are known by its time
                self._write(ended=False)

    def end(self) -> None:
        """Write the mark of the run's end, while the store is still this process's; nothing is written after it.

        What interrupts it, a Ctrl-C, has ended nothing: it may be called again.
        """
        if self._sides is None or not self._writing.acquire(timeout=END_S):
            return
        try:
            self._write(ended=True)
            self._sides = None
        finally:
            self._writing.release()

    def _write(self, *, ended: bool) -> None:
        if self._sides is None or not self._account.returned:
            return
        now_s = time.monotonic()
        try:
            if self._old is None:
                found = history.look(self._sides)
                if not found.ours:
                    self._stop(f"it is left alone, and no history is kept: {found.problem}")
                    return
                self._old = runs.settle(found.runs)
            if not self._has_store():
                self._sides = None  # its new owner keeps its own
                return
            with self._counting:
                entry = self._entry(time.monotonic() - self._began, ended=ended)
            self._sides.replace_side(runs.FILE_NAME, runs.pack([*self._old, runs.encode(entry)]))
        except Exception as error:  # whatever it is, no checkpoint and no trainer is to suffer from it
            self._due_s = now_s + BACK_OFF_S
            self._warn(f"it could not be written: {error}")

    def _has_store(self) -> bool:
        check = self._store.books.check
        try:
            with self._store.books.lock:
                check.assert_mine()
            return check.links() > 0
        except PccheckError:
            return False

    def _stop(self, why: str) -> None:
        self._sides = None
        self._warn(why)

    def _warn(self, what: str) -> None:
        if self._warned:
            return
        self._warned = True
        text = f"{self._store.path}/{runs.FILE_NAME}, which only `pccheck report` reads: {what}"
        try:
            warnings.warn(text, RuntimeWarning, stacklevel=2)
        except RuntimeWarning:  # warnings may be errors, and this is the notifier's thread
            pass

    def _entry(self, uptime_s: float, *, ended: bool) -> Run:
        known, stats, options = self._account, self._stats(), self._options
        age_s2, age_worst_s = known.age(uptime_s)
        return Run(
            incarnation=self._store.opening.incarnation, rank=self._agreement.rank, world=self._agreement.world,
            began_s=round(self._began_s, 3), uptime_s=round(uptime_s, 3), ended=ended, holder=self._holder,
            in_flight=options.in_flight, snapshot=known.snapshot or options.snapshot, pipeline=self._pipeline,
            restored_step=known.restored_step, restored_at_s=known.restored_at_s, first_step=known.first_step,
            last_step=known.last_step, progress=known.progress, climbs=known.climbs,
            climbed_s=round(known.climbed_s, 6), paces=dict(known.paces), longest=known.longest,
            returned_at_s=round(known.returned_at_s, 3), returned=known.returned, saves=stats.saves,
            committed=stats.committed, superseded=stats.superseded, skipped=stats.skipped, failed=stats.failed,
            retries=stats.retries, save_s=stats.save_s, slot_wait_s=stats.slot_wait_s, copy_wait_s=stats.copy_wait_s,
            gate_wait_s=stats.gate_wait_s, pool_wait_s=stats.pool_wait_s,
            first_save_s=known.first_save_s, written_bytes=known.written_bytes, state_bytes=known.state_bytes,
            durable=dict(known.durable), durable_worst_s=known.durable_worst_s, durable_step=known.durable_step,
            saved_at_s=round(known.saved_at_s, 3), age_s2=age_s2, age_worst_s=round(age_worst_s, 3),
            stride=known.stride, points=known.points(),
        )  # fmt: skip
