"""`pccheck inspect` as a user runs it: a process, its output, its exit status."""

from __future__ import annotations

import io
import json
import os
import pty
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console
from typer.testing import CliRunner

from pccheck import audit, cli, format, printing
from pccheck.format import Abandoned, SlotState
from pccheck.testing.slotfiles import check_file, slot_file
from pccheck.version import __version__

STATE = {"model": {"w": np.arange(3000.0), "b": np.ones(5)}}
DOCUMENT = Path(__file__).parents[2] / "docs" / "cli.md"


@dataclass
class Done:
    returncode: int
    stdout: str
    stderr: str


def environment(columns: int) -> dict[str, str]:
    return {"COLUMNS": str(columns), "LINES": "40", "TERM": "dumb", "NO_COLOR": "1"}


def run(*arguments: str | Path, columns: int = 80) -> Done:
    """Run the command line in this process, which is quicker."""
    result = CliRunner().invoke(cli.build(), [str(a) for a in arguments], env=environment(columns), prog_name="pccheck")
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return Done(result.exit_code, result.stdout, result.stderr)


def run_process(*arguments: str | Path) -> Done:
    """Run it as a user does."""
    done = subprocess.run(
        [sys.executable, "-m", "pccheck.cli", *map(str, arguments)],
        capture_output=True, text=True, env={**os.environ, **environment(80)}, timeout=120, check=False,
    )  # fmt: skip
    return Done(done.returncode, done.stdout, done.stderr)


@pytest.fixture
def store(tmp_path: Path) -> Path:
    folder = tmp_path / "store"
    (folder / "kept").mkdir(parents=True)
    check = check_file(word=format.pack_word(7, 1), abandoned=Abandoned().adding(3, 5), holder="pid 5, host trainer-7")
    (folder / "CHECK").write_bytes(check)
    metadata = {"loss": 2.5, "commit": "ab12cd"}
    (folder / "slot-000.pcc").write_bytes(slot_file(STATE, step=120_000, counter=6, slot=0, metadata=metadata))
    (folder / "slot-001.pcc").write_bytes(slot_file(STATE, step=120_010, counter=7, slot=1))
    (folder / "slot-002.pcc").write_bytes(slot_file(STATE, step=130, counter=8, slot=2, state=SlotState.FILLING))
    (folder / "slot-003.pcc").write_bytes(bytes(70_000))
    (folder / "kept" / "100000-c2.pcc").write_bytes(slot_file(STATE, step=100_000, counter=2, slot=0))
    return folder


def break_newest(store: Path) -> None:
    data = slot_file(STATE, step=120_010, counter=7, slot=1)
    data[65536 * 2] ^= 1
    (store / "slot-001.pcc").write_bytes(data)


def test_text(store: Path) -> None:
    done = run_process("inspect", store)
    assert done == run("inspect", store)
    assert done.returncode == 0
    assert done.stderr == ""
    lines = done.stdout.splitlines()
    assert lines[0] == str(store)
    text = done.stdout
    for part in (
        b"store-for-tests!".hex(), "CHECK_ADDR names counter 7 in slot 1", "pid 5, host trainer-7", "counters 3..5",
        'step 120000  {"loss": 2.5, "commit": "ab12cd"}', "3 valid checkpoints, nothing damaged", "--verify reads them",
    ):  # fmt: skip
        assert part in text
    rows = {line.split()[0]: line.split() for line in lines if ".pcc " in line}
    assert rows["slot-000.pcc"][1:5] == ["120000", "6", "1", "sealed"]
    assert rows["slot-001.pcc"][1:5] == ["120010", "7", "1", "published"]
    assert rows["slot-002.pcc"][4] == "filling"
    assert rows["slot-003.pcc"][1:5] == ["-", "-", "-", "free"]
    assert rows["kept/100000-c2.pcc"][4] == "kept"
    assert [rows[n][-1] for n in ("slot-000.pcc", "slot-002.pcc")] == ["ok", "-"]


@pytest.mark.parametrize("columns", [80, 120])
def test_the_table_fits_the_terminal_and_cuts_nothing(store: Path, columns: int) -> None:
    break_newest(store)
    text = run("inspect", store, "--verify", columns=columns).stdout
    table = [line for line in text.splitlines() if ".pcc " in line and ": " not in line]
    assert len(table) == 5
    assert all(len(line.rstrip()) <= columns for line in table)
    assert "…" not in text
    for word in ("published", "damaged", "kept/100000-c2.pcc", "120010", "KiB"):
        assert any(word in line for line in table)
    assert ("leaves" in text.splitlines()[6] or "leaves" in text.splitlines()[7]) == (columns >= 100)


def test_verify_names_every_damage(store: Path) -> None:
    break_newest(store)
    assert run("inspect", store).returncode == 0
    done = run("inspect", store, "--verify")
    assert done.returncode == 1
    assert "slot-001.pcc: a chunk fails its digest, bytes 131072..135168, in model/w" in done.stdout
    assert "2 valid checkpoints, 1 damaged" in done.stdout


