"""What went wrong elsewhere, through pccheck_orbax.CheckpointManager: cases 6, 20, 30 and 34 of the collected ones."""

from __future__ import annotations

import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pccheck_orbax
import pytest

from tests.adapters.orbax_held import Save as Held
from tests.adapters.orbax_jobs import job


def test_a_donated_state_is_saved_as_it_was(tmp_path):
    """google/orbax#626: "Array has been deleted" from a background thread, as the next step had donated its inputs."""

    def step(state):
        return {"w": state["w"] * 1.5 + 1, "n": state["n"] + 1}

    train = jax.jit(step, donate_argnums=0)
    state = {"w": jnp.ones((64, 1024)), "n": jnp.int32(0)}
    wanted = {}
    with pccheck_orbax.CheckpointManager(tmp_path, in_flight=3) as manager:
        for i in range(8):
            wanted[i] = jax.tree.map(lambda x: np.array(x, copy=True), state)
            manager.save(i, args=ocp.args.StandardSave(state))
            state = train(state)
        for i, want in wanted.items():
            restored = manager.restore(i)
            assert all(np.array_equal(restored[name], want[name]) for name in want)


def test_a_deleted_array_is_refused_by_save_itself(tmp_path):
    gone = jnp.ones(10)
    gone.delete()
    with pccheck_orbax.CheckpointManager(tmp_path) as manager:
        with pytest.raises(Exception, match="w"):
            manager.save(0, args=ocp.args.StandardSave({"w": gone}))
        assert manager.all_steps() == []


def test_a_failure_is_told_once_and_the_next_save_succeeds(tmp_path):
    """google/orbax#605: a background failure was not reported, and the next save failed over what never existed."""

    def args(step, error=None):
        return ocp.args.Composite(
            state=ocp.args.StandardSave({"w": np.full(50_000, step)}), extra=Held([1], error=error)
        )

    with pccheck_orbax.CheckpointManager(tmp_path, ocp.CheckpointManagerOptions(max_to_keep=1), in_flight=2) as manager:
        manager.save(0, args=args(0))
        manager.wait_until_finished()
        for step in range(1, 9, 2):
            manager.save(step, args=args(step, OSError(f"no space for {step}")))
            while manager.in_flight_steps():
                pass
            with pytest.raises(OSError, match=f"no space for {step}") as failure:
                manager.save(step + 1, args=args(step + 1))
            assert any(f"step {step} " in note for note in failure.value.__notes__)
            assert manager.save(step + 1, args=args(step + 1))
            manager.wait_until_finished()
            assert manager.all_steps() == [step + 1]
        assert (manager.restore(8).state["w"] == 8).all()
        slots = list((tmp_path / ".pccheck" / "state").rglob("slot-*.pcc"))
        assert len(slots) <= 1 + 2 + 1, "failed saves hold slots"


def test_files_of_a_step_are_as_many_whatever_the_leaves(tmp_path):
    """google/orbax#179, #430: a file or two for each array, made on the main thread."""
    counts = {}
    for leaves in (1, 100, 5000):
        root = tmp_path / str(leaves)
        state = {f"leaf{i}": np.full(100_000 // leaves, i, np.float32) for i in range(leaves)}
        with pccheck_orbax.CheckpointManager(root) as manager:
            manager.save(0, args=ocp.args.StandardSave(state))
            manager.wait_until_finished()
            counts[leaves] = sum(len(files) for _, _, files in os.walk(root / "0"))
            restored = manager.restore(0)
            assert all(np.array_equal(restored[name], state[name]) for name in state)
    assert len(set(counts.values())) == 1, counts


def test_another_mesh_reads_the_structure_and_the_arrays_and_so_does_who_has_no_jax(tmp_path):
    """google/orbax#648: even the structure could be read only under the mesh that had saved it."""
    told = job("mesh_of_eight", root=str(tmp_path))
    assert told["saved"] == {"result": 8}
    for devices, reader in zip((1, 3), told["readers"], strict=True):
        assert reader["result"]["devices"] == devices
        assert (reader["result"]["steps"], reader["result"]["bad"]) == ([3], [])
    program = f"""
import sys
for name in ("jax", "jaxlib", "orbax"):
    sys.modules[name] = None
import numpy, pccheck
with pccheck.open({str(tmp_path / "3" / "default")!r}) as view:
    split = numpy.asarray(view["split"])
assert (split == numpy.arange(24 * 8, dtype=numpy.float32).reshape(24, 8) + 3).all()
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)
