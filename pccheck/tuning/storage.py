"""How long checkpoints take on storage that limits each stream and all together (floor 0: imports tuning.*)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

from pccheck.errors import OptionError
from pccheck.tuning.domain import at_least, not_negative, positive, whole
from pccheck.tuning.intervals import best_in_flight


@dataclass(frozen=True)
class StorageModel:
    """Storage that takes each checkpoint at most at one rate, and all that are under way together at another.

    It is shared evenly (processor sharing), so that with N under way each takes T_w(N) = max(m / b1, N m / B) and what
    committing adds (the model that PCcheck's measurements, ASPLOS 2025, figure 12, follow).

    Args:
        stream_bytes_per_s: of one checkpoint alone (b1), greater than 0.
        total_bytes_per_s: of all together (B), at least as much.
        commit_s: seconds that each takes however small it is (syncs, record, publishing), 0 or more.

    Raises OptionError for a value out of its range. Immutable: any thread may use it.
    """

    stream_bytes_per_s: float
    total_bytes_per_s: float
    commit_s: float = 0.0

    def __post_init__(self) -> None:
        stream = positive("stream_bytes_per_s", self.stream_bytes_per_s, what="bytes per second")
        total = positive("total_bytes_per_s", self.total_bytes_per_s, what="bytes per second")
        not_negative("commit_s", self.commit_s)
        if total < stream:
            allowed = f"bytes per second, no less than stream_bytes_per_s ({stream:g})"
            raise OptionError("total_bytes_per_s", self.total_bytes_per_s, allowed)

    def durable_s(self, state_bytes: int, in_flight: int = 1) -> float:
        """Give the seconds until a checkpoint of so many bytes is durable, the worst of `in_flight` begun at once.

        With fewer under way than `saturating_in_flight` each is as fast as alone.
        """
        m, n = whole("state_bytes", state_bytes, 0), whole("in_flight", in_flight)
        return max(m / self.stream_bytes_per_s, n * m / self.total_bytes_per_s) + self.commit_s

    @property
    def saturating_in_flight(self) -> int:
        """Give the fewest streams that fill the storage, ceil(B / b1): more gain nothing, and each takes longer."""
        return at_least(self.total_bytes_per_s / self.stream_bytes_per_s)

    def best_in_flight(self, state_bytes: int, max_in_flight: int, *, worth: float = 0.01) -> int:
        """Give the smallest number in flight, up to a maximum, with the least time per checkpoint, T_w(N) / N.

        `worth` is the share of that time that more in flight must save: see `best_in_flight` of `pccheck.tuning`.
        """
        m, counts = whole("state_bytes", state_bytes), range(1, whole("max_in_flight", max_in_flight) + 1)
        return best_in_flight({n: self.durable_s(m, n) for n in counts}, worth=worth)


class PipelineTimes(NamedTuple):
    """When one checkpoint's state has been copied out of the trainer's memory, and when all of it is written."""

    capture_s: float
    persist_s: float


def pipeline_times(
    state_bytes: int,
    *,
    pool_bytes: int,
    chunk_bytes: int,
    copy_bytes_per_s: float,
    write_bytes_per_s: float,
) -> PipelineTimes:
    """Give the times of one checkpoint that flows, chunk after chunk, through a pool of buffers to storage.

    C chunks of s bytes, K buffers, copied at b_d and written at b_s: with K >= C the copy never waits, C s / b_d; with
    2 <= K < C it is max(C s / b_d, 2 s / b_d + (C - K) s / b_s); with K = 1 copies and writes take turns. A pool as
    large as the state makes the capture independent of the storage; a smaller one turns writing into waiting
    (the pipeline of PCcheck, ASPLOS 2025; the formulas solve its recurrence).

    Args:
        state_bytes: of the checkpoint (m), 1 or more; cut into equal chunks of at most `chunk_bytes`.
        pool_bytes: of all buffers; at least one chunk counts.
        chunk_bytes: of one buffer, 1 or more.
        copy_bytes_per_s: at which the state is copied to the pool (b_d), greater than 0.
        write_bytes_per_s: at which the pool is written to storage (b_s), greater than 0.

    Raises OptionError for a value out of its range.
    """
    m, size = whole("state_bytes", state_bytes), whole("chunk_bytes", chunk_bytes)
    chunks = math.ceil(m / size)
    buffers = max(1, whole("pool_bytes", pool_bytes) // size)
    copy = m / chunks / positive("copy_bytes_per_s", copy_bytes_per_s, what="bytes per second")
    write = m / chunks / positive("write_bytes_per_s", write_bytes_per_s, what="bytes per second")
    if buffers == 1:
        return PipelineTimes(chunks * copy + (chunks - 1) * write, chunks * (copy + write))
    waited = 2 * copy + (chunks - buffers) * write if buffers < chunks else 0.0
    return PipelineTimes(max(chunks * copy, waited), copy + write + (chunks - 1) * max(copy, write))
