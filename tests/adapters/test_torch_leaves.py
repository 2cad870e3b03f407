"""PyTorch tensors: every dtype and layout, ties, parameters, refusals, and restores without torch."""

from __future__ import annotations

import collections
import ctypes
import gc
import subprocess
import sys
import warnings
import weakref

import ml_dtypes
import numpy as np
import pytest

torch = pytest.importorskip("torch")

from pccheck_torch import kind  # noqa: E402
from pccheck_torch.leaves.kind import DTYPES, QUANTIZED  # noqa: E402

import pccheck  # noqa: E402
from pccheck.errors import FormatError, MismatchError, UnsupportedLeafError  # noqa: E402
from pccheck.leaves import LeafSpec  # noqa: E402
from pccheck.state import manifest  # noqa: E402
from pccheck.state.assembly import assemble  # noqa: E402
from pccheck.state.kinds import Kinds, kind_of  # noqa: E402
from pccheck.state.planner import Planner  # noqa: E402
from pccheck.testing.compare import difference, same  # noqa: E402

Parameter = torch.nn.Parameter


@pytest.fixture(autouse=True)
def _quiet():
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*(ComplexHalf|quantiz|nested|sparse|Sparse).*")
        yield


def save(state, planner=None):
    """Give (manifest, byte space), as a checkpoint would hold them."""
    prepared = (planner or Planner(kind_of, 1 << 20)).prepare(state, step=1)
    space = bytearray(prepared.layout.data_bytes)
    for piece, address in zip(prepared.layout.pieces, prepared.addresses, strict=True):
        if piece.length:
            space[piece.offset : piece.offset + piece.length] = ctypes.string_at(int(address), piece.length)
    digests = bytes(16 * len(prepared.layout.chunks))
    data = prepared.encode_manifest(counter=1, incarnation=1, rank=0, world=1, base=0, digests=digests)
    return manifest.decode(data), space


def load(saved, kinds=kind_of, **how):
    found, space = saved

    def read(index):
        entry = found.leaves[index]
        return memoryview(space)[entry.offset : entry.offset + entry.nbytes]

    return assemble(found, read, kinds, **how)[0]


def round_trip(state):
    return load(save(state))


def filled(dtype, *shape):
    """A tensor of random bytes (0 and 1 for bool)."""
    size = dtype.itemsize * int(np.prod(shape))
    raw = np.random.default_rng(3).integers(0, 2 if dtype == torch.bool else 256, size, np.uint8)
    if not size:
        return torch.empty(shape, dtype=dtype)
    return torch.from_numpy(raw).view(dtype).view(shape)


DENSE = sorted(set(DTYPES) - QUANTIZED)


def test_the_dtypes_that_torch_has_are_all_here():
    assert {"float32", "bfloat16", "complex32", "uint64", "float8_e8m0fnu", "float4_e2m1fn_x2", "bits16"} <= set(DENSE)
    assert {"qint8", "quint8", "qint32", "quint4x2", "quint2x4"} == QUANTIZED


@pytest.mark.parametrize("name", DENSE)
def test_every_dtype_comes_back_to_the_bit(name):
    dtype = DTYPES[name]
    state = {
        "whole": filled(dtype, 3, 5), "empty": filled(dtype, 0, 4), "one": filled(dtype, 1)[0],
        "transposed": filled(dtype, 4, 6).t(), "gaps": filled(dtype, 6, 6)[::2, 1::2],
    }  # fmt: skip
    back = round_trip(state)
    assert difference(back, state) is None
    assert all(type(t) is torch.Tensor for t in back.values())


LAYOUTS = {
    "0-d": lambda t: t[0, 0, 0, 0],
    "contiguous": lambda t: t,
    "channels_last": lambda t: t.to(memory_format=torch.channels_last),
    "transposed": lambda t: t.permute(3, 1, 0, 2),
    "sliced": lambda t: t[:, ::2],
    "shifted": lambda t: t[1:],
    "expanded": lambda t: t[:1].expand(7, -1, -1, -1),
    "overlapping": lambda t: t.reshape(-1).as_strided((3, 3), (1, 1)),
    "windows": lambda t: t.reshape(-1).unfold(0, 4, 2),
}
IN_PLACE = {"0-d", "contiguous", "channels_last", "transposed", "shifted"}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_comes_back_with_its_values(layout):
    tensor = LAYOUTS[layout](torch.arange(120.0).reshape(2, 3, 4, 5))
    host = kind.host_bytes(tensor)
    assert (host.keep is tensor) is (layout in IN_PLACE)
    assert host.stable is (layout not in IN_PLACE)
    back = round_trip([tensor])[0]
    assert difference(back, tensor) is None
    assert back.stride() == (tensor.stride() if layout in IN_PLACE else tensor.contiguous().stride())
    if layout == "channels_last":
        assert back.is_contiguous(memory_format=torch.channels_last)


