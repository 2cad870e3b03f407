"""What one rank tells the others and concludes from what they tell (floor 0: imports errors, telling).

No clock, no threads, no I/O: `agreement` carries it out, and the model tests drive it through every order of events.

Every rank leaves one blob that all can read. In it stand facts that never change: a rank's word on a counter is given
once. A counter is agreed when all ranks said that they hold it, and that it is the same step with the same global
arrays; it is dead when one rank said that it does not. So whoever can read all blobs comes to the same verdict, however
late, and nobody has to lead or to vote. G is the greatest agreed counter.

Blobs of earlier jobs may lie in the same place. Each life of a rank draws a nonce, and a rank has joined when every
other rank's blob tells that it heard this nonce, which no earlier blob can. A nonce that changes later is a restart.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import final

from pccheck.errors import RanksError, named_ranks
from pccheck.ranks.telling import VERSION, Answer, Blob, Held, Refused, decode, encode, joined, world_of

KEPT_ANSWERS = 2  # whoever gives answer n knows that all have given n - 1: nobody needs n - 2 any more


class Outcome(Enum):
    """What is known of a counter."""

    AGREED = "agreed"
    DEAD = "dead"
    UNKNOWN = "unknown"


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What became of a counter; `ranks` are those at fault (DEAD) or missing (UNKNOWN), `reason` says why."""

    outcome: Outcome
    ranks: tuple[int, ...] = ()
    reason: str = ""


AGREED = Verdict(outcome=Outcome.AGREED)


