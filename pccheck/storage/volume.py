"""The names of one store: its folder, its lock, its mapped words (floor 1: imports floor 0 and medium)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, runtime_checkable

from pccheck.storage.medium import Medium


class CheckPage(Protocol):
    """The mapped CHECK file. `load`, `store` and `compare_and_swap` are of 64 aligned bits."""

    atomic: bool  # whether compare_and_swap is one instruction; else it holds within this process only

    def load(self, offset: int) -> int:
        """Give the 64-bit number at `offset`."""

    def store(self, offset: int, value: int) -> None:
        """Set the 64-bit number at `offset`."""

    def compare_and_swap(self, offset: int, expected: int, value: int) -> bool:
        """Set the number at `offset` to `value` if it is `expected`; tell whether it was."""

    def read(self, offset: int, length: int) -> bytes:
        """Give bytes of the page."""

    def write(self, offset: int, data: bytes) -> None:
        """Set bytes of the page."""

    def sync(self) -> None:
        """Make the page durable (msync and fdatasync). Never retried."""

    def links(self) -> int:
        """Give how many names the file has; 0 after it was removed."""

    def close(self) -> None:
        """Unmap and close."""


class Volume(Protocol):
    """The folder of one store. Names are relative, `kept/` is the only subfolder; nothing follows symbolic links.

    Thread-safe. Errors of the operating system become MediumError or CapacityError here and nowhere else.
    """

    path: str  # for messages

    def names(self, folder: str = "") -> list[str]:
        """Give the sorted names of regular files in the store or in a subfolder of it; [] for a missing folder."""

    def create(self, name: str, size: int) -> Medium:
        """Make a new allocated file of zeros and open it; the name must be free. Not durable before `sync_names`."""

    def open(self, name: str, *, write: bool = False) -> Medium:
        """Open a file that is there."""

    def link(self, name: str, new_name: str) -> None:
        """Give a file a second name (a copy where the file system has no links). Not durable before `sync_names`.

        Idempotent: a `new_name` that is already there is left."""

    def link_out(self, name: str, medium: Medium, path: str) -> None:
        """Give an open file of the store one more name, at a free path outside of it. Not durable before `sync_out`.

        Raises MediumError, its errno in `outside.NO_LINK` where the file can have no name there; StoreGoneError where
        `name` leads to another file by now.
        """

    def copy_out(self, name: str, medium: Medium, path: str) -> None:
        """Put a synced copy of an open file of the store at a free path outside of it; its name is not durable yet."""

    def sync_out(self, path: str) -> None:
        """Make the names in the folder of a path outside of the store durable; where that fails, remove the path."""

    def remove(self, name: str) -> None:
        """Remove a name; one that is not there is no error."""

    def is_named(self, name: str, medium: Medium) -> bool:
        """Tell whether a name leads to this very file, which was opened through this volume."""

    def sync_names(self, folder: str = "") -> None:
        """Make the names of the store's folder, or of a subfolder, durable."""

    def check_page(self, *, create: bool) -> CheckPage:
        """Open and map CHECK; with `create` make it, all zeros, where it is missing or too short."""

    def lock(self) -> bool:
        """Take the store's one writer lock, held until `unlock` or the end of the process; False = another has it."""

    def unlock(self) -> None:
        """Give the lock back."""

    def free_bytes(self) -> int:
        """Give the bytes that a new file could take."""

    def close(self) -> None:
        """Close what the volume itself holds open, the lock included."""


@runtime_checkable
class SideFiles(Protocol):
    """What a Volume may offer besides: small files in the store's folder that no checkpoint depends on.

    They are never synced, and what goes wrong with them is nobody's loss but their own. The history of runs is one
    (`pccheck.bill`): a volume without them has none. Thread-safe.
    """

    def read_side(self, name: str, limit: int) -> bytes | None:
        """Give what a file begins with, at most `limit` bytes; None where it is missing. Raises as `Volume.open`."""

    def replace_side(self, name: str, data: bytes) -> None:
        """Replace a file whole, or make it: readers find the old one or the new one. Not durable."""


@runtime_checkable
class TakesIn(Protocol):
    """What a Volume may offer besides: to make a file that lies outside one of the store's again. Thread-safe."""

    def take_in(self, path: str, name: str, wanted: Callable[[bytes, int], bool]) -> Medium | None:
        """Make a file one that was never used, at a free name in the store, and open it; None = it is not taken.

        It is not where somebody else may have it: it has one name more, or is open or mapped, in this process too. What
        is not taken is left, or removed where its old name was gone already. The new name is not durable.

        Args:
            path: where it is; its folder is no symbolic link, and no crash brings an older name back.
            name: the new name.
            wanted: tells by the first sector and the size of a file whether it is to be taken.
        """


@runtime_checkable
class Placed(Protocol):
    """What a Volume may offer besides: to tell whether whoever looks at its path finds it. Thread-safe."""

    def is_at_path(self) -> bool:
        """Tell whether the path leads to this very folder: not once that was renamed, and another put in its place."""
