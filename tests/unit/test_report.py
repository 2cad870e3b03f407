"""`pccheck.report` and `pccheck report`: one store, several ranks, Orbax's folders; text, JSON and metrics."""

from __future__ import annotations

import importlib.util
import io
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console
from typer.testing import CliRunner

import pccheck
from pccheck import cli, holders, links
from pccheck.bill import history, metrics, recorder, runs, showing
from pccheck.bill.history import past_failures
from pccheck.bill.runs import Point, Run
from pccheck.errors import UsageError
from pccheck.testing.slotfiles import check_file
from pccheck.version import __version__
from tests.unit.job import WAIT_S, Job

STATE = {"w": np.arange(3000.0)}
DOCUMENT = Path(__file__).parents[2] / "docs" / "report.md"
needs_client = pytest.mark.skipif(
    importlib.util.find_spec("prometheus_client") is None, reason="prometheus_client is not installed"
)


def save(directory, *steps, **options):
    with pccheck.Checkpointer(directory, chunk_bytes=4096, **options) as ck:
        ck.restore()
        for step in steps:
            ck.save(step, STATE).durable.result(WAIT_S)


def put(store, *some, holder=""):
    """Make a store with these runs, which one could not have in a test: old, long, and on other machines."""
    store.mkdir(parents=True, exist_ok=True)
    (store / "CHECK").write_bytes(check_file(word=0, holder=holder))
    (store / "runs.json").write_bytes(runs.pack([runs.encode(run) for run in some]))
    return store


def a_run(incarnation, began_s, **known):
    fields = {
        "uptime_s": 36_000.0, "first_step": 0, "last_step": 3000, "durable_step": 2990, "saved_at_s": 35_990.0,
        "returned": 301, "progress": 3000, "climbs": 300, "climbed_s": 36_000.0, "saves": 301, "committed": 301,
        "save_s": 60.2, "copy_wait_s": 50.0, "slot_wait_s": 0.5, "gate_wait_s": 9.8, "first_save_s": 3.2,
        "written_bytes": 301 << 30, "state_bytes": 1 << 30, "durable": {40: 301}, "durable_worst_s": 9.0,
        "age_s2": 36_000.0 * 65, "age_worst_s": 130.0, "in_flight": 2, "snapshot": "copy", "pipeline": "native",
        "points": tuple(Point(120.0 * i, 10 * i, 120.0 + i % 10, 5.0) for i in range(1, 300)), **known,
    }  # fmt: skip
    return Run(incarnation=incarnation, began_s=began_s, **fields)


@pytest.fixture
def history_of_three(tmp_path):
    """Two runs that were killed, and one on another machine that goes on."""
    elsewhere, now = "pid 7, parent 1, boot 0, host another", time.time()
    second = {"restored_step": 2980, "first_step": 2990, "last_step": 6000, "durable_step": 5990}
    third = {"restored_step": 5990, "last_step": 9000, "durable_step": 8990, "holder": elsewhere}
    return put(
        tmp_path / "s",
        a_run(1, now - 110_000),
        a_run(2, now - 73_000, restored_at_s=20.0, **second),
        a_run(4, now - 36_010, restored_at_s=20.0, **third),
        holder=elsewhere,
    )  # fmt: skip


# -- one store --------------------------------------------------------------------------------------------------------


def test_the_report_of_a_store(history_of_three):
    found = pccheck.report(history_of_three)
    assert [run.state for run in found.runs] == ["failed", "failed", "running"]
    assert [run.steps_lost for run in found.runs] == [20, 10, None]
    assert (found.failures, found.uptime_s, found.mtbf_s) == (2, 108_000.0, 54_000.0)
    assert found.restart_s == pytest.approx((1000 + 20 + 990 + 20) / 2, abs=0.1)
    assert found.notes == ()
    last = found.last
    assert last.age.now_s == pytest.approx(20, abs=10)
    assert last.cost.ms_per_step == pytest.approx(70.0 / 301 / 10 * 1e3)
    assert last.loss.model_s == pytest.approx(65, rel=0.05), "the model agrees with what was measured"
    assert past_failures(history_of_three) == (72_000.0, 2)


