"""The stores beside this one under a job's root, which a job of another size left (floor 2: imports below, listing).

A job of several ranks has a store for each, in `rank-00000`, `rank-00001`, ...; a job of one rank has the root itself.
What another number of ranks left stays until the new ranks have agreed on a checkpoint of their own. Until then rank 0
holds the locks of these stores: nobody else of the old job may go on writing, and its incarnation there fences out who
does so where locks do not work.
"""

from __future__ import annotations

import os
import warnings
from typing import final

from pccheck import format
from pccheck.bill import runs
from pccheck.bill.history import look
from pccheck.errors import ContentError, MediumError, PccheckError
from pccheck.holders import describe_self
from pccheck.ranks.worlds import FLAT, Holding, Sealed
from pccheck.reading.listing import Listing, list_store, read_check
from pccheck.reading.places import rank_stores
from pccheck.storage.directory import Directory
from pccheck.storage.volume import CheckPage
from pccheck.storage.whole import remove_empty
from pccheck.store.check import believed
from pccheck.store.locking import fence_out, take_lock


def rank_folder(root: str, rank: int, world: int) -> str:
    """Give the folder of a rank's store."""
    return root if world == 1 else os.path.join(root, f"rank-{rank:05d}")


@final
class Neighbours:
    """All stores under one root but this rank's own. Not thread-safe, but for `clear`.

    Args:
        root: the job's folder; None = a volume of the caller's own, which has nothing beside it.
        rank: of this process.
        world: number of ranks.
    """

    def __init__(self, root: str | None, rank: int, world: int) -> None:
        self.root, self._rank, self._world = root, rank, world
        self._taken: dict[int, tuple[Directory, CheckPage]] = {}  # what this rank holds the lock of

    def stores(self) -> dict[int, str]:
        """Give rank (FLAT = the root itself) and folder of each store, but this rank's own."""
        if self.root is None or not os.path.isdir(self.root):
            return {}
        own = rank_folder(self.root, self._rank, self._world)
        found = {(FLAT if path == self.root else rank): path for rank, path in rank_stores(self.root)}
        return {rank: path for rank, path in found.items() if path != own}

    def _is_of_this_job(self, rank: int) -> bool:
        return self._world > 1 and 0 <= rank < self._world

    def take(self, timeout_s: float) -> None:
        """On rank 0, lock every store that is no rank's of this job; raises StoreTaken where another process has it."""
        if self._rank != 0:
            return
        for rank, path in self.stores().items():
            if rank in self._taken or self._is_of_this_job(rank):
                continue
            volume = Directory(path, create=False, write=True)
            try:
                check = volume.check_page(create=True)
                self._taken[rank] = volume, check
                take_lock(volume, check, timeout_s)
                fence_out(check)
            except BaseException:
                self.close()
                volume.close()
                raise

    def look(self) -> tuple[Holding, ...]:
        """Tell what the other stores hold, as far as they can be seen; of this world's ranks, who tell it themselves,
        only what their CHECK says.

        Else each of W ranks would read the records of all, and tell them to all: 1.8 GB at each look at what 256 ranks
        tell that keep 1,000 steps.
        """
        found = []
        for rank, path in self.stores().items():
            try:
                volume = Directory(path, create=False, write=False)
                try:
                    told = self._is_of_this_job(rank)
                    listing = Listing(check=read_check(volume), files=()) if told else list_store(volume)
                    found.append(holding(listing, rank))
                finally:
                    volume.close()
            except (ContentError, MediumError) as error:
                warnings.warn(f"{path} cannot be read and counts as not there: {error}", RuntimeWarning, stacklevel=2)
        return tuple(found)

    def fence(self, incarnation: int) -> None:
        """Make this process the writer of the stores whose locks it holds: whoever had them before has lost them."""
        for _, check in self._taken.values():
            check.store(format.INCARNATION_OFFSET, incarnation)
            check.write(format.HOLDER_OFFSET, format.pack_holder(describe_self()))
            check.sync()

    def clear(self) -> None:
        """Remove what another number of ranks left, now that this one has agreed; pinned checkpoints stay.

        What fails is warned about and stays for the next life of the job: it is older than what was agreed.
        """
        while (one := self._pop()) is not None:
            rank, (volume, check) = one
            try:
                _clear(volume, check, alone=rank == FLAT)
            except PccheckError as error:
                warnings.warn(f"{volume.path} is not needed any more and could not be cleared: {error}", RuntimeWarning,
                              stacklevel=2)  # fmt: skip
            self._release(volume, check)
            if rank != FLAT:
                remove_empty(volume.path)  # pinned checkpoints may be in it, or anything that is not ours

    def close(self) -> None:
        """Give the locks back."""
        while (one := self._pop()) is not None:
            self._release(*one[1])

    def _pop(self) -> tuple[int, tuple[Directory, CheckPage]] | None:
        try:
            return self._taken.popitem()
        except KeyError:  # empty, perhaps by now: saves that were agreed at the same time both clear
            return None

    def _release(self, volume: Directory, check: CheckPage) -> None:
        check.close()
        volume.close()


def _clear(volume: Directory, check: CheckPage, *, alone: bool) -> None:
    """Remove slots and CHECK; the words first, durably: one that names a slot that is gone looks like damage.

    The history of a rank goes with its store; that of a process alone stays, and tells of the job before.
    """
    for offset in (format.CHECK_ADDR_OFFSET, format.PEER_ADDR_OFFSET):
        check.store(offset, format.NO_WORD)
    check.write(format.HOLDER_OFFSET, bytes(format.SECTOR))
    check.sync()
    for name in volume.names():
        if format.parse_slot_name(name) is not None:
            volume.remove(name)
    volume.sync_names()
    if not volume.names(format.KEPT_FOLDER):
        volume.remove(format.CHECK_NAME)
        volume.sync_names()
        remove_empty(os.path.join(volume.path, format.KEPT_FOLDER))
        if not alone and look(volume).ours:
            volume.remove(runs.FILE_NAME)


def holding(listing: Listing, rank: int) -> Holding:
    """Tell what a store holds, as a reader without its lock finds it."""
    check, flat = listing.check, rank == FLAT
    records = {f.record.identity: f.record for f in listing.files if f.sealed and f.record is not None}
    mine = [r for r in records.values() if flat or (r.rank == rank and r.world > 1)]
    assert check is not None, "a folder was listed, not a file"
    every = [f.record for f in listing.files if f.record is not None]
    last = max(check.last_counter, format.word_counter(check.word))
    return Holding(
        rank=rank, store_id=check.store_id.hex() if check.store_id else "",
        sealed=tuple(Sealed(*r.identity, 1 if flat else r.world) for r in mine), abandoned=check.abandoned.ranges,
        incarnation=max([believed(check.incarnation), *(r.incarnation for r in every)]),
        counter=max([believed(last), *(r.counter for r in every)]), agreed=format.word_counter(check.peer_word),
    )  # fmt: skip
