"""Model check of several ranks: the real verdicts, opening decision, ledger and retention, in every order of events.

Each run is a random, seeded history of one job: ranks save, fail, refuse, skip, hang for ever, give up waiting, die one
by one or all at once at any point, and start again, with as many ranks or with others. What is on a rank's disk is kept
apart from what is in its memory; a crash leaves the disk. After every event stands what must always hold:

complete    what was announced as agreed, and not superseded, is whole on the disks of all ranks of its world
start       a start finds a checkpoint at least as new as any that was announced; all its parts are of one save
keep        the `keep` newest that were announced in this life stay whole, but for those that a rank gave up
slots       no rank ever needs more than in_flight places, in_flight + 1 that are not settled, and keep
live        where all ranks are there, every save is settled in the end, and the next one is agreed

Left over of earlier lives are their blobs, and zombies: ranks of which nobody knows that they still tell.
"""

import random
from dataclasses import dataclass, field, replace

import pytest

from pccheck.errors import NoValidCheckpointError, RanksError
from pccheck.format import Record, SlotState
from pccheck.ranks import verdicts, worlds
from pccheck.ranks.verdicts import Member, Outcome
from pccheck.ranks.worlds import FLAT, Holding, Opening, Sealed, Seen
from pccheck.store import retention
from pccheck.store.ledger import Ledger, State


class Violation(AssertionError):
    """Something that must always hold did not."""


@dataclass
class Disk:
    """What one store's files hold: it survives its process."""

    slots: dict[int, Record] = field(default_factory=dict)
    incarnation: int = 0
    counter: int = 0
    peer: int = 0
    abandoned: tuple = ()

    def holding(self, rank: int) -> Holding:
        sealed = [r for r in self.slots.values() if r.state is SlotState.SEALED]
        return Holding(
            rank=rank, store_id=f"store {rank}", sealed=tuple(Sealed(*r.identity, r.world) for r in sealed),
            abandoned=self.abandoned, incarnation=max([self.incarnation, *(r.incarnation for r in sealed)]),
            counter=max([self.counter, *(r.counter for r in sealed)]), agreed=self.peer,
        )  # fmt: skip


class Rules:
    """The decisions that the ranks take; tests put wrong ones in their place."""

    def decide(self, seen: list[Seen]) -> Opening:
        return worlds.decide(seen, "root")

    def withdraws(self, opening: Opening, sealed: Sealed) -> bool:
        return not opening.holds(sealed)

    def verdict(self, member: Member, counter: int) -> verdicts.Verdict:
        return member.verdict(counter)

    def releasable(self, ledger: Ledger, keep: int, agreed: int, world: int) -> list[int]:
        return retention.releasable(ledger.entries(), keep=keep, agreed=agreed, world=world)

    def blob(self, member: Member) -> bytes:
        return member.blob()


@dataclass
class Rank:
    """One process: what is lost when it dies."""

    member: Member
    disk: Disk
    ledger: Ledger
    agreed: int
    next_counter: int
    incarnation: int
    filling: dict[int, int] = field(default_factory=dict)  # counter -> slot
    waiting: set[int] = field(default_factory=set)  # reported, the save waits
    given_up: set[int] = field(default_factory=set)
    hung: set[int] = field(default_factory=set)  # counters whose writer never ends
    alive: bool = True


