"""Traces: both forms of the text, the published one, and nonsense, which is told by its line."""

from __future__ import annotations

import itertools
import math
import pickle
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pccheck.errors import MediumError, OptionError
from pccheck.replay.files import read_trace
from pccheck.replay.trace import Trace, TraceError, exponential_trace, parse_trace

PUBLISHED = Path(__file__).parents[3] / "shared" / "data" / "gpus_trace.csv"


def counts(*rows: tuple[float, int]) -> str:
    """Give the form of counts, with an index column."""
    return ",Time,GPUs\n" + "".join(f"{i},{time},{alive}\n" for i, (time, alive) in enumerate(rows))


def test_the_first_row_is_the_start_and_only_losses_are_failures():
    trace = parse_trace(counts((1000.5, 8), (1010.5, 8), (1020.5, 6), (1030.5, 7), (1040.5, 3)))
    assert trace.losses == (20.0, 40.0)
    assert trace.gains == (30.0,)
    assert trace.end_s == 40.0
    assert not trace.killed_at_end
    assert trace.failures == 2
    assert trace.mtbf_s == 20.0


def test_none_left_ends_the_trace():
    trace = parse_trace(counts((0, 8), (5, 4), (9, 0), (11, 0), (13, 6)))
    assert trace.losses == (5.0, 9.0)
    assert trace.gains == ()
    assert trace.end_s == 9.0
    assert trace.killed_at_end


def test_counts_need_no_index_column():
    assert parse_trace("Time,GPUs\n0,2\n4,1\n").losses == (4.0,)
    assert parse_trace(" time , gpus \r\n0,2\r\n\r\n# a note\r\n4,1\r\n").losses == (4.0,)


def test_events():
    trace = parse_trace("seconds,event\n100,start\n130,loss\n140.5,gain\n150,loss\n200,end\n", name="t.csv")
    assert trace == Trace(losses=(30.0, 50.0), gains=(40.5,), end_s=100.0, name="t.csv")
    assert parse_trace("seconds,event,count\n0,start,8\n7,loss,3\n") == Trace(
        losses=(7.0,), end_s=7.0, killed_at_end=True
    )
    assert parse_trace("seconds,event\n0,start\n9,end\n").mtbf_s == math.inf


@pytest.mark.parametrize(
    ("text", "line", "reason"),
    [
        ("", 1, "header"),
        ("a,b\n", 1, "header names the columns a, b"),
        ("Time,GPUs,What\n0,1,2\n", 1, "header"),
        ("1,2,3\n", 1, "header"),
        ("Time,GPUs\n", 1, "fewer than two rows"),
        ("Time,GPUs\n0,4\n", 2, "fewer than two rows"),
        ("Time,GPUs\n0,0\n1,4\n", 2, "none alive at the start"),
        ("Time,GPUs\n0,4\n5,3\n5,2\n", 4, "does not come after"),
        ("Time,GPUs\n5,4\n3,3\n", 3, "does not come after"),
        ("Time,GPUs\n5,4\n9,3\n1e300,2\n", 4, "time 1e+300 is more than 1e+10 s after the start, at 5.0"),
        ("seconds,event\n5,start\n1e300,loss\n", 3, "second 1e+300 is more than 1e+10 after the start, at 5.0"),
        ("Time,GPUs\n0,4\nnan,3\n", 3, "no time"),
        ("Time,GPUs\n0,4\n1e999,3\n", 3, "no time"),
        ("Time,GPUs\n0,4\n9,-3\n", 3, "no whole number"),
        ("Time,GPUs\n0,4\n9,3.5\n", 3, "no whole number"),
        ("Time,GPUs\n0,4\n9,²\n", 3, "no whole number"),
        ("Time,GPUs\n0,4\n9\n", 3, "1 cells, the header has 2"),
        (",Time,GPUs\n0,4\n", 2, "2 cells, the header has 3"),
        ('Time,GPUs\n0,4\n"9,3\n', 3, "not CSV"),
        ("Time,GPUs\n0,4\n1,3\n2,0\n1,0\n", 5, "does not come after"),
        ("Time,GPUs\n0,4\n1,0\n2,x\n", 4, "no whole number"),
        ("seconds,event\n0,loss\n", 2, "the first row is 'loss'"),
        ("seconds,event\n0,start\n", 2, "fewer than two rows"),
        ("seconds,event\n0,start\n5,crash\n", 3, "'crash' is none of"),
        ("seconds,event\n0,start\n5,start\n", 3, "'start' is none of"),
        ("seconds,event\n0,start\n5,loss\n5,gain\n", 4, "does not come after"),
        ("seconds,event\n0,start\n5,end\n6,loss\n", 4, "a row after 'end'"),
        ("seconds,event,count\n0,start,1\n5,loss,-1\n", 3, "no whole number"),
    ],
)
def test_nonsense_is_told_by_its_line(text, line, reason):
    with pytest.raises(TraceError, match=r"docs/replay\.md") as caught:
        parse_trace(text, name="t.csv")
    assert caught.value.line == line
    assert reason in caught.value.reason
    assert str(caught.value).startswith(f"t.csv, line {line}: ")
    assert pickle.loads(pickle.dumps(caught.value)).line == line


