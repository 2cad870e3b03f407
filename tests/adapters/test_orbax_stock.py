"""Stock managers with pccheck's handler: other processes, kills, copies, deletions; and scripts of Orbax's users."""

from __future__ import annotations

import json
import os
import random
import runpy
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pccheck_orbax
import pytest

import pccheck
from tests.adapters.orbax_shared import held, same, slots, state

WORKER = Path(__file__).with_name("orbax_worker.py")
Composite, Save, Restore = ocp.args.Composite, pccheck_orbax.Save, pccheck_orbax.Restore


def start(scene, root):
    environment = {**os.environ, "XLA_FLAGS": ""}
    return subprocess.Popen(
        [sys.executable, str(WORKER), scene, str(root)], stdout=subprocess.PIPE, text=True, env=environment
    )


# -- with the args' own decorators alone -----------------------------------------------------------------------------


def test_items_of_ours_beside_others_in_a_process_that_knows_nothing(tmp_path):
    with ocp.CheckpointManager(tmp_path) as made:
        for step in (1, 2):
            made.save(
                step,
                args=Composite(
                    state=Save(state(step)), ema=Save(state(-1)), position=ocp.args.JsonSave({"step": step}),
                    stock=ocp.args.StandardSave({"x": jnp.ones(2)}),
                ),
            )  # fmt: skip
        made.wait_until_finished()
        assert same(made.restore(1, args=Composite(state=Restore())).state, 1)
    found = json.loads(start("look", tmp_path).communicate(timeout=120)[0])
    assert found == {
        "steps": [1, 2], "items": ["ema", "position", "state", "stock"], "same": [True, True, True],
        "position": {"step": 2}, "shape": [1000], "read only": True,
    }  # fmt: skip


def test_a_single_item_without_a_registry(tmp_path):
    with ocp.CheckpointManager(tmp_path, options=ocp.CheckpointManagerOptions(max_to_keep=2)) as made:
        for step in range(4):
            made.save(step, args=Save(state(step), custom_metadata={"n": step}), custom_metadata={"of": "the step"})
        made.wait_until_finished()
        assert made.all_steps() == [2, 3]
        assert made.item_metadata(3).custom_metadata == {"n": 3}
        assert made.metadata(3).custom_metadata == {"of": "the step"}
        assert made.metadata(3).item_handlers == {"default": "pccheck_orbax.Handler"}
    with ocp.CheckpointManager(tmp_path) as fresh:
        assert same(fresh.restore(2), 2)
        assert same(fresh.restore(None, args=Restore(state(0))), 3)
        assert fresh.item_metadata(2)["w"].dtype == np.float32


def test_named_steps(tmp_path):
    options = ocp.CheckpointManagerOptions(step_prefix="checkpoint", step_format_fixed_length=6)
    with ocp.CheckpointManager(tmp_path, options=options) as made:
        made.save(7, args=Save(state(7)))
    with pccheck.open(tmp_path / "checkpoint_000007" / "default") as view:
        assert view.latest() == 7
        assert (view["w"] == 7).all()


@pytest.mark.filterwarnings("ignore")
def test_a_run_that_stock_orbax_began_goes_on(tmp_path):
    tree = {"w": jnp.arange(4.0), "n": 3}
    with ocp.CheckpointManager(tmp_path) as theirs:
        theirs.save(1, args=ocp.args.StandardSave(tree))
    like = {"w": jnp.zeros(4, jnp.bfloat16), "n": 0}
    for make in (ocp.CheckpointManager, pccheck_orbax.CheckpointManager):
        with make(tmp_path, handler_registry=pccheck_orbax.registry()) as ours:
            assert ours.item_metadata(1)["w"].shape == (4,)
            assert ours.restore(1)["n"] == 3
            assert ours.restore(1, args=Restore(like))["w"].dtype == jnp.bfloat16
            assert ours.restore(1, args=Restore({"n": 0}, partial=True)) == {"n": 3}
            assert ours.restore(1, args=ocp.args.PyTreeRestore())["n"] == 3
            step = ours.latest_step() + 1
            ours.save(step, args=ocp.args.StandardSave(ours.restore(1, args=ocp.args.StandardRestore(tree))))
            ours.wait_until_finished()
            assert (ours.restore(step)["w"] == tree["w"]).all()
    assert held(tmp_path) == 2


# -- deletions, copies, readers --------------------------------------------------------------------------------------


def size(root):
    return sum({f.stat().st_ino: f.stat().st_blocks * 512 for f in root.rglob("*") if f.is_file()}.values())


