"""How each state leaves the caller's hands: copied, captured later, or copied aside first (floor 2: imports below)."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import cast, final

from pccheck.devices import Guard
from pccheck.errors import UsageError
from pccheck.options import Options
from pccheck.pipeline.gather import copy_pieces
from pccheck.pipeline.interface import Job
from pccheck.saving.captures import EVERYTHING, Waits
from pccheck.saving.choice import Choice, Mode
from pccheck.saving.ordering import OrderedFiller
from pccheck.saving.shadow import HostShadow
from pccheck.state.owning import Copier
from pccheck.state.planner import Prepared

_COPIER = cast(Copier, copy_pieces)
BY_VALUE_BYTES = 32 << 20  # of what nobody owns, so much is copied aside per save; for more, its capture is waited for
SMALL_SHARE = 8  # what is at most one part in so many of a state is copied aside beside arrays that nobody can change


@final
@dataclass(frozen=True, kw_only=True)
class Taken:
    """What was done with a state, and what is left to wait for.

    Args:
        mode: how it is captured.
        reason: why so.
        chunks: leading chunks whose capture `save()` must wait for; None = all of them.
        waits: how long whoever changes leaves later must wait; None = nothing of the caller's memory is read then.
        filler: fills what lies on devices; it was begun.
        aside: it is captured from the shadow.
    """

    mode: Mode
    reason: str
    chunks: int | None
    waits: Waits | None
    filler: OrderedFiller | None
    aside: bool = False


@final
class Snapshots:
    """Decides in which mode each state is captured, and does what must be done within `save()`.

    Called by one thread at a time.

    Args:
        options: of the Checkpointer.
    """

    def __init__(self, options: Options) -> None:
        self._options = options
        self.guard: Guard | None = None
        self.debug = options.debug_captures
        self._choice = Choice()
        self._shadow = HostShadow()
        self._stalled: tuple[Mode, float, float] | None = None  # last save: mode, seconds in `take`, waits before
        self._waits: tuple[object, object, Waits] | None = None  # of which owners and layout

    def guarded_by(self, guard: Guard | None, *, debug: bool) -> None:
        """Install a guard, or take it away; raises UsageError."""
        if guard is not None and self.guard is not None:
            raise UsageError(f"a guard stands already, {self.guard!r}: detach it, or attach all at once")
        if guard is not None and self._options.snapshot == "device":
            raise UsageError(
                "snapshot='device' copies the state within save() and has nothing to wait for later; open the "
                "Checkpointer with snapshot='lazy', or 'auto', to attach something to it"
            )
        self.guard, self.debug = guard, self._options.debug_captures or (debug and guard is not None)

    def _pick(self, waited_s: float) -> tuple[Mode, str]:
        wanted = self._options.snapshot
        if wanted != "auto":
            attached = wanted == "copy" and self.guard is not None
            return ("lazy", "something is attached") if attached else (wanted, "as the options say")
        if self._stalled is not None:
            mode, taken_s, before_s = self._stalled
            self._choice.note(mode, taken_s + waited_s - before_s)
            self._stalled = None
        picked = self._choice.pick(("copy", "device") if self.guard is None else ("copy", "device", "lazy"))
        return picked.mode, picked.reason

    def take(self, prepared: Prepared, waited_s: float) -> Taken:
        """Do what is owed before `save()` returns, as far as it needs no pipeline.

        Args:
            prepared: planned with this guard; its addresses may be changed to those of copies.
            waited_s: how long captures have been waited for in all, so far.

        Raises:
            DeadlineError: what the state before was copied to is still being captured.
        """
        mode, reason = self._pick(waited_s)
        began = time.monotonic()
        if prepared.stable:
            taken = self._begun(prepared, mode, reason, chunks=0, waits=None)
        elif mode == "device":
            taken = self._take_aside(prepared, reason)
        elif mode == "lazy":
            chunks = 0 if self.guard is None else self._take_values(prepared)
            taken = self._begun(prepared, mode, reason, chunks=chunks, waits=self._waits_for(prepared))
        elif _is_little(prepared.changeable.total_bytes, prepared.layout.data_bytes):
            left = prepared.copy_aside(prepared.changeable, _COPIER)  # all else nobody can change: no need to wait
            taken = self._begun(prepared, mode, reason, chunks=left, waits=EVERYTHING if left else None)
        else:
            taken = self._begun(prepared, mode, reason, chunks=None, waits=EVERYTHING)
        self._stalled = mode, time.monotonic() - began, waited_s
        return taken

    def _take_aside(self, prepared: Prepared, reason: str) -> Taken:
        """Copy all of it within its own memory; what there is no room for is waited for, as in copy mode."""
        self._shadow.ready(self._options.write_timeout_s)
        pieces = prepared.changeable
        buffer = self._shadow.room(pieces.host_bytes)
        if buffer is None:
            reason = f"no memory for {pieces.host_bytes:,} bytes beside the state: copy takes the place of device"
            return self._begun(prepared, "copy", reason, chunks=None, waits=EVERYTHING)
        left = prepared.copy_aside(pieces, _COPIER, buffer)
        if not left:
            return self._begun(prepared, "device", reason, chunks=0, waits=None, aside=True)
        reason = f"a device has no room for {pieces.device_bytes:,} bytes more: copy takes the place of device"
        return self._begun(prepared, "copy", reason, chunks=left, waits=EVERYTHING, aside=True)

    def _take_values(self, prepared: Prepared) -> int:
        """Copy aside what nobody owns; give the leading chunks that hold what there is too much of, or no room for."""
        pieces, chunks = prepared.unowned, 0
        if pieces.total_bytes > BY_VALUE_BYTES:
            pieces, chunks = prepared.smallest(pieces, BY_VALUE_BYTES)
        return max(chunks, prepared.copy_aside(pieces, _COPIER))

    def _begun(
        self, prepared: Prepared, mode: Mode, reason: str, *,
        chunks: int | None, waits: Waits | None, aside: bool = False,
    ) -> Taken:  # fmt: skip
        filler = None if prepared.filler is None else OrderedFiller(prepared.filler)
        if filler is not None:
            filler.begin()
        return Taken(mode=mode, reason=reason, chunks=chunks, waits=waits, filler=filler, aside=aside)

    def _waits_for(self, prepared: Prepared) -> Waits:
        owners, known = prepared.owners, self._waits
        if known is None or known[0] is not owners or known[1] is not prepared.layout:
            waits = Waits.of(prepared)
            self._waits = owners, prepared.layout, waits
            return waits
        return known[2]

    def captured_by(self, taken: Taken, job: Job) -> None:
        """Take note of the job that captures a state."""
        if taken.aside:
            self._shadow.used_by(job)

    def close(self) -> None:
        """Free what was kept, once nothing is captured any more."""
        self._shadow.close()


def _is_little(changeable_bytes: int, data_bytes: int) -> bool:
    return changeable_bytes <= min(data_bytes // SMALL_SHARE, BY_VALUE_BYTES)
