"""Model check of the exchanges between ranks: the real members, told and heard in every order.

All ranks run the same programme: each exchange is collected, or begun and left, as one that a restore makes void. What
a rank tells, when another hears it, and who goes on are random and seeded, each for itself, so that one rank may be far
slower than others. Every exchange that is collected gives the words of all ranks, and no rank waits for ever: not for
one that has gone on, nor for one that has left.
"""

import random

import pytest

from pccheck.ranks.verdicts import Member

LENGTH = 12  # exchanges of a programme


class Rank:
    """One rank's way through the programme."""

    def __init__(self, rank, world, programme, waits):
        self.member, self.programme, self.waits = Member(rank, world, f"life of {rank}"), programme, waits
        self.at, self.begun = 0, False

    @property
    def done(self):
        return self.at == len(self.programme)

    def act(self):
        """Go on by one move, if that is possible now."""
        member, number = self.member, self.at + 1
        if self.done:
            member.left = "it closed"
        elif not self.begun:
            if not self.waits or not self.missing(member.last_answer):
                assert member.answer(f"topic {number}", b"%d" % member.rank) == number
                self.begun = self.programme[self.at]
                self.at += not self.begun
        elif not self.missing(number):
            said = {rank: (one.topic, one.payload) for rank, one in member.answers(number).items()}
            assert said == {rank: (f"topic {number}", b"%d" % rank) for rank in range(member.world)}
            self.at, self.begun = self.at + 1, False

    def missing(self, number):
        silent = self.member.silent(number)
        assert not set(silent) & set(self.member.gone()), "a rank left whose word was still to come"
        return silent


def run(seed, *, waits=True):
    rng = random.Random(seed)
    world = rng.randint(2, 4)
    programme = [rng.random() < 0.6 for _ in range(LENGTH)]
    ranks = [Rank(rank, world, programme, waits) for rank in range(world)]
    told = [None] * world

    def publish(one):
        told[one.member.rank], one.member.published = one.member.blob(), True

    def hear(one):
        one.member.hear(told)

    while not all(one.member.joined for one in ranks):
        for one in ranks:
            hear(one)
            publish(one)
    moves = [publish, hear, Rank.act]
    speeds = [rng.choice((1, 1, 5, 25)) for _ in ranks]
    for _ in range(rng.randint(0, 400)):
        rng.choice(moves)(rng.choices(ranks, speeds)[0])
    for _ in range(4 * LENGTH):  # whatever came before: where all go on, all come to the end
        for one in ranks:
            for move in moves:
                move(one)
    assert all(one.done for one in ranks), "a rank waits for ever"


@pytest.mark.parametrize("block", range(10))
def test_every_exchange_ends_and_gives_the_words_of_all(block):
    for seed in range(block * 100, block * 100 + 100):
        run(seed)


def test_without_the_wait_before_a_word_it_is_found_that_words_are_lost():
    failed = 0
    for seed in range(200):
        try:
            run(seed, waits=False)
        except AssertionError:
            failed += 1
    assert failed > 10
