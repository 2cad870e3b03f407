"""Several ranks that save and restore together, over real files: agreement, failures, refusals, other worlds."""

import random
import shutil
import threading
import time

import numpy as np
import pytest

import pccheck
from pccheck import errors, format
from pccheck.reading.listing import list_store
from pccheck.storage.directory import Directory
from tests.unit.job import WAIT_S, Job, assert_states, state

# Saves fail here on purpose, each is asked how; a file system without locks is said to be one.
pytestmark = [pytest.mark.filterwarnings("ignore:a save failed"), pytest.mark.filterwarnings("ignore:lock failed")]


@pytest.fixture
def job(tmp_path):
    """Make jobs; all are closed in the end."""
    made = []

    def make(world=3, root=tmp_path, **options):
        made.append(Job(root, world, **options))
        return made[-1]

    yield make
    for one in made:
        one.end()


def look(folder):
    volume = Directory(folder, create=False, write=False)
    try:
        return list_store(volume)
    finally:
        volume.close()


def sealed(folder):
    return sorted(f.record.counter for f in look(folder).files if f.sealed)


def store_of(j, rank):
    """Give the store of a rank."""
    return j.root / "ck" / f"rank-{rank:05d}"


def damaged(j, rank, *steps):
    """Start a job over these steps of its own, of which the last has a flipped byte in the payload of one rank."""
    j.start().commit(*steps)
    j.close()
    store = store_of(j, rank)
    newest = max((f for f in look(store).files if f.sealed), key=lambda f: f.record.counter)
    with (store / newest.name).open("r+b") as file:
        file.seek(format.PAYLOAD_OFFSET)
        byte = file.read(1)
        file.seek(format.PAYLOAD_OFFSET)
        file.write(bytes([byte[0] ^ 1]))
    return j.start()


def wait_for_others(j, seconds, *ranks):
    """From now on, these ranks (none = all) wait so long for others."""
    for rank in ranks or range(j.world):
        object.__setattr__(j.ranks[rank].options, "agree_timeout_s", seconds)


def newcomers(j, **options):
    """Let a job agree in a place of its own, as one does that knows nothing of the ranks that are still there."""
    j.open = lambda rank: pccheck.Checkpointer(
        j.root / "ck", coordinator=pccheck.SharedDirectory(j.root / "new", rank=rank, world=j.world),
        **{"chunk_bytes": 4096, **options},
    )  # fmt: skip
    return j


# -- saving and restoring together ------------------------------------------------------------------------------------


@pytest.mark.parametrize("nodes", [False, True])
def test_what_all_saved_all_restore(job, nodes):
    j = job(nodes=nodes).start()
    assert j.restore() == [None] * 3
    j.commit(10, 20, 30)
    assert [ck.latest() for ck in j.ranks] == [30] * 3
    j.close()
    j.start()
    assert_states(j.restore(), 30, 3)
    j.commit(40)
    assert_states(j.restore(), 40, 3)


def test_outcomes_are_those_of_all(job):
    j = job().start()
    saves = j.save(1)
    assert [s.durable.result(WAIT_S) for s in saves] == [1] * 3
    assert [s.outcome for s in saves] == ["committed"] * 3
    assert len({s.counter for s in saves}) == 1


def test_many_saves_at_once(job):
    j = job(in_flight=3, keep=2).start()

    def train(ck):
        saves = [ck.save(step, state(ck.rank, step)) for step in range(30)]
        ck.wait(WAIT_S)
        return [s.outcome for s in saves]

    for outcomes in j.all(train):
        assert set(outcomes) <= {"committed", "superseded"}
        assert outcomes[-1] == "committed"
    assert [ck.steps() for ck in j.ranks] == [[28, 29]] * 3
    assert [len(list(store_of(j, r).glob("slot-*"))) for r in range(3)] == [5] * 3
    j.close()
    assert_states(j.start().restore(), 29, 3)


