"""When processes of a live replay live, and what is made of what they told: by hand-made lives."""

from __future__ import annotations

from itertools import pairwise

import pytest

from pccheck.replay.chronicle import Chronicle, LiveOutcome
from pccheck.replay.schedule import Life, lives
from pccheck.replay.timeline import Segment
from pccheck.replay.told import MOST_DIGESTS, Began, Saved, Saving, Stepped
from pccheck.replay.trace import Trace


def trace(*losses: float, end_s: float | None = None) -> Trace:
    return Trace(losses=losses, end_s=end_s or losses[-1], killed_at_end=end_s is None)


def test_lives_end_with_the_losses_and_begin_when_the_job_is_up_again():
    assert lives(trace(10.0, 20.0), 2.0) == (Life(0.0, 10.0, True), Life(12.0, 20.0, True))
    assert lives(trace(10.0, end_s=20.0), 2.0) == (Life(0.0, 10.0, True), Life(12.0, 20.0, False))


def test_a_loss_that_hits_a_job_that_is_down_makes_it_start_again():
    assert lives(trace(10.0, 11.0, 12.5, 20.0), 2.0) == (Life(0.0, 10.0, True), Life(14.5, 20.0, True))


def test_a_job_that_is_down_at_the_end_has_no_more_life():
    assert lives(trace(10.0, end_s=11.0), 2.0) == (Life(0.0, 10.0, True),)
    assert lives(trace(10.0, 12.0), 2.0) == (Life(0.0, 10.0, True),)


def told(first: int, at: float, *steps: tuple[int, float], every: int = 2) -> list[object]:
    """Tell a life on a clock that began 100 seconds before; each save stalls for a tenth of a second."""
    found: list[object] = [Began(first, 100 + at, load_s=0.5, verify_s=0.1, refused=None)]
    for step, when in steps:
        found.append(Stepped(step, 100 + when, fence_s=0.01))
        if step % every == 0:
            found += [Saving(step, f"digest {step}", 100 + when), Saved(step, 0.1)]
    return found


def kinds(outcome: LiveOutcome) -> list[str]:
    """Give what was done, stalls left out."""
    found = [s.kind for s in outcome.timeline.segments if s.kind != "stall"]
    return [kind for kind, before in zip(found, [None, *found], strict=False) if kind != before]


def check_sums(outcome: LiveOutcome) -> None:
    """Hold what is always so."""
    segments = outcome.timeline.segments
    assert segments[0].start_s == 0.0
    assert segments[-1].end_s == outcome.wall_s
    assert all(a.end_s == b.start_s for a, b in pairwise(segments))
    assert outcome.work_s + outcome.lost_s + outcome.load_s + outcome.down_s == pytest.approx(outcome.wall_s)


def test_steps_after_the_one_that_was_restored_are_lost():
    chronicle, along = Chronicle("x", 2), trace(6.0, 12.0)
    first, second = lives(along, 1.0)
    chronicle.lived(first, 100.0, told(0, 1.0, (1, 2.0), (2, 3.0), (3, 4.0), (4, 5.0)))
    chronicle.lived(second, 100.0, told(2, 1.0, (3, 2.0), (4, 3.0), (5, 4.0)))
    outcome = chronicle.outcome(along, 1.0, 4)
    assert outcome.timeline.segments == (
        Segment("load", 0.0, 1.0, 0, 0),
        Segment("work", 1.0, 3.0, 0, 2),
        Segment("stall", 3.0, 3.1, 2, 2),
        Segment("lost", 3.1, 5.0, 2, 4),
        Segment("stall", 5.0, 5.1, 4, 4),
        Segment("lost", 5.1, 6.0, 4, 4),
        Segment("down", 6.0, 7.0, 4, 4),
        Segment("load", 7.0, 8.0, 2, 2),
        Segment("work", 8.0, 10.0, 2, 4),
        Segment("stall", 10.0, 10.1, 4, 4),
        Segment("lost", 10.1, 12.0, 4, 5),
    )
    check_sums(outcome)
    assert outcome.timeline.kills == ((6.0, 4, 2), (12.0, 5, 4))
    assert outcome.timeline.saves == ((3.0, 2), (5.0, 4), (10.0, 4))
    assert (outcome.steps, outcome.goodput, outcome.lost_steps) == (4, 4 / 12, (2, 1))
    assert (outcome.kills, outcome.kills_down, outcome.saves) == (2, 0, 3)
    assert outcome.stall_s == pytest.approx(7 * 0.01 + 3 * 0.1)
    assert (outcome.work_s, outcome.lost_s) == (4.0, 5.0)  # stalls included
    assert outcome.slowdown == pytest.approx((4 + 3) / 7)
    assert (outcome.loads_s, outcome.refused) == ((0.5, 0.5), ())


def test_a_life_that_is_cut_short_while_it_loads_loses_nothing_more():
    chronicle, along = Chronicle("x", 2), trace(4.0, 6.0, 10.0)
    first, second, third = lives(along, 1.0)
    chronicle.lived(first, 100.0, told(0, 1.0, (1, 2.0), (2, 2.5), (3, 3.0)))
    chronicle.lived(second, 100.0, [])
    chronicle.lived(third, 100.0, told(2, 1.0, (3, 2.0), (4, 3.0)))
    outcome = chronicle.outcome(along, 1.0, 4)
    check_sums(outcome)
    assert outcome.timeline.kills == ((4.0, 3, 2), (6.0, 2, 2), (10.0, 4, 4))
    assert outcome.lost_steps == (1, 0)
    assert kinds(outcome) == ["load", "work", "lost", "down", "load", "down", "load", "work"]


