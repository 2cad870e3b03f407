"""Which pipeline runs: native where its extension was built, else portable (floor 2: imports both pipelines)."""

from __future__ import annotations

import os

from pccheck.errors import UsageError
from pccheck.options import PipelineName
from pccheck.pipeline.fills import FILL_TIMEOUT_S
from pccheck.pipeline.interface import Pipeline
from pccheck.pipeline.portable import PortablePipeline

MANY_CORES = 8  # from here on a second copier takes no core that the trainer misses
RETRIES = 5


def native_missing() -> str | None:
    """Give why the native pipeline cannot be used; None where it can."""
    try:
        from pccheck._native import cas64  # noqa: F401  (a checkout's folder of C files imports, but has no names)
        from pccheck.pipeline.native import NativePipeline  # noqa: F401
    except ImportError as error:
        return str(error)
    return None


def make_pipeline(
    name: PipelineName,
    buffer_bytes: int,
    chunk_bytes: int,
    writers: int,
    writers_per_job: int | None = None,
    *,
    fill_timeout_s: float = FILL_TIMEOUT_S,
) -> Pipeline:
    """Make the pipeline called `name`; "auto" = native where the extension was built.

    Args:
        name: "auto", "native" or "portable".
        buffer_bytes: size of the pool, at least two chunks.
        chunk_bytes: largest chunk, a multiple of 4096.
        writers: threads that write, 1..64.
        writers_per_job: of these, how many may be at one checkpoint at once; None = all of them.
        fill_timeout_s: longest that a device may take to copy one chunk.

    Raises UsageError where "native" is asked for and was not built.
    """
    missing = None if name == "portable" else native_missing()
    if name == "native" and missing is not None:
        raise UsageError(
            f"pipeline='native' cannot be had: {missing}; install pccheck where a C compiler is, or use 'auto'"
        )
    if name == "portable" or missing is not None:
        return PortablePipeline(
            buffer_bytes, chunk_bytes, writers=writers, writers_per_job=writers_per_job, fill_timeout_s=fill_timeout_s
        )
    from pccheck.pipeline.native import NativePipeline

    copiers = 2 if (os.cpu_count() or 1) >= MANY_CORES else 1
    return NativePipeline(
        buffer_bytes,
        chunk_bytes,
        writers=writers,
        writers_per_job=writers_per_job,
        copiers=copiers,
        retries=RETRIES,
        fill_timeout_s=fill_timeout_s,
    )
