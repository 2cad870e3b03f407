"""The native data path: native threads, no interpreter lock (floor 1: imports errors)."""

from collections.abc import Sequence
from typing import final

from typing_extensions import Buffer

@final
class Job:
    """One checkpoint on its way to a medium. Thread-safe; raises ForkedError in a forked child."""

    def wait_captured(self, timeout_s: float | None = None, /) -> bool:
        """Wait until no thread reads the sources any more; False = time is up. Ctrl-C is seen within 0.1 s."""

    def wait_ended(self, timeout_s: float | None = None, /) -> bool:
        """Wait until everything was written, or the job has failed; False = time is up."""

    def failure(self) -> tuple[str, int, int | None] | None:
        """Give the first failure: operation ("write" or "sync"), errno, offset in the file."""

    def cancel(self) -> None:
        """Fail with ECANCELED as soon as the writes now running end; nothing happens to a job that has ended."""

    def digests(self) -> bytes:
        """Give 16 bytes per chunk; ValueError before the job has ended."""

    def stats(self) -> tuple[float, float, float, int]:
        """Give captured_s, written_s, pool_wait_s (each up to now while it runs), retries."""

@final
class Pipeline:
    """A pool of fixed buffers, threads, and jobs. Dropped without `close` it cancels what runs."""

    def __new__(
        cls, buffers: int, buffer_bytes: int, copiers: int, writers: int, writers_per_job: int, retries: int
    ) -> Pipeline: ...
    @property
    def buffers(self) -> int:
        """Buffers in all."""

    @property
    def free_buffers(self) -> int:
        """Buffers that no job holds."""

    def submit(
        self,
        pieces: Buffer,
        chunks: Buffer,
        addresses: Buffer | Sequence[int],
        keep: object,
        fd: int,
        mapping: Buffer | None,
        alignment: int,
        prologue: bytes | None,
    ) -> Job:
        """Start a job: `Layout.tables`, an address per piece, fd (-1 = none) or writable mapping, one page to go first.

        Raises ValueError for tables that contradict each other, ClosedError, OSError where `fd` cannot be duplicated.
        """

    def close(self, timeout_s: float | None = None, /) -> bool:
        """Refuse new jobs, let running ones end, stop; False = time is up, call again."""

def read_chunks(
    fd: int,
    destination: Buffer,
    destination_offsets: Buffer | Sequence[int],
    file_offsets: Buffer | Sequence[int],
    lengths: Buffer | Sequence[int],
    digests: bytes | None,
    threads: int,
    alignment: int,
) -> list[tuple[int, int]]:
    """Read chunks into `destination` in parallel and check them; give `(index, errno)` of those that failed.

    errno 0 = was read, but differs from its digest; ENODATA = the file ends before it does. `digests` holds 16 bytes
    per chunk, which then must be of at least 241 bytes; None = unchecked. `threads` is 1..64, `alignment` what direct
    I/O on `fd` needs (1 = nothing).
    """

def load64(buffer: Buffer, offset: int, /) -> int:
    """Give the 64-bit number at `offset`: one sequentially consistent atomic read of aligned memory."""

def store64(buffer: Buffer, offset: int, value: int, /) -> None:
    """Set the 64-bit number at `offset`, atomically."""

def cas64(buffer: Buffer, offset: int, expected: int, value: int, /) -> bool:
    """Set the 64-bit number at `offset` to `value` if it is `expected`, atomically; tell whether it was."""

def buffer_addresses(buffers: Sequence[Buffer], /) -> bytes:
    """Give where the bytes of each buffer begin, as 64-bit numbers; raises for one that is not C-contiguous."""

def xxh3_128(data: Buffer, /) -> bytes:
    """Give XXH3-128 in canonical form of at least 241 contiguous bytes."""

def isa() -> str:
    """Give the kernel in use: "avx2" or "c"."""

def choose_isa(name: str, /) -> None:
    """Use the kernel "c", "avx2" or "best" from now on, in the whole process: for tests and measurements."""
