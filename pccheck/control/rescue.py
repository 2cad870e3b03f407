"""What the time left by a notice is enough for, by numbers (floor 0: imports nothing of pccheck)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import msgspec

MARGIN = 1.25  # times as long as it took at worst of late
_STILL = 0.1  # of its time: what a save that already takes longer than any of late is taken to need yet

Move = Literal["save", "await", "decline"]


class Prospect(msgspec.Struct, frozen=True, kw_only=True):
    """What one rank can expect.

    Args:
        step: the one whose state is to be rescued.
        left_s: seconds until the end.
        running: saves in flight.
        enough: one of these, or a durable one, is as fresh as is asked for.
        durable: that one is durable.
        finish_s: until the newest in flight is durable; None = not known.
        best_s, sure_s: until one that began now would be, at best, and with a margin; None = nothing was measured.
    """

    step: int
    left_s: float
    running: int
    enough: bool
    durable: bool
    finish_s: float | None
    best_s: float | None
    sure_s: float | None


def predicted(
    served_s: Sequence[float], service_s: float | None, durable_s: float | None
) -> tuple[float | None, float | None, float | None]:
    """Give `finish_s`, `best_s` and `sure_s` of a `Prospect`.

    Storage is taken to do a fixed work, in any order: what is in flight needs the rest of what each takes of it, and a
    new one comes on top. Where storage gives more to several than to one, that is too long, never too short.

    Args:
        served_s: what each in flight has had of storage.
        service_s: what one took of it, at worst of late; None = nothing was measured.
        durable_s: how long one took until durable, at least of late.
    """
    if service_s is None or durable_s is None:
        return None, None, None
    rest_s = sum(max(service_s - one, _STILL * service_s) for one in served_s)
    best_s = rest_s + service_s
    return rest_s, best_s, MARGIN * max(best_s, durable_s)


def joined(prospects: Sequence[Prospect]) -> Prospect:
    """Give the worst of what the ranks expect: a checkpoint is theirs together."""

    def worst(seconds: Sequence[float | None]) -> float | None:
        known = [one for one in seconds if one is not None]
        return max(known) if len(known) == len(seconds) else None

    return Prospect(
        step=prospects[0].step, left_s=min(one.left_s for one in prospects),
        running=max(one.running for one in prospects), enough=all(one.enough for one in prospects),
        durable=all(one.durable for one in prospects), finish_s=worst([one.finish_s for one in prospects]),
        best_s=worst([one.best_s for one in prospects]), sure_s=worst([one.sure_s for one in prospects]),
    )  # fmt: skip


def decide(prospect: Prospect) -> tuple[Move, str]:
    """Give what to do now, and why.

    Never worse than to ignore the notice: what is in flight shares storage with a newer save, so that one is begun
    beside it only where both are surely in time. Where nothing is in flight, trying costs nothing.
    """
    left = f"{max(0.0, prospect.left_s):.3g} s are left"
    if prospect.durable:
        return "decline", "it is durable already"
    if prospect.left_s <= 0:
        return "decline", "no time is left"
    if prospect.enough:
        return "await", f"a save of it is in flight; {left}"
    if prospect.best_s is None or prospect.sure_s is None:
        if prospect.running:
            return "await", f"how long a save takes is not known yet, and one is in flight; {left}"
        return "save", f"how long a save takes is not known yet: tried; {left}"
    if prospect.sure_s <= prospect.left_s:
        return "save", f"a save is durable within {prospect.sure_s:.3g} s; {left}"
    if prospect.running:
        finish = "" if prospect.finish_s is None else f", the one in flight after {prospect.finish_s:.3g} s"
        return "await", f"a newer save would need up to {prospect.sure_s:.3g} s{finish}; {left}"
    if prospect.best_s <= prospect.left_s:
        return "save", f"a save may be durable within {prospect.best_s:.3g} s: tried; {left}"
    return "decline", f"a save needs at least {prospect.best_s:.3g} s; {left}"