def test_too_many_rows_are_refused(monkeypatch):
    monkeypatch.setattr("pccheck.replay.trace.MOST_ROWS", 3)
    parse_trace("Time,GPUs\n0,4\n1,3\n")
    with pytest.raises(TraceError, match="more than 3 rows"):
        parse_trace("Time,GPUs\n0,4\n1,3\n2,2\n")


@given(st.text(max_size=200))
def test_any_text_is_a_trace_or_a_trace_error(text):
    for head in ("", "Time,GPUs\n0,4\n", "seconds,event\n0,start\n"):
        try:
            parse_trace(head + text)
        except TraceError:
            pass


@given(st.lists(st.integers(0, 5), min_size=2, max_size=40))
def test_losses_and_gains_are_the_steps_of_the_counts(alive):
    alive = [alive[0] + 1, *alive[1:]]
    trace = parse_trace(counts(*((10 * i, n) for i, n in enumerate(alive))))
    last = alive.index(0) if 0 in alive else len(alive) - 1
    steps = [(10.0 * i, b - a) for i, (a, b) in enumerate(itertools.pairwise(alive), start=1) if i <= last]
    assert trace.losses == tuple(at for at, step in steps if step < 0)
    assert trace.gains == tuple(at for at, step in steps if step > 0)
    assert trace.end_s == 10.0 * last
    assert trace.killed_at_end == (0 in alive)


def test_scaled():
    trace = Trace(losses=(10.0, 40.0), gains=(20.0,), end_s=40.0, killed_at_end=True)
    assert trace.scaled(0.5) == Trace(losses=(5.0, 20.0), gains=(10.0,), end_s=20.0, killed_at_end=True)
    for factor in (0.0, -1.0, math.nan, math.inf):
        with pytest.raises(OptionError, match="factor"):
            trace.scaled(factor)


@pytest.mark.parametrize(
    "wrong",
    [
        {"end_s": 0.0},
        {"end_s": math.inf},
        {"losses": (0.0,)},
        {"losses": (2.0, 2.0)},
        {"losses": (11.0,)},
        {"losses": (math.nan,)},
        {"gains": (5.0, 4.0)},
        {"killed_at_end": True},
    ],
)
def test_a_trace_is_checked_where_it_is_made(wrong):
    with pytest.raises(OptionError):
        Trace(**{"losses": (), "end_s": 10.0} | wrong)


def test_exponential_traces_have_their_mean_and_their_seed():
    trace = exponential_trace(100.0, failures=20_000, seed=5)
    assert trace.failures == 20_000
    assert trace.mtbf_s == pytest.approx(100.0, rel=0.02)
    assert trace == exponential_trace(100.0, failures=20_000, seed=5)
    assert trace != exponential_trace(100.0, failures=20_000, seed=6)
    for wrong in ({"mtbf_s": 0.0}, {"mtbf_s": math.inf}, {"failures": 0}, {"failures": 2_000_000}):
        with pytest.raises(OptionError):
            exponential_trace(**{"mtbf_s": 1.0, "failures": 1} | wrong)


def test_files(tmp_path):
    file = tmp_path / "spot.csv"
    file.write_bytes(b"\xef\xbb\xbfTime,GPUs\r\n0,2\r\n4,1\r\n")
    assert read_trace(file) == Trace(losses=(4.0,), end_s=4.0, name="spot.csv")
    file.write_bytes(b"Time,GPUs\n0,2\n4,\xff\n")
    with pytest.raises(TraceError, match="line 3: not UTF-8"):
        read_trace(file)
    with pytest.raises(MediumError, match=r"none\.csv"):
        read_trace(tmp_path / "none.csv")
    with pytest.raises(MediumError):
        read_trace(tmp_path)


def test_a_file_too_large_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr("pccheck.replay.files._MOST_BYTES", 20)
    file = tmp_path / "t.csv"
    file.write_text("Time,GPUs\n0,2\n4,1\n")
    read_trace(file)
    file.write_text("Time,GPUs\n0,2\n4,1\n55555,1\n")
    with pytest.raises(TraceError, match="MiB"):
        read_trace(file)


@pytest.mark.skipif(not PUBLISHED.exists(), reason="the published trace lies beside the repository, not in it")
def test_the_published_trace():
    """PCcheck's artifact counts 51 failures here: gains, and the first row, are among them. There are 26 losses."""
    trace = read_trace(PUBLISHED)
    assert trace.failures == 26
    assert len(trace.gains) == 22
    assert trace.killed_at_end
    assert trace.losses[0] == pytest.approx(630.0)
    assert trace.losses[-2:] == pytest.approx((13_104.0, 13_167.0))
    assert trace.end_s == pytest.approx(13_167.0)
    assert trace.mtbf_s == pytest.approx(506.4, abs=0.1)