class Job:
    """A job over some disks, from its first start to its last crash."""

    def __init__(self, rules: Rules, rnd: random.Random, *, in_flight: int, keep: int) -> None:
        self.rules, self.rnd, self.in_flight, self.keep = rules, rnd, in_flight, keep
        self.disks: dict[int, Disk] = {}
        self.announced: Sealed | None = None  # the newest that some rank took for agreed, on any life
        self.life: list[Sealed] = []  # all that were announced in this life
        self.given_up: set[int] = set()
        self.board: list[bytes | None] = []
        self.zombies: list[Member] = []
        self.ranks: list[Rank] = []
        self.nonces = 0
        self.starts = self.agreements = 0

    # -- starting ---------------------------------------------------------------------------------------------------

    def start(self, world: int) -> None:
        names = [FLAT] if world == 1 else list(range(world))
        for name in names:
            self.disks.setdefault(name, Disk())
        others = {name: d.holding(name) for name, d in self.disks.items()}
        seen = [Seen(own=others[n], others=tuple(h for k, h in others.items() if k != n)) for n in names]
        try:
            opening = self.rules.decide(seen)
        except (RanksError, NoValidCheckpointError) as error:
            raise Violation(f"start: a crash looks like a loss: {error}") from error
        self.starts += 1
        newest, due = opening.newest, self.announced
        if (newest.counter if newest else 0) < (due.counter if due else 0):
            raise Violation(f"start: {newest} was found, {due} was announced")
        if newest is not None:
            self.assert_whole(newest, "start")
        if opening.lost:
            raise Violation(f"start: a crash looks like a loss: {opening.lost_reason}")
        self.announced = newest  # whoever opened may let go of older ones
        self.ranks, self.life, self.given_up = [], [newest] if newest else [], set()
        cut = self.rnd.randrange(world) if self.rnd.random() < 0.1 else world  # a crash while they open
        if len(self.board) != world:
            self.board = [None] * world  # of the same number of ranks, the last life's blobs still lie there
        for rank, name in enumerate(names[:cut]):
            disk = self.disks[name]
            for slot, record in list(disk.slots.items()):
                sealed = Sealed(*record.identity, record.world)
                if record.state is SlotState.FILLING:
                    del disk.slots[slot]
                elif self.rules.withdraws(opening, sealed) and record.state is SlotState.SEALED:
                    disk.slots[slot] = replace(record, state=SlotState.WITHDRAWN)
            ledger = Ledger()
            for slot in range(self.in_flight + self.keep):
                disk.slots.setdefault(slot, None)
            disk.slots = {s: r for s, r in disk.slots.items() if r is not None or s < self.in_flight + self.keep}
            for slot, record in disk.slots.items():
                ledger.add(slot)
                if record is not None and record.state is SlotState.SEALED:
                    ledger.adopt(slot, record, abandoned=False)
            if whole := ledger.whole():
                ledger.publish(whole[0].slot)
                if newest and whole[0].counter == newest.counter:
                    ledger.mark(whole[0].slot, verified=True)  # restored
            disk.incarnation, disk.counter = opening.incarnation, opening.next_counter - 1
            disk.peer = whole[0].counter if whole else 0
            disk.slots = {s: r for s, r in disk.slots.items() if r is not None}
            self.nonces += 1
            member = Member(rank, world, f"nonce {self.nonces}")
            self.ranks.append(
                Rank(member, disk, ledger, disk.peer, opening.next_counter, opening.incarnation)
            )  # fmt: skip
        if cut < world:
            self.ranks = []
            return
        while world > 1 and not all(r.member.joined for r in self.ranks):
            for rank in self.ranks:
                self.publish(rank)
                rank.member.hear(self.board)
        for rank in self.ranks:
            rank.member.start(opening.next_counter, newest.counter if newest else 0)

    def publish(self, rank: Rank) -> None:
        self.board[rank.member.rank] = self.rules.blob(rank.member)
        rank.member.published = True

    # -- what can happen ----------------------------------------------------------------------------------------------

    def actions(self) -> list[tuple]:
        found: list[tuple] = []
        lead = min((r.next_counter for r in self.ranks), default=0)
        for rank in self.ranks:
            if not rank.alive:
                continue
            running = len(rank.filling) + len(rank.waiting)
            if rank.next_counter <= lead + 3:
                if running < self.in_flight and running + len(rank.given_up) <= self.in_flight:
                    found += [(self.begin, rank)] * 3
                elif running >= self.in_flight or rank.given_up:
                    found.append((self.skip, rank))
                found.append((self.refuse, rank))
            for counter in rank.filling:
                if counter not in rank.hung:
                    found += [(self.seal, rank, counter)] * 3 + [(self.fail, rank, counter)]
                    if self.rnd.random() < 0.05:
                        found.append((self.hang, rank, counter))
            found += [(self.settle, rank, c) for c in rank.waiting | rank.given_up] * 2
            found += [(self.give_up, rank, c) for c in rank.waiting if self.rnd.random() < 0.1]
            if len(self.ranks) > 1:
                found += [(self.publish, rank), (self.hear, rank)]
        zombies = [z for z in self.zombies if z.world == len(self.ranks) and self.rnd.random() < 0.002]
        return found + [(self.haunt, z) for z in zombies]

    def begin(self, rank: Rank) -> None:
        counter, rank.next_counter = rank.next_counter, rank.next_counter + 1
        rank.disk.counter = counter
        rank.member.expect(counter)
        slot = self.free_slot(rank)
        record = Record(
            store_id=bytes(16), slot=slot, state=SlotState.FILLING, incarnation=rank.incarnation, counter=counter,
            step=counter * 10, rank=rank.member.rank, world=rank.member.world,
        )  # fmt: skip
        rank.ledger.reserve(slot, record)
        rank.disk.slots[slot] = record
        rank.filling[counter] = slot

    def free_slot(self, rank: Rank) -> int:
        ledger = rank.ledger
        for unverified in [None, *(e for e in ledger.whole() if not e.verified)]:  # as Store._make_room
            if unverified is not None:
                ledger.mark(unverified.slot, verified=True)
            self.free(rank)
            if found := ledger.in_state(State.FREE):
                return found[0].slot
        slot = next(s for s in range(1000) if s not in {e.slot for e in ledger.entries()})
        ledger.add(slot)
        used = [e for e in ledger.entries() if e.state is not State.FREE]
        most = 2 * self.in_flight + 1 + self.keep
        if len(used) + 1 > most:
            raise Violation(f"slots: {len(used) + 1} of {most} on rank {rank.member.rank}: {used}")
        return slot

    def free(self, rank: Rank) -> None:
        for slot in self.rules.releasable(rank.ledger, self.keep, rank.agreed, rank.member.world):
            rank.ledger.release(slot)

    def seal(self, rank: Rank, counter: int) -> None:
        slot = rank.filling.pop(counter)
        record = replace(rank.disk.slots[slot], state=SlotState.SEALED)
        rank.disk.slots[slot] = record
        rank.ledger.seal(slot, record, pending=len(self.ranks) > 1)
        published = rank.ledger.published
        if published is None or published.counter < counter:
            rank.ledger.publish(slot)
        rank.waiting.add(counter)
        rank.member.hold(counter, record.step, b"plan")
        if len(self.ranks) == 1:
            rank.member.agreed = max(rank.member.agreed, counter)
            self.announce(record)  # durable by its record

    def fail(self, rank: Rank, counter: int) -> None:
        slot = rank.filling.pop(counter)
        rank.disk.slots[slot] = replace(rank.disk.slots[slot], state=SlotState.WITHDRAWN)
        rank.ledger.fail(slot)
        rank.member.refuse(counter, "the disk is full")

    def hang(self, rank: Rank, counter: int) -> None:
        rank.hung.add(counter)

    def refuse(self, rank: Rank) -> None:
        counter, rank.next_counter = rank.next_counter, rank.next_counter + 1
        rank.member.expect(counter)
        rank.member.refuse(counter, "a leaf cannot be stored")

    skip = refuse

    def hear(self, rank: Rank) -> None:
        try:
            rank.member.hear(self.board)
        except RanksError:  # a zombie told something: this life is over for whoever hears it
            rank.alive = False

    def haunt(self, zombie: Member) -> None:
        self.board[zombie.rank] = zombie.blob()

    def give_up(self, rank: Rank, counter: int) -> None:
        rank.waiting.discard(counter)
        rank.given_up.add(counter)
        self.given_up.add(counter)

    def settle(self, rank: Rank, counter: int) -> None:
        """As Settling does."""
        alone = len(self.ranks) == 1
        verdict = verdicts.AGREED if alone else self.rules.verdict(rank.member, counter)
        overtaken = counter in rank.given_up and counter < rank.member.agreed
        if verdict.outcome is Outcome.UNKNOWN and not overtaken:
            return
        rank.waiting.discard(counter)
        rank.given_up.discard(counter)
        rank.member.close(counter)
        entry = next((e for e in rank.ledger.entries() if e.counter == counter), None)
        if verdict.outcome is not Outcome.AGREED:
            if entry is None:
                raise Violation(f"keep: counter {counter} was let go before its verdict")
            self.withdraw(rank, entry.slot)
            return
        if entry is None:  # settled with a newer one, and let go since
            return
        held = rank.ledger.in_state(State.SEALED, State.PUBLISHED)
        entries = [e for e in held if e.counter in (counter, rank.member.agreed)]
        for e in entries:
            rank.ledger.mark(e.slot, pending=False)
            self.announce(e.record)
        newest = max(entries, key=lambda e: e.counter)
        rank.disk.peer = max(rank.disk.peer, newest.counter)
        if self.rnd.random() < 0.05:  # between PEER_ADDR and the release
            self.crash()
            return
        rank.agreed = max(rank.agreed, newest.counter)
        self.free(rank)
        if alone or rank.member.rank == 0:
            self.clear(len(self.ranks))

    def withdraw(self, rank: Rank, slot: int) -> None:
        ledger, entry = rank.ledger, rank.ledger[slot]
        if entry.state is State.PUBLISHED:
            left = [e for e in ledger.durable(rank.agreed) if e.slot != slot]
            ledger.publish(left[0].slot) if left else ledger.demote()
        rank.disk.slots[slot] = replace(rank.disk.slots[slot], state=SlotState.WITHDRAWN)
        ledger.release(slot)

    def announce(self, record: Record) -> None:
        sealed = Sealed(*record.identity, record.world)
        self.agreements += 1
        if sealed not in self.life:
            self.life.append(sealed)
        if self.announced is None or sealed.counter > self.announced.counter:
            self.announced = sealed

    def clear(self, world: int) -> None:
        """As Neighbours.clear: what another number of ranks left."""
        for name in list(self.disks):
            if (name == FLAT) != (world == 1) or name >= world:
                del self.disks[name]

    def crash(self) -> None:
        self.zombies += [r.member for r in self.ranks]
        self.ranks = []

    # -- what must hold -----------------------------------------------------------------------------------------------

    def assert_whole(self, sealed: Sealed, what: str) -> None:
        for rank in [FLAT] if sealed.world == 1 else range(sealed.world):
            disk = self.disks.get(rank, Disk())
            if not any(
                Sealed(*r.identity, r.world) == sealed and r.state is SlotState.SEALED for r in disk.slots.values() if r
            ):
                raise Violation(f"{what}: {sealed} is not whole on rank {rank}")

    def check(self) -> None:
        if self.announced is not None:
            self.assert_whole(self.announced, "complete")
        mine = [s for s in self.life if s.world == len(self.ranks)]
        for sealed in sorted(mine, key=lambda s: -s.counter)[: self.keep]:
            if sealed.counter not in self.given_up:
                self.assert_whole(sealed, "keep")

    def run(self, events: int, worlds_: list[int]) -> None:
        world = self.rnd.choice(worlds_)
        for _ in range(events):
            if not self.ranks:
                world = self.rnd.choice([world, world, *worlds_])
                self.start(world)
                continue
            actions = self.actions()
            if not any(r.alive for r in self.ranks) or self.rnd.random() < 0.01:
                self.crash()
            elif self.rnd.random() < 0.01:
                self.rnd.choice(self.ranks).alive = False  # this one only; the others go on, for a while
            elif actions:
                act, *arguments = self.rnd.choice(actions)
                act(*arguments)
            else:
                self.crash()
            self.check()
        if self.ranks and all(r.alive and not r.hung for r in self.ranks):
            self.finish()

    def finish(self) -> None:
        """Nobody dies any more: every save is settled, and one more is agreed by all."""
        last = max(r.next_counter for r in self.ranks)
        for rank in self.ranks:
            while rank.next_counter < last:
                self.refuse(rank)
        self.settle_all()
        for rank in self.ranks:
            self.begin(rank)
        self.settle_all()
        if self.ranks and any(r.agreed != last for r in self.ranks):
            raise Violation(f"live: counter {last} is not agreed: {[r.agreed for r in self.ranks]}")

    def settle_all(self) -> None:
        for _ in range(4):
            for rank in self.ranks:
                for counter in list(rank.filling):
                    self.seal(rank, counter)
                if len(self.ranks) > 1:
                    self.publish(rank)
            for rank in list(self.ranks):
                if len(self.ranks) > 1:
                    self.hear(rank)
                for counter in sorted(rank.waiting | rank.given_up):
                    if self.ranks:
                        self.settle(rank, counter)
                        self.check()
            if any(not r.alive for r in self.ranks):  # a zombie's blob
                self.ranks = []
        left = [(r.member.rank, r.waiting, r.given_up) for r in self.ranks if r.waiting or r.given_up]
        if left:
            raise Violation(f"live: never settled: {left}")