def test_lazy_conjugates_and_negatives_are_resolved():
    z = torch.tensor([1 + 2j, -3 - 4j])
    state = {"conj": z.conj(), "imag": z.conj().imag, "plain": z, "z32": z.to(torch.complex32).conj()}
    assert state["imag"].is_neg()
    back = round_trip(state)
    assert difference(back, state) is None
    assert not back["conj"].is_conj()


def test_a_view_costs_its_own_bytes():
    big = torch.zeros(1_000_000)
    found, _ = save({"v": big[10:20]})
    assert found.data_bytes == 40


def test_parameters_and_gradients_come_back():
    p = Parameter(torch.ones(3))
    frozen = Parameter(torch.ones(3), requires_grad=False)
    wants = torch.ones(3, requires_grad=True)
    state = {"p": p, "frozen": frozen, "wants": wants, "detached": p.detach(), "derived": wants * 2}
    back = round_trip(state)
    assert type(back["p"]) is type(back["frozen"]) is Parameter
    assert [back[k].requires_grad for k in state] == [True, False, True, False, False]
    assert back["wants"].is_leaf
    assert torch.equal(back["derived"], state["derived"])


def test_tied_tensors_are_stored_once_and_come_back_tied():
    w = Parameter(torch.arange(1000.0))
    state = {"in": w, "out": w, "view": w.detach(), "data": w.data.view(10, 100), "tail": w.detach()[500:]}
    found, space = save(state)
    assert [e.offset for e in found.leaves][:3] == [0, 0, 0]
    assert len(space) == 4000 + 32 + 4000 + 32 + 2000
    back = load((found, space))
    assert back["in"] is back["out"]
    assert type(back["view"]) is torch.Tensor
    assert back["view"].data_ptr() == back["in"].data_ptr()
    assert difference(back, state) is None
    with torch.no_grad():
        back["in"][0] = 77
    assert back["view"][0] == 77


class Tied(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = torch.nn.Embedding(16, 8)
        self.norm = torch.nn.BatchNorm1d(8)
        self.head = torch.nn.Linear(8, 16, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x):
        return self.head(self.norm(self.embed(x)))


def trained():
    torch.manual_seed(1)
    model = Tied()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.arange(16)).square().sum().backward()
        optimizer.step()
        scheduler.step()
    return model, optimizer, scheduler


def test_a_whole_training_state_comes_back_and_loads():
    model, optimizer, scheduler = trained()
    state = {
        "model": model.state_dict(), "optimizer": optimizer.state_dict(), "scheduler": scheduler.state_dict(),
        "rng": torch.get_rng_state(), "numpy": np.random.default_rng(1).bit_generator.state, "step": 3,
    }  # fmt: skip
    back = round_trip(state)
    assert difference(back, state) is None
    assert type(back["model"]) is collections.OrderedDict
    assert back["model"]._metadata == state["model"]._metadata
    assert back["model"]["embed.weight"] is back["model"]["head.weight"]
    other, fresh, plan = trained()
    other.load_state_dict(back["model"])
    fresh.load_state_dict(back["optimizer"])
    plan.load_state_dict(back["scheduler"])
    assert difference(other.state_dict(), model.state_dict()) is None
    assert difference(fresh.state_dict(), optimizer.state_dict()) is None


def test_small_things_of_torch_come_back():
    state = [torch.Size([2, 3]), torch.float8_e4m3fn, torch.device("cuda", 1), torch.Size([]), torch.ones(2).size()]
    back = round_trip(state)
    assert back == state
    assert [type(b) for b in back] == [type(s) for s in state]