@final
class Member:
    """One rank's part in the agreement. Not thread-safe.

    Args:
        rank: of this process.
        world: number of ranks.
        nonce: drawn for this life, never used before.
    """

    def __init__(self, rank: int, world: int, nonce: str) -> None:
        self.rank, self.world, self.nonce = rank, world, nonce
        self.published = False  # whether a blob of this life was left
        self.left = ""
        self.agreed = 0
        self._heard = [nonce if r == rank else "" for r in range(world)]
        self._seen: list[Blob | None] = [None] * world
        self.worlds: dict[int, int] = {}  # ranks not heard of, whose blobs are of a job of another size
        self._missing: set[int] = set()  # ranks that had no blob there at the last look
        self._absent: set[int] = set()  # nor at the one before: no mere fault of one look at a network's folder
        self._answers: list[Answer] = []
        self._held: dict[int, Held] = {}
        self._refused: list[Refused] = []
        self._open: set[int] = set()  # counters whose verdict this rank wants to know
        self._next = 1  # the next counter that will be expected
        self._since = 0

    # -- telling and hearing ----------------------------------------------------------------------------------------

    def blob(self) -> bytes:
        """Give what this rank tells now."""
        return encode(
            Blob(
                version=VERSION, nonce=self.nonce, heard=tuple(self._heard), answers=tuple(self._answers),
                held=tuple(self._held[c] for c in sorted(self._held)), refused=tuple(self._refused),
                since=self._since, floor=self.floor, agreed=self.agreed, left=self.left,
            )
        )  # fmt: skip

    def hear(self, blobs: Sequence[bytes | None]) -> bool:
        """Take in what all ranks tell, and say whether this rank has something new to tell because of it.

        What cannot be read counts as not there; the last that was heard of a rank goes on to count.

        Raises:
            RanksError: a rank was restarted, or another process acts as this rank.
        """
        was_joined, news = self.joined, False
        missing = {rank for rank, raw in enumerate(blobs) if raw is None}
        self._absent, self._missing = missing & self._missing, missing
        for rank, raw in enumerate(blobs[: self.world]):
            blob = decode(raw, self.world)
            if rank == self.rank:
                news |= self._check_own(blob)
            elif blob is None:
                if not was_joined and (world := world_of(raw)):
                    self.worlds[rank] = world
            elif not was_joined:
                news |= blob.nonce != self._heard[rank]
                self._heard[rank], self._seen[rank] = blob.nonce, blob
            elif blob.nonce != self._heard[rank]:
                raise RanksError(
                    f"rank {rank} was restarted while this rank went on: restart all ranks of the job together", [rank]
                )
            else:
                self._seen[rank] = blob
        if self.joined:
            news |= self._conclude()
        return news

    def _check_own(self, blob: Blob | None) -> bool:
        if not self.published:
            return False  # what is there is of an earlier life
        if blob is not None and blob.nonce != self.nonce:
            raise RanksError(
                f"another process acts as rank {self.rank} of this job: give each process a rank of its own, "
                "and end those that are left over of an earlier start",
                [self.rank],
            )
        return blob is None  # somebody tidied it away: tell it again

    @property
    def joined(self) -> bool:
        """Whether all other ranks have heard this life of this rank."""
        return not self.unheard

    @property
    def unheard(self) -> list[int]:
        """The ranks that have not yet told that they heard this one."""
        others = [r for r in range(self.world) if r != self.rank]
        return [r for r in others if (b := self._seen[r]) is None or b.heard[self.rank] != self.nonce]

    def gone(self) -> dict[int, str]:
        """Give the ranks that say nothing more, and why."""
        return {r: b.left for r, b in enumerate(self._seen) if b is not None and b.left}

    @property
    def all_know(self) -> bool:
        """Whether every other rank that is there knows what this one knows to be agreed.

        One that heard last that all leave takes its blob away before others read that it leaves, too: not to be waited
        for (one close in thirty took all of its time, seen).
        """
        others = ((r, b) for r, b in enumerate(self._seen) if b is not None and r not in self._absent)
        return all(b.left or b.agreed >= self.agreed for _, b in others)

    @property
    def all_left(self) -> bool:
        """Whether no other rank is there any more, as far as this one knows."""
        others = [r for r in range(self.world) if r != self.rank]
        return all(r in self._absent or ((b := self._seen[r]) is not None and b.left) for r in others)

    # -- exchanges --------------------------------------------------------------------------------------------------

    def answer(self, topic: str, payload: bytes) -> int:
        """Say something in the next exchange, and give its number.

        While anybody is `silent` in the newest one, another may still want the one before, which would be forgotten.
        """
        number = self.last_answer + 1
        self._answers = [*self._answers, Answer(number, topic, payload)][-KEPT_ANSWERS:]
        return number

    @property
    def last_answer(self) -> int:
        """The number of the newest exchange that this rank took part in; 0 = none."""
        return self._answers[-1].number if self._answers else 0

    def answers(self, number: int) -> dict[int, Answer]:
        """Give what the ranks said in an exchange, as far as they did."""
        said = {r: a for r, b in enumerate(self._seen) if b is not None for a in b.answers if a.number == number}
        own = next((a for a in self._answers if a.number == number), None)
        return said if own is None else {**said, self.rank: own}

    def silent(self, number: int) -> list[int]:
        """Give the ranks that did not say anything yet in an exchange, as far as this one knows."""
        said = self.answers(number) if number else range(self.world)
        return [rank for rank in range(self.world) if rank not in said]

    # -- reports and verdicts -----------------------------------------------------------------------------------------

    def start(self, next_counter: int, agreed: int) -> None:
        """Begin an incarnation: all ranks know these two numbers."""
        self._next, self._since, self.agreed = next_counter, next_counter, agreed

    def expect(self, counter: int) -> None:
        """Note that a counter is used here, so that the others keep telling of it until it is closed."""
        self._open.add(counter)
        self._next = max(self._next, counter + 1)

    def hold(self, counter: int, step: int, plan: bytes) -> bool:
        """Say that this rank holds a counter durably; tells whether that is new."""
        if counter in self._held or self.has_refused(counter):
            return False
        self._held[counter] = Held(counter, step, plan.hex())
        self._conclude()
        return True

    def refuse(self, counter: int, reason: str) -> bool:
        """Say that this rank does not hold a counter; tells whether that is new: a word once given stands."""
        if counter in self._held or self.has_refused(counter):
            return False
        self._refused = joined([*self._refused, Refused(counter, counter, reason)])
        self.close(counter)
        return True

    def has_refused(self, counter: int) -> bool:
        """Tell whether this rank said that it does not hold a counter."""
        return _refusal(self._refused, counter) is not None

    def close(self, counter: int) -> None:
        """Note that this rank need not hear of a counter any more."""
        self._open.discard(counter)

    @property
    def floor(self) -> int:
        """The least counter of which this rank still wants to hear."""
        return min(self._open, default=self._next)

    def verdict(self, counter: int) -> Verdict:
        """Give what is known of a counter."""
        words: dict[int, Held] = {}
        missing: list[int] = []
        if counter in self._held:
            words[self.rank] = self._held[counter]
        for rank, blob in enumerate(self._seen):
            if rank == self.rank:
                against = _refusal(self._refused, counter)
            else:
                against = _against(blob, counter)
                held = next((h for h in (blob.held if blob else ()) if h.counter == counter), None)
                words |= {} if held is None else {rank: held}
            if against is not None:
                return Verdict(outcome=Outcome.DEAD, ranks=(rank,), reason=f"rank {rank}: {against}")
            if rank not in words:
                missing.append(rank)
        if (dead := _difference(counter, words)) is not None:
            return dead
        return Verdict(outcome=Outcome.UNKNOWN, ranks=tuple(missing)) if missing else AGREED

    def _conclude(self) -> bool:
        """Find the greatest agreed counter, and forget what nobody wants to hear of; tell whether that is news."""
        before = self.agreed
        told = max((b.agreed for b in self._seen if b is not None), default=0)
        mine = (c for c in sorted(self._held, reverse=True) if c > before)
        self.agreed = max(before, told, next((c for c in mine if self.verdict(c).outcome is Outcome.AGREED), 0))
        floors = [b.floor for b in self._seen if b is not None and not b.left]
        since = max(self._since, min([self.floor, *floors]))
        if since > self._since:
            self._since = since
            self._held = {c: h for c, h in self._held.items() if c >= since}
            self._refused = [Refused(max(r.low, since), r.high, r.reason) for r in self._refused if r.high >= since]
        return self.agreed > before


