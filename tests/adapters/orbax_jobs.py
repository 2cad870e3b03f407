"""Jobs of test_orbax_kills.py and test_orbax_processes.py: `python orbax_jobs.py SCENE JSON-ARGUMENTS`; prints JSON.

Imports jax, orbax and pccheck once and forks a child for each process of a job, before any of them has touched a
device: an import takes seconds, and a round of a kill needs two or three processes.
"""

from __future__ import annotations

import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
import traceback
from pathlib import Path

import jax
import numpy as np
import orbax.checkpoint as ocp
import pccheck_orbax
from orbax.checkpoint import checkpoint_managers as cms

LIMIT_S = 60.0
HEARTBEAT_S = 10  # then JAX ends who has lost a process; its default is 100
HANDLERS = {  # handler_registry=, for our manager and for a stock one that reads
    "ours": (None, pccheck_orbax.registry),
    "orbax": (ocp.handlers.DefaultCheckpointHandlerRegistry, ocp.handlers.DefaultCheckpointHandlerRegistry),
}
IN_FLIGHT = 3


def job(scene, limit_s=240, **arguments):
    """Run a scene of this program, and give what it printed."""
    command = [sys.executable, __file__, scene, json.dumps(arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=limit_s, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


class Child:
    """A function in a forked process; what it gives comes back as JSON, an error as its text."""

    def __init__(self, function, *args, devices=1, log=None):
        read, write = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            os.close(read)
            os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={devices}"
            os.environ["JAX_PLATFORMS"] = "cpu"
            code = 1
            if log is not None:
                fd = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
                os.dup2(fd, 1)
                os.dup2(fd, 2)
            try:
                result = {"result": function(*args)}
                code = 0
            except BaseException:
                result = {"error": traceback.format_exc()}
            try:
                os.write(write, json.dumps(result).encode())
            finally:
                os._exit(code)
        os.close(write)
        self._read = read

    def ended(self):
        pid, _ = os.waitpid(self.pid, os.WNOHANG)
        return pid != 0

    def kill(self):
        os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)
        os.close(self._read)

    def result(self, limit_s=LIMIT_S):
        """What it gave; {"hung": seconds} where it did not end, and then it is killed."""
        begun = time.monotonic()
        while not self.ended():
            if time.monotonic() - begun > limit_s:
                self.kill()
                return {"hung": limit_s}
            time.sleep(0.005)
        with os.fdopen(self._read, "rb") as pipe:
            told = pipe.read()
        return json.loads(told) if told else {"died": True}


# -- kills of one process -------------------------------------------------------------------------------------------


def tree_of(step):
    return {"w": np.full((64, 1024), step, np.float32), "b": [np.arange(1000) * step, {"step": np.int64(step)}]}


def whole(step, restored):
    want = tree_of(step)
    leaves = jax.tree.leaves(restored.state)
    same = all(np.array_equal(np.asarray(a), b) for a, b in zip(leaves, jax.tree.leaves(want), strict=True))
    return same and restored.position == {"position": step}


def train(root, handlers, keep, period, seed, started):
    """Resume, check what was resumed, and save as fast as it goes, until killed."""
    chance = random.Random(seed)
    options = ocp.CheckpointManagerOptions(max_to_keep=keep, keep_period=period)
    os.write(started, b"!")
    manager = pccheck_orbax.CheckpointManager(
        root, options=options, in_flight=IN_FLIGHT, handler_registry=HANDLERS[handlers][0]
    )
    args = ocp.args.Composite(state=ocp.args.StandardRestore(), position=ocp.args.JsonRestore())
    latest = manager.latest_step()
    if latest is not None and not whole(latest, manager.restore(None, args=args)):
        os.write(started, b"X")
    for step in range(0 if latest is None else latest + 1, 10**6):
        state, position = ocp.args.StandardSave(tree_of(step)), ocp.args.JsonSave({"position": step})
        manager.save(step, args=ocp.args.Composite(state=state, position=position))
        time.sleep(chance.random() * 0.01)


def look(root, handlers, period):
    """What a stock manager of a new process shows, and which of that does not restore as it was saved."""
    with ocp.CheckpointManager(root, handler_registry=HANDLERS[handlers][1]()) as stock:
        steps, bad = list(stock.all_steps()), []
        args = ocp.args.Composite(state=ocp.args.StandardRestore(), position=ocp.args.JsonRestore())
        for step in steps:
            try:
                good = whole(step, stock.restore(step, args=args))
            except Exception as error:
                good = f"{type(error).__name__}: {error}"
            if good is not True:
                bad.append([step, str(good)])
    slots = {path.stat().st_ino for path in Path(root).rglob("*.pcc")}
    pinned = [s for s in steps if period and s % period == 0]
    return {"steps": steps, "bad": bad, "slots": len(slots), "pinned": len(pinned)}


def settle(root, handlers, keep, period):
    """What is there once a manager has saved again, with nothing in flight."""
    options = ocp.CheckpointManagerOptions(max_to_keep=keep, keep_period=period)
    with pccheck_orbax.CheckpointManager(
        root, options=options, in_flight=IN_FLIGHT, handler_registry=HANDLERS[handlers][0]
    ) as manager:
        step = manager.latest_step() + 1
        state, position = ocp.args.StandardSave(tree_of(step)), ocp.args.JsonSave({"position": step})
        manager.save(step, args=ocp.args.Composite(state=state, position=position))
        manager.wait_until_finished()
        return look(root, handlers, period)


def kills(root, handlers, keep, period, rounds, seed):
    chance, told = random.Random(seed), []
    for _ in range(rounds):
        read, started = os.pipe()
        child = Child(train, root, handlers, keep, period, chance.random(), started)
        os.close(started)
        os.read(read, 1)
        time.sleep(chance.uniform(0.02, 1.2))
        died = child.ended()
        if not died:
            child.kill()
        wrong = died or os.read(read, 8) != b""
        os.close(read)
        seen = Child(look, root, handlers, period).result()
        told.append({"wrong": wrong, **seen.get("result", {"failed": seen})})
    return {"rounds": told, "settled": Child(settle, root, handlers, keep, period).result()}


def save_sharded(root):
    with pccheck_orbax.CheckpointManager(root) as manager:
        manager.save(3, args=ocp.args.StandardSave(sharded(3, jax.devices())[1]))
    return len(jax.devices())


def mesh_of_eight(root):
    """Saved on eight devices; read by a stock manager on one and on three, its structure and all."""
    saved = Child(save_sharded, root, devices=8).result()
    return {"saved": saved, "readers": [Child(alone, root, "ours", devices=n).result() for n in (1, 3)]}


# -- two processes --------------------------------------------------------------------------------------------------


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def sharded(step, devices):
    """The state of a step, over all devices there are: one array split, one partly, one copied; and host values."""
    mesh = jax.sharding.Mesh(np.array(devices), ("d",))
    full = {"split": np.arange(24 * 8, dtype=np.float32).reshape(24, 8) + step, "copied": np.arange(5) * step}
    specs = {"split": jax.sharding.PartitionSpec("d"), "copied": jax.sharding.PartitionSpec()}

    def place(name):
        sharding = jax.sharding.NamedSharding(mesh, specs[name])
        return jax.make_array_from_callback(full[name].shape, sharding, lambda index: full[name][index])

    return full, {name: place(name) for name in full} | {"step": step}


def exact(step, restored, devices):
    full, _ = sharded(step, devices)
    for name, want in full.items():
        for shard in restored[name].addressable_shards:
            if not np.array_equal(np.asarray(shard.data), want[shard.index]):
                return False
    return int(restored["step"]) == step


def member(root, handlers, port, index, saves, seed, timeout_s, absent, ready):
    """One of two processes: resume (resharded as it falls), save under random delays, tell what was seen."""
    jax.distributed.initialize(
        f"127.0.0.1:{port}", 2, index, initialization_timeout=60, heartbeat_timeout_seconds=HEARTBEAT_S
    )
    chance = random.Random(f"{seed} {index}")
    wait = ocp.AsyncOptions(timeout_secs=timeout_s, post_finalization_callback=lambda: time.sleep(chance.random() / 50))
    keep = [cms.LatestN(2), cms.EveryNSteps(20)]
    if seed % 3 == 0:  # one that asks the clock, which differs between processes: the first step, which is kept anyway
        keep.append(cms.EveryNSeconds(10**6))
    options = ocp.CheckpointManagerOptions(preservation_policy=cms.AnyPreservationPolicy(keep), async_options=wait)
    manager = pccheck_orbax.CheckpointManager(
        root, options=options, in_flight=IN_FLIGHT, handler_registry=HANDLERS[handlers][0]
    )
    devices, latest = jax.devices(), manager.latest_step()
    for step in manager.all_steps():
        like = sharded(step, devices)[1]
        if not exact(step, manager.restore(step, args=ocp.args.StandardRestore(like)), devices):
            raise AssertionError(f"step {step} is not what was saved")
    first = 0 if latest is None else latest + 1
    os.write(ready, b"!")
    for step in range(first, first + saves):
        if absent == index and step == first + 4:
            time.sleep(2 * LIMIT_S)  # it lives, and never comes to save again
        manager.save(step, args=ocp.args.StandardSave(sharded(step, devices)[1]))
        time.sleep(chance.random() / 50)
    manager.close()
    return {"devices": len(devices), "resumed": latest, "steps": manager.all_steps()}


def alone(root, handlers):
    """What a stock manager shows in one process with as many devices, and what of it is not exact."""
    with ocp.CheckpointManager(root, handler_registry=HANDLERS[handlers][1]()) as stock:
        steps, bad = list(stock.all_steps()), []
        for step in steps:
            args = ocp.args.StandardRestore(sharded(step, jax.devices())[1])
            if not exact(step, stock.restore(step, args=args), jax.devices()):
                bad.append(step)
    slots = {p.name: len(list(p.glob("slot-*.pcc"))) for p in (Path(root) / ".pccheck" / "default").glob("*")}
    return {"devices": len(jax.devices()), "steps": steps, "bad": bad, "slots": slots}


def pair(root, handlers, saves, seed, timeout_s, kill=None, absent=None, log=None):
    """Two processes with two devices each; `kill` names one that is killed while both save, `absent` one that idles."""
    port, ends = free_port(), []
    members = []
    for index in range(2):
        read, write = os.pipe()
        members.append(
            Child(member, root, handlers, port, index, saves, seed, timeout_s, absent, write, devices=2, log=log)
        )
        os.close(write)
        ends.append(read)
    for read in ends:
        os.read(read, 1)  # nothing comes from one that died
        os.close(read)
    begun = time.monotonic()
    if kill is not None:
        time.sleep(random.Random(seed).uniform(0.05, 1.0))
        members[kill].kill()
    told = [m.result() for index, m in enumerate(members) if index not in (kill, absent)]
    if absent is not None:
        members[absent].kill()
    return {"members": told, "seconds": time.monotonic() - begun}


def processes(root, handlers, rounds, timeout_s, saves, log=None):
    """Pairs as `rounds` tells them, on one root, each followed by readers with one and three devices."""
    told = []
    for seed, each in enumerate(rounds):
        after = pair(root, handlers, 10**6 if each else saves, seed, timeout_s, log=log, **each)
        readers = [Child(alone, root, handlers, devices=n, log=log).result() for n in (1, 3)]
        told.append({**after, "readers": readers})
    return told


if __name__ == "__main__":
    print(json.dumps(globals()[sys.argv[1]](**json.loads(sys.argv[2]))))
