"""The pipeline of a Checkpointer: made by the first save, as large as it asks for (floor 2: imports below)."""

from __future__ import annotations

import errno
from collections.abc import Collection, Iterator
from typing import final

from pccheck.devices import Device
from pccheck.errors import DeadlineError, PoolMemoryError
from pccheck.options import Options
from pccheck.pipeline.choose import make_pipeline
from pccheck.pipeline.interface import Job, Pipeline
from pccheck.saving import sizing
from pccheck.storage.medium import Medium

REGISTER_BYTES = 256 << 20  # drivers were seen to refuse 2 GiB at once


@final
class Pipelines:
    """One pipeline at a time, and the devices that know its memory. Called by one thread at a time.

    Args:
        options: of the Checkpointer.
    """

    def __init__(self, options: Options) -> None:
        self._options = options
        self.current: Pipeline | None = None
        self._pool_bytes = self._sized_for = 0
        self._devices: list[Device] = []  # that know the memory of the current pipeline
        self._filled: list[Job] = []  # jobs for which devices may still copy to it

    def serve(self, payload_bytes: int, medium: Medium, devices: Collection[Device]) -> Pipeline:
        """Give the pipeline for a state of this size; the first makes it, and a much larger one makes a larger one.

        Raises DeadlineError where the smaller one does not end, PoolMemoryError where there is no memory for a pool.
        """
        if self.current is None or payload_bytes > self._sized_for:
            self._fit(payload_bytes, medium)
        assert self.current is not None
        for device in devices:
            if device not in self._devices:
                for address, nbytes in _runs(*self.current.memory):
                    device.register(address, nbytes)
                self._devices.append(device)
        return self.current

    def _fit(self, payload_bytes: int, medium: Medium) -> None:
        o = self._options
        mapped = medium.mapping() is not None  # captured straight into the mapping: the pool is not used
        wanted = sizing.pool_bytes(o.buffer_bytes, payload_bytes, o.in_flight, o.chunk_bytes)
        wanted = 2 * o.chunk_bytes if mapped else wanted
        if self.current is None or wanted > 2 * self._pool_bytes:
            self.close(o.write_timeout_s)
            name = o.pipeline if mapped or medium.fileno() is not None else "portable"
            try:
                self.current = make_pipeline(name, wanted, o.chunk_bytes, o.writers, o.writers_per_checkpoint)
            except (MemoryError, OSError) as error:
                if isinstance(error, OSError) and error.errno != errno.ENOMEM:
                    raise
                raise PoolMemoryError(wanted, sizing.available_bytes()) from error
            self._pool_bytes = wanted
        self._sized_for = payload_bytes

    def filled(self, job: Job, devices: Collection[Device]) -> None:
        """Take note of a job for which these devices copy to the pool."""
        if devices:
            self._filled = [j for j in self._filled if not j.wait_captured(0)] + [job]

    def close(self, timeout_s: float) -> None:
        """Let running jobs end, and close the pipeline; DeadlineError after `timeout_s`."""
        if self.current is None:
            return
        self._unregister(timeout_s)
        self.current.close(timeout_s)
        self.current, self._pool_bytes = None, 0  # there may be no memory for the next

    def _unregister(self, timeout_s: float) -> None:
        """Have the devices forget the memory before it is unmapped, and after the last copy to it."""
        assert self.current is not None
        for job in self._filled:
            if not job.wait_captured(timeout_s):
                raise DeadlineError(f"devices to copy to the pool for {job!r}", timeout_s)
        self._filled = []
        while self._devices:
            for address, nbytes in _runs(*self.current.memory):
                self._devices[-1].unregister(address, nbytes)
            self._devices.pop()


def _runs(address: int, nbytes: int) -> Iterator[tuple[int, int]]:
    for start in range(0, nbytes, REGISTER_BYTES):
        yield address + start, min(REGISTER_BYTES, nbytes - start)
