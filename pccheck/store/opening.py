"""Opening a store for writing: the lock, CHECK, and what all ranks hold (floor 2: imports floors 0, 1, reader, store).

Nothing is adopted that this process has not made durable itself: a killed writer leaves checkpoints that only the page
cache holds, and a restart that trusts them, frees older ones and then loses power loses everything (seen).
"""

from __future__ import annotations

import secrets
import warnings
from collections import Counter
from dataclasses import dataclass, field, replace

import msgspec

from pccheck import format
from pccheck.errors import ContentError, FormatError, MediumError
from pccheck.format import Abandoned, Record, SlotState
from pccheck.holders import describe_self
from pccheck.ranks.agreement import Agreement
from pccheck.ranks.worlds import FLAT, Holding, Opening, Sealed, Seen, decide
from pccheck.reading.reader import read_record
from pccheck.storage.medium import Medium
from pccheck.storage.volume import CheckPage, Volume
from pccheck.store.check import believed, mend_abandoned, write_abandoned
from pccheck.store.disowning import assert_of_this_kind, disown
from pccheck.store.ledger import Ledger
from pccheck.store.locking import fence_out, take_lock
from pccheck.store.neighbours import Neighbours
from pccheck.store.slots import record_page


@dataclass(kw_only=True)
class Opened:
    """What opening found and set."""

    check: CheckPage
    store_id: bytes
    abandoned: Abandoned
    ledger: Ledger
    media: dict[int, Medium]
    kept: dict[str, Record]
    opening: Opening
    word: int
    agreed: int
    damaged: list[tuple[str, str]] = field(default_factory=list)  # file name, reason


@dataclass(kw_only=True)
class _Found:
    """What lies in a store whose lock is held."""

    check: CheckPage
    media: dict[int, Medium]
    store_id: bytes = b""
    abandoned: Abandoned = field(default_factory=Abandoned)
    sealed: dict[int, Record] = field(default_factory=dict)
    kept: dict[str, Record] = field(default_factory=dict)
    incarnation: int = 0
    counter: int = 0
    damaged: list[tuple[str, str]] = field(default_factory=list)


def open_for_writing(
    volume: Volume, agreement: Agreement, neighbours: Neighbours, *,
    lock_timeout_s: float, agree_timeout_s: float, linking: bool = False,
) -> Opened:  # fmt: skip
    """Take the lock, rebuild what is damaged, agree with all ranks, adopt what all of them hold, and set the words.

    A store of links (`linking`) adopts nothing: of what was saved there whatever has a link lives by that alone.

    Raises:
        UsageError: the store is one of links, and is not to be, or holds checkpoints, and is to be one of links.
        StoreTaken: another process has the lock, of this store or of one beside it.
        FormatError: the folder is one of another rank, moved or copied here.
        RanksError, NoValidCheckpointError: as `worlds.decide`; or ranks are missing, restarted, or could not open.
    """
    found = _Found(check=volume.check_page(create=True), media={})
    try:
        _look(volume, found, lock_timeout_s, linking)
        _assert_of_this_rank(volume.path, found, agreement)
        neighbours.take(lock_timeout_s)
        seen = Seen(own=_holding(found, agreement), others=neighbours.look())
        opening = _agree(agreement, seen, volume.path, agree_timeout_s)
        if agreement.world > 1:
            _withdraw(volume, found, opening)
        opened = _adopt(volume, found, opening, agreement, linking)
        neighbours.fence(opening.incarnation)
        # Before anything is saved: a store that was never opened, while others hold checkpoints, is a store that was
        # lost (see worlds), and what another rank has not withdrawn yet may be of the next counter.
        agreement.start(opening.next_counter, opening.newest.counter if opening.newest else 0)
        agreement.exchange("ready", b"", agree_timeout_s)
    except BaseException:
        for medium in found.media.values():
            medium.close()
        found.check.close()
        volume.close()
        raise
    return opened


