"""The benchmarks of JAX and Orbax run, and every contender gives back what it saved. No timing is judged."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")
pytest.importorskip("safetensors")
pytest.importorskip("orbax.checkpoint")

import jax
import numpy as np

from tests.bench.contenders import Nothing
from tests.bench.jax_contenders import Orbax, PccheckJax, PccheckOrbax
from tests.bench.jax_measures import Kind, measure_jax_memory, measure_kinds, measure_restore, save_once
from tests.bench.jax_states import TURNS, Arrays, bytes_of, many
from tests.bench.loops import Loop
from tests.bench.smoke import Stale, quick_run

SMALL = Loop(state_bytes=0, step_s=0.001, every=2, intervals=2)
LEAVES = many(30, 1024)
KINDS = {
    "donated": Kind(loop=SMALL, donated=True),
    "python, kept": Kind(loop=Loop(state_bytes=0, step_s=0.001, every=2, python=True), donated=False),
}
CONTENDERS = [PccheckOrbax(1), PccheckOrbax(3), PccheckJax(), Orbax(), Orbax(compressed=False)]
by_name = pytest.mark.parametrize("contender", CONTENDERS, ids=lambda c: c.name)


@by_name
def test_loops_give_back_the_last_saved_step(contender, tmp_path):
    found = measure_kinds(contender, tmp_path / "steps", LEAVES, KINDS)
    assert found.keys() == KINDS.keys()
    for name, run in found.items():
        loop = KINDS[name].loop
        assert run.restored == loop.warm_up + (loop.intervals + loop.lead + loop.intervals - 1) * loop.every + 1
        assert len(run.blocked_ms) == loop.intervals
        assert run.ratio > 0


@by_name
def test_what_one_process_left_is_restored_by_another(contender, tmp_path):
    save_once(contender, tmp_path / "steps", LEAVES)
    found = measure_restore(contender, tmp_path / "steps", tmp_path / "raw", LEAVES)
    assert found.restore_s > 0
    assert found.raw_s > 0


def test_memory_is_measured_around_saves_that_restore(tmp_path):
    loop = Loop(state_bytes=0, step_s=0.001, every=2, intervals=3)
    found = measure_jax_memory(PccheckJax(), tmp_path / "steps", LEAVES, loop)
    assert found.saving_bytes >= 0


def test_a_contender_that_does_not_save_is_found_out(tmp_path):
    with pytest.raises(AssertionError, match="restored another state"):
        measure_kinds(Stale(PccheckJax(1)), tmp_path / "steps", LEAVES, KINDS)


@pytest.mark.parametrize("donated", [True, False])
def test_arrays_are_at_every_step_what_they_are_said_to_be(donated):
    arrays = Arrays(LEAVES, donated=donated)
    assert bytes_of(LEAVES) == 30 * 1024
    for step in range(1, TURNS + 3):
        arrays.set(step)
        assert arrays.differences(arrays.state, step) == []
    stale, before = arrays.state, [leaf.unsafe_buffer_pointer() for leaf in arrays.state["model"].values()]
    if donated:
        arrays.set(step + 1)
        assert all(leaf.is_deleted() for leaf in stale["model"].values())
        assert [leaf.unsafe_buffer_pointer() for leaf in arrays.state["model"].values()] == before
        return
    stale = jax.tree.map(np.asarray, stale)
    for _ in range(TURNS):
        step += 1
        arrays.set(step)
    changed = jax.tree.map(jax.device_put, stale)
    assert len(arrays.differences(changed, step)) == 31


def test_every_changed_bit_and_every_leaf_that_is_missing_or_new_is_a_difference():
    arrays = Arrays(LEAVES, donated=True)
    arrays.set(1)
    state, leaves = arrays.state, arrays.state["model"]
    leaves["p3"] = leaves["p3"].at[1, 1].add(1)
    leaves["new"] = leaves.pop("p7")
    assert arrays.differences({**state, "model": leaves}, 1) == ["model.p3", "model.p7", "1 leaves too many"]
    assert arrays.differences(state, 2)[0] == "progress.step"
    state["model"] = jax.tree.map(np.asarray, state["model"])
    assert len(arrays.differences(state, 1)) == 30  # right, but not of jax


@pytest.mark.slow
def test_quick_run_has_the_rows_that_are_asked_for(tmp_path):
    names = ["orbax", "orbax-leaves", "orbax-memory", "orbax-restore"]
    match = "(^|device.*: )(pccheck_orbax, in_flight 2|Orbax)$"
    found, text = quick_run(tmp_path, f"--match={match}", *(f"--only={name}" for name in names))
    tables = {table["name"]: table for table in found["tables"]}
    assert list(tables) == names
    rows = {"pccheck_orbax, in_flight 2", "Orbax"}
    for name, table in tables.items():
        loops = name in ("orbax", "orbax-leaves")
        assert {row[""] for row in table["rows"]} == rows | ({Nothing.name} if loops else set()), name
        assert all(row["restored"][0] == row["restored"][-1] for row in table["rows"] if loops)
        assert not any("python" in column for row in table["rows"] for column in row)
        assert all(row[""] in text for row in table["rows"])
