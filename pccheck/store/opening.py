"""Opening a store for writing: the lock, CHECK, and what is there (floor 2: imports floors 0, 1, reader).

Nothing is adopted that this process has not made durable itself: a killed writer leaves checkpoints that only the page
cache holds, and a restart that trusts them, frees older ones and then loses power loses everything (seen).
"""

from __future__ import annotations

import errno
import os
import re
import secrets
import socket
import time
import warnings
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from pccheck import format
from pccheck.errors import ContentError, MediumError, StoreTaken
from pccheck.format import Abandoned, Record, SlotState
from pccheck.reading.reader import read_record
from pccheck.storage.medium import Medium
from pccheck.storage.volume import CheckPage, Volume
from pccheck.store.coordination import Coordinator, Held
from pccheck.store.ledger import Ledger


@dataclass(kw_only=True)
class Opened:
    """What opening found and set."""

    check: CheckPage
    store_id: bytes
    abandoned: Abandoned
    ledger: Ledger
    media: dict[int, Medium]
    kept: dict[str, Record]
    incarnation: int
    next_counter: int
    word: int
    damaged: list[tuple[str, str]] = field(default_factory=list)  # file name, reason


def open_for_writing(volume: Volume, coordinator: Coordinator, *, lock_timeout_s: float) -> Opened:
    """Take the lock, rebuild what is damaged, adopt what is whole, and set the word.

    Raises StoreTaken while another process has the lock.
    """
    check = volume.check_page(create=True)
    media: dict[int, Medium] = {}
    try:
        take_lock(volume, check, lock_timeout_s)
        for name in volume.names():
            if (slot := format.parse_slot_name(name)) is not None:
                media[slot] = volume.open(name, write=True)
        damaged: list[tuple[str, str]] = []
        found = {s: r for s, m in media.items() if (r := _record_of(m, format.slot_name(s), damaged))}
        _disown(volume, media, found)
        kept = _read_kept(volume, damaged)
        store_id = _superblock(check, volume, [*found.values(), *kept.values()], bool(media))
        sealed = _sealed(found, store_id, damaged)
        kept = {n: r for n, r in kept.items() if r.store_id == store_id and r.state is SlotState.SEALED}
        pages = tuple(check.read(o, format.PAGE) for o in format.ABANDONED_OFFSETS)
        on_disk = frozenset(r.counter for r in (*sealed.values(), *kept.values()))
        abandoned = format.newest_abandoned((pages[0], pages[1])).pruned(on_disk)
        for slot in sealed:
            media[slot].sync()
        volume.sync_names(format.KEPT_FOLDER)
        volume.sync_names()
        check.sync()  # the superblock before any word: a power loss that kept words alone would look like damage
        ledger = Ledger()
        for slot in media:
            ledger.add(slot)
        for slot, record in sealed.items():
            ledger.adopt(slot, record, abandoned=record.counter in abandoned)
        _warn_of_loss(check, volume, sealed, damaged)
        opening = coordinator.open(_held(check, ledger, found, kept), lock_timeout_s)
        newest = next(iter(ledger.whole()), None)
        word = check.load(format.CHECK_ADDR_OFFSET)  # where nothing is whole, the last sign that something was
        if format.word_counter(word) >= opening.next_counter:
            word = format.NO_WORD  # no counter that was ever given out: a flipped bit
        if newest and newest.record:
            word = newest.record.word
            ledger.publish(newest.slot)
        for offset, value in (
            (format.INCARNATION_OFFSET, opening.incarnation),
            (format.LAST_COUNTER_OFFSET, opening.next_counter - 1),
            (format.CHECK_ADDR_OFFSET, word),
            (format.PEER_ADDR_OFFSET, word if coordinator.world == 1 else check.load(format.PEER_ADDR_OFFSET)),
        ):
            check.store(offset, value)
        check.write(format.HOLDER_OFFSET, format.pack_holder(describe_self()))
        check.sync()
    except BaseException:
        for medium in media.values():
            medium.close()
        check.close()
        volume.close()
        raise
    return Opened(
        check=check, store_id=store_id, abandoned=abandoned, ledger=ledger, media=media, kept=kept,
        incarnation=opening.incarnation, next_counter=opening.next_counter, word=word, damaged=damaged,
    )  # fmt: skip


def _disown(volume: Volume, media: dict[int, Medium], found: dict[int, Record]) -> None:
    """Remove the slots that were being filled: a writer that lost its lock, or never had one, may still write to them.

    It keeps the nameless file; a new one is made for whoever needs a slot. Without this, where locks do not work, such
    a writer put its manifest and record over a newer writer's durable checkpoint (found by the writer tests).
    """
    for slot in [slot for slot, record in found.items() if record.state is SlotState.FILLING]:
        media.pop(slot).close()
        volume.remove(format.slot_name(slot))


def _record_of(medium: Medium, name: str, damaged: list[tuple[str, str]]) -> Record | None:
    try:
        return read_record(medium)
    except (ContentError, MediumError) as error:
        damaged.append((name, str(error)))
        return None


def _read_kept(volume: Volume, damaged: list[tuple[str, str]]) -> dict[str, Record]:
    kept = {}
    for name in volume.names(format.KEPT_FOLDER):
        path = f"{format.KEPT_FOLDER}/{name}"
        medium = volume.open(path)
        try:
            record = _record_of(medium, path, damaged)
        finally:
            medium.close()
        if record is not None:
            kept[path] = record
    return kept