def test_peer_addr_names_what_all_hold(job):
    j = job().start()
    j.commit(1, 2)
    for r in range(3):
        check = look(store_of(j, r)).check
        assert format.word_counter(check.peer_word) == 2
        assert check.peer_word == check.word


def test_nothing_is_left_of_the_agreement(job):
    j = job().start()
    j.commit(1)
    j.close()
    assert list((j.root / "told").iterdir()) == []


# -- one rank fails, refuses, skips, is late --------------------------------------------------------------------------


def test_a_failure_on_one_rank_fails_the_save_on_all_and_costs_nothing_older(job):
    j = job(on_error="warn")

    def at(point):
        if point == "sealed" and failing.is_set():
            raise errors.MediumError("sync", "slot", OSError(5, "Input/output error"))

    failing = threading.Event()
    j.points[1] = at
    j.start()
    j.commit(1)
    failing.set()
    saves = j.save(2)
    for rank, save in enumerate(saves):
        error = save.durable.exception(WAIT_S)
        assert isinstance(error, errors.MediumError if rank == 1 else errors.RanksError), error
        assert save.outcome == "failed"
        if rank != 1:
            assert error.ranks == (1,)
            assert "step 2 was not committed: rank 1: MediumError" in str(error)
    failing.clear()
    for r in range(3):
        assert 2 not in sealed(store_of(j, r))
        assert format.word_counter(look(store_of(j, r)).check.word) == 1, "the word moved off what was taken back"
    assert [ck.latest() for ck in j.ranks] == [1] * 3
    j.commit(3)
    j.close()
    assert_states(j.start().restore(), 3, 3)


def test_a_state_that_one_rank_refuses(job):
    j = job(on_error="warn").start()
    j.commit(1)

    def save(rank):
        return j.ranks[rank].save(2, {"bad": object()} if rank == 2 else state(rank, 2))

    saves = j.outcomes(save)
    assert isinstance(saves[2], errors.UnsupportedLeafError)
    for s in saves[:2]:
        error = s.durable.exception(WAIT_S)
        assert isinstance(error, errors.RanksError)
        assert error.ranks == (2,)
        assert "UnsupportedLeafError" in error.reason
    j.commit(3)
    assert [ck.steps() for ck in j.ranks] == [[3]] * 3


def test_a_save_that_one_rank_skips(job):
    j = job(world=2, in_flight=1, on_error="warn")
    gate = threading.Event()
    j.points[1] = lambda point: point == "captured" and gate.wait(WAIT_S)
    j.start()
    first = j.save(1)
    second = j.ranks[1].save(2, state(1, 2), when_full="skip")
    assert second.outcome == "skipped"
    gate.set()
    assert [s.durable.result(WAIT_S) for s in first] == [1, 1]
    error = j.ranks[0].save(2, state(0, 2)).durable.exception(WAIT_S)
    assert isinstance(error, errors.RanksError)
    assert "rank 1: it skipped this save" in str(error)
    j.commit(3)
    j.close()
    assert_states(j.start().restore(), 3, 2)


def test_ranks_that_save_different_steps_are_named(job):
    j = job(on_error="warn").start()
    saves = j.all(lambda ck: ck.save(7 if ck.rank == 2 else 5, state(ck.rank, 5)))
    for save in saves:
        error = save.durable.exception(WAIT_S)
        assert isinstance(error, errors.RanksError)
        assert 2 in error.ranks
        assert "step 7 on rank 2" in str(error)
    j.close()
    assert j.start().restore() == [None] * 3


