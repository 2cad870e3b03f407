"""Wrappers that make storage fail on purpose (beside the floors: imports floors 0 and 1 only).

`FaultyVolume(volume, script)` behaves as `volume` until its script says otherwise. Operations are counted over the
volume and everything that is opened through it, so a test can first run unharmed, look at `script.operations`, and
then fail each of them in turn:

    for n in range(1, len(script.operations) + 1): run(Script(Fault("*", n)))
"""

from __future__ import annotations

from typing import final

from pccheck.storage.medium import Medium
from pccheck.storage.volume import CheckPage, Volume
from pccheck.testing.fault_script import FOREVER as FOREVER
from pccheck.testing.fault_script import Fault as Fault
from pccheck.testing.fault_script import Guard
from pccheck.testing.fault_script import Script as Script


@final
class FaultyMedium:
    """A medium that fails by script; it hides descriptor and mapping, so that every byte goes through it."""

    def __init__(self, inner: Medium, script: Script) -> None:
        self.inner, self.script, self.path = inner, script, inner.path

    @property
    def alignment(self) -> int:
        """Always 1: there is no descriptor."""
        return 1

    def size(self) -> int:
        """Give the size in bytes."""
        return self.inner.size()

    def links(self) -> int:
        """Give how many names the file has."""
        return self.inner.links()

    def allocate(self, size: int) -> None:
        """Allocate, or fail."""
        guard = Guard(self.script, "allocate", self.path)
        self.inner.allocate(size)
        guard.done()

    def read_into(self, buffer: memoryview, offset: int) -> None:
        """Read, or fail."""
        guard = Guard(self.script, "read", self.path, offset)
        self.inner.read_into(buffer, offset)
        guard.done()

    def write_from(self, buffer: memoryview, offset: int) -> None:
        """Write, write a half, or fail."""
        guard = Guard(self.script, "write", self.path, offset)
        data = buffer.cast("B")
        short = guard.fault is not None and guard.fault.how == "short"
        self.inner.write_from(data[: data.nbytes // 2] if short else data, offset)
        guard.done()

    def sync(self) -> None:
        """Sync, or fail."""
        guard = Guard(self.script, "sync", self.path)
        self.inner.sync()
        guard.done()

    def drop_cache(self) -> None:
        """Drop the cache."""
        self.inner.drop_cache()

    def fileno(self) -> int | None:
        """None."""
        return None

    def mapping(self) -> memoryview | None:
        """None."""
        return None

    def lock_shared(self) -> bool:
        """Lock for reading."""
        return self.inner.lock_shared()

    def lock_exclusive(self) -> bool:
        """Lock for writing."""
        return self.inner.lock_exclusive()

    def unlock(self) -> None:
        """Unlock."""
        self.inner.unlock()

    def close(self) -> None:
        """Close."""
        self.inner.close()


def _inner(medium: Medium) -> Medium:
    return medium.inner if isinstance(medium, FaultyMedium) else medium


@final
class FaultyPage:
    """A CHECK page that fails by script where it is written as bytes or synced."""

    def __init__(self, inner: CheckPage, script: Script, path: str) -> None:
        self.inner, self.script, self.path = inner, script, path
        self.atomic = inner.atomic

    def load(self, offset: int) -> int:
        """Give a word."""
        return self.inner.load(offset)

    def store(self, offset: int, value: int) -> None:
        """Set a word."""
        self.inner.store(offset, value)

    def compare_and_swap(self, offset: int, expected: int, value: int) -> bool:
        """Set a word if it is `expected`."""
        return self.inner.compare_and_swap(offset, expected, value)

    def read(self, offset: int, length: int) -> bytes:
        """Give bytes."""
        return self.inner.read(offset, length)

    def write(self, offset: int, data: bytes) -> None:
        """Set bytes, or fail."""
        guard = Guard(self.script, "check_write", self.path, offset)
        self.inner.write(offset, data)
        guard.done()

    def sync(self) -> None:
        """Sync, or fail."""
        guard = Guard(self.script, "check_sync", self.path)
        self.inner.sync()
        guard.done()

    def links(self) -> int:
        """Give how many names CHECK has."""
        return self.inner.links()

    def close(self) -> None:
        """Close."""
        self.inner.close()


@final
class FaultyVolume:
    """A volume that fails by script, and gives media and a CHECK page that do."""

    def __init__(self, inner: Volume, script: Script) -> None:
        self.inner, self.script, self.path = inner, script, inner.path

    def names(self, folder: str = "") -> list[str]:
        """List, or fail."""
        guard = Guard(self.script, "names", folder)
        names = self.inner.names(folder)
        guard.done()
        return names

    def create(self, name: str, size: int) -> Medium:
        """Create, or fail; a create that fails has left nothing, also one that fails "after"."""
        guard = Guard(self.script, "create", name)
        medium = self.inner.create(name, size)
        if guard.fault is not None:
            medium.close()
            self.inner.remove(name)
            guard.done()
        return FaultyMedium(medium, self.script)

    def open(self, name: str, *, write: bool = False) -> Medium:
        """Open, or fail."""
        guard = Guard(self.script, "open", name)
        medium = self.inner.open(name, write=write)
        if guard.fault is not None:
            medium.close()
            guard.done()
        return FaultyMedium(medium, self.script)

    def link(self, name: str, new_name: str) -> None:
        """Link, or fail."""
        guard = Guard(self.script, "link", new_name)
        self.inner.link(name, new_name)
        guard.done()

    def link_out(self, name: str, medium: Medium, path: str) -> None:
        """Link outside of the store, or fail."""
        guard = Guard(self.script, "link_out", path)
        self.inner.link_out(name, _inner(medium), path)
        guard.done()

    def copy_out(self, name: str, medium: Medium, path: str) -> None:
        """Copy to outside of the store, or fail."""
        guard = Guard(self.script, "copy_out", path)
        self.inner.copy_out(name, _inner(medium), path)
        guard.done()

    def sync_out(self, path: str) -> None:
        """Sync names outside of the store, or fail."""
        guard = Guard(self.script, "sync_out", path)
        self.inner.sync_out(path)
        guard.done()

    def remove(self, name: str) -> None:
        """Remove, or fail."""
        guard = Guard(self.script, "remove", name)
        self.inner.remove(name)
        guard.done()

    def is_named(self, name: str, medium: Medium) -> bool:
        """Tell whether a name leads to a medium."""
        return self.inner.is_named(name, _inner(medium))

    def sync_names(self, folder: str = "") -> None:
        """Sync names, or fail."""
        guard = Guard(self.script, "sync_names", folder)
        self.inner.sync_names(folder)
        guard.done()

    def check_page(self, *, create: bool) -> CheckPage:
        """Open CHECK, or fail."""
        guard = Guard(self.script, "check_page", "CHECK")
        page = self.inner.check_page(create=create)
        if guard.fault is not None:
            page.close()
            guard.done()
        return FaultyPage(page, self.script, "CHECK")

    def lock(self) -> bool:
        """Lock, or fail; a failed one holds nothing."""
        guard = Guard(self.script, "lock", "CHECK")
        locked = self.inner.lock()
        if guard.fault is not None:
            self.inner.unlock()
            guard.done()
        return locked

    def unlock(self) -> None:
        """Unlock."""
        self.inner.unlock()

    def free_bytes(self) -> int:
        """Give the free bytes."""
        return self.inner.free_bytes()

    def close(self) -> None:
        """Close."""
        self.inner.close()
