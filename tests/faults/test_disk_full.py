"""Real full disks: one clear error in the trainer, the last good checkpoint stays, no space is lost, saving goes on."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path

import pytest

import pccheck
from pccheck.audit import audit, exit_code
from pccheck.errors import CapacityError, MediumError
from pccheck.storage.directory import Directory
from pccheck.testing.faults import Fault, FaultyVolume, Script
from tests.faults.helpers import CHUNK, WAIT_S, make_state, open_files, pool_of, run_python, slot_files, step_of

MIB = 1 << 20
BIG = 64 * 1024  # chunks begin at multiples of this, so that no space is lost between them


def free(disk: Path) -> int:
    stats = os.statvfs(disk)
    return stats.f_bavail * stats.f_frsize


def fill(disk: Path, leave: int) -> Path:
    """Take all space but `leave` bytes, also where a line of the store's history takes some of it meanwhile."""
    ballast = disk / "ballast"
    with ballast.open("wb") as f:
        while (more := free(disk) - leave) > 0:
            try:
                os.posix_fallocate(f.fileno(), f.seek(0, os.SEEK_END), more)
            except OSError as error:
                if error.errno != errno.ENOSPC:
                    raise
    return ballast


@pytest.mark.parametrize("pipeline", ["auto", "portable"])
def test_a_disk_too_small_for_the_first_save(small_disk, pipeline):
    """Case 17: the error comes from `save()` at step 1 and says where, how much is needed, how much is free."""
    disk = small_disk(4 * MIB)
    with pccheck.Checkpointer(disk / "s", chunk_bytes=BIG, pipeline=pipeline) as ck:
        before, fds = free(disk), open_files()
        for _ in range(3):
            with pytest.raises(CapacityError) as caught:
                ck.save(1, make_state(1, 2 * MIB))
            error = caught.value
            assert str(disk / "s") in error.path
            assert error.needed_bytes >= 2 * MIB
            assert 0 < error.free_bytes <= before
            assert f"{error.needed_bytes:,}" in str(error)
            assert f"{error.free_bytes:,}" in str(error)
        assert free(disk) == before
        assert open_files() == fds
        assert slot_files(disk / "s") == []
        assert (ck.latest(), ck.restore()) == (None, None)
        ck.raise_errors()  # what `save()` raised itself is not told of again
        assert ck.save(2, make_state(2, MIB // 2)).durable.result(WAIT_S) == 2
        assert step_of(ck.restore().state) == 2


@pytest.mark.parametrize("pipeline", ["auto", "portable"])
def test_growth_on_a_full_disk_takes_nothing(small_disk, pipeline):
    """The state grows when moments appear, and there is no room: all space is as it was, and saving goes on."""
    disk = small_disk(16 * MIB)
    with pccheck.Checkpointer(disk / "s", chunk_bytes=BIG, pipeline=pipeline, history=False) as ck:  # space is counted
        ck.save(1, make_state(1, MIB)).durable.result(WAIT_S)
        before = free(disk)
        for size in (before // 3 + MIB, before // 2, 2 * before):  # room for two slots of three, for one, for none
            with pytest.raises(CapacityError) as caught:
                ck.save(2, make_state(2, size + MIB))
            assert caught.value.needed_bytes > before
            assert free(disk) == before
            assert step_of(ck.restore().state) == 1
        assert ck.save(3, make_state(3, MIB)).durable.result(WAIT_S) == 3
        assert ck.save(4, make_state(4, 2 * MIB)).durable.result(WAIT_S) == 4
        assert step_of(ck.restore().state) == 4
        ck.raise_errors()
    assert exit_code(audit(disk / "s", verify=True)) == 0


def test_saves_go_on_when_space_returns(small_disk):
    disk = small_disk(8 * MIB)
    with pccheck.Checkpointer(disk / "s", chunk_bytes=BIG) as ck:
        ballast = fill(disk, MIB)
        with pytest.raises(CapacityError):
            ck.save(1, make_state(1, MIB))
        ballast.unlink()
        for step in (2, 3, 4):
            assert ck.save(step, make_state(step, MIB)).durable.result(WAIT_S) == step


def test_once_the_slots_are_there_a_full_disk_harms_nothing(small_disk):
    """Slots are preallocated: not a byte of space is needed from the second save on."""
    disk = small_disk(8 * MIB)
    with pccheck.Checkpointer(disk / "s", chunk_bytes=BIG, in_flight=3) as ck:
        ck.save(0, make_state(0, MIB)).durable.result(WAIT_S)
        fill(disk, 0)
        for step in range(1, 20):
            ck.save(step, make_state(step, MIB))
        ck.wait(WAIT_S)
        assert step_of(ck.restore().state) == 19
    with pccheck.Checkpointer(disk / "s", chunk_bytes=BIG, in_flight=3) as ck:
        assert step_of(ck.restore().state) == 19
        ck.save(20, make_state(20, MIB)).durable.result(WAIT_S)


def test_opening_on_a_full_disk(small_disk):
    """There is no room even for CHECK: one clear error each time, and nothing is left open or behind."""
    disk = small_disk(MIB)
    ballast = fill(disk, 8192)
    with pytest.raises(CapacityError, match="CHECK"):
        pccheck.Checkpointer(disk / "s")
    fds = open_files()
    for _ in range(10):
        with pytest.raises(CapacityError):
            pccheck.Checkpointer(disk / "s")
    assert open_files() == fds
    ballast.unlink()
    with pccheck.Checkpointer(disk / "s", chunk_bytes=BIG) as ck:
        assert ck.save(1, make_state(1)).durable.result(WAIT_S) == 1


def test_a_pinned_slot_is_replaced_only_where_there_is_room(small_disk):
    """A pin needs the space of one slot more; without it the next save says so and every checkpoint stays."""
    disk = small_disk(8 * MIB)
    with pccheck.Checkpointer(disk / "s", chunk_bytes=BIG, in_flight=1) as ck:
        ck.save(0, make_state(0, MIB)).durable.result(WAIT_S)
        ck.pin(0)
        ballast = fill(disk, MIB // 2)
        ck.save(1, make_state(1, MIB)).durable.result(WAIT_S)
        with pytest.raises(CapacityError):
            ck.save(2, make_state(2, MIB))
        assert ck.steps() == [0, 1]
        for step in (0, 1):
            assert step_of(ck.restore(step, branch=False).state) == step
        ballast.unlink()
        for step in (3, 4):
            assert ck.save(step, make_state(step, MIB)).durable.result(WAIT_S) == step
        assert ck.steps() == [0, 4]
        assert len(slot_files(disk / "s")) == 2


def test_the_process_lives_and_its_status_tells(small_disk):
    """A job whose disk is too small ends with a traceback that names the place, not with a signal."""
    disk = small_disk(2 * MIB)
    done = run_python(
        """
        import sys
        import numpy as np
        import pccheck
        with pccheck.Checkpointer(sys.argv[1]) as ck:
            ck.save(1, {"w": np.ones(1 << 20)})
        """,
        disk / "s",
    )
    assert done.returncode == 1
    assert "CapacityError" in done.stderr
    assert str(disk / "s") in done.stderr


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
@pytest.mark.parametrize("target", ["manifest", "record"])
def test_case_14_no_room_for_the_record(tmp_path, code, target):
    """Case 14: data can be written, the manifest or the record cannot: the old one counts, the slot is used again."""
    script = Script()
    volume = FaultyVolume(Directory(str(tmp_path), create=True, write=True), script)
    with pccheck.Checkpointer(volume, chunk_bytes=CHUNK, in_flight=1) as ck:
        ck.save(1, make_state(1)).durable.result(WAIT_S)
        chunks = 3
        script.arm(Fault("write", 1 + chunks + {"manifest": 1, "record": 2}[target], errno=code))
        failing = ck.save(2, make_state(2))
        error = failing.durable.exception(WAIT_S)
        assert isinstance(error, MediumError)
        assert error.errno == code
        assert (failing.outcome, ck.latest()) == ("failed", 1)
        with pytest.raises(MediumError) as caught:
            ck.wait(WAIT_S)
        assert caught.value is error
        with pccheck.open(tmp_path) as view:
            assert step_of(view.restore().state) == 1
        assert exit_code(audit(tmp_path, verify=True)) == 0
        script.arm()
        assert ck.save(2, make_state(2)).durable.result(WAIT_S) == 2
        assert step_of(ck.restore().state) == 2
        assert len(slot_files(tmp_path)) == 2
        assert pool_of(ck)[0] == pool_of(ck)[1]


def test_a_disk_that_fills_while_a_slot_is_made_anew(small_disk):
    """A slot file that somebody deleted and a disk that is full: refused, until there is room."""
    disk = small_disk(8 * MIB)
    with pccheck.Checkpointer(disk / "s", chunk_bytes=BIG, in_flight=1) as ck:
        for step in (0, 1):
            ck.save(step, make_state(step, MIB)).durable.result(WAIT_S)
    shutil.copytree(disk / "s", disk / "copy")
    with pccheck.Checkpointer(disk / "copy", chunk_bytes=BIG, in_flight=2) as ck:
        assert step_of(ck.restore().state) == 1
        ballast = fill(disk, MIB // 2)
        with pytest.raises(CapacityError):
            ck.save(2, make_state(2, MIB))
        assert step_of(ck.restore().state) == 1
        ballast.unlink()
        assert ck.save(3, make_state(3, MIB)).durable.result(WAIT_S) == 3
