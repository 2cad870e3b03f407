"""The saves under way: admitted, submitted, committed by threads, and how they ended (floor 2: imports below)."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from pccheck import format
from pccheck.errors import ClosedError, DeadlineError, StoreGoneError, UsageError
from pccheck.events import Skipped
from pccheck.format import Record
from pccheck.options import Options, WhenFull
from pccheck.pipeline.choose import make_pipeline
from pccheck.pipeline.interface import Job, Pipeline
from pccheck.saving import sizing
from pccheck.saving.commit import commit, has_ended, take_back
from pccheck.saving.notifier import Notifier
from pccheck.saving.save import Outcome, Save, Underway
from pccheck.state.planner import Prepared
from pccheck.storage.medium import Medium
from pccheck.store.coordination import Coordinator
from pccheck.store.store import Store

_SLOT_ROUND = 64 * 1024


@dataclass(frozen=True, kw_only=True)
class Stats:
    """What a Checkpointer did so far.

    Args:
        saves: calls of `save()` that were not refused.
        committed, superseded, skipped, failed: how the ended ones ended.
        slot_wait_s: time that `save()` waited because in_flight checkpoints were under way.
        fence_wait_s: time that `fence()`, and `save()` in copy mode, waited for captures.
        pool_wait_s: time that captures waited for a free buffer (back-pressure of the storage).
        retries: writes that were tried again.
        pipeline: "native", "portable", or "" before the first save.
    """

    saves: int = 0
    committed: int = 0
    superseded: int = 0
    skipped: int = 0
    failed: int = 0
    slot_wait_s: float = 0.0
    fence_wait_s: float = 0.0
    pool_wait_s: float = 0.0
    retries: int = 0
    pipeline: str = ""


class Flight:
    """At most `in_flight` saves at once, over one pipeline. Thread-safe, but `launch` must not run twice at once.

    Args:
        options: of the Checkpointer.
        store: where the checkpoints go.
        coordinator: asked by every commit.
        notifier: hears of every event.
        at: called with the name of each point of a commit: tests crash there.
    """

    def __init__(
        self, options: Options, store: Store, coordinator: Coordinator, notifier: Notifier, at: Callable[[str], None]
    ) -> None:
        self._options, self._store, self._coordinator = options, store, coordinator
        self._notifier, self._at = notifier, at
        self._pipeline: Pipeline | None = None
        self._pool_bytes = self._sized_for = 0
        # Guards what follows; nothing waits for a disk under it. Entered as a lock, which is one step: entering a
        # condition runs Python code, and a Ctrl-C within that has left it locked for ever (seen).
        self._state = threading.RLock()
        self._changed = threading.Condition(self._state)
        self._running: dict[int, Save] = {}  # by counter: admitted, not ended
        self._jobs: dict[int, Job] = {}  # by counter: may still read the caller's memory
        self._errors: list[tuple[int, BaseException]] = []  # counter, error: nobody was told of them yet
        self._stats = Stats()
        self._closed = False
        self._work: queue.SimpleQueue[Underway | None] = queue.SimpleQueue()
        self._committers: list[threading.Thread] = []

    def _admit(self, save: Save, when_full: WhenFull) -> bool:
        """Wait for a place among the in_flight checkpoints; False = skipped; ClosedError after `close`."""
        began = time.monotonic()
        limit = 0.0 if when_full == "skip" else self._options.max_block_s
        with self._state:
            free = self._changed.wait_for(lambda: self._closed or len(self._running) < self._options.in_flight, limit)
            if self._closed:
                raise ClosedError(f"the Checkpointer of {self._store.path} was closed while this save waited")
            waited = time.monotonic() - began
            skipped = 0 if free else 1
            stats = self._stats
            self._stats = replace(
                stats, saves=stats.saves + 1, slot_wait_s=stats.slot_wait_s + waited, skipped=stats.skipped + skipped
            )
            if free:
                self._running[save.counter] = save
                return True
        reason = f"{self._options.in_flight} checkpoints were under way for {waited:.3f} s"
        save.skip(reason)
        self._notifier(Skipped(step=save.step, counter=save.counter, reason=reason))
        return False

    def launch(self, save: Save, prepared: Prepared, when_full: WhenFull) -> Job | None:
        """Start a save; None = it was skipped, or the store is gone, which the Save tells.

        Whatever this raises, a Ctrl-C at any moment included, the save has ended and its slot was taken back.
        """
        try:
            return self._submit(save, prepared) if self._admit(save, when_full) else None
        except BaseException as error:
            gone = isinstance(error, StoreGoneError)
            with self._state:
                admitted, job = save.counter in self._running, self._jobs.get(save.counter)
            if job is not None:
                job.cancel()  # a committer has it: it takes the slot back
            elif admitted:
                self.end(save, "failed", error, job=None, report=gone)
            else:
                save.finish("failed", error)
            if gone:
                return None
            raise

    def _submit(self, save: Save, prepared: Prepared) -> Job:
        self._start_committer()
        room = format.padded(prepared.manifest_room + prepared.manifest_room // 4, _SLOT_ROUND)  # metadata varies
        self._store.ensure(format.PAYLOAD_OFFSET + prepared.payload_bytes + room)
        record, job = self._store.reserve(save.counter, save.step), None
        every = self._options.keep_every
        try:
            medium = self._store.slots[record.slot]
            pipeline = self._pipeline_for(prepared, medium)
            self._at("filling")
            prologue = format.pack_record(record).ljust(format.PAGE, b"\0")
            job = pipeline.submit(prepared.layout, prepared.addresses, prepared.keep, medium, prologue=prologue)
            prepared.keep = None  # the job alone keeps the caller's arrays, and only until they are captured
            work = Underway(
                save=save, record=record, prepared=prepared, job=job, pin=bool(every and save.step % every == 0),
                deadline_s=time.monotonic() + self._options.write_timeout_s,
            )  # fmt: skip
            with self._state:
                self._jobs[save.counter] = job
            self._work.put(work)
        except BaseException:
            self._abort(save, record, job)
            raise
        return job

    def _abort(self, save: Save, record: Record, job: Job | None) -> None:
        with self._state:
            self._jobs.pop(save.counter, None)
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

    def _pipeline_for(self, prepared: Prepared, medium: Medium) -> Pipeline:
        """Give the pipeline; the first save makes it, and one of a much larger state makes a larger one."""
        if self._pipeline is not None and prepared.payload_bytes <= self._sized_for:
            return self._pipeline
        o = self._options
        mapped = medium.mapping() is not None  # captured straight into the mapping: the pool is not used
        wanted = sizing.pool_bytes(o.buffer_bytes, prepared.payload_bytes, o.in_flight, o.chunk_bytes)
        wanted = 2 * o.chunk_bytes if mapped else wanted
        if self._pipeline is None or wanted > 2 * self._pool_bytes:
            if self._pipeline is not None:
                self._pipeline.close(o.write_timeout_s)
                self._pipeline, self._pool_bytes = None, 0  # there may be no memory for the next
            name = o.pipeline if mapped or medium.fileno() is not None else "portable"
            self._pipeline = make_pipeline(name, wanted, o.chunk_bytes, o.writers, o.writers_per_checkpoint)
            self._pool_bytes = wanted
            self._stats = replace(self._stats, pipeline=self._pipeline.name)
        self._sized_for = prepared.payload_bytes
        return self._pipeline

    def _commit_all(self) -> None:
        while (work := self._work.get()) is not None:
            try:
                outcome = commit(work, self._store, self._coordinator, self._notifier, self._at)
            except BaseException as error:  # whatever it is, it must reach the caller, and the slot must be freed
                try:
                    take_back(work, error, self._store, self._coordinator, self._notifier)
                except BaseException as second:
                    error.add_note(f"and taking it back failed: {second!r}")
                self.end(work.save, "failed", error, job=work.job, report=True)
            else:
                self.end(work.save, outcome, None, job=work.job, report=True)
            del work

    def end(self, save: Save, outcome: Outcome, error: BaseException | None, *, job: Job | None, report: bool) -> None:
        """Note how an admitted save ended.

        In this order, so that whoever sees the save ended also finds its error, and whoever is let in by its end, or
        sees nothing running, finds its outcome set.
        """
        with self._state:
            stats = self._stats
            self._stats = replace(stats, **{outcome: getattr(stats, outcome) + 1})
            if job is not None:
                done = job.stats()
                self._stats = replace(
                    self._stats, pool_wait_s=stats.pool_wait_s + done.pool_wait_s, retries=stats.retries + done.retries
                )
            if error is not None and report:
                self._errors.append((save.counter, error))
        save.finish(outcome, error)
        with self._state:
            self._running.pop(save.counter, None)
            if job is not None and job.wait_captured(0):
                self._jobs.pop(save.counter, None)
            self._changed.notify_all()

    # -- waiting ----------------------------------------------------------------------------------------------------

    def wait_captured(self, jobs: list[Job] | None, timeout_s: float) -> float:
        """Wait until these jobs (None = all) need no memory of the caller, and give the seconds; DeadlineError."""
        if jobs is None:
            with self._state:
                jobs = list(self._jobs.values())
        began = time.monotonic()
        for job in jobs:
            if not job.wait_captured(max(0.0, began + timeout_s - time.monotonic())):
                raise DeadlineError(f"the capture of a checkpoint; {self!r}", time.monotonic() - began)
        waited = time.monotonic() - began
        with self._state:
            self._jobs = {c: j for c, j in self._jobs.items() if j not in jobs}
            self._stats = replace(self._stats, fence_wait_s=self._stats.fence_wait_s + waited)
        return waited

    def await_copy(self, save: Save, job: Job) -> None:
        """Wait until a state was copied; whatever ends this wait ends the save, for then the state may be changed."""
        try:
            self.wait_captured([job], self._options.write_timeout_s)
        except BaseException:  # Ctrl-C in a notebook, or the deadline
            job.cancel()
            raise
        save.note_captured()  # the committer does it, too, but perhaps not yet

    def drain(self, timeout_s: float | None, *, close: bool = False) -> None:
        """Wait until no save is under way, and with `close` let no other begin; DeadlineError after `timeout_s`."""
        with self._state:
            if not self._changed.wait_for(lambda: not self._running, timeout_s):
                raise DeadlineError(f"{len(self._running)} checkpoint(s) to become durable; {self!r}", timeout_s or 0.0)
            if close:  # in one step: a save that waits for a place must not be let in by the end of the last
                self._closed = True
                self._changed.notify_all()

    def assert_no_callback(self) -> None:
        """Raise UsageError in a callback of a save's future: what waits for that save would wait for itself."""
        if threading.current_thread() in self._committers:
            raise UsageError(
                "a callback of a save's future cannot save, wait, restore or close: it would wait for its own end; "
                "hand that to another thread"
            )

    def take_errors(self, most: int | None = None, *, before: int | None = None) -> list[BaseException]:
        """Give errors that nobody was told of yet (of counters below `before`), oldest first; each is given once."""
        with self._state:
            taken = [e for e in self._errors if before is None or e[0] < before][:most]
            self._errors = [e for e in self._errors if e not in taken]
        return [error for _, error in taken]

    @property
    def stats(self) -> Stats:
        """What was done so far."""
        return self._stats

    def close(self, timeout_s: float | None) -> None:
        """Wait for what is under way, at most `timeout_s` (then DeadlineError), and stop all threads.

        Whatever interrupts the wait has changed nothing: it may be called again.
        """
        self.drain(timeout_s, close=True)
        for _ in self._committers:
            self._work.put(None)
        for thread in self._committers:
            if thread.ident is not None:  # a Ctrl-C may have come before it started
                thread.join(self._options.exit_timeout_s)
        if self._pipeline is not None:
            self._pipeline.close(self._options.exit_timeout_s)

    def __repr__(self) -> str:
        with self._state:
            steps, captures = sorted(s.step for s in self._running.values()), len(self._jobs)
        pool = f", {self._pipeline.free_buffers} of {self._pipeline.buffers} buffers free" if self._pipeline else ""
        return f"{len(steps)} of {self._options.in_flight} in flight {steps}, {captures} capturing{pool}"