def test_a_run_elsewhere_that_fell_silent_is_over(tmp_path):
    elsewhere = "pid 7, parent 1, boot 0, host another"
    store = put(tmp_path / "s", a_run(1, time.time() - 36_500, holder=elsewhere), holder=elsewhere)
    assert [run.state for run in pccheck.report(store).runs] == ["failed"]
    dead = holders.describe_self().replace(f"pid {os.getpid()},", "pid 999999999,")
    put(store, a_run(1, time.time() - 36_000, holder=dead), holder=dead)
    assert [run.state for run in pccheck.report(store).runs] == ["failed"], "of this machine, it is asked for"
    mine = holders.describe_self()
    put(store, a_run(1, time.time() - 99_000, holder=mine), holder=mine)
    assert [run.state for run in pccheck.report(store).runs] == ["running"]


def test_a_store_without_a_history_is_told_so(tmp_path):
    save(tmp_path / "s", 1, history=False)
    found = pccheck.report(tmp_path / "s")
    assert (found.runs, found.failures, found.mtbf_s, found.last) == ((), 0, None, None)
    assert "no run is noted here" in found.notes[0]


@pytest.mark.parametrize("data", [b"", b"{", b"mine", bytes(300), b'{"format":"pccheck runs","version":9,"runs":[]}'])
def test_a_history_that_cannot_be_read_is_a_note(tmp_path, data):
    save(tmp_path / "s", 1)
    (tmp_path / "s/runs.json").write_bytes(data)
    found = pccheck.report(tmp_path / "s")
    assert found.runs == ()
    assert f"{tmp_path}/s/runs.json cannot be read: " in found.notes[0]


def test_what_is_no_store_is_a_usage_error(tmp_path):
    (tmp_path / "file").write_bytes(b"x")
    (tmp_path / "folder").mkdir()
    for path, text in (("gone", "there is no such folder"), ("file", "is a file"), ("folder", "not a pccheck store")):
        with pytest.raises(UsageError, match=text):
            pccheck.report(tmp_path / path)


@pytest.mark.skipif(os.geteuid() != 0, reason="another user is needed to read as")
def test_a_read_only_folder_can_be_reported():
    """By a user who may not write there, and the folder is as it was."""
    with tempfile.TemporaryDirectory() as folder:  # others may not pass through pytest's own
        store = Path(folder, "s")
        save(store, 1, 2)
        before = {p.name: p.stat().st_mtime_ns for p in store.iterdir()}
        for each in (store, store.parent):
            each.chmod(0o755)
        program = f"""
import os, pccheck
pccheck.report({str(store)!r})  # loads what it needs, which others may not read where it is installed
os.seteuid(65534)
print(pccheck.report({str(store)!r}).last.reached_step)
"""
        done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
        assert done.stdout == "2\n", done.stderr
        assert before == {p.name: p.stat().st_mtime_ns for p in store.iterdir()}


# -- several ranks, other numbers of ranks ----------------------------------------------------------------------------


@pytest.fixture
def job(tmp_path):
    made = []

    def make(world):
        made.append(Job(tmp_path, world))
        return made[-1]

    yield make
    for one in made:
        one.end()


def test_ranks_are_summed_up(job):
    j = job(3).start()
    j.commit(1, 2, 3)
    j.close()
    root = j.root / "ck"
    (run,) = pccheck.report(root).runs
    assert (run.state, run.world, run.ranks, run.reached_step, run.durable_step) == ("ended", 3, (0, 1, 2), 3, 3)
    parts = [history.source(str(root / f"rank-{rank:05d}"), rank).found.runs[0] for rank in range(3)]
    assert {part.incarnation for part in parts} == {run.incarnation}
    assert run.cost.total_s == max(part.cost_s for part in parts)
    assert run.written_bytes == sum(part.written_bytes for part in parts)
    assert run.uptime_s == parts[0].uptime_s
    assert [part.rank for part in parts] == [0, 1, 2]
    assert len(pccheck.report(root / "rank-00001").runs) == 1, "each rank's store can be asked on its own"