# -- refusals --------------------------------------------------------------------------------------------------------


class Sub(torch.Tensor):
    pass


def quantized():
    return torch.quantize_per_tensor(torch.ones(4), 0.1, 0, torch.qint8)


def freed():
    t = torch.ones(100)
    t.untyped_storage().resize_(0)
    return t


def too_short():
    t = torch.ones(100)
    t.untyped_storage().resize_(40)
    return t


REFUSED = [
    (lambda: torch.ones(2).as_subclass(Sub), "subclass"),
    (lambda: torch.nn.UninitializedParameter(), "no shape yet"),
    (lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]), "unbind|subclass"),
    (lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged), "unbind|subclass"),
    (quantized, "quantized"),
    (lambda: torch.sparse_coo_tensor(size=(2, 2), device="meta"), "to_dense"),
    (freed, "freed"),
    (too_short, "storage"),
    (lambda: torch.nn.Linear(1, 1), r"store its \.state_dict"),
]


@pytest.mark.parametrize(("make", "reason"), REFUSED, ids=lambda v: getattr(v, "__name__", None) or str(v))
def test_what_cannot_be_stored_is_refused_with_path_and_way_out(make, reason):
    planner = Planner(kind_of, 4096)
    planner.prepare({"m": [0, torch.ones(2)]}, step=0)
    with pytest.raises(UnsupportedLeafError, match=reason) as caught:
        planner.prepare({"m": [0, make()]}, step=1)
    assert caught.value.path == "m/1"


def test_a_tensor_inside_a_transform_is_refused():
    def inside(x):
        with pytest.raises(UnsupportedLeafError, match="transforms"):
            kind.describe(x)
        return x

    torch.func.vmap(inside)(torch.ones(3, 2))


# -- the cached plan -------------------------------------------------------------------------------------------------

W = torch.arange(24.0).reshape(4, 6)
Z = torch.tensor([1 + 2j, 3 + 4j])
STALE = {
    "dtype": W.int(),
    "same size": W.view(torch.int32),
    "shape": W.reshape(6, 4),
    "transposed": torch.arange(24.0).reshape(6, 4).t(),
    "strided": torch.arange(48.0).reshape(4, 12)[:, ::2],
    "gradient": W.clone().requires_grad_(),
    "no leaf": W.clone().requires_grad_() * 2,
    "parameter": Parameter(W.clone()),
    "frozen parameter": Parameter(W.clone(), requires_grad=False),
    "negative": torch._neg_view(W),
    "numpy": W.numpy(),
}


@pytest.mark.parametrize("change", STALE)
def test_a_changed_tensor_is_never_saved_by_a_stale_plan(change):
    planner = Planner(kind_of, 4096)
    states = [{"w": W, "step": 1}, {"w": STALE[change], "step": 2}, {"w": W, "step": 3}]
    for state in states:
        back = load(save(state, planner))
        if change == "no leaf":
            assert torch.equal(back["w"], state["w"])
        else:
            assert difference(back, state) is None


def test_conjugation_is_seen_through_a_cached_plan():
    planner = Planner(kind_of, 4096)
    for tensor in (Z, Z.conj(), Z, Z.conj().resolve_conj()):
        assert same(load(save([tensor], planner)), [tensor])


def test_small_things_are_seen_through_a_cached_plan():
    planner = Planner(kind_of, 4096)
    for thing in (torch.Size([1]), torch.Size([2]), torch.float32, torch.int8, torch.device("cpu"), torch.Size([1])):
        state = {"t": W, "s": thing}
        assert same(load(save(state, planner)), state)


def test_training_keeps_the_layout_and_shows_new_values():
    model, optimizer, _ = trained()
    planner = Planner(kind_of, 4096)

    def state():
        return {"model": model.state_dict(), "optimizer": optimizer.state_dict()}

    first = planner.prepare(state(), step=1)
    for _ in range(3):
        model(torch.arange(16)).square().sum().backward()
        optimizer.step()
        assert planner.prepare(state(), step=2).layout is first.layout
        assert difference(load(save(state(), planner)), state()) is None


