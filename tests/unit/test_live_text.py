"""What `pccheck replay --live` prints of its results."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from pccheck.commands import live_text
from pccheck.replay.chronicle import Chronicle
from pccheck.replay.live import Results, Settings
from pccheck.replay.schedule import lives
from pccheck.replay.told import Began, Saved, Saving, Stepped
from pccheck.replay.trace import Trace

TRACE = Trace(losses=(4.0, 8.0), end_s=8.0, killed_at_end=True, name="mine.csv")


def results() -> Results:
    """Make up a replay of one who saves, one who restores garbage, one who is not there, and one who dies."""
    outcomes = []
    for name, refused in (("bad\x1b[2J", "ballast is not that of step 2"), ("good", None)):
        chronicle = Chronicle(name, 2)
        for life in lives(TRACE, 1.0):
            first = 2 if life.start_s and refused is None else 0
            began = Began(first, 100.1, load_s=0.05, verify_s=0.01, refused=refused if life.start_s else None)
            steps = [Stepped(first + 1, 101.0, 0.0), Stepped(first + 2, 102.0, 0.0)]
            save = [Saving(first + 2, "digest", 102.0), Saved(first + 2, 0.02)]
            chronicle.lived(life, 100.0, [began, *steps, *save])
        outcomes.append(chronicle.outcome(TRACE, 0.9, 0 if refused else 4))
    return Results(
        settings=Settings(directory=Path("/somewhere")), trace=TRACE, step_s=0.9, state_bytes=64 << 20,
        outcomes=tuple(outcomes), skipped={"dcp": "No module named 'torch'"}, failed={"mine": "the trainer died\nso"},
    )  # fmt: skip


def printed(found: Results | None = None, width: int = 100) -> str:
    file = io.StringIO()
    live_text.show(found or results(), Console(file=file, width=width, color_system=None))
    return file.getvalue()


def test_nothing_is_cut_at_80_columns_or_fewer():
    """A long name folds; numbers stay whole, however large."""
    found = results()
    name = "contenders/of_mine/that_are_far_away.py:TheContender"
    large = replace(found.outcomes[1], contender=name, every=1234, steps=1_234_567)
    found = replace(found, outcomes=(found.outcomes[0], large))
    for width in (80, 40):
        text = printed(found, width)
        table = text[text.index("every") : text.index("steps: that count")].splitlines()
        assert "…" not in text
        assert "".join(line[:17].strip() for line in table[2:]).startswith(name)
        assert " ".join(table[0].split()) == "every goodput steps lost/kill ms/save slowdown load ms bad"
        numbers = next(line.split()[-8:] for line in table if "1,234,567" in line)
        assert numbers == ["1234", "0.450", "1,234,567", "0.0", "20.0", "1.056", "50", "0"]
    ordinary = printed(width=80)
    assert all(len(line.rstrip()) <= 80 for line in ordinary.splitlines()[2:6])


def test_the_best_comes_first_and_bad_restores_are_told():
    lines = printed().splitlines()
    good, bad = (next(i for i, line in enumerate(lines) if line.startswith(name)) for name in ("good", "bad"))
    assert good < bad
    assert lines[good].split() == ["good", "2", "0.450", "4", "0.0", "20.0", "1.056", "50", "0"]
    assert lines[bad].split()[-1] == "1"
    assert any("began anew: ballast is not that of step 2" in line for line in lines)
    assert "mine.csv in 8 s: 2 kills (SIGKILL)" in lines[0]


def test_who_did_not_take_part_is_told_and_no_text_moves_the_cursor():
    text = printed()
    assert "dcp did not take part: No module named 'torch'" in text
    assert "the trainer died" in text
    assert "\x1b" not in text


def test_json_holds_all_of_it():
    found = json.loads(json.dumps(live_text.as_json(results())))
    assert found["settings"]["directory"] == "/somewhere"
    assert [o["contender"] for o in found["outcomes"]] == ["bad\x1b[2J", "good"]
    assert found["outcomes"][1]["timeline"]["segments"][0]["kind"] == "load"
    assert found["skipped"].keys() == {"dcp"}