def test_a_late_rank_times_out_the_save_and_the_next_one_commits(job):
    """Case 32: one rank sleeps in a save for ever; its step stays uncommitted, the old one stays, the next commits."""
    j = job(agree_timeout_s=0.3, on_error="warn")
    gate, sleeping = threading.Event(), threading.Event()

    def at(point):
        if point == "sealed" and sleeping.is_set():
            sleeping.clear()
            gate.wait(WAIT_S)

    j.points[2] = at
    j.options["agree_timeout_s"] = WAIT_S
    j.start()
    j.commit(1)
    wait_for_others(j, 0.3, 0, 1)
    sleeping.set()
    saves = j.save(2)
    for save in saves[:2]:
        error = save.durable.exception(WAIT_S)
        assert isinstance(error, errors.RankTimeoutError)
        assert error.ranks == (2,)
        assert "missing: rank 2" in str(error)
    assert [ck.latest() for ck in j.ranks[:2]] == [1, 1]
    wait_for_others(j, WAIT_S)
    third = j.save(3)
    assert [s.durable.result(WAIT_S) for s in third] == [3] * 3
    assert [ck.latest() for ck in j.ranks] == [3] * 3
    gate.set()
    assert isinstance(saves[2].durable.exception(WAIT_S), (errors.RanksError, type(None)))
    j.commit(4)
    assert [ck.steps() for ck in j.ranks] == [[4]] * 3
    j.close()
    assert_states(j.start().restore(), 4, 3)


def test_slots_that_wait_for_a_verdict_are_bounded(job):
    """A rank that saves nothing any more: the others stop after in_flight + 1 checkpoints that are not settled."""
    j = job(world=2, in_flight=2, on_error="warn", agree_timeout_s=0.2).start()
    one = j.ranks[0]
    outcomes = []
    for step in range(8):
        save = one.save(step, state(0, step), when_full="block" if step < 3 else "skip")
        outcomes.append(type(save.durable.exception(WAIT_S)).__name__)
    assert outcomes == ["RankTimeoutError"] * 3 + ["SkippedError"] * 5
    assert len(list((j.root / "ck/rank-00000").glob("slot-*"))) <= 2 * 2 + 1 + 1
    wait_for_others(j, WAIT_S)
    for step in range(3):  # the other one comes after all
        saved = j.ranks[1].save(step, state(1, step))
        assert saved.durable.result(WAIT_S) == step
    for step in range(3, 8):
        error = j.ranks[1].save(step, state(1, step)).durable.exception(WAIT_S)
        assert "rank 0: it skipped this save" in str(error)
    j.commit(9)
    j.close()
    j.start()
    assert_states(j.restore(), 9, 2)


def test_a_lost_place_fails_saves_fast_and_close_hangs_nothing(job):
    j = job(world=2, on_error="warn", agree_timeout_s=600).start()
    j.commit(1)
    waiting = j.ranks[0].save(2, state(0, 2))
    (j.root / "told").rename(j.root / "gone")  # at once: what is removed file by file is written to meanwhile
    assert isinstance(waiting.durable.exception(WAIT_S), errors.CoordinatorLostError)
    later = j.ranks[0].save(3, state(0, 3))
    assert isinstance(later.durable.exception(WAIT_S), errors.CoordinatorLostError)
    assert later.outcome == "failed"
    j.close()
    j.start()
    assert_states(j.restore(), 1, 2)


def test_a_rank_that_ends_is_not_waited_for(job):
    j = job(world=2, on_error="warn", agree_timeout_s=600).start()
    j.commit(1)
    j.ranks[1].close()
    error = j.ranks[0].save(2, state(0, 2)).durable.exception(WAIT_S)
    assert isinstance(error, errors.RanksError)
    assert "rank 1: it closed its Checkpointer" in str(error)


