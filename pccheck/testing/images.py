"""Every disk that a power loss may leave behind, as far as recovery can tell them apart (beside: imports floor 0).

The disk may hold any version that a sector, a size or a name has had since its last covering sync, each chosen by
itself. That is any subset of the unsynced operations, in any order, torn at 512 bytes. Files are enumerated one by
one (all combinations up to `limit`, by sectors or else by pages; beyond that a sample), then combined.

Two disks count as one where recovery cannot tell them apart: a `View` says which bytes of a file it looks at, given
the file's first sector. (The explorer checks that claim: recovery that looks elsewhere is reported.)
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

import xxhash

from pccheck.format import PAGE, SECTOR
from pccheck.testing.disk import DURABLE, ZEROS, FileImage, FileState, Image, SimulatedDisk

SECTORS_PER_PAGE = PAGE // SECTOR
T = TypeVar("T", bound=Hashable)
C = TypeVar("C")


class View(Protocol):
    """What recovery looks at. Both answers must depend on the arguments alone."""

    def extents(self, name: str, head: bytes, size: int) -> Sequence[tuple[int, int]]:
        """Give the byte ranges `(start, end)`, beside the first sector, that recovery may read of this file."""

    def identity(self, name: str, head: bytes) -> bytes:
        """Give the first sector without what differs from run to run and means nothing (the time of day)."""


@dataclass(frozen=True, slots=True)
class Choice:
    """One legal state of one file; equal keys look alike to recovery."""

    image: FileImage
    key: bytes


@dataclass
class Enumerator:
    """Enumerates the legal disks of a SimulatedDisk. Not thread-safe.

    Args:
        view: what recovery looks at.
        limit: up to so many combinations are enumerated exhaustively (4096 = 12 units of two versions each).
        samples: so many random ones are drawn beyond that, beside none lost, all lost, each one lost, each one kept.
        seed: of those draws.
    """

    view: View
    limit: int = 4096
    samples: int = 64
    seed: int = 0
    sampled: int = 0  # how often the limit was passed
    _cache: dict[tuple[int, int, str], list[Choice]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._random = random.Random(self.seed)

    def disks(self, disk: SimulatedDisk) -> Iterator[tuple[bytes, Image]]:
        """Give each distinguishable disk that a power loss now may leave, with its key; some keys may come twice."""
        pending = sorted(disk.pending_names)
        options = [_distinct(disk.pending_names[name]) for name in pending]
        for pick in self.picks([len(o) for o in options]):
            names = dict(disk.names)
            for name, choices, index in zip(pending, options, pick, strict=True):
                inode = choices[index]
                names.pop(name, None)
                if inode is not None:
                    names[name] = inode
            yield from self._with_names(disk, dict(sorted(names.items())))

    def now(self, disk: SimulatedDisk) -> tuple[bytes, Image]:
        """Give the disk that mere process death leaves, with its key."""
        image = disk.image()
        names = dict(sorted(image.names.items()))
        choices = {i: self._choice(n, f.size, f.sectors) for n, i in names.items() for f in [image.files[i]]}
        return self._combined(names, choices)

    def _with_names(self, disk: SimulatedDisk, names: dict[str, int]) -> Iterator[tuple[bytes, Image]]:
        first_names: dict[int, str] = {}
        for name, inode in names.items():
            first_names.setdefault(inode, name)
        choices = [self.files(inode, name, disk.files[inode]) for inode, name in first_names.items()]
        for pick in self.picks([len(c) for c in choices]):
            yield self._combined(names, {inode: c[i] for inode, c, i in zip(first_names, choices, pick, strict=True)})

    def _combined(self, names: dict[str, int], choices: dict[int, Choice]) -> tuple[bytes, Image]:
        numbers: dict[int, int] = {}
        digest = xxhash.xxh3_128()
        for name, inode in names.items():
            number = numbers.setdefault(inode, len(numbers))
            digest.update(f"{name}\0{number}\0".encode() + choices[inode].key)
        return digest.digest(), Image(names, {i: c.image for i, c in choices.items()})

    def files(self, inode: int, name: str, file: FileState) -> list[Choice]:
        """Give each distinguishable legal state of one file, the oldest first and the newest last."""
        place = (file.serial, file.generation, name)
        if place not in self._cache:
            found: dict[bytes, Choice] = {}
            heads = _distinct(b for _, b in file.pending.get(0, [(DURABLE, file.sectors.get(0, ZEROS))]))
            for size, head in itertools.product(_distinct(file.sizes), heads):
                for sectors in self._contents(name, file, size, head):
                    choice = self._choice(name, size, sectors)
                    found.pop(choice.key, None)  # the newest goes last
                    found[choice.key] = choice
            self._cache[place] = list(found.values())
        return self._cache[place]

    def _contents(self, name: str, file: FileState, size: int, head: bytes) -> Iterator[dict[int, bytes]]:
        spans = [(0, SECTOR), *self.view.extents(name, head, size)]
        units = sorted(
            s for s in file.pending
            if s and any(start < (s + 1) * SECTOR and s * SECTOR < end for start, end in spans)
        )  # fmt: skip
        base = {s: b for s, b in file.sectors.items() if s * SECTOR < size} | {0: head}
        versions = [_distinct(b for _, b in file.pending[s]) for s in units]
        picks: Iterator[dict[int, bytes]] = (
            {s: v[i] for s, v, i in zip(units, versions, pick, strict=True)}
            for pick in self.picks([len(v) for v in versions])
        )
        if math.prod(len(v) for v in versions) > self.limit:
            picks = itertools.chain(self._by_pages(file, units), picks)
        for changes in picks:
            yield base | {s: b for s, b in changes.items() if s * SECTOR < size}

    def _by_pages(self, file: FileState, units: list[int]) -> Iterator[dict[int, bytes]]:
        pages: dict[int, list[int]] = {}
        for sector in units:
            pages.setdefault(sector // SECTORS_PER_PAGE, []).append(sector)
        cuts = [sorted({q for s in sectors for q, _ in file.pending[s]}) for sectors in pages.values()]
        for pick in self.picks([len(c) for c in cuts]):
            changes = {}
            for sectors, sequences, index in zip(pages.values(), cuts, pick, strict=True):
                for sector in sectors:
                    changes[sector] = [b for q, b in file.pending[sector] if q <= sequences[index]][-1]
            yield changes

    def _choice(self, name: str, size: int, sectors: dict[int, bytes] | object) -> Choice:
        assert isinstance(sectors, dict)
        head = sectors.get(0, ZEROS)
        spans = self.view.extents(name, head, size)
        digest = xxhash.xxh3_128(size.to_bytes(8, "little") + self.view.identity(name, head))
        for sector in sorted(sectors):
            start = sector * SECTOR
            if sector and sectors[sector] != ZEROS and any(a < start + SECTOR and start < b for a, b in spans):
                digest.update(start.to_bytes(8, "little") + sectors[sector])
        return Choice(FileImage(size, {s: b for s, b in sectors.items() if b != ZEROS}), digest.digest())

    def draw(self, choices: list[C], count: int) -> list[C]:
        """Give `count` of these, at random; all of them if they are not more."""
        return self._random.sample(choices, min(count, len(choices)))

    def picks(self, versions: Sequence[int]) -> Iterator[tuple[int, ...]]:
        """Give index tuples below `versions`: all of them up to `limit`, else a sample; oldest first, newest last."""
        if math.prod(versions) <= self.limit:
            yield from itertools.product(*map(range, versions))
            return
        self.sampled += 1
        oldest, newest = tuple(0 for _ in versions), tuple(n - 1 for n in versions)
        yield oldest
        for place in range(len(versions)):
            yield newest[:place] + oldest[place : place + 1] + newest[place + 1 :]
            yield oldest[:place] + newest[place : place + 1] + oldest[place + 1 :]
        for _ in range(self.samples):
            yield tuple(self._random.randrange(n) for n in versions)
        yield newest


def _distinct(versions: Iterable[T]) -> list[T]:
    """Give what differs, in the order of its last occurrence: the newest stays last."""
    return list(dict.fromkeys(reversed(list(versions))))[::-1]


def describe(disk: SimulatedDisk, image: Image) -> list[str]:
    """Say in words how an image differs from what the running process saw."""
    lines = []
    for name in sorted(disk.names.keys() | image.names.keys()):
        now, then = disk.names.get(name), image.names.get(name)
        if now != then:
            lines.append(f"the name {name} is {'gone' if then is None else f'file {then}'}, not "
                         f"{'gone' if now is None else f'file {now}'}")  # fmt: skip
        if then is None:
            continue
        file, found = disk.files[then], image.files[then]
        if file.size != found.size:
            lines.append(f"{name} has {found.size} bytes, not {file.size}")
        old = sorted(
            s for s in file.pending
            if s * SECTOR < found.size and found.sectors.get(s, ZEROS) != file.sectors.get(s, ZEROS)
        )  # fmt: skip
        if old:
            lines.append(f"{name} lost writes of sectors {old[:24]}{' and more' if len(old) > 24 else ''}")
    return lines or ["nothing was lost"]
