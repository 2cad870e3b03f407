"""Several ranks with a Controller each, as real processes that all measure something else."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import pccheck
from pccheck.errors import RanksError, RankTimeoutError
from pccheck.ranks.agreement import Agreement
from tests.unit.job import Job, state
from tests.unit.test_agreement import Place, at_once, join

WORKER = Path(__file__).with_name("controller_ranks.py")


def ranks(folder, steps, *options, world=3, special=None):
    """Run the ranks; give what each printed, None for one that died."""
    processes = []
    for rank in range(world):
        call = [sys.executable, str(WORKER), str(folder), str(rank), str(world), str(steps), *options]
        call += (special or {}).get(rank, [])
        processes.append(subprocess.Popen(call, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True))
    try:
        ended = [process.communicate(timeout=120) for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    for process, (_, complaint) in zip(processes, ended, strict=True):
        assert process.returncode in (0, -9), complaint
    return [json.loads(out) if out.strip() else None for out, _ in ended]


def assert_alike(told):
    assert len({json.dumps([one["due"], one["decisions"]]) for one in told}) == 1, "ranks differ"


def assert_a_job(told):
    assert_alike(told)
    assert len(told[0]["due"]) >= 5
    assert told[0]["decisions"], "the interval was chosen"
    answers = [one["answer"] for one in told]
    assert [answer[:3] for answer in answers] == [["saved", True, 700]] * len(told)
    assert len({answer[3] for answer in answers}) == 1, "one decision, from the shortest of their times"


def test_all_ranks_save_at_the_same_steps(tmp_path):
    assert_a_job(ranks(tmp_path, 700))


def test_so_they_do_through_a_store_of_torch(tmp_path):
    pytest.importorskip("torch")
    import torch.distributed as dist

    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    assert_a_job(ranks(tmp_path, 700, f"--torch={store.port}", world=2))


def test_a_rank_that_dies_is_waited_for_once_and_the_others_stay_alike(tmp_path):
    told = ranks(tmp_path, 300, "--agree-s=1", special={1: ["--die-at=100"]})
    assert told[1] is None
    alive = [told[0], told[2]]
    assert [one["due"] for one in alive] == [alive[0]["due"]] * 2
    assert alive[0]["due"][-1] > 100, "they go on"
    for one in alive:
        *_, (_, _, reason) = one["decisions"]
        assert "rank 1" in reason


# -- exchanges that nobody waits for ----------------------------------------------------------------------------------


@pytest.fixture
def job(tmp_path):
    made = Job(tmp_path, 3).start()
    yield made
    made.end()


def test_what_was_offered_is_collected_later(job):
    numbers = job.all(lambda ck: ck.agreement.offer("measured", bytes([ck.rank]), 20.0))
    job.commit(1)  # saves in between are no matter
    said = job.all(lambda ck: ck.agreement.collect(numbers[ck.rank], "measured", 20.0))
    assert said == [[b"\0", b"\1", b"\2"]] * 3


def test_what_was_offered_before_a_restore_is_void_on_all(job):
    job.commit(1)
    numbers = job.all(lambda ck: ck.agreement.offer("measured", b"", 20.0))
    assert {restored.step for restored in job.restore()} == {1}
    assert job.all(lambda ck: ck.agreement.collect(numbers[ck.rank], "measured", 20.0)) == [None] * 3
    assert job.all(lambda ck: ck.agreement.exchange("next", bytes([ck.rank]), 20.0)) == [[b"\0", b"\1", b"\2"]] * 3


def test_a_rank_that_says_nothing_is_named_and_nothing_is_exchanged_after_that(job):
    number = job.ranks[0].agreement.offer("measured", b"", 20.0)
    with pytest.raises(RankTimeoutError) as caught:
        job.ranks[0].agreement.collect(number, "measured", 0.2)
    assert caught.value.ranks == (1, 2)
    with pytest.raises(RanksError):
        job.ranks[0].agreement.offer("measured", b"", 20.0)


WORDS = [b"0", b"1", b"2"]


@pytest.fixture
def slow():
    """Three ranks that offered a word, which all have collected but rank 0: it hears nothing until `place.catch_up`."""
    place = Place(3)
    three = join([Agreement(place.of(rank)) for rank in range(3)])
    place.hold_back(0)
    numbers = [one.offer("measured", WORDS[one.rank], 20.0) for one in three]
    assert at_once(three[1:], lambda one: one.collect(numbers[one.rank], "measured", 20.0)) == [WORDS] * 2
    yield place, three, numbers[0]
    catch_up(place)
    at_once(three, lambda one: one.close(0.2))


def catch_up(place):
    place.seen_by[0] = place.blobs


def until(condition):
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def test_no_word_is_forgotten_that_a_slower_rank_has_yet_to_collect(slow):
    place, three, number = slow

    def restore(one):  # as a Controller whose plan is under way, and then void
        plan = one.offer("interval", b"", 20.0)
        said = one.exchange("restore", WORDS[one.rank], 20.0)
        return said, one.collect(plan, "interval", 20.0)

    with ThreadPoolExecutor(2) as pool:
        others = [pool.submit(restore, one) for one in three[1:]]
        until(lambda: all(one._channel._waiting for one in three[1:]))
        reads = place.reads
        until(lambda: place.reads >= reads + 20)  # whatever they have to tell, they have told
        catch_up(place)
        assert three[0].collect(number, "measured", 20.0) == WORDS
        assert [restore(three[0]), *[other.result(20.0) for other in others]] == [(WORDS, None)] * 3


def test_who_would_have_to_forget_such_a_word_waits_no_longer_than_it_may(slow):
    _, three, _ = slow
    three[1].offer("interval", b"", 20.0)
    began = time.monotonic()
    with pytest.raises(RankTimeoutError, match="'restore'") as caught:
        three[1].offer("restore", b"", 0.2)
    assert time.monotonic() - began < 10
    assert caught.value.ranks == (0, 2)


def test_ranks_that_leave_leave_the_words_that_a_slower_rank_has_yet_to_collect(slow):
    place, three, number = slow
    at_once(three[1:], lambda one: one.close(0.2))
    catch_up(place)
    assert three[0].collect(number, "measured", 20.0) == WORDS
    with pytest.raises(RanksError, match="rank 1 left before 'interval'"):
        three[0].exchange("interval", b"", 20.0)


def test_a_rank_that_calls_save_by_alone_waits_no_longer_than_it_has(job):
    job.commit(1)
    controllers = [pccheck.Controller(ck) for ck in job.ranks]
    began = time.monotonic()
    answer = controllers[0].save_by(2, state(0, 2), 0.3)
    assert time.monotonic() - began < 20
    assert (answer.action, answer.durable) == ("declined", False)
    assert "ranks" in answer.reason


def test_ranks_that_name_other_steps_save_nothing(job):
    controllers = [pccheck.Controller(ck) for ck in job.ranks]
    answers = job.all(lambda ck: controllers[ck.rank].save_by(ck.rank, {}, 20.0))
    assert {answer.action for answer in answers} == {"declined"}
    assert all("same step" in answer.reason for answer in answers)
