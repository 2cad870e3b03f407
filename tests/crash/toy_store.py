"""A store of two files with no more than the commit order, and faults to plant: what the explorer itself is tested on.

A file's first sector is its record: state, counter, step, length, digest of the payload. Payload from 4096 on.
"""

from __future__ import annotations

import pickle  # bytes of this process only: the toy stores whole states with it
import struct
import zlib
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from pccheck.testing.simulated import SimulatedMedium, SimulatedVolume
from pccheck.testing.system import System

RECORD = struct.Struct("<4sIQQQI")  # magic, state, counter, step, length, digest; then a digest of these
FILLING, SEALED = 1, 2
WORD = 4096


@dataclass(frozen=True)
class Record:
    state: int
    counter: int
    step: int
    length: int = 0
    digest: int = 0

    def pack(self) -> bytes:
        body = RECORD.pack(b"TOY1", self.state, self.counter, self.step, self.length, self.digest)
        return (body + struct.pack("<I", zlib.crc32(body))).ljust(512, b"\0")

    @classmethod
    def unpack(cls, data: bytes) -> Record | None:
        body, tail = data[: RECORD.size], data[RECORD.size : RECORD.size + 4]
        if body[:4] != b"TOY1" or struct.pack("<I", zlib.crc32(body)) != tail:
            return None
        return cls(*RECORD.unpack(body)[1:])


@dataclass
class ToySave:
    counter: int
    durable: Future[int] = field(default_factory=Future)


@dataclass
class Restored:
    counter: int
    step: int
    state: Any


class ToyStore:
    """Saves are synchronous: each syncs, and then the other file may be overwritten."""

    def __init__(self, volume: SimulatedVolume, *, faults: frozenset[str]) -> None:
        assert volume.lock()
        self.volume, self.faults = volume, faults
        self.check = volume.check_page(create=True)
        self.media: list[SimulatedMedium] = []
        for name in ("a", "b"):
            there = name in volume.names()
            self.media.append(volume.open(name, write=True) if there else volume.create(name, 4096))
        for medium in self.media:
            if self._record(medium):
                medium.sync()
        volume.sync_names()
        self.check.store(WORD, max((r.counter for m in self.media if (r := self._whole(m))), default=0))
        self.check.sync()

    def save(self, step: int, state: Any) -> ToySave:
        records = [self._record(m) for m in self.media]
        whole = [self._whole(m) for m in self.media]
        save = ToySave(1 + max((r.counter for r in records if r), default=0))
        newest = max(range(2), key=lambda i: (whole[i] or Record(0, 0, 0)).counter)
        medium = self.media[newest if "overwrites the newest" in self.faults else 1 - newest]
        data = pickle.dumps(state)
        self._write(medium, Record(FILLING, save.counter, step).pack(), 0)
        self.volume.point("filling")
        medium.sync()
        self._write(medium, data, 4096)
        if "record before data" not in self.faults:
            self.volume.point("data")
            medium.sync()
        sealed = Record(SEALED, save.counter, step, len(data), zlib.crc32(data))
        self._write(medium, sealed.pack(), 0)
        self.volume.point("record")
        if "durable before sync" not in self.faults:
            medium.sync()
        self.check.store(WORD, save.counter)
        self.volume.point("word")
        self.check.sync()
        save.durable.set_result(step)
        return save

    def restore(self, step: int | None = None) -> Restored | None:
        whole = [(r.counter, r, m) for m in self.media if (r := self._whole(m)) is not None]
        if not whole:
            return None
        _, record, medium = max(whole, key=lambda w: w[0])
        return Restored(record.counter, record.step, pickle.loads(self._payload(medium, record)))

    def _write(self, medium: SimulatedMedium, data: bytes, offset: int) -> None:
        medium.write_from(memoryview(data), offset)

    def _record(self, medium: SimulatedMedium) -> Record | None:
        if medium.size() < 512:
            return None
        data = bytearray(512)
        medium.read_into(memoryview(data), 0)
        return Record.unpack(bytes(data))

    def _payload(self, medium: SimulatedMedium, record: Record) -> bytes:
        data = bytearray(record.length)
        medium.read_into(memoryview(data), 4096)
        return bytes(data)

    def _whole(self, medium: SimulatedMedium) -> Record | None:
        record = self._record(medium)
        if record is None or record.state != SEALED or 4096 + record.length > medium.size():
            return None
        if "trusts records" not in self.faults and zlib.crc32(self._payload(medium, record)) != record.digest:
            return None
        return record


class ToySystem(System):
    def __init__(self, *faults: str) -> None:
        self.faults = frozenset(faults)

    @contextmanager
    def open(self, volume: SimulatedVolume) -> Iterator[ToyStore]:
        yield ToyStore(volume, faults=self.faults)

    def audit(self, volume: SimulatedVolume) -> list[str]:
        faults, counters = [], set()
        for name in set(volume.names()) & {"a", "b"}:
            medium = volume.open(name)
            sector = bytearray(512)
            if medium.size() >= 512:
                medium.read_into(memoryview(sector), 0)
            record = Record.unpack(bytes(sector))
            if record is None or record.state != SEALED:
                continue
            data = bytearray(record.length)
            if 4096 + record.length <= medium.size():
                medium.read_into(memoryview(data), 4096)
            if zlib.crc32(bytes(data)) != record.digest:
                faults.append(f"I2: {name} is sealed, but its payload fails")
            counters.add(record.counter)
        word = self._word(volume)
        return faults + ([f"I3: the word names {word}, there are {counters}"] if word and word not in counters else [])

    def _word(self, volume: SimulatedVolume) -> int:
        if "CHECK" not in volume.names() or volume.open("CHECK").size() < 4104:
            return 0
        return volume.check_page(create=False).load(WORD)

    def extents(self, name: str, head: bytes, size: int) -> Sequence[tuple[int, int]]:
        if name == "CHECK":
            return ((0, size),)
        record = Record.unpack(head)
        return ((4096, 4096 + record.length),) if record and record.state == SEALED else ()
