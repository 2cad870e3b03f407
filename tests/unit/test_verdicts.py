"""What one rank tells and concludes: verdicts, nonces, exchanges, and what is forgotten when."""

import pytest

from pccheck.errors import RanksError
from pccheck.ranks.telling import VERSION, decode
from pccheck.ranks.verdicts import Member, Outcome


class Board:
    """Blobs that all ranks can read, and the members of one job."""

    def __init__(self, world, blobs=None, life="a"):
        self.blobs = blobs or [None] * world
        self.members = [Member(r, world, f"{life}{r}") for r in range(world)]

    def talk(self, *ranks, rounds=1):
        members = [self.members[r] for r in ranks] if ranks else self.members
        for _ in range(rounds):
            for m in members:
                self.blobs[m.rank] = m.blob()
                m.published = True
            for m in members:
                m.hear(self.blobs)


@pytest.fixture
def three():
    board = Board(3)
    board.talk(rounds=2)
    for m in board.members:
        m.start(next_counter=5, agreed=4)
    return board


def save(board, counter, *ranks, step=None, plan=b"p"):
    for r in ranks:
        board.members[r].expect(counter)
        board.members[r].hold(counter, counter * 10 if step is None else step, plan)


def outcomes(board, counter):
    return [m.verdict(counter).outcome for m in board.members]


def test_a_rank_has_joined_when_all_have_heard_it():
    board = Board(3)
    board.talk(0, 1, rounds=3)
    assert board.members[0].unheard == [2]
    assert not board.members[0].joined
    board.talk(rounds=2)
    assert all(m.joined for m in board.members)


def test_blobs_of_an_earlier_life_let_nobody_join():
    old = Board(2, life="old")
    old.talk(rounds=3)
    new = Board(2, blobs=old.blobs, life="new")
    new.members[0].hear(new.blobs)
    assert not new.members[0].joined
    new.talk(rounds=2)
    assert all(m.joined for m in new.members)


@pytest.mark.parametrize("raw", [b"", b"{", b"null", b'{"version": 1}', b"\xff" * 100, b"[]" * 5000])
def test_what_cannot_be_read_counts_as_not_there(three, raw):
    save(three, 5, 0, 1, 2)
    three.talk()
    three.blobs[1] = raw
    three.members[0].hear(three.blobs)
    assert three.members[0].verdict(5).outcome is Outcome.AGREED  # the last that was heard counts


def test_blobs_of_another_version_or_world_count_as_not_there(three):
    raw = three.members[0].blob()
    assert decode(raw, 3) is not None
    assert decode(raw, 4) is None
    assert decode(raw.replace(b'"version":%d' % VERSION, b'"version":%d' % (VERSION + 1)), 3) is None


def test_a_restarted_rank_is_named(three):
    again = Member(2, 3, "another")
    three.blobs[2] = again.blob()
    with pytest.raises(RanksError, match="rank 2 was restarted") as caught:
        three.members[0].hear(three.blobs)
    assert caught.value.ranks == (2,)


def test_another_process_that_acts_as_this_rank_is_noticed(three):
    three.blobs[1] = Member(1, 3, "another").blob()
    with pytest.raises(RanksError, match="another process acts as rank 1"):
        three.members[1].hear(three.blobs)


def test_a_blob_that_was_tidied_away_is_told_again(three):
    three.blobs[0] = None
    assert three.members[0].hear(three.blobs)


def test_agreed_when_all_ranks_hold_it(three):
    save(three, 5, 0, 1)
    three.talk()
    assert [m.verdict(5).ranks for m in three.members[:2]] == [(2,), (2,)]
    assert outcomes(three, 5)[:2] == [Outcome.UNKNOWN] * 2
    save(three, 5, 2)
    three.talk()
    assert outcomes(three, 5) == [Outcome.AGREED] * 3
    assert [m.agreed for m in three.members] == [5, 5, 5]


def test_a_newer_one_may_be_agreed_first(three):
    save(three, 6, 0, 1, 2)
    save(three, 5, 0, 1)
    three.talk()
    assert [m.agreed for m in three.members] == [6, 6, 6]
    assert outcomes(three, 5)[0] is Outcome.UNKNOWN
    save(three, 5, 2)
    three.talk()
    assert outcomes(three, 5) == [Outcome.AGREED] * 3
    assert [m.agreed for m in three.members] == [6, 6, 6]


def test_one_rank_that_does_not_hold_it_is_enough(three):
    save(three, 5, 0, 2)
    three.members[1].expect(5)
    three.members[1].refuse(5, "the disk is full")
    three.talk()
    assert outcomes(three, 5) == [Outcome.DEAD] * 3
    verdict = three.members[0].verdict(5)
    assert verdict.ranks == (1,)
    assert verdict.reason == "rank 1: the disk is full"


def test_a_word_once_given_stands(three):
    save(three, 5, 0)
    assert not three.members[0].refuse(5, "too late")
    three.members[1].refuse(5, "first")
    assert not three.members[1].hold(5, 50, b"p")


