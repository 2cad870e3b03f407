"""`pccheck.probe` on real files: what it gives, what it takes, and that nothing of it is left, however it ends."""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest

import pccheck
from pccheck.errors import CapacityError, DamagedError, MediumError, OptionError, UsageError
from pccheck.probing import place, readback, trials
from pccheck.probing.place import NAME, STORE, workplace
from pccheck.probing.timing import Stopwatch, random_bytes, state_of
from pccheck.probing.trials import TINY_BYTES, Trial, slots_bytes
from pccheck.tuning.machine import Machine
from pccheck.version import __version__

MIB = 1 << 20
SMALL = {"seconds": 20.0, "size_bytes": MIB, "in_flight": 2}  # far more time than it needs


@pytest.fixture(autouse=True)
def few_saves(monkeypatch):
    """As few saves as give a median; how many they are is the only thing about time that is changed."""
    monkeypatch.setattr("pccheck.probing.timing.MOST_SAVES", 5)


@pytest.fixture
def found(tmp_path):
    (tmp_path / "mine").write_text("kept")
    return pccheck.probe(tmp_path, **SMALL)


def test_a_probe_measures_everything_that_advice_needs(found, tmp_path):
    assert found.path == str(tmp_path)
    assert found.pccheck == __version__
    assert found.pipeline in ("native", "portable")
    assert found.cpus >= 1
    assert min(found.free_bytes, found.memory_bytes) > MIB
    assert min(found.copy_bytes_per_s, found.read_bytes_per_s, found.commit_s, found.save_s, found.seconds) > 0
    assert found.worst_read_bytes_per_s <= found.read_bytes_per_s
    assert found.reads >= 3
    assert found.fresh_memory_bytes_per_s > 0
    assert found.device_copy_bytes_per_s is found.interference is None  # no probe knows them
    ways = {(s.state_bytes, s.in_flight, s.writers, s.writers_per_checkpoint, bool(s.pause_s)) for s in found.samples}
    assert ways == {
        (TINY_BYTES, 1, 2, None, True),  # what a commit costs
        (MIB, 1, 2, None, False), (MIB, 2, 2, None, False),  # at once
        (MIB // 4, 1, 2, None, False),  # in two sizes
        (MIB, 1, 2, None, True), (MIB // 4, 1, 2, None, True),  # on storage that had rested
        (MIB, 1, 1, 1, False), (MIB, 2, 2, 1, False),  # a writer each
        (MIB, 1, 4, None, False),  # more writers
    }  # fmt: skip
    for s in found.samples:
        assert 0 < s.durable_s <= s.worst_durable_s
        assert s.saves >= 2
        assert s.period_s > 0
    assert Machine.from_json(found.to_json()) == found
    assert found.model().durable_s(MIB, 2) > 0
    assert found.notes == () or "page cache" in found.notes[0]
    assert sorted(os.listdir(tmp_path)) == ["mine"]


def test_larger_chunks_are_measured_where_a_state_has_several():
    sizes = {trial.chunk_bytes for trial in trials.plan(256 * MIB, 2)}
    assert sizes == {4 * MIB, 16 * MIB, 64 * MIB}
    assert {trial.chunk_bytes for trial in trials.plan(MIB, 2)} == {16 * MIB}


def test_progress_rises_to_the_end(tmp_path):
    heard = []
    pccheck.probe(tmp_path, **SMALL, progress=lambda done, doing: heard.append((done, doing)))
    shares = [done for done, _ in heard]
    assert shares == sorted(shares)
    assert shares[0] >= 0
    assert shares[-1] == 1
    assert "2 at once" in [doing for _, doing in heard]


def test_a_probe_in_a_live_store_leaves_it_alone(tmp_path):
    with pccheck.Checkpointer(tmp_path, in_flight=1) as checkpointer:
        checkpointer.save(1, {"x": 1})
        checkpointer.wait()
        pccheck.probe(tmp_path, **SMALL)
        checkpointer.save(2, {"x": 2})
    with pccheck.open(tmp_path) as view:
        assert view.restore().state == {"x": 2}


# -- reading back --------------------------------------------------------------------------------------------------


@pytest.fixture
def stored(tmp_path):
    with pccheck.Checkpointer(tmp_path / "store", in_flight=1, history=False) as checkpointer:
        checkpointer.save(1, state_of(random_bytes(3 * MIB), 3 * MIB))
    return str(tmp_path / "store")


def test_what_is_read_back_goes_into_memory_that_was_touched_before(stored, monkeypatch):
    """On a virtual machine the first touch of memory took 1.5 s for 268 MB, and reading that much 0.1 s."""
    rooms, real = [], readback.fetch

    def fetch(medium, manifest, chunks, room, start, threads):
        assert np.asarray(room).all(), "every byte was written before"
        rooms.append(np.asarray(room).ctypes.data)
        real(medium, manifest, chunks, room, start, threads)
        assert not np.asarray(room).all(), "it holds the random bytes of the checkpoint"
        np.asarray(room)[:] = 1

    monkeypatch.setattr(readback, "fetch", fetch)
    found = readback.read_back(stored, time.monotonic() + 600)
    assert len(set(rooms)) == 1
    assert len(rooms) == found.reads == readback.MOST_READS
    assert 0 < found.median_s <= found.worst_s
    assert found.fresh_s > 0
    assert found.read_bytes >= 3 * MIB


@pytest.mark.parametrize(("most", "read"), [(2 * MIB, 2 * MIB), (1, MIB), (100 * MIB, 3 * MIB)])
def test_of_a_large_checkpoint_the_first_chunks_are_read(tmp_path, monkeypatch, most, read):
    with pccheck.Checkpointer(tmp_path, in_flight=1, chunk_bytes=MIB, history=False) as checkpointer:
        checkpointer.save(1, state_of(random_bytes(3 * MIB), 3 * MIB))
    monkeypatch.setattr(readback, "MOST_BYTES", most)
    assert readback.read_back(str(tmp_path), time.monotonic() + 600).read_bytes == read


@pytest.mark.parametrize(
    ("left_s", "each_s", "reads"),
    [(0, 1, 1), (600, 1000, 1), (600, 40, 3), (600, 19, 4), (600, 0, readback.MOST_READS)],
)
def test_reading_back_ends_when_its_share_of_the_time_is_up(stored, monkeypatch, left_s, each_s, reads):
    now_s = 1000.0

    def fetch(*arguments):
        nonlocal now_s
        now_s += each_s

    monkeypatch.setattr(readback, "fetch", fetch)
    monkeypatch.setattr(readback, "monotonic", lambda: now_s)
    found = readback.read_back(stored, now_s + left_s)
    assert (found.reads, found.median_s, found.worst_s) == (reads, each_s, each_s)


def test_damage_is_no_rate(stored):
    (slot,) = [path for path in Path(stored).glob("slot-*") if path.stat().st_size > 3 * MIB and path.read_bytes()[0]]
    with slot.open("r+b") as file:
        file.seek(slot.stat().st_size // 2)
        file.write(bytes(4096))
    with pytest.raises(DamagedError):
        readback.read_back(stored, time.monotonic() + 600)


# -- bounds --------------------------------------------------------------------------------------------------------


def test_it_never_takes_more_than_it_says(tmp_path):
    most, stop = 0, threading.Event()

    def watch() -> None:
        nonlocal most
        while not stop.wait(0.002):
            most = max(most, taken(tmp_path))

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        pccheck.probe(tmp_path, **SMALL)
    finally:
        stop.set()
        watcher.join()
    assert MIB < most <= slots_bytes(MIB, 2)


def taken(folder: Path) -> int:
    """Give the bytes of all files below a folder, which may vanish meanwhile."""
    total = 0
    for where, _, names in os.walk(folder):
        for name in names:
            try:
                total += max(os.stat(os.path.join(where, name)).st_blocks * 512, 0)
            except FileNotFoundError:
                pass
    return total


def test_half_of_what_is_free_is_the_most():
    free = 2 * slots_bytes(64 * MIB, 4)
    assert trials.check_size("d", None, 4, free, 1 << 40) == 64 * MIB
    assert trials.check_size("d", 64 * MIB, 4, free, 1 << 40) == 64 * MIB
    with pytest.raises(OptionError, match=r"size_bytes=67108865 .*to 67,108,864 bytes.*half of what is free in d"):
        trials.check_size("d", 64 * MIB + 1, 4, free, 1 << 40)
    with pytest.raises(OptionError, match="half of the memory that is left"):
        trials.check_size("d", 64 * MIB, 4, free, 12 * 64 * MIB - 12)
    assert trials.check_size("d", None, 4, 1 << 50, 1 << 50) == trials.MOST_BYTES
    assert trials.check_size("d", None, 1, 1 << 50, 1 << 27) == (1 << 27) // 6 // 4096 * 4096


@pytest.mark.parametrize(("free", "memory", "where"), [(100 * MIB, 1 << 40, "d"), (1 << 40, 100 * MIB, "memory")])
def test_too_little_room_is_said_with_figures(free, memory, where):
    with pytest.raises(CapacityError, match=rf"no room at {where}: [\d,]+ bytes are needed, 104,857,600 are free"):
        trials.check_size("d", None, 4, free, memory)


def test_a_full_disk_is_refused_and_left_as_it_was(tmp_path, monkeypatch):
    monkeypatch.setattr(place, "free_bytes", lambda directory: 10 * MIB)
    with pytest.raises(CapacityError, match="no room"):
        pccheck.probe(tmp_path)
    with pytest.raises(OptionError, match="size_bytes"):
        pccheck.probe(tmp_path, size_bytes=64 * MIB)
    assert os.listdir(tmp_path) == []


def test_what_storage_does_not_get_through_is_left_out_and_said(tmp_path, monkeypatch):
    monkeypatch.setattr(trials, "least_bytes", lambda trial: 1 << 60)
    found = pccheck.probe(tmp_path, **SMALL)
    assert len(found.samples) == 2  # the commit, and the first look
    assert found.read_bytes_per_s is None
    assert found.copy_bytes_per_s > 0
    assert found.notes[0].startswith("no time for: 2 at once; 1 at a time; ")
    assert "20 s" in found.notes[0]
    assert found.model().stream_bytes_per_s > 0  # enough to advise by
    assert found.alone_s(MIB) > 0


def test_states_are_as_large_as_there_is_time_for():
    slow = trials.affordable_bytes(trials.MOST_BYTES, 500e6, 0.01, 30.0, 4)
    assert trials.LEAST_BYTES < slow < trials.MOST_BYTES
    assert sum(trials.least_bytes(trial) for trial in trials.plan(slow, 4)) <= 30 * 500e6
    assert trials.affordable_bytes(trials.MOST_BYTES, 1e12, 0.01, 30.0, 4) == trials.MOST_BYTES
    assert trials.affordable_bytes(trials.MOST_BYTES, 1e12, 1.0, 30.0, 4) == trials.LEAST_BYTES
    assert trials.affordable_bytes(trials.MOST_BYTES, 1e3, 0.01, 30.0, 4) == trials.LEAST_BYTES


def test_a_trial_ends_when_all_time_is_up(tmp_path):
    late = Stopwatch(str(tmp_path / "store"), time.monotonic() - 1, 60.0)
    assert late.time(Trial(title="late", state_bytes=TINY_BYTES), time.monotonic() + 60) is None


def test_storage_too_slow_for_a_look_is_said(tmp_path, monkeypatch):
    monkeypatch.setattr(Stopwatch, "time", lambda self, trial, until_s: None)
    with pytest.raises(UsageError, match="20 s are too short to measure this storage"):
        pccheck.probe(tmp_path, **SMALL)
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    "wrong", [{"seconds": 0}, {"seconds": 1e9}, {"seconds": True}, {"in_flight": 0}, {"in_flight": 17},
              {"size_bytes": 0}, {"size_bytes": 1.5}, {"size_bytes": TINY_BYTES}]
)  # fmt: skip
def test_arguments_out_of_range_are_named(tmp_path, wrong):
    with pytest.raises(OptionError, match=next(iter(wrong))):
        pccheck.probe(tmp_path, **wrong)
    assert os.listdir(tmp_path) == []


def test_random_states_have_no_byte_twice():
    content = random_bytes(9 * MIB + 5)
    state = state_of(content, 9 * MIB + 3)
    assert sum(leaf.nbytes for leaf in state.values()) == 9 * MIB + 3
    blocks = [content[i : i + 4096].tobytes() for i in range(0, 9 * MIB, 4096)]
    assert len(set(blocks)) == len(blocks)


def test_the_file_system_of_a_folder_is_named(tmp_path):
    kind, storage = place.filesystem_of(str(tmp_path))
    assert kind != "?"
    assert storage in ("direct", "buffered", "mapped")


# -- the folder ----------------------------------------------------------------------------------------------------


def test_a_folder_that_is_not_there_is_said(tmp_path):
    with pytest.raises(UsageError, match="is no folder; make the folder"):
        pccheck.probe(tmp_path / "nowhere")
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="is no folder"):
        pccheck.probe(tmp_path / "file")


def test_a_folder_that_cannot_be_written_is_said(tmp_path):
    with pytest.raises(MediumError, match="pccheck-probe"):
        pccheck.probe("/proc", **SMALL)


def test_errors_leave_nothing_behind(tmp_path):
    def fail(done: float, doing: str) -> None:
        if doing == "1 at a time":
            raise RuntimeError("no more")

    with pytest.raises(RuntimeError, match="no more"):
        pccheck.probe(tmp_path, **SMALL, progress=fail)
    assert os.listdir(tmp_path) == []


def test_what_a_killed_probe_left_is_removed_by_the_next(tmp_path):
    left = tmp_path / NAME / STORE
    left.mkdir(parents=True)
    (left / "slot-000.pcc").write_bytes(bytes(100))
    with workplace(str(tmp_path)) as folder:
        assert os.listdir(folder) == []
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("foreign", ["notes.txt", STORE])
def test_what_no_probe_made_is_not_removed(tmp_path, foreign):
    (tmp_path / NAME).mkdir()
    (tmp_path / NAME / foreign).write_text("mine")
    with pytest.raises(UsageError, match=rf"{foreign}.*which no probe made"):
        pccheck.probe(tmp_path, **SMALL)
    assert (tmp_path / NAME / foreign).read_text() == "mine"


def test_a_link_in_its_place_is_not_followed(tmp_path):
    elsewhere = tmp_path / "elsewhere"
    (elsewhere / STORE).mkdir(parents=True)
    (tmp_path / NAME).symlink_to(elsewhere)
    with pytest.raises((UsageError, MediumError), match=NAME):
        pccheck.probe(tmp_path, **SMALL)
    assert (elsewhere / STORE).is_dir()


def test_two_probes_do_not_measure_each_other(tmp_path):
    with workplace(str(tmp_path)):
        with pytest.raises(UsageError, match="another probe is at work"):
            pccheck.probe(tmp_path, **SMALL)
        assert os.listdir(tmp_path) == [NAME]
    assert os.listdir(tmp_path) == []


def test_a_file_system_without_locks_will_do(tmp_path, monkeypatch):
    def no_locks(fd: int, operation: int) -> None:
        raise OSError(95, "Operation not supported")

    with monkeypatch.context() as patch:
        patch.setattr(fcntl, "flock", no_locks)
        with workplace(str(tmp_path)) as folder:
            assert os.path.isdir(folder)
    assert os.listdir(tmp_path) == []


PROGRAM = """
import sys, pccheck
def tell(done, doing):
    print(doing, flush=True)
try:
    pccheck.probe(sys.argv[1], seconds=60, size_bytes=8 << 20, in_flight=2, progress=tell)
except KeyboardInterrupt:
    print("interrupted", flush=True)
"""


def started(folder: Path, until: str) -> subprocess.Popen[str]:
    process = subprocess.Popen([sys.executable, "-c", PROGRAM, str(folder)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    for line in process.stdout:
        if line.strip() == until:
            return process
    raise AssertionError(f"it ended with {process.wait()} before it said {until!r}")


@pytest.mark.parametrize("moment", ["commits", "2 at once"])
def test_ctrl_c_leaves_nothing_behind(tmp_path, moment):
    process = started(tmp_path, moment)
    process.send_signal(signal.SIGINT)
    text, _ = process.communicate(timeout=60)
    assert text.splitlines()[-1] == "interrupted"
    assert os.listdir(tmp_path) == []


def test_a_killed_probe_leaves_what_the_next_one_removes(tmp_path):
    process = started(tmp_path, "2 at once")
    process.kill()
    process.communicate(timeout=60)
    assert os.listdir(tmp_path) == [NAME]
    assert os.listdir(tmp_path / NAME) == [STORE]
    pccheck.probe(tmp_path, **SMALL)
    assert os.listdir(tmp_path) == []
