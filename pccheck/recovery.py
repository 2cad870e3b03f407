"""Restoring: alone from one store, or all ranks together from the stores of all (floor 3: imports below)."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, final

import msgspec

from pccheck import arguments, events, format
from pccheck.errors import (
    ContentError,
    MediumError,
    NoValidCheckpointError,
    PccheckError,
    RanksError,
    StoreTaken,
    UsageError,
)
from pccheck.events import Event
from pccheck.options import Options
from pccheck.ranks.agreement import Agreement
from pccheck.ranks.worlds import FLAT, Sealed, Seen, restorable, within
from pccheck.reading import reader
from pccheck.reading.listing import list_store
from pccheck.reading.loading import LoadedWorld, load_world
from pccheck.reading.restoring import Restored, Skipped, assemble, fitting, load_newest, of_step
from pccheck.reading.world import WorldIdentity
from pccheck.state.kinds import kind_of
from pccheck.storage.volume import Volume
from pccheck.store.neighbours import Neighbours, holding, rank_folder
from pccheck.store.store import Store

JOIN_S = 5.0  # how long a rank that cannot open its store waits to tell the others why


def open_store(
    directory: str | os.PathLike[str] | Volume, options: Options, agreement: Agreement, notify: Callable[[Event], None]
) -> tuple[Store, Recovery]:
    """Open this rank's store under a job's root, together with all other ranks; raises as `Checkpointer`."""
    here: str | os.PathLike[str] | Volume | None = None
    if not options.keep and agreement.world > 1:
        agreement.close(0.0)
        raise UsageError("a store of links (keep=0) is one process's own: leave coordinator= out")
    try:
        root = None if agreement.world == 1 and hasattr(directory, "check_page") else arguments.path(directory)
        if root is not None:
            arguments.assert_no_orbax_root(root)
        here = directory if root is None else rank_folder(root, agreement.rank, agreement.world)
        neighbours = Neighbours(root, agreement.rank, agreement.world)
        volume = arguments.volume(here)
        store = Store(
            volume, in_flight=options.in_flight, keep=options.keep, agreement=agreement, neighbours=neighbours,
            lock_timeout_s=options.lock_timeout_s, agree_timeout_s=options.agree_timeout_s,
            verify=reader.assert_whole, notify=notify,
        )  # fmt: skip
    except BaseException as error:
        # What all ranks decide, or wait for, together, they also meet together.
        if isinstance(error, StoreTaken) and error.path == here:
            # Who has this rank's store has its place among the ranks, too: to say anything there would end that job.
            agreement.close(0.0)
        else:
            reason = f"it could not open its store: {error}"[:2000]
            agreement.give_up(reason, 0.0 if isinstance(error, RanksError) else JOIN_S)
        raise
    return store, Recovery(volume, store, neighbours, agreement, notify, timeout_s=options.agree_timeout_s)


class _Word(msgspec.Struct, frozen=True):
    """What a rank says of one candidate: "" = it has it whole, else why not; `fatal` = the next one will not do."""

    problem: str = ""
    fatal: bool = False


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """The arguments of `Checkpointer.restore`."""

    step: int | None
    like: Any = field(repr=False)
    fallback: bool
    partial: bool
    branch: bool


@final
class Recovery:
    """Restores for one Checkpointer. Not thread-safe: one restore at a time, and no save beside it.

    Args:
        volume: this rank's store.
        store: the same, open for writing.
        neighbours: the stores beside it.
        agreement: with the other ranks.
        notify: hears of `Restored`.
        timeout_s: how long to wait for other ranks at each step.
    """

    def __init__(
        self, volume: Volume, store: Store, neighbours: Neighbours, agreement: Agreement,
        notify: Callable[[Event], None], *, timeout_s: float,
    ) -> None:  # fmt: skip
        self._volume, self._store, self._neighbours = volume, store, neighbours
        self._agreement, self._notify, self._timeout_s = agreement, notify, timeout_s

    def restore(self, wanted: Wanted) -> Restored | None:
        """Give what was asked for; every rank gives the same checkpoint, or none does.

        Raises as `Checkpointer.restore`.
        """
        self._store.history.assert_here()
        began_s = time.monotonic()
        alone = self._agreement.world == 1 and not self._neighbours.stores()
        restored = self._alone(wanted) if alone else self._together(wanted)
        if restored is not None and wanted.branch:
            seconds = time.monotonic() - began_s
            self._notify(events.Restored(step=restored.step, counter=restored.counter, seconds=seconds))
        return restored

    def _alone(self, wanted: Wanted) -> Restored | None:
        loaded = load_newest(
            lambda: list_store(self._volume), lambda name: self._volume.open(name), where=self._store.path,
            step=wanted.step, fallback=wanted.fallback, accept=fitting(wanted.like, partial=wanted.partial),
        )  # fmt: skip
        if loaded is None:
            return None
        restored = assemble(loaded, kind_of, like=wanted.like, partial=wanted.partial)
        if wanted.branch:
            self._store.history.restored(
                loaded.record,
                in_slot=format.parse_slot_name(loaded.name) is not None,
                damaged=_counters(loaded.skipped),
                branch=wanted.step is not None,
                whole=loaded.whole,
            )
            self._store.release()
        return restored

    # -- all ranks together -------------------------------------------------------------------------------------------

    def _together(self, wanted: Wanted) -> Restored | None:
        """Try the candidates, newest first, until one is whole on every rank."""
        # From here on no rank saves, and all have reported what they saved.
        steps = [msgspec.json.decode(one) for one in self._exchange("restore", wanted.step)]
        if len(set(steps)) > 1:
            told = ", ".join(f"{one} on rank {rank}" for rank, one in enumerate(steps[:16]))
            raise RanksError(f"all ranks must restore the same step; asked for is {told}", range(len(steps)))
        with self._agreement.on_its_own():
            self._store.settling.settle_late()
            mine = self._seen()
        seen = [msgspec.json.decode(one, type=Seen) for one in self._exchange("holdings", mine)]
        held, abandoned = restorable(seen)
        # The most wanted first; every rank gets the same.
        candidates = of_step(
            held, wanted.step, self._where, step_of=lambda s: s.step, abandoned=lambda s: within(s.counter, abandoned)
        )
        skipped = self._lost_before() if wanted.step is None else []
        if skipped and not wanted.fallback:
            raise NoValidCheckpointError(self._where, skipped)
        for sealed in candidates:
            loaded, error = self._load(sealed, wanted)
            if error is None:
                assert loaded is not None, "it is one or the other"
                restored = replace(loaded.restored, skipped=(*skipped, *loaded.restored.skipped))
                return self._went_on(restored, loaded, held, wanted)
            if not wanted.fallback or wanted.step is not None:
                raise error
            name = f"counter {sealed.counter} of {sealed.world} rank(s)"
            skipped.append(Skipped(sealed.counter, sealed.step, name, str(error)))
        left = [s for s in held if within(s.counter, abandoned)]
        skipped += [
            Skipped(s.counter, s.step, f"counter {s.counter}", "on a branch that a roll-back abandoned; ask by step")
            for s in left
        ]
        if skipped:
            raise NoValidCheckpointError(self._where, skipped)
        return None

    @property
    def _where(self) -> str:
        return self._neighbours.root or self._store.path

    def _seen(self) -> Seen:
        rank = FLAT if self._agreement.world == 1 else self._agreement.rank
        return Seen(own=holding(list_store(self._volume), rank), others=self._neighbours.look())

    def _exchange(self, topic: str, what: object) -> list[bytes]:
        return self._agreement.exchange(topic, msgspec.json.encode(what), self._timeout_s)

    def _lost_before(self) -> list[Skipped]:
        opening = self._store.opening
        if not opening.lost or self._store.books.base:
            return []
        return [Skipped(opening.lost, None, f"counter {opening.lost}", opening.lost_reason)]

    def _load(self, sealed: Sealed, wanted: Wanted) -> tuple[LoadedWorld | None, PccheckError | None]:
        """Load this rank's part of a checkpoint; None and the error where it is not whole on every rank."""
        loaded: LoadedWorld | None = None
        error: PccheckError | None = None
        try:
            loaded = load_world(
                self._where, WorldIdentity(*sealed), self._agreement.rank % sealed.world, like=wanted.like,
                partial=wanted.partial,
            )  # fmt: skip
        except PccheckError as caught:
            error = caught
        except BaseException as caught:
            word = _Word(problem=f"{type(caught).__name__}: {caught}"[:2000], fatal=True)
            self._agreement.say(f"counter {sealed.counter}", msgspec.json.encode(word))
            raise
        word = (
            _Word() if error is None else _Word(str(error)[:2000], not isinstance(error, (ContentError, MediumError)))
        )
        said = [msgspec.json.decode(one, type=_Word) for one in self._exchange(f"counter {sealed.counter}", word)]
        failed = [rank for rank, one in enumerate(said) if one.problem]
        if not failed:
            return loaded, None
        if error is None:
            first = failed[0]
            error = RanksError(f"step {sealed.step} is not whole on rank {first}: {said[first].problem}", failed)
        if any(one.fatal for one in said):  # an argument that does not fit, on some rank: older ones fit no better
            raise error
        return None, error

    def _went_on(
        self, restored: Restored, loaded: LoadedWorld, held: Sequence[Sealed], wanted: Wanted
    ) -> Restored:  # fmt: skip
        """Note on every rank that the job goes on from here; no rank saves before all have noted it."""
        with self._agreement.on_its_own():
            if wanted.branch:
                own = loaded.store == self._store.path
                self._store.history.restored(
                    loaded.record, in_slot=own and format.parse_slot_name(loaded.name) is not None,
                    damaged=_counters(restored.skipped), branch=wanted.step is not None, whole=loaded.whole,
                    newer_elsewhere=any(s.counter > loaded.record.counter for s in held),
                )  # fmt: skip
                self._store.release()
        self._exchange("restored", loaded.record.counter)
        return restored


def _counters(skipped: Sequence[Skipped]) -> frozenset[int]:
    return frozenset(s.counter for s in skipped if s.counter is not None)
