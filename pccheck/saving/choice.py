"""Which snapshot mode costs the trainer least, by measure (floor 0: imports nothing of pccheck)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, final

Mode = Literal["copy", "lazy", "device"]
ORDER: tuple[Mode, ...] = ("lazy", "device", "copy")  # tried in this order: the one that is mostly best first
TRIALS = 3  # of each mode before one is chosen; the first of them is not counted: it touches new memory
MARGIN = 0.8  # a mode takes the place of another only if its stall is below this share of the other's,
LEAST_GAIN_S = 0.0005  # and if it gains at least so much per save
REMEASURE_EVERY = 50  # saves, at least, between two measures of a mode that was not chosen
PROBE_SHARE = 0.05  # of the chosen mode's stall: what measuring the others again may add to it on average
PROBE_FLOOR_S = 0.0001  # per save: what it may add in any case
_FADE = 0.3  # how much a new measure counts against those before


@final
@dataclass
class _Measured:
    saves: int = 0  # that were made in this mode, up to TRIALS
    stall_s: float = 0.0  # a mean in which old measures fade
    last: int = 0  # the save at which it was measured last


@final
@dataclass(frozen=True, kw_only=True)
class Picked:
    """A decision.

    Args:
        mode: the mode of the next save.
        reason: why, for people.
        probe: it is taken to be measured, not because it is the best.
    """

    mode: Mode
    reason: str
    probe: bool = False


@final
@dataclass
class Choice:
    """Picks among snapshot modes by measured stall, the time that the trainer waits per save.

    CheckFreq (FAST 2021, section 4.4) profiles a snapshot on the GPU and one through the CPU and takes the cheaper:
    `T_o = min(T_og, T_oc)`. Here all modes that are legal compete, measured in the job itself; the choice has
    hysteresis, so that noise does not make it swing, and the others are measured again now and then, rarely enough
    that this costs at most PROBE_SHARE of the stall that there is anyway. Not thread-safe.
    """

    _modes: dict[Mode, _Measured] = field(default_factory=dict)
    _current: Mode | None = None
    _saves: int = 0

    def note(self, mode: Mode, stall_s: float) -> None:
        """Take a measure: one save in this mode made the trainer wait `stall_s` seconds in all."""
        known = self._modes.setdefault(mode, _Measured())
        known.saves = min(known.saves + 1, TRIALS)
        known.last = self._saves
        if known.saves > 2:
            known.stall_s += _FADE * (stall_s - known.stall_s)
        else:  # the second one takes the place of the first, which touched new memory
            known.stall_s = stall_s

    def pick(self, legal: Sequence[Mode]) -> Picked:
        """Give the mode of the next save, one of `legal`, which must not be empty."""
        self._saves += 1
        for mode in ORDER:
            if mode in legal and self._of(mode).saves < TRIALS:
                return Picked(mode=mode, reason=f"trial {self._of(mode).saves + 1} of {TRIALS}", probe=True)
        best = min((m for m in ORDER if m in legal), key=lambda m: self._of(m).stall_s)
        if self._current not in legal:
            self._current = None
        if self._current is None or (best != self._current and self._is_better(best, self._current)):
            self._current = best
        for mode in ORDER:
            if mode in legal and mode != self._current and self._is_due(mode, self._current):
                return Picked(mode=mode, reason="measured again", probe=True)
        return Picked(mode=self._current, reason=self._told(legal))

    def _of(self, mode: Mode) -> _Measured:
        return self._modes.get(mode, _Measured())

    def _is_better(self, mode: Mode, current: Mode) -> bool:
        new_s, old_s = self._of(mode).stall_s, self._of(current).stall_s
        return new_s < MARGIN * old_s and old_s - new_s >= LEAST_GAIN_S

    def _is_due(self, mode: Mode, current: Mode) -> bool:
        extra_s = self._of(mode).stall_s - self._of(current).stall_s
        allowed_s = max(PROBE_SHARE * self._of(current).stall_s, PROBE_FLOOR_S)
        return self._saves - self._of(mode).last > max(REMEASURE_EVERY, extra_s / allowed_s)

    def _told(self, legal: Sequence[Mode]) -> str:
        stalls = (f"{m} {1000 * self._of(m).stall_s:.2f} ms" for m in ORDER if m in legal)
        return "stall per save: " + ", ".join(stalls)
