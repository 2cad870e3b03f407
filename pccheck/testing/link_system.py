"""A store of links as a System for the crash explorer (beside the floors: imports checkpointer, listing and below).

Each step is linked into a folder of its own, `out-<step>`, on the same simulated disk. What counts is what lies there:
restoring reads the folders alone, as whoever copied one of them would, after the real code has opened the store.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, final

from pccheck import format
from pccheck.reading.listing import Listing, SlotFile, list_file, list_store
from pccheck.reading.restoring import Restored, assemble, load_newest
from pccheck.saving.save import Save
from pccheck.storage.names import HALF
from pccheck.testing.checkpointer_system import CheckpointerSystem, damage_in
from pccheck.testing.disk import SyncInfo, folder_of
from pccheck.testing.simulated import SimulatedVolume
from pccheck.testing.system import System

OUT, GONE = "out-", "gone-"


def place_of(step: int) -> str:
    """Give the path that a step is linked to."""
    return f"{OUT}{step}/rank-00000.pcc"


@final
class LinkSystem(System):
    """Checkpointers with keep=0, and the folders that they link into.

    Args:
        links: whether files can have names outside of the store; else they are copied.
        options: keyword arguments of Checkpointer, as in CheckpointerSystem.
    """

    def __init__(self, *, links: bool = True, **options: Any) -> None:
        self.inner, self.links = CheckpointerSystem(keep=0, **options), links

    @contextmanager
    def open(self, volume: SimulatedVolume) -> Iterator[LinkSaver]:
        """Open a Checkpointer on the simulated volume."""
        volume.links = self.links
        with self.inner.open(volume) as checkpointer:
            yield LinkSaver(checkpointer, volume)

    def audit(self, volume: SimulatedVolume) -> list[str]:
        """Hold all that calls itself sealed, linked or not, against its digests (I2); no word names a slot (I3)."""
        listing = list_store(volume)
        assert listing.check is not None
        faults = [f"I2: CHECK is damaged: {listing.check.problem}"] if listing.check.damaged else []
        files = (*listing.files, *linked(volume))
        faults += [f"I2: {file.name}: {file.problem}" for file in files if file.problem is not None]
        for file in files:
            reason = damage_in(volume, file) if file.whole else ""
            faults += [f"I2: {file.name} is sealed, but {reason}"] if reason else []
        places = [(f, f.record) for f in linked(volume)]
        faults += [f"I2: {f.name} holds {r and r.step}" for f, r in places if r is None or f.name != place_of(r.step)]
        if (listing.check.word, listing.check.peer_word) != (format.NO_WORD, format.NO_WORD):
            faults.append("I3: a word of a store of links names a checkpoint")
        return faults

    def extents(self, name: str, head: bytes, size: int) -> Sequence[tuple[int, int]]:
        """As of a store that keeps checkpoints; a copy that is being made is not looked at."""
        return () if name.endswith(HALF) else self.inner.extents(name, head, size)

    def identity(self, name: str, head: bytes) -> bytes:
        """As of a store that keeps checkpoints; a copy that is being made is not looked at."""
        return b"" if name.endswith(HALF) else self.inner.identity(name, head)

    def classify(self, info: SyncInfo) -> str:
        """Name a sync as of a store that keeps checkpoints; "link" is that of a folder, "copy" that of a copied file.

        "finish" is the sync of a folder by whoever goes on from it, "gone" those of the folders that a step was renamed
        from and to, "emptied" that of a file that becomes a slot again.
        """
        if info.kind == "file" and info.name.startswith("."):
            return "emptied"
        if info.kind == "names" and info.point == "gone":
            return "gone"
        if info.name.startswith(OUT):
            return "copy" if info.kind == "file" else "link" if info.point else "finish"
        return self.inner.classify(info)


@final
class LinkSaver:
    """A Checkpointer that is given a place for every step, and restores what lies in those places."""

    def __init__(self, checkpointer: Any, volume: SimulatedVolume) -> None:
        self._checkpointer, self._volume = checkpointer, volume

    def save(self, step: int, state: Any) -> Save:
        """Save and link into the step's folder; what a crash left there is removed first."""
        before = max((f.record.counter for f in linked(self._volume) if f.record is not None), default=0)
        self._volume.remove(place_of(step))
        save: Save = self._checkpointer.save(step, state, link=place_of(step))
        assert save.counter > before, f"counter {save.counter} was used before: counter {before} is linked"
        return save

    def restore(self, step: int | None = None, *, branch: bool = True) -> Restored | None:
        """Give the newest checkpoint of all places, or the one of a step.

        Its folder is synced before anybody goes on from it, as `links.finish` does: of a save that a crash cut short
        between its link and that sync, the name may be in the page cache only.
        """
        loaded = load_newest(self._look, self._volume.open, where=self._volume.path, step=step, threads=1)
        if loaded is not None:
            self._volume.sync_out(place_of(loaded.record.step))
        return None if loaded is None else assemble(loaded)

    def steps(self) -> list[int]:
        """Give the steps that lie in their places."""
        return [f.record.step for f in linked(self._volume) if f.sealed and f.record is not None]

    def delete(self, step: int) -> None:
        """Remove a step's file, as anyone may."""
        self._volume.remove(place_of(step))

    def recycle(self, step: int) -> bool:
        """Rename a step's folder to one that nobody looks into, durably, and give its file back to the store."""
        gone = f"{GONE}{place_of(step)}"
        with self._volume.disk.lock:
            if place_of(step) in self._volume.disk.names:
                self._volume.link(place_of(step), gone)
                self._volume.remove(place_of(step))
        self._volume.point("gone")
        self._volume.sync_names(folder_of(gone))
        self._volume.sync_names(folder_of(place_of(step)))
        return bool(self._checkpointer.recycle(gone))

    def _look(self) -> Listing:
        return Listing(check=None, files=tuple(linked(self._volume)))


def linked(volume: SimulatedVolume) -> list[SlotFile]:
    """Give what lies in the folders that were linked into."""
    with volume.disk.lock:
        names = [name for name in sorted(volume.disk.names) if name.startswith(OUT) and name.endswith(".pcc")]
    return [file for name in names for file in list_file(volume, name).files]
