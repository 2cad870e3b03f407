"""One process of a JAX job for tests: `jax_rank_worker.py SCENE FOLDER RANK WORLD PORT DEVICES [PLACE]`.

Prints what it did, line by line. PLACE is "service" (JaxCoordinator) or "folder" (SharedDirectory).
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

SCENE, FOLDER, RANK, WORLD, PORT, DEVICES = sys.argv[1], Path(sys.argv[2]), *map(int, sys.argv[3:7])
PLACE = sys.argv[7] if len(sys.argv) > 7 else "service"
os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={DEVICES}"
os.environ["JAX_PLATFORMS"] = "cpu"

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
from jax.sharding import Mesh, NamedSharding, PartitionSpec  # noqa: E402

import pccheck  # noqa: E402
from pccheck.errors import PccheckError  # noqa: E402


def say(*words: object) -> None:
    print(*words, flush=True)


def spread(host, where, *spec):
    """Give an array over all devices of all processes, of a NumPy array or keys that each of them has."""
    sharding = NamedSharding(where, PartitionSpec(*spec))
    return jax.make_array_from_callback(host.shape, sharding, lambda index: host[index])


def state_of(where, number):
    """Give a state whose arrays lie over a mesh of axes x and y in all ways that there are."""
    ramp = (np.arange(48 * 8) + number).reshape(48, 8)
    return {
        "xy": spread(ramp.astype(np.float32), where, "x", "y"),
        "x": spread(ramp.astype(jnp.bfloat16), where, "x"),
        "y": spread(ramp.astype(np.int32), where, None, "y"),
        "both": spread(ramp.astype(np.float16), where, ("x", "y")),
        "all": spread((ramp % 8).astype(jnp.int4), where),
        "row": spread(ramp[:1].astype(np.float32), where, None, "y"),
        "scalar": spread(np.float32(number).reshape(()), where),
        "nothing": spread(np.zeros((0, 8), np.float32), where),
        "keys": spread_keys(where, number),
        "mine": {"array": jnp.full((5,), number, jnp.float32), "key": jax.random.key(number), "step": number},
    }


def spread_keys(where, number):
    keys = jax.random.split(jax.random.key(number), 48)
    sharding = NamedSharding(where, PartitionSpec("x"))
    data = np.asarray(jax.random.key_data(keys))
    made = [
        jax.device_put(jax.random.wrap_key_data(data[index[0]]), device)
        for device, index in sharding.addressable_devices_indices_map((48,)).items()
    ]
    return jax.make_array_from_single_device_arrays((48,), sharding, made, dtype=keys.dtype)


def mesh_of(devices):
    columns = 2 if len(devices) % 2 == 0 else 1
    return Mesh(np.array(devices).reshape(-1, columns), ("x", "y"))


def bits(leaf):
    """Give the parts of a leaf that are here."""
    if not isinstance(leaf, jax.Array):
        return leaf
    if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        leaf = jax.random.key_data(leaf)
    return leaf.dtype, leaf.shape, [(str(s.index), np.asarray(s.data).tobytes()) for s in leaf.addressable_shards]


def same(a, b) -> bool:
    one, two = jax.tree.leaves(a), jax.tree.leaves(b)
    return len(one) == len(two) and all(bits(x) == bits(y) for x, y in zip(one, two, strict=True))


def coordinator():
    if PLACE == "folder":
        return pccheck.SharedDirectory(FOLDER / "agree", rank=RANK, world=WORLD)
    from pccheck_jax import JaxCoordinator

    return JaxCoordinator(timeout_s=20)


def checkpointer(**options):
    shared = {} if WORLD == 1 else {"coordinator": coordinator(), "agree_timeout_s": 40}
    return pccheck.Checkpointer(FOLDER / "ckpt", chunk_bytes=1 << 16, **shared, **options)


def save(where) -> None:
    """Steps that donate what was just saved, several saves in flight."""
    step_of = jax.jit(lambda tree: jax.tree.map(lambda x: x + 1, tree), donate_argnums=0)
    donated = {"a": state_of(where, 0)["xy"], "b": state_of(where, 0)["y"]}
    with checkpointer(in_flight=2, keep=2) as ck:
        for number in range(6):
            ck.save(number, {**state_of(where, number), "donated": donated})
            donated = step_of(donated)
        ck.wait(60)
        say("saved", ck.latest())


def restore(where) -> None:
    with checkpointer() as ck:
        like = {**state_of(where, 1), "donated": {"a": state_of(where, 0)["xy"], "b": state_of(where, 0)["y"]}}
        like["mine"]["step"] = 0
        restored = ck.restore(like=like)
        number = restored.step
        wanted = {
            **state_of(where, number),
            "donated": {k: state_of(where, number)[n] for k, n in (("a", "xy"), ("b", "y"))},
        }
        say("restored", number, same(restored.state, wanted))
        shardings = [x.sharding for x in jax.tree.leaves(like) if isinstance(x, jax.Array)]
        say("placed", shardings == [x.sharding for x in jax.tree.leaves(restored.state) if isinstance(x, jax.Array)])


def sessions(where) -> None:
    """Coordinators one after the other in one life of the service: none believes what an earlier one left."""
    from pccheck_jax import JaxCoordinator

    from pccheck.errors import RanksError

    client = jax._src.distributed.global_state.client
    for life in range(3):
        ranks = JaxCoordinator(name="life", timeout_s=20)
        wanted = [f"{life}/{rank}".encode() + b"\0\xff" for rank in range(WORLD)]
        say("none of an earlier life", all(blob in (None, ask) for blob, ask in zip(ranks.read(), wanted, strict=True)))
        ranks.publish(wanted[RANK])
        for _ in range(2000):
            seen = ranks.read()
            if seen == wanted:
                break
            assert all(blob in (None, ask) for blob, ask in zip(seen, wanted, strict=True)), seen
        say("heard", seen == wanted)
        client.wait_at_barrier(f"heard {life}", 20_000)
        ranks.publish(wanted[RANK] + b"!")
        client.wait_at_barrier(f"life {life}", 20_000)
        say("replaced", ranks.read() == [blob + b"!" for blob in wanted])
        client.wait_at_barrier(f"read {life}", 20_000)
        if life != 1:  # the second one ends without a word
            ranks.close()
        client.wait_at_barrier(f"closed {life}", 20_000)
    say("left", [k for k, _ in client.key_value_dir_get_bytes("pccheck/life/") if "session" not in k] == [])
    client.wait_at_barrier("looked", 20_000)
    old = JaxCoordinator(name="twice", timeout_s=20)
    old.publish(b"old")
    while None in old.read():
        pass
    client.wait_at_barrier("both", 20_000)
    if RANK == 0:
        JaxCoordinator(name="twice", timeout_s=20).publish(b"new")
    client.wait_at_barrier("again", 20_000)
    try:
        old.read()
    except RanksError as error:
        say("replaced coordinator", "must end" in str(error))
    client.wait_at_barrier("end", 20_000)


def lost(where) -> None:
    """Process 1 goes on talking to a service that process 0 took along: an error within the time-out, no hang."""
    from pccheck_jax import JaxCoordinator

    ranks = JaxCoordinator(timeout_s=3)
    ranks.publish(b"here")
    while None in ranks.read():
        pass
    say("ready")
    jax._src.distributed.global_state.client.wait_at_barrier("ready", 20_000)
    if RANK == 0:
        os._exit(0)
    for _ in range(1000):
        try:
            ranks.publish(b"again")
        except PccheckError as error:
            say("lost", type(error).__name__)
            os._exit(0)


def main() -> int:
    if WORLD > 1:
        jax.distributed.initialize(f"127.0.0.1:{PORT}", WORLD, RANK, initialization_timeout=60)
    where = mesh_of(jax.devices())
    say("devices", len(jax.local_devices()), "of", len(jax.devices()))
    try:
        {"save": save, "restore": restore, "sessions": sessions, "lost": lost}[SCENE](where)
    except PccheckError as error:
        say("failed", type(error).__name__, error)
        return 3
    if WORLD > 1:
        jax.distributed.shutdown()
    return 0


if __name__ == "__main__":
    sys.exit(main())
