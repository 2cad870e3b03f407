"""What is tried again, and what never is: a transient error of a write is, a failed sync is not."""

from __future__ import annotations

import errno
import os
import resource
from contextlib import contextmanager

import pytest

import pccheck
from pccheck import events
from pccheck.audit import audit, exit_code
from pccheck.errors import CapacityError, MediumError
from pccheck.storage.directory import Directory
from pccheck.testing.faults import Fault, FaultyVolume, Script
from tests.faults.helpers import CHUNK, WAIT_S, make_state, pool_of, slot_files, step_of


def faulty(directory, script, **options):
    volume = FaultyVolume(Directory(str(directory), create=True, write=True), script)
    return pccheck.Checkpointer(volume, **{"chunk_bytes": CHUNK, **options})


@pytest.mark.parametrize("code", [errno.EIO, errno.ESTALE, errno.EAGAIN])
@pytest.mark.parametrize("times", [1, 3])
def test_a_transient_write_error_is_survived_and_counted(tmp_path, code, times):
    """Case 18: a few errors in a row, then healthy: the save is durable, its data right, the retries counted."""
    script = Script()
    with faulty(tmp_path, script) as ck:
        ck.save(0, make_state(0)).durable.result(WAIT_S)
        script.arm(Fault("write", 2, errno=code, times=times))  # the first is the record "filling"
        assert ck.save(1, make_state(1)).durable.result(WAIT_S) == 1
        assert script.failed == times
        assert ck.stats().retries == times
        assert step_of(ck.restore().state) == 1


def test_a_permanent_write_error_is_tried_a_bounded_number_of_times(tmp_path):
    script = Script()
    with faulty(tmp_path, script, writers=1) as ck:
        ck.save(0, make_state(0)).durable.result(WAIT_S)
        script.arm(Fault("write", 2, errno=errno.EIO, times=1000))
        with pytest.raises(MediumError, match="Input/output") as caught:
            ck.save(1, make_state(1)).durable.result(WAIT_S)
        assert caught.value.errno == errno.EIO
        assert 1 < script.failed < 20
        assert ck.stats().retries < 20
        with pytest.raises(MediumError):
            ck.wait(WAIT_S)
        script.arm()
        assert ck.latest() == 0


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EFBIG])
def test_what_cannot_pass_by_itself_is_not_tried_again(tmp_path, code):
    script = Script()
    with faulty(tmp_path, script, writers=1) as ck:
        ck.save(0, make_state(0)).durable.result(WAIT_S)
        script.arm(Fault("write", 3, errno=code))
        with pytest.raises(MediumError) as caught:
            ck.save(1, make_state(1)).durable.result(WAIT_S)
        assert caught.value.errno == code
        assert (script.failed, ck.stats().retries) == (1, 0)
        with pytest.raises(MediumError):
            ck.wait(WAIT_S)


@pytest.mark.parametrize("nth", [1, 2, 3], ids=["filling", "data", "record"])
def test_a_failed_sync_is_never_tried_again(tmp_path, nth):
    """The kernel drops what it could not write and calls it clean: a second sync would lie, and so would the file."""
    script, heard = Script(), []
    with faulty(tmp_path, script, in_flight=1, observer=heard.append) as ck:
        ck.save(0, make_state(0)).durable.result(WAIT_S)
        before, told = len(script.operations), len(heard)
        script.arm(Fault("sync", nth))
        failing = ck.save(1, make_state(1))
        with pytest.raises(MediumError, match="sync"):
            failing.durable.result(WAIT_S)
        with pytest.raises(MediumError, match="sync") as caught:
            ck.wait(WAIT_S)
        victim = caught.value.path
        done = [o for o, path in script.operations[before:] if path == victim]
        assert done.count("sync") == nth, "no sync of that file after the one that failed"
        assert ck.latest() == 0
        assert step_of(ck.restore().state) == 0
        script.arm()
        for step in (2, 3, 4):
            ck.save(step, make_state(step)).durable.result(WAIT_S)
        name = os.path.basename(victim)
        changes = [o for o, path in script.operations[before:] if path == name and o in ("remove", "create")]
        assert changes == ["remove", "create"], "the file whose sync failed is used no more, a new one is"
        assert len(slot_files(tmp_path)) == 2
    released = [type(e) for e in heard[told:]]
    assert events.Failed in released
    assert events.Released not in released[: released.index(events.Failed)]