def test_the_same_counter_with_two_steps_names_the_ranks(three):
    save(three, 5, 0, 2, step=100)
    save(three, 5, 1, step=101)
    three.talk()
    for m in three.members:
        verdict = m.verdict(5)
        assert verdict.outcome is Outcome.DEAD
        assert verdict.ranks == (1,)
        assert "step 100 on ranks 0, 2; step 101 on rank 1" in verdict.reason


def test_different_global_arrays_name_the_ranks(three):
    save(three, 5, 0, 1)
    save(three, 5, 2, plan=b"q")
    three.talk()
    verdict = three.members[0].verdict(5)
    assert (verdict.outcome, verdict.ranks) == (Outcome.DEAD, (2,))
    assert "global arrays" in verdict.reason


def test_two_different_words_are_dead_before_the_third(three):
    save(three, 5, 0, step=1)
    save(three, 5, 1, step=2)
    three.talk()
    assert three.members[0].verdict(5).outcome is Outcome.DEAD


def test_a_rank_that_left_holds_nothing_more(three):
    save(three, 5, 0, 1, 2)
    save(three, 6, 0, 1)
    three.members[2].left = "it closed its Checkpointer"
    three.talk()
    assert outcomes(three, 5) == [Outcome.AGREED] * 3
    assert three.members[0].verdict(6).reason == "rank 2: it closed its Checkpointer"
    assert three.members[0].gone() == {2: "it closed its Checkpointer"}


def test_nothing_is_forgotten_that_somebody_still_asks_for(three):
    save(three, 5, 0, 1, 2)
    three.talk(0, 1)  # rank 2 has told nothing and heard nothing
    three.talk(2)
    for r in (0, 1):
        three.members[r].hear(three.blobs)
        three.members[r].close(5)
    three.talk(0, 1, rounds=3)
    three.members[2].hear(three.blobs)
    assert three.members[2].verdict(5).outcome is Outcome.AGREED


def test_what_nobody_asks_for_is_forgotten(three):
    for counter in range(5, 205):
        save(three, counter, 0, 1, 2)
        three.talk()
        for m in three.members:
            m.close(counter)
    three.talk(rounds=2)
    assert len(three.members[0].blob()) < 400
    assert [m.agreed for m in three.members] == [204] * 3


def test_saves_that_one_rank_skips_take_one_line(three):
    for counter in range(5, 305):
        three.members[0].expect(counter)
        three.members[0].refuse(counter, f"full at {counter}")
        three.talk()
    assert len(three.members[0].blob()) < 500
    assert three.members[1].verdict(100).outcome is Outcome.DEAD


def test_a_late_rank_hears_that_a_checkpoint_was_given_up(three):
    """Ranks 0 and 1 waited for rank 2 in vain, and a newer one was agreed meanwhile: 5 is dead for rank 2, too."""
    save(three, 5, 0, 1)
    save(three, 6, 0, 1, 2)
    three.talk()
    for r in (0, 1):
        three.members[r].close(5)
        three.members[r].close(6)
    three.members[2].close(6)
    three.talk(rounds=2)
    three.members[2].hold(5, 50, b"p")
    three.talk()
    verdict = three.members[2].verdict(5)
    assert verdict.outcome is Outcome.DEAD
    assert "gave this checkpoint up" in verdict.reason


def test_answers_are_told_until_all_have_them(three):
    numbers = [m.answer("open", b"%d" % m.rank) for m in three.members]
    assert len(set(numbers)) == 1
    three.talk()
    assert {r: a.payload for r, a in three.members[1].answers(numbers[0]).items()} == {0: b"0", 1: b"1", 2: b"2"}
    again = three.members[0].answer("restore", b"x")  # rank 0 is ahead
    three.talk()
    assert three.members[1].answers(numbers[0])[0].payload == b"0"
    assert list(three.members[1].answers(again)) == [0]


def test_a_rank_that_has_gone_need_not_know(three):
    """It took its blob away when it heard that all leave, before others had read its last words."""
    save(three, 5, 0, 1, 2)
    three.talk(0, 1)
    three.talk(2)
    assert not three.members[2].all_know
    three.blobs[:2] = [None, None]
    three.members[2].hear(three.blobs)
    assert not three.members[2].all_know, "one look may fail"
    three.members[2].hear(three.blobs)
    assert three.members[2].all_know
    assert three.members[2].all_left


def test_all_know_and_all_left(three):
    save(three, 5, 0, 1, 2)
    three.talk(0, 1)
    three.talk(2)  # rank 2 alone knows that 5 is agreed
    assert three.members[2].agreed == 5
    assert not three.members[2].all_know
    three.talk(rounds=2)
    assert three.members[2].all_know
    assert not three.members[2].all_left
    three.members[0].left = "x"
    three.talk()
    three.blobs[1] = None
    for _ in range(2):
        three.members[2].hear(three.blobs)
    assert three.members[2].all_left
