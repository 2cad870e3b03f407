"""A live replay: real processes that are killed, contenders that do as they should, and others that do not."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path

import pytest

from pccheck.errors import CapacityError, OptionError, UsageError
from pccheck.replay import tuned
from pccheck.replay.contender import check, find, installed
from pccheck.replay.live import Results, Settings, run
from pccheck.replay.places import workplace
from pccheck.replay.told import Job
from pccheck.replay.trace import Trace

DEADLINE_S = 60.0
TRACE = Trace(losses=(45.0, 100.0), end_s=100.0, killed_at_end=True, name="short")
# A contender that keeps what it should, in one file; those below differ from it in one thing each.
SOUND = """
import os, subprocess, sys, time
from pathlib import Path
import numpy as np

def note(pid):
    with (Path(__file__).parent / "pids").open("a") as file:
        file.write(f"{pid}\\n")

def child():
    note(subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]).pid)

class Sound:
    def __init__(self, directory):
        self.path = Path(directory) / "state.npz"
        note(os.getpid())

    def restore(self, like):
        if not self.path.exists():
            return None
        with np.load(self.path) as file:
            state = {name: file[name] for name in file.files}
        return int(state["step"][0]), state

    def save(self, step, state):
        print("noise on standard output, as libraries make it")
        new = self.path.with_suffix(".new.npz")
        np.savez(new, **state)
        new.replace(self.path)

    def fence(self): ...

    def close(self): ...
