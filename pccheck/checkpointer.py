"""What users hold: saves many checkpoints at once, restores the newest that verifies (floor 3: imports below)."""

from __future__ import annotations

import atexit
import os
import threading
import warnings
from collections.abc import Callable, Mapping
from dataclasses import replace
from types import TracebackType
from typing import Any, Self

from pccheck import arguments, format
from pccheck.errors import ClosedError, DeadlineError, ForkedError, UsageError
from pccheck.events import Event
from pccheck.options import MIB, OnError, Options, PipelineName, Snapshot, WhenFull
from pccheck.reading import reader
from pccheck.reading.listing import list_store
from pccheck.reading.restoring import Restored, assemble, fitting, load_newest
from pccheck.saving.flight import Flight, Stats
from pccheck.saving.notifier import Notifier
from pccheck.saving.save import Save
from pccheck.state.kinds import kind_of
from pccheck.state.planner import Planner
from pccheck.storage.volume import Volume
from pccheck.store.coordination import Coordinator, Solo
from pccheck.store.store import Store


class Checkpointer:
    """Saves training state to one directory, several checkpoints at once, and restores the newest that verifies.

    All methods are thread-safe. In a forked child every method raises ForkedError. Leaving the `with` block waits for
    what is under way and raises what failed; a Checkpointer that is never closed is drained at interpreter exit, for at
    most `exit_timeout_s` (the one exit hook there is).

    Args:
        directory: the store, made if it is not there; or a `Volume` of your own.
        coordinator: how several ranks agree; None = this process alone.
        observer: called with each `pccheck.events.Event`, on a thread of its own.
        (all others): see `pccheck.Options`.

    Raises:
        OptionError: an option is out of range.
        StoreTaken: another process has this store open for writing.
        MediumError, CapacityError: the directory cannot be used.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str] | Volume,
        *,
        in_flight: int = 2,
        keep: int = 1,
        keep_every: int | None = None,
        buffer_bytes: int | None = None,
        chunk_bytes: int = 16 * MIB,
        writers: int = 2,
        writers_per_checkpoint: int | None = None,
        snapshot: Snapshot = "copy",
        when_full: WhenFull = "block",
        max_block_s: float | None = None,
        on_error: OnError = "raise",
        coordinator: Coordinator | None = None,
        write_timeout_s: float = 3600.0,
        lock_timeout_s: float = 10.0,
        exit_timeout_s: float = 60.0,
        pipeline: PipelineName = "auto",
        observer: Callable[[Event], object] | None = None,
        _at: Callable[[str], None] | None = None,
    ) -> None:
        self.options = Options(
            in_flight=in_flight, keep=keep, keep_every=keep_every, buffer_bytes=buffer_bytes, chunk_bytes=chunk_bytes,
            writers=writers, writers_per_checkpoint=writers_per_checkpoint, snapshot=snapshot, when_full=when_full,
            max_block_s=max_block_s, on_error=on_error, write_timeout_s=write_timeout_s, lock_timeout_s=lock_timeout_s,
            exit_timeout_s=exit_timeout_s, pipeline=pipeline,
        )  # fmt: skip
        self._coordinator: Coordinator = Solo() if coordinator is None else coordinator
        arguments.check_callable(coordinator=(self._coordinator, "agree"), observer=(observer, "__call__"))
        volume = arguments.volume(directory)
        self._notifier = Notifier(observer)
        self._store = Store(
            volume, in_flight=in_flight, keep=keep, coordinator=self._coordinator, lock_timeout_s=lock_timeout_s,
            verify=reader.assert_whole, notify=self._notifier,
        )  # fmt: skip
        self._volume = volume
        self._flight = Flight(self.options, self._store, self._coordinator, self._notifier, _at or (lambda point: None))
        self._planner = Planner(kind_of, chunk_bytes)
        self._saving = threading.RLock()  # one save() or restore() at a time
        self._closing = threading.Lock()
        self._closed = False
        self._pid = os.getpid()
        atexit.register(self._drain_at_exit)

    # -- saving -----------------------------------------------------------------------------------------------------

    def save(
        self,
        step: int,
        state: Any,
        *,
        metadata: Mapping[str, Any] | None = None,
        when_full: WhenFull | None = None,
        link: str | None = None,
    ) -> Save:
        """Start saving a state and return: at once ("lazy"), or when it was copied ("copy").

        Args:
            step: your label, a 64-bit whole number.
            state: any nesting of dict, list, tuple, namedtuple, dataclass, Python values, arrays and tensors.
            metadata: small JSON that `pccheck inspect` shows.
            when_full: overrides the option for this save.
            link: for stores of links only, which this release cannot open; must be None.

        Raises:
            UnsupportedLeafError: a leaf cannot be stored exactly; nothing was changed.
            UsageError: another argument cannot be used; nothing was changed.
            CapacityError, MediumError: the store cannot take this state; older checkpoints are untouched.
            StoreTaken: another process took over the store.
            (any): the first unreported error of an earlier save, after this save was started (on_error="raise").
        """
        self._assert_usable(waits=True)
        step, when_full = arguments.step(step), self._validated(when_full, link)
        with self._saving:
            self._assert_usable()  # it may have been closed while this waited for another save
            save = Save(step, self._store.next_counter())
            prepared = self._planner.prepare(state, step=step, metadata=metadata)
            job = self._flight.launch(save, prepared, when_full)
            if job is None:
                return save
        if self.options.snapshot == "copy" and not prepared.stable:
            self._flight.await_copy(save, job)
        self._report(before=save.counter)  # how this one ends, its caller learns from what is returned
        return save

    def _validated(self, when_full: WhenFull | None, link: str | None) -> WhenFull:
        if link is not None:
            raise UsageError("link= needs a store of links (keep=0), which this release does not open; leave it out")
        if when_full is None:
            return self.options.when_full
        return replace(self.options, when_full=when_full).when_full

    # -- waiting ----------------------------------------------------------------------------------------------------

    def fence(self, timeout: float | None = None) -> float:
        """Wait until no running capture reads the caller's memory, and give the seconds that took.

        In "lazy" mode call it before the state is changed. Raises DeadlineError after `timeout` seconds.
        """
        self._assert_usable()
        return self._flight.wait_captured(None, self.options.write_timeout_s if timeout is None else timeout)

    def wait(self, timeout: float | None = None) -> None:
        """Wait until every save is durable or has failed; raise the first unreported error.

        Raises DeadlineError after `timeout` seconds; without it each save has its own deadline, `write_timeout_s`.
        """
        self._assert_usable(waits=True)
        self._flight.drain(timeout)
        self._report()

    def raise_errors(self) -> None:
        """Raise the first error of a save that was not reported yet, without waiting; each is raised once."""
        self._assert_usable()
        self._report()

    def _report(self, *, before: int | None = None) -> None:
        if self.options.on_error == "raise":
            for error in self._flight.take_errors(1, before=before):
                raise error
        for error in self._flight.take_errors(before=before):
            warnings.warn(f"a save failed: {error}", RuntimeWarning, stacklevel=3)

    def stats(self) -> Stats:
        """Give what was done so far."""
        return self._flight.stats

    # -- restoring and the history ----------------------------------------------------------------------------------

    def restore(
        self,
        step: int | None = None,
        *,
        like: Any = None,
        fallback: bool = True,
        partial: bool = False,
        branch: bool = True,
    ) -> Restored | None:
        """Give the newest checkpoint that verifies, or the one of `step`; None where no checkpoint is.

        Args:
            step: None = the newest. A step older than the newest starts a branch: newer checkpoints are abandoned.
            like: a tree of arrays or abstract arrays whose structure, kinds, dtypes and devices come back.
            fallback: pass over checkpoints that do not verify, and say so in `skipped`; False = raise.
            partial: with `like`, restore what fits and give the mismatches, instead of raising them.
            branch: False = only look: nothing is abandoned, and later saves do not count as following from it.

        Raises:
            NoValidCheckpointError: checkpoints are there but none verifies.
            StepNotFoundError: no checkpoint of `step` is there.
            MismatchError: it does not fit `like`; nothing was changed.
            DamagedError, MediumError: it does not verify, and `fallback` is off or `step` was given.
        """
        self._assert_usable(waits=True)
        step = None if step is None else arguments.step(step)
        with self._saving:
            self._assert_usable()
            self._flight.drain(None)
            loaded = load_newest(
                lambda: list_store(self._volume), lambda name: self._volume.open(name),
                where=self._store.path, step=step, fallback=fallback, accept=fitting(like, partial=partial),
            )  # fmt: skip
            if loaded is None:
                return None
            restored = assemble(loaded, kind_of, like=like, partial=partial)
            if branch:
                self._store.history.restored(
                    loaded.record,
                    in_slot=format.parse_slot_name(loaded.name) is not None,
                    damaged=frozenset(s.counter for s in loaded.skipped if s.counter is not None),
                    branch=step is not None,
                )
                self._store.release()
            return restored

    def steps(self) -> list[int]:
        """Give the steps of the checkpoints that are held, kept and pinned, sorted; not those on abandoned branches.

        `restore` may find more: what was let go is still whole until its slot is used again.
        """
        self._assert_usable()
        return sorted({r.step for r in self._store.books.durable()})

    def latest(self) -> int | None:
        """Give the step of the newest durable checkpoint, None if there is none."""
        self._assert_usable()
        return next((r.step for r in self._store.books.durable()), None)

    def pin(self, step: int) -> None:
        """Keep the newest durable checkpoint of a step until `unpin`; raises StepNotFoundError."""
        self._assert_usable()
        self._store.history.pin(arguments.step(step))

    def unpin(self, step: int) -> None:
        """Undo `pin` or `keep_every` for a step; raises StepNotFoundError if none is pinned."""
        self._assert_usable()
        self._store.history.unpin(arguments.step(step))

    def delete(self, step: int) -> None:
        """Remove every durable checkpoint of a step, pinned ones included; raises StepNotFoundError."""
        self._assert_usable()
        self._store.history.delete(arguments.step(step))

    # -- the end ----------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Wait for what is under way, close the store, and raise the first unreported error. Idempotent."""
        if self._pid != os.getpid():
            raise ForkedError(f"{self._store.path} belongs to process {self._pid}")
        self._close(None)
        try:
            self._report()
        except Exception as error:  # nobody asks again: what else failed goes with it
            for other in self._flight.take_errors():
                error.add_note(f"and another save failed: {other}")
            raise

    def _close(self, timeout_s: float | None) -> None:
        self._flight.assert_no_callback()
        with self._closing:
            if self._closed:
                return
            self._closed = True
            try:
                self._flight.close(timeout_s)
                if not self._saving.acquire(timeout=self.options.exit_timeout_s):  # a save or restore is on its way out
                    raise DeadlineError(f"a call under way in another thread; {self!r}", self.options.exit_timeout_s)
            except BaseException:
                self._closed = False  # Ctrl-C in a notebook, or the deadline: close() can be called again
                raise
            try:
                self._store.close()
            finally:
                self._saving.release()
                self._notifier.close()
                atexit.unregister(self._drain_at_exit)

    def _drain_at_exit(self) -> None:
        if self._pid == os.getpid():  # a forked child that ends normally must not wait for its parent's saves
            self._close(self.options.exit_timeout_s)
            self._report()

    def _assert_usable(self, *, waits: bool = False) -> None:
        if self._pid != os.getpid():
            raise ForkedError(f"{self._store.path} belongs to process {self._pid}; open another store in this child")
        if self._closed:
            raise ClosedError(f"the Checkpointer of {self._store.path} is closed; open a new one")
        if waits:
            self._flight.assert_no_callback()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
            return
        try:
            self.close()
        except Exception as second:  # the exception under way is the one to see
            error.add_note(f"and closing the Checkpointer raised {second!r}")

    def __repr__(self) -> str:
        state = "closed" if self._closed else repr(self._flight) if self._pid == os.getpid() else f"of pid {self._pid}"
        return f"<Checkpointer {self._store.path}: {state}>"
