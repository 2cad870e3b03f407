"""The examples do what their first lines say, and what they call bit-identical is."""

from __future__ import annotations

import importlib.util
import math
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
torch = pytest.importorskip("torch")
pytest.importorskip("matplotlib")


def run(*command: object) -> subprocess.CompletedProcess[str]:
    line = [sys.executable, *map(str, command)]
    return subprocess.run(line, cwd=ROOT, capture_output=True, text=True, timeout=280)


def test_a_killed_run_ends_with_the_bits_of_one_that_was_not(tmp_path):
    script = ROOT / "examples" / "crash_and_resume.py"
    done = run(script, "--steps", 16, "--save-every", 3, "--kills", 3, "--out", tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1] == "bit-identical"
    assert (tmp_path / "crash_and_resume.png").read_bytes().startswith(b"\x89PNG")


def test_a_run_that_is_complete_is_not_done_again(tmp_path):
    script = ROOT / "examples" / "torch_train.py"
    first = run(script, "--steps", 4, "--save-every", 2, "--snapshot", "copy", "--out", tmp_path)
    again = run(script, "--steps", 4, "--save-every", 2, "--snapshot", "copy", "--out", tmp_path)
    assert (first.returncode, again.returncode) == (0, 0), first.stderr + again.stderr
    assert "starting anew" in first.stdout
    assert "resumed after step 3" in again.stdout
    assert "step 3 loss" in first.stdout
    assert "loss" not in again.stdout


def test_ranks_that_are_killed_go_on_together_and_on_fewer(tmp_path):
    done = run(ROOT / "examples" / "fsdp_train.py", "--steps", 31, "--save-every", 3, "--out", tmp_path / "fsdp")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1].startswith("verified: of ")
    assert done.stdout.count("--> SIGKILL") == 2


@pytest.fixture(scope="module")
def example():
    spec = importlib.util.spec_from_file_location("crash_and_resume", ROOT / "examples" / "crash_and_resume.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    try:
        spec.loader.exec_module(module)
        yield module
    finally:
        del sys.modules[spec.name]


@pytest.mark.parametrize(
    ("one", "other", "where"),
    [
        ({"w": torch.zeros(3)}, {"w": -torch.zeros(3)}, ["state['w']"]),
        ({"w": torch.zeros(3)}, {"w": torch.zeros(3, dtype=torch.float64)}, ["state['w']"]),
        ({"w": torch.zeros(3)}, {"w": torch.zeros(3, 1)}, ["state['w']"]),
        ({"a": {0: 1.0}}, {"a": {0: math.nextafter(1.0, 2.0)}}, ["state['a'][0]"]),
        ({"a": (1, 2)}, {"a": [1, 2]}, ["state['a']"]),
        ({"a": 1}, {"a": True}, ["state['a']"]),
        ({"a": 1}, {"a": 1, "b": 2}, ["state", "state['b']"]),
        ({"a": math.nan, "b": torch.tensor(math.nan)}, {"a": math.nan, "b": torch.tensor(math.nan)}, []),
    ],
    ids=["sign of zero", "dtype", "shape", "last bit", "tuple and list", "int and bool", "one more", "equal nans"],
)
def test_every_difference_is_found(one, other, where, example):
    assert example.differences(one, other) == where
