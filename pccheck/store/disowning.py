"""Which slot files an opening gives up, and which stores it must leave alone (floor 2: imports floors 0 and 1)."""

from __future__ import annotations

from pccheck import format
from pccheck.errors import UsageError
from pccheck.format import Record, SlotState
from pccheck.storage.medium import Medium
from pccheck.storage.volume import CheckPage, Volume


def assert_of_this_kind(
    path: str, check: CheckPage, records: dict[int, Record], kept: dict[str, Record], damaged: list[tuple[str, str]],
    linking: bool,
) -> None:  # fmt: skip
    """Raise UsageError where this opening would give away what another kind of store holds."""
    was = check.load(format.LINKS_OFFSET) == 1
    if was and not linking:
        raise UsageError(f"{path} is a store of links; open it with keep=0, or use another directory")
    holds = kept or damaged or any(r.state is SlotState.SEALED and not r.is_linked for r in records.values())
    if linking and not was and holds:
        raise UsageError(
            f"{path} holds checkpoints of its own, which a store of links (keep=0) would give away; "
            "use another directory"
        )


def disown(
    volume: Volume, check: CheckPage, media: dict[int, Medium], found: dict[int, Record],
    damaged: list[tuple[str, str]], linking: bool,
) -> None:  # fmt: skip
    """Remove the slots whose files are not to be written any more; a new one is made for whoever needs a slot.

    Those that were being filled: a writer that lost its lock, or never had one, may still write to them. It keeps the
    nameless file. Without this, where locks do not work, such a writer put its manifest and record over a newer
    writer's durable checkpoint (found by the writer tests). And those that were linked: their bytes are their owners'.
    A store of links keeps only what was never used. Which counters were used is noted first, durably: two crashes in a
    row would otherwise give one of them to another checkpoint, while a link of the first is there (found by the
    explorer).
    """
    used = {s for s, r in found.items() if linking or r.is_linked or r.state is SlotState.FILLING}
    if linking:
        used |= {slot for name, _ in damaged if (slot := format.parse_slot_name(name)) is not None}
        damaged.clear()
    last = max((found[slot].counter for slot in used if slot in found), default=0)
    if last > check.load(format.LAST_COUNTER_OFFSET):
        check.store(format.LAST_COUNTER_OFFSET, last)
        check.sync()
    for slot in used:
        media.pop(slot).close()
        volume.remove(format.slot_name(slot))