def _against(blob: Blob | None, counter: int) -> str | None:
    """Give why a rank does not hold a counter and never will; None where it holds it or may yet do so."""
    if blob is None or any(h.counter == counter for h in blob.held):
        return None
    if (refused := _refusal(blob.refused, counter)) is not None:
        return refused
    if counter < blob.since:
        return "it gave this checkpoint up before all ranks held it"
    return blob.left or None


def _refusal(refused: Iterable[Refused], counter: int) -> str | None:
    return next((r.reason for r in refused if r.low <= counter <= r.high), None)


def _difference(counter: int, words: Mapping[int, Held]) -> Verdict | None:
    """Give the verdict on a counter that is not the same checkpoint on all ranks that hold it."""
    if len({(h.step, h.plan) for h in words.values()}) < 2:
        return None
    groups = _by_value({r: h.step for r, h in words.items()})
    if len(groups) > 1:
        told = "; ".join(f"step {step} on {named_ranks(ranks)}" for step, ranks in groups)
        reason = f"counter {counter} is {told}: all ranks must save the same steps in the same order"
    else:
        groups = _by_value({r: h.plan for r, h in words.items()})
        told = " differ from ".join(f"those of {named_ranks(ranks)}" for _, ranks in groups)
        reason = (
            f"the global arrays differ in path, dtype or shape ({told}): all ranks must save parts of the same arrays"
        )
    least = min(len(ranks) for _, ranks in groups)  # most likely at fault are the few; of two alike, both
    ranks = sorted(r for _, group in groups if len(group) == least for r in group)
    return Verdict(outcome=Outcome.DEAD, ranks=tuple(ranks), reason=reason)


def _by_value(values: Mapping[int, int | str]) -> list[tuple[int | str, list[int]]]:
    groups: dict[int | str, list[int]] = {}
    for rank in sorted(values):
        groups.setdefault(values[rank], []).append(rank)
    return list(groups.items())