def test_a_tensor_that_moved_is_read_where_it_is_now_and_not_kept_alive():
    planner = Planner(kind_of, 4096)
    for value in range(10):
        tensor = torch.full((3000,), float(value))
        gone = weakref.ref(tensor)
        prepared = planner.prepare({"a": tensor}, step=value)
        assert int(prepared.addresses[0]) == tensor.data_ptr()
        del prepared, tensor
        gc.collect()
        assert gone() is None


# -- like ------------------------------------------------------------------------------------------------------------


def test_like_gives_parameters_devices_and_gradients():
    saved = save({"a": torch.ones(3), "b": Parameter(torch.ones(2)), "c": torch.ones(1)})
    like = {
        "a": Parameter(torch.zeros(3)), "b": torch.zeros(2), "c": torch.zeros(1, device="meta", requires_grad=True),
    }  # fmt: skip
    back = load(saved, like=like)
    assert type(back["a"]) is Parameter
    assert type(back["b"]) is torch.Tensor
    assert not back["b"].requires_grad
    assert back["c"].device.type == "cpu"
    assert back["c"].requires_grad
    assert all(bool((t == 1).all()) for t in back.values())


def test_tied_tensors_stay_tied_through_like():
    model = trained()[0]
    back = load(save(model.state_dict()), like=Tied().state_dict())
    assert back["embed.weight"].data_ptr() == back["head.weight"].data_ptr()
    assert same(back["embed.weight"], model.embed.weight.detach())


def test_kinds_are_converted_where_dtype_and_shape_agree():
    state = {"x": torch.arange(3.0).to(torch.bfloat16), "y": np.arange(4).reshape(2, 2).T}
    like = {"x": np.zeros(3, ml_dtypes.bfloat16), "y": torch.zeros(2, 2, dtype=torch.int64)}
    back = load(save(state), like=like)
    assert back["x"].dtype == ml_dtypes.bfloat16
    assert back["x"].tolist() == [0, 1, 2]
    assert torch.equal(back["y"], torch.tensor([[0, 2], [1, 3]]))
    with pytest.raises(MismatchError, match="dtype"):
        load(save(state), like={"x": np.zeros(3, "<f2"), "y": like["y"]})


def test_a_subclass_that_is_not_registered_cannot_be_restored_into():
    with pytest.raises(UnsupportedLeafError, match="register"):
        load(save([torch.ones(2)]), like=[torch.ones(2).as_subclass(Sub)])


# -- without torch ---------------------------------------------------------------------------------------------------


class WithoutTorch:
    """The kinds of a process in which torch is not installed."""

    def __init__(self):
        self.kinds = Kinds()

    def __call__(self, value):
        return self.kinds(value)

    def named(self, name):
        return None if name == "torch" else self.kinds.named(name)

    def like(self, value):
        return self.kinds.like(value)

    def container(self, value):
        return self.kinds.container(value)


def test_without_torch_tensors_come_back_as_numpy():
    channels = torch.arange(24.0).reshape(1, 2, 3, 4).to(memory_format=torch.channels_last)
    state = {
        "f": torch.arange(3.0), "b": torch.tensor([1.5, -2]).to(torch.bfloat16), "c": channels, "p": Parameter(W),
        "e": torch.empty(0, 2), "z": torch.tensor(3, dtype=torch.uint16), "x": filled(torch.bits16, 2),
        "size": torch.Size([1, 2]), "dtype": torch.int8, "device": torch.device("cpu"), "n": np.arange(2),
    }  # fmt: skip
    back = load(save(state), WithoutTorch())
    assert back["b"].dtype == ml_dtypes.bfloat16
    assert back["b"].tolist() == [1.5, -2]
    assert np.array_equal(back["c"], channels.numpy())
    assert back["c"].strides == tuple(4 * s for s in channels.stride())
    assert np.array_equal(back["p"], W.numpy())
    assert back["e"].shape == (0, 2)
    assert (back["z"].dtype, int(back["z"])) == (np.uint16, 3)
    assert back["x"].dtype == "V2"
    assert (back["size"], back["dtype"], back["device"]) == ((1, 2), "torch.int8", "cpu")
    assert all(isinstance(back[k], np.ndarray) for k in "fbcpezxn")
    into = load(save({"b": state["b"]}), WithoutTorch(), like={"b": np.zeros(2, ml_dtypes.bfloat16)})
    assert into["b"].tolist() == [1.5, -2]


