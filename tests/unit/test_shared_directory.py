"""A shared folder as the place where ranks agree: whole files, torn ones, leftovers, two of one rank, forks."""

import os
import stat
import threading

import pytest

import pccheck
from pccheck.errors import CoordinatorLostError, ForkedError, OptionError, RanksError, UsageError


@pytest.fixture
def two(tmp_path):
    return [pccheck.SharedDirectory(tmp_path / "told", rank=r, world=2) for r in range(2)]


def test_what_one_leaves_all_read(two):
    assert two[0].read() == [None, None]
    two[0].publish(b"a")
    two[1].publish(b"b")
    assert two[0].read() == two[1].read() == [b"a", b"b"]
    two[0].publish(b"c")
    assert two[1].read() == [b"c", b"b"]


def test_close_takes_its_own_file_away_only(two, tmp_path):
    for d in two:
        d.publish(b"x")
    two[0].close()
    two[0].close()
    assert two[1].read() == [None, b"x"]
    two[1].close()
    assert list((tmp_path / "told").iterdir()) == []


def test_readers_find_whole_blobs_only(two):
    blobs = [bytes([n]) * 50_000 for n in range(50)]
    seen, done = set(), threading.Event()

    def read():
        while not done.is_set():
            seen.add(two[1].read()[0])

    reader = threading.Thread(target=read)
    reader.start()
    for blob in blobs:
        two[0].publish(blob)
    done.set()
    reader.join(20)
    assert seen <= {None, *blobs}


def test_another_process_that_acts_as_this_rank(two, tmp_path):
    """A zombie of an earlier start: neither takes the other's place unnoticed, neither removes the other's file."""
    two[0].publish(b"zombie")
    new = pccheck.SharedDirectory(tmp_path / "told", rank=0, world=2)
    new.publish(b"new")
    with pytest.raises(RanksError, match="another process acts as rank 0") as caught:
        two[0].publish(b"zombie again")
    assert caught.value.ranks == (0,)
    two[0].close()
    assert new.read()[0] == b"new"


def test_leftovers_are_given_as_they_are(two, tmp_path):
    (tmp_path / "told/rank-00001.told").write_bytes(b"of an earlier job")
    (tmp_path / "told/.rank-00001.told.0123").write_bytes(b"half")
    assert two[0].read() == [None, b"of an earlier job"]


def test_a_folder_that_goes_away_is_lost(two, tmp_path):
    two[0].publish(b"x")
    (tmp_path / "told/rank-00000.told").unlink()
    assert two[0].read() == [None, None]
    (tmp_path / "told").rmdir()
    with pytest.raises(CoordinatorLostError, match="told"):
        two[0].read()
    with pytest.raises(CoordinatorLostError, match="cannot be written to"):
        two[0].publish(b"y")


def test_a_folder_that_cannot_be_made(tmp_path):
    (tmp_path / "file").write_text("x")
    with pytest.raises(CoordinatorLostError, match="cannot be made"):
        pccheck.SharedDirectory(tmp_path / "file/told", rank=0, world=2)


@pytest.mark.parametrize(("rank", "world"), [(2, 2), (-1, 2), (0, 0), (True, 2), ("0", 2), (0, 2.0)])
def test_rank_and_world_are_checked(tmp_path, rank, world):
    with pytest.raises(OptionError, match=r"rank=|world="):
        pccheck.SharedDirectory(tmp_path, rank=rank, world=world)


@pytest.mark.parametrize("path", [None, 3, b"/x", ""])
def test_the_path_is_checked(path):
    with pytest.raises(UsageError, match="path="):
        pccheck.SharedDirectory(path, rank=0, world=1)


def test_a_forked_child_is_no_rank(two):
    two[0].publish(b"parent")
    child = os.fork()
    if child == 0:
        try:
            two[0].publish(b"child")
        except ForkedError:
            two[0].close()  # leaves the parent's file
            os._exit(7)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    assert two[1].read()[0] == b"parent"


def test_files_are_for_people_of_the_job_only_as_the_umask_says(two, tmp_path):
    two[0].publish(b"x")
    mode = stat.S_IMODE((tmp_path / "told/rank-00000.told").stat().st_mode)
    mask = os.umask(0)
    os.umask(mask)
    assert mode == 0o666 & ~mask