class MinimumOfNewest(Rules):
    """The ranks restore the minimum of what is newest on each."""

    def decide(self, seen: list[Seen]) -> Opening:
        opening = super().decide(seen)
        newest = [max(s.own.sealed, key=lambda s: s.counter, default=None) for s in seen]
        if None in newest or len(seen) == 1:
            return opening
        least = min(newest, key=lambda s: s.counter)
        return replace(opening, complete=(least,), held=opening.held | {least})


class FreesBeforeAgreement(Rules):
    """A rank frees what its own newest checkpoint supersedes."""

    def releasable(self, ledger: Ledger, keep: int, agreed: int, world: int) -> list[int]:
        entries = [replace(e, pending=False) for e in ledger.entries()]
        newest = max((e.counter for e in entries if e.whole), default=0)
        return retention.releasable(entries, keep=keep, agreed=newest, world=world)


class AgreesAlone(Rules):
    """A rank takes a checkpoint for agreed as soon as half of the ranks hold it."""

    def verdict(self, member: Member, counter: int) -> verdicts.Verdict:
        found = member.verdict(counter)
        most = found.outcome is Outcome.UNKNOWN and len(found.ranks) <= member.world // 2
        return verdicts.AGREED if most else found


class WithdrawsNothing(Rules):
    """What is newer than the agreed checkpoint, or not whole, stays when a job starts again."""

    def withdraws(self, opening: Opening, sealed: Sealed) -> bool:
        return False


