"""The Flax example does what its first lines say, and what it calls bit-identical is."""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "examples" / "flax_train.py"
for needed in ("jax", "flax", "optax", "orbax.checkpoint"):
    pytest.importorskip(needed)


def run(*arguments: object) -> subprocess.CompletedProcess[str]:
    line = [sys.executable, str(SCRIPT), *map(str, arguments)]
    return subprocess.run(line, capture_output=True, text=True, timeout=280)


@pytest.fixture(scope="module")
def killed(tmp_path_factory):
    """What the example left in its folder, and what it said."""
    out = tmp_path_factory.mktemp("flax")
    done = run("--kills", 2, "--steps", 24, "--save-every", 4, "--out", out)
    assert done.returncode == 0, done.stdout + done.stderr
    return out, done.stdout.splitlines()


def test_a_killed_run_ends_with_the_bits_of_one_that_was_not(killed):
    _, lines = killed
    assert lines[-1] == "bit-identical"
    assert sum("; killed " in line for line in lines) == 2
    assert any(line.strip().startswith("resumed after step") for line in lines)


def test_a_run_that_is_complete_is_not_done_again(killed):
    out, _ = killed
    again = run("--steps", 24, "--save-every", 4, "--out", out / "killed")
    assert again.returncode == 0, again.stdout + again.stderr
    assert again.stdout.splitlines() == [f"opening {out / 'killed'}", "resumed after step 23"]


@pytest.fixture(scope="module")
def example():
    spec = importlib.util.spec_from_file_location("flax_train", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    try:
        spec.loader.exec_module(module)
        yield module
    finally:
        del sys.modules[spec.name]


def test_one_other_bit_is_found_and_named(killed, example, tmp_path):
    import orbax.checkpoint as ocp
    import pccheck_orbax

    out, _ = killed
    copy = tmp_path / "copy"
    shutil.copytree(out / "never_killed", copy)
    with ocp.CheckpointManager(copy, handler_registry=pccheck_orbax.registry("state")) as manager:
        state = manager.restore(23, args=ocp.args.Composite(state=ocp.args.StandardRestore())).state
    bias = state[0]["norm"]["bias"]
    bias["value"] = bias["value"].at[0].set(-bias["value"][0])
    with ocp.CheckpointManager(copy, handler_registry=pccheck_orbax.registry("state")) as manager:
        manager.delete(23)
        manager.save(23, args=ocp.args.Composite(state=ocp.args.StandardSave(state), loop=ocp.args.JsonSave({})))
    one, other = example.final_state(out / "never_killed", 23), example.final_state(copy, 23)
    assert sorted(path for path in one if one[path] != other[path]) == ["loop", "state[0]['norm']['bias']['value']"]


def test_the_place_in_the_data_is_two_numbers(example):
    batches = example.Batches(seed=3, limit=1 << 10)
    taken = [next(batches) for _ in range(11)]  # more than two epochs
    again = example.Batches(seed=3, limit=1 << 10)
    for _ in range(7):
        next(again)
    other = example.Batches(seed=3, limit=1 << 10)
    other.epoch, other.position = again.epoch, again.position
    assert again.epoch > 0
    assert [next(other).tobytes() for _ in range(4)] == [batch.tobytes() for batch in taken[7:]]
    assert len({batch.tobytes() for batch in taken}) == 11