def test_late_words_and_failures_in_any_order(job):
    """Saves that time out at random, settle late, fail and overtake each other: in the end all ranks hold the same."""
    j = job(in_flight=3, keep=2, on_error="warn")
    rnd = random.Random(11)

    def at(point):
        if point == "sealed" and rough.is_set():
            time.sleep(rnd.choice([0, 0, 0.01, 0.15]))
            if rnd.random() < 0.1:
                raise errors.MediumError("write", "slot", OSError(5, "Input/output error"))

    rough = threading.Event()
    j.points = dict.fromkeys(range(3), at)
    j.start()
    wait_for_others(j, 0.1)
    rough.set()
    saves = j.all(lambda ck: [ck.save(step, state(ck.rank, step)) for step in range(40)])
    ended = [[type(s.durable.exception(WAIT_S)) for s in mine] for mine in saves]
    assert {errors.RankTimeoutError, errors.RanksError, errors.MediumError, errors.SkippedError, type(None)} >= {
        e for r in ended for e in r
    }
    rough.clear()
    wait_for_others(j, WAIT_S)
    j.commit(100, 101)
    assert [ck.steps() for ck in j.ranks] == [[100, 101]] * 3
    for r in range(3):
        assert len(list(store_of(j, r).glob("slot-*"))) <= 2 * 3 + 1 + 2
    j.close()
    assert_states(j.start().restore(), 101, 3)


# -- restoring together -----------------------------------------------------------------------------------------------


def test_damage_on_one_rank_makes_all_fall_back(job):
    j = damaged(job(keep=2), 1, 1, 2)
    restored = j.restore()
    assert_states(restored, 1, 3)
    for r in restored:
        assert [s.counter for s in r.skipped] == [2]
        assert "rank 1" in r.skipped[0].reason or "damaged" in r.skipped[0].reason
    j.commit(3)
    j.close()
    assert_states(j.start().restore(), 3, 3)


def test_without_fallback_all_raise(job):
    j = damaged(job(keep=2), 1, 1, 2)
    found = j.outcomes(lambda r: j.ranks[r].restore(fallback=False))
    assert [type(e) for e in found] == [errors.RanksError, errors.DamagedError, errors.RanksError]
    assert found[0].ranks == (1,)


def test_nothing_that_verifies_is_an_error_on_all(job):
    j = damaged(job(), 2, 1)
    found = j.outcomes(lambda r: j.ranks[r].restore())
    assert [type(e) for e in found] == [errors.NoValidCheckpointError] * 3


def test_a_roll_back_is_one_of_all_ranks(job):
    j = job(keep=3).start()
    j.commit(1, 2, 3)
    assert_states(j.restore(step=1), 1, 3)
    assert [ck.steps() for ck in j.ranks] == [[1]] * 3
    j.close()
    j.start()
    assert_states(j.restore(), 1, 3)
    assert_states(j.restore(step=3), 3, 3)  # after all
    j.commit(4)
    j.close()
    assert_states(j.start().restore(), 4, 3)


def test_a_roll_back_that_one_rank_has_not_noted(job, monkeypatch):
    """A crash in the middle of it: it counts as done on all."""
    j = job(keep=3).start()
    j.commit(1, 2, 3)
    history = j.ranks[0]._store.history
    record = next(r for r in j.ranks[0]._store.books.durable() if r.step == 1)
    history.restored(record, in_slot=True, damaged=frozenset(), branch=True)
    j.kill()
    j.start()
    assert_states(j.restore(), 1, 3)


def test_only_looking_changes_nothing(job):
    j = job(keep=2).start()
    j.commit(1, 2)
    assert_states(j.restore(step=1, branch=False), 1, 3)
    assert [ck.steps() for ck in j.ranks] == [[1, 2]] * 3


def test_a_step_that_is_not_there_and_steps_that_differ(job):
    j = job().start()
    j.commit(1)
    assert {type(e) for e in j.outcomes(lambda r: j.ranks[r].restore(step=9))} == {errors.StepNotFoundError}
    found = j.outcomes(lambda r: j.ranks[r].restore(step=r))
    assert {type(e) for e in found} == {errors.RanksError}
    assert "0 on rank 0, 1 on rank 1, 2 on rank 2" in str(found[0])
    assert_states(j.restore(step=1), 1, 3)


