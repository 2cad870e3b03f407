"""A process of test_orbax_stock.py: `orbax_worker.py SCENE ROOT`; prints what it found as JSON."""

from __future__ import annotations

import errno
import itertools
import json
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

import orbax.checkpoint as ocp
import pccheck_orbax

from tests.adapters.orbax_shared import same, state


def train(root):
    """Save step after step, after the newest one, until it is killed."""
    with ocp.CheckpointManager(root, handler_registry=pccheck_orbax.registry()) as made:
        for step in itertools.count((made.latest_step() or 0) + 1):
            saved = ocp.args.StandardSave(state(step, 300_000))
            made.save(step, args=ocp.args.Composite(state=saved, position=ocp.args.JsonSave({"step": step})))
            print(step, flush=True)


def look(root):
    """Say what a manager that is told nothing finds, in a process that only imports pccheck_orbax."""
    with ocp.CheckpointManager(root) as made:
        steps = list(made.all_steps())
        whole = made.restore(steps[-1])
        one = made.restore(steps[-1], args=ocp.args.Composite(state=pccheck_orbax.Restore(state(0))))
        described = made.item_metadata(steps[-1])
        print(json.dumps({
            "steps": steps,
            "items": sorted(whole.keys()),
            "same": [same(whole.state, steps[-1]), same(one.state, steps[-1]), same(whole.ema, -1)],
            "position": whole.position,
            "shape": list(described.state["w"].shape),
            "read only": not list(Path(root).rglob("CHECK.lock")),
        }))  # fmt: skip


def no_folder(root):
    """Say what becomes of a save whose folder cannot be made, and of the next one."""
    registry, errors = pccheck_orbax.registry(), []
    too_long = ocp.CheckpointManagerOptions(step_prefix="x" * 240)  # with the suffix that it has while it is made
    try:
        with ocp.CheckpointManager(root, options=too_long, handler_registry=registry) as made:
            made.save(2, args=ocp.args.StandardSave(state(2)))
            made.wait_until_finished()
    except OSError as error:
        errors.append(errno.errorcode[error.errno])
    with ocp.CheckpointManager(root, handler_registry=registry) as made:
        made.save(3, args=ocp.args.StandardSave(state(3)))
        made.wait_until_finished()
        print(json.dumps({"errors": errors, "same": same(made.restore(3), 3)}), flush=True)
    os._exit(0)  # Orbax's own threads wait 300 s for the folder


if __name__ == "__main__":
    {"train": train, "look": look, "no_folder": no_folder}[sys.argv[1]](Path(sys.argv[2]))
