"""One thread tells this rank's words and hears the others', for all who wait (floor 2: imports floor 0, coordination).

One thread per Checkpointer uses the coordinator, so that a place that cannot serve two threads at once is no matter,
one read serves all that wait, and a place that hangs delays nobody but those who wait for it, each with a deadline.
"""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Callable
from typing import final

from pccheck.errors import CoordinatorLostError, RanksError, RankTimeoutError
from pccheck.ranks.coordination import Coordinator
from pccheck.ranks.verdicts import Member

POLL_S = (0.001, 0.05)  # between two looks: at first, and at most
RARELY_S = 1.0  # where nobody waits, but something may still be heard
LEAVE_S = 2.0  # how long a rank that leaves waits for the others to leave, so that nothing is left lying about


@final
class Channel:
    """A rank's connection to all others. Thread-safe; whatever uses `member` holds `state`.

    Args:
        coordinator: where the ranks' blobs lie.

    Attributes:
        state: guards `member`; nothing is read or published under it.
        member: what this rank tells, and what it heard.
        lost: why nothing is heard any more; None = all is well.
        listening: whether to go on looking, now and then, where nobody waits.
        expecting: tells whether words are still to come that somebody will soon want; it is looked for them often.
    """

    def __init__(self, coordinator: Coordinator) -> None:
        self._coordinator = coordinator
        self.state = threading.RLock()
        self.member = Member(coordinator.rank, coordinator.world, secrets.token_hex(16))
        self.lost: RanksError | None = None
        self.listening = False
        self.expecting: Callable[[], bool] = lambda: False
        self._changed = threading.Condition(self.state)
        self._thread: threading.Thread | None = None
        self._news = self._ending = False  # something to tell; it is over
        self._waiting = 0  # threads that wait for others' words

    def tell(self) -> None:
        """Have this rank's blob published anew, soon; the first call begins it all."""
        with self.state:
            self._news = True
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="pccheck-agree", daemon=True)
                self._thread.start()
            self._changed.notify_all()

    def wait(self, done: Callable[[], bool], timeout_s: float, what: str, missing: Callable[[], list[int]]) -> None:
        """Wait, holding `state` but while waiting, until `done()`, which may raise.

        Raises RankTimeoutError with the ranks that `missing()` gives; or why nothing is heard any more.
        """
        with self.state:
            began = time.monotonic()
            while not done():
                self.assert_usable()
                left_s = began + timeout_s - time.monotonic()
                if left_s <= 0:
                    raise RankTimeoutError(what, time.monotonic() - began, missing())
                self.pause(left_s)

    def pause(self, timeout_s: float, *, until: Callable[[], bool] | None = None) -> None:
        """Wait until something was heard or lost (until `until()` holds), or for `timeout_s`, as one that waits."""
        with self.state:
            self._waiting += 1
            self._changed.notify_all()
            try:
                if until is None:
                    self._changed.wait(timeout_s)
                else:
                    self._changed.wait_for(lambda: self.lost is not None or until(), timeout_s)
            finally:
                self._waiting -= 1

    def assert_usable(self) -> None:
        """Raise why nothing is heard any more, if that is so."""
        with self.state:
            if self.lost is not None:
                raise anew(self.lost)

    def leave(self, reason: str, timeout_s: float) -> None:
        """Say that this rank leaves, and why, and let go of the coordinator. Idempotent; raises nothing of the place.

        It waits, at most `timeout_s`, until the others know what this rank knows to be agreed: the place may go away
        with this process. The blob is taken away when all others have left too; else somebody may still need it.
        """
        alone = self._thread is None  # nothing was told: nobody can need it
        if self._thread is not None:
            deadline = time.monotonic() + timeout_s
            with self.state:
                if self.lost is None and not self._ending:
                    self.member.left = reason
                    self.tell()
                    self.pause(timeout_s, until=lambda: not self._news and self.member.all_know)
                    left_s = max(0.0, deadline - time.monotonic())
                    self.pause(min(left_s, LEAVE_S), until=lambda: not self._news and self.member.all_left)
                self._ending, alone = True, self.member.all_left
                self._changed.notify_all()
            self._thread.join(max(LEAVE_S, deadline - time.monotonic()))
        if alone:
            self._coordinator.close()

    # -- the thread ---------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        delay = POLL_S[0]
        while self._turn(delay):
            with self.state:
                news, self._news = self._news, False
                blob = self.member.blob() if news else None
            try:
                if blob is not None:
                    self._coordinator.publish(blob)
                blobs = self._coordinator.read()
            except BaseException as error:  # whatever it is, those who wait must hear of it
                self._lose(error if isinstance(error, RanksError) else _gone(error))
                break
            with self.state:
                self.member.published |= blob is not None
                try:
                    heard = self.member.hear(blobs)
                except RanksError as error:
                    self._lose(error)
                    break
                self._news |= heard
                self._changed.notify_all()
            delay = POLL_S[0] if heard or news else min(delay * 1.5, POLL_S[1])
        self._say_why()

    def _turn(self, delay: float) -> bool:
        """Wait for the time of the next look; False = it is over."""
        with self.state:
            if self._waiting:
                self._changed.wait_for(lambda: self._news or self._ending, delay)
            else:
                limit = delay if self.expecting() else RARELY_S if self.listening else None
                self._changed.wait_for(lambda: self._news or self._ending or self._waiting, limit)
            return not self._ending

    def _lose(self, error: RanksError) -> None:
        with self.state:
            self.lost = error
            self._changed.notify_all()

    def _say_why(self) -> None:
        """Tell the others why this rank goes no further, so that they need not wait; at best effort."""
        with self.state:
            error = self.lost
            if error is None or isinstance(error, CoordinatorLostError) or self.member.rank in error.ranks:
                return  # it left in order, there is nowhere to tell it, or another process has its place
            self.member.left = error.reason
            blob = self.member.blob()
        try:
            self._coordinator.publish(blob)
        except Exception:  # the error under way is the one to see
            return


def _gone(error: BaseException) -> CoordinatorLostError:
    lost = CoordinatorLostError(
        f"the place through which the ranks agree failed: {error!r}. What was committed is safe; nothing newer can be. "
        "Restart the job."
    )
    lost.__cause__ = error
    return lost


def anew(error: RanksError) -> RanksError:
    """Give the same error for another thread to raise: a raised one belongs to the thread that raised it."""
    new = type(error).__new__(type(error))
    new.args, new.__cause__ = error.args, error
    vars(new).update(vars(error))
    return new
