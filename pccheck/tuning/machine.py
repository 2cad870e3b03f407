"""What `pccheck probe` measured of a machine, as JSON (floor 0: imports errors, tuning.*)."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Self, TypedDict

import msgspec

from pccheck.errors import FormatError, UsageError
from pccheck.tuning.domain import LEAST_S, MOST_S
from pccheck.tuning.storage import StorageModel

VERSION = 1
MAX_JSON_BYTES = 1 << 20
_MARK = b"\xef\xbb\xbf"  # that some editors put before UTF-8
Positive = Annotated[float, msgspec.Meta(ge=LEAST_S, le=MOST_S)]  # seconds
NotNegative = Annotated[float, msgspec.Meta(ge=0, le=MOST_S)]
BytesPerS = Annotated[float, msgspec.Meta(ge=1, lt=1e15)]
Count = Annotated[int, msgspec.Meta(ge=1, le=1 << 62)]


class Sample(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Saves in one way: with as many under way as are allowed, all the time; or single ones, after a rest.

    Args:
        state_bytes: of each checkpoint.
        in_flight, writers, writers_per_checkpoint, chunk_bytes, buffer_bytes: the Checkpointer's options.
        saves: how many were measured.
        durable_s: median seconds from the beginning of a save, its wait for a slot not counted, until it was durable.
        worst_durable_s: the longest.
        period_s: mean seconds from one durable checkpoint to the next, pauses not counted.
        pause_s: mean seconds that storage rested before each save; 0 = saves back to back. Storage that keeps up with
            a training loop rests between saves, and some take the first bytes after that faster.
    """

    state_bytes: Count
    in_flight: Count
    writers: Count
    writers_per_checkpoint: Count | None
    chunk_bytes: Count
    buffer_bytes: Count
    saves: Count
    durable_s: Positive
    worst_durable_s: Positive
    period_s: Positive
    pause_s: NotNegative = 0.0

    @property
    def bytes_per_s(self) -> float:
        """What storage took, all checkpoints together."""
        return self.state_bytes / self.period_s


