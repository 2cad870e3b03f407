"""Who does what next in the portable pipeline (floor 2: imports floor 1 and below, and the job).

Decides under its lock and lets the threads act outside it.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from typing import final

from pccheck.errors import DeadlineError
from pccheck.pipeline.fills import NO_BUFFERS
from pccheck.pipeline.job import PROLOGUE, PortableJob
from pccheck.storage.buffers import Buffer, BufferPool
from pccheck.storage.digest import DIGEST_BYTES

IDLE_S = 60.0  # threads look around this often even if nobody calls them


@final
class Schedule:
    """What the threads of one pipeline share; all of it guarded by `changed` but the pool, which guards itself.

    Args:
        pool: the buffers of all jobs.
        retries: how often a write is tried again.
        writers_per_job: writers that may be at one job at once.
    """

    def __init__(self, pool: BufferPool, retries: int, writers_per_job: int) -> None:
        self.pool = pool
        self.writers_per_job = writers_per_job
        self.retries = retries
        self.changed = threading.Condition()
        self.running: list[PortableJob] = []  # not yet ended, the oldest first
        self.to_capture: deque[PortableJob] = deque()
        self.stopping = False
        self.lost = 0  # buffers that devices may still write to
        self._pid = os.getpid()

    def stop(self) -> None:
        """Have the threads end when no job is left."""
        if os.getpid() != self._pid:
            return  # a forked child drops its copy: the condition may be held by a thread that it has not got
        with self.changed:
            self.stopping = True
            self.changed.notify_all()

    # -- capturing ---------------------------------------------------------------------------------------------------

    def next_job(self) -> PortableJob | None:
        """Wait for the next job to capture; None = stop."""
        with self.changed:
            while not self.to_capture:
                if self.stopping:
                    return None
                self.changed.wait(IDLE_S)
            return self.to_capture.popleft()

    def prologue_written(self, job: PortableJob) -> bool:
        """Wait until the job's payload may be written; False = it has failed."""
        with self.changed:
            while not (job.prologue_written or job.error):
                self.changed.wait(IDLE_S)
            return job.error is None

    def take_buffer(self, job: PortableJob, timeout_s: float | None = None) -> Buffer | None:
        """Wait for a free buffer; None = the job has failed, or time is up."""
        start = time.monotonic()
        buffer = None
        while buffer is None and job.error is None:
            if self.lost == self.pool.buffers:  # waiting would be in vain
                self.fail(job, DeadlineError(NO_BUFFERS, 0.0))
                break
            buffer = self.pool.take(
                IDLE_S if timeout_s is None else timeout_s,
                lambda: job.error is not None or self.lost == self.pool.buffers,
            )
            if timeout_s is not None:
                break
        with self.changed:
            job.pool_wait_s += time.monotonic() - start
        return buffer

    def filled(self, job: PortableJob, index: int, buffer: Buffer | None) -> None:
        """Hand a captured chunk to the writers; the buffer of a job that has failed meanwhile goes back."""
        with self.changed:
            if job.error is None:
                job.out_of_order.add(index)
                while job.captured_first in job.out_of_order:
                    job.out_of_order.remove(job.captured_first)
                    job.captured_first += 1
                job.filled.append((index, buffer))
                self.changed.notify_all()
            elif buffer is not None:
                self.pool.give_back(buffer)

    def captured(self, job: PortableJob) -> None:
        """Let go of the caller's memory."""
        job.keep, job.addresses, job.take_turn = None, (), None
        with self.changed:
            if job.captured_at is None:
                job.captured_at = time.monotonic()
            self._settle(job)

    # -- writing -----------------------------------------------------------------------------------------------------

    def next_write(self) -> tuple[PortableJob, int, Buffer | None] | None:
        """Wait for the next thing to write, of the oldest job that has one; None = stop."""
        with self.changed:
            while True:
                for job in self.running:
                    if job.error is not None:
                        continue
                    if not job.prologue_taken:
                        job.prologue_taken = True
                        job.busy += 1
                        return job, PROLOGUE, None
                    if job.prologue_written and job.filled and job.busy < self.writers_per_job:
                        job.busy += 1
                        return job, *job.filled.popleft()
                if self.stopping and not self.running:
                    return None
                self.changed.wait(IDLE_S)

    def written(self, job: PortableJob, index: int, digest: bytes) -> None:
        """Take note that a chunk or the prologue was written."""
        with self.changed:
            job.busy -= 1
            job.left -= 1
            if job.filled:
                self.changed.notify_all()  # this writer may turn to an older job
            if index == PROLOGUE:
                job.prologue_written = True
            else:
                job.digest_bytes[index * DIGEST_BYTES : (index + 1) * DIGEST_BYTES] = digest
            self._settle(job)

    def write_failed(self, job: PortableJob, error: BaseException) -> None:
        """Take note that a write failed for good."""
        with self.changed:
            job.busy -= 1
        self.fail(job, error)

    # -- ends --------------------------------------------------------------------------------------------------------

    def fail(self, job: PortableJob, error: BaseException) -> None:
        """Fail a job that has not ended; the first error stays. Its buffers that nobody writes go back at once."""
        keep = None
        with self.changed:
            if job.ended_at is None and job.error is None:
                job.error = error
                if job in self.to_capture:  # it must not wait for captures before it
                    self.to_capture.remove(job)
                    job.captured_at = time.monotonic()
                    keep, job.keep, job.addresses = job.keep, None, ()
                for _, buffer in job.filled:
                    if buffer is not None:
                        self.pool.give_back(buffer)
                job.filled.clear()
            self._settle(job)
        del keep  # outside the lock: what the caller's objects do when they are freed is theirs
        self.pool.wake()  # its capture may wait for a buffer

    def _settle(self, job: PortableJob) -> None:
        done = job.left == 0 or job.error is not None
        if job.ended_at is None and job.captured_at is not None and not job.busy and done:
            job.ended_at = time.monotonic()
            self.running.remove(job)
        self.changed.notify_all()
