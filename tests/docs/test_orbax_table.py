"""Each cell of the table "Leaf by leaf" in docs/orbax.md is what happens: in a stock manager, and in pccheck's."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

jax = pytest.importorskip("jax")
ocp = pytest.importorskip("orbax.checkpoint")
nnx = pytest.importorskip("flax.nnx")
optax = pytest.importorskip("optax")

import absl.logging  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import pccheck_orbax  # noqa: E402
from flax import struct  # noqa: E402
from jax.sharding import SingleDeviceSharding  # noqa: E402

from pccheck.errors import UnsupportedLeafError  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")  # Orbax warns of itself
absl.logging.set_verbosity(absl.logging.FATAL)  # and logs what it raises

PAGE = (Path(__file__).parents[2] / "docs" / "orbax.md").read_text()
TABLE = re.findall(r"^\| (.+?) \| (.+?) \| (.+?) \|$", PAGE.partition("## Leaf by leaf")[2], re.MULTILINE)
ROWS = {saved: {"stock": theirs, "ours": ours} for saved, theirs, ours in TABLE if saved not in ("saved", "---")}
MANAGERS = {"stock": ocp.CheckpointManager, "ours": pccheck_orbax.CheckpointManager}
FLOATS = ["float8_e4m3fn", "float8_e4m3b11fnuz", "float8_e5m2", "float8_e8m0fnu", "float4_e2m1fn"]


class Pair(NamedTuple):
    a: Any
    b: Any


@struct.dataclass
class Mine:
    a: Any
    note: str = struct.field(pytree_node=False, default="static")


@dataclasses.dataclass
class Plain:
    a: Any


def of(*names):
    return [jnp.ones(3).astype(name) for name in names]


def examples():
    """Values for the rows that one device is enough for, by what the first cell begins with."""
    linear = nnx.Linear(2, 2, rngs=nnx.Rngs(0))
    pinned = SingleDeviceSharding(jax.devices()[0], memory_kind="pinned_host")
    return {
        "float32,": of("float32", "float16", "bfloat16", "int2", "int4", "bool", "complex64", *FLOATS),
        "uint2,": of("uint2", "uint4"),
        "arrays without": [jnp.zeros((0, 3)), np.zeros((2, 0))],
        "typed keys": [
            jax.random.key(3),
            jax.random.split(jax.random.key(3, impl="rbg"), (2, 2)),
            jax.random.PRNGKey(3),
        ],
        "an array that is weakly": [jnp.asarray(2.5)],
        "an array in `pinned": [jax.device_put(jnp.ones(3), pinned)],
        "NumPy arrays, without": [np.arange(4.0), np.array(2.0)],
        "NumPy arrays of text": [np.array(["a", "bc"]), np.array(["2020-01-01"], "M8[D]"), np.zeros(2, [("a", "f4")])],
        "NumPy arrays of the other": [np.arange(3, dtype=np.dtype("f4").newbyteorder())],
        "NumPy arrays of objects": [np.array([object()])],
        "`np.float32": [np.float32(1.5), np.int64(5), np.bool_(True)],
        "`int`,": [3, 1.5, True],
        "an `int` of": [1 << 80],
        "`complex`,": [1 + 2j, "x", b"x"],
        "`None`,": [None, {}, [], ()],
        "a dict with `int`": [{0: 1, 7: 2}],
        "a dict with keys": [{"": 3, "a.b": 1, "a/b": 2}],
        "a tuple": [(1, 2)],
        "a namedtuple,": [Pair(1, 2), Mine(1)],
        "`optax.Empty": [optax.EmptyState()],
        "`nnx.State`,": [nnx.state(linear), linear],
        "a dataclass that": [Plain(1)],
        "a set,": [{1, 2}, object()],
    }


def is_same(got, value):
    if type(got) is not type(value):
        return False
    if not hasattr(value, "dtype"):
        return got == value
    if got.dtype != value.dtype or got.shape != value.shape:
        return False
    if jnp.issubdtype(value.dtype, jax.dtypes.prng_key):
        return bool((jax.random.key_data(got) == jax.random.key_data(value)).all())
    return np.asarray(got).tobytes() == np.asarray(value).tobytes() and weak(got) == weak(value)


def weak(value):
    return getattr(value, "weak_type", False)


def by_field(value):
    return {"a": 1, "b": 2} if isinstance(value, Pair) else {"a": 1}


BACK = {
    "the same": is_same,
    "not weakly typed": lambda got, value: got == value and weak(value) and not weak(got),
    "in device memory": lambda got, value: got.sharding.memory_kind != value.sharding.memory_kind,
    "in the machine's byte order": lambda got, value: (got == value).all() and got.dtype.isnative,
    "arrays without axes": lambda got, value: type(got) is np.ndarray and got.shape == () and got == value,
    "its keys are text": lambda got, value: got == {str(key): child for key, child in value.items()},
    "a list": lambda got, value: got == list(value),
    "a dict by field": lambda got, value: got == by_field(value),
    "`None`": lambda got, value: got is None,
    "dicts by name": lambda got, value: type(got) is dict and type(got["kernel"]) is dict and "value" in got["bias"],
}
FAILURES = {"`save()` fails", "`save()` fails, and names the leaf", "the save fails, later"}
SPREAD = {"in its sharding", "on the default device", "on that device", "`restore()` fails"}


def row_of(begins):
    (found,) = [row for row in ROWS if row.startswith(begins)]
    return found


def test_every_row_has_examples_and_every_cell_a_check():
    rows = {row_of(begins) for begins in examples()}
    assert {row for row in ROWS if row not in rows} == set(SPREAD_ROWS)
    assert {cell for row in rows for cell in ROWS[row].values()} == {*BACK, *FAILURES}
    assert {cell for row in SPREAD_ROWS for cell in ROWS[row].values()} == SPREAD


@pytest.fixture(scope="module", params=MANAGERS)
def restored(request, tmp_path_factory):
    """Who saves, and what came back of all values that can be saved, in one step."""
    who = request.param
    tree = {
        begins: {f"n{i}": value for i, value in enumerate(values)}
        for begins, values in examples().items()
        if ROWS[row_of(begins)][who] not in FAILURES
    }
    with MANAGERS[who](tmp_path_factory.mktemp(who)) as manager:
        manager.save(1, args=ocp.args.StandardSave(tree))
        return who, manager.restore(1)


def test_what_comes_back_is_what_the_table_says(restored):
    who, got = restored
    assert got
    for begins, back in got.items():
        cell, values = ROWS[row_of(begins)][who], examples()[begins]
        for i, value in enumerate(values):
            assert BACK[cell](back[f"n{i}"], value), (row_of(begins), cell, value, back[f"n{i}"])


@pytest.mark.parametrize("who", MANAGERS)
def test_what_fails_fails_when_the_table_says(tmp_path, who):
    failing = {begins: values for begins, values in examples().items() if ROWS[row_of(begins)][who] in FAILURES}
    assert failing
    for begins, values in failing.items():
        cell = ROWS[row_of(begins)][who]
        for i, value in enumerate(values):
            manager = MANAGERS[who](tmp_path / f"{begins[:9].strip('`').replace(' ', '-')}{i}")
            saving = ocp.args.StandardSave({"deep": {"bad": value}, "fine": jnp.ones(2)})
            if cell == "the save fails, later":
                assert manager.save(1, args=saving), (begins, value)
                with pytest.raises(ValueError):
                    manager.wait_until_finished()
                continue
            with pytest.raises(ValueError if who == "stock" else UnsupportedLeafError, match="bad"):
                manager.save(1, args=saving)


SPREAD_ROWS = {
    "an array over several devices": "many",
    "the same, where these devices are not there": "fewer",
    "an array on one device that is not the default one": "other",
}
PROGRAM = """
import json, os, sys
root, devices, saves = sys.argv[1], int(sys.argv[2]), sys.argv[3] == "save"
os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={devices}"
os.environ["JAX_PLATFORMS"] = "cpu"
import jax, jax.numpy as jnp, orbax.checkpoint as ocp, pccheck_orbax
found = {}
for who, cls in (("stock", ocp.CheckpointManager), ("ours", pccheck_orbax.CheckpointManager)):
    found[who] = {}
    for name in ("spread", "other"):
        with cls(f"{root}/{who}/{name}") as manager:
            if saves:
                mesh = jax.make_mesh((devices,), ("x",))
                on = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("x"))
                value = jax.device_put(jnp.arange(8.0), on if name == "spread" else jax.devices()[3])
                manager.save(1, args=ocp.args.StandardSave({"a": value}))
                manager.wait_until_finished()
            try:
                got = manager.restore(1, args=ocp.args.StandardRestore())["a"]
            except ValueError:
                found[who][name] = "`restore()` fails"
                continue
            assert got.tolist() == list(range(8))
            where = [device.id for device in got.sharding.device_set]
            found[who][name] = (
                "in its sharding" if len(where) > 1 and got.sharding == value.sharding else
                "on the default device" if where == [0] else "on that device" if where == [3] else str(got.sharding)
            )
print(json.dumps(found))
"""


def test_devices_are_those_that_the_table_says(tmp_path):
    def run(devices, what):
        command = [sys.executable, "-W", "ignore", "-c", PROGRAM, str(tmp_path), str(devices), what]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=os.environ)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout.splitlines()[-1])

    on_four, on_one = run(4, "save"), run(1, "restore")
    found = {
        "many": {who: on_four[who]["spread"] for who in MANAGERS},
        "fewer": {who: on_one[who]["spread"] for who in MANAGERS},
        "other": {who: on_four[who]["other"] for who in MANAGERS},
    }
    assert {row: found[name] for row, name in SPREAD_ROWS.items()} == {row: ROWS[row] for row in SPREAD_ROWS}
