"""Lets all ranks decide as one, without waiting in the usual case (floor 3: imports deciding, ranks.agreement)."""

from __future__ import annotations

from typing import final

import msgspec

from pccheck.control.deciding import Decider, Plan, Word
from pccheck.ranks.agreement import Agreement

_MEASURED, _CHOSEN = "measured", "interval"
_words, _plans = msgspec.json.Decoder(Word), msgspec.json.Decoder(Plan)


@final
class Council:
    """Two exchanges: what each rank measured; and what rank 0 makes of it, which all do. Not thread-safe.

    One rank works it out, and not each for itself: the exponential functions of two processors may differ in the last
    bit, and then so might the intervals. Every rank calls all of this at the same steps. Between the three calls lie
    some steps, in which the words arrive, so that nobody waits for them; a rank that dies is waited for as long as
    `agree_timeout_s`, once.

    Args:
        agreement: with the other ranks.
        decider: decides on rank 0; on others it is not asked.
        timeout_s: for the other ranks' words.
    """

    def __init__(self, agreement: Agreement, decider: Decider, timeout_s: float) -> None:
        self._agreement, self._decider, self._timeout_s = agreement, decider, timeout_s
        self._number: int | None = None  # of the exchange under way
        self._plan: Plan | None = None  # of a rank that is alone

    def offer(self, word: Word) -> None:
        """Tell what this rank measured; raises RanksError."""
        if self._agreement.world == 1:
            self._plan = self._decider.decide([word])
        else:
            self._number = self._agreement.offer(_MEASURED, msgspec.json.encode(word), self._timeout_s)

    def relay(self) -> None:
        """Hear what all measured and, on rank 0, tell what follows; raises RanksError."""
        if self._number is not None:
            said = self._agreement.collect(self._number, _MEASURED, self._timeout_s)
            self._number = None
            if said is not None:
                plan = self._decider.decide([_words.decode(one) for one in said]) if self._agreement.rank == 0 else None
                self._number = self._agreement.offer(_CHOSEN, msgspec.json.encode(plan), self._timeout_s)

    def plan(self) -> Plan | None:
        """Give what all ranks do; None = a restore came between, on all of them. Raises RanksError."""
        if self._agreement.world == 1:
            return self._plan
        number, self._number = self._number, None
        said = None if number is None else self._agreement.collect(number, _CHOSEN, self._timeout_s)
        return None if said is None else _plans.decode(said[0])

    def forget(self) -> None:
        """Begin anew, as all ranks do at this step."""
        self._number = self._plan = None