def test_a_like_that_fits_one_rank_only(job):
    j = job(world=2).start()
    j.commit(1)
    like = [state(0, 1), {"rank": 1, "step": 1, "x": np.zeros(3)}]
    found = j.outcomes(lambda r: j.ranks[r].restore(like=like[r]))
    assert [type(e) for e in found] == [errors.RanksError, errors.MismatchError]
    assert_states(j.restore(), 1, 2)


def test_a_restore_that_one_rank_does_not_join(job):
    j = job(world=2, agree_timeout_s=0.3).start()
    with pytest.raises(errors.RankTimeoutError, match="'restore'; missing: rank 1"):
        j.ranks[0].restore()


def test_a_restore_that_fails_on_one_rank_is_not_waited_for(job, monkeypatch):
    """Noting the roll-back fails on one rank: the others hear of it at once, and all may try again."""
    j = job(world=2, keep=3, agree_timeout_s=600).start()
    j.commit(1, 2, 3)

    def no_room(*args, **how):
        raise errors.MediumError("sync", "CHECK", OSError(28, "no room"))

    with monkeypatch.context() as patch:
        patch.setattr(j.ranks[1]._store.history, "restored", no_room)
        found = j.outcomes(lambda r: j.ranks[r].restore(step=1))
    assert [type(e) for e in found] == [errors.RanksError, errors.MediumError]
    assert "rank 1, before 'restored': MediumError: sync failed on CHECK: no room" in str(found[0])
    assert_states(j.restore(step=1), 1, 2)


# -- opening ----------------------------------------------------------------------------------------------------------


def test_what_not_all_ranks_hold_is_withdrawn(job):
    """Ranks that died at different points: {5, 7} and {5, 6} give 5."""
    j = job(world=2, in_flight=3, keep=3, on_error="warn", agree_timeout_s=0.2).start()
    for step in range(1, 6):
        j.commit(step)

    a, b = j.ranks
    a.save(7, state(0, 7)).durable.exception(WAIT_S)
    b.save(6, state(1, 6)).durable.exception(WAIT_S)
    j.kill()
    j.options["agree_timeout_s"] = WAIT_S
    j.start()
    assert [max(sealed(store_of(j, r))) for r in range(2)] == [5, 5]
    assert_states(j.restore(), 5, 2)
    assert [s.counter for s in j.save(8)] == [7, 7]


def test_a_lost_folder_is_an_error_that_names_it_and_changes_nothing(job):
    j = job().start()
    j.commit(1)
    j.close()
    shutil.rmtree(j.root / "ck/rank-00001")
    before = [sealed(store_of(j, r)) for r in (0, 2)]
    for _ in range(2):  # the second time its folder is there, though empty
        found = j.outcomes(j.open)
        assert {type(e) for e in found} == {errors.RanksError}
        assert {e.ranks for e in found} == {(1,)}
    assert [sealed(store_of(j, r)) for r in (0, 2)] == before


def test_ranks_tell_what_they_hold_themselves_and_nothing_twice(job):
    """At 256 ranks that keep 1,000 steps it was 7 MiB of each, which all of them read at every look."""
    j = job(world=2, keep_every=1).start()
    j.commit(*range(1, 9))
    seen = j.ranks[0]._recovery._seen()
    assert len(seen.own.sealed) >= 8
    (other,) = seen.others
    assert (other.rank, other.sealed) == (1, ())
    assert other.store_id == j.ranks[1]._recovery._seen().own.store_id
    j.close()
    alone = pccheck.Checkpointer(j.root / "ck")  # there is nobody else to tell it
    assert [len(h.sealed) >= 8 for h in alone._recovery._seen().others] == [True, True]
    assert alone.restore().step == 8
    alone.close()