def _look(volume: Volume, found: _Found, lock_timeout_s: float, linking: bool) -> None:
    """Take the lock, see what is there, and make it durable; a CHECK that was lost is rebuilt."""
    check, media, damaged = found.check, found.media, found.damaged
    take_lock(volume, check, lock_timeout_s)
    fence_out(check)
    for name in volume.names():
        if (slot := format.parse_slot_name(name)) is not None:
            media[slot] = volume.open(name, write=True)
    records = {s: r for s, m in media.items() if (r := _record_of(m, format.slot_name(s), damaged))}
    kept = _read_kept(volume, damaged)
    assert_of_this_kind(volume.path, check, records, kept, damaged, linking)
    disown(volume, check, media, records, damaged, linking)
    store_id, found.abandoned = _rebuild(check, volume, [*records.values(), *kept.values()], bool(media))
    found.store_id = store_id
    found.sealed = _sealed({s: r for s, r in records.items() if s in media}, store_id, damaged)
    found.kept = {n: r for n, r in kept.items() if r.store_id == store_id and r.state is SlotState.SEALED}
    for slot in found.sealed:
        media[slot].sync()
    volume.sync_names(format.KEPT_FOLDER)
    volume.sync_names()
    check.sync()  # the superblock before any word: a power loss that kept words alone would look like damage
    _warn_of_loss(check, volume, found.sealed, damaged)
    found.incarnation, found.counter = _last(check, [*records.values(), *kept.values()])


def _assert_of_this_rank(path: str, found: _Found, agreement: Agreement) -> None:
    """Raise FormatError in the folder of another rank.

    As the parts of this rank its records would count to the opening, and to no restore, which starts from scratch then.
    """
    for record in (*found.sealed.values(), *found.kept.values()):
        if agreement.world > 1 and (record.world == 1 or record.rank != agreement.rank):
            raise FormatError(
                f"{path} holds step {record.step} of rank {record.rank} of {record.world}, but it is to be the store "
                f"of rank {agreement.rank}: its folder was renamed, swapped or copied. Nothing was changed. Put each "
                "folder back where it was, or use another directory to start afresh."
            )


def _holding(found: _Found, agreement: Agreement) -> Holding:
    """Tell what this store holds, as all ranks are told."""
    flat = agreement.world == 1
    records = {r.identity: r for r in (*found.sealed.values(), *found.kept.values())}
    return Holding(
        rank=FLAT if flat else agreement.rank, store_id=found.store_id.hex(),
        sealed=tuple(Sealed(*r.identity, 1 if flat else r.world) for r in records.values()),
        abandoned=found.abandoned.ranges, incarnation=found.incarnation, counter=found.counter,
        agreed=format.word_counter(found.check.load(format.PEER_ADDR_OFFSET)),
    )  # fmt: skip


def _agree(agreement: Agreement, seen: Seen, where: str, timeout_s: float) -> Opening:
    agreement.join(timeout_s)
    said = agreement.exchange("open", msgspec.json.encode(seen), timeout_s)
    return decide([msgspec.json.decode(one, type=Seen) for one in said], where)


def _withdraw(volume: Volume, found: _Found, opening: Opening) -> None:
    """Take back, durably, what some rank does not hold: nothing may ever be put together from two lives of a job."""
    newest = opening.newest.counter if opening.newest else 0
    for slot, record in list(found.sealed.items()):
        if not opening.holds(Sealed(*record.identity, record.world)):
            page = record_page(replace(record, state=SlotState.WITHDRAWN))
            found.media[slot].write_from(memoryview(page), 0)
            found.media[slot].sync()
            del found.sealed[slot]
    for name, record in list(found.kept.items()):
        # An older one that other ranks have let go of may be what its user pinned: it stays, and is no candidate.
        if record.counter > newest and not opening.holds(Sealed(*record.identity, record.world)):
            volume.remove(name)
            volume.sync_names(format.KEPT_FOLDER)
            del found.kept[name]


