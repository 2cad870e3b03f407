"""What this rank and all others agree on: openings, restores, saves (floor 2: imports verdicts, channel, coordination).

With one rank there is no thread, nothing is read or published, and no time passes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import final

from pccheck.errors import RanksError, RankTimeoutError, UsageError
from pccheck.ranks.channel import LEAVE_S, Channel, anew
from pccheck.ranks.coordination import Coordinator
from pccheck.ranks.verdicts import AGREED, Outcome, Verdict

_FAILED = "failed"  # the topic of a rank that met an error of its own between two exchanges


@final
class Agreement:
    """One rank's agreement with all others. Thread-safe.

    Args:
        coordinator: where the ranks' blobs lie; closed by `close`.

    Attributes:
        rank: of this process.
        world: number of ranks.
    """

    def __init__(self, coordinator: Coordinator) -> None:
        self.rank, self.world = rank, world = coordinator.rank, coordinator.world
        if not (isinstance(rank, int) and isinstance(world, int) and 0 <= rank < world):
            raise UsageError(f"coordinator={coordinator!r} is not allowed: it says rank {rank!r} of {world!r}")
        self._channel = Channel(coordinator)
        self._state, self._member = self._channel.state, self._channel.member
        self._given_up: set[int] = set()  # counters whose verdict comes too late for their saves
        self._apart: RanksError | None = None  # why nothing can be exchanged any more

    # -- opening and restoring: all ranks at once ---------------------------------------------------------------------

    def join(self, timeout_s: float) -> None:
        """Wait until all ranks have heard of each other.

        Raises RankTimeoutError that names those that are missing, and as `exchange` does.
        """
        if self.world > 1:
            what = "all ranks to open their stores"
            self._channel.tell()
            try:
                self._channel.wait(
                    lambda: self._member.joined, timeout_s, what, lambda: self._member.unheard
                )  # fmt: skip
            except RankTimeoutError as error:
                told = [f"rank {r} as one of {w}" for r, w in sorted(self._member.worlds.items()) if r in error.ranks]
                if not told:
                    raise
                what += f" as ranks of {self.world} (last heard: {', '.join(told[:16])})"
                raise RankTimeoutError(what, error.waited_s, error.ranks) from None

    def exchange(self, topic: str, payload: bytes, timeout_s: float) -> list[bytes]:
        """Give what each rank says to this topic; every rank must call this for the same topics in the same order.

        Raises:
            RankTimeoutError: ranks did not answer; names them. Nobody can exchange anything after that.
            RanksError: a rank was restarted, has left, or is at another topic.
            CoordinatorLostError: the place is gone.
        """
        if self.world == 1:
            return [payload]
        until_s = time.monotonic() + timeout_s
        with self._state:
            number = self.offer(topic, payload, timeout_s)
            said = self.collect(number, topic, max(0.0, until_s - time.monotonic()))
        assert said is not None, "no other exchange can have been begun under the lock"
        return said

    def offer(self, topic: str, payload: bytes, timeout_s: float) -> int:
        """Begin an exchange without waiting for the others, and give its number for `collect`, which should follow.

        The words of the others are looked for meanwhile, so that `collect` finds them there. Only where the exchange
        before was not collected is it waited, until all take part in that one: a rank that still collects the one
        before it would else never find it again. Raises as `exchange`.
        """
        member = self._member
        with self._state:
            self._await_all(lambda: member.last_answer, topic, timeout_s)
            number = member.answer(topic, payload)
            self._channel.expecting = lambda: number == member.last_answer and bool(member.silent(number))
            self._channel.tell()
            return number

    def collect(self, number: int, topic: str, timeout_s: float) -> list[bytes] | None:
        """Give what each rank said in an exchange that was begun with `offer`, once all have; raises as `exchange`.

        None = another exchange was begun since, a restore for one: this one is void, as it is on all other ranks, since
        all begin them in the same order.
        """
        with self._state:
            self._assert_together()
            if number != self._member.last_answer:
                return None
            self._await_all(lambda: number, topic, timeout_s)
            said = self._member.answers(number)
            failed = [rank for rank, answer in sorted(said.items()) if answer.topic == _FAILED]
            if failed:
                raise RanksError(f"rank {failed[0]}, before {topic!r}: {said[failed[0]].payload.decode()}", failed)
            other = [rank for rank, answer in sorted(said.items()) if answer.topic != topic]
            if other:
                raise RanksError(
                    f"rank {self.rank} is at {topic!r}, rank {other[0]} at {said[other[0]].topic!r}: all ranks must "
                    "open, restore and close in the same order",
                    other,
                )
            return [said[rank].payload for rank in range(self.world)]

    def say(self, topic: str, payload: bytes) -> None:
        """Take part in an exchange without waiting for the others; the one before must have been collected."""
        if self.world > 1:
            with self._state:
                self._member.answer(topic, payload)
                self._channel.tell()

    @contextmanager
    def on_its_own(self) -> Iterator[None]:
        """Do what may fail on this rank alone between two exchanges: the others meet the error in their next one."""
        try:
            yield
        except BaseException as error:
            self.say(_FAILED, f"{type(error).__name__}: {error}"[:2000].encode())
            raise

    def _assert_together(self) -> None:
        if self._apart is not None:
            raise anew(self._apart)

    def _await_all(self, number: Callable[[], int], topic: str, timeout_s: float) -> None:
        """Wait until all ranks took part in an exchange; who gives up waiting takes part in none after that."""
        self._assert_together()
        try:
            self._channel.wait(
                lambda: self._all_answered(number(), topic), timeout_s, f"the word of all ranks on {topic!r}",
                lambda: self._member.silent(number()),
            )  # fmt: skip
        except RankTimeoutError as error:
            self._apart = RanksError(f"an earlier exchange between the ranks failed: {error}", error.ranks)
            raise

    def _all_answered(self, number: int, topic: str) -> bool:
        silent = self._member.silent(number)
        gone = {rank: why for rank, why in self._member.gone().items() if rank in silent}
        for rank, why in gone.items():
            raise RanksError(f"rank {rank} left before {topic!r}: {why}", list(gone))
        return not silent

    def start(self, next_counter: int, agreed: int) -> None:
        """Begin an incarnation: all ranks agreed on these two numbers."""
        with self._state:
            self._member.start(next_counter, agreed)

    # -- saves --------------------------------------------------------------------------------------------------------

    def expect(self, counter: int) -> None:
        """Note that a counter is used: `report` must follow, whatever becomes of it."""
        if self.world > 1:
            with self._state:
                self._member.expect(counter)

    def report(self, counter: int, step: int, ok: bool, *, plan: bytes = b"", reason: str = "") -> bool:
        """Say whether this rank holds a counter durably, at once, without I/O; tell whether anybody hears of it.

        Only the first word on a counter counts; with one rank there is nobody to hear.

        Args:
            counter: which save.
            step: the caller's label.
            ok: whether it is held.
            plan: digest of the plan of the global arrays.
            reason: why it is not held.
        """
        if self.world == 1:
            return False
        with self._state:
            new = self._member.hold(counter, step, plan) if ok else self._member.refuse(counter, reason)
            if new:
                self._channel.tell()
            return new

    def wait_verdict(self, counter: int, timeout_s: float) -> Verdict:
        """Wait for what becomes of a counter that this rank reported: AGREED or DEAD.

        Raises:
            RankTimeoutError: nobody knows yet; names the ranks that did not report. `settled` tells it later.
            RanksError, CoordinatorLostError: nobody will ever know.
        """
        if self.world == 1:
            return AGREED
        with self._state:
            try:
                self._channel.wait(
                    lambda: self._member.verdict(counter).outcome is not Outcome.UNKNOWN, timeout_s,
                    f"all ranks to hold counter {counter}", lambda: list(self._member.verdict(counter).ranks),
                )  # fmt: skip
            except BaseException:
                self._given_up.add(counter)
                self._channel.listening = True
                raise
            verdict = self._member.verdict(counter)
            self._close(counter)
            return verdict

    def settled(self) -> dict[int, Verdict]:
        """Give, once, what became of counters whose saves gave up waiting; UNKNOWN = a newer one was agreed since."""
        with self._state:
            found = self._late()
            for counter in found:
                self._given_up.discard(counter)
                self._close(counter)
            self._channel.listening = bool(self._given_up)
        return found

    def await_settled(self, timeout_s: float) -> None:
        """Wait until `settled` may have something to give, at most for `timeout_s`."""
        with self._state:
            if self._given_up and not self._late() and not self.lost:
                self._channel.pause(timeout_s)

    def _late(self) -> dict[int, Verdict]:
        found = {counter: self._member.verdict(counter) for counter in sorted(self._given_up)}
        newest = self._member.agreed
        return {c: v for c, v in found.items() if v.outcome is not Outcome.UNKNOWN or c < newest}

    def _close(self, counter: int) -> None:
        floor = self._member.floor
        self._member.close(counter)
        if self._member.floor != floor:
            self._channel.tell()

    @property
    def agreed(self) -> int:
        """The greatest counter that all ranks hold, as far as this rank knows."""
        with self._state:
            return self._member.agreed

    @property
    def unsettled(self) -> int:
        """How many counters are not settled whose saves gave up waiting; each holds a slot."""
        return len(self._given_up)

    @property
    def lost(self) -> bool:
        """Whether nothing can be agreed any more."""
        return self._channel.lost is not None

    def assert_usable(self) -> None:
        """Raise why no later save can become durable on all ranks, if that is so."""
        self._channel.assert_usable()

    # -- the end ------------------------------------------------------------------------------------------------------

    def close(self, timeout_s: float) -> None:
        """Leave; after that other ranks need not wait for this one. Idempotent; takes at most about `timeout_s`."""
        self._channel.leave("it closed its Checkpointer", timeout_s)

    def give_up(self, reason: str, timeout_s: float) -> None:
        """Leave before opening has succeeded; whoever can be told within `timeout_s` need not wait for this rank."""
        try:
            self.join(timeout_s)
        except RanksError:
            pass
        self._channel.leave(reason, LEAVE_S)
