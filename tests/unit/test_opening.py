"""Opening for writing: who has the store, what is adopted, what is rebuilt."""

import os
import subprocess
import sys

import pytest

import pccheck
from pccheck import errors, format
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
    with pytest.raises(errors.StoreTaken, match=f"pid {child.pid}"):
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
    with pytest.raises(errors.StoreTaken, match="coordinator="):
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
