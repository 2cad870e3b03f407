"""What one checkpoint of all ranks holds, without its bytes (floor 2: imports world, loading and below)."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial as partial_
from typing import Any, final

from pccheck.errors import ContentError, MediumError, NoValidCheckpointError, ReusedError, StepNotFoundError
from pccheck.leaves import StoredLeaf
from pccheck.reading.linked import LinkedFiles, is_linked
from pccheck.reading.loading import load_files
from pccheck.reading.members import Files, StoreFiles, open_member
from pccheck.reading.restoring import Restored, Skipped, retried
from pccheck.reading.world import WorldCheckpoint, world_candidates
from pccheck.state import tree
from pccheck.state.entries import StoredLeaves
from pccheck.state.manifest import Manifest


@final
@dataclass(frozen=True, kw_only=True)
class Outline:
    """One checkpoint: each rank's state with a `StoredLeaf` in place of every leaf. Immutable, thread-safe.

    Such a tree, or a part of it, may be given as `like`: a StoredLeaf there comes back as it was saved.

    Args:
        path: the job's folder, the store, or the linked folder.
        step: the caller's label.
        counter: its place in the order of all checkpoints.
        incarnation: which opening of the stores made it.
        metadata: what rank 0 saved beside the state.
        trees: the state of each rank that saved it.
        skipped: newer checkpoints whose manifests are not whole, and why.
    """

    path: str
    step: int
    counter: int
    incarnation: int
    metadata: dict[str, Any]
    trees: tuple[Any, ...] = field(repr=False)
    skipped: tuple[Skipped, ...] = ()
    _files: Callable[[], Files] = field(repr=False)

    @property
    def world(self) -> int:
        """How many ranks saved it."""
        return len(self.trees)

    def restore(self, *, like: Any = None, partial: bool = False, rank: int = 0) -> Restored:
        """Give the state of this very checkpoint, as `rank` of any number of ranks restores it; change nothing.

        Args:
            like: as in `Checkpointer.restore`.
            partial: as there.
            rank: from 0; what belongs to one rank comes from rank `rank % world`.

        Raises:
            DamagedError, FormatError, MediumError: it cannot be read.
            ReusedError: it is not there any more.
            MismatchError: it does not fit `like`, and `partial` is off.
        """
        return load_files(self._files(), rank % self.world, like=like, partial=partial).restored


def outline(path: str | os.PathLike[str], step: int | None = None, *, before: int | None = None) -> Outline | None:
    """Say what the newest checkpoint that all of its ranks hold is made of; None where there is none.

    Only manifests are read: `Outline.restore` reads and verifies the rest.

    Args:
        path: a store, a job's folder of stores, or a linked folder.
        step: only checkpoints of this step.
        before: only checkpoints of lower counters.

    Raises:
        StepNotFoundError: no checkpoint of `step` is there.
        NoValidCheckpointError: some are, but the manifests of none are whole.
        MediumError: there is no such folder, or it cannot be read.
    """
    where = os.path.abspath(os.fspath(path))
    if is_linked(where):
        files = LinkedFiles(where)
        if step not in (None, files.step):
            raise StepNotFoundError(step, [files.step], where)
        return outline_of(files) if before is None or files.counter < before else None
    return retried(lambda: _outline(where, step, before))


def _outline(where: str, step: int | None, before: int | None) -> Outline | None:
    found = world_candidates(where)
    wanted = [c for c in found if before is None or c.identity.counter < before]
    if step is not None:
        wanted = [c for c in wanted if c.identity.step == step]
        if not wanted:
            raise StepNotFoundError(step, sorted({c.identity.step for c in found}), where)
    skipped: list[Skipped] = []
    for checkpoint in wanted:
        try:
            return _read(where, checkpoint, tuple(skipped))
        except ReusedError:
            raise
        except (ContentError, MediumError) as error:
            skipped.append(Skipped(checkpoint.identity.counter, checkpoint.identity.step, where, str(error)))
    if skipped:
        raise NoValidCheckpointError(where, skipped)
    return None


def _read(where: str, checkpoint: WorldCheckpoint, skipped: tuple[Skipped, ...]) -> Outline:
    identity = checkpoint.identity
    manifests = [open_member(checkpoint.members[rank]).manifest for rank in range(identity.world)]
    return _outlined(manifests, 0, partial_(StoreFiles, where, identity), where, skipped)


def outline_of(files: LinkedFiles, *, home: int = 0) -> Outline:
    """Give the outline of a linked folder, with the metadata of rank `home`; errors as `LinkedFiles.open`."""
    manifests = [files.open(rank).manifest for rank in range(files.world)]
    return _outlined(manifests, home, lambda: files, files.where, ())


def _outlined(
    manifests: Sequence[Manifest], home: int, files: Callable[[], Files], where: str, skipped: tuple[Skipped, ...]
) -> Outline:
    one = manifests[home]
    return Outline(
        path=where, step=one.step, counter=one.counter, incarnation=one.incarnation, metadata=one.metadata,
        trees=tuple(map(_tree, manifests)), skipped=skipped, _files=files,
    )  # fmt: skip


def _tree(manifest: Manifest) -> Any:
    stored = StoredLeaves.of(manifest.leaves)

    def leaf(index: int) -> StoredLeaf:
        path, parts = manifest.leaves[index].path, stored.split.get(index)
        if parts is None:
            return StoredLeaf(path, stored.specs[index])
        return StoredLeaf(path, parts[0], tuple(stored.boxes(index)))

    return tree.build(manifest.tree, leaf)
