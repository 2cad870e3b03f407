"""The commit: the one order in which a checkpoint becomes durable (floor 2: imports floors 0 and 1, store, save).

filling          record "filling", written and synced before the first payload byte (by the pipeline)
written          ALL chunks written, and the manifest behind them
data-synced      fdatasync: data and manifest are durable before anything names them
record-synced    record "sealed", fdatasync: one sector, so it is there or it is not
linked           in a store of links: the file's name in its user's folder
link-synced      that folder, synced: the link is the publication
published        the word, by compare-and-swap; in a store of links it names nothing
word-synced      the page of the word, synced: with one rank, only now may what it named before be overwritten
reported         this rank has said that it holds the checkpoint
agreed           all ranks hold it, and PEER_ADDR says so, synced: only now may what that named before be overwritten
released         what retention frees; in a store of links that is done when `durable` has resolved
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import replace

import xxhash

from pccheck import events
from pccheck.errors import DeadlineError, MediumError, PccheckError, StoreGoneError, StoreTaken
from pccheck.format import PAYLOAD_OFFSET, Record, SlotState
from pccheck.pipeline.interface import Job
from pccheck.ranks.agreement import Agreement
from pccheck.saving.linkpath import await_path
from pccheck.saving.save import Outcome, Underway
from pccheck.store.store import Store

Emit = Callable[[events.Event], None]
At = Callable[[str], None]


def commit(work: Underway, store: Store, agreement: Agreement, emit: Emit, at: At, agree_timeout_s: float) -> Outcome:
    """Take one submitted save to its end; any exception means that it failed and nothing older was touched.

    `at` is called with the name of each point that was passed: tests crash there.
    """
    about = {"step": work.save.step, "counter": work.save.counter}
    _await(work, work.job.wait_captured, "its capture")
    work.save.note_captured()
    at("captured")
    emit(events.Captured(**about, seconds=work.seconds(), pool_wait_s=work.job.stats().pool_wait_s))
    _await(work, work.job.wait_written, "its chunks to be written")
    link = await_path(work)
    sealed, manifest = _seal(work, link)
    store.slots.write_manifest(sealed, manifest)
    at("written")
    store.slots[sealed.slot].sync()
    at("data-synced")
    payload_bytes, retries = sealed.payload_bytes, work.job.stats().retries
    emit(events.Persisted(**about, payload_bytes=payload_bytes, seconds=work.seconds(), retries=retries))
    store.slots.write_record(sealed)
    at("sealed")
    store.slots[sealed.slot].sync()
    at("record-synced")
    if work.pin:  # before it counts as sealed: from then on its slot may be given away, if a newer one was published
        store.history.keep_record(sealed)
        at("pinned")
    if link is not None:  # likewise
        store.slots.link(sealed, link)
        at("linked")
        store.slots.sync_link(link)
        at("link-synced")
    store.seal(sealed)
    emit(events.Sealed(**about, slot=sealed.slot, seconds=work.seconds()))
    won = store.publish(sealed)
    at("published")
    store.sync_word(sealed)
    at("word-synced")
    agreement.report(sealed.counter, sealed.step, True, plan=work.prepared.plan_digest)
    at("reported")
    newest = store.settling.settle(sealed, agree_timeout_s)
    won = won if agreement.world == 1 else sealed.counter >= newest
    at("agreed")
    store.release(sealed.counter if won else 0)
    at("released")
    ended = events.Published if won else events.Superseded
    emit(ended(**about, slot=sealed.slot, seconds=work.seconds()))
    return "committed" if won else "superseded"


def take_back(work: Underway, error: BaseException, store: Store, agreement: Agreement, emit: Emit) -> None:
    """Clean up after a commit that raised `error`: the slot is free again, or never used again.

    Unless it was said that this rank holds the checkpoint: that word stands, and the slot is held until it is settled.
    """
    stuck = isinstance(error, DeadlineError)  # a thread may still be inside a write to this file
    unsynced = isinstance(error, MediumError) and error.operation == "sync"  # its content is unknown from here on
    if stuck:
        work.job.cancel()
    store.fail(
        work.record,
        quarantine=stuck or unsynced,
        reachable=not stuck and not isinstance(error, (StoreTaken, StoreGoneError)),
        ended=lambda: has_ended(work.job),
    )
    if agreement.report(work.save.counter, work.save.step, False, reason=why(error)):
        try:
            store.history.withdraw(work.save.counter)  # sealed, but not reported: no rank may ever restore it
        except PccheckError as second:
            error.add_note(f"and its record could not be withdrawn: {second}")
    emit(events.Failed(step=work.save.step, counter=work.save.counter, error=error))


def why(error: BaseException) -> str:
    """Give what other ranks are told of an error, at most 500 characters."""
    return f"{type(error).__name__}: {error}"[:500]


def has_ended(job: Job) -> bool:
    """Tell whether nobody writes for a job any more."""
    try:
        return job.wait_written(0)
    except PccheckError:
        return True  # failed or cancelled, with nothing running any more


def _seal(work: Underway, link: str | None) -> tuple[Record, bytes]:
    record, prepared = work.record, work.prepared
    manifest = prepared.encode_manifest(
        counter=record.counter, incarnation=record.incarnation, rank=record.rank, world=record.world,
        base=record.base, digests=work.job.digests(), link=link,
    )  # fmt: skip
    sealed = replace(
        record, state=SlotState.SEALED, payload_bytes=prepared.payload_bytes,
        manifest_offset=PAYLOAD_OFFSET + prepared.payload_bytes, manifest_bytes=len(manifest),
        manifest_digest=xxhash.xxh3_128_digest(manifest), time_ns=time.time_ns(),
        link_digest=record.link_digest if link is None else xxhash.xxh3_128_digest(os.fsencode(link)),
    )  # fmt: skip
    return sealed, manifest


def _await(work: Underway, wait: Callable[[float | None], bool], what: str) -> None:
    if not wait(work.left_s()):
        raise DeadlineError(f"step {work.save.step}, {what}", work.seconds())
