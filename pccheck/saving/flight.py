"""The saves under way: admitted, submitted, committed by threads, and how they ended (floor 2: imports below)."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from dataclasses import replace

from pccheck import format
from pccheck.errors import ClosedError, DeadlineError, RanksError, StoreGoneError, UsageError
from pccheck.events import Failed, Skipped, SnapshotPicked
from pccheck.format import Record
from pccheck.options import Options, WhenFull
from pccheck.pipeline.interface import Job
from pccheck.ranks.agreement import Agreement
from pccheck.saving.background import give_way
from pccheck.saving.captures import Capture, Captures
from pccheck.saving.commit import commit, has_ended, take_back, why
from pccheck.saving.notifier import Notifier
from pccheck.saving.pipelines import Pipelines
from pccheck.saving.save import Launched, Link, Outcome, Save, Underway
from pccheck.saving.snapshot import Snapshots, Taken
from pccheck.saving.stats import Stats, Tally
from pccheck.saving.unreported import Unreported
from pccheck.saving.watch import Watches
from pccheck.state.planner import Prepared
from pccheck.store.slots import record_page
from pccheck.store.store import Store

_SLOT_ROUND = 64 * 1024
_LOOK_S = 0.05  # how often to ask what other ranks have said, while a save waits for its place


class Flight:
    """At most `in_flight` saves at once, over one pipeline. Thread-safe, but `launch` must not run twice at once.

    Args:
        options: of the Checkpointer.
        store: where the checkpoints go.
        agreement: with the other ranks.
        notifier: hears of every event.
        at: called with the name of each point of a commit: tests crash there.
    """

    def __init__(
        self, options: Options, store: Store, agreement: Agreement, notifier: Notifier, at: Callable[[str], None]
    ) -> None:
        self._options, self._store, self._agreement = options, store, agreement
        self._notifier, self._at = notifier, at
        self.pipelines, self.snapshots = Pipelines(options), Snapshots(options)
        self.captures, self.watches = Captures(self.__repr__), Watches()
        self.unreported, self.tally = Unreported(raises=options.on_error == "raise"), Tally()
        # Guards what follows; nothing waits for a disk under it. Entered as a lock, which is one step: entering a
        # condition runs Python code, and a Ctrl-C within that has left it locked for ever (seen).
        self._state = threading.RLock()
        self._changed = threading.Condition(self._state)
        self._running: dict[int, Save] = {}  # by counter: admitted, not ended
        self._jobs: dict[int, Job] = {}  # by counter: handed to a committer, not ended
        self._told: str | None = options.snapshot  # the mode that was told of last
        self._closed = False
        self._work: queue.SimpleQueue[Underway | None] = queue.SimpleQueue()
        self._committers: list[threading.Thread] = []

    def _admit(self, save: Save, when_full: WhenFull) -> bool:
        """Wait for a place among the in_flight checkpoints; False = skipped; ClosedError after `close`.

        A save that ends makes a place, and wakes this up; without a limit it is waited for as long as it takes. What
        other ranks say may make one, too: it is asked for, without a limit for `agree_timeout_s` at most.
        """
        began = time.monotonic()
        limit_s = 0.0 if when_full == "skip" else self._options.max_block_s
        until_s = began + (self._options.agree_timeout_s if limit_s is None else limit_s)
        while True:
            self._store.settling.await_places(self._options.in_flight, until_s, lambda: self._closed)
            with self._state:
                left_s = until_s - time.monotonic()
                look_s = None if limit_s is None else left_s
                if self._agreement.world > 1:
                    look_s = _LOOK_S if look_s is None else min(look_s, _LOOK_S)
                if self._changed.wait_for(lambda: self._closed or self._has_place(), look_s):
                    self._enter(save, time.monotonic() - began)
                    return True
                if left_s <= 0 and (limit_s is not None or not self._running):
                    break
        self._skip(save, time.monotonic() - began)
        return False

    def _enter(self, save: Save, waited_s: float) -> None:
        if self._closed:
            raise ClosedError(f"the Checkpointer of {self._store.path} was closed while this save waited")
        self.tally.begun(save, waited_s)
        self._running[save.counter] = save

    def _skip(self, save: Save, waited_s: float) -> None:
        with self._state:
            running = len(self._running)
            self.tally.begun(save, waited_s, skipped=1)
        others = f", and {n} waited for other ranks," if (n := self._agreement.unsettled) else ""
        reason = f"{running} checkpoints were under way{others} for {waited_s:.3f} s"
        self._agreement.report(save.counter, save.step, False, reason=f"it skipped this save: {reason}")
        save.skip(reason)
        self._notifier(Skipped(step=save.step, counter=save.counter, reason=reason))

    def _has_place(self) -> bool:
        """Tell whether one more save may begin.

        One whose verdict is not known yet, though its save gave up waiting for that, holds a slot: together with those
        under way they are at most in_flight + 1. One such still leaves in_flight places.
        """
        running, unsettled = len(self._running), self._agreement.unsettled
        return running < self._options.in_flight and running + unsettled <= self._options.in_flight

    def refuse(self, save: Save, error: BaseException) -> None:
        """Tell the other ranks that a save was not begun here, so that none waits for it."""
        self._agreement.report(save.counter, save.step, False, reason=why(error))
        save.finish("failed", error)

    def launch(self, save: Save, prepared: Prepared, when_full: WhenFull, link: Link | None = None) -> Launched | None:
        """Start a save; None = it was skipped, or the store is gone, which the Save tells.

        Whatever this raises, a Ctrl-C at any moment included, the save has ended and its slot was taken back.
        """
        try:
            return self._submit(save, prepared, link) if self._admit(save, when_full) else None
        except BaseException as error:
            with self._state:
                admitted, job = save.counter in self._running, self._jobs.get(save.counter)
            gone = admitted and isinstance(error, (StoreGoneError, RanksError))
            if job is not None:
                job.cancel()  # a committer has it: it takes the slot back
            elif admitted:
                self._agreement.report(save.counter, save.step, False, reason=why(error))
                self._notifier(Failed(step=save.step, counter=save.counter, error=error))
                self.end(save, "failed", error, job=None, report=gone)
            else:
                self.refuse(save, error)
            if gone:
                return None
            raise

    def _submit(self, save: Save, prepared: Prepared, link: Link | None) -> Launched:
        self._agreement.assert_usable()
        self._start_committer()
        self._notifier.start()  # here, where it counts as time of `save()`
        room = format.padded(prepared.manifest_room + prepared.manifest_room // 4, _SLOT_ROUND)  # metadata varies
        self._store.ensure(format.PAYLOAD_OFFSET + prepared.payload_bytes + room)
        record, job = self._store.reserve(save.counter, save.step), None
        every = self._options.keep_every
        try:
            medium = self._store.slots[record.slot]
            devices = () if prepared.filler is None else prepared.filler.devices
            pipeline = self.pipelines.serve(prepared.payload_bytes, medium, devices)
            self._at("filling")
            taken = self._take(save, prepared)
            job = pipeline.submit(
                prepared.layout, prepared.addresses, prepared.keep, medium, prologue=record_page(record),
                filler=taken.filler,
            )  # fmt: skip
            prepared.keep = None  # the job alone keeps the caller's arrays, and only until they are captured
            if taken.waits is not None:
                self.captures.add(save.counter, Capture(job=job, waits=taken.waits, filler=taken.filler))
            self.snapshots.captured_by(taken, job)
            self.pipelines.filled(job, devices)
            work = Underway(
                save=save, record=record, prepared=prepared, job=job, pin=bool(every and save.step % every == 0),
                deadline_s=time.monotonic() + self._options.write_timeout_s, link=link,
            )  # fmt: skip
            with self._state:
                self._jobs[save.counter] = job
            self._work.put(work)
        except BaseException:
            if job is None and prepared.filler is not None:
                prepared.filler.end()
            self._abort(save, record, job)
            raise
        return Launched(job=job, chunks=taken.chunks, lazy=taken.mode == "lazy" and taken.waits is not None)

    def _take(self, save: Save, prepared: Prepared) -> Taken:
        """Do what is owed to the caller's memory before the pipeline has it, and tell of another mode than before."""
        self._end_watches()  # what no fence was reached for since the last save
        taken = self.snapshots.take(prepared, self.captures.waited_s)
        if taken.mode == "lazy" and self.snapshots.debug:
            self.watches.begin(prepared)
        if taken.mode != self._told:
            self._told = taken.mode
            self._notifier(SnapshotPicked(step=save.step, counter=save.counter, mode=taken.mode, reason=taken.reason))
        return taken

    def _end_watches(self) -> None:
        """Note what was changed so far of what is watched; from here on it may be."""
        for error in self.watches.check() if self.watches else ():
            self.unreported.note(-1, error)  # told by the next call that tells of any save

    def _abort(self, save: Save, record: Record, job: Job | None) -> None:
        with self._state:
            self._jobs.pop(save.counter, None)
        self.captures.remove(save.counter)
        if job is None:
            self._store.fail(record, quarantine=False, reachable=False)
        else:
            job.cancel()
            self._store.fail(record, quarantine=True, reachable=False, ended=lambda: has_ended(job))

    def _start_committer(self) -> None:
        """Have a thread for this save; before it takes anything, since a system may refuse another thread."""
        if len(self._committers) < self._options.in_flight:
            thread = threading.Thread(target=self._commit_all, name="pccheck-commit", daemon=True)
            self._committers.append(thread)  # before it runs: close() must know of every one
            try:
                thread.start()
            except Exception:
                self._committers.remove(thread)
                raise

    def _commit_all(self) -> None:
        give_way()
        options = self._options
        while (work := self._work.get()) is not None:
            try:
                outcome = commit(work, self._store, self._agreement, self._notifier, self._at, options.agree_timeout_s)
            except BaseException as error:  # whatever it is, it must reach the caller, and the slot must be freed
                try:
                    take_back(work, error, self._store, self._agreement, self._notifier)
                except BaseException as second:
                    error.add_note(f"and taking it back failed: {second!r}")
                    self._notifier(Failed(step=work.save.step, counter=work.save.counter, error=error))
                self.end(work.save, "failed", error, job=work.job, report=True)
            else:
                self.end(work.save, outcome, None, job=work.job, report=True)
            self._store.settling.settle_late()
            self._store.tidy()
            del work

    def end(self, save: Save, outcome: Outcome, error: BaseException | None, *, job: Job | None, report: bool) -> None:
        """Note how an admitted save ended.

        In this order, so that whoever sees the save ended also finds its error, and whoever is let in by its end, or
        sees nothing running, finds its outcome set.
        """
        with self._state:
            self.tally.ended(outcome, None if job is None else job.stats())
            if error is not None and report and save.report:
                self.unreported.note(save.counter, error)
        save.finish(outcome, error)
        if job is not None and job.wait_captured(0):
            self.captures.remove(save.counter)
        with self._state:
            self._running.pop(save.counter, None)
            self._jobs.pop(save.counter, None)
            self._changed.notify_all()

    # -- waiting ----------------------------------------------------------------------------------------------------

    def fence(self, timeout_s: float, owner: int | None) -> float:
        """Wait until no capture reads an owner's leaves (None = any), and give the seconds; DeadlineError.

        Raises ChangedError for what was changed before it was reached, where captures are watched.
        """
        waited = self.captures.wait(timeout_s, owner=owner)
        if self.watches:
            self.unreported.tell_now(self.watches.check(owner))
        return waited

    def await_snapshot(self, save: Save, launched: Launched) -> None:
        """Wait for what `save()` must wait for; whatever ends this ends the save, for then the state may be changed."""
        began_s = time.monotonic()
        try:
            self.captures.wait_chunks(launched.job, launched.chunks, self._options.write_timeout_s)
        except BaseException:  # Ctrl-C in a notebook, or the deadline
            launched.job.cancel()
            raise
        if not launched.lazy:
            save.note_captured()  # the committer does it, too, but perhaps not yet
        save.copy_wait_s = time.monotonic() - began_s

    def drain(self, timeout_s: float | None, *, close: bool = False) -> None:
        """Wait until no save is under way, and with `close` let no other begin; DeadlineError after `timeout_s`."""
        with self._state:
            if not self._changed.wait_for(lambda: not self._running, timeout_s):
                raise DeadlineError(f"{len(self._running)} checkpoint(s) to become durable; {self!r}", timeout_s or 0.0)
            if close:  # in one step: a save that waits for a place must not be let in by the end of the last
                self._closed = True
                self._changed.notify_all()
        self._end_watches()  # nothing is captured any more, so that wait() and restore() are fences as well

    def assert_no_callback(self) -> None:
        """Raise UsageError in a callback of a save's future: what waits for that save would wait for itself."""
        if threading.current_thread() in self._committers:
            raise UsageError(
                "a callback of a save's future cannot save, wait, restore or close: it would wait for its own end; "
                "hand that to another thread"
            )

    @property
    def stats(self) -> Stats:
        """What was done so far."""
        pipeline = "" if self.pipelines.current is None else self.pipelines.current.name
        return replace(self.tally.stats, fence_wait_s=self.captures.waited_s, pipeline=pipeline)

    def close(self, timeout_s: float | None) -> None:
        """Wait for what is under way, at most `timeout_s` (then DeadlineError), and stop all threads.

        Whatever interrupts the wait has changed nothing: it may be called again.
        """
        self.drain(timeout_s, close=True)
        for _ in self._committers:
            self._work.put(None)
        for thread in [t for t in self._committers if t.ident is not None]:  # a Ctrl-C may have come before it started
            thread.join(self._options.exit_timeout_s)
        self.pipelines.close(self._options.exit_timeout_s)
        self.snapshots.close()

    def __repr__(self) -> str:
        with self._state:
            steps, captures = sorted(s.step for s in self._running.values()), len(self.captures)
        pipeline = self.pipelines.current
        pool = f", {pipeline.free_buffers} of {pipeline.buffers} buffers free" if pipeline else ""
        return f"{len(steps)} of {self._options.in_flight} in flight {steps}, {captures} capturing{pool}"