def test_a_job_of_which_one_rank_died_has_failed(job, monkeypatch):
    monkeypatch.setattr(recorder, "EVERY_S", 0.02)
    j = job(3).start()
    j.commit(1, 2)
    dying = j.ranks[1]._recorder
    while not (j.root / "ck/rank-00001/runs.json").exists():
        time.sleep(0.01)
    dying._sides = None
    j.close()
    assert [run.state for run in pccheck.report(j.root / "ck").runs] == ["failed"]
    assert past_failures(j.root / "ck")[1] == 1
    shutil.rmtree(j.root / "ck/rank-00002")
    report = pccheck.report(j.root / "ck")
    assert report.runs[0].ranks == (0, 1)
    assert "nothing is known of rank 2" in report.notes[0]


@pytest.mark.parametrize(("old", "new", "left"), [(1, 2, [1, 2]), (3, 2, [3, 2]), (2, 3, [2, 3]), (3, 1, [1])])
def test_another_number_of_ranks_goes_on(job, old, new, left):
    """What a rank noted that is no more goes with its store; no folder stays for the history's sake."""
    j = job(old).start()
    j.commit(1)
    j.close()
    j = job(new).start()
    assert all(r.step == 1 for r in j.restore())
    j.commit(2)
    j.close()
    found = pccheck.report(j.root / "ck")
    assert [run.world for run in found.runs] == left
    assert [run.state for run in found.runs] == ["ended"] * len(left)
    assert found.runs[-1].restored_step == 1
    ranks = sorted(p.name for p in (j.root / "ck").glob("rank-*"))
    assert ranks == ([f"rank-{r:05d}" for r in range(new)] if new > 1 else [])


# -- folders of Orbax steps -------------------------------------------------------------------------------------------


def link(root, process, *steps, item="default"):
    with pccheck.Checkpointer(root / ".pccheck" / item / f"process-{process}", keep=0, chunk_bytes=4096) as ck:
        for step in steps:
            folder = root / str(step) / item
            folder.mkdir(parents=True, exist_ok=True)
            ck.save(step, STATE, link=folder / f"rank-{process:05d}.pcc").durable.result(WAIT_S)
            if process == 0:
                links.finish(folder, world=1)


def test_a_folder_of_orbax_steps(tmp_path):
    link(tmp_path, 0, 1, 2)
    found = pccheck.report(tmp_path)
    assert [(run.reached_step, run.state, run.saves.committed) for run in found.runs] == [(2, "ended", 2)]
    assert found.notes == ()
    assert pccheck.report(tmp_path / ".pccheck/default/process-0").runs == found.runs
    link(tmp_path, 1, 3)
    found = pccheck.report(tmp_path)
    assert [run.reached_step for run in found.runs] == [2]
    assert "2 processes save here on their own" in found.notes[0]
    assert "default/process-1" in found.notes[0]
    assert past_failures(tmp_path)[1] == 0
    link(tmp_path, 0, 4, item="other")
    with pytest.raises(UsageError, match=r"2 Orbax items.*default/process-0.*other/process-0"):
        pccheck.report(tmp_path)


# -- the command line -------------------------------------------------------------------------------------------------


def run(*arguments, columns=80):
    environment = {"COLUMNS": str(columns), "LINES": "40", "TERM": "dumb", "NO_COLOR": "1"}
    return CliRunner().invoke(cli.build(), ["report", *map(str, arguments)], env=environment, prog_name="pccheck")


def test_text(history_of_three):
    done = run(history_of_three)
    assert done.exit_code == 0, done.output
    text = done.stdout
    assert (
        "3 runs, 30 h in all; 2 failed, one in 15 h, about 30 steps lost, 16.9 min until a restart had restored" in text
    )
    assert "cost        23.3 ms per step, 0.19 % of the time; 70 s in all" in text
    assert "waited for: copies 50 s, places in flight 500 ms, gates and fences 9.8 s, other 9.7 s" in text
    assert "running, began" in text
    assert re.search(r"\n  1 +\S+ \S+ +10 h +failed +- +3,000 +20 +23\.3 +0\.19 %\n", text)
    assert max(map(len, text.splitlines())) <= 140
    assert all(len(line) <= 80 for line in text.splitlines() if line.startswith("  1 ") or "──" in line)


