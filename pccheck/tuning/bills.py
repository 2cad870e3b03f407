"""What each system needs of memory and storage for checkpoints (floor 0: imports tuning.domain)."""

from __future__ import annotations

from dataclasses import dataclass

from pccheck.tuning.domain import whole


@dataclass(frozen=True, kw_only=True)
class Bill:
    """Bytes that a system needs, the training state itself included: on the device, in host memory, in storage."""

    device_bytes: int
    dram_bytes: int
    storage_bytes: int


def bills(
    state_bytes: int,
    *,
    in_flight: int = 2,
    keep: int = 1,
    pool_bytes: int | None = None,
    buffer_bytes: int = 0,
) -> dict[str, Bill]:
    """Give the bytes that "CheckFreq", "GPM", "Gemini" and "PCcheck" need for the same state.

    | | device | host memory | storage |
    |---|---|---|---|
    | CheckFreq | m | m | 2 m |
    | GPM | m | 0 | 2 m |
    | Gemini | m + buffer | m | 0 |
    | PCcheck | m | pool, m to 2 m | (N + 1) m |

    PCcheck, ASPLOS 2025, the table of memory footprints. pccheck has PCcheck's.

    Args:
        state_bytes: of the training state (m), 1 or more.
        in_flight: checkpoints of PCcheck under way at once (N), 1 or more.
        keep: finished checkpoints of PCcheck that stay, 1 or more; the paper's is 1.
        pool_bytes: of PCcheck's pool, 1 or more; None = 2 m, the upper end of the table.
        buffer_bytes: that Gemini reserves on the device for its traffic, 0 or more.

    Raises OptionError for a value out of its range.
    """
    m, slots = whole("state_bytes", state_bytes), whole("in_flight", in_flight) + whole("keep", keep)
    pool = 2 * m if pool_bytes is None else whole("pool_bytes", pool_bytes)
    return {
        "CheckFreq": Bill(device_bytes=m, dram_bytes=m, storage_bytes=2 * m),
        "GPM": Bill(device_bytes=m, dram_bytes=0, storage_bytes=2 * m),
        "Gemini": Bill(device_bytes=m + whole("buffer_bytes", buffer_bytes, 0), dram_bytes=m, storage_bytes=0),
        "PCcheck": Bill(device_bytes=m, dram_bytes=pool, storage_bytes=slots * m),
    }
