"""What users hold: saves many checkpoints at once, restores the newest that verifies (floor 3: imports below)."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any, Self

from pccheck import arguments
from pccheck.bill.recorder import Recorder
from pccheck.devices import Guard
from pccheck.errors import DeadlineError
from pccheck.events import Event
from pccheck.lifetime import Lifetime, close_beside
from pccheck.options import MIB, OnError, Options, PipelineName, Snapshot, WhenFull
from pccheck.ranks.agreement import Agreement
from pccheck.ranks.coordination import Coordinator, Solo
from pccheck.reading.restoring import Restored
from pccheck.recovery import Wanted, open_store
from pccheck.saving.flight import Flight
from pccheck.saving.notifier import Notifier
from pccheck.saving.save import Link, Save
from pccheck.saving.stats import Stats
from pccheck.state.kinds import kind_of
from pccheck.state.planner import Planner, Prepared
from pccheck.storage.volume import Volume


class Checkpointer:
    """Saves training state to one directory, several checkpoints at once, and restores the newest that verifies.

    All methods are thread-safe. In a forked child every method raises ForkedError. Leaving the `with` block waits for
    what is under way and raises what failed; a Checkpointer that is never closed is drained at interpreter exit, for at
    most `exit_timeout_s` (the one exit hook there is).

    Args:
        directory: the store, made if it is not there; or a `Volume` of your own.
        coordinator: through which several ranks agree; None = this process alone. With several ranks every one of them
            opens, saves, restores and closes, in the same order; the store of each is a folder in `directory`.
        observer: called with each `pccheck.events.Event`, on a thread of its own.
        (all others): see `pccheck.Options`.

    Attributes:
        rank, world: which of the ranks this is, from 0, and how many save together.

    Raises:
        OptionError, UsageError: an option is out of range; or the directory is the root of Orbax steps.
        StoreTaken: another process has this store open for writing.
        RanksError: ranks are missing (RankTimeoutError), lost their store, or do not agree; names them.
        NoValidCheckpointError: what the ranks had committed is lost.
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
        agree_timeout_s: float = 600.0,
        pipeline: PipelineName = "auto",
        replicated: bool | Sequence[str] = False,
        debug_captures: bool = False,
        history: bool = True,
        observer: Callable[[Event], object] | None = None,
        _at: Callable[[str], None] | None = None,
    ) -> None:
        self.options = Options(
            in_flight=in_flight, keep=keep, keep_every=keep_every, buffer_bytes=buffer_bytes, chunk_bytes=chunk_bytes,
            writers=writers, writers_per_checkpoint=writers_per_checkpoint, snapshot=snapshot, when_full=when_full,
            max_block_s=max_block_s, on_error=on_error, write_timeout_s=write_timeout_s, lock_timeout_s=lock_timeout_s,
            exit_timeout_s=exit_timeout_s, agree_timeout_s=agree_timeout_s, pipeline=pipeline, replicated=replicated,
            debug_captures=debug_captures, history=history,
        )  # fmt: skip
        arguments.check_callable(coordinator=(coordinator, "publish"), observer=(observer, "__call__"))
        self._agreement = Agreement(Solo() if coordinator is None else coordinator)
        self.rank, self.world = self._agreement.rank, self._agreement.world
        self._notifier = Notifier(observer)
        self._store, self._recovery = open_store(directory, self.options, self._agreement, self._notifier)
        self._flight = Flight(self.options, self._store, self._agreement, self._notifier, _at or (lambda point: None))
        self._recorder = Recorder(self._store, self.options, self._agreement, self._notifier, self.stats)
        self._planner = Planner(
            kind_of, chunk_bytes, rank=self.rank, world=self.world, replicated=self.options.replicated,
        )  # fmt: skip
        self._saving = threading.RLock()  # one save() or restore() at a time
        self._turns = (threading.Condition(self._saving), *self._store.books.turns)
        self._life = Lifetime(self._store.path, self._drain, self._end, self._flight.unreported.tell, exit_timeout_s)

    @property
    def path(self) -> str:
        """The directory; with several ranks the one that holds the stores of all."""
        return os.path.dirname(self._store.path) if self.world > 1 else self._store.path

    @property
    def agreement(self) -> Agreement:
        """With the other ranks: for what is built on a Checkpointer, and decides for all of them."""
        return self._agreement

    @property
    def counter(self) -> int:
        """The number of the newest save that was asked for, in this run or before; they only grow."""
        return self._store.books.next_counter - 1

    def save(
        self, step: int, state: Any, *, metadata: Mapping[str, Any] | None = None, when_full: WhenFull | None = None,
        link: Link | None = None, report: bool = True,
    ) -> Save:  # fmt: skip
        """Start saving a state and return: at once ("lazy"), or when it was copied ("copy", "device").

        Args:
            step: your label, a 64-bit whole number.
            state: any nesting of dict, list, tuple, namedtuple, dataclass, Python values, arrays and tensors; or an
                object whose method `__pccheck_state__()` gives one.
            metadata: small JSON that `pccheck inspect` shows.
            when_full: overrides the option.
            link: in a store of links (keep=0), where the checkpoint is to live: a free path in a folder of yours, or a
                function that gives one and may wait for that folder; called once the bytes are written.
            report: False = only the Save tells how it ends, and no error of an earlier save is raised here.

        Raises:
            UnsupportedLeafError: a leaf cannot be stored exactly; nothing was changed.
            UsageError: another argument cannot be used, or a signal handler calls amid another call; nothing changed.
            CapacityError, MediumError: the store cannot take this state; older checkpoints are untouched.
            StoreTaken: another process took over the store.
            (any): the first unreported error of an earlier save, after this save was started (on_error="raise").
        """
        self._assert_usable(waits=True)
        step, when_full = arguments.step(step), arguments.when_full(self.options, when_full)
        link = arguments.link(self.options, link)
        with self._saving:
            self._life.assert_usable()  # it may have been closed while this waited for another save
            save = Save(step, self._store.next_counter(), report=report)
            launched = self._flight.launch(save, self._prepare(save, state, metadata), when_full, link)
        if launched is not None:
            self._flight.await_snapshot(save, launched)
        self._notifier(self._flight.tally.returned(save))
        if report:
            self._flight.unreported.tell(before=save.counter)  # how this one ends, what is returned tells its caller
        return save

    def _prepare(self, save: Save, state: Any, metadata: Mapping[str, Any] | None) -> Prepared:
        guard = self._flight.snapshots.guard
        try:
            tree = arguments.tree_of(state)  # first: what differs between ranks is known of the tree just made
            own = arguments.own_paths(state) if self.world > 1 and self.options.replicated else ()  # 0.15 ms for 600
            return self._planner.prepare(tree, step=save.step, metadata=metadata, guard=guard, own=own)
        except BaseException as error:
            self._flight.refuse(save, error)
            raise

    def fence(self, timeout: float | None = None, *, owner: int | None = None) -> float:
        """Wait until no running capture reads the caller's memory, and give the seconds that took.

        In "lazy" mode call it before the state is changed; on a device, what is queued after it comes after the copies.
        It waits at most `timeout` seconds (None = `write_timeout_s`), and only for the leaves of an `owner` if one is
        given, as the guard numbers them. Raises DeadlineError, and with `debug_captures` ChangedError for what was
        changed before this was called (on_error="raise").
        """
        self._life.assert_usable()
        return self._flight.fence(self.options.write_timeout_s if timeout is None else timeout, owner)

    def guarded_by(self, guard: Guard | None, *, debug: bool = False) -> None:
        """Capture the leaves that a guard owns after `save()` has returned, and all others by value; None = no more.

        A guard promises `fence(owner=...)` before leaves change; adapters' `attach` makes one. It turns "copy" into
        "lazy", and lets "auto" pick it. `debug` is as `debug_captures`. Raises UsageError where a guard stands already,
        or for snapshot="device", which reads no leaf after `save()`.
        """
        self._assert_usable()
        arguments.check_callable(guard=(guard, "owners"))
        with self._saving:
            self._flight.snapshots.guarded_by(guard, debug=debug)

    def wait(self, timeout: float | None = None) -> None:
        """Wait until every save is durable or has failed; raise the first unreported error.

        Raises DeadlineError after `timeout` seconds; without it each save has its own deadline, `write_timeout_s`.
        """
        self._assert_usable(waits=True)
        self._flight.drain(timeout)
        self._flight.unreported.tell()

    def raise_errors(self) -> None:
        """Raise the first error of a save that was not reported yet, without waiting; each is raised once."""
        self._life.assert_usable()
        self._flight.unreported.tell()

    def stats(self) -> Stats:
        """Give what was done so far."""
        return self._flight.stats

    def subscribe(self, observer: Callable[[Event], object]) -> None:
        """Call one more observer with each event from now on."""
        self._notifier.add(arguments.observer(observer))

    def unsubscribe(self, observer: Callable[[Event], object]) -> None:
        """Undo `subscribe`; an event that was on its way may still come."""
        self._notifier.remove(observer)

    def tell(self, event: Event) -> None:
        """Tell the observers of an event of your own, after all that came before it."""
        self._notifier(arguments.event(event))

    def restore(
        self, step: int | None = None, *, like: Any = None, fallback: bool = True, partial: bool = False,
        branch: bool = True,
    ) -> Restored | None:  # fmt: skip
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
        wanted = Wanted(step=step, like=like, fallback=fallback, partial=partial, branch=branch)
        with self._saving:
            self._life.assert_usable()
            self._flight.drain(None)
            return self._recovery.restore(wanted)

    def steps(self) -> list[int]:
        """Give the steps of the checkpoints that are held, kept and pinned, sorted; not those on abandoned branches.

        `restore` may find more: what was let go is still whole until its slot is used again.
        """
        self._life.assert_usable()
        return sorted(set(self._store.steps()))

    def latest(self) -> int | None:
        """Give the step of the newest durable checkpoint, None if there is none."""
        self._life.assert_usable()
        return next(iter(self._store.steps()), None)

    def pin(self, step: int) -> None:
        """Keep the newest durable checkpoint of a step until `unpin` (call it on all ranks); StepNotFoundError."""
        self._assert_usable()
        self._store.history.pin(arguments.step(step))

    def unpin(self, step: int) -> None:
        """Undo `pin` or `keep_every` for a step; raises StepNotFoundError if none is pinned."""
        self._assert_usable()
        self._store.history.unpin(arguments.step(step))

    def delete(self, step: int) -> None:
        """Remove every durable checkpoint of a step, pinned ones too (call it on all ranks); StepNotFoundError."""
        self._assert_usable()
        self._store.history.delete(arguments.step(step))

    def recycle(self, path: str | os.PathLike[str]) -> bool:
        """In a store of links (keep=0), make a free slot of a file that nobody wants any more; tell whether it was.

        False = it was not taken: others may have it (by another name, open or mapped), it is no link of this store or
        of another size, or there are slots enough. Its place is durable: else a crash brings an older name back.
        """
        self._assert_usable()
        return self._store.recycle(arguments.recycled(self.options, path))

    def close(self) -> None:
        """Wait for what is under way, close the store, and raise the first unreported error. Idempotent."""
        self._life.assert_own()
        arguments.assert_outermost(*self._turns)
        self._flight.assert_no_callback()
        self._life.close(None)
        self._flight.unreported.tell_last()

    def _drain(self, timeout_s: float | None) -> None:
        self._flight.close(timeout_s)
        if not self._saving.acquire(timeout=self.options.exit_timeout_s):  # a save or restore is on its way out
            raise DeadlineError(f"a call under way in another thread; {self!r}", self.options.exit_timeout_s)
        try:
            self._agreement.close(self.options.exit_timeout_s)
            self._recorder.end()  # here, not in _end: what interrupts it is called again, else the run counts as failed
        except BaseException:  # Ctrl-C
            self._saving.release()
            raise

    def _end(self) -> None:
        with ExitStack() as each:  # the last one first, whatever one of them raises
            for end in (self._notifier.close, self._saving.release, self._store.close):
                each.callback(end)

    def _assert_usable(self, *, waits: bool = False) -> None:
        self._life.assert_usable()
        arguments.assert_outermost(*self._turns)
        if waits:
            self._flight.assert_no_callback()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        close_beside(error, self.close, "the Checkpointer")

    def __repr__(self) -> str:
        return f"<Checkpointer {self._store.path}: {repr(self._flight) if self._life.is_open else self._life}>"
