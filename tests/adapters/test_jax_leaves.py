"""JAX's arrays and keys as leaves: every dtype and form comes back bit by bit, with JAX, and without it as NumPy."""

from __future__ import annotations

import gc
import subprocess
import sys
import weakref

import ml_dtypes
import numpy as np
import pytest

jax = pytest.importorskip("jax")

import jax.numpy as jnp  # noqa: E402
from jax.experimental.layout import Format, Layout  # noqa: E402
from jax.sharding import SingleDeviceSharding  # noqa: E402
from pccheck_jax import JaxKind, arrays, kind  # noqa: E402

import pccheck  # noqa: E402
from pccheck.errors import FormatError, MismatchError, UnsupportedLeafError  # noqa: E402
from pccheck.leaves import HostBytes, LeafSpec  # noqa: E402
from tests.adapters.jax_trees import bits, ramp, through  # noqa: E402

# float6 is known by name only: no backend makes such arrays.
NAMES = sorted(set(arrays.DTYPES) - {"float6_e2m3fn", "float6_e3m2fn"})
SUB_BYTE = {"int1", "uint1", "int2", "uint2", "int4", "uint4", "float4_e2m1fn"}
WIDE = {"float64", "int64", "uint64", "complex128"}


def array_of(name, shape=(3, 5)):
    """Give an array whose elements differ as far as the dtype goes."""
    count = int(np.prod(shape))
    dtype = arrays.DTYPES[name]
    if name in SUB_BYTE:
        host = (np.arange(count) % 2).astype(dtype)
    else:
        host = np.frombuffer(np.arange(count * dtype.itemsize, dtype=np.uint8).tobytes(), np.uint8)
        host = host % 2 == 1 if name == "bool" else host.view(dtype)
    with jax.enable_x64(name in WIDE):
        return jax.device_put(host[:count].reshape(shape))


@pytest.mark.parametrize("name", NAMES)
def test_every_dtype_comes_back(tmp_path, name):
    state = {"a": array_of(name), "scalar": array_of(name, ()), "empty": array_of(name, (0, 3))}
    assert state["a"].dtype.name == name
    for restored in (through(tmp_path / "plain", state), through(tmp_path / "like", state, like=state)):
        assert all(isinstance(leaf, jax.Array) for leaf in restored.values())
        assert {k: bits(v) for k, v in restored.items()} == {k: bits(v) for k, v in state.items()}