def test_json_is_the_report_and_is_documented(history_of_three):
    done = run(history_of_three, "--json")
    told = json.loads(done.stdout)
    assert told["pccheck"] == __version__
    found = pccheck.report(history_of_three).as_json()
    assert told.keys() == found.keys()
    assert [one["steps_lost"] for one in told["runs"]] == [20, 10, None]

    def names(value, path=""):
        if isinstance(value, dict):
            for key, each in value.items():
                yield from names(each, f"{path}.{key}".removeprefix("."))
        elif isinstance(value, list) and value and isinstance(value[0], dict):
            yield from names(value[0], path + "[]")
        else:
            yield path

    documented = set(re.findall(r"^\| `((?!pccheck_)[\w.\[\]]+)` \|", DOCUMENT.read_text(), re.MULTILINE))
    assert documented == set(names(told))


def test_errors_and_exit_status(tmp_path):
    done = run(tmp_path / "gone")
    assert (done.exit_code, done.stdout) == (2, "")
    assert done.stderr.startswith("pccheck report: ")
    save(tmp_path / "s", 1, history=False)
    done = run(tmp_path / "s")
    assert done.exit_code == 0
    assert "no run is noted here" in done.stdout
    assert json.loads(run(tmp_path / "s", "--json").stdout)["runs"] == []


def test_as_a_process_on_a_store_in_use(tmp_path):
    with pccheck.Checkpointer(tmp_path / "s", chunk_bytes=4096) as ck:
        ck.save(1, STATE).durable.result(WAIT_S)
        while not (tmp_path / "s/runs.json").exists():
            time.sleep(0.01)
        done = subprocess.run(
            [sys.executable, "-m", "pccheck.cli", "report", str(tmp_path / "s")], capture_output=True, text=True,
            timeout=60, check=False,
        )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    assert "newest run  running, began" in done.stdout


def test_what_a_file_says_cannot_steer_the_terminal(tmp_path):
    store = put(tmp_path / "s", a_run(1, 1e9, holder="\x1b[2Jpid", snapshot="[red]x"))
    done = run(store)
    assert done.exit_code == 0
    assert "\x1b" not in done.stdout
    assert "\\x1b[2Jpid" in done.stdout


def test_spans_and_sizes():
    spans = {0: "0 ms", 0.0123: "12.3 ms", 0.9996: "1 s", 1.5: "1.5 s", 119: "119 s", 121: "2.02 min",
             7200: "2 h", 200_000: "2.3 d", None: "-"}  # fmt: skip
    assert {seconds: showing.span(seconds) for seconds in spans} == spans
    assert [showing.size(n) for n in (0, 999, 1 << 10, 5 << 30, 1 << 60)] == ["0 B", "999 B", "1 KiB", "5 GiB", "1 EiB"]


def test_the_newest_twenty_runs_are_in_the_table(tmp_path):
    store = put(tmp_path / "s", *(a_run(n, 1e9 + 40_000 * n, ended=True, points=()) for n in range(1, 41)))
    console = Console(width=80, file=io.StringIO())
    showing.show(pccheck.report(store), console)
    lines = console.file.getvalue().splitlines()
    assert [int(line.split()[0]) for line in lines if line.rstrip().endswith("0.19 %")] == list(range(21, 41))


# -- metrics ----------------------------------------------------------------------------------------------------------


def test_metrics_without_the_client_say_what_to_install(monkeypatch, tmp_path, history_of_three):
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    with pytest.raises(UsageError, match=r"pip install 'pccheck\[metrics\]'"):
        metrics.register(history_of_three)
    done = run(history_of_three, "--prometheus", tmp_path / "out.prom")
    assert done.exit_code == 2
    assert "pccheck[metrics]" in done.stderr
    assert not (tmp_path / "out.prom").exists()


def samples(text):
    """Give {name with labels: value} of what the client's own parser reads."""
    from prometheus_client.parser import text_string_to_metric_families

    return {
        (one.name, *sorted(v for k, v in one.labels.items() if k != "store")): one.value
        for family in text_string_to_metric_families(text)
        for one in family.samples
    }