def test_a_word_that_cannot_be_synced_frees_nothing(tmp_path):
    """The slot that the word on disk may still name is not overwritten."""
    script, heard = Script(), []
    with faulty(tmp_path, script, in_flight=1, observer=heard.append) as ck:
        ck.save(0, make_state(0)).durable.result(WAIT_S)
        script.arm(Fault("check_sync"))
        with pytest.raises(MediumError):
            ck.save(1, make_state(1)).durable.result(WAIT_S)
        with pytest.raises(MediumError):
            ck.wait(WAIT_S)
        assert ck.latest() == 0
        assert step_of(ck.restore(0, branch=False).state) == 0
        assert ck.save(2, make_state(2)).durable.result(WAIT_S) == 2
        assert ck.latest() == 2
    released = [e.counter for e in heard if isinstance(e, events.Released)]
    failed = next(i for i, e in enumerate(heard) if isinstance(e, events.Failed))
    assert not any(isinstance(e, events.Released) for e in heard[:failed])
    assert sorted(released) == [1, 2]


# -- real faults of the kernel: a limit on the size of files ----------------------------------------------------------


@contextmanager
def files_limited_to(size: int):
    """Writes beyond `size` bytes of any file fail with EFBIG, and one across that place is short."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize("pipeline", ["native", "portable"])
def test_real_write_errors_anywhere_in_a_slot(tmp_path, pipeline):
    """Chunks, half chunks and the manifest fail for real; each save fails once, the next works, nothing is lost."""
    if pipeline == "native":
        pytest.importorskip("pccheck._native")
    chunk, nbytes = 64 * 1024, 5 * 64 * 1024
    with pccheck.Checkpointer(tmp_path, chunk_bytes=chunk, in_flight=2, pipeline=pipeline) as ck:
        ck.save(0, make_state(0, nbytes)).durable.result(WAIT_S)
        good = 0
        fds = len(os.listdir("/proc/self/fd"))
        for number, limit in enumerate(range(chunk, chunk + nbytes + chunk // 2, chunk // 2), start=1):
            with files_limited_to(limit):
                with pytest.raises(MediumError) as caught:
                    ck.save(number, make_state(number, nbytes)).durable.result(WAIT_S)
                assert caught.value.errno == errno.EFBIG
                assert caught.value.offset + chunk >= limit
                assert str(tmp_path / "slot-") in str(caught.value)
                with pytest.raises(MediumError):
                    ck.wait(WAIT_S)
                assert ck.latest() == good
                assert step_of(ck.restore().state) == good
            assert exit_code(audit(tmp_path, verify=True)) == 0
            if number % 3 == 0:
                good = ck.save(number, make_state(number, nbytes)).durable.result(WAIT_S)
            free, buffers = pool_of(ck)
            assert free == buffers
        assert len(slot_files(tmp_path)) == 3
        assert len(os.listdir("/proc/self/fd")) == fds
        assert ck.stats().pipeline == pipeline


def test_a_limit_on_file_sizes_at_the_first_save(tmp_path):
    with pccheck.Checkpointer(tmp_path, chunk_bytes=CHUNK) as ck:
        with files_limited_to(70_000), pytest.raises((MediumError, CapacityError), match="slot-000"):
            ck.save(0, make_state(0, 8 * CHUNK))
        assert slot_files(tmp_path) == []
        assert ck.save(1, make_state(1, 8 * CHUNK)).durable.result(WAIT_S) == 1
