"""What becomes of a sealed checkpoint once all ranks have spoken (floor 2: imports floors 0 and 1, store).

Between its seal and the verdict a checkpoint is *pending*: held, and counting for nothing. Agreed by all, it may become
what PEER_ADDR names, and only then, durably, may what was agreed before it be let go: so at every instant all ranks
hold the last one that was announced. Dead, it is withdrawn, so that it can never be restored.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable
from typing import final

from pccheck import format
from pccheck.errors import PccheckError, RanksError
from pccheck.format import Record
from pccheck.ranks.agreement import Agreement
from pccheck.ranks.verdicts import Outcome
from pccheck.store.books import Books
from pccheck.store.history import History
from pccheck.store.ledger import State

_LOOK_S = 0.05  # how often to look whether to go on waiting


@final
class Settling:
    """Settles the pending checkpoints of one open store. Thread-safe.

    Args:
        books: shared with the store.
        history: takes back what is dead.
        agreement: with the other ranks.
    """

    def __init__(self, books: Books, history: History, agreement: Agreement) -> None:
        self._books, self._history, self._agreement = books, history, agreement

    def settle(self, record: Record, timeout_s: float) -> int:
        """Wait until all ranks hold a reported checkpoint, note it durably, and give the greatest such counter.

        Raises:
            RankTimeoutError: ranks did not report in time; the slot is held until `settle_late` hears of them.
            RanksError: a rank does not hold it, so that it was withdrawn; or nobody will ever know.
        """
        if self._agreement.world == 1:
            return record.counter
        verdict = self._agreement.wait_verdict(record.counter, timeout_s)
        if verdict.outcome is not Outcome.AGREED:
            self._history.withdraw(record.counter)
            raise RanksError(f"step {record.step} was not committed: {verdict.reason}", verdict.ranks)
        self._agreed(record)
        return self._books.agreed

    def settle_late(self) -> None:
        """Settle what its save gave up waiting for and what is known of by now; what fails is warned about."""
        for counter, verdict in self._agreement.settled().items():
            held = [e for e in self._books.entries() if e.pending and e.counter == counter]
            record = held[0].record if held else None
            try:
                if verdict.outcome is Outcome.AGREED and record is not None:
                    self._agreed(record)
                else:
                    self._history.withdraw(counter)
            except PccheckError as error:  # its save has failed long ago, and the slot stays held
                text = f"the slot of counter {counter}, which not all ranks hold, could not be freed: {error}"
                warnings.warn(text, RuntimeWarning, stacklevel=2)

    def await_places(self, most: int, until_s: float, over: Callable[[], bool]) -> None:
        """Settle what is known of by now, and wait for other ranks while more than `most` are not settled.

        Args:
            most: so many may stay.
            until_s: not beyond this, on the monotonic clock.
            over: whether not to wait any longer.
        """
        while self._agreement.unsettled:
            self.settle_late()
            left_s = min(_LOOK_S, until_s - time.monotonic())
            if self._agreement.unsettled <= most or self._agreement.lost or left_s <= 0 or over():
                return
            self._agreement.await_settled(left_s)

    def _agreed(self, record: Record) -> None:
        """Note that all ranks hold a checkpoint; PEER_ADDR names the newest such one, durably, when this returns."""
        books = self._books
        with books.lock:
            books.check.assert_mine()
            newest = record
            for entry in books.ledger.in_state(State.SEALED, State.PUBLISHED):
                if entry.record is None or entry.counter not in (record.counter, self._agreement.agreed):
                    continue
                books.ledger.mark(entry.slot, pending=False)
                newest = max(newest, entry.record, key=lambda r: r.counter)
            if newest.counter <= books.agreed:
                return
            books.check.point_peer_at(newest.word)
            if format.word_counter(books.check.word) < newest.counter:  # the word was moved back off one that is dead
                books.check.move(newest)
                books.ledger.publish(newest.slot)
        books.check.sync()
        with books.lock:
            books.agreed = max(books.agreed, newest.counter)