def test_numpy_alone_loads_no_torch():
    program = (
        "import sys, numpy as np\n"
        "from pccheck.state.kinds import kind_of\n"
        "from pccheck.state.planner import Planner\n"
        "Planner(kind_of, 4096).prepare({'a': np.zeros(3), 'b': np.float32(1)}, step=1)\n"
        "assert 'torch' not in sys.modules and 'pccheck_torch' not in sys.modules\n"
        "import torch\n"
        "Planner(kind_of, 4096).prepare({'a': torch.zeros(3)}, step=1)\n"
        "assert 'pccheck_torch' in sys.modules\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


# -- what a file may claim -------------------------------------------------------------------------------------------


def spec(dtype="float32", shape=(2,), nbytes=8, **extra):
    return LeafSpec(kind="torch", dtype=dtype, shape=shape, nbytes=nbytes, extra=extra)


WRONG = [
    spec(dtype="qint8"),
    spec(dtype="load"),
    spec(dtype="float32 "),
    spec(shape=(3,)),
    spec(nbytes=4),
    spec(shape=(2**62, 2**62)),
    spec(shape=(0, 2**62, 2**62), nbytes=0),
    spec(stride=[2]),
    spec(stride=[0]),
    spec(stride=["1"]),
    spec(stride=[1, 1]),
    spec(dtype="int32", requires_grad=True),
    spec(dtype="int32", parameter=True, requires_grad=True),
    spec(dtype="torch.Size", shape=(), nbytes=0),
    spec(dtype="torch.Size", shape=(), nbytes=0, value=["a"]),
    spec(dtype="torch.Size", shape=(), nbytes=0, value=[2**70]),
    spec(dtype="torch.dtype", shape=(), nbytes=0, value="torch.load"),
    spec(dtype="torch.device", shape=(), nbytes=0, value="nowhere:1"),
    spec(dtype="torch.device", shape=(), nbytes=0, value=3),
]


@pytest.mark.parametrize("wrong", WRONG, ids=lambda s: f"{s.dtype}{s.shape}{s.extra}"[:60])
def test_a_wrong_spec_is_a_format_error(wrong):
    with pytest.raises(FormatError):
        kind.build(wrong, memoryview(bytearray(wrong.nbytes)))


def test_the_tensor_is_made_over_the_bytes_it_was_given():
    data = bytearray(8)
    kind.build(spec(), memoryview(data))[0] = 1
    assert bytes(data) == np.array([1, 0], "<f4").tobytes()


def test_another_default_device_changes_nothing():
    state = {
        "dense": torch.ones(3), "empty": torch.zeros(0, 3), "meta": torch.empty(2, device="meta"),
        "coo": torch.eye(3).to_sparse(), "csr": torch.eye(3).to_sparse_csr(), "generator": torch.Generator(),
        "turned": torch.arange(6.0).view(2, 3).t(),
    }  # fmt: skip
    state["dense"].requires_grad_()
    torch.set_default_device("meta")
    try:
        saved = save(state)
        for found in (load(saved), load(saved, like=state)):
            assert {k: v.device.type for k, v in found.items()} == {k: v.device.type for k, v in state.items()}
            for name in ("dense", "empty", "coo", "csr", "turned"):
                assert torch.equal(found[name].to_dense(), state[name].to_dense()), name
    finally:
        torch.set_default_device(None)


def test_what_cannot_be_restored_is_not_said_to_be_saved():
    nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])
    saved = save({"w": torch.ones(2), "m": torch.empty(2, device="meta")})
    state = load(saved)
    into = pccheck.Restored(step=1, counter=1, state=state, metadata={})
    for call, path in (
        (lambda: load(saved, like={**state, "w": nested}), "w"),
        (lambda: load(saved, like={**state, "more": nested}), "more"),
        (lambda: load(saved, like={**state, "m": torch.ones(2)}), "m"),
        (lambda: into.load_into({**state, "w": nested}), "w"),
    ):
        with pytest.raises(UnsupportedLeafError, match=f"cannot restore {path} of type") as caught:
            call()
        assert (caught.value.path, caught.value.restoring) == (path, True)
    with pytest.raises(UnsupportedLeafError, match="cannot save w of type"):
        save({"w": nested})