def test_a_step_is_its_folder(tmp_path):
    """Copied it restores, removed it frees its place, and who has it open keeps every byte."""
    root, elements = tmp_path / "run", 1 << 20
    with ocp.CheckpointManager(root, handler_registry=pccheck_orbax.registry()) as made:
        for step in range(3):
            made.save(step, args=ocp.args.StandardSave(state(step, elements)))
        made.wait_until_finished()
        shutil.copytree(root / "1", tmp_path / "copy" / "1")
        before = size(root)
        with open(root / "1" / "default" / "rank-00000.pcc", "rb") as reader:
            first = reader.read(1 << 20)
            shutil.rmtree(root / "1")
            made.reload()
            for step in range(3, 8):  # slots are used again meanwhile
                made.save(step, args=ocp.args.StandardSave(state(step, elements)))
                made.wait_until_finished()
                made.delete(step)
            rest = reader.read()
        assert size(root) <= before - 4 * elements + 4 * elements * len(slots(root))
        assert first + rest == (tmp_path / "copy" / "1" / "default" / "rank-00000.pcc").read_bytes()
        assert made.all_steps() == [0, 2]
        assert same(made.restore(2), 2, elements)
    assert size(root) < before - 4 * elements + (1 << 20)
    with ocp.CheckpointManager(tmp_path / "copy") as fresh:
        assert same(fresh.restore(1), 1, elements)


def test_a_file_of_another_step_is_found_out(tmp_path):
    with ocp.CheckpointManager(tmp_path, handler_registry=pccheck_orbax.registry()) as made:
        for step in (1, 2):
            made.save(step, args=ocp.args.StandardSave(state(step)))
        made.wait_until_finished()
        shutil.copyfile(tmp_path / "1/default/rank-00000.pcc", tmp_path / "2/default/new")
        os.rename(tmp_path / "2/default/new", tmp_path / "2/default/rank-00000.pcc")
        with pytest.raises(pccheck.errors.FormatError, match="mixed"):
            made.restore(2)
        with open(tmp_path / "1/default/rank-00000.pcc", "r+b") as file:
            file.seek(65536 + 100)
            file.write(b"\xff\xff")
        with pytest.raises(pccheck.errors.DamagedError):
            made.restore(1)


# -- kills -----------------------------------------------------------------------------------------------------------


def test_after_a_kill_a_stock_manager_shows_only_whole_steps(tmp_path):
    moments, reached = random.Random(4), 0
    for _ in range(3):
        worker = start("train", tmp_path)
        killer = threading.Timer(60, worker.kill)
        killer.start()
        for _ in range(moments.randrange(3, 9)):
            line = worker.stdout.readline()
            assert line, "the worker died by itself"
            reached = int(line)
        moment = threading.Event()
        moment.wait(moments.uniform(0.0, 0.03))
        worker.send_signal(signal.SIGKILL)
        worker.communicate()
        killer.cancel()
        with ocp.CheckpointManager(tmp_path) as fresh:
            steps = list(fresh.all_steps())
            assert steps[-1] >= reached - 1  # the one before was durable when the last one began
            for step in steps:
                found = fresh.restore(step)
                assert same(found.state, step, 300_000)
                assert found.position == {"step": step}
    with ocp.CheckpointManager(tmp_path, handler_registry=pccheck_orbax.registry()) as made:
        made.save(10_000, args=Composite(state=ocp.args.StandardSave(state(1)), position=ocp.args.JsonSave({})))
        made.wait_until_finished()
        assert held(tmp_path) == len(made.all_steps())  # nothing of what the kills left takes place


def test_a_folder_that_cannot_be_made_fails_its_step_and_holds_up_nothing(tmp_path):
    found = json.loads(start("no_folder", tmp_path).communicate(timeout=120)[0])
    assert found == {"errors": ["ENAMETOOLONG"], "same": True}
    assert held(tmp_path) <= 2
    with ocp.CheckpointManager(tmp_path, handler_registry=pccheck_orbax.registry()) as made:
        made.save(4, args=ocp.args.StandardSave(state(4)))
        made.wait_until_finished()
        assert made.all_steps() == [3, 4]
    assert held(tmp_path) == 2


# -- scripts that were not written for us ----------------------------------------------------------------------------

