"""`pccheck advise` as a user runs it: from a line to settings, with errors that say what to do."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

import pccheck
from pccheck import cli
from pccheck.testing.slotfiles import check_file, slot_file
from pccheck.tuning.machine import Machine, Sample

DOCUMENT = Path(__file__).parents[2] / "docs" / "cli.md"
SPOT = ("advise", "--state", "80GB", "--step", "2s", "--mtbf", "spot")


@dataclass
class Done:
    returncode: int
    stdout: str
    stderr: str

    @property
    def text(self) -> str:
        """What was printed, its lines joined."""
        return re.sub(r"\s+", " ", self.stdout)


def run(*arguments: str | Path, columns: int = 80) -> Done:
    environment = {"COLUMNS": str(columns), "LINES": "40", "TERM": "dumb", "NO_COLOR": "1"}
    result = CliRunner().invoke(cli.build(), [str(a) for a in arguments], env=environment, prog_name="pccheck")
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return Done(result.exit_code, result.stdout, result.stderr)


def as_json(*arguments: str | Path) -> dict:
    done = run("advise", *arguments, "--json")
    assert done.returncode in (0, 1), done.stderr
    return json.loads(done.stdout)


def test_a_7b_model_on_spot_machines() -> None:
    done = run(*SPOT)
    assert (done.returncode, done.stderr) == (0, "")
    for sentence in (
        "80 GB of state, 2 s a step, a failure every 8 min 39 s on average, as of 47 nodes (`--nodes` tells yours).",
        "save every 78 steps (156 s of work)",
        "keep 1, so 2 slots: 160 GB of storage",
        "A checkpoint is durable 160 s (80 steps) after its save.",
        "Failures come so often that a restart (3 min 40 s) and the wait until a checkpoint is durable (160 s) are 73%",
        "Storage binds: every 78 steps is the most often that it takes without a wait",
        "storage twice as fast: 56.6% useful instead of 39.9%",
        "in_flight=2: next to nothing",
        "a trace of 56 spot GPUs",
        "storage takes 500 MB/s, as a cloud SSD of moderate size; measure yours: `pccheck probe DIR --json probe.json`",
        "untuned = every 1,000 steps",
        "if step % 78 == 0:",
    ):
        assert sentence in done.text, sentence
    rows = {line[:22].strip(): line.split() for line in done.stdout.splitlines()}
    assert rows["1 in flight"][-1] == "39.9%"
    assert rows["blocking, at its best"][-1] == "26.5%"
    assert rows["blocking, untuned"][-1] == "4.0%"
    assert all(len(line) <= 120 for line in done.stdout.splitlines())


def test_the_answer_in_the_document_is_what_is_printed() -> None:
    page = (DOCUMENT.parent / "tuning.md").read_text()
    command, shown = re.search(r"^\$ pccheck (advise .*)\n((?s:.*?))\n```$", page, re.MULTILINE).groups()  # type: ignore[union-attr]
    printed = [line.rstrip() for line in run(*command.split()).stdout.rstrip().splitlines()]
    assert shown.splitlines() == printed


@pytest.mark.parametrize("columns", [20, 80])
def test_no_figure_of_the_table_is_cut(columns: int) -> None:
    """Columns of great figures: every row ends with its useful share, none with an ellipsis."""
    done = run("advise", "--state", "900TB", "--step", "900s", "--mtbf", "300d", "--disk", "20MB/s", columns=columns)
    table = done.stdout.split("steps  slowdown", 1)[-1].split("What it means")[0]
    assert "…" not in done.stdout
    assert table.count("%") == 4


@pytest.mark.parametrize("columns", [40, 80, 200])
def test_the_answer_can_be_read_at_any_width(columns: int) -> None:
    done = run(*SPOT, columns=columns)
    assert "39.9%" in done.stdout
    sentences = done.stdout.split("What it means")[1].split("To paste")[0]
    assert all(len(line) <= max(columns, 40) for line in sentences.splitlines())


def test_json_holds_what_the_document_says_of_it() -> None:
    found = as_json("--state", "80GB", "--step", "2", "--mtbf", "45m")
    section = (
        DOCUMENT.read_text().split("## pccheck advise")[1].split("`--json` prints one object")[1].split("\n## ")[0]
    )
    said = set(re.findall(r"^\| `([\w.\[\]]+)` \|", section, re.MULTILINE))
    there = set(found) | {f"outcome.{name}" for name in found["outcome"]}
    assert said == there | {f"helps[].{name}" for name in found["helps"][0]}
    assert set(found["others"][0]) == set(found["outcome"])
    assert found["pccheck"] == pccheck.__version__
    assert found["options"]["in_flight"] == 1
    pccheck.Options(**found["options"])


@pytest.mark.parametrize(
    ("arguments", "mtbf_s"),
    [
        (("--mtbf", "45m"), 2700),
        (("--mtbf", "shared"), 2700),
        (("--mtbf", "spot"), 13482 / 26),
        (("--mtbf", "spot", "--nodes", "8"), 13482 / 26 * 46.65 / 8),
        (("--node-mtbf", "30d", "--nodes", "16"), 30 * 86400 / 16),
        ((), None),
    ],
)
def test_how_often_a_job_fails_can_be_told_in_many_ways(arguments: tuple[str, ...], mtbf_s: float | None) -> None:
    assert as_json("--state", "1GB", "--step", "1", *arguments)["wanted"]["mtbf_s"] == pytest.approx(mtbf_s)


def test_how_often_a_job_fails_can_be_taken_from_a_trace(tmp_path: Path) -> None:
    trace = tmp_path / "trace.csv"
    trace.write_text("seconds,event\n0,start\n100,loss\n300,gain\n900,loss\n1000,end\n")
    found = as_json("--state", "1GB", "--step", "1", "--trace", trace)
    assert found["wanted"]["mtbf_s"] == 500
    assert found["assumptions"][0] == "failures: 2 losses in 16 min 40 s, trace.csv"
    trace.write_text("seconds,event\n0,start\n100,gain\n1000,end\n")
    done = run("advise", "--state", "1GB", "--step", "1", "--trace", trace)
    assert (done.returncode, "has no losses" in done.stderr) == (2, True)


def test_rates_told_by_hand_take_the_place_of_assumed_ones() -> None:
    assumed = as_json("--state", "80GB", "--step", "2", "--mtbf", "45m")
    told = as_json(
        "--state", "80GB", "--step", "2", "--mtbf", "45m", "--disk", "2GB/s", "--copy", "80GB/s", "--restart", "2m"
    )
    assert (assumed["source"], told["source"]) == ("assumed", "rates")
    assert told["outcome"]["durable_s"] == pytest.approx(40.01)
    assert told["restart_s"] == 120
    assert len(assumed["assumptions"]) - len(told["assumptions"]) == 3
    limited = as_json(
        "--state",
        "80GB",
        "--step",
        "2",
        "--mtbf",
        "45m",
        "--disk",
        "16Gbit/s",
        "--stream",
        "500MB/s",
        "--copy",
        "80GB/s",
    )
    assert limited["options"]["writers_per_checkpoint"] == 1


def test_a_probe_is_read(tmp_path: Path) -> None:
    sample = {"state_bytes": 10**9, "writers": 2, "writers_per_checkpoint": None, "chunk_bytes": 16 << 20, "saves": 4}
    machine = Machine(
        path="/data\x1b[2J", filesystem="ext4, direct", time_s=1.7e9, pccheck="0.1.0", pipeline="native", cpus=8,
        memory_bytes=64 * 10**9, free_bytes=10**12, seconds=20.0, copy_bytes_per_s=10e9, commit_s=0.01, save_s=0.002,
        samples=tuple(
            Sample(in_flight=n, durable_s=n / 4, worst_durable_s=n * 0.3, period_s=0.25, buffer_bytes=10**9, **sample)
            for n in (1, 2)
        ),
    )  # fmt: skip
    file = tmp_path / "probe.json"
    file.write_bytes(machine.to_json())
    arguments = ("--state", "4GB", "--step", "1", "--mtbf", "45m", "--probe", file)
    found = as_json(*arguments)
    assert (found["source"], found["outcome"]["durable_s"]) == ("probe", pytest.approx(1.0, rel=0.05))
    assert any("device_copy_bytes_per_s" in said for said in found["assumptions"])
    slower = as_json(*arguments, "--copy", "1GB/s")
    assert slower["outcome"]["stall_s"] == pytest.approx(3.002)
    assert not any("device_copy_bytes_per_s" in said for said in slower["assumptions"])
    text = run("advise", *arguments).stdout
    assert "a probe of /data\\x1b[2J (ext4, direct)" in text
    assert run("advise", *arguments, "--disk", "1GB/s").returncode == 2
    file.write_text('{"path": 3}')
    done = run("advise", *arguments)
    assert done.returncode == 2
    assert "pccheck probe DIR --json FILE" in done.stderr


def test_the_size_is_taken_from_a_store(tmp_path: Path) -> None:
    with pccheck.Checkpointer(tmp_path / "store") as ck:
        ck.save(0, {"w": np.zeros(1000)})
        ck.save(1, {"w": np.zeros(1_000_000)})
        ck.wait()
        ck.pin(1)
    found = as_json("--store", tmp_path / "store", "--step", "1")
    assert found["wanted"]["state_bytes"] == pytest.approx(8_000_000, rel=0.001)
    before = {f: f.read_bytes() for f in (tmp_path / "store").rglob("*") if f.is_file()}
    run("advise", "--store", tmp_path / "store", "--step", "1")
    assert before == {f: f.read_bytes() for f in (tmp_path / "store").rglob("*") if f.is_file()}


def test_the_size_of_a_job_is_that_of_all_its_ranks(tmp_path: Path) -> None:
    for rank in range(2):
        folder = tmp_path / "job" / f"rank-{rank:05}"
        folder.mkdir(parents=True)
        (folder / "CHECK").write_bytes(check_file())
        state = {"w": np.zeros(100_000 * (rank + 1))}
        (folder / "slot-000.pcc").write_bytes(
            slot_file(state, step=3, counter=4, rank=rank, world=2, chunk_bytes=1 << 20)
        )
    found = as_json("--store", tmp_path / "job", "--step", "1")
    assert found["wanted"]["state_bytes"] == pytest.approx(2_400_000, rel=0.01)
    assert found["wanted"]["ranks"] == 2
    assert as_json("--store", tmp_path / "job", "--step", "1", "--ranks", "4")["wanted"]["ranks"] == 4


def test_a_slowdown_below_a_tenth_of_a_percent_is_reached() -> None:
    done = run("advise", "--state", "80GB", "--step", "2s", "--mtbf", "6h", "--slowdown", "1.0009")
    assert (done.returncode, "out of reach" in done.text) == (0, False)
    assert "save every 3,337 steps" in done.text
    assert "The wish for a slowdown of at most 1.0009 costs useful time: without it" in done.text


def test_a_wish_out_of_reach_ends_with_status_1_and_the_nearest() -> None:
    done = run(*SPOT, "--rpo", "100s")
    assert done.returncode == 1
    assert "The recovery point of 100 s is out of reach: the nearest is 5 min 2" in done.text
    assert "To paste" in done.stdout


WRONG = [
    (("--step", "2"), "give one of --state SIZE and --store PATH"),
    (("--state", "80", "--step", "2"), "--state 80 is not allowed: it must be a number with its unit, such as 80GB"),
    (("--state", "80GB", "--step", "x"), "--step x is not allowed: it must be seconds, or a number with its unit"),
    (
        ("--state", "80GB", "--step", "2", "--mtbf", "moon"),
        "--mtbf moon is not allowed: it must be spot, shared, dedicated; or",
    ),
    (
        ("--state", "80GB", "--step", "2", "--mtbf", "1h", "--node-mtbf", "1d"),
        "give one of --mtbf, --trace and --node-mtbf",
    ),
    (
        ("--state", "80GB", "--step", "2", "--mtbf", "1h", "--nodes", "2"),
        "--mtbf 1h is that of the whole job, which needs no --nodes; if it is a node's: --node-mtbf 1h --nodes 2",
    ),
    (
        ("--state", "80GB", "--step", "2", "--nodes", "2"),
        "--nodes tells no failure rate alone: --node-mtbf TIME --nodes 2, or --mtbf spot --nodes 2",
    ),
    (
        ("--state", "80GB", "--step", "2", "--trace", "nowhere.csv", "--nodes", "2"),
        "a trace tells the failures of the whole job: leave --nodes out",
    ),
    (
        ("--state", "80GB", "--step", "2", "--mtbf", "shared", "--nodes", "2"),
        "--nodes 2 is not allowed: it must be left out",
    ),
    (("--state", "80GB", "--step", "2", "--node-mtbf", "1d"), "--node-mtbf needs --nodes"),
    (
        ("--state", "80GB", "--step", "2", "--storage", "100GB"),
        "--storage 100 GB is not allowed: it must be at least 160 GB",
    ),
    (("--state", "80GB", "--step", "2", "--dram", "1MB"), "--dram 1 MB is not allowed: it must be at least 33.6 MB"),
    (("--state", "80GB", "--step", "2", "--slowdown", "0.05"), "--slowdown 0.05 is not allowed"),
    (("--state", "80GB", "--step", "2", "--stall", "5"), "--stall 5 is not allowed"),
    (("--state", "80GB", "--step", "2", "--snapshot", "quick"), "--snapshot quick is not allowed"),
    (("--state", "80GB", "--step", "2", "--disk", "fast"), "--disk fast is not allowed"),
    (
        ("--state", "80GB", "--step", "2", "--disk", "1GB/s", "--stream", "3GB/s"),
        "--stream 3 GB/s is not allowed: it must be at most the disk's 1 GB/s",
    ),
    *(
        (
            ("--state", "80GB", "--step", "2", option, value),
            f"{option} {value} is not allowed: it must be greater than 0, from 10**-9 s to 10**10 s: seconds, or a",
        )
        for option in ("--step", "--rpo", "--node-mtbf")
        for value in ("0", "-2", "0s", "-5m", "0.0000000001", "99999999999")
    ),
    (
        ("--state", "80GB", "--step", "2", "--mtbf", "0"),
        "--mtbf 0 is not allowed: it must be spot, shared, dedicated; or greater than 0, from 10**-9 s",
    ),
    (("--state", "80GB", "--step", "2", "--restart", "-2"), "--restart -2 is not allowed: it must be at least 0 s"),
    (("--state", "80GB", "--step", "2", "--probe", "nowhere.json"), "nowhere.json"),
    (("--state", "80GB", "--step", "2", "--trace", "nowhere.csv"), "nowhere.csv"),
    (("--store", "nowhere", "--step", "2"), "nowhere"),
    (("--state", "80GB", "--step", "2", "--plot", "picture.doc"), "ending must be .png, .svg, .pdf or"),
    (("--state", "80GB", "--step", "2", "--plot", "nowhere/picture.png"), "nowhere/picture.png"),
]


@pytest.mark.parametrize(("arguments", "text"), WRONG, ids=[" ".join(case[0][-2:]) for case in WRONG])
def test_what_is_wrong_is_named_by_its_option(
    arguments: tuple[str, ...], text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    arguments = (*arguments, *(("--nodes", "2") if arguments[-2] == "--node-mtbf" and "1d" not in arguments else ()))
    if "--plot" in arguments:
        pytest.importorskip("matplotlib")
    done = run("advise", *arguments)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("pccheck advise: ")
    assert text in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_a_store_without_a_checkpoint_tells_no_size(tmp_path: Path) -> None:
    with pccheck.Checkpointer(tmp_path / "store"):
        pass
    done = run("advise", "--store", tmp_path / "store", "--step", "1")
    assert (done.returncode, "give --state SIZE" in done.stderr) == (2, True)


@pytest.mark.parametrize(("name", "begin"), [("a.png", b"\x89PNG\r\n\x1a\n"), ("a.svg", b"<?xml")])
@pytest.mark.parametrize("more", [(), ("--disk", "2GB/s", "--stream", "500MB/s"), ("--rpo", "1h", "--stall", "0.01")])
def test_a_picture_is_drawn(name: str, begin: bytes, more: tuple[str, ...], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    done = run(*SPOT, *more, "--plot", tmp_path / name)
    assert (done.returncode, done.stderr) == (0, "")
    data = (tmp_path / name).read_bytes()
    assert data.startswith(begin)
    assert len(data) > 10_000


def test_without_a_failure_rate_the_picture_shows_the_overhead(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    assert run("advise", "--state", "1GB", "--step", "1", "--plot", tmp_path / "a.svg").returncode == 0
    assert (tmp_path / "a.svg").stat().st_size > 10_000


def test_without_matplotlib_the_error_says_what_to_install(tmp_path: Path) -> None:
    program = (
        "import sys; sys.modules['matplotlib'] = None\n"
        f"sys.argv = ['pccheck', *{SPOT!r}, '--plot', {str(tmp_path / 'a.png')!r}]\n"
        "from pccheck import cli; cli.main()"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert "pip install 'pccheck[plot]'" in done.stderr
    assert not (tmp_path / "a.png").exists()