def _adopt(volume: Volume, found: _Found, opening: Opening, agreement: Agreement, linking: bool) -> Opened:
    """Enter what counts in a ledger, and set the words."""
    check, alone = found.check, agreement.world == 1
    abandoned = _abandoned(found, opening)
    ledger = Ledger()
    for slot in found.media:
        ledger.add(slot)
    for slot, record in found.sealed.items():
        ledger.adopt(slot, record, abandoned=record.counter in abandoned)
    newest = next(iter(ledger.whole()), None)
    # With one rank, where nothing is whole, the word is the last sign that something was.
    word = check.load(format.CHECK_ADDR_OFFSET) if alone else format.NO_WORD
    if format.word_counter(word) >= opening.next_counter:
        word = format.NO_WORD  # no counter that was ever given out: a flipped bit
    if newest and newest.record:
        word = newest.record.word
        ledger.publish(newest.slot)
    for offset, value in (
        (format.INCARNATION_OFFSET, opening.incarnation),
        (format.LAST_COUNTER_OFFSET, opening.next_counter - 1),
        (format.CHECK_ADDR_OFFSET, word),
        (format.PEER_ADDR_OFFSET, word),  # what was adopted is on all ranks
        (format.LINKS_OFFSET, int(linking)),
    ):
        check.store(offset, value)
    check.write(format.HOLDER_OFFSET, format.pack_holder(describe_self()))
    check.sync()
    return Opened(
        check=check, store_id=found.store_id, abandoned=abandoned, ledger=ledger, media=found.media, kept=found.kept,
        opening=opening, word=word, agreed=format.word_counter(word), damaged=found.damaged,
    )  # fmt: skip


def _abandoned(found: _Found, opening: Opening) -> Abandoned:
    """Give what roll-backs left behind, as far as it is still there; what other ranks know of it is written here, too.

    A roll-back that a crash interrupted has been noted by some ranks only: all of them count it as done.
    """
    counters = frozenset(r.counter for r in (*found.sealed.values(), *found.kept.values()))
    counters |= {s.counter for s in opening.held}
    known = found.abandoned.pruned(counters)
    if opening.abandoned == found.abandoned.ranges:
        return known
    every = Abandoned(sequence=found.abandoned.sequence + 1, ranges=opening.abandoned).pruned(counters)
    write_abandoned(found.check, every)
    return every


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


def _rebuild(check: CheckPage, volume: Volume, records: list[Record], used: bool) -> tuple[bytes, Abandoned]:
    """Give the store's id and what roll-backs left behind; what CHECK lost of them is written back, and said."""
    raw = check.read(format.SUPERBLOCK_OFFSET, format.SECTOR)
    said = []
    try:
        store_id = format.unpack_superblock(raw)
    except ContentError as error:
        if used or raw.strip(b"\0"):
            what = error if raw.strip(b"\0") else "CHECK is missing or empty"  # it was made before it is looked at
            said.append(f"{what}; CHECK is rebuilt from the {len(records)} record(s) of the slots")
        ids = Counter(r.store_id for r in records)
        store_id = ids.most_common(1)[0][0] if ids else secrets.token_bytes(16)
        check.write(format.SUPERBLOCK_OFFSET, format.pack_superblock(store_id))
        for offset in (format.CHECK_ADDR_OFFSET, format.PEER_ADDR_OFFSET):
            check.store(offset, format.NO_WORD)  # nothing of what was there can be believed
    abandoned, lost = mend_abandoned(check)
    if lost:
        said.append(
            "both copies of the abandoned ranges in CHECK are damaged and are made anew: roll-backs are forgotten"
        )
    if said:
        warnings.warn(f"{volume.path}: {'; '.join(said)}", RuntimeWarning, stacklevel=5)
    return store_id, abandoned


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


def _last(check: CheckPage, records: list[Record]) -> tuple[int, int]:
    """Give the greatest incarnation and counter that were ever used here."""
    last = max(check.load(format.LAST_COUNTER_OFFSET), format.word_counter(check.load(format.CHECK_ADDR_OFFSET)))
    return (
        max([believed(check.load(format.INCARNATION_OFFSET)), *(r.incarnation for r in records)]),
        max([believed(last), *(r.counter for r in records)]),
    )