@pytest.mark.parametrize("how", ["swapped", "copied", "shifted"])
def test_folders_of_ranks_that_changed_places_are_no_fresh_start(job, how):
    j = job().start()
    j.commit(1, 2)
    j.close()
    ck = j.root / "ck"
    shutil.copytree(ck, j.root / "backup")
    moves = {"swapped": [(0, 1), (1, 0)], "copied": [(0, 1)], "shifted": [(0, 1), (1, 2), (2, 0)]}[how]
    for source, target in moves:
        shutil.rmtree(ck / f"rank-0000{target}")
        shutil.copytree(j.root / f"backup/rank-0000{source}", ck / f"rank-0000{target}")
    before = [sealed(store_of(j, r)) for r in range(3)]
    for _ in range(2):
        found = j.outcomes(j.open)
        assert {type(e) for e in found} <= {errors.FormatError, errors.RanksError}
        assert "of rank 0 of 3, but it is to be the store of rank 1" in str(found[1])
        assert [sealed(store_of(j, r)) for r in range(3)] == before
    alone = j.outcomes(lambda r: pccheck.Checkpointer(ck), ranks=[0])
    assert isinstance(alone[0], errors.NoValidCheckpointError)
    shutil.rmtree(ck)
    (j.root / "backup").rename(ck)
    assert_states(j.start().restore(), 2, 3)


def test_a_rank_that_is_missing_at_the_start_is_named(job):
    j = job(agree_timeout_s=0.3)
    found = j.outcomes(j.open, ranks=[0, 2])
    assert {type(e) for e in found} == {errors.RankTimeoutError}
    assert {e.ranks for e in found} == {(1,)}


def test_a_rank_that_cannot_open_its_store_is_told_of(job):
    j = job(world=2)
    (j.root / "ck").mkdir()
    (j.root / "ck/rank-00001").write_text("a file where a folder must be")
    found = j.outcomes(j.open)
    assert isinstance(found[1], errors.MediumError)
    assert isinstance(found[0], errors.RanksError)
    assert "rank 1 left before 'open': it could not open its store" in str(found[0])


def test_two_jobs_cannot_have_one_root(job, tmp_path):
    j = job(world=2).start()
    j.commit(1)
    other = Job(tmp_path / "other", 2)
    other.place = lambda rank: tmp_path / "ck"
    found = other.outcomes(other.open)
    assert any(isinstance(e, errors.StoreTaken) for e in found)
    with pytest.raises(errors.StoreTaken):
        pccheck.Checkpointer(tmp_path / "ck")
    j.commit(2)
    other.end()


def test_a_second_start_does_not_end_the_job_that_goes_on(job):
    """It finds the stores taken, and must not speak in the place where the first one's ranks agree."""
    first = job(world=2).start()
    first.commit(1)
    waiting = first.ranks[0].save(2, state(0, 2))  # so that it looks at what is told all the time
    second = job(world=2)
    assert {type(e) for e in second.outcomes(second.open)} == {errors.StoreTaken}
    assert first.ranks[1].save(2, state(1, 2)).durable.result(WAIT_S) == 2
    assert waiting.durable.result(WAIT_S) == 2
    first.commit(3)


@pytest.mark.filterwarnings("ignore:.*CHECK is rebuilt")
def test_garbage_in_the_check_of_one_rank_costs_nothing(job):
    """What it said of all ranks was believed: a checkpoint that never was seemed to be held by all, and lost."""
    j = job(world=2).start()
    j.commit(1, 2)
    j.close()
    path = store_of(j, 1) / format.CHECK_NAME
    garbage = bytearray(random.Random(3).randbytes(path.stat().st_size))
    garbage[format.PEER_ADDR_OFFSET : format.PEER_ADDR_OFFSET + 8] = (1 << 40).to_bytes(8, "little")
    path.write_bytes(garbage)
    restored = j.start().restore()
    assert_states(restored, 2, 2)
    assert [r.skipped for r in restored] == [()] * 2
    j.commit(3)
    j.close()
    assert_states(j.start().restore(), 3, 2)


