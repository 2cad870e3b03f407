"""`pccheck probe` as a user runs it: its text, its JSON, its errors and exit statuses."""

from __future__ import annotations

import io
import json
import os
import pty
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import pytest
from rich.console import Console
from typer.testing import CliRunner

from pccheck import cli
from pccheck.commands.probe import meaning, show
from pccheck.errors import CapacityError
from pccheck.probing import trials
from pccheck.probing.timing import Stopwatch
from pccheck.tuning.machine import Machine, Sample

MIB = 1 << 20
GB = 10**9
DOCUMENT = Path(__file__).parents[2] / "docs" / "cli.md"
QUICK = ("--size", "1MiB", "--in-flight", "2")


@pytest.fixture(autouse=True)
def few_saves(monkeypatch):
    monkeypatch.setattr("pccheck.probing.timing.MOST_SAVES", 5)


def run(*arguments: object):
    environment = {"COLUMNS": "100", "TERM": "dumb", "NO_COLOR": "1"}
    return CliRunner().invoke(cli.build(), ["probe", *map(str, arguments)], env=environment, prog_name="pccheck")


def test_it_prints_a_table_and_what_it_means_and_writes_what_advise_takes(tmp_path):
    disk, file = tmp_path / "disk", tmp_path / "probe.json"
    disk.mkdir()
    done = run(disk, *QUICK, "--json", file)
    assert done.exit_code == 0, done.output
    for text in (str(disk), "2 at once", "1 each", "1, rested", "copying to the pool", "reading back", "a commit"):
        assert text in done.stdout
    assert "would be durable" in done.stdout
    assert f"--probe {file}" in done.stdout.replace("\n", "")
    assert os.listdir(disk) == []
    machine = Machine.from_json(file.read_bytes())
    assert machine.path == str(disk)
    advised = CliRunner().invoke(cli.build(), ["advise", "--state", "2MiB", "--step", "1", "--probe", str(file)])
    assert advised.exit_code == 0, advised.output


def test_json_alone_is_printed(tmp_path):
    done = run(tmp_path, *QUICK, "--json", "-")
    assert done.exit_code == 0, done.output
    assert Machine.from_json(done.stdout.encode()).path == str(tmp_path)
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--size", "1"), "--size"),
        (("--size", "1kB"), r"--size 1 kB is not allowed: it must be from 131,072 to"),
        (("--seconds", "soon"), "--seconds"),
        (("--seconds", "2h"), "--seconds 2 h is not allowed"),
        (("--in-flight", "99"), "--in-flight 99 is not allowed"),
        (("--json", "nowhere/probe.json"), "nowhere/probe.json cannot be written"),
    ],
)
def test_options_that_cannot_be_used_are_named(tmp_path, arguments, said):
    done = run(tmp_path, *arguments)
    assert done.exit_code == 2
    assert re.search(said, done.stderr)
    assert done.stderr.startswith("pccheck probe: ")
    assert done.stdout == ""
    assert os.listdir(tmp_path) == []


def test_a_missing_folder_is_said(tmp_path):
    done = run(tmp_path / "ckpt")
    assert done.exit_code == 2
    assert "ckpt is no folder" in done.stderr


def test_a_terminal_shows_progress_and_ctrl_c_leaves_nothing(tmp_path):
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "pccheck.cli", "probe", str(tmp_path), "--size", "8MiB", "--seconds", "60"],
        stderr=theirs, stdout=subprocess.PIPE, text=True, env={**os.environ, "TERM": "xterm", "COLUMNS": "100"},
    )  # fmt: skip
    os.close(theirs)
    shown = b""
    while b"at once" not in shown:
        shown += os.read(ours, 1000)
    process.send_signal(signal.SIGINT)
    try:
        while more := os.read(ours, 1000):
            shown += more
    except OSError:  # the other end was closed
        pass
    assert process.wait(timeout=60) == 130
    assert b"interrupted; nothing was left behind" in shown
    assert os.listdir(tmp_path) == []
    process.stdout.close()
    os.close(ours)


# -- meaning -------------------------------------------------------------------------------------------------------


def machine(stream: float, total: float, **more) -> Machine:
    """Give what is found of storage that gives each stream and all together so much."""
    samples = [
        sample(n, max(GB / stream, n * GB / (total if each else stream)), each)
        for each in (False, True)
        for n in (1, 2, 4)
    ]
    return Machine(
        path="/data", filesystem="nfs4, buffered", time_s=0.0, pccheck="0.1.0", pipeline="native", cpus=8,
        memory_bytes=64 * GB, free_bytes=500 * GB, seconds=30.0, copy_bytes_per_s=10.0 * GB, commit_s=0.0, save_s=0.0,
        samples=tuple(samples), **more,
    )  # fmt: skip


def sample(in_flight: int, durable_s: float, each: bool) -> Sample:
    return Sample(
        state_bytes=GB, in_flight=in_flight, writers=in_flight if each else 2,
        writers_per_checkpoint=1 if each else None, chunk_bytes=16 * MIB, buffer_bytes=GB, saves=5,
        durable_s=durable_s, worst_durable_s=durable_s, period_s=durable_s / in_flight,
    )  # fmt: skip


