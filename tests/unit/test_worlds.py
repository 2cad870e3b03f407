"""Which checkpoint all ranks go on from: the rules of opening, as facts in and a decision out."""

import pytest

from pccheck.errors import NoValidCheckpointError, RanksError
from pccheck.ranks.worlds import FLAT, Holding, Sealed, Seen, decide, restorable, union, within


def at(*counters, world, incarnation=1):
    return tuple(Sealed(incarnation, c, c * 10, world) for c in counters)


def store(rank, *sealed, agreed=0, incarnation=1, counter=0, abandoned=(), name=""):
    return Holding(
        rank=rank, store_id=name or f"id {rank}", sealed=sealed, agreed=agreed, abandoned=abandoned,
        incarnation=max([incarnation, *(s.incarnation for s in sealed)]),
        counter=max([counter, *(s.counter for s in sealed)]),
    )  # fmt: skip


def shared(own, others=()):
    """What ranks on a shared file system see: each its own store, and those of all others."""
    every = [*own, *others]
    return [Seen(own=o, others=tuple(h for h in every if h.rank != o.rank)) for o in own]


def local(*own):
    """What ranks on hosts of their own see: each its own store only."""
    return [Seen(own=o) for o in own]


@pytest.mark.parametrize("place", [lambda *own: shared(own), local])
def test_the_greatest_that_all_hold(place):
    """Of {5, 7} and {5, 6} the minimum of the newest is 6, which rank 0 lacks."""
    opening = decide(place(store(0, *at(5, 7, world=2)), store(1, *at(5, 6, world=2))), "/ck")
    assert opening.newest == Sealed(1, 5, 50, 2)
    assert (opening.incarnation, opening.next_counter) == (2, 8)
    assert opening.holds(Sealed(1, 5, 50, 2))
    assert not opening.holds(Sealed(1, 7, 70, 2))
    assert not opening.lost


def test_one_counter_of_two_incarnations_is_not_one_checkpoint():
    seen = local(store(0, Sealed(1, 7, 70, 2)), store(1, Sealed(2, 7, 70, 2)))
    assert decide(seen, "/ck").newest is None
    assert decide(seen, "/ck").incarnation == 3


def test_one_counter_of_two_steps_is_not_one_checkpoint():
    assert decide(local(store(0, Sealed(1, 7, 70, 2)), store(1, Sealed(1, 7, 71, 2))), "/ck").newest is None


def test_counters_go_on_above_all_that_were_ever_used():
    opening = decide(local(store(0, counter=12, incarnation=3), store(1, counter=40, incarnation=9)), "/ck")
    assert (opening.newest, opening.incarnation, opening.next_counter) == (None, 10, 41)


def test_an_empty_root_is_a_start_from_scratch():
    opening = decide(local(Holding(rank=0), Holding(rank=1)), "/ck")
    assert (opening.newest, opening.incarnation, opening.next_counter) == (None, 1, 1)


@pytest.mark.parametrize("agreed", [0, 5])
def test_a_lost_store_is_named_and_nothing_changes(agreed):
    """Else the job would start from scratch, and overwrite what the other ranks still hold."""
    seen = local(store(0, *at(5, world=3), agreed=agreed), Holding(rank=1), store(2, *at(5, world=3), agreed=agreed))
    with pytest.raises(RanksError, match=r"rank 1 are empty or not in sight.*ranks 0, 2 hold step 50") as caught:
        decide(seen, "/ck")
    assert caught.value.ranks == (1,)


def test_a_store_that_was_opened_but_never_sealed_anything_is_not_lost():
    """A crash in the first save: rank 1 had opened, and sealed nothing."""
    assert decide(local(store(0, *at(1, world=2)), store(1)), "/ck").newest is None


def test_damage_to_what_was_agreed_falls_back_and_says_so():
    seen = local(store(0, *at(5, 7, world=2), agreed=7), store(1, *at(5, world=2), agreed=7, counter=7))
    opening = decide(seen, "/ck")
    assert opening.newest.counter == 5
    assert opening.lost == 7
    assert "rank 1" in opening.lost_reason


def test_nothing_left_of_what_was_agreed_is_an_error():
    seen = local(store(0, *at(7, world=2), agreed=7), store(1, agreed=7, counter=7))
    with pytest.raises(NoValidCheckpointError, match="rank 1 hold no whole record"):
        decide(seen, "/ck")


def test_fewer_ranks_go_on_from_the_stores_of_more():
    old = [store(r, *at(5, world=4)) for r in range(4)]
    opening = decide(shared(old[:2], old[2:]), "/ck")
    assert opening.newest == Sealed(1, 5, 50, 4)