def test_a_missing_path_as_a_process(tmp_path: Path) -> None:
    done = run_process("inspect", tmp_path / "missing")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == f"pccheck inspect: {tmp_path}/missing: there is no such file or directory\n"


@pytest.mark.parametrize("name", ["missing", "text.txt", "folder", "store/CHECK"])
def test_usage_errors_are_exit_2_on_stderr(store: Path, tmp_path: Path, name: str) -> None:
    (tmp_path / "text.txt").write_text("hello")
    (tmp_path / "folder").mkdir()
    done = run("inspect", tmp_path / name)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.startswith("pccheck inspect: ")
    assert str(tmp_path / name) in done.stderr
    assert "Traceback" not in done.stderr


def test_missing_arguments_are_exit_2() -> None:
    done = run("inspect")
    assert done.returncode == 2
    assert "PATH" in done.stderr.upper()
    assert run("inspect", "--nonsense", ".").returncode == 2


def keys(value: Any, prefix: str = "") -> set[str]:
    """Give the names of all members, dotted; `[]` for what is in a list; metadata is the user's."""
    found = set()
    if isinstance(value, dict):
        for name, child in value.items():
            found.add(prefix + name)
            if name != "metadata":
                found |= keys(child, f"{prefix}{name}.")
    elif isinstance(value, list):
        for child in value:
            found |= keys(child, f"{prefix[:-1]}[].")
    return found


def test_json_has_the_same_facts_under_the_documented_names(store: Path) -> None:
    break_newest(store)
    done = run("inspect", store, "--json", "--verify")
    assert done.returncode == 1
    told = json.loads(done.stdout)
    assert (told["pccheck"], told["format"], told["verified"], told["exit_code"]) == (__version__, 1, True, 1)
    (report,) = told["stores"]
    assert (report["path"], report["kind"], report["valid"], report["damaged"]) == (str(store), "store", 2, 1)
    assert report["check"]["check_addr"] == {"counter": 7, "slot": 1}
    assert report["check"]["abandoned"] == [[3, 5]]
    first, second = report["slots"][:2]
    assert first["metadata"] == {"loss": 2.5, "commit": "ab12cd"}
    assert (first["file"], first["state"], first["verdict"], first["verified"]) == (
        "slot-000.pcc",
        "sealed",
        "ok",
        True,
    )
    assert first["time"] == "2023-11-14T22:13:20+00:00"
    assert second["damages"] == [
        {"reason": "a chunk fails its digest", "offset": 131072, "length": 4096, "leaves": ["model/w"]}
    ]
    assert told["all_ranks"] == []
    for rank in (0, 1):
        (store.parent / f"job/rank-{rank:05d}").mkdir(parents=True)
        (store.parent / f"job/rank-{rank:05d}/slot-000.pcc").write_bytes(slot_file(STATE, rank=rank, world=2))
    told["all_ranks"] = json.loads(run("inspect", store.parent / "job", "--json").stdout)["all_ranks"]
    section = DOCUMENT.read_text().split("\n## pccheck ")[1]
    documented = set(re.findall(r"^\| `([a-z_\[\].]+)` \|", section, re.MULTILINE))
    assert keys(told) == documented


def test_json_of_a_file_and_of_ranks(store: Path, tmp_path: Path) -> None:
    told = json.loads(run("inspect", store / "slot-000.pcc", "--json").stdout)
    assert (told["stores"][0]["kind"], told["stores"][0]["check"]) == ("file", None)
    for rank in (0, 1):
        (tmp_path / f"job/rank-{rank:05d}").mkdir(parents=True)
        (tmp_path / f"job/rank-{rank:05d}/slot-000.pcc").write_bytes(slot_file(STATE, rank=rank, world=2))
    done = run("inspect", tmp_path / "job", "--json")
    assert done.returncode == 0
    assert [s["slots"][0]["rank"] for s in json.loads(done.stdout)["stores"]] == [0, 1]
    whole = {"step": 10, "counter": 1, "incarnation": 1, "world": 2, "abandoned": False, "damaged": []}
    assert json.loads(done.stdout)["all_ranks"] == [{**whole, "state": "complete", "missing": []}]
    assert "1 checkpoint of all ranks" in run("inspect", tmp_path / "job").stdout
    newer = slot_file(STATE, rank=0, world=2, counter=2, step=20, slot=1)
    (tmp_path / "job/rank-00000/slot-001.pcc").write_bytes(newer)  # a crash before rank 1 had sealed its part
    text = run("inspect", tmp_path / "job")
    assert text.returncode == 0
    assert re.search(r"20 +2 +1 +2 +incomplete +not in rank 1", text.stdout)
    assert re.search(r"10 +1 +1 +2 +complete\b", text.stdout)
    (tmp_path / "job/rank-00001/slot-000.pcc").write_bytes(bytes(70_000))
    text = run("inspect", tmp_path / "job")
    assert text.returncode == 1
    assert text.stdout.count("rank-0000") == 2
    assert "1 store without a valid checkpoint; no checkpoints of all ranks" in text.stdout