def test_storage_that_one_checkpoint_fills():
    first, second = meaning(machine(0.5 * GB, 0.5 * GB))
    assert first.startswith("One checkpoint at a time fills this storage (500 MB/s)")
    assert second == "A state of 10 GB would be durable 20 s after save(); this storage keeps up with one every 20 s."


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"commit_s": 2.1}, "a commit of next to nothing took longer (2.1 s) than a whole save (2 s)"),
        ({"commit_s": 1.9}, None),
        (
            {"samples": (msgspec.structs.replace(sample(1, 0.03, False), state_bytes=16 * MIB),)},
            "only 83.9 MB were written",
        ),
    ],
)
def test_a_probe_that_tells_little_says_so(changes, why):
    found = meaning(msgspec.structs.replace(machine(0.5 * GB, 0.5 * GB), **changes))
    said = f"Larger states may go at quite another rate: {why}. Probe for longer (`--seconds`)."
    assert found[2:] == ([said] if why else [])


def test_storage_that_takes_several_streams():
    first, second = meaning(machine(0.5 * GB, 1.0 * GB))
    assert "in_flight=2, writers=2, writers_per_checkpoint=1 reaches 1 GB/s" in first
    assert "durable 20 s after save(); this storage keeps up with one every 10 s" in second


def test_one_writer_that_reaches_as_much_is_advised_rather_than_more_in_flight():
    """One checkpoint with one writer is nearly as fast as the best, and the two writers of the default are not."""
    rates = {(1, False): 5.0, (2, False): 5.75, (3, False): 5.8, (1, True): 6.36, (2, True): 6.88, (4, True): 7.22}
    samples = tuple(sample(n, n / rate, each) for (n, each), rate in rates.items())
    found = msgspec.structs.replace(machine(GB, GB), samples=samples)
    assert meaning(found)[0].startswith("One checkpoint at a time fills this storage (6.36 GB/s with writers=1)")


def test_a_rate_that_lasts_only_after_a_rest_is_not_told_as_that_of_storage():
    found = machine(0.5 * GB, 0.5 * GB)
    rested = msgspec.structs.replace(found.samples[0], pause_s=1.0, durable_s=1.0, period_s=1.0)
    found = msgspec.structs.replace(found, samples=(*found.samples, rested))
    assert meaning(found)[0].startswith("One checkpoint at a time fills this storage (500 MB/s)")


@pytest.mark.parametrize("rates", [(0.5, 0.5), (0.5, 1.0), (0.3, 2.0), (1.0, 1.2)])
def test_the_rates_of_the_summary_are_those_of_rows_of_the_table(rates):
    found, text = machine(*(rate * GB for rate in rates)), io.StringIO()
    show(found, Console(file=text, width=200))
    table = text.getvalue()[: text.getvalue().index("copying to the pool")]
    named = re.findall(r"[0-9.]+ [MG]B/s", meaning(found)[0])
    assert named
    assert all(rate in table for rate in named)


def test_too_little_room_is_told_with_the_options_of_a_probe(tmp_path, monkeypatch):
    def full(*arguments, **options):
        raise CapacityError(str(tmp_path), 5 * GB, GB)

    monkeypatch.setattr("pccheck.commands.probe.measure", full)
    done = run(tmp_path)
    assert done.exit_code == 2
    assert "--size" in done.stderr
    assert "keep" not in done.stderr


def test_a_probe_keeps_no_history(tmp_path):
    """It would be of no use, and on a disk that fills up there would be a warning about it."""
    watch = Stopwatch(str(tmp_path / "s"), time.monotonic() + 30, 30.0)
    assert watch.time(trials.scout(MIB), time.monotonic() + 1) is not None
    files = os.listdir(tmp_path / "s")
    assert "CHECK" in files
    assert "runs.json" not in files


def test_notes_are_shown_and_text_is_no_markup():
    found = machine(0.5 * GB, 0.5 * GB, notes=("no time for: [red]4 at once",))
    text = io.StringIO()
    show(found, Console(file=text, width=200))
    assert "Note: no time for: [red]4 at once." in text.getvalue()
    assert "reading back         not measured" in text.getvalue()


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (
            {"reads": 7, "worst_read_bytes_per_s": 1.5 * GB, "fresh_memory_bytes_per_s": 0.2 * GB},
            "2 GB/s      (median of 7, 1.5 GB/s at worst; fresh memory: 200 MB/s)",
        ),
        ({"reads": 1, "worst_read_bytes_per_s": 2.0 * GB}, "2 GB/s      (once)"),
        ({}, "2 GB/s      (an older probe, fresh memory may be in it: probe anew)"),
    ],
)
def test_what_the_rate_of_reading_back_is_is_told(changes, said):
    text = io.StringIO()
    show(machine(GB, GB, read_bytes_per_s=2.0 * GB, **changes), Console(file=text, width=200))
    (line,) = [line for line in text.getvalue().splitlines() if line.startswith("reading back")]
    assert line.split(maxsplit=2)[2] == said


def test_every_member_of_the_json_is_documented():
    text = DOCUMENT.read_text()
    section = text[text.index("## pccheck probe") :]
    members = {f"`{f.encode_name}`" for f in msgspec.structs.fields(Machine)}
    members |= {f"`samples[].{f.encode_name}`" for f in msgspec.structs.fields(Sample)}
    assert not [name for name in sorted(members) if name not in section]
    printed = json.loads(machine(GB, GB).to_json())
    assert {f"`{name}`" for name in printed} <= members