def test_a_job_that_began_anew_has_lost_all_that_earlier_lives_did():
    chronicle, along = Chronicle("x", 2), trace(4.0, 8.0)
    first, second = lives(along, 1.0)
    chronicle.lived(first, 100.0, told(0, 1.0, (1, 2.0), (2, 3.0)))
    began = [Began(0, 101.0, load_s=0.5, verify_s=0.1, refused="garbage")]
    chronicle.lived(second, 100.0, [*began, *told(0, 1.0, (1, 2.0), (2, 2.5))[1:]])
    outcome = chronicle.outcome(along, 1.0, 2)
    check_sums(outcome)
    assert outcome.lost_steps == (2, 0)
    assert kinds(outcome) == ["load", "lost", "down", "load", "work", "lost"]
    assert outcome.refused == ("garbage",)


def test_a_later_process_that_falls_back_further_undoes_what_counted():
    chronicle, along = Chronicle("x", 2), trace(4.0, 8.0, 12.0)
    first, second, third = lives(along, 1.0)
    chronicle.lived(first, 100.0, told(0, 1.0, (1, 2.0), (2, 2.2), (3, 2.4), (4, 2.6)))
    chronicle.lived(second, 100.0, told(4, 1.0, (5, 2.0), (6, 2.5)))
    chronicle.lived(third, 100.0, told(2, 1.0, (3, 2.0), (4, 2.5)))
    outcome = chronicle.outcome(along, 1.0, 4)
    check_sums(outcome)
    assert outcome.lost_steps == (0, 4, 0)
    assert [s.last for s in outcome.timeline.segments if s.kind == "work"] == [2, 4]
    assert kinds(outcome) == ["load", "work", "lost", "down", "load", "lost", "down", "load", "work", "lost"]


def test_a_job_that_is_alive_at_the_end_counts_what_it_did():
    chronicle, along = Chronicle("x", 2), trace(4.0, end_s=9.0)
    first, second = lives(along, 1.0)
    chronicle.lived(first, 100.0, told(0, 1.0, (1, 2.0), (2, 3.0)))
    chronicle.lived(second, 100.0, told(2, 1.0, (3, 2.0), (4, 3.0), (5, 3.5)))
    outcome = chronicle.outcome(along, 1.0, None)
    check_sums(outcome)
    assert (outcome.steps, outcome.lost_steps) == (5, (0,))
    assert outcome.timeline.segments[-1] == Segment("work", 8.1, 9.0, 4, 5)


def test_a_save_that_a_kill_cut_short_held_the_trainer_until_then():
    chronicle, along = Chronicle("x", 2), trace(4.0)
    chronicle.lived(*lives(along, 1.0), 100.0, told(0, 1.0, (1, 2.0), (2, 3.0))[:-1])
    outcome = chronicle.outcome(along, 1.0, 0)
    check_sums(outcome)
    assert outcome.timeline.segments == (
        Segment("load", 0.0, 1.0, 0, 0), Segment("lost", 1.0, 3.0, 0, 2), Segment("stall", 3.0, 4.0, 2, 2),
    )  # fmt: skip
    assert outcome.stall_s == pytest.approx(1.0 + 2 * 0.01)


def test_a_loss_that_hits_a_job_that_is_down_is_counted_apart():
    chronicle, along = Chronicle("x", 2), trace(4.0, 4.5, 9.0)
    first, second = lives(along, 1.0)
    chronicle.lived(first, 100.0, told(0, 1.0, (1, 2.0), (2, 3.0), (3, 3.5)))
    chronicle.lived(second, 100.0, told(2, 1.0, (3, 2.0)))
    outcome = chronicle.outcome(along, 1.0, 2)
    check_sums(outcome)
    assert (outcome.kills, outcome.kills_down, outcome.lost_steps) == (3, 1, (1, 1))
    assert outcome.timeline.kills == ((4.0, 3, 2), (4.5, 2, 2), (9.0, 3, 2))


def test_nothing_told_at_all_is_an_outcome_too():
    along = trace(4.0, 9.0)
    chronicle = Chronicle("x", 2)
    for life in lives(along, 1.0):
        chronicle.lived(life, 100.0, [])
    outcome = chronicle.outcome(along, 1.0, 0)
    check_sums(outcome)
    assert (outcome.goodput, outcome.slowdown, outcome.stall_per_save_s, outcome.lost_per_kill) == (0, 1, 0, 0)


def test_the_digests_of_the_newest_saves_are_kept():
    chronicle, life = Chronicle("x", 1), Life(0.0, 1e6, True)
    many = [(step, float(step)) for step in range(1, 1500)]
    chronicle.lived(life, 100.0, told(0, 0.5, *many, every=1))
    assert list(chronicle.digests) == list(range(1500 - MOST_DIGESTS, 1500))
    chronicle.lived(life, 100.0, told(1, 0.5, (2, 1.0), every=1))  # it fell back, and saves an old step again
    assert list(chronicle.digests)[-1] == 2