class Machine(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a probe found of one directory's storage and its host.

    Args:
        version: of this form.
        path: the directory.
        filesystem: its kind and its medium, such as "ext4, direct".
        time_s: when it was measured, in seconds since 1970, UTC.
        pccheck: version that measured it.
        pipeline: "native" or "portable".
        cpus: that this process may use.
        memory_bytes: that the host and the control group had left.
        free_bytes: of the file system that are free for this user.
        seconds: that the probe took.
        copy_bytes_per_s: at which `save()` in copy mode copies from host memory to the pool.
        read_bytes_per_s: at which a checkpoint is read back and verified, the median, into memory that was touched
            before; past the page cache where `read_past_cache`; None = not measured.
        worst_read_bytes_per_s: the slowest read; None = not known, as of older probes.
        reads: how many there were; 0 = an older probe's restores, each into fresh memory.
        fresh_memory_bytes_per_s: at which memory came that was not touched before; None = not known. A restore may
            have to wait for it; on virtual machines it can be slower than storage.
        read_past_cache: whether the medium can read past the page cache.
        commit_s: fixed cost of a checkpoint: seconds until one of next to no bytes is durable.
        save_s: seconds that `save()` in lazy mode keeps its caller.
        samples: of the storage.
        notes: what was not measured, and why.
        device_copy_bytes_per_s: from the training device to host memory. No probe of a directory knows it: enter it.
        interference: share by which training runs slower while a checkpoint is under way, 0..1; None = not known. It
            depends on the training: enter what was measured there.
    """

    version: Annotated[int, msgspec.Meta(ge=1, le=VERSION)] = VERSION
    path: str
    filesystem: str
    time_s: NotNegative
    pccheck: str
    pipeline: str
    cpus: Count
    memory_bytes: Count
    free_bytes: Annotated[int, msgspec.Meta(ge=0, le=1 << 62)]
    seconds: NotNegative
    copy_bytes_per_s: BytesPerS
    read_bytes_per_s: BytesPerS | None = None
    worst_read_bytes_per_s: BytesPerS | None = None
    reads: Annotated[int, msgspec.Meta(ge=0, le=1 << 62)] = 0
    fresh_memory_bytes_per_s: BytesPerS | None = None
    read_past_cache: bool = False
    commit_s: NotNegative
    save_s: NotNegative
    samples: Annotated[tuple[Sample, ...], msgspec.Meta(min_length=1, max_length=1000)]
    notes: tuple[str, ...] = ()
    device_copy_bytes_per_s: BytesPerS | None = None
    interference: Annotated[float, msgspec.Meta(ge=0, le=1)] | None = None

    def to_json(self) -> bytes:
        """Give it as JSON, indented."""
        return msgspec.json.format(msgspec.json.encode(self), indent=1) + b"\n"

    @classmethod
    def from_json(cls, data: bytes) -> Self:
        """Read what `to_json` gave, or a person wrote by its example, with every value checked.

        Raises FormatError, which names the member that is missing, unknown, or out of its range.
        """
        try:
            if len(data) > MAX_JSON_BYTES:
                raise msgspec.ValidationError(f"{len(data):,} bytes are more than any probe writes")
            return msgspec.json.decode(data.removeprefix(_MARK), type=cls)
        except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
            raise FormatError(f"not the JSON of a probe: {error}; `pccheck probe DIR --json FILE` makes one") from None

    def of(
        self, *, writers: int = 2, writers_per_checkpoint: int | None = None, chunk_bytes: int | None = None
    ) -> tuple[Sample, ...]:
        """Give the samples of these options, or where none were measured so, those of the nearest that were.

        First come those that cut checkpoints into streams in the same way (`writers_per_checkpoint`), then those with
        the same chunks, then those with as many writers. Where each checkpoint has one stream, `writers` follows
        `in_flight`, and does not tell samples apart.
        """
        chosen: Sequence[Sample] = self.samples
        streams = [s for s in chosen if s.writers_per_checkpoint == writers_per_checkpoint]
        chosen = streams or [s for s in chosen if s.writers_per_checkpoint is None] or chosen
        wanted = chunk_bytes or statistics.mode(s.chunk_bytes for s in chosen)
        nearest = min((s.chunk_bytes for s in chosen), key=lambda c: max(c / wanted, wanted / c))
        chosen = [s for s in chosen if s.chunk_bytes == nearest]
        if writers_per_checkpoint is None:
            closest = min((s.writers for s in chosen), key=lambda w: abs(w - writers))
            chosen = [s for s in chosen if s.writers == closest]
        return tuple(chosen)

    def model(
        self, *, writers: int = 2, writers_per_checkpoint: int | None = None, chunk_bytes: int | None = None
    ) -> StorageModel:
        """Fit a model of the storage, busy all the time, to the samples of these options, or the nearest (see `of`).

        One at a time, of two sizes, tells the rate of a stream and the fixed cost of a checkpoint; several tell the
        rate of all together: by Little's law each takes in_flight times the period in which one becomes durable.
        """
        samples = self.of(writers=writers, writers_per_checkpoint=writers_per_checkpoint, chunk_bytes=chunk_bytes)
        busy = [s for s in samples if not s.pause_s]
        single = [s for s in busy if s.in_flight == 1] or self._single(samples)
        stream, fixed_s = self._line({m: statistics.median(p) for m, p in _by_size(single, "period_s").items()})
        several = [s for s in busy if s.in_flight > 1]
        largest = max((s.state_bytes for s in several), default=0)
        rates = [(1, stream)]
        for s in several:
            if s.state_bytes == largest:
                all_s = s.in_flight * s.period_s
                rates.append((s.in_flight, s.in_flight * largest / (all_s - min(fixed_s, s.period_s / 2))))
        high = max(rate for _, rate in rates)
        # Those count that are limited by the storage: neither by a slow spell of it, nor by their streams.
        full = [rate for n, rate in rates if rate >= _FULL * high and (n == 1 or rate <= _STREAMS * n * stream)]
        total = statistics.median(full) if full else high
        return StorageModel(stream_bytes_per_s=min(stream, total), total_bytes_per_s=total, commit_s=fixed_s)

    def spread(
        self, *, writers: int = 2, writers_per_checkpoint: int | None = None, chunk_bytes: int | None = None
    ) -> float:
        """Give how many times as long as usual the longest saves with these options took (see `of`), at least 1.

        PCcheck's T_w is the worst: an interval that storage only just keeps up with waits at every slower spell.
        """
        samples = self.of(writers=writers, writers_per_checkpoint=writers_per_checkpoint, chunk_bytes=chunk_bytes)
        return statistics.median(max(1.0, s.worst_durable_s / s.durable_s) for s in samples)

    def alone_s(
        self,
        state_bytes: int,
        *,
        writers: int = 2,
        writers_per_checkpoint: int | None = None,
        chunk_bytes: int | None = None,
    ) -> float:
        """Give the seconds until a single checkpoint is durable on storage that had rested, with options as in `of`.

        Between the sizes that were measured it goes in straight lines; beyond the largest on at the rate of storage
        that is busy, since some takes the first bytes after a rest much faster.
        """
        samples = self.of(writers=writers, writers_per_checkpoint=writers_per_checkpoint, chunk_bytes=chunk_bytes)
        by_size = _by_size(self._single(samples), "durable_s")
        before, reached_s = 0, min(self.commit_s, *map(min, by_size.values()))
        for size, times in by_size.items():
            seconds = max(reached_s, statistics.median(times))
            if state_bytes <= size:
                return reached_s + (seconds - reached_s) * (state_bytes - before) / (size - before)
            before, reached_s = size, seconds
        options: Options = {
            "writers": writers,
            "writers_per_checkpoint": writers_per_checkpoint,
            "chunk_bytes": chunk_bytes,
        }
        return reached_s + (state_bytes - before) / self.model(**options).stream_bytes_per_s

    def _single(self, samples: Sequence[Sample]) -> list[Sample]:
        """Give samples of one checkpoint at a time, after a rest where there are such."""
        for among in (samples, self.of(), self.samples):
            single = [s for s in among if s.in_flight == 1]
            rested = [s for s in single if s.pause_s] or single
            if rested:
                return rested
        raise UsageError("the probe has no sample of one checkpoint at a time: probe again, for longer")

    def _line(self, periods: Mapping[int, float]) -> tuple[float, float]:
        """Give the bytes per second and the fixed seconds of one checkpoint at a time, of periods by size, ascending.

        The fixed cost is at least that of a commit, and what makes the rate no more than _STEEP greater.
        """
        sizes = list(periods)
        most, period_s = sizes[-1], periods[sizes[-1]]
        rate = least = most / (period_s - min(self.commit_s, period_s / 2))
        smaller = next((size for size in sizes if size >= most / _APART), most)
        if smaller <= most / 2:
            more_s = period_s - periods[smaller]
            rate = min(max(least, (most - smaller) / more_s), _STEEP * least) if more_s > 0 else least
        return rate, period_s - most / rate


_APART = 8  # the smaller of two sizes that tell rate and fixed cost apart is at least such a part of the larger
_STEEP = 1.25
_FULL = 0.8  # rates of a disk differ that much from one second to the next (measured)
_STREAMS = 0.9  # of what as many streams reach side by side


class Options(TypedDict):
    """Of a Checkpointer, as the methods of a Machine take them."""

    writers: int
    writers_per_checkpoint: int | None
    chunk_bytes: int | None


def _by_size(samples: Iterable[Sample], member: str) -> dict[int, list[float]]:
    """Give a member of samples by the size of their states, ascending."""
    found: dict[int, list[float]] = {}
    for sample in sorted(samples, key=lambda s: s.state_bytes):
        found.setdefault(sample.state_bytes, []).append(getattr(sample, member))
    return found