class PendingCounts(Rules):
    """What is not known to be on all ranks counts for `keep`."""

    def releasable(self, ledger: Ledger, keep: int, agreed: int, world: int) -> list[int]:
        entries = [replace(e, pending=False) for e in ledger.entries()]
        return retention.releasable(entries, keep=keep, agreed=agreed, world=world)


class ForgetsTooEarly(Rules):
    """A rank tells nothing of what it has settled itself, though others may still ask."""

    def blob(self, member: Member) -> bytes:
        member._held = {c: h for c, h in member._held.items() if c in member._open}
        return member.blob()


def simulate(rules: Rules, runs: int, *, events: int = 120, seed: int = 0) -> tuple[int, int]:
    """Run many short jobs; give how many starts and agreements there were."""
    starts = agreements = 0
    for run in range(runs):
        rnd = random.Random(f"{seed} {run}")
        job = Job(rules, rnd, in_flight=rnd.choice([1, 2, 3]), keep=rnd.choice([1, 2]))
        job.run(events, rnd.choice([[2], [3], [5], [1, 2, 3], [2, 4], [2, 3, 5]]))
        starts, agreements = starts + job.starts, agreements + job.agreements
    return starts, agreements


def test_no_order_of_events_loses_or_mixes_what_was_agreed():
    starts, agreements = simulate(Rules(), 2000)
    assert starts > 4000
    assert agreements > 8000


@pytest.mark.parametrize(
    ("wrong", "found"),
    [
        (MinimumOfNewest, "start"),
        (FreesBeforeAgreement, "complete|start|keep"),
        (AgreesAlone, "complete|start"),
        (WithdrawsNothing, "complete|keep|start"),
        (PendingCounts, "keep"),
        (ForgetsTooEarly, "live"),
    ],
)
def test_a_wrong_rule_is_found(wrong, found):
    with pytest.raises(Violation, match=f"^({found}):"):
        simulate(wrong(), 2000)
