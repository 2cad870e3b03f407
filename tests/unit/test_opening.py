"""Opening for writing: who has the store, what is adopted, what is rebuilt."""

import os
import random
import subprocess
import sys
import warnings

import pytest

import pccheck
from pccheck import errors, format
from pccheck.audit import audit, exit_code
from pccheck.holders import describe_self


def open_(path, **options):
    return pccheck.Checkpointer(path, chunk_bytes=4096, **options)


def set_holder(path, text):
    with (path / "CHECK").open("r+b") as f:
        f.seek(format.HOLDER_OFFSET)
        f.write(format.pack_holder(text))


HOLD = """
import fcntl, sys, time
f = open(sys.argv[1], "r+b")
fcntl.flock(f, fcntl.LOCK_EX)
print("locked", flush=True)
time.sleep(float(sys.argv[2]))
"""


@pytest.fixture
def held(tmp_path):
    """A store whose lock another process has, and that process."""
    open_(tmp_path).close()
    children = []

    def hold(seconds):
        args = [sys.executable, "-c", HOLD, str(tmp_path / "CHECK"), str(seconds)]
        child = subprocess.Popen(args, stdout=subprocess.PIPE, text=True)
        children.append(child)
        assert child.stdout.readline() == "locked\n"
        return child

    yield hold
    for child in children:
        child.kill()
        child.wait()
        child.stdout.close()


def test_a_living_holder_is_named_at_once(tmp_path, held):
    child = held(60)
    set_holder(tmp_path, describe_self().replace(f"pid {os.getpid()},", f"pid {child.pid},"))
    with pytest.raises(errors.StoreTaken, match=f"pid {child.pid}.*An earlier run"):
        open_(tmp_path, lock_timeout_s=30)


def test_the_lock_of_a_dead_holder_is_waited_for(tmp_path, held):
    """A child that inherited the lock may live on for seconds after its parent was killed."""
    held(0.5)
    set_holder(tmp_path, describe_self().replace(f"pid {os.getpid()},", "pid 999999999,"))
    open_(tmp_path, lock_timeout_s=20).close()


def test_the_wait_for_a_dead_holder_ends(tmp_path, held):
    held(60)
    set_holder(tmp_path, describe_self().replace(f"pid {os.getpid()},", "pid 999999999,"))
    with pytest.raises(errors.StoreTaken, match="inherited"):
        open_(tmp_path, lock_timeout_s=0.1)


def test_ranks_of_one_launcher_are_told_so(tmp_path, held):
    """torchrun without coordinator=: two processes of one parent open one directory."""
    child = held(60)
    text = f"pid {child.pid}, parent {os.getppid()}, "
    set_holder(tmp_path, text + describe_self().split(", ", 2)[2])
    with pytest.raises(errors.StoreTaken, match=r"An earlier run.*coordinator="):
        open_(tmp_path)


def test_incarnations_grow(tmp_path):
    seen = []
    for _ in range(3):
        ck = open_(tmp_path)
        ck.save(1, {})
        ck.close()
        seen.append(max(c.incarnation for c in pccheck.open(tmp_path).checkpoints))
    assert seen == sorted(set(seen))


def test_a_flipped_high_bit_in_check_does_not_use_up_the_counters(tmp_path):
    open_(tmp_path).close()
    with (tmp_path / "CHECK").open("r+b") as f:
        f.seek(format.LAST_COUNTER_OFFSET)
        f.write((1 << 63).to_bytes(8, "little"))
    with open_(tmp_path) as ck:
        assert ck.save(1, {}).counter < 1000


@pytest.fixture
def rolled_back(tmp_path):
    """A store that went back from step 4 to 2, and on to 5; beside it, what a later look at it finds."""
    with open_(tmp_path, keep=4) as ck:
        for step in (1, 2, 3, 4):
            ck.save(step, {"step": step})
    with open_(tmp_path, keep=4) as ck:
        assert ck.restore(step=2).step == 2
        ck.save(5, {"step": 5})
    return tmp_path


def overwrite(path, *ranges):
    """Put what no writer wrote into CHECK."""
    with (path / "CHECK").open("r+b") as f:
        for offset, length in ranges:
            f.seek(offset)
            f.write(random.Random(7).randbytes(length))


