"""The native data path: native threads, no interpreter lock (floor 1: imports errors)."""

from collections.abc import Callable, Sequence
from typing import Any, final

from typing_extensions import Buffer

@final
class Layout:
    """Where pieces lie in the byte space and which chunks they make, checked once for many jobs. Immutable.

    Raises ValueError for tables (`Layout.tables` of pccheck.state.plan) that contradict each other.
    """

    def __new__(cls, pieces: Buffer, chunks: Buffer) -> Layout: ...

@final
class Job:
    """One checkpoint on its way to a medium. Thread-safe; raises ForkedError in a forked child."""

    def wait_captured(self, timeout_s: float | None = None, chunks: int = ..., /) -> bool:
        """Wait until no thread reads the sources (of the first chunks) any more; False = time is up.

        Ctrl-C is seen within 0.1 s.
        """

    def wait_ended(self, timeout_s: float | None = None, /) -> bool:
        """Wait until everything was written, or the job has failed; False = time is up."""

    def failure(self) -> tuple[str, int, int | None] | None:
        """Give the first failure: operation ("write", "sync" or "fill"), errno, offset in the file."""

    def cancel(self) -> None:
        """Fail with ECANCELED as soon as the writes now running end; nothing happens to a job that has ended."""

    def digests(self) -> bytes:
        """Give 16 bytes per chunk; ValueError before the job has ended."""

    def stats(self) -> tuple[float, float, float, int]:
        """Give captured_s, written_s, pool_wait_s (each up to now while it runs), retries."""

    def fills_left(self) -> int:
        """Give how many chunks to be filled were not taken; 0 also once the job has failed."""

    def take_fill(self, timeout_s: float, /) -> tuple[int, int, int] | None:
        """Wait for the next chunk to fill: index, address, bytes; None = time is up, or nothing is left."""

    def fill_done(self, chunk: int, /) -> bool:
        """Hand a taken chunk on; False = the job has failed, so drop it; ValueError for one that is not taken."""

    def drop_fill(self, chunk: int, reusable: bool, /) -> None:
        """Give a taken chunk up, which fails the job; its buffer is lost unless it is reusable."""

    def reclaim(self, chunk: int, /) -> None:
        """Make the lost buffer of a chunk free again."""

    def fail_fill(self) -> None:
        """Fail the job, unless it has ended, with the operation "fill"."""

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

    @property
    def memory(self) -> tuple[int, int]:
        """Address and bytes of all buffers; 0 as the address once they are unmapped."""

    def submit(
        self,
        layout: Layout,
        addresses: Buffer | Sequence[int],
        keep: object,
        fd: int,
        mapping: Buffer | None,
        alignment: int,
        prologue: bytes | None,
        started: Callable[[Job], object] | None = None,
    ) -> Job:
        """Start a job: an address per piece, fd (-1 = none) or writable mapping, one page to go first.

        The address 0 is legal with `started`, which is called with the Job before this returns: whoever that is fills
        those chunks; what it raises cancels the job. Raises ValueError for arguments that contradict each other,
        ClosedError, OSError where `fd` cannot be duplicated.
        """

    def drain(self, timeout_s: float | None = None, /) -> bool:
        """Refuse new jobs and let running ones end; False = time is up, call again."""

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

def copy_pieces(
    addresses: Buffer | Sequence[int], lengths: Buffer | Sequence[int], targets: Buffer | Sequence[int], threads: int
) -> None:
    """Copy disjoint pieces of memory in one call, with at most `threads` (1..64) threads, this one included."""

def digest_pieces(addresses: Buffer | Sequence[int], lengths: Buffer | Sequence[int]) -> bytes:
    """Give XXH3-128 of each piece of memory, 16 bytes each; those below 256 bytes are taken with zeros up to there."""

def describe_arrays(cls: type, arrays: Sequence[Any], questions: tuple[str, ...] = ..., /) -> bytes:
    """Give what DLPack tells of arrays of a class or its subclasses, but for addresses: device, dtype, shape, strides.

    And the answers to at most 8 questions, True or False: names of attributes of the class, and of native methods of it
    without arguments. Raises TypeError for an item of another class, or a question that is neither, AttributeError or
    BufferError where the class has no DLPack exchange table of major version 1, or not what is asked, and what the
    class raises for an array that DLPack cannot describe.
    """

def check_arrays(
    cls: type,
    arrays: Sequence[Any],
    description: Buffer,
    addresses: Buffer,
    questions: tuple[str, ...] = ...,
    looks: Buffer = ...,
    /,
) -> int:
    """Write the address of each array, and give -1 where they are as described; else the first index that is not so.

    `addresses` is writable and holds 8 bytes per array; 0 = an array without memory. Beyond a changed array nothing is
    asked. `looks`, likewise, holds an address that answering for each array will look at: it is but fetched early.
    Raises as `describe_arrays`, and ValueError where `addresses` is of another length.
    """

@final
class Hold:
    """Memory of arrays that is kept as it is until this is dropped; its length is how many. Not made by callers."""

    def __len__(self) -> int: ...

def hold_buffers(exporters: Sequence[Any], addresses: Buffer, /) -> Hold:
    """Take a buffer of each exporter, and write where it begins into `addresses`, 8 bytes each.

    An exporter has the buffer protocol, or is a DLPack capsule ("dltensor", or "dltensor_versioned" of major version 1)
    of host memory, which stays unused. Raises ValueError where `addresses` is of another length, BufferError for what
    is not in C order, TypeError for what exports no buffer, and what an exporter raises; then nothing is kept.
    """

def contents(containers: Sequence[list[Any] | tuple[Any, ...] | dict[Any, Any]], /) -> bytes:
    """Give how many items each container has and the identity of each: of a dict, of each key and value.

    The items themselves are not looked at, not even for a reference. Raises TypeError for any other container.
    """

def file_status(fd: int, /) -> tuple[int, int, int, int]:
    """Give size, number of names, device and inode of an open file, and let no other thread run meanwhile; OSError."""

def lock_file(fd: int, how: int, /) -> None:
    """Call flock(2) without waiting, and let no other thread run meanwhile; OSError (EWOULDBLOCK: another has it)."""

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