def test_a_job_that_went_on_with_fewer_ranks_has_nothing_amiss(tmp_path: Path) -> None:
    for rank, data in enumerate((slot_file(STATE, rank=0, world=1), bytes(70_000))):
        (tmp_path / f"rank-{rank:05d}").mkdir()
        (tmp_path / f"rank-{rank:05d}/slot-000.pcc").write_bytes(data)
    text = run("inspect", tmp_path)
    assert (text.returncode, "without a valid checkpoint" in text.stdout) == (0, False)
    assert "1 checkpoint of all ranks" in text.stdout


def test_nothing_in_a_file_reaches_the_terminal_as_a_command(tmp_path: Path) -> None:
    evil = "\x1b]0;owned\x07\x1b[31m[bold]x[/bold]\r\n"

    def edit(manifest: dict[str, Any]) -> None:
        manifest["leaves"][0]["path"] = evil

    data = slot_file(STATE, metadata={evil: evil}, edit=edit)
    data[65536] ^= 1
    (tmp_path / "slot-000.pcc").write_bytes(data)
    done = run("inspect", tmp_path, "--verify")
    assert done.returncode == 1
    assert "\x1b" not in done.stdout
    assert "\x07" not in done.stdout
    assert "[bold]x[/bold]" in done.stdout
    assert run("inspect", tmp_path, "--json").returncode == 0


def test_version_tells_what_is_in_use() -> None:
    done = run("--version")
    assert done.returncode == 0
    first, path, python, platform = done.stdout.splitlines()
    assert first == f"pccheck {__version__}"
    assert re.fullmatch(r"data path: (native \(\w+\)|portable: .*)", path)
    assert python.startswith("python: ")
    assert platform.startswith("platform: ")


def test_version_without_the_extension(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pccheck._native", None)
    assert cli.version_lines()[1].startswith("data path: portable")


def test_help_says_what_the_exit_status_means() -> None:
    text = run("inspect", "--help").stdout
    assert "--verify" in text
    assert "--json" in text
    assert "0 =" in text


def test_a_terminal_gets_colour_and_a_progress_bar(store: Path) -> None:
    parent, child = pty.openpty()
    variables = {**os.environ, "COLUMNS": "100", "TERM": "xterm-256color"}
    variables.pop("NO_COLOR", None)
    process = subprocess.Popen(
        [sys.executable, "-m", "pccheck.cli", "inspect", str(store), "--verify"],
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=child, env=variables,
    )  # fmt: skip
    os.close(child)
    shown = b""
    while True:
        try:
            part = os.read(parent, 4096)
        except OSError:  # the other end was closed: how Linux ends a terminal
            break
        if not part:
            break
        shown += part
    os.close(parent)
    assert process.stdout is not None
    text = process.stdout.read()
    process.stdout.close()
    assert process.wait(60) == 0
    assert b"slot-000.pcc" in shown
    assert b"slot-000.pcc" in text
    assert b"\x1b" not in text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0 s"), (119, "119 s"), (121, "2 min"), (7199, "120 min"), (7200, "2 h"), (172_799, "48 h"), (200_000, "2 d"),
     (-0.5, "0 s"), (-100, "future")],
)  # fmt: skip
def test_ages(tmp_path: Path, seconds: float, text: str) -> None:
    now = 1_700_000_000
    (tmp_path / "slot-000.pcc").write_bytes(slot_file(STATE, time_ns=int((now - seconds) * 1e9)))
    console = Console(width=80, record=True, file=io.StringIO())
    printing.show(audit.audit(tmp_path), console, verify=False, now_s=now)
    assert f" {text} " in console.export_text()


@pytest.mark.parametrize("time_ns", [-(2**63), 2**63 - 1])
def test_impossible_times_do_not_stop_the_show(tmp_path: Path, time_ns: int) -> None:
    (tmp_path / "slot-000.pcc").write_bytes(slot_file(STATE, time_ns=time_ns, step=-(2**63)))
    assert run("inspect", tmp_path, columns=120).returncode == 0
    assert run("inspect", tmp_path, "--json").returncode == 0


SHOWN = [
    ("advise", "--state", "1GB", "--step", "1"),
    ("advise", "--state", "1GB", "--step", "1", "--json"),
    ("--help",),
]


@pytest.mark.parametrize("arguments", SHOWN)
def test_a_pipe_that_nobody_reads_ends_it_quietly_with_a_status_of_its_own(arguments):
    """Not 1, which is "a wish is out of reach", nor a traceback."""
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "pccheck", *arguments]
    done = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, timeout=60, check=False)
    os.close(writer)
    assert (done.returncode, done.stderr) == (cli.CLOSED_PIPE, b"")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
@pytest.mark.parametrize("arguments", SHOWN)
def test_output_that_cannot_be_written_ends_it_with_one_line_and_a_status_of_its_own(arguments):
    command = [sys.executable, "-m", "pccheck", *arguments]
    with open("/dev/full", "wb") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, timeout=60, check=False)
    text = "pccheck: the output could not be written: No space left on device\n"
    assert (done.returncode, done.stderr) == (cli.UNWRITTEN, text)


def test_output_that_is_closed_is_no_error():
    command = f"{sys.executable} -m pccheck --version >&-"
    done = subprocess.run(command, shell=True, stderr=subprocess.PIPE, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, b"")
