"""The reference pipeline in Python threads: one captures, `writers` write (floor 2: imports floor 1 and below).

What the native pipeline does without the interpreter's lock, this one does plainly: it is what the other is tested
against, and what runs where there is no compiler.
"""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections.abc import Sequence
from typing import final

import numpy as np

from pccheck.errors import ClosedError, DeadlineError, MediumError, OptionError, UsageError
from pccheck.format import PAGE
from pccheck.pipeline.fills import FILL_TIMEOUT_S, FillThread, Order
from pccheck.pipeline.gather import check_job, check_mapping, gather
from pccheck.pipeline.interface import Filler, Job
from pccheck.pipeline.job import PROLOGUE, PortableJob
from pccheck.pipeline.portable_fills import PortableFilling
from pccheck.pipeline.schedule import Schedule
from pccheck.state.plan import Layout
from pccheck.storage import forks
from pccheck.storage.buffers import Buffer, BufferPool
from pccheck.storage.digest import xxh3_128
from pccheck.storage.fileio import TRANSIENT
from pccheck.storage.media import address_of
from pccheck.storage.medium import Medium

FIRST_PAUSE_S = 0.001  # before a write is tried again; each next one is four times longer


@final
class PortablePipeline:
    """A pool of buffers, one capturing thread, and writers that serve the oldest job first. Thread-safe.

    Its threads are daemons, so that a stuck disk cannot keep the interpreter from ending; one that is dropped without
    `close` lets its jobs end and then stops by itself.

    Args:
        buffer_bytes: size of the pool, at least two chunks.
        chunk_bytes: largest `chunk_bytes` of a layout, and the size of each buffer.
        writers: threads that digest and write, 1..64.
        writers_per_job: of these, how many may be at one job at once; None = all of them.
        retries: how often a write that fails with EIO, ESTALE or EAGAIN is tried again, 0..100.
        fill_timeout_s: longest that a device may take to copy one chunk.
    """

    name = "portable"

    def __init__(
        self,
        buffer_bytes: int,
        chunk_bytes: int,
        *,
        writers: int = 2,
        writers_per_job: int | None = None,
        retries: int = 3,
        fill_timeout_s: float = FILL_TIMEOUT_S,
    ) -> None:
        if chunk_bytes < PAGE or chunk_bytes % PAGE:
            raise OptionError("chunk_bytes", chunk_bytes, "a multiple of 4096, at least 4096")
        if buffer_bytes < 2 * chunk_bytes:
            raise OptionError("buffer_bytes", buffer_bytes, f"at least two chunks, {2 * chunk_bytes}")
        if not 1 <= writers <= 64:
            raise OptionError("writers", writers, "a whole number from 1 to 64")
        per_job = writers if writers_per_job is None else writers_per_job
        if not 1 <= per_job <= 64:
            raise OptionError("writers_per_job", per_job, "a whole number from 1 to 64")
        if not 0 <= retries <= 100:
            raise OptionError("retries", retries, "a whole number from 0 to 100")
        self._pid = os.getpid()
        self._core = Schedule(BufferPool(buffer_bytes // chunk_bytes, chunk_bytes), retries, per_job)
        self._fills = FillThread(fill_timeout_s)
        # Threads know the core only, so that a dropped pipeline is seen to be dropped.
        self._dropped = weakref.finalize(self, _stop, self._core, self._fills)
        self._dropped.atexit = False
        work = [("pccheck-capture", _capture_jobs), *((f"pccheck-writer-{i}", _write_chunks) for i in range(writers))]
        self._threads = [threading.Thread(target=f, args=(self._core,), name=n, daemon=True) for n, f in work]
        for thread in self._threads:
            thread.start()

    def __repr__(self) -> str:
        core = self._core
        return f"<PortablePipeline {len(core.running)} jobs, {core.pool.free} of {core.pool.buffers} buffers free>"

    @property
    def free_buffers(self) -> int:
        """Buffers of the pool that no job holds."""
        forks.check_owner(self._pid, "a pipeline")
        return self._core.pool.free

    @property
    def buffers(self) -> int:
        """Buffers of the pool in all."""
        return self._core.pool.buffers

    @property
    def memory(self) -> tuple[int, int]:
        """Address and bytes of the buffer pool: what devices copy to."""
        return self._core.pool.memory

    def submit(
        self,
        layout: Layout,
        addresses: Sequence[int],
        keep: object,
        medium: Medium,
        *,
        prologue: bytes | None = None,
        filler: Filler | None = None,
    ) -> Job:
        """Start one job and return at once; see the Pipeline protocol.

        Raises:
            UsageError: addresses do not fit the layout, or its chunks the buffers, or the prologue is no page, or a
                piece with bytes has the address 0, and there is no filler.
            ClosedError: the pipeline was closed.
        """
        return self._fills.submit(filler, lambda order: self._submit(layout, addresses, keep, medium, prologue, order))

    def _submit(
        self,
        layout: Layout,
        addresses: Sequence[int],
        keep: object,
        medium: Medium,
        prologue: bytes | None,
        order: Order | None,
    ) -> PortableJob:
        forks.check_owner(self._pid, "a pipeline")
        core = self._core
        check_job(layout, addresses, prologue, core.pool.buffer_bytes)
        numbers = np.asarray(addresses, np.uint64)
        if order is None and any(layout.pieces[i].length for i in np.flatnonzero(numbers == 0)):
            raise UsageError("a piece with bytes has the address 0, and there is no filler to bring them")
        job = PortableJob(layout, numbers.tolist(), keep, medium, prologue, core.changed, core.fail)
        filling = PortableFilling(core, job) if order is not None else None
        job.take_turn = None if filling is None else filling.take_turn
        with core.changed:
            if core.stopping:
                raise ClosedError("the pipeline was closed before this call")
            core.running.append(job)
            core.to_capture.append(job)
            if order is not None and filling is not None:
                self._fills.put(order, filling)
            core.changed.notify_all()
        return job

    def close(self, timeout_s: float = 60.0) -> None:
        """Let running jobs end, then stop the threads and free the pool.

        Raises DeadlineError after `timeout_s` seconds; new jobs are refused by then, and close may be called again.
        """
        forks.check_owner(self._pid, "a pipeline")
        core, start = self._core, time.monotonic()
        core.stop()
        with core.changed:
            if not core.changed.wait_for(lambda: not core.running, timeout_s):
                waits = "; ".join(map(repr, core.running[:4]))
                raise DeadlineError(f"{len(core.running)} checkpoints to reach storage ({waits})", timeout_s)
        self._fills.close(start, timeout_s)  # before the pool that it gives to devices goes
        for thread in self._threads:
            thread.join(max(0.1, start + timeout_s - time.monotonic()))
            if thread.is_alive():
                raise DeadlineError(f"thread {thread.name} to end", time.monotonic() - start)
        self._dropped.detach()
        core.pool.close()


def _stop(core: Schedule, fills: FillThread) -> None:
    core.stop()
    fills.stop()


def _capture_jobs(core: Schedule) -> None:
    """Capture jobs in the order in which they were submitted; the capturing thread's whole life."""
    while (job := core.next_job()) is not None:
        try:
            mapping = job.medium.mapping() if job.error is None else None
            if job.take_turn is not None:
                job.take_turn()
            elif mapping is None:
                _capture_to_buffers(core, job)
            else:
                _capture_to_mapping(core, job, mapping)
        except BaseException as error:  # whatever it is, the fence must not hang for it
            core.fail(job, error)
        finally:
            core.captured(job)
        del job


def _capture_to_buffers(core: Schedule, job: PortableJob) -> None:
    for index, chunk in enumerate(job.layout.chunks):
        buffer = core.take_buffer(job)
        if buffer is None:
            return
        try:
            gather(job.layout, job.addresses, chunk, buffer.view, buffer.address)
        except BaseException:
            core.pool.give_back(buffer)
            raise
        core.filled(job, index, buffer)


def _capture_to_mapping(core: Schedule, job: PortableJob, mapping: memoryview) -> None:
    """Capture straight to the medium: the store is the write, what is left to the writers is the digest."""
    if not job.layout.chunks or not core.prologue_written(job):
        return
    check_mapping(job.layout, job.medium, mapping)
    start = address_of(mapping)
    for index, chunk in enumerate(job.layout.chunks):
        if job.error is not None:
            return
        target = mapping[chunk.file_offset : chunk.file_offset + chunk.stored_bytes]
        gather(job.layout, job.addresses, chunk, target, start + chunk.file_offset)
        core.filled(job, index, None)


def _write_chunks(core: Schedule) -> None:
    """Digest and write what was captured; a writer's whole life."""
    while (task := core.next_write()) is not None:
        job, index, buffer = task
        digest = b""
        try:
            try:
                if index == PROLOGUE:
                    _write(core, job, memoryview(job.prologue or b""), 0)
                    job.medium.sync()
                else:
                    digest = _write_chunk(core, job, index, buffer)
            finally:
                if buffer is not None:
                    core.pool.give_back(buffer)  # acknowledged, well or badly; before the job can be seen to end
        except BaseException as error:
            core.write_failed(job, error)
        else:
            core.written(job, index, digest)
        del task, job, buffer


def _write_chunk(core: Schedule, job: PortableJob, index: int, buffer: Buffer | None) -> bytes:
    chunk = job.layout.chunks[index]
    if buffer is not None:
        data = buffer.view[: chunk.stored_bytes]
        digest = xxh3_128(data)
        _write(core, job, data, chunk.file_offset)
        return digest
    mapping = job.medium.mapping()
    if mapping is None:
        raise UsageError(f"{job.medium.path} stopped being mapped while it was written")
    return xxh3_128(mapping[chunk.file_offset : chunk.file_offset + chunk.stored_bytes])


def _write(core: Schedule, job: PortableJob, data: memoryview, offset: int) -> None:
    pause_s = FIRST_PAUSE_S
    for attempt in range(core.retries + 1):
        try:
            job.medium.write_from(data, offset)
            return
        except MediumError as error:
            if error.errno not in TRANSIENT or attempt == core.retries or job.error is not None:
                raise
        with core.changed:
            job.retries += 1
        time.sleep(pause_s)
        pause_s *= 4
