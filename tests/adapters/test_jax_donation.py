"""Steps that donate what is being saved: the saved values are those of the call to save(), whatever happens after."""

from __future__ import annotations

import ctypes
import gc
import threading

import numpy as np
import pytest

jax = pytest.importorskip("jax")

import jax.numpy as jnp  # noqa: E402
from jax.experimental.layout import Format, Layout  # noqa: E402
from jax.sharding import SingleDeviceSharding  # noqa: E402
from pccheck_jax import JaxKind, arrays, devices, kind  # noqa: E402

import pccheck  # noqa: E402
from pccheck import holding  # noqa: E402
from pccheck.devices import Run  # noqa: E402
from pccheck.errors import UnsupportedLeafError, UsageError  # noqa: E402
from pccheck.leaves import DeviceBytes  # noqa: E402
from pccheck.state.kinds import kind_of  # noqa: E402
from pccheck.state.planner import Planner  # noqa: E402
from tests.adapters.jax_trees import bits, mesh, ramp, ready, spread  # noqa: E402

MIB = 1 << 20


step_of = jax.jit(lambda tree: jax.tree.map(lambda x: x + 1, tree), donate_argnums=0)


def state_of(number, *, sharded=False):
    """Give a state of several chunks, every element of which is the same number."""
    made = {
        "w": jnp.full((3 * MIB // 4,), number, jnp.float32), "half": jnp.full((MIB // 4, 3), number, jnp.bfloat16),
        "small": [jnp.full((n,), number, jnp.int32) for n in range(1, 40)], "step": jnp.int32(number),
        "nibbles": jnp.full((1000,), number % 8, jnp.int4),
    }  # fmt: skip
    if sharded:
        where = mesh(2, 4)
        made["sharded"] = spread(jnp.full((64, 64), number, jnp.float32), where, "x", "y")
        made["replicated"] = spread(jnp.full((64, 64), number, jnp.float32), where)
    return made


def assert_uniform(state, number):
    for path, leaf in jax.tree_util.tree_leaves_with_path(state):
        host = np.asarray(leaf).astype(np.float64)
        wanted = number % 8 if "nibbles" in str(path) else number
        assert (host == wanted).all(), (path, number, host)


@pytest.fixture
def on_device(monkeypatch):
    """The memory of the CPU backend is read as that of an accelerator."""
    mine = JaxKind(as_device=True)
    monkeypatch.setitem(kind_of._named, "jax", mine)
    monkeypatch.setitem(kind_of._by_type, type(jnp.zeros(1)), mine)
    return mine


# -- on the CPU backend ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("snapshot", ["copy", "lazy", "auto"])
def test_the_next_step_may_donate_at_once(fast_path, snapshot, sharded):
    options = {"chunk_bytes": MIB, "keep": 30, "in_flight": 3, "snapshot": snapshot}
    with pccheck.Checkpointer(fast_path, **options) as ck:
        state = state_of(0, sharded=sharded)
        for step in range(8):
            ck.save(step, state)
            state = step_of(state)
        ck.wait(60)
        for step in range(8):
            assert_uniform(ck.restore(step, branch=False).state, step)


def test_what_is_prepared_keeps_its_memory_until_it_is_let_go():
    planner = Planner(kind_of, MIB)
    for number in range(3):  # planned anew, then by the same plan
        state = {k: v for k, v in state_of(number).items() if k != "nibbles"}
        before = [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(list(state.values()))]
        prepared = planner.prepare(state, step=number)
        stepped = ready(step_of(state))[0]
        assert not state["w"].is_deleted(), "an exported view makes XLA put the result elsewhere"
        places = zip(prepared.addresses, prepared.layout.pieces, strict=True)
        found = [ctypes.string_at(int(at), piece.length) for at, piece in places]
        assert found == before
        del prepared
        ready(step_of(state))
        assert state["w"].is_deleted(), "nothing is held any more"
        assert_uniform(stepped, number + 1)


@pytest.fixture(params=[True, False], ids=["native", "portable"])
def native(request, monkeypatch):
    """The extension holds arrays, or views of Python's do."""
    if request.param and not holding.NATIVE:
        pytest.skip("the native extension is not built")
    monkeypatch.setattr(holding, "NATIVE", request.param)
    return request.param


def memory(leaf, place):
    return ctypes.string_at(int(place), leaf.nbytes)


# Every dtype whose arrays are read in place: those below a byte are copied, float6 is known by name only.
IN_PLACE = sorted(set(arrays.DTYPES) - {n for n in arrays.DTYPES if n[-1:] in "1234" and "int" in n and n[-2] == "t"}
                  - {"float4_e2m1fn", "float6_e2m3fn", "float6_e3m2fn"})  # fmt: skip


@pytest.mark.parametrize("name", IN_PLACE)
def test_holding_is_what_makes_donation_harmless(native, name):
    """Without it, the memory is given away: this test fails when JAX changes what protects a buffer."""
    step = jax.jit(lambda x: jnp.flip(x), donate_argnums=0)
    with jax.enable_x64(name in ("float64", "int64", "uint64", "complex128")):
        for holds in (False, True):
            (leaf,) = ready(ramp(64, 64, dtype=arrays.DTYPES[name]))
            (held, places), before = kind.held_at([leaf], kind.fingerprint([leaf])), bits(leaf)
            assert places[0] == leaf.unsafe_buffer_pointer()
            if not holds:
                del held
            ready(step(leaf))
            assert leaf.is_deleted() is not holds
            if holds:
                assert memory(leaf, places[0]) == before[-1]
                del held
                ready(step(leaf))
                assert leaf.is_deleted()


def test_what_is_held_by_itself_is_held_as_well(native):
    step = jax.jit(lambda tree: jax.tree.map(jnp.flip, tree), donate_argnums=0)
    leaves = list(ready(*(ramp(64, 64, dtype=dtype) for dtype in (jnp.float32, jnp.bfloat16, jnp.bool_))))
    held = kind.hold(leaves)
    places, before = kind.addresses(leaves), list(map(bits, leaves))
    ready(step(leaves))
    assert [memory(leaf, place) for leaf, place in zip(leaves, places, strict=True)] == [b[-1] for b in before]
    del held
    ready(step(leaves))
    assert all(leaf.is_deleted() for leaf in leaves)


def test_leaves_are_held_only_while_they_are_those_of_the_plan(native):
    leaves = [ramp(8, 8), ramp(8, 8, dtype=jnp.bfloat16)]
    told = kind.fingerprint(leaves)
    assert kind.held_at([ramp(8, 8) + 1, leaves[1]], told) is not None
    assert kind.held_at([leaves[1], leaves[0]], told) is None
    assert kind.held_at([ramp(8, 9), leaves[1]], told) is None
    assert kind.held_at([jax.device_put(leaves[0], jax.devices()[1]), leaves[1]], told) is None


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_what_is_not_in_c_order_is_not_held(native, dtype):
    plain = ramp(4, 6, dtype=dtype)
    odd = jax.device_put(plain, Format(Layout((1, 0)), SingleDeviceSharding(jax.devices()[0])))
    for ask in (kind.hold, lambda leaves: kind.held_at(leaves, kind.fingerprint([plain]))):
        with pytest.raises(ValueError, match=r"C order|in place"):
            ask([odd])


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_a_deleted_leaf_is_named(tmp_path, native, dtype):
    with pccheck.Checkpointer(tmp_path) as ck:
        for step in range(3):
            state = {"a": ramp(64, dtype=dtype), "b": [ramp(64, dtype=dtype) for _ in range(3)]}
            if step == 2:
                state["b"][1].delete()
                with pytest.raises(UnsupportedLeafError, match=r"b/1.*deleted"):
                    ck.save(step, state)
                break
            ck.save(step, state).durable.result(60)
        assert ck.restore().step == 1


def test_changes_of_what_is_held_and_of_what_is_copied_are_both_seen(tmp_path, native):
    base = {
        "w": ramp(8, 8), "half": ramp(8, 8, dtype=jnp.bfloat16), "key": jax.random.key(1),
        "nibbles": jnp.full(5, 3, "int4"),
    }  # fmt: skip
    changes = [
        {"key": jax.random.key(2)}, {"key": jax.random.key(2, impl="rbg")}, {"nibbles": jnp.full(5, 2, "int4")},
        {"nibbles": jnp.full(5, 1, "int2")}, {"half": ramp(8, 8) + 1}, {"w": ramp(8, 8, dtype=jnp.bfloat16)},
        {"w": ramp(64)}, {"w": ramp(8, 8) + 2},
    ]  # fmt: skip
    with pccheck.Checkpointer(tmp_path, keep=len(changes) + 1) as ck:
        for step, change in enumerate([{}, *changes]):
            base = {**base, **change}
            ck.save(step, base).durable.result(60)
            restored = ck.restore(step, branch=False).state
            assert {k: bits(v) for k, v in restored.items()} == {k: bits(v) for k, v in base.items()}


def test_a_save_leaves_no_work_for_the_garbage_collector(native):
    """Objects that it looks after, of each leaf, set off collections of the whole program's objects."""
    leaves = {str(n): jnp.full((4,), n, jnp.bfloat16 if n % 2 else jnp.float32) for n in range(2000)}
    leaves["key"] = jax.random.key(0)
    planner = Planner(kind_of, MIB)
    planner.prepare(leaves, step=0)
    gc.collect()
    gc.disable()
    try:
        before = gc.get_count()[0]
        prepared = planner.prepare(leaves, step=1)
        made = gc.get_count()[0] - before
    finally:
        gc.enable()
    del prepared
    assert (made < 300) is native


def test_a_shard_is_held_of_an_array_over_several_devices():
    (leaf,) = ready(spread(ramp(8, 8), mesh(2, 2), "x", "y"))
    step = jax.jit(lambda x: x + 1, donate_argnums=0)
    assert kind.parts(leaf) == 4
    held = [kind.part(n).hold([leaf]) for n in range(4)]
    before = bits(leaf)
    ready(step(leaf))
    assert not leaf.is_deleted()
    assert bits(leaf) == before
    del held


def test_save_waits_for_what_is_still_being_computed(tmp_path):
    slow = jax.jit(lambda x: jax.lax.fori_loop(0, 30, lambda _, y: jnp.tanh(y @ y) + 1, x))
    with pccheck.Checkpointer(tmp_path, keep=3) as ck:
        x = jnp.ones((300, 300))
        for step in range(3):
            x = slow(x)
            ck.save(step, {"x": x})
        ck.wait(60)
        assert bits(ck.restore().state["x"]) == bits(x)


# -- on devices ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("snapshot", ["copy", "device", "lazy"])
def test_device_memory_is_captured_before_a_step_donates_it(fast_path, on_device, snapshot, sharded):
    state = state_of(0, sharded=sharded)
    assert isinstance(on_device.host_bytes(state["w"]), DeviceBytes)
    options = {"chunk_bytes": MIB, "keep": 30, "in_flight": 3, "snapshot": snapshot, "buffer_bytes": 4 * MIB}
    with pccheck.Checkpointer(fast_path, **options) as ck:
        for step in range(8):
            ck.save(step, state)
            if snapshot == "lazy":
                ck.fence(60)
            state = step_of(state)
        ck.wait(60)
        for step in range(8):
            assert_uniform(ck.restore(step, branch=False).state, step)


def test_a_deleted_leaf_on_a_device_is_an_error_in_save(fast_path, on_device):
    with pccheck.Checkpointer(fast_path, chunk_bytes=MIB, snapshot="lazy") as ck:
        ck.save(0, state_of(0)).durable.result(60)
        state = state_of(1)
        for leaf in jax.tree.leaves(state):
            leaf.delete()
        with pytest.raises(UnsupportedLeafError, match="deleted"):
            ck.save(1, state)
        assert_uniform(ck.restore().state, 0)


def test_a_deleted_source_is_a_clear_error():
    leaf = ramp(3 * MIB)
    source = devices.Source(leaf.addressable_data(0))
    capture = devices.device_of(leaf).begin()
    leaf.delete()
    buffer = np.zeros(MIB, np.uint8)
    with pytest.raises(UsageError, match=r"fence\(\)"):
        capture.copy(buffer.ctypes.data, MIB, [Run(source, 0, MIB, 0)])


@pytest.mark.parametrize("shape", [(5 * MIB + 3,), (7, 300_001), (3, 5, 7, 40_000), (1, 6 * MIB), (2, 3)])
@pytest.mark.parametrize("name", ["float32", "bfloat16", "int4", "complex64"])
def test_every_run_of_bytes_is_copied_exactly(shape, name):
    rng = np.random.default_rng(7)
    raw = rng.integers(0, 2, int(np.prod(shape)), dtype=np.uint8).reshape(shape)
    leaf = jax.device_put(raw).astype(name)
    host = np.asarray(leaf).reshape(-1).view(np.uint8)
    capture = devices.device_of(leaf).begin()
    buffer = np.full(9 * MIB, 77, np.uint8)
    for _ in range(6):
        first = int(rng.integers(0, host.size))
        length = int(rng.integers(1, min(host.size - first, 8 * MIB) + 1))
        place = int(rng.integers(0, buffer.size - length + 1))
        buffer[:] = 77
        ticket = capture.copy(buffer.ctypes.data, buffer.size, [Run(devices.Source(leaf), first, length, place)])
        assert ticket.wait(60)
        assert buffer[place : place + length].tobytes() == host[first : first + length].tobytes()
        assert (buffer[:place] == 77).all()
        assert (buffer[place + length :] == 77).all()
    assert capture.order(60)
    capture.end()
    capture.end()


def test_rows_of_a_shard_are_counted_from_their_first():
    leaf = ramp(3000, 1000)
    source = devices.Source(leaf, (1000, 2000))
    buffer = np.zeros(4000, np.uint8)
    assert devices.device_of(leaf).begin().copy(buffer.ctypes.data, 4000, [Run(source, 4000, 4000, 0)]).wait(60)
    assert buffer.tobytes() == np.asarray(leaf)[1001].tobytes()


def test_few_programs_are_compiled_for_a_large_leaf(fast_path, on_device):
    before = devices._sliced._cache_size()
    with pccheck.Checkpointer(fast_path, chunk_bytes=MIB) as ck:
        for step in range(3):
            ck.save(step, {"a": ramp(7 * MIB + step * 0), "b": jnp.zeros(3)}).durable.result(60)
    assert devices._sliced._cache_size() - before == 1


def test_a_large_leaf_is_never_read_whole(fast_path, on_device, monkeypatch):
    sizes = []
    copied = devices.JaxTicket._copy

    def spied(self, piece):
        sizes.append(piece.array.nbytes)
        copied(self, piece)

    monkeypatch.setattr(devices.JaxTicket, "_copy", spied)
    leaf = ramp(8 * MIB)
    with pccheck.Checkpointer(fast_path, chunk_bytes=MIB) as ck:
        ck.save(0, {"a": leaf, "b": jnp.ones((1000, 250))}).durable.result(60)
    assert max(sizes) <= devices.BLOCK_BYTES
    assert leaf._npy_value is None, "JAX keeps no host copy of it"


def test_shadows_are_other_memory_and_live_on():
    leaves = [ramp(1000), ramp(30, 30, dtype=jnp.bfloat16)]
    device = devices.device_of(leaves[0])
    assert device is devices.device_of(leaves[1])
    shadows = device.shadow([devices.Source(leaf) for leaf in leaves])
    before = list(map(bits, leaves))
    for leaf in leaves:
        ready(jax.jit(lambda x: x + 1, donate_argnums=0)(leaf))
        assert leaf.is_deleted()
    assert [bits(shadow.array) for shadow in shadows] == before


def test_no_shadow_without_room():
    class Full:
        platform, id = "gpu", 0

        def memory_stats(self):
            return {"bytes_limit": 10_000, "bytes_in_use": 9_000}

    assert devices.JaxDevice(Full()).shadow([devices.Source(ramp(1000))]) is None
    assert devices.JaxDevice(Full()).shadow([devices.Source(ramp(10))]) is not None


def test_a_copy_that_is_not_ready_is_not_waited_for_longer_than_told():
    slow = jax.jit(lambda x: jax.lax.fori_loop(0, 60, lambda _, y: jnp.tanh(y @ y) + 1, x))
    x = jnp.ones((400, 400))
    ready(slow(x))
    leaf = slow(x)
    capture = devices.device_of(leaf).begin()
    buffer = np.zeros(leaf.nbytes, np.uint8)
    ticket = capture.copy(buffer.ctypes.data, buffer.size, [Run(devices.Source(leaf), 0, buffer.size, 0)])
    while not ticket.wait(0.0):
        assert not ticket.is_made
    assert buffer.tobytes() == np.asarray(leaf).tobytes()
    assert ticket.is_made
    assert ticket.wait(0.0)


def test_orders_of_other_threads_wait_for_the_same_copies():
    leaf = ramp(MIB)
    capture = devices.device_of(leaf).begin()
    buffer = np.zeros(leaf.nbytes, np.uint8)
    ticket = capture.copy(buffer.ctypes.data, buffer.size, [Run(devices.Source(leaf), 0, buffer.size, 0)])
    done = []
    threads = [threading.Thread(target=lambda: done.append(capture.order(60))) for _ in range(4)]
    for thread in threads:
        thread.start()
    assert ticket.wait(60)
    for thread in threads:
        thread.join(60)
    assert done == [True] * 4
    assert buffer.tobytes() == np.asarray(leaf).tobytes()


def test_what_fails_on_the_device_is_raised_by_every_wait():
    class Broken:
        def is_deleted(self):
            return False

        def is_ready(self):
            return True

        def __array__(self, *args, **named):
            raise RuntimeError("the device fell off the bus")

    ticket = devices.JaxTicket([devices._Piece(Broken(), 0, 8, 0)])
    for _ in range(2):
        with pytest.raises(RuntimeError, match="bus"):
            ticket.wait(1)
    assert ticket.is_made


def test_tied_arrays_on_a_device_are_stored_once(fast_path, on_device):
    leaf = ramp(1000)
    state = {"a": leaf, "b": leaf, "keys": jax.random.key(1), "nothing": jnp.zeros((0, 2))}
    with pccheck.Checkpointer(fast_path, snapshot="device") as ck:
        ck.save(0, state).durable.result(60)
        restored = ck.restore(like=state).state
    assert restored["a"] is restored["b"]
    assert {k: bits(v) for k, v in restored.items()} == {k: bits(v) for k, v in state.items()}