def said_at_opening(path):
    """Open for writing and close, and give the warnings."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        open_(path, keep=4).close()
    return [str(w.message) for w in caught]


def abandoned_in(path):
    data = (path / "CHECK").read_bytes()
    return [format.unpack_abandoned(data[o : o + format.PAGE]) for o in format.ABANDONED_OFFSETS]


COPIES = [(offset, format.PAGE) for offset in format.ABANDONED_OFFSETS]


@pytest.mark.parametrize(
    ("ranges", "words"),
    [
        ([(0, format.CHECK_BYTES)], ("is rebuilt from", "roll-backs are forgotten")),
        (COPIES, ("roll-backs are forgotten",)),
    ],
    ids=["all of CHECK", "both copies of the abandoned ranges"],
)
def test_a_damaged_check_is_rebuilt_whole_and_said_once(rolled_back, ranges, words):
    overwrite(rolled_back, *ranges)
    assert exit_code(audit(rolled_back)) == 1
    (said,) = said_at_opening(rolled_back)
    assert all(word in said for word in words)
    assert exit_code(audit(rolled_back, verify=True)) == 0
    assert said_at_opening(rolled_back) == []
    with open_(rolled_back, keep=4) as ck:  # and it can be rolled back as before
        assert ck.restore(step=2).step == 2
    assert pccheck.open(rolled_back).restore().step == 2


@pytest.mark.parametrize("copy", COPIES)
@pytest.mark.parametrize("superblock", [False, True])
def test_what_one_whole_copy_says_of_roll_backs_is_kept_and_copied(rolled_back, copy, superblock):
    before = next(filter(None, abandoned_in(rolled_back)))
    assert before.ranges
    overwrite(rolled_back, copy, *([(0, format.SECTOR)] if superblock else []))
    said = said_at_opening(rolled_back)
    assert len(said) == superblock
    assert not any("forgotten" in text for text in said)
    assert abandoned_in(rolled_back) == [before, before]


def test_a_missing_check_is_called_missing(rolled_back):
    (rolled_back / "CHECK").unlink()
    (said,) = said_at_opening(rolled_back)
    assert "CHECK is missing or empty; CHECK is rebuilt from the" in said
    assert "magic" not in said


def test_slots_of_another_store_are_not_adopted(tmp_path):
    for name in ("a", "b"):
        with open_(tmp_path / name) as ck:
            ck.save(ord(name), {"name": name})
    slot = next((tmp_path / "b").glob("slot-000.pcc"))
    target = tmp_path / "a/slot-007.pcc"
    target.write_bytes(slot.read_bytes())
    with open_(tmp_path / "a") as ck:
        assert ck.steps() == [ord("a")]
        assert ck.restore().state == {"name": "a"}


def test_a_store_opened_with_fewer_slots_gives_the_others_back(tmp_path):
    with open_(tmp_path, in_flight=4, keep=3) as ck:
        for step in range(9):
            ck.save(step, {"step": step})
            ck.wait()
    assert len(list(tmp_path.glob("slot-*"))) == 7
    with open_(tmp_path, in_flight=1, keep=1) as ck:
        assert ck.restore().step == 8
        ck.save(9, {"step": 9})
        ck.wait()
        assert ck.steps() == [9]
    assert len(list(tmp_path.glob("slot-*"))) == 2


def test_opening_what_is_no_directory(tmp_path):
    (tmp_path / "file").write_text("x")
    with pytest.raises(errors.MediumError, match="file"):
        open_(tmp_path / "file")


def test_a_file_system_without_locks_is_said_and_fenced(tmp_path, no_locks):
    """There the incarnation alone keeps writers apart: whoever opens last has the store."""
    with pytest.warns(RuntimeWarning, match="fences"):
        first = open_(tmp_path)
    first.save(1, {"by": "first"})
    first.wait()
    with pytest.warns(RuntimeWarning, match="fences"):
        second = open_(tmp_path)
    with pytest.raises(errors.StoreTaken, match=f"pid {os.getpid()}"):
        first.save(2, {"by": "first"})
    second.save(3, {"by": "second"})
    second.wait()
    assert second.restore().state == {"by": "second"}
    second.close()
    first.close()