"""
OTHERS = {
    "Flips": "    def restore(self, like):\n"
    "        found = super().restore(like)\n"
    "        if found: found[1]['ballast/000'][-1] ^= 1\n"
    "        return found\n",
    "Raises": "    def restore(self, like):\n        if self.path.exists(): raise ValueError('the file is torn')\n",
    "Crashes": "    def save(self, step, state):\n        child()\n        raise RuntimeError('the disk is on fire')\n",
    "Leaves": "    def __init__(self, directory):\n        super().__init__(directory)\n        child()\n",
    "Costly": "    def save(self, step, state):\n        time.sleep(0.05)\n",
    "Cheap": "    def save(self, step, state): ...\n",
    "Scribbles": "    def save(self, step, state): os.write(int(sys.argv[1]), b'\\0\\0\\0\\5hello')\n",
    "Boasts": "    def save(self, step, state): os.write(int(sys.argv[1]), b'\\x7f\\xff\\xff\\xff')\n",
    "Answers": "    def restore(self, like):\n"
    '        text = b\'{"type":"Missing","reason":""}\'\n'
    "        os.write(int(sys.argv[1]), len(text).to_bytes(4, 'big') + text)\n",
}


@pytest.fixture
def file(tmp_path) -> Path:
    """Write the contenders."""
    path = tmp_path / "mine.py"
    classes = [f"class {name}(Sound):\n{body}" for name, body in OTHERS.items()]
    path.write_text("\n".join([SOUND, *classes]))
    (tmp_path / "missing.py").write_text("import a_framework_that_is_not_installed\n")
    return path


def settings(tmp_path: Path, *, made: bool = True, **options: object) -> Settings:
    if made:
        (tmp_path / "work").mkdir(exist_ok=True)
    small = {"duration_s": 2.0, "restart_s": 0.1, "every": 5, "step_s": 0.01, "state_bytes": 1 << 20, "measure_s": 0.1}
    return Settings(directory=tmp_path / "work", **{**small, **options})


def assert_gone(folder: Path, at_least: int) -> None:
    """Wait until no process that a contender told of is left: killed ones may take a moment to be reaped by init."""
    pids = [int(line) for line in (folder / "pids").read_text().split()]
    assert len(pids) >= at_least
    until = time.monotonic() + DEADLINE_S
    while left := [pid for pid in pids if alive(pid)]:
        assert time.monotonic() < until, f"still there: {left}"
        time.sleep(0.02)


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def check_sound(results: Results, name: str) -> None:
    """Hold what is so of everyone whose checkpoints are whole, however fast the machine."""
    outcome = next(o for o in results.outcomes if o.contender == name)
    assert outcome.refused == ()
    assert outcome.steps % outcome.every == 0  # ended by a kill: what counts was saved
    assert outcome.steps > 0
    assert outcome.goodput == pytest.approx(outcome.steps * results.step_s / outcome.wall_s)
    assert (outcome.kills, outcome.kills_down, len(outcome.lost_steps)) == (2, 0, 2)
    assert all(lost >= 0 for lost in outcome.lost_steps)
    reached = [step for _, step, _ in outcome.timeline.kills]
    resumed = [step for _, _, step in outcome.timeline.kills]
    assert resumed == sorted(resumed)
    assert all(r <= step for r, step in zip(resumed, reached, strict=True))
    assert resumed[-1] == outcome.steps
    assert {step for _, step in outcome.timeline.saves} >= {step for step in resumed if step}
    assert all(a.end_s == b.start_s for a, b in pairwise(outcome.timeline.segments))
    assert outcome.timeline.segments[-1].end_s == results.trace.end_s == outcome.wall_s


def test_who_restores_what_was_saved_and_who_does_not(tmp_path, file):
    """One run of: pccheck, a sound one, one that restores wrong bytes, one that cannot read, one that dies, ..."""
    lines: list[str] = []
    names = ["pccheck", *(f"{file}:{c}" for c in ("Sound", "Flips", "Raises", "Crashes"))]
    missing = f"{tmp_path / 'missing.py'}:Any"
    results = run(TRACE, [*names, missing], settings(tmp_path), progress=lines.append)
    by_class = {o.contender.rpartition(":")[2]: o for o in results.outcomes}

    assert list(by_class) == ["pccheck", "Sound", "Flips", "Raises"]
    for name in ("pccheck", f"{file}:Sound"):
        check_sound(results, name)
    assert 1 <= len(by_class["Flips"].refused) <= 2  # each time that it had something
    assert all("ballast is not that of step" in why for why in by_class["Flips"].refused)
    assert by_class["Flips"].steps == 0
    assert all("ValueError: the file is torn" in why for why in by_class["Raises"].refused)
    assert by_class["Raises"].refused
    assert by_class["Flips"].goodput == 0.0
    assert "the disk is on fire" in results.failed[f"{file}:Crashes"]
    assert "ended by itself, with status 1" in results.failed[f"{file}:Crashes"]
    assert "a_framework_that_is_not_installed" in results.skipped[missing]
    assert any("is skipped" in line for line in lines)
    assert list((tmp_path / "work").iterdir()) == []
    assert_gone(tmp_path, 8)


def test_one_that_writes_where_its_process_tells_is_dropped_and_the_others_go_on(tmp_path, file):
    names = [f"{file}:{c}" for c in ("Scribbles", "Boasts", "Answers", "Sound")]
    results = run(TRACE, names, settings(tmp_path))
    assert set(results.failed) == set(names[:3])
    assert all("wrote something else" in reason for reason in results.failed.values())
    assert names[3] in [o.contender for o in results.outcomes]
    assert_gone(tmp_path, 4)


def test_a_job_that_is_alive_at_the_end_counts_every_step(tmp_path):
    trace = Trace(losses=(40.0, 41.0), end_s=100.0)
    results = run(trace, ["pccheck"], settings(tmp_path, duration_s=2.0, every={"pccheck": 3}))
    (outcome,) = results.outcomes
    assert (outcome.every, outcome.kills, outcome.kills_down, outcome.refused) == (3, 2, 1, ())
    assert outcome.steps == outcome.timeline.segments[-1].last
    assert outcome.timeline.segments[-1].kind == "work"


class InterruptError(KeyboardInterrupt):
    """A Ctrl-C of this test."""


@pytest.mark.parametrize("contender", ["Sound", "Leaves"])
def test_nothing_is_left_after_an_interrupt(tmp_path, file, contender):
    heard: list[str] = []

    def interrupt(line: str) -> None:
        heard.append(line)
        if line.startswith("life 2 of 2"):
            raise InterruptError

    with pytest.raises(InterruptError):
        run(TRACE, [f"{file}:{contender}"], settings(tmp_path, duration_s=2.0), progress=interrupt)
    assert list((tmp_path / "work").iterdir()) == []
    assert_gone(tmp_path, 1 if contender == "Sound" else 2)


def test_trainers_end_by_themselves_when_their_supervisor_is_killed(tmp_path, file):
    program = (
        "import sys; from pathlib import Path\n"
        "from pccheck.replay.live import Settings, run\n"
        "from pccheck.replay.trace import Trace\n"
        "settings = Settings(directory=Path(sys.argv[1]), duration_s=600, step_s=0.01, measure_s=0.1, state_bytes=0)\n"
        "run(Trace(losses=(1.0,), end_s=1.0), [sys.argv[2]], settings)\n"
    )
    (tmp_path / "work").mkdir()
    command = [sys.executable, "-c", program, str(tmp_path / "work"), f"{file}:Sound"]
    with subprocess.Popen(command) as supervisor:
        try:
            until = time.monotonic() + DEADLINE_S
            while not list((tmp_path / "work").rglob("state.npz")):
                assert time.monotonic() < until
                assert supervisor.poll() is None
                time.sleep(0.02)
        finally:
            supervisor.kill()
    assert_gone(tmp_path, 1)


def test_who_pays_more_for_a_save_saves_less_often(tmp_path, file):
    found = {}
    for name in ("Costly", "Cheap"):
        directory = tmp_path / name
        directory.mkdir()
        job = Job(
            contender=f"{file}:{name}", directory=str(directory), state_bytes=0, device_s=0.01, every=2, seed=0
        )  # fmt: skip
        found[name] = tuned.interval(job, tmp_path, step_s=0.01, mtbf_s=0.5, seconds=0.2)
        assert list(directory.iterdir()) == []
    assert 1 <= found["Cheap"] < found["Costly"]


def test_an_interval_that_looks_cheap_and_is_dear_is_not_chosen(tmp_path, monkeypatch):
    """A save that is free each 10 steps but holds up each step where it comes each step: the optimum alone says 1."""
    job = Job(contender="x", directory=str(tmp_path / "d"), state_bytes=0, device_s=0.01, every=10, seed=0)
    asked: list[int] = []

    def measured(job: Job, folder: Path, seconds: float) -> tuned.Measured:
        asked.append(job.every)
        mean_s = 0.01 if job.every >= 4 else 0.05
        return tuned.Measured(mean_s, mean_s)

    monkeypatch.setattr(tuned, "measure", measured)
    found = tuned.interval(job, tmp_path, step_s=0.01, mtbf_s=0.5, seconds=0.1)
    assert 1 in asked
    assert found in asked
    assert found >= 4


def test_a_contender_that_is_not_there_cannot_be_measured(tmp_path, file):
    missing = f"{tmp_path / 'missing.py'}:Any"
    job = Job(contender=missing, directory=str(tmp_path / "d"), state_bytes=0, device_s=0.01, every=2, seed=0)
    told = tuned.interval(job, tmp_path, step_s=0.01, mtbf_s=5.0, seconds=0.3)
    assert not isinstance(told, int)
    assert "a_framework_that_is_not_installed" in told.reason


def test_intervals_are_tuned_before_the_replay(tmp_path):
    trace = Trace(losses=(100.0,), end_s=100.0, killed_at_end=True)
    results = run(trace, ["pccheck"], settings(tmp_path, duration_s=1.0, tuned=True))
    assert results.outcomes[0].every >= 1
    assert results.outcomes[0].refused == ()


@pytest.mark.parametrize(
    ("names", "told"),
    [
        (["pccheck", "pickle"], "there is no contender 'pickle': installed are pccheck"),
        (["nowhere.py:Class"], "there is no file nowhere.py"),
        (["pccheck", "pccheck"], "each once"),
        ([], "give one or more"),
    ],
)
def test_names_are_checked_before_anything_is_started(tmp_path, names, told):
    with pytest.raises(UsageError, match=told):
        run(TRACE, names, settings(tmp_path, made=False))
    assert not (tmp_path / "work").exists()


def test_pccheck_is_the_first_of_those_installed():
    assert installed()[0] == "pccheck"
    check(list(installed()))
    assert find("pccheck").__name__ == "Pccheck"


def test_a_trace_that_kills_nobody_is_refused(tmp_path):
    with pytest.raises(UsageError, match="no losses"):
        run(Trace(losses=(), end_s=10.0), ["pccheck"], settings(tmp_path))


def test_too_little_room_is_told_before_anything_is_started(tmp_path, monkeypatch):
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=1 << 20))
    with pytest.raises(CapacityError) as caught:
        run(TRACE, ["pccheck"], settings(tmp_path))
    assert (caught.value.needed_bytes, caught.value.free_bytes) == (4 << 20, 1 << 20)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("duration_s", 0.0),
        ("duration_s", float("nan")),
        ("restart_s", -1.0),
        ("every", 0),
        ("every", {"pccheck": 0}),
        ("step_s", 0.0),
        ("step_s", 61.0),
        ("state_bytes", -1),
        ("measure_s", 0.0),
    ],
)
def test_settings_out_of_range_are_refused(field, value):
    with pytest.raises(OptionError) as caught:
        Settings(directory=Path("x"), **{field: value})
    assert caught.value.field == field


def test_the_folder_must_be_usable(tmp_path):
    (tmp_path / "work").write_text("a file")
    with pytest.raises(UsageError, match="is no folder"):
        run(TRACE, ["pccheck"], settings(tmp_path, made=False))
    (tmp_path / "work").unlink()
    with pytest.raises(UsageError, match="is no folder"):
        run(TRACE, ["pccheck"], settings(tmp_path, made=False))
    assert not (tmp_path / "work").exists(), "a mistyped name makes no folder"


def test_contenders_get_an_absolute_path(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with workplace(Path(), 0) as folder:  # Orbax refuses any other, in a thread of its own
        assert folder.is_absolute()
        assert folder.parent == tmp_path


def test_no_descriptor_is_left(tmp_path):
    before = set(os.listdir("/proc/self/fd"))
    run(TRACE, ["pccheck"], settings(tmp_path, duration_s=0.5))
    assert set(os.listdir("/proc/self/fd")) == before