@needs_client
def test_metrics_of_a_live_checkpointer(tmp_path):
    from prometheus_client import CollectorRegistry, generate_latest

    registry = CollectorRegistry()
    with pccheck.Checkpointer(tmp_path / "s", chunk_bytes=4096) as ck:
        collector = metrics.register(ck, registry=registry)
        assert ("pccheck_newest_durable_step",) not in samples(generate_latest(registry).decode())
        for step in (10, 20, 30):
            ck.save(step, STATE).durable.result(WAIT_S)
        end = time.monotonic() + WAIT_S
        while samples(generate_latest(registry).decode())["pccheck_durable_seconds_count",] < 3:
            assert time.monotonic() < end
        told = samples(generate_latest(registry).decode())
        assert told["pccheck_saves_total", "committed"] == 3
        assert told["pccheck_newest_durable_step",] == 30
        assert 0 <= told["pccheck_newest_durable_age_seconds",] < WAIT_S
        assert told["pccheck_written_bytes_total",] == 3 * ck._recorder._account.state_bytes > 3 * 24_000
        assert told["pccheck_durable_seconds_bucket", "+Inf"] == 3
        waits = [told["pccheck_trainer_wait_seconds_total", cause] for cause in ("copy", "slot", "gate", "other")]
        assert sum(waits) == pytest.approx(ck.stats().save_s, rel=0.01)
        registry.unregister(collector)
        collector.close()
        ck.save(40, STATE).durable.result(WAIT_S)
        assert not ck._notifier._observers


@needs_client
def test_metrics_of_stores_from_a_server(history_of_three, tmp_path):
    """As Prometheus gets them: over HTTP, of two stores, anew at each request."""
    from prometheus_client import CollectorRegistry, start_http_server

    save(tmp_path / "other", 1)
    registry = CollectorRegistry()
    metrics.register(history_of_three, str(tmp_path / "other"), registry=registry)
    server, thread = start_http_server(0, addr="127.0.0.1", registry=registry)
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{server.server_port}/metrics", timeout=30) as answer:
            text = answer.read().decode()
        save(tmp_path / "other", 2)
        with urllib.request.urlopen(f"http://127.0.0.1:{server.server_port}/metrics", timeout=30) as answer:
            assert f'pccheck_newest_durable_step{{store="{tmp_path}/other"}} 2.0' in answer.read().decode()
    finally:
        server.shutdown()
        server.server_close()
        thread.join(WAIT_S)
    assert f'pccheck_failures_total{{store="{history_of_three}"}} 2.0' in text
    assert f'pccheck_failures_total{{store="{tmp_path}/other"}} 0.0' in text
    assert text.count("# TYPE pccheck_failures_total counter") == 1
    told = samples("\n".join(line for line in text.splitlines() if "other" not in line) + "\n")
    assert told["pccheck_mtbf_seconds",] == 54_000
    assert told["pccheck_running",] == 1
    assert told["pccheck_durable_quantile_seconds", "1"] == 9.0
    assert told["pccheck_cost_seconds_per_step",] == pytest.approx(0.02326, rel=1e-3)


@needs_client
def test_metrics_in_a_file(history_of_three, tmp_path):
    done = run(history_of_three, "--prometheus", tmp_path / "out.prom", "--json")
    assert done.exit_code == 0, done.output
    told = samples((tmp_path / "out.prom").read_text())
    assert told["pccheck_lost_steps_total",] == 30
    assert [p.name for p in tmp_path.glob("out.prom*")] == ["out.prom"]
    done = run(history_of_three, "--prometheus", tmp_path / "gone/out.prom")
    assert done.exit_code == 2
    assert "gone/out.prom cannot be written: there is no folder" in done.stderr
    for name in ("out.txt", "out.prom.txt", "out"):
        done = run(history_of_three, "--prometheus", tmp_path / name)
        assert done.exit_code == 2
        assert "names end in .prom" in done.stderr
        assert not (tmp_path / name).exists()
    (tmp_path / "folder.prom").mkdir()
    done = run(history_of_three, "--prometheus", tmp_path / "folder.prom")
    assert done.exit_code == 2
    assert "Errno" not in done.stderr


@needs_client
def test_one_registry_takes_one_collector(history_of_three, tmp_path):
    from prometheus_client import CollectorRegistry

    registry = CollectorRegistry()
    metrics.register(history_of_three, registry=registry)
    with pccheck.Checkpointer(tmp_path / "other") as ck:
        with pytest.raises(ValueError, match="uplicate"):
            metrics.register(ck, registry=registry)
        assert not ck._notifier._observers, "what was not registered hears nothing"
