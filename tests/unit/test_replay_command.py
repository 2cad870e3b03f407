"""`pccheck replay`, as people call it: text, JSON, pictures, errors; and one short live run."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest
from msgspec import structs
from typer.testing import CliRunner

from pccheck.cli import build
from pccheck.commands.replay import _too_short
from pccheck.errors import UsageError
from pccheck.replay import live
from pccheck.replay.files import read_trace
from pccheck.replay.live import Settings
from pccheck.tuning.machine import Machine, Sample
from pccheck.tuning.wanted import failures_of

PUBLISHED = Path(__file__).parents[3] / "shared" / "data" / "gpus_trace.csv"
DOCUMENT = Path(__file__).parents[2] / "docs" / "replay.md"
TRACE = "seconds,event\n0,start\n400,loss\n460,loss\n1300,gain\n2000,loss\n2600,loss\n3600,end\n"
JOB = ("--state", "20GB", "--step", "1s", "--disk", "2GB/s", "--stream", "1GB/s")


@pytest.fixture
def trace(tmp_path):
    file = tmp_path / "spot.csv"
    file.write_text(TRACE)
    return str(file)


def call(*arguments: str):
    return CliRunner().invoke(build(), ["replay", *arguments], env={"COLUMNS": "100"})


def test_the_table_has_every_policy(trace):
    done = call(trace, *JOB, "--in-flight", "2", "--every", "30", "--every", "60")
    assert done.exit_code == 0, done.output
    assert "spot.csv: 4 losses in 60 min; 20 GB of state, 1 s a step" in done.output
    assert "policies that ask are told 15 min between failures" in done.output
    assert "assumed: a restart takes a minute" in done.output
    for policy in ("controller", "advised", "PCcheck", "CheckFreq", "synchronous", "every 30", "every 60", "ideal"):
        assert f"\n{policy} " in done.output
    assert call(trace, *JOB, "--in-flight", "2", "--every", "30", "--every", "60").output == done.output


def test_json_tells_the_same_under_stable_names(trace):
    done = call(trace, *JOB, "--in-flight", "2", "--restart", "90", "--mtbf", "20m", "--json")
    assert done.exit_code == 0, done.output
    told = json.loads(done.output)
    assert told["trace"] == {"name": "spot.csv", "failures": 4, "gains": 1, "end_s": 3600.0, "killed_at_end": False}
    assert told["mtbf_s"] == 1200.0
    assert (told["job"]["restart_s"], told["job"]["load_s"]) == (90.0, 0.0)
    by = {policy["policy"]: policy for policy in told["policies"]}
    pccheck = by["PCcheck"]
    assert pccheck["interval"] == 10
    assert pccheck["goodput"] == pytest.approx(pccheck["useful_s"] / pccheck["wall_s"])
    assert pccheck["useful_s"] + pccheck["lost_s"] + pccheck["stall_s"] + pccheck["down_s"] == pytest.approx(3600.0)
    assert by["ideal"]["interval"] is None
    assert set(told["fixed"]) == {"2 in flight", "1 in flight", "synchronous"}
    assert told["best"]["to_best"] == 0.0


def test_gains_scale_disk_changes_and_jitter_count(trace):
    def goodput(*more: str) -> float:
        done = call(trace, *JOB, "--in-flight", "2", "--json", *more)
        assert done.exit_code == 0, done.output
        return next(p["goodput"] for p in json.loads(done.output)["policies"] if p["policy"] == "PCcheck")

    plain = goodput()
    assert goodput("--gains") < plain
    assert goodput("--scale", "4") > plain
    assert goodput("--disk-change", "10m:0.1", "--disk-change", "0:1") < plain
    assert goodput("--jitter", "0.3", "--seed", "1") != goodput("--jitter", "0.3", "--seed", "2")


def test_pictures(trace, tmp_path):
    pytest.importorskip("matplotlib")
    done = call(trace, *JOB, "--plot", str(tmp_path / "pictures"))
    assert done.exit_code == 0, done.output
    for name in ("goodput.png", "timeline.png"):
        assert (tmp_path / "pictures" / name).read_bytes().startswith(b"\x89PNG")


def test_without_matplotlib_the_error_says_how_to_get_it(trace, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    done = call(trace, *JOB, "--plot", str(tmp_path))
    assert done.exit_code == 2
    assert "pip install 'pccheck[plot]'" in done.output


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((), "give --state SIZE and --step TIME, or --live"),
        (("--state", "20", "--step", "1"), "--state 20 is not allowed"),
        ((*JOB, "--mtbf", "often"), "--mtbf often is not allowed"),
        ((*JOB, "--scale", "0"), "--scale 0 is not allowed"),
        ((*JOB, "--disk-change", "5"), "--disk-change 5 is not allowed: it must be TIME:FACTOR"),
        ((*JOB, "--disk-change", "5:0"), "factor above 0"),
        ((*JOB, "--disk-change", "1h:1e308"), "1e-6 to 1e6"),
        ((*JOB, "--stall", "1e-308"), "--stall 1e-308 is not allowed"),
        ((*JOB, "--slowdown", "1e300"), "at most"),
        ((*JOB, "--jitter", "2"), "--jitter 2 is not allowed"),
        ((*JOB, "--slowdown", "0.05"), "for at most 5.0% slower give 1.05"),
        ((*JOB, "--probe", "none.json", "--disk", "1GB/s"), "leave them out"),
        ((*JOB, "--tuned"), "go with --live"),
        (("--live", "--contender", "nobody"), "there is no contender 'nobody'"),
        (("--live", "--every", "5", "--every", "9"), "give --every once"),
        (("--live", "--duration", "0"), "--duration"),
        (("--live", "--disk", "2GB/s"), "--disk"),
        (("--live", "--storage", "1TB"), "do not apply"),
        (("--live", "--dram", "1TB"), "do not apply"),
        ((*JOB, "--storage", "39GB"), "--storage 39 GB is not allowed: it must be at least 40 GB"),
        ((*JOB, "--dram", "10MB"), "--dram 10 MB is not allowed: it must be at least"),
        ((*JOB, "--scale", "1e300"), "spot.csv: a failure every 1.04e+298 d, its times multiplied by --scale 1e+300"),
    ],
)
def test_what_cannot_be_done_is_told(trace, arguments, said):
    done = call(trace, *arguments)
    assert done.exit_code == 2, done.output
    assert done.output.startswith("pccheck replay: ")
    assert said in done.output


@pytest.mark.parametrize(
    "arguments",
    [
        (*JOB, "--scale", "nan"), (*JOB, "--scale", "1e308"), (*JOB, "--scale", "1e-330"), (*JOB, "--jitter", "-1"),
        (*JOB, "--disk-change", "1:2", "--disk-change", "1:3"), (*JOB, "--disk-change", "1:inf"),
        (*JOB, "--stall", "1"), (*JOB, "--slowdown", "0"), (*JOB, "--disk", "2"), (*JOB, "--copy", "2"),
        (*JOB, "--mtbf", "0"), (*JOB, "--restart", "x"), ("--state", "1GB", "--step", "0"),
        ("--live", "--duration", "0"), ("--live", "--step", "2h"), ("--live", "--state", "99TB"),
        ("--live", "--restart", "x"), (*JOB, "--storage", "x"), (*JOB, "--dram", "x"), (*JOB, "--scale", "1e300"),
    ],
)  # fmt: skip
def test_errors_name_options_that_there_are(trace, arguments):
    done = call(trace, *arguments)
    assert done.exit_code == 2, done.output
    named = re.findall(r"--[a-z][a-z-]*", done.stderr)
    known = set(re.findall(r"--[a-z][a-z-]*", call("--help").output))
    assert named
    assert set(named) <= known, done.stderr


@pytest.mark.parametrize("kind", ["spot", "shared", "dedicated"])
def test_the_mean_time_between_failures_may_be_a_kind_of_machine_as_in_advise(trace, kind):
    done = call(trace, *JOB, "--mtbf", kind, "--json")
    assert done.exit_code == 0, done.output
    assert json.loads(done.output)["mtbf_s"] == failures_of(kind)[0]


def test_a_trace_without_losses_reads_well(tmp_path):
    calm = tmp_path / "calm.csv"
    calm.write_text("seconds,event\n0,start\n100,end\n")
    done = call(str(calm), *JOB)
    assert done.exit_code == 0, done.output
    assert "policies that ask are told that nothing fails" in " ".join(done.output.split())
    assert "or not ended when the trace was" in " ".join(done.output.split())


def test_what_would_take_minutes_to_simulate_is_refused_with_the_limit(tmp_path):
    many = tmp_path / "many.csv"
    many.write_text("seconds,event\n0,start\n" + "".join(f"{100 * i},loss\n" for i in range(1, 5002)))
    done = call(str(many), *JOB)
    assert done.exit_code == 2
    assert "5,001 losses; up to 5,000 are simulated" in done.stderr
    long = tmp_path / "long.csv"
    long.write_text("seconds,event\n0,start\n400000,loss\n900000,end\n")
    done = call(str(long), "--state", "1MB", "--step", "1s", "--every", "1")
    assert done.exit_code == 2
    assert "300,000 saves" in done.stderr


@pytest.mark.parametrize("arguments", [("--in-flight", "65"), ("--every", "9" * 30), ("--seed", "-5")])
def test_numbers_out_of_range_are_refused_at_once(trace, arguments):
    done = call(trace, *JOB, *arguments)
    assert done.exit_code == 2
    assert arguments[0] in done.output


@pytest.mark.parametrize("time", ["1e300", "1e-300"])
def test_a_trace_in_which_nothing_could_live_is_told_by_its_name(tmp_path, time):
    odd = tmp_path / "odd.csv"
    odd.write_text(f"seconds,event\n0,start\n{time},loss\n")
    done = call(str(odd), *JOB)
    assert done.exit_code == 2
    assert done.stderr.startswith("pccheck replay: odd.csv")
    assert "--mtbf" not in done.stderr


def test_room_that_a_probe_did_not_find_is_told_with_the_option_that_tells_another_amount(trace, tmp_path):
    GB = 10**9
    sample = Sample(
        state_bytes=GB, writers=2, writers_per_checkpoint=None, chunk_bytes=16 << 20, saves=4, in_flight=1,
        durable_s=0.5, worst_durable_s=0.6, period_s=0.5, buffer_bytes=GB,
    )  # fmt: skip
    machine = Machine(
        path="/data", filesystem="ext4", time_s=1.7e9, pccheck="0.1.0", pipeline="native", cpus=8,
        memory_bytes=64 * GB, free_bytes=33 * GB, seconds=20.0, copy_bytes_per_s=10e9, commit_s=0.01, save_s=0.002,
        samples=(sample,),
    )  # fmt: skip
    (tmp_path / "probe.json").write_bytes(machine.to_json())
    probe = ("--step", "2s", "--probe", str(tmp_path / "probe.json"))
    done = call(trace, "--state", "80GB", *probe)
    assert done.exit_code == 2
    assert done.stderr == (
        "pccheck replay: the probe found only 33 GB free at /data (`--storage` tells another amount): it must be at "
        "least 160 GB: slots for 1 under way and 1 to keep\n"
    )
    assert call(trace, "--state", "80GB", *probe, "--storage", "1TB").exit_code == 0
    (tmp_path / "probe.json").write_bytes(structs.replace(machine, memory_bytes=64 << 20).to_json())
    done = call(trace, "--state", "8GB", *probe)
    assert done.exit_code == 2
    assert "memory that the probe found is only" in done.stderr
    assert "`--dram`" in done.stderr
    assert call(trace, "--state", "8GB", *probe, "--dram", "1GB").exit_code == 0


def test_live_makes_no_folder_of_a_mistyped_name(trace, tmp_path):
    done = call(trace, "--live", "--contender", "pccheck", "--directory", str(tmp_path / "nope"))
    assert done.exit_code == 2
    assert done.stderr.startswith("pccheck replay: "), "it is found before anything is promised"
    assert "nope is no folder" in done.stderr
    assert not (tmp_path / "nope").exists()


def test_no_column_is_cut_however_narrow(trace):
    wide = CliRunner().invoke(build(), ["replay", trace, *JOB], env={"COLUMNS": "200"}).output
    narrow = CliRunner().invoke(build(), ["replay", trace, *JOB], env={"COLUMNS": "40"}).output
    assert "…" not in narrow
    for line in wide.splitlines():
        if line.startswith(("controller ", "Daly, first order ", "ideal ")):
            assert line in narrow


def test_a_file_that_is_no_trace_is_told_by_its_line(tmp_path):
    file = tmp_path / "odd\x1b.csv"
    file.write_text("Time,GPUs\n0,4\n9,many\n")
    done = call(str(file), *JOB)
    assert done.exit_code == 2
    assert "line 3: 'many' is no whole number of machines" in done.output
    assert "\x1b" not in done.output
    assert call(str(tmp_path / "none.csv"), *JOB).exit_code == 2


def test_live(trace, tmp_path):
    pytest.importorskip("matplotlib")
    options = ("--contender", "pccheck", "--duration", "8", "--state", "1MB", "--step", "10ms", "--every", "5")
    (tmp_path / "ckpt").mkdir()
    places = ("--directory", str(tmp_path / "ckpt"), "--plot", str(tmp_path / "pictures"))
    done = call(trace, "--live", *options, *places, "--restart", "0.2", "--json")
    assert done.exit_code == 0, done.output
    assert "1 contender, 8 s each; with the start of processes about" in done.stderr
    outcome = json.loads(done.stdout)["outcomes"][0]
    assert outcome["kills"] == 4
    assert outcome["steps"] > 0
    assert outcome["every"] == 5
    assert (tmp_path / "pictures" / "timeline.png").exists()
    assert not list((tmp_path / "ckpt").iterdir())


def test_lives_too_short_to_train_in_are_told_before_they_begin(trace, tmp_path):
    file = tmp_path / "many.csv"
    file.write_text("seconds,event\n0,start\n" + "".join(f"{100 * i},loss\n" for i in range(1, 27)))

    def said(duration_s: float, trace=file) -> str | None:
        return _too_short(read_trace(trace), Settings(directory=tmp_path, duration_s=duration_s, restart_s=0.5))

    assert said(20.0) == (
        "26 kills in 20 s leave about 0.29 s a life, little to train and save in: give --duration 2m or more"
    )
    assert said(120.0) is None
    assert said(8.0, Path(trace)) is None
    file.write_text("seconds,event\n0,start\n" + "".join(f"{100 * i},loss\n" for i in range(1, 5001)))
    assert "give a part of the trace" in said(20.0)


def test_the_warning_of_short_lives_comes_before_anything_is_started(trace, tmp_path, monkeypatch):
    def run(*arguments, **options):
        raise UsageError("started")

    monkeypatch.setattr(live, "run", run)
    options = ("--live", "--contender", "pccheck", "--directory", str(tmp_path))
    lines = call(trace, *options, "--duration", "3s").stderr.splitlines()
    assert lines[1].startswith("4 kills in 3 s leave about 0.")
    assert lines[1].endswith("give --duration 10s or more")
    assert lines[2] == "pccheck replay: started"
    assert "a life" not in call(trace, *options).stderr


@pytest.mark.skipif(not PUBLISHED.exists(), reason="the published trace is not here")
def test_the_simulation_in_the_document_is_what_is_printed(monkeypatch):
    command, shown = re.search(
        r"(?s)```\n\$ pccheck (replay gpus_trace[^\n]*)\n(.*?)\n```", DOCUMENT.read_text()
    ).groups()
    monkeypatch.chdir(PUBLISHED.parent)
    printed = CliRunner().invoke(build(), command.split(), env={"COLUMNS": "100", "NO_COLOR": "1"}).output
    assert shown.split() == printed.split()
    assert "at the 1 GB/s that one file gives" in " ".join(printed.split())