# -- other worlds -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("old", "new"), [(3, 2), (2, 3), (2, 1), (1, 2), (3, 1)])
def test_another_number_of_ranks_goes_on(job, old, new):
    a = job(world=old).start()
    a.commit(1, 2)
    a.close()
    b = job(world=new).start()
    assert [ck.latest() for ck in b.ranks] == [2] * new
    assert_states(b.restore(), 2, old)
    kept = {f.name for f in (b.root / "ck").iterdir()}
    assert any(n.startswith("rank-") for n in kept) == (old > 1 or new > 1)
    saves = b.save(3)
    assert [s.durable.result(WAIT_S) for s in saves] == [3] * new
    assert {s.counter for s in saves} == {3}, "counters go on"
    b.close()
    left = {f.name for f in (b.root / "ck").iterdir()}
    assert {n for n in left if n.startswith("rank-")} == ({f"rank-0000{r}" for r in range(new)} if new > 1 else set())
    assert any(n.startswith("slot-") for n in left) == (new == 1)
    c = job(world=new).start()
    assert_states(c.restore(), 3, new)


def test_the_old_world_stays_until_the_new_one_has_agreed(job):
    a = job(world=3).start()
    a.commit(1)
    a.close()
    b = job(world=2, on_error="warn", agree_timeout_s=0.2).start()
    b.ranks[0].save(2, state(0, 2)).durable.exception(WAIT_S)  # not agreed
    b.kill()
    c = job(world=3).start()
    assert_states(c.restore(), 1, 3)


def test_pinned_checkpoints_of_an_old_world_stay(job):
    a = job(world=3).start()
    a.commit(1)
    a.all(lambda ck: ck.pin(1))
    a.commit(2)
    a.close()
    b = job(world=2).start()
    b.commit(3)
    assert_states(b.restore(step=1), 1, 3)
    b.close()
    assert (b.root / "ck/rank-00002/kept").is_dir()
    assert_states(job(world=2).start().restore(step=1), 1, 3)


def test_a_zombie_of_the_old_world_loses_its_store(job, no_locks):
    """Where locks do not work: the old ranks still run when the new ones start."""
    old = job(world=3, on_error="warn", agree_timeout_s=1.0).start()
    old.commit(1)
    new = newcomers(Job(old.root, 2))
    new.start()
    assert_states(new.restore(), 1, 3)
    new.commit(2)
    saves = old.outcomes(lambda r: old.ranks[r].save(9, state(r, 9)))
    for s in saves:
        error = s if isinstance(s, Exception) else s.durable.exception(WAIT_S)
        assert isinstance(error, (errors.StoreTaken, errors.RanksError, errors.StoreGoneError))
    new.close()
    new.start()
    assert_states(new.restore(), 2, 2)
    new.end()


@pytest.mark.parametrize("point", ["sealed", "record-synced"])
def test_a_zombie_takes_nothing_back_that_is_not_its_own_any_more(job, no_locks, point):
    """Where locks do not work: its slot holds a newer, committed checkpoint when its own commit fails."""
    armed, reached, go_on = threading.Event(), threading.Event(), threading.Event()

    def at(here):
        if here == point and armed.is_set():
            reached.set()
            assert go_on.wait(WAIT_S)

    old = job(world=2, in_flight=1, on_error="warn", agree_timeout_s=5.0)
    old.points[0] = at
    old.start().commit(1)
    armed.set()
    late = old.ranks[0].save(2, state(0, 2))
    assert reached.wait(WAIT_S)
    new = newcomers(job(world=2), in_flight=1)
    assert_states(new.start().restore(), 1, 2)
    new.commit(3, 4, 5)
    before = [sealed(store_of(old, r)) for r in range(2)]
    go_on.set()
    assert isinstance(late.durable.exception(WAIT_S), errors.StoreTaken)
    old.end()
    assert [sealed(store_of(old, r)) for r in range(2)] == before
    new.close()
    assert_states(new.start().restore(), 5, 2)