FLAX_SCRIPT = """
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
from flax import nnx


class MLP(nnx.Module):
    def __init__(self, rngs):
        self.hidden = nnx.Linear(4, 8, rngs=rngs)
        self.norm = nnx.BatchNorm(8, rngs=rngs)
        self.drop = nnx.Dropout(0.1, rngs=rngs)
        self.out = nnx.Linear(8, 1, rngs=rngs)

    def __call__(self, x):
        return self.out(self.drop(nnx.relu(self.norm(self.hidden(x)))))


def fresh():
    model = MLP(nnx.Rngs(0))
    return model, nnx.Optimizer(model, optax.adamw(1e-2), wrt=nnx.Param)


@nnx.jit
def train_step(model, optimizer, batch):
    def loss_fn(model):
        return jnp.mean((model(batch) - batch.sum(1, keepdims=True)) ** 2)

    loss, grads = nnx.value_and_grad(loss_fn)(model)
    optimizer.update(model, grads)
    return loss


def run(steps):
    options = ocp.CheckpointManagerOptions(max_to_keep=2, save_interval_steps=2, create=True)
    mngr = ocp.CheckpointManager(Path(directory) / "checkpoints", options=options)
    model, optimizer = fresh()
    start = 0
    if mngr.latest_step() is not None:
        abstract = jax.tree.map(ocp.utils.to_shape_dtype_struct, nnx.state((model, optimizer)))
        restored = mngr.restore(mngr.latest_step(), args=ocp.args.StandardRestore(abstract))
        nnx.update((model, optimizer), restored)
        start = mngr.latest_step() + 1
    losses = []
    for step in range(start, steps):
        batch = jnp.asarray(np.random.default_rng(step).normal(size=(16, 4)), jnp.float32)
        losses.append(float(train_step(model, optimizer, batch)))
        mngr.save(step, args=ocp.args.StandardSave(nnx.state((model, optimizer))))
    mngr.wait_until_finished()
    kept = list(mngr.all_steps())
    mngr.close()
    return start, losses, kept


first = run(5)
second = run(9)
results = [first[0], second[0], *first[1], *second[1], first[2], second[2]]
"""

TRAIN_STATE_SCRIPT = """
import jax
import jax.numpy as jnp
import optax
import orbax.checkpoint as ocp
from etils import epath
from flax.training import train_state

path = epath.Path(directory) / "run"


def make():
    params = {"dense": {"kernel": jnp.full((3, 2), 0.5), "bias": jnp.zeros(2)}}
    return train_state.TrainState.create(apply_fn=None, params=params, tx=optax.sgd(0.1, momentum=0.9))


@jax.jit
def step_fn(state):
    grads = jax.tree.map(lambda p: 2 * p + 1, state.params)
    return state.apply_gradients(grads=grads)


with ocp.CheckpointManager(
    path,
    options=ocp.CheckpointManagerOptions(best_fn=lambda m: m["loss"], best_mode="min", max_to_keep=2),
    item_names=("state", "extra"),
) as manager:
    state = make()
    for i in range(4):
        state = step_fn(state)
        manager.save(
            i,
            metrics={"loss": abs(i - 2)},
            args=ocp.args.Composite(
                state=ocp.args.StandardSave(state), extra=ocp.args.JsonSave({"epoch": i, "name": "x"})
            ),
        )
    manager.wait_until_finished()
    best = manager.best_step()

with ocp.CheckpointManager(path, item_names=("state", "extra")) as manager:
    target = jax.tree.map(ocp.utils.to_shape_dtype_struct, state)
    got = manager.restore(
        best, args=ocp.args.Composite(state=ocp.args.StandardRestore(target), extra=ocp.args.JsonRestore())
    )
    shapes = jax.tree.map(lambda m: tuple(m.shape), manager.item_metadata(best).state["params"])
    steps = sorted(manager.all_steps())

checkpointer = ocp.StandardCheckpointer()
checkpointer.save(path / "final", {"params": got.state.params})
checkpointer.wait_until_finished()
params = checkpointer.restore(path / "final")["params"]
checkpointer.close()

results = [
    best, steps, got.extra, int(got.state.step), type(got.state).__name__, shapes["dense"],
    got.state.params["dense"]["kernel"].tolist(), params["dense"]["bias"].tolist(),
    jax.tree.map(lambda x: x.tolist(), got.state.opt_state[0].trace["dense"]["bias"]),
]
"""


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("script", [FLAX_SCRIPT, TRAIN_STATE_SCRIPT], ids=["nnx", "TrainState"])
def test_a_script_runs_as_before_with_its_import_line_changed(tmp_path, script):
    results, line = [], "import orbax.checkpoint as ocp"
    assert script.count(line) == 1
    for name, changed in (("theirs", line), ("ours", "import pccheck_orbax.checkpoint as ocp")):
        file = tmp_path / f"{name}.py"
        file.write_text(script.replace(line, changed))
        (tmp_path / name).mkdir()
        results.append(runpy.run_path(str(file), {"directory": str(tmp_path / name)})["results"])
    assert results[0] == results[1]
    assert not list((tmp_path / "theirs").rglob("*.pcc"))
    assert held(tmp_path / "ours") >= 2
