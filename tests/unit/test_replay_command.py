"""`pccheck replay`, as people call it: text, JSON, pictures, errors; and one short live run."""

from __future__ import annotations

import json
import sys

import pytest
from typer.testing import CliRunner

from pccheck.cli import build

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
        ((*JOB, "--scale", "0"), "--scale 0.0 is not allowed"),
        ((*JOB, "--disk-change", "5"), "--disk-change 5 is not allowed: it must be TIME:FACTOR"),
        ((*JOB, "--disk-change", "5:0"), "factor above 0"),
        ((*JOB, "--jitter", "2"), "--jitter 2.0 is not allowed"),
        ((*JOB, "--slowdown", "0.05"), "for at most 5.0% slower give 1.05"),
        ((*JOB, "--probe", "none.json", "--disk", "1GB/s"), "leave them out"),
        ((*JOB, "--tuned"), "go with --live"),
        (("--live", "--contender", "nobody"), "there is no contender 'nobody'"),
        (("--live", "--every", "5", "--every", "9"), "give --every once"),
        (("--live", "--duration", "0"), "--duration"),
        (("--live", "--disk", "2GB/s"), "--disk"),
    ],
)
def test_what_cannot_be_done_is_told(trace, arguments, said):
    done = call(trace, *arguments)
    assert done.exit_code == 2, done.output
    assert done.output.startswith("pccheck replay: ")
    assert said in done.output


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
    places = ("--directory", str(tmp_path / "ckpt"), "--plot", str(tmp_path / "pictures"))
    done = call(trace, "--live", *options, *places, "--restart", "0.2", "--json")
    assert done.exit_code == 0, done.output
    outcome = json.loads(done.stdout)["outcomes"][0]
    assert outcome["kills"] == 4
    assert outcome["steps"] > 0
    assert outcome["every"] == 5
    assert (tmp_path / "pictures" / "timeline.png").exists()
    assert not list((tmp_path / "ckpt").iterdir())