def test_a_zombie_is_fenced_out_while_the_new_ranks_still_wait_for_each_other(job, no_locks):
    """Where locks do not work: what the new ranks have looked at, it must not give away until they have agreed."""
    old = job(world=2, in_flight=1, on_error="warn", agree_timeout_s=1.0).start()
    old.commit(1)
    new = newcomers(Job(old.root, 2))
    early = new.pool.submit(new.open, 0)
    told = old.root / "new/rank-00000.told"
    until = time.monotonic() + WAIT_S
    while not told.exists() and time.monotonic() < until:
        time.sleep(0.002)
    for step in range(2, 5):  # rank 0 has looked, and waits for rank 1
        with pytest.raises(errors.StoreTaken):
            old.ranks[0].save(step, state(0, step)).durable.result(WAIT_S)
    assert sealed(old.root / "ck/rank-00000") == [1]
    new.ranks = [early, new.open(1)]
    new.ranks[0] = early.result(WAIT_S)
    assert_states(new.restore(), 1, 2)
    new.commit(2)
    old.end()
    new.close()
    new.end()


@pytest.mark.parametrize("new", [2, 4])
def test_another_number_of_ranks_on_disks_of_their_own_is_an_error(job, new):
    a = job(world=3, nodes=True).start()
    a.commit(1)
    a.close()
    b = job(world=new, nodes=True)
    found = b.outcomes(b.open)
    assert {type(e) for e in found} == {errors.RanksError}
    c = job(world=3, nodes=True).start()
    assert_states(c.restore(), 1, 3)


def test_a_save_that_waits_for_a_place_hears_what_other_ranks_say_and_ends(job):
    """It slept until a save ended, though only another rank's word could make a place: both ranks hung (seen)."""
    j = job(world=2, in_flight=1, on_error="warn", agree_timeout_s=0.5).start()
    zero, one = j.ranks
    ends = [j.pool.submit(lambda: [zero.save(s, state(0, s), report=False) for s in range(1, 5)])]
    outcomes = [save.durable.exception(WAIT_S) for save in ends[0].result(WAIT_S)]
    assert {type(e) for e in outcomes} == {errors.RankTimeoutError, errors.SkippedError}  # each wait had its end
    for step in range(1, 5):
        one.save(step, state(1, step), report=False).durable.exception(WAIT_S)
    wait_for_others(j, WAIT_S)
    j.commit(9)


def test_a_save_that_waits_for_one_of_its_own_rank_does_not_spin(job, monkeypatch):
    """Past the time for other ranks it looked for a place without a pause, as long as its own rank's save took."""
    j = job(world=2, in_flight=1, on_error="warn")
    gate = threading.Event()
    j.points[0] = lambda point: point == "captured" and gate.wait(WAIT_S)
    j.start()
    wait_for_others(j, 0.01)
    zero, rounds = j.ranks[0], []
    await_places = zero._store.settling.await_places
    monkeypatch.setattr(zero._store.settling, "await_places", lambda *how: (rounds.append(how), await_places(*how)))
    zero.save(1, state(0, 1))
    second = j.pool.submit(zero.save, 2, state(0, 2))
    time.sleep(0.3)
    assert not second.done()
    assert len(rounds) < 100
    gate.set()
    assert second.result(WAIT_S).step == 2


@pytest.mark.parametrize(("replicated", "asked"), [(False, 0), (True, 2)])
def test_what_is_a_rank_s_own_is_asked_for_only_where_ranks_divide(job, replicated, asked):
    class Source:
        asked = 0

        @property
        def __pccheck_own__(self):
            self.asked += 1
            return ("x",)

        def __pccheck_state__(self):
            return state(0, 1)

    source = Source()
    j = job(world=2, replicated=replicated).start()
    j.outcomes(lambda r: j.ranks[r].save(1, source if r == 0 else state(0, 1)), raises=True)
    j.outcomes(lambda r: j.ranks[r].save(2, source if r == 0 else state(0, 1)), raises=True)
    assert source.asked == asked