def test_every_dtype_is_read_without_jax(tmp_path):
    with pccheck.Checkpointer(tmp_path / "ckpt") as ck:
        ck.save(1, {name: array_of(name) for name in NAMES} | {"key": jax.random.key(7), "keys": jax.random.split(
            jax.random.key(7, impl="rbg"), 3)}).durable.result(60)  # fmt: skip
    np.savez(tmp_path / "seen.npz", **{n: np.asarray(array_of(n)).reshape(-1).view(np.uint8) for n in NAMES})
    program = f"""
import sys
class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("jax", "jaxlib", "flax"):
            raise ImportError(f"{{name}} is not installed")
sys.meta_path.insert(0, Blocked())
import numpy as np, pccheck
with pccheck.Checkpointer({str(tmp_path / "ckpt")!r}) as ck:
    state = ck.restore().state
seen = np.load({str(tmp_path / "seen.npz")!r})
for name in seen:
    leaf = state[name]
    assert type(leaf) is np.ndarray and leaf.dtype.name == name and leaf.shape == (3, 5), (name, leaf)
    assert leaf.tobytes() == seen[name].tobytes(), name
assert state["key"].dtype == np.uint32 and state["key"].tolist() == [0, 7], state["key"]
assert state["keys"].shape == (3, 4)
assert not [m for m in sys.modules if m.split(".")[0] in ("jax", "jaxlib")]
print("all", len(seen))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert done.stdout.strip() == f"all {len(NAMES)}", done.stderr


@pytest.mark.parametrize("impl", ["threefry2x32", "rbg", "unsafe_rbg"])
def test_keys_keep_their_impl(tmp_path, impl):
    state = {"one": jax.random.key(3, impl=impl), "many": jax.random.split(jax.random.key(4, impl=impl), (2, 3)),
             "raw": jax.random.PRNGKey(5)}  # fmt: skip
    abstract = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), state)
    for like in ({}, {"like": state}, {"like": abstract}):
        restored = through(tmp_path / str(len(list(tmp_path.iterdir()))), state, **like)
        assert {k: bits(v) for k, v in restored.items()} == {k: bits(v) for k, v in state.items()}
        assert bits(jax.random.normal(restored["one"], (3,))) == bits(jax.random.normal(state["one"], (3,)))


def test_a_key_is_no_key_of_another_impl_and_no_array(tmp_path):
    state = {"k": jax.random.key(3)}
    for like, found in (
        (jax.random.key(3, impl="rbg"), "shape"),
        (jax.random.key_data(state["k"]), "dtype"),
        (jnp.zeros(2), "dtype"),
    ):
        with pytest.raises(MismatchError, match="k") as error:
            through(tmp_path / found / str(like.dtype), state, like={"k": like})
        assert error.value.mismatches[0].problem == found
    with pytest.raises(MismatchError):
        through(tmp_path / "raw", {"k": jnp.zeros(2, jnp.uint32)}, like=state)
    rbg = {"k": jax.random.key(3, impl="rbg")}
    with pytest.raises(MismatchError) as error:
        through(tmp_path / "other", rbg, like={"k": jax.random.key(3, impl="unsafe_rbg")})
    (found,) = error.value.mismatches
    assert (found.problem, found.expected, found.found) == ("dtype", "key<unsafe_rbg> (jax)", "key<rbg> (jax)")


def test_keys_whose_generator_is_not_known_here_are_refused():
    spec = LeafSpec(kind="jax", dtype="key<zz>", shape=(2,), nbytes=8, extra={"impl": "zz", "bits": "uint32"})
    with pytest.raises(UnsupportedLeafError, match="zz"):
        kind.build(spec, memoryview(bytearray(8)))


def test_weak_types_stay_weak(tmp_path):
    state = {"int": jnp.asarray(5), "float": jnp.asarray(2.5), "many": jnp.full((3,), 1.5), "strong": jnp.float32(1)}
    assert [v.weak_type for v in state.values()] == [True, True, True, False]
    abstract = jax.eval_shape(lambda: {k: v + 0 for k, v in state.items()})
    for like in ({}, {"like": state}, {"like": abstract}):
        restored = through(tmp_path / str(len(list(tmp_path.iterdir()))), state, **like)
        assert {k: bits(v) for k, v in restored.items()} == {k: bits(v) for k, v in state.items()}
    strong = through(tmp_path / "s", state, like=jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), state))
    assert not any(leaf.weak_type for leaf in strong.values())


def test_64_bits_are_kept_without_jax_enable_x64(tmp_path):
    assert not jax.config.jax_enable_x64
    wide = {name: array_of(name) for name in sorted(WIDE)}
    restored = through(tmp_path, wide)
    assert {k: bits(v) for k, v in restored.items()} == {k: bits(v) for k, v in wide.items()}


@pytest.mark.parametrize("memory", ["device", "pinned_host", "unpinned_host"])
def test_memory_kinds(tmp_path, memory):
    where = SingleDeviceSharding(jax.devices()[2], memory_kind=memory)
    state = {"a": jax.device_put(ramp(4, 5), where)}
    restored = through(tmp_path / "like", state, like=state)["a"]
    assert restored.sharding == where
    assert bits(restored) == bits(state["a"])
    assert through(tmp_path / "plain", state)["a"].sharding.memory_kind == jax.devices()[0].default_memory().kind
    abstract = {"a": jax.ShapeDtypeStruct((4, 5), jnp.float32, sharding=where)}
    assert through(tmp_path / "abstract", state, like=abstract)["a"].sharding == where


def test_committed_and_uncommitted_arrays_stay_so(tmp_path):
    state = {"free": ramp(3), "bound": jax.device_put(ramp(3), jax.devices()[3])}
    assert (state["free"].committed, state["bound"].committed) == (False, True)
    restored = through(tmp_path, state, like=state)
    assert (restored["free"].committed, restored["bound"].committed) == (False, True)
    assert restored["bound"].devices() == {jax.devices()[3]}
    assert not through(tmp_path / "plain", state)["bound"].committed  # goes wherever it is used


def test_an_odd_layout_is_stored_in_c_order(tmp_path):
    odd = jax.device_put(ramp(3, 4), Format(Layout((1, 0)), SingleDeviceSharding(jax.devices()[0])))
    assert not np.asarray(odd).flags.c_contiguous
    assert bits(through(tmp_path, {"a": odd})["a"]) == bits(ramp(3, 4))


def test_a_plan_does_not_outlive_the_layout(tmp_path):
    """The layout is no part of the fingerprint: what cannot be read in place any more is found when it is held."""
    odd = jax.device_put(ramp(3, 4), Format(Layout((1, 0)), SingleDeviceSharding(jax.devices()[0])))
    for dtype in (jnp.float32, jnp.bfloat16):
        one, two = ramp(3, 4, dtype=dtype), odd.astype(dtype)
        two = jax.device_put(two, Format(Layout((1, 0)), SingleDeviceSharding(jax.devices()[0])))
        with pccheck.Checkpointer(tmp_path / dtype.__name__, keep=3) as ck:
            for step, leaf in enumerate((one, two, one, two)):
                ck.save(step, {"a": leaf}).durable.result(60)
                assert bits(ck.restore(like={"a": one}).state["a"]) == bits(one)


def test_tied_arrays_are_stored_once_and_stay_tied(tmp_path):
    a = ramp(1000)
    alias = jax.device_put(a, a.sharding)
    state = {"a": a, "same": a, "alias": alias, "other": ramp(1000)}
    with pccheck.Checkpointer(tmp_path) as ck:
        ck.save(1, state).durable.result(60)
        restored = ck.restore().state
    assert restored["a"] is restored["same"] is restored["alias"]
    assert restored["other"] is not restored["a"]
    stored = {(leaf.offset, leaf.nbytes) for leaf in _leaves(tmp_path)}
    assert len(stored) == 2


def _leaves(folder):
    from pccheck.state import manifest

    found = []

    def decode(raw, *rest, **named):
        found.append(original(raw, *rest, **named))
        return found[-1]

    original = manifest.decode
    try:
        manifest.decode = decode
        with pccheck.open(folder) as view:
            assert view["a"] is not None
    finally:
        manifest.decode = original
    return found[-1].leaves


def test_memory_of_the_cpu_backend_is_read_in_place():
    for name in set(NAMES) - SUB_BYTE:
        leaf = array_of(name)
        found = kind.host_bytes(leaf)
        assert isinstance(found, HostBytes)
        assert found.keep is leaf
        assert found.address == leaf.unsafe_buffer_pointer() == kind.addresses([leaf])[0], name
    for name in SUB_BYTE & set(NAMES):
        leaf = array_of(name)
        assert kind.host_bytes(leaf).keep is not leaf, "the backend packs them, NumPy does not"


def test_a_restored_array_is_its_buffer_and_keeps_it():
    class Memory(bytearray):
        """Can be asked whether it lives."""

    memory = Memory(64 + 4000)
    alive, start = weakref.ref(memory), -np.frombuffer(memory, np.uint8).ctypes.data % 64
    data = memoryview(memory)[start : start + 4000]
    leaf = kind.build(LeafSpec(kind="jax", dtype="float32", shape=(10, 100), nbytes=4000), data)
    assert leaf.unsafe_buffer_pointer() == np.frombuffer(data, np.uint8).ctypes.data, "without a copy"
    del data, memory
    gc.collect()
    assert alive() is not None
    stepped = jax.jit(lambda x: x + 1, donate_argnums=0)(leaf)
    assert (np.asarray(stepped) == 1).all()


def test_tied_arrays_that_are_donated_after_a_restore_do_not_change_each_other(tmp_path):
    a = ramp(4096)
    restored = through(tmp_path, {"a": a, "b": a}, like={"a": a, "b": jax.device_put(a, jax.devices()[1])})
    stepped = jax.jit(lambda x: x * 0, donate_argnums=0)(restored["a"])
    assert not np.asarray(stepped).any()
    assert bits(restored["b"]) == bits(jax.device_put(a, jax.devices()[1]))


# -- what cannot be stored, and when that is said --------------------------------------------------------------------


def test_a_deleted_array_is_an_error_in_save_that_names_it(tmp_path):
    state = {"params": {"w": ramp(10), "b": ramp(3)}}
    with pccheck.Checkpointer(tmp_path) as ck:
        ck.save(1, state).durable.result(60)
        state["params"]["b"].delete()
        with pytest.raises(UnsupportedLeafError, match=r"params/b.*deleted: donated"):
            ck.save(2, state)
        state["params"]["b"] = ramp(3)
        ck.save(3, state).durable.result(60)
        assert ck.latest() == 3


def test_tracers_and_refs_are_refused_with_advice(tmp_path):
    with pccheck.Checkpointer(tmp_path) as ck:

        def inside(x):
            with pytest.raises(UnsupportedLeafError, match=r"outside of jit"):
                ck.save(1, {"x": x})
            return x

        jax.jit(inside)(ramp(3))
        with pytest.raises(UnsupportedLeafError, match=r"ref\[\.\.\.\]"):
            ck.save(1, {"x": jax.new_ref(ramp(3))})


def test_what_a_file_says_is_checked():
    legal = LeafSpec(kind="jax", dtype="float32", shape=(2, 3), nbytes=24)
    assert kind.build(legal, memoryview(bytearray(24))).shape == (2, 3)
    for broken in (
        LeafSpec(kind="jax", dtype="float32", shape=(2, 4), nbytes=24),
        LeafSpec(kind="jax", dtype="object", shape=(3,), nbytes=24),
        LeafSpec(kind="jax", dtype="O", shape=(3,), nbytes=24),
        LeafSpec(kind="jax", dtype="float32", shape=(2, 3), nbytes=24, extra={"stride": [1, 7]}),
    ):
        with pytest.raises(FormatError):
            kind.build(broken, memoryview(bytearray(24)))
    for impl in ("threefry2x32", 3, None, ["rbg"]):
        wrong = LeafSpec(kind="jax", dtype="key<x>", shape=(3,), nbytes=12, extra={"impl": impl, "bits": "uint32"})
        with pytest.raises(UnsupportedLeafError):
            kind.build(wrong, memoryview(bytearray(12)))


# -- to and from others ----------------------------------------------------------------------------------------------


def test_numpy_asks_for_what_jax_saved_and_the_other_way(tmp_path):
    state = {name: array_of(name) for name in NAMES}
    as_numpy = through(tmp_path / "n", state, like={k: np.empty(v.shape, arrays.DTYPES[k]) for k, v in state.items()})
    assert all(type(leaf) is np.ndarray for leaf in as_numpy.values())
    assert {k: (v.dtype.name, v.tobytes()) for k, v in as_numpy.items()} == {
        k: (k, np.asarray(v).tobytes()) for k, v in state.items()
    }
    back = through(tmp_path / "j", as_numpy, like=state)
    assert {k: bits(v) for k, v in back.items()} == {k: bits(v) for k, v in state.items()}
    keys = through(tmp_path / "k", {"k": jax.random.key(9)}, like={"k": np.zeros(2, np.uint32)})
    assert keys["k"].tolist() == [0, 9]


def test_torch_asks_for_what_jax_saved_and_the_other_way(tmp_path):
    torch = pytest.importorskip("torch")
    names = ["float32", "bfloat16", "float8_e4m3fn", "float8_e5m2", "int8", "bool", "complex64", "uint8"]
    state = {name: array_of(name) for name in names}
    like = {name: torch.empty(3, 5, dtype=getattr(torch, name)) for name in names}
    as_torch = through(tmp_path / "t", state, like=like)
    assert {k: (v.dtype, v.view(torch.uint8).numpy().tobytes()) for k, v in as_torch.items()} == {
        k: (like[k].dtype, np.asarray(v).tobytes()) for k, v in state.items()
    }
    back = through(tmp_path / "j", as_torch, like=state)
    assert {k: bits(v) for k, v in back.items()} == {k: bits(v) for k, v in state.items()}
    turned = through(tmp_path / "s", {"a": torch.arange(12.0).reshape(3, 4).t()}, like={"a": jnp.zeros((4, 3))})
    assert bits(turned["a"]) == bits(ramp(3, 4).T)


@pytest.mark.parametrize("wanted", sorted(set(NAMES) - WIDE))
def test_like_casts_numbers(tmp_path, wanted):
    source = {"f": jnp.array([0.0, 1.0, 1.0]), "b": jnp.array([0, 1, 1], jnp.bfloat16), "i": jnp.array([0, 1, 1])}
    like = {k: jax.ShapeDtypeStruct((3,), arrays.DTYPES[wanted]) for k in source}
    restored = through(tmp_path, source, like=like)
    for leaf in restored.values():
        assert leaf.dtype.name == wanted
        seen = np.asarray(leaf).astype(np.complex64).tolist()
        assert seen[1:] in ([1, 1], [-1, -1]), "int1 has no 1"
        assert seen[0] == 0 or wanted == "float8_e8m0fnu", "which has no 0"


def test_casts_round_as_numpy_does_and_never_drop_an_imaginary_part(tmp_path):
    host = np.linspace(-3, 3, 41, dtype=np.float32)
    like = {"a": jax.ShapeDtypeStruct((41,), jnp.bfloat16)}
    restored = through(tmp_path / "a", {"a": jnp.asarray(host)}, like=like)["a"]
    assert np.asarray(restored).tobytes() == host.astype(ml_dtypes.bfloat16).tobytes()
    from_numpy = through(tmp_path / "n", {"a": host}, like=like)["a"]
    assert bits(from_numpy) == bits(restored)
    with pytest.raises(MismatchError, match="complex64"):
        through(tmp_path / "c", {"a": jnp.zeros(3, jnp.complex64)}, like={"a": jnp.zeros(3)})
    with pytest.raises(MismatchError):
        through(tmp_path / "w", {"a": jnp.zeros(3)}, like={"a": jnp.zeros(4)})
    with pytest.raises(MismatchError):  # only a leaf of jax asks for a cast
        through(tmp_path / "o", {"a": jnp.zeros(3)}, like={"a": np.zeros(3, np.float16)})


def test_leaves_of_python_and_numpy_beside_jax(tmp_path):
    state = {
        "int": 3, "big": 1 << 80, "float": 0.1, "bool": True, "complex": 1j, "str": "x" * 5000, "bytes": b"\0" * 5000,
        "none": None, "empty": [{}, [], ()], "np": np.arange(3)[::-1], "f": np.asfortranarray(np.ones((2, 3))),
        "scalar": np.float32(1.5), "npbool": np.bool_(True), "npstr": np.array(["a", "bcd"]),
        "date": np.array(["2024-01-01"], "M8[D]"), "struct": np.zeros(2, [("a", "i4"), ("b", "f8")]),
        0: jnp.ones(3), "a.b": jnp.ones(2), "a/b": 1, "": 2,
    }  # fmt: skip
    for like in ({}, {"like": state}):
        restored = through(tmp_path / str(len(list(tmp_path.iterdir()))), state, **like)
        assert list(restored) == list(state)
        assert {k: bits(v) for k, v in restored.items()} == {k: bits(v) for k, v in state.items()}


def test_a_part_kind_is_always_the_same_object():
    mine = JaxKind()
    assert mine.part(0) is mine
    assert mine.part(2) is mine.part(2) is not mine.part(1)
    assert mine.part(2).name == mine.name
