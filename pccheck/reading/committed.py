"""Checkpoints that all of their ranks hold: the newest that verifies, and single leaves (floor 2: imports loading and
below)."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any, final

import msgspec

from pccheck import format
from pccheck.errors import (
    ContentError,
    DamagedError,
    FormatError,
    MediumError,
    NoValidCheckpointError,
    ReusedError,
    UsageError,
    named_ranks,
)
from pccheck.reading.loading import Parts, load_files, load_world
from pccheck.reading.members import Files, held
from pccheck.reading.reader import DEFAULT_THREADS
from pccheck.reading.reads import no_such_leaf
from pccheck.reading.restored import Restored, Skipped
from pccheck.reading.restoring import ATTEMPTS, LOCK_AFTER, newest_first, of_step, unreadable
from pccheck.reading.world import WorldCheckpoint, WorldIdentity, WorldListing, look_at_world
from pccheck.state.assembly import Builder
from pccheck.state.kinds import kind_of

HOME = 0  # whose tree a view of all ranks shows


@final
class Committed:
    """One checkpoint of all ranks of a view; its payload is read when it is asked for. Thread-safe.

    The tree, and what belongs to one rank alone, are those of rank 0; arrays that were stored in parts are whole.
    A writer may give its slots to newer checkpoints: reading then raises ReusedError.

    Args:
        files: of all ranks.
    """

    def __init__(self, files: Files) -> None:
        self._files = files
        self._parts = Parts(files, HOME, DEFAULT_THREADS)
        self.name = self._parts.home.name
        self.step, self.counter = files.step, files.counter

    def __repr__(self) -> str:
        files = self._files
        return f"<Checkpoint step {self.step}, counter {self.counter} of {files.world} ranks in {files.where}>"

    @property
    def metadata(self) -> dict[str, Any]:
        """What rank 0 saved beside the state."""
        return dict(self._parts.home.manifest.metadata)

    def paths(self) -> list[str]:
        """Give the paths of rank 0's leaves in the order of its state, then of arrays of which only others have parts.

        Raises as `restore`.
        """
        own = list(dict.fromkeys(leaf.path for leaf in self._parts.home.manifest.leaves))
        known = set(own)
        return own + [path for path in self._parts.sources() if path not in known]

    def state(self, like: Any = None, partial: bool = False) -> Any:
        """Give the whole state, every byte verified; `restore` gives the mismatches of `partial` as well."""
        return self.restore(like=like, partial=partial).state

    def restore(self, like: Any = None, partial: bool = False) -> Restored:
        """Give the state, every byte of it verified, in the shape of `like`; errors as `load_world`."""
        return load_files(self._files, HOME, like=like, partial=partial).restored

    def mapped(self, like: Any = None) -> Any:
        """Raise UsageError: what several files hold cannot be mapped as one."""
        raise UsageError(
            f"{self._files.where} holds the files of several ranks, which cannot be mapped as one; use state(), or "
            "open what is one rank's"
        )

    def __getitem__(self, path: str) -> Any:
        return self.read([path])[0]

    def read(self, paths: Sequence[str]) -> list[Any]:
        """Give single leaves; only the chunks that they lie in are read, of all ranks, and all of those are verified.

        Raises:
            KeyError: there is no such leaf.
            DamagedError, FormatError, ReusedError, MediumError: as `restore`.
        """
        parts, home = self._parts, self._parts.home.manifest
        known = {home.leaves[index].path: index for index in parts.named()}
        leaves, others = list(home.leaves), {} if known.keys() >= set(paths) else parts.sources()
        for path in paths:
            if path not in known and path in others:
                known[path] = len(leaves)
                leaves.append(others[path][0].entry)
            elif path not in known:
                raise no_such_leaf(self.step, path, [*known, *others])
        indices = [known[path] for path in paths]
        reads, _ = parts.read([(index, None) for index in indices], leaves)
        shown = msgspec.structs.replace(home, leaves=leaves)
        builder = Builder(shown, reads.data, kind_of, specs=parts.specs(leaves), key=reads.key)
        return [builder.leaf(index) for index in indices]


def restore_newest(
    root: str, *, step: int | None = None, like: Any = None, fallback: bool = True, partial: bool = False
) -> Restored | None:
    """Give the newest checkpoint that all of its ranks hold and that verifies; change nothing.

    Args:
        root: the job's folder.
        step: only checkpoints of this step, those on abandoned branches last; None = the newest of any.
        like, partial: as in `load_world`.
        fallback: pass over what does not verify; False = raise instead.

    Returns None only where no checkpoint was ever committed.

    Raises:
        NoValidCheckpointError: checkpoints were committed, but none of them verifies, or ranks lack theirs.
        StepNotFoundError: no checkpoint of `step` is there.
        DamagedError, FormatError, MediumError: the first that does not verify, with `fallback=False` or `step`.
        MismatchError: it does not fit `like`, and `partial` is off.
        ReusedError: writers were faster each time.
    """
    passed: dict[WorldIdentity, Skipped] = {}
    for attempt in range(ATTEMPTS):
        listing = look_at_world(root)
        first: ContentError | MediumError | None = None
        try:
            for checkpoint in _wanted(listing, step):
                identity = checkpoint.identity
                if identity in passed:
                    continue
                try:
                    with held(checkpoint.members.values()) if attempt >= LOCK_AFTER else nullcontext():
                        restored = load_world(root, identity, HOME, like=like, partial=partial).restored
                except (DamagedError, FormatError, MediumError) as error:
                    if not fallback:
                        raise
                    first = first or error
                    passed[identity] = Skipped(identity.counter, identity.step, root, str(error))
                    continue
                return replace(restored, skipped=(*_lost(listing, identity.counter), *newest_first(passed.values())))
        except ReusedError:
            continue
        if step is not None and first is not None:
            raise first
        skipped = (*_lost(listing, 0), *newest_first(passed.values()), *_left_behind(listing))
        if skipped:
            raise NoValidCheckpointError(root, skipped)
        return None
    raise ReusedError(
        f"{root}: {ATTEMPTS} times in a row a slot was given to a newer checkpoint while it was being read; "
        "read again, or let the writers keep more checkpoints"
    )


def _wanted(listing: WorldListing, step: int | None) -> list[WorldCheckpoint]:
    """Give the complete checkpoints of a look that may be restored; errors as in `of_step`."""
    complete = [c for c in listing.checkpoints if c.complete]
    return of_step(complete, step, listing.path, step_of=lambda c: c.identity.step, abandoned=lambda c: c.abandoned)


def _lost(listing: WorldListing, restored: int) -> list[Skipped]:
    """Give the files that cannot be believed, and what was agreed by all ranks and is newer than what was restored."""
    found = []
    agreed = 0
    for store in listing.stores:
        check = store.listing.check
        if check is not None and check.problem is None and check.peer_word != format.NO_WORD:
            agreed = max(agreed, format.word_counter(check.peer_word))
        found += [replace(each, name=f"{store.path}/{each.name}") for each in unreadable(store.listing)]
    for checkpoint in listing.checkpoints:
        counter, step = checkpoint.identity.counter, checkpoint.identity.step
        if not checkpoint.complete and not checkpoint.abandoned and restored < counter <= agreed:
            found.append(
                Skipped(
                    counter,
                    step,
                    listing.path,
                    f"{named_ranks(checkpoint.missing)} lack{'s' * (len(checkpoint.missing) == 1)} it",
                )
            )
    if agreed > restored and not any(c.identity.counter == agreed for c in listing.checkpoints):
        found.append(Skipped(agreed, None, listing.path, "was committed by all ranks, and no store holds it any more"))
    return found


def _left_behind(listing: WorldListing) -> list[Skipped]:
    return [
        Skipped(c.identity.counter, c.identity.step, listing.path, "a roll-back abandoned its branch; ask by step")
        for c in listing.checkpoints
        if c.complete and c.abandoned
    ]
