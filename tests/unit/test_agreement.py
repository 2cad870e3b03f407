"""Agreement over a real place: waits end, ranks are named, a lost place fails fast, closing hangs nothing."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from pccheck.errors import CoordinatorLostError, RanksError, RankTimeoutError
from pccheck.ranks.agreement import Agreement
from pccheck.ranks.coordination import Solo
from pccheck.ranks.verdicts import Outcome


class Place:
    """A key-value store of one process, which can be taken away."""

    def __init__(self, world):
        self.blobs, self.world, self.error = [None] * world, world, None
        self.reads = 0
        self.seen_by = [self.blobs] * world  # what each rank reads: held back ones see an old copy

    def of(self, rank):
        return Connection(self, rank)

    def hold_back(self, rank):
        self.seen_by[rank] = list(self.blobs)


class Connection:
    def __init__(self, place, rank):
        self.place, self.rank, self.world, self.closed = place, rank, place.world, 0

    def publish(self, blob):
        if self.place.error:
            raise self.place.error
        self.place.blobs[self.rank] = blob

    def read(self):
        if self.place.error:
            raise self.place.error
        self.place.reads += 1
        return list(self.place.seen_by[self.rank])

    def close(self):
        self.closed += 1
        self.place.blobs[self.rank] = None


@pytest.fixture
def ranks():
    """Make agreements of a place; all are closed in the end."""
    made = []

    def make(place, *which):
        found = [Agreement(place.of(r)) for r in which or range(place.world)]
        made.extend(found)
        return found

    yield make
    with ThreadPoolExecutor(max(1, len(made))) as pool:
        list(pool.map(lambda a: a.close(0.2), made))


def at_once(agreements, call):
    with ThreadPoolExecutor(len(agreements)) as pool:
        return list(pool.map(call, agreements))


def join(agreements):
    at_once(agreements, lambda a: a.join(20))
    for a in agreements:
        a.start(1, 0)
    return agreements


def report(agreement, counter, **how):
    agreement.expect(counter)
    agreement.report(counter, counter * 10, **({"ok": True} | how))


def test_one_rank_needs_nobody():
    before = threading.active_count()
    solo = Solo()
    agreement = Agreement(solo)
    agreement.join(0)
    assert agreement.exchange("open", b"x", 0) == [b"x"]
    agreement.start(1, 0)
    agreement.expect(1)
    assert not agreement.report(1, 10, True)
    assert agreement.wait_verdict(1, 0).outcome is Outcome.AGREED
    assert solo.read() == [None]
    assert threading.active_count() == before
    agreement.close(0)


def test_exchange_gives_everybody_everything(ranks):
    three = join(ranks(Place(3)))
    for topic in ("open", "restore", "restored"):
        said = at_once(three, lambda a, topic=topic: a.exchange(topic, f"{topic} {a.rank}".encode(), 20))
        assert said == [[f"{topic} {r}".encode() for r in range(3)]] * 3


def test_ranks_that_never_come_are_named(ranks):
    (one,) = ranks(Place(3), 1)
    with pytest.raises(RankTimeoutError, match="all ranks to open their stores; missing: ranks 0, 2") as caught:
        one.join(0.05)
    assert caught.value.ranks == (0, 2)
    assert caught.value.waited_s >= 0.05


def test_ranks_of_another_world_size_are_told_of(ranks):
    place = Place(2)
    (one,) = ranks(place, 0)
    other = Connection(place, 1)
    other.world = 3
    three = Agreement(other)
    with ThreadPoolExecutor(1) as pool:
        failed = pool.submit(three.join, 0.5)
        with pytest.raises(RankTimeoutError, match=r"as ranks of 2 \(.*rank 1 as one of 3\); missing: rank 1"):
            one.join(0.5)
        assert isinstance(failed.exception(), RankTimeoutError)
    three.close(0.1)


def test_a_rank_that_does_not_answer_is_named_and_nobody_exchanges_after_that(ranks):
    three = join(ranks(Place(3)))
    with pytest.raises(RankTimeoutError, match="missing: rank 2") as caught:
        at_once(three[:2], lambda a: a.exchange("restore", b"", 0.2))
    assert caught.value.ranks == (2,)
    with pytest.raises(RanksError, match="an earlier exchange between the ranks failed"):
        three[0].exchange("restore", b"", 20)


def test_ranks_at_different_topics_are_named(ranks):
    two = join(ranks(Place(2)))
    with pytest.raises(RanksError, match=r"rank \d is at '\w+', rank \d at '\w+'"):
        at_once(two, lambda a: a.exchange("open" if a.rank else "restore", b"", 20))


def test_an_error_of_one_rank_between_two_exchanges_reaches_all_at_once_and_they_go_on(ranks):
    two = join(ranks(Place(2)))

    def restore(one):
        with one.on_its_own():
            if one.rank == 1:
                raise OSError(5, "its disk")
        return one.exchange("holdings", b"", 20)

    with ThreadPoolExecutor(2) as pool:
        found = [pool.submit(restore, one) for one in two]
    assert isinstance(found[1].exception(), OSError)
    with pytest.raises(RanksError, match=r"rank 1, before 'holdings': OSError.*its disk") as caught:
        found[0].result()
    assert caught.value.ranks == (1,)
    assert at_once(two, lambda a: a.exchange("restore", b"%d" % a.rank, 20)) == [[b"0", b"1"]] * 2


def test_a_rank_that_leaves_is_not_waited_for(ranks):
    two = join(ranks(Place(2)))
    two[1].close(0.1)
    with pytest.raises(RanksError, match="rank 1 left before 'restore': it closed"):
        two[0].exchange("restore", b"", 20)
    report(two[0], 1)
    verdict = two[0].wait_verdict(1, 20)
    assert (verdict.outcome, verdict.ranks) == (Outcome.DEAD, (1,))


def test_all_hear_of_what_all_hold(ranks):
    three = join(ranks(Place(3)))
    for a in three:
        report(a, 1)
    assert at_once(three, lambda a: a.wait_verdict(1, 20).outcome) == [Outcome.AGREED] * 3
    assert [a.agreed for a in three] == [1, 1, 1]


def test_all_hear_of_a_failure(ranks):
    three = join(ranks(Place(3)))
    for a in three:
        report(a, 1, ok=a.rank != 1, reason="the disk is full")
    verdicts = at_once([three[0], three[2]], lambda a: a.wait_verdict(1, 20))
    assert [(v.outcome, v.ranks, v.reason) for v in verdicts] == [(Outcome.DEAD, (1,), "rank 1: the disk is full")] * 2


def test_a_late_word_settles_what_its_save_gave_up(ranks):
    """Case 32: one rank is late for ever in one save; the next is agreed all the same."""
    three = join(ranks(Place(3)))
    report(three[0], 1)
    report(three[1], 1)
    three[2].expect(1)
    with pytest.raises(RankTimeoutError, match="missing: rank 2"):
        three[0].wait_verdict(1, 0.05)
    assert three[0].unsettled == 1
    assert three[0].settled() == {}
    for a in three:
        report(a, 2)
    assert at_once(three, lambda a: a.wait_verdict(2, 20).outcome) == [Outcome.AGREED] * 3
    assert three[0].settled()[1].outcome is Outcome.UNKNOWN  # overtaken: nobody needs it
    assert three[0].unsettled == 0
    report(three[2], 1)
    assert three[1].wait_verdict(1, 20).outcome is Outcome.AGREED  # it had not given up


def test_a_verdict_that_comes_late_comes(ranks):
    two = join(ranks(Place(2)))
    report(two[0], 1)
    two[1].expect(1)
    with pytest.raises(RankTimeoutError):
        two[0].wait_verdict(1, 0.05)
    two[1].report(1, 10, False, reason="EIO")
    deadline = time.monotonic() + 20
    while not (found := two[0].settled()):
        assert time.monotonic() < deadline
        two[0].await_settled(0.05)
    assert found[1].outcome is Outcome.DEAD
    assert two[0].settled() == {}


def test_a_lost_place_fails_everything_fast(ranks):
    place = Place(2)
    two = join(ranks(place))
    report(two[0], 1)
    waiting = ThreadPoolExecutor(1).submit(two[0].wait_verdict, 1, 600)
    place.error = ConnectionError("gone")
    two[0].report(9, 90, False, reason="so that it looks again")
    with pytest.raises(CoordinatorLostError, match="gone"):
        waiting.result(20)
    for _ in range(2):
        with pytest.raises(CoordinatorLostError):
            two[0].assert_usable()
        with pytest.raises(CoordinatorLostError):
            two[0].wait_verdict(1, 600)
        with pytest.raises(CoordinatorLostError):
            two[0].exchange("restore", b"", 600)
    two[0].close(600)


def test_a_restarted_rank_ends_this_life_for_all(ranks):
    place = Place(3)
    three = join(ranks(place))
    report(three[0], 1)
    (again,) = ranks(place, 2)
    with pytest.raises(RankTimeoutError):
        again.join(0.05)
    for a in three[:2]:  # whether it sees that itself, or hears it of the other
        report(a, 2)
        try:
            reason = a.wait_verdict(2, 20).reason
        except RanksError as error:
            reason = error.reason
        assert "rank 2 was restarted" in reason


def test_all_waiting_are_served_by_one_reader(ranks):
    place = Place(2)
    two = join(ranks(place))
    for counter in range(1, 31):
        report(two[0], counter)
        two[1].expect(counter)
    before = place.reads
    pool = ThreadPoolExecutor(30)
    waiting = [pool.submit(two[0].wait_verdict, c, 60) for c in range(1, 31)]
    time.sleep(0.3)
    reads = place.reads - before
    for counter in range(1, 31):
        two[1].report(counter, counter * 10, True)
    assert {w.result(20).outcome for w in waiting} == {Outcome.AGREED}
    assert reads < 100, "30 that wait read no more than one does"


def test_idle_ranks_read_nothing(ranks):
    place = Place(2)
    two = join(ranks(place))
    at_once(two, lambda a: a.exchange("x", b"", 20))
    time.sleep(0.1)
    before = place.reads
    time.sleep(0.2)
    assert place.reads == before


def known_to_rank_0(ranks):
    """Give a place and two ranks that both hold counter 1, of which rank 0 alone has heard."""
    place = Place(2)
    two = join(ranks(place))
    place.hold_back(1)
    for a in two:
        report(a, 1)
    assert two[0].wait_verdict(1, 20).outcome is Outcome.AGREED
    return place, two


def test_a_rank_waits_at_its_end_until_the_others_know(ranks):
    """The place may go away with this process: what it alone knows to be agreed must be heard first."""
    place, two = known_to_rank_0(ranks)
    closing = ThreadPoolExecutor(1).submit(two[0].close, 30)
    time.sleep(0.1)
    assert not closing.done()
    assert two[1].agreed == 0
    place.seen_by[1] = place.blobs
    assert two[1].wait_verdict(1, 20).outcome is Outcome.AGREED
    closing.result(20)


def test_a_rank_does_not_wait_for_one_that_knew_and_went(ranks):
    """Rank 1 hears that rank 0 leaves, goes and takes its blob away, all between two looks of rank 0 (seen)."""
    place, two = known_to_rank_0(ranks)
    place.hold_back(0)
    began = time.monotonic()
    pool = ThreadPoolExecutor(2)
    closing = pool.submit(two[0].close, 30)
    while not two[0]._channel.member.left:
        time.sleep(0.001)
    place.seen_by[1] = place.blobs
    pool.submit(two[1].close, 30).result(20)
    assert place.blobs[1] is None
    place.seen_by[0] = place.blobs
    closing.result(20)
    assert time.monotonic() - began < 20


def test_the_last_to_leave_leaves_nothing_behind():
    place = Place(3)
    three = join([Agreement(place.of(r)) for r in range(3)])
    at_once(three, lambda a: a.close(20))
    assert place.blobs == [None] * 3
    three[0].close(20)


def test_whoever_cannot_open_tells_the_others(ranks):
    two = ranks(Place(2))
    pool = ThreadPoolExecutor(2)
    failed = pool.submit(two[0].give_up, "it could not open its store: no room", 20)
    two[1].join(20)
    with pytest.raises(RanksError, match="rank 0 left before 'open': it could not open its store: no room"):
        two[1].exchange("open", b"", 20)
    two[1].close(0.1)
    failed.result(20)
