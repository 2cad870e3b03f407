"""Durable: a step's files and its rename reach the storage before the step counts (imports orbax alone)."""

from __future__ import annotations

import asyncio
import os
import shutil
import threading
import weakref
from pathlib import Path
from typing import Any, final

import orbax.checkpoint as ocp
from etils import epath

TEMPORARY = ocp.path.atomicity_types.TMP_DIR_SUFFIX
WHOLE = "-whole"  # what a temporary folder's name gets when all is in it, and before all of it is synced


@final
class DurableRename(ocp.path.atomicity_types.TemporaryPath):
    """Commit a step by a rename that no power loss can bring before the bytes that it names.

    Orbax writes the last small files of a step (`_CHECKPOINT_METADATA`, `commit_success.txt`) within the very call that
    renames it, and syncs neither. Here that call renames to a name that is still a temporary one; then every file and
    folder of the step is synced, then it gets its final name, then the folder that holds the name is synced. Items
    within a step are renamed as Orbax does: the step's own sync covers them.

    Made by Orbax through the classmethods; `CheckpointManagerOptions(temporary_path_class=DurableRename)` gives a stock
    manager the same. Files that other hosts wrote are theirs to sync: fsync(2) here reaches this host's pages alone.
    """

    def __init__(self, temporary: Any, final_path: Any, **options: Any) -> None:
        self._final = final_path
        # A snapshot (v1's partial saves) replaces its source, in a way of its own.
        self._plain = TEMPORARY in final_path.parent.name or options.get("snapshot_type") is not None
        target = final_path if self._plain else temporary.parent / (temporary.name + WHOLE)
        self._whole = target
        self._inner = ocp.path.atomicity.AtomicRenameTemporaryPath(temporary, target, **options)
        if not self._plain:
            with _LOCK:
                _LIVE.add(self)

    @classmethod
    async def validate(cls, temporary_path: Any) -> None:
        """Raise Orbax's ValidationError where `temporary_path` is no uncommitted folder."""
        await ocp.path.atomicity.AtomicRenameTemporaryPath.validate(temporary_path)

    @classmethod
    async def validate_final(cls, final_path: Any) -> None:
        """Raise Orbax's ValidationError where `final_path` is no committed folder."""
        await ocp.path.atomicity.AtomicRenameTemporaryPath.validate_final(final_path)

    @classmethod
    def from_temporary(cls, temporary_path: Any, **options: Any) -> DurableRename:
        """Give the path of which `temporary_path` is the uncommitted name."""
        final_path = temporary_path.parent / temporary_path.name.split(TEMPORARY, 1)[0]
        return cls(temporary_path, final_path, **options)

    @classmethod
    def from_final(cls, final_path: Any, **options: Any) -> DurableRename:
        """Give the path that is to become `final_path`."""
        return cls(final_path.parent / (final_path.name + TEMPORARY), final_path, **options)

    def get(self) -> Any:
        """Give the uncommitted path."""
        return self._inner.get()

    def get_final(self) -> Any:
        """Give the path after the commit."""
        return self._final

    async def create(self) -> Any:
        """Make the uncommitted folder; what a crash left in its place goes."""
        if not self._plain:
            await asyncio.to_thread(shutil.rmtree, str(self._whole), True)
        return await self._inner.create()

    async def finalize(self) -> None:
        """Commit: fill in, sync all, rename, sync the name.

        OSError where a sync fails, RuntimeError where an item is not whole: then there was no rename.
        """
        if not self._plain:
            await asyncio.to_thread(self._check)
        await self._inner.finalize()
        if not self._plain:
            await asyncio.to_thread(self._publish)

    def _check(self) -> None:
        # A save that was cut off while another took its place was committed with its items' temporary names.
        names = sorted(name for name in os.listdir(str(self._inner.get())) if TEMPORARY in name)
        if names:
            raise RuntimeError(f"{self._final} is not committed: of its items {names} are not whole; save it again")

    def _publish(self) -> None:
        sync_tree(Path(str(self._whole)))
        os.rename(str(self._whole), str(self._final))
        sync_names(Path(str(self._final)).parent)


def make_root(root: str, file_options: Any) -> None:
    """Make the folder of the steps, and those above it; in a file system their names are synced."""
    path = Path(root)
    made = [] if "://" in root else [each for each in (path, *path.parents) if not each.exists()]
    mode = file_options.path_permission_mode if file_options else None
    epath.Path(root).mkdir(parents=True, exist_ok=True, mode=mode)
    for each in made:
        sync_names(each.parent)


def is_live(final_path: Path) -> bool:
    """Tell whether a save of this process, of whichever manager, is under way that is to become `final_path`."""
    with _LOCK:
        return any(str(each.get_final()) == str(final_path) for each in _LIVE)


_LIVE: weakref.WeakSet[DurableRename] = weakref.WeakSet()  # Orbax holds them as long as the save is under way
_LOCK = threading.Lock()


def sync_tree(folder: Path) -> None:
    """Sync every regular file and every folder at and below `folder`, never through a symbolic link; OSError if not."""
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.is_dir(follow_symlinks=False):
                sync_tree(Path(entry.path))
            elif entry.is_file(follow_symlinks=False):
                sync_file(entry.path)
    sync_names(folder)


def sync_names(folder: Path) -> None:
    """Sync the names in `folder`."""
    sync_file(folder, os.O_DIRECTORY)


def sync_file(path: str | Path, flags: int = 0) -> None:
    """Sync what is at `path`, which is opened with `flags` and never through a symbolic link; OSError if not."""
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | flags)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
