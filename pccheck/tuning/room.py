"""The budgets for memory and storage, and what finds no room in them (floor 0: imports errors, tuning.*)."""

from __future__ import annotations

import math

from pccheck.errors import OptionError
from pccheck.tuning.basis import Basis, Setting
from pccheck.tuning.units import bytes_text
from pccheck.tuning.wanted import Wanted


class ProbedRoomError(OptionError):
    """What a probe found is too little, and no option told it: `found` says what it was, and what to do."""

    def __init__(self, field: str, value: int, allowed: str, found: str) -> None:
        super().__init__(field, value, allowed)
        self.found = found
        self.args = (f"{found}: it must be {allowed}",)


def storage_room(wanted: Wanted, basis: Basis) -> float:
    """Give how many bytes all slots may take: the budget, else what was free where the probe looked, else no limit."""
    if wanted.storage_bytes is not None:
        return wanted.storage_bytes
    return math.inf if basis.free_bytes is None else basis.free_bytes


def dram_room(wanted: Wanted, basis: Basis) -> float:
    """Give how many bytes the pool may take: the budget, else a quarter of the memory, else no limit."""
    if wanted.dram_bytes is not None:
        return wanted.dram_bytes
    return math.inf if basis.memory_bytes is None else basis.memory_bytes // 4  # as the Checkpointer does by itself


def pool_bytes(wanted: Wanted, basis: Basis, in_flight: int, setting: Setting) -> int:
    """Give the pool, whole chunks: what all in flight fill, or as much as there is room for."""
    full = max(2, in_flight * math.ceil(wanted.part_bytes / setting.chunk_bytes)) * setting.chunk_bytes
    room = dram_room(wanted, basis)
    return full if full <= room else int(room // setting.chunk_bytes) * setting.chunk_bytes


def pool_does(wanted: Wanted, basis: Basis, in_flight: int, setting: Setting) -> bool:
    """Say whether there is room for a pool with which so many in flight are of use."""
    pool = pool_bytes(wanted, basis, in_flight, setting)
    if pool < 2 * setting.chunk_bytes:
        return False
    return in_flight == 1 or pool >= _shared_pool(wanted.part_bytes, in_flight)


def _shared_pool(state_bytes: int, in_flight: int) -> int:
    """Give the least pool with which a capture finds room while the others of N in flight are being written.

    When one begins, the others are 1/N, 2/N, ... written: they still hold (N - 1) / 2 states. With less, three in
    flight were slower than one (1.20 against 1.00, with a pool of one state).
    """
    return math.ceil((in_flight + 1) / 2 * state_bytes)


def check_storage(wanted: Wanted, basis: Basis, in_flight: int) -> None:
    """Raise OptionError where there is no room for the slots of so many in flight."""
    room, least = storage_room(wanted, basis), (in_flight + wanted.keep) * wanted.state_bytes
    if least <= room:
        return
    allowed = f"at least {bytes_text(least)}: slots for {in_flight} under way and {wanted.keep} to keep"
    if wanted.storage_bytes is not None:
        raise OptionError("storage_bytes", wanted.storage_bytes, allowed)
    found = f"the probe found only {bytes_text(room)} free at {basis.machine.path} (`--storage` tells another amount)"
    raise ProbedRoomError("storage_bytes", int(room), allowed, found)


def no_pool(wanted: Wanted, basis: Basis, in_flight: int) -> OptionError:
    """Give the error where no pool with which so many in flight are of use has room."""
    chunks = 2 * min(setting.chunk_bytes for setting in basis.settings)
    least = chunks if in_flight == 1 else max(chunks, _shared_pool(wanted.part_bytes, in_flight))
    room, allowed = int(dram_room(wanted, basis)), f"at least {bytes_text(least)}"
    if wanted.dram_bytes is not None:
        return OptionError("dram_bytes", room, allowed)
    found = (
        f"a quarter of the memory that the probe found is only {bytes_text(room)} for each pool (`--dram` tells "
        "another amount)"
    )
    return ProbedRoomError("dram_bytes", room, allowed, found)