def _superblock(check: CheckPage, volume: Volume, records: list[Record], used: bool) -> bytes:
    """Give the store's id; where CHECK lost it, the id of most records, or a new one, is written back."""
    raw = check.read(format.SUPERBLOCK_OFFSET, format.SECTOR)
    try:
        return format.unpack_superblock(raw)
    except ContentError as error:
        if used or raw.strip(b"\0"):
            text = f"{volume.path}: {error}; CHECK is rebuilt from the {len(records)} record(s) of the slots"
            warnings.warn(text, RuntimeWarning, stacklevel=4)
    ids = Counter(r.store_id for r in records)
    store_id = ids.most_common(1)[0][0] if ids else secrets.token_bytes(16)
    check.write(format.SUPERBLOCK_OFFSET, format.pack_superblock(store_id))
    check.store(format.CHECK_ADDR_OFFSET, format.NO_WORD)  # nothing of what was there can be believed
    return store_id


def _sealed(found: dict[int, Record], store_id: bytes, damaged: list[tuple[str, str]]) -> dict[int, Record]:
    """Give the records that count; one that lies in the wrong file or store is passed over, and said."""
    sealed: dict[int, Record] = {}
    for slot, record in found.items():
        if record.store_id != store_id:
            damaged.append((format.slot_name(slot), "the record is of another store"))
        elif record.slot != slot:
            damaged.append((format.slot_name(slot), f"the record is of slot {record.slot}"))
        elif record.state is SlotState.SEALED:
            sealed[slot] = record
    return sealed


def _warn_of_loss(check: CheckPage, volume: Volume, sealed: dict[int, Record], damaged: list[tuple[str, str]]) -> None:
    """Say that what the word names is gone: no crash leaves that, and from here on the word names something else."""
    word = check.load(format.CHECK_ADDR_OFFSET)
    name, record = format.slot_name(format.word_slot(word)), sealed.get(format.word_slot(word))
    if word == format.NO_WORD or (record is not None and record.word == word) or any(name == n for n, _ in damaged):
        return  # it is there; or a restore will tell that its record is damaged
    counter = format.word_counter(word)
    text = f"{volume.path}: {name} does not hold counter {counter}, which CHECK names: that checkpoint was lost"
    warnings.warn(f"{text}, and no crash does this; look at the storage", RuntimeWarning, stacklevel=5)


def _held(check: CheckPage, ledger: Ledger, found: dict[int, Record], kept: dict[str, Record]) -> Held:
    records = [*found.values(), *kept.values()]
    last = max(check.load(format.LAST_COUNTER_OFFSET), format.word_counter(check.load(format.CHECK_ADDR_OFFSET)))
    incarnation = check.load(format.INCARNATION_OFFSET)
    sane = format.MAX_COUNTER // 2  # a flipped high bit in CHECK must not use up the counters
    return Held(
        incarnation=max([incarnation if incarnation < sane else 0, *(r.incarnation for r in records)]),
        counter=max([last if last < sane else 0, *(r.counter for r in records)]),
        whole=tuple(e.record.identity for e in ledger.whole() if e.record),
    )


# -- the lock and its holder ----------------------------------------------------------------------------------------

_HOLDER = re.compile(r"pid (\d+), parent (\d+), boot (\S+), host (.+)")


def describe_self() -> str:
    """Give the text by which others know the holder of the lock."""
    return f"pid {os.getpid()}, parent {os.getppid()}, boot {_boot_id()}, host {socket.gethostname()}"


def _boot_id() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return "unknown"


def take_lock(volume: Volume, check: CheckPage, timeout_s: float) -> None:
    """Take the store's lock; wait for it only while its recorded holder is dead or unknown."""
    deadline = time.monotonic() + timeout_s
    while not _lock(volume):
        holder = format.unpack_holder(check.read(format.HOLDER_OFFSET, format.SECTOR))
        if holder is not None and _alive(holder):
            raise StoreTaken(volume.path, holder, _hint(holder))
        if time.monotonic() >= deadline:
            hint = "Its recorded holder is dead, but a process that inherited its files still runs: end that one."
            raise StoreTaken(volume.path, holder or "a process that did not leave its name", hint)
        time.sleep(0.02)


def _lock(volume: Volume) -> bool:
    try:
        return volume.lock()
    except MediumError as error:
        if error.errno not in (errno.ENOTSUP, errno.ENOLCK, errno.ENOSYS):
            raise
        text = f"{error}; a second writer is noticed only when it has opened the store: its opening fences this one out"
        warnings.warn(text, RuntimeWarning, stacklevel=5)
        return True


def _alive(holder: str) -> bool:
    match = _HOLDER.fullmatch(holder)
    if not match or match[3] != _boot_id() or match[4] != socket.gethostname():
        return match is not None  # on another host or boot: cannot be told from here, and its lock is held
    try:
        os.kill(int(match[1]), 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _hint(holder: str) -> str:
    match = _HOLDER.fullmatch(holder)
    if match and int(match[1]) == os.getpid():
        return (
            "That is this very process: it has a Checkpointer open there. close() that one first "
            "(a `with` block does so; one that was dropped without it stays open until the process ends)."
        )
    if match and int(match[2]) == os.getppid():
        return (
            "It was started by the same parent as this process, as ranks of one job are: "
            "give each rank a directory of its own, or pass coordinator= (several ranks share one store root)."
        )
    return ""