def test_more_ranks_go_on_from_the_stores_of_fewer():
    new = [store(0, *at(5, world=2)), store(1, *at(5, world=2)), Holding(rank=2), Holding(rank=3)]
    assert decide(shared(new), "/ck").newest == Sealed(1, 5, 50, 2)


def test_several_ranks_go_on_from_the_store_of_one():
    flat = store(FLAT, *at(5, world=1), counter=6)
    opening = decide(shared([Holding(rank=0), Holding(rank=1)], [flat]), "/ck")
    assert opening.newest == Sealed(1, 5, 50, 1)
    assert opening.next_counter == 7


def test_several_ranks_do_not_start_from_scratch_where_the_one_before_lost_its_checkpoint():
    lost = store(FLAT, agreed=5, counter=5)
    with pytest.raises(NoValidCheckpointError, match="counter 5 was committed, but no rank holds"):
        decide(shared([Holding(rank=0), Holding(rank=1)], [lost]), "/ck")
    opening = decide(shared([Holding(rank=0), Holding(rank=1)], [store(FLAT, *at(4, world=1), agreed=5)]), "/ck")
    assert (opening.newest, opening.lost) == (Sealed(1, 4, 40, 1), 5)
    assert decide([Seen(own=lost)], "/ck").lost == 0  # alone, a restore tells it


def test_one_rank_goes_on_from_the_stores_of_several():
    seen = shared([Holding(rank=FLAT)], [store(r, *at(5, world=2), counter=9) for r in (0, 1)])
    opening = decide(seen, "/ck")
    assert opening.newest == Sealed(1, 5, 50, 2)
    assert opening.next_counter == 10


def test_one_rank_on_the_stores_of_several_of_which_one_is_lost():
    with pytest.raises(RanksError, match="rank 1 are empty or not in sight"):
        decide(shared([Holding(rank=FLAT)], [store(0, *at(5, world=2))]), "/ck")


def test_the_newest_of_several_worlds_counts():
    flat = store(FLAT, *at(9, world=1))
    seen = shared([store(0, *at(5, world=2)), store(1, *at(5, world=2))], [flat])
    assert decide(seen, "/ck").newest.world == 1
    older = store(FLAT, *at(3, world=1))
    seen = shared([store(0, *at(5, world=2)), store(1, *at(5, world=2))], [older])
    assert [s.world for s in decide(seen, "/ck").complete] == [2, 1]


def test_another_world_whose_stores_are_out_of_sight():
    """On hosts of their own, two ranks cannot go on from what four saved: they see half of it."""
    seen = local(store(0, *at(5, world=4)), store(1, *at(5, world=4)))
    with pytest.raises(RanksError, match="ranks 2, 3 are empty or not in sight") as caught:
        decide(seen, "/ck")
    assert caught.value.ranks == (2, 3)


def test_a_rank_that_cannot_see_what_the_others_see():
    old = [store(r, *at(5, world=4)) for r in range(4)]
    seen = shared(old[:2], old[2:])
    seen[1] = Seen(own=old[1])
    with pytest.raises(RanksError, match="rank 1 cannot see the stores of ranks 0, 2, 3"):
        decide(seen, "/ck")


def test_a_store_of_the_same_name_on_another_host_is_not_that_store():
    old = [store(r, *at(5, world=3)) for r in range(3)]
    elsewhere = store(2, *at(5, world=3), name="another")
    seen = [Seen(own=old[0], others=(old[1], old[2])), Seen(own=old[1], others=(old[0], elsewhere))]
    with pytest.raises(RanksError, match="cannot see the stores of rank 2"):
        decide(seen, "/ck")


def test_what_one_rank_has_abandoned_all_have():
    """A crash in the middle of a roll-back: it counts as done."""
    own = [store(0, *at(5, 7, world=2), abandoned=((6, 9),), agreed=5), store(1, *at(5, 7, world=2), agreed=7)]
    opening = decide(local(*own), "/ck")
    assert opening.newest.counter == 5
    assert opening.abandoned == ((6, 9),)
    assert opening.holds(Sealed(1, 7, 70, 2))  # it may be gone back to
    assert not opening.lost
    assert [s.counter for s in restorable(local(*own))[0]] == [7, 5]


def test_ranges_are_joined():
    assert union([(5, 7), (1, 2), (3, 3), (6, 9)]) == ((1, 3), (5, 9))
    assert within(9, ((1, 3), (5, 9)))
    assert not within(4, ((1, 3), (5, 9)))
