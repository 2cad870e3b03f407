"""Leaves that are no dense tensor: sparse, meta, generators, registered classes; and what files may claim of them."""

from __future__ import annotations

import subprocess
import sys
import warnings
from dataclasses import replace

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import pccheck_torch  # noqa: E402
from pccheck_torch import kind  # noqa: E402
from pccheck_torch.leaves import registering  # noqa: E402

import pccheck  # noqa: E402
from pccheck.errors import FormatError, MismatchError, UnsupportedLeafError, UsageError  # noqa: E402

Parameter = torch.nn.Parameter
pytestmark = pytest.mark.filterwarnings("ignore:.*[Ss]parse.*")


@pytest.fixture
def keep(tmp_path):
    """Save a state, and give what a later program restores."""

    def run(state, like=None):
        with pccheck.Checkpointer(tmp_path / "s", chunk_bytes=1 << 16) as ck:
            ck.save(1, state)
            ck.wait()
            return ck.restore(like=like).state

    return run


def same(a, b):
    """Tell whether two leaves are alike: class, layout, dtype, shape, device, gradient, and every value."""
    assert type(a) is type(b)
    if isinstance(a, torch.Generator):
        return a.device == b.device and torch.equal(a.get_state(), b.get_state())
    facts = [(t.layout, t.dtype, t.shape, t.device, t.requires_grad, isinstance(t, Parameter)) for t in (a, b)]
    if facts[0] != facts[1]:
        return False
    if a.device.type == "meta":
        return a.stride() == b.stride()
    if a.layout is torch.sparse_coo:
        parts = [(t.detach()._indices(), t.detach()._values()) for t in (a, b)]
        return a.is_coalesced() == b.is_coalesced() and all(torch.equal(x, y) for x, y in zip(*parts, strict=True))
    if a.layout in (torch.sparse_csr, torch.sparse_bsr):
        names = ("crow_indices", "col_indices", "values")
        return all(torch.equal(getattr(a.detach(), n)(), getattr(b.detach(), n)()) for n in names)
    if a.layout in (torch.sparse_csc, torch.sparse_bsc):
        names = ("ccol_indices", "row_indices", "values")
        return all(torch.equal(getattr(a.detach(), n)(), getattr(b.detach(), n)()) for n in names)
    return torch.equal(a, b)


def dense():
    t = torch.zeros(4, 6, dtype=torch.float64)
    t[0, 1], t[2, 0], t[3, 5] = 1, -2, 3
    return t


def uncoalesced():
    return torch.sparse_coo_tensor([[1, 1, 0], [2, 2, 0]], [1.0, 2.0, 3.0], (3, 4))


SPARSE = {
    "coo": lambda: dense().to_sparse(),
    "coo uncoalesced": uncoalesced,
    "coo hybrid": lambda: torch.sparse_coo_tensor([[0, 2]], torch.ones(2, 5), (3, 5)),
    "coo empty": lambda: torch.sparse_coo_tensor(torch.zeros(2, 0, dtype=torch.long), [], (3, 4)),
    "coo bfloat16": lambda: dense().bfloat16().to_sparse(),
    "coo complex": lambda: (dense() * (1 + 2j)).to_sparse().conj(),
    "coo parameter": lambda: Parameter(dense().to_sparse()),
    "coo wants gradient": lambda: dense().to_sparse().requires_grad_(),
    "coo 0-d": lambda: torch.sparse_coo_tensor(torch.zeros(0, 1, dtype=torch.long), [3.0], ()),
    "csr": lambda: dense().to_sparse_csr(),
    "csr int32": lambda: torch.sparse_csr_tensor(
        torch.tensor([0, 1, 2], dtype=torch.int32), torch.tensor([1, 0], dtype=torch.int32), torch.ones(2), (2, 3)
    ),
    "csc": lambda: dense().to_sparse_csc(),
    "bsr": lambda: dense().to_sparse_bsr((2, 3)),
    "bsc": lambda: dense().to_sparse_bsc((2, 3)),
    "csr batched": lambda: torch.stack([dense(), dense()]).to_sparse_csr(),
}


@pytest.mark.parametrize("form", SPARSE)
def test_sparse_tensors_come_back_by_their_components(form, keep):
    made = SPARSE[form]()
    plain = torch.arange(3)
    back = keep({"s": made, "d": plain})
    resolved = made.resolve_conj() if form == "coo complex" else made
    assert same(back["s"], resolved)
    assert torch.equal(back["s"].detach().to_dense(), made.detach().to_dense())
    assert torch.equal(back["d"], plain)


@pytest.mark.parametrize("form", SPARSE)
def test_sparse_tensors_are_restored_like_others(form, keep):
    made = SPARSE[form]()
    assert torch.equal(keep([made], like=[made])[0].detach().to_dense(), made.detach().to_dense())


def test_a_sparse_tensor_is_saved_anew_when_its_elements_change(tmp_path):
    with pccheck.Checkpointer(tmp_path) as ck:
        for n in (1, 3, 2):
            s = torch.sparse_coo_tensor([list(range(n))], torch.arange(float(n)), (9,))
            ck.save(n, {"s": s, "w": torch.ones(2)})
            ck.wait()
            assert torch.equal(ck.restore().state["s"].to_dense(), s.to_dense())


def test_layout_and_dtype_of_sparse_tensors_must_fit(keep):
    with pytest.raises(MismatchError, match=r"sparse_coo\[float64\]"):
        keep([dense().to_sparse()], like=[dense()])
    with pytest.raises(MismatchError, match="sparse_csr"):
        keep([dense().to_sparse()], like=[dense().to_sparse_csr()])
    with pytest.raises(MismatchError, match="shape"):
        keep([dense().to_sparse()], like=[torch.zeros(4, 7, dtype=torch.float64).to_sparse()])


def test_the_same_sparse_tensor_twice_is_stored_once_and_stays_one(keep):
    s = dense().to_sparse()
    back = keep([s, s])
    assert back[0] is back[1]


META = {
    "plain": lambda: torch.ones(2, 3, device="meta"),
    "channels_last": lambda: torch.ones(2, 3, 4, 5, device="meta").to(memory_format=torch.channels_last),
    "parameter": lambda: Parameter(torch.ones(2, device="meta", dtype=torch.bfloat16)),
    "0-d": lambda: torch.ones((), device="meta", dtype=torch.int8),
    "huge": lambda: torch.empty(1 << 40, 1 << 10, device="meta"),
}


@pytest.mark.parametrize("form", META)
def test_meta_tensors_come_back_by_dtype_and_shape(form, keep):
    made = META[form]()
    assert same(keep([made, torch.ones(2)])[0], made)
    assert same(keep([made], like=[made])[0], made)


def test_a_tensor_without_values_fills_none_that_has_some(keep):
    with pytest.raises(UnsupportedLeafError, match="without values") as caught:
        keep({"a": torch.ones(2, device="meta")}, like={"a": torch.ones(2)})
    assert caught.value.path == "a"


def test_generators_come_back_as_new_ones_in_the_same_state(keep):
    g = torch.Generator().manual_seed(7)
    torch.rand(3, generator=g)
    back = keep({"g": g, "w": torch.ones(2)})["g"]
    assert back is not g
    assert same(back, g)
    assert torch.equal(torch.rand(5, generator=back), torch.rand(5, generator=g))
    assert same(keep([g], like=[torch.Generator()])[0], g)


def test_a_generator_moves_on_between_saves(tmp_path):
    g = torch.Generator().manual_seed(7)
    with pccheck.Checkpointer(tmp_path) as ck:
        for step in range(3):
            torch.rand(3, generator=g)
            ck.save(step, [g])
            ck.wait()
            assert same(ck.restore().state[0], g)


# -- registered classes ----------------------------------------------------------------------------------------------


class Scaled(torch.Tensor):
    """Like torchao's: int8 data and a scale, with torch's own protocol for being taken apart."""

    @staticmethod
    def __new__(cls, data, scale, group):
        made = torch.Tensor._make_wrapper_subclass(cls, data.shape, dtype=torch.float32)
        made.data8, made.scale, made.group = data, scale, group
        return made

    def __tensor_flatten__(self):
        return ["data8", "scale"], {"group": self.group, "dtype": torch.float32, "size": torch.Size([2]), 3: (1, [2])}

    @classmethod
    def __tensor_unflatten__(cls, parts, context, outer_size, outer_stride):
        assert context["size"] == torch.Size([2])
        assert context[3] == (1, [2])
        assert context["dtype"] is torch.float32
        return cls(parts["data8"], parts["scale"], context["group"])

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.detach.default:
            return cls(args[0].data8, args[0].scale, args[0].group)
        raise NotImplementedError(func)


class Tagged(torch.Tensor):
    tag = ""


@pytest.fixture
def registered(monkeypatch):
    """Let a test register classes, and forget them."""
    monkeypatch.setattr(registering, "_by_class", {})
    monkeypatch.setattr(registering, "_by_name", {})
    pccheck_torch.register_flattenable(Scaled)

    def unflatten(parts, context):
        made = parts["values"].as_subclass(Tagged)
        made.tag = context["tag"]
        return made

    pccheck_torch.register(
        Tagged, lambda t: ({"values": t.detach().as_subclass(torch.Tensor)}, {"tag": t.tag}), unflatten
    )


def scaled():
    return Scaled(torch.arange(-3, 3, dtype=torch.int8).reshape(2, 3), torch.tensor([0.5]), 16)


def tagged(tag="x", value=1.0):
    made = torch.full((4, 2), value).as_subclass(Tagged)
    made.tag = tag
    return made


@pytest.mark.usefixtures("registered")
def test_registered_classes_come_back_through_their_parts(keep):
    state = {"q": scaled(), "t": tagged("hello"), "w": torch.ones(2)}
    back = keep(state)
    assert type(back["q"]) is Scaled
    assert torch.equal(back["q"].data8, state["q"].data8)
    assert torch.equal(back["q"].scale, state["q"].scale)
    assert back["q"].group == 16
    assert type(back["t"]) is Tagged
    assert back["t"].tag == "hello"
    assert back["t"].tolist() == state["t"].tolist()
    assert keep({"t": state["t"]}, like={"t": tagged()})["t"].tag == "hello"
    with pytest.raises(MismatchError, match="Tagged"):
        keep({"t": state["t"]}, like={"t": torch.ones(4, 2)})


@pytest.mark.usefixtures("registered")
def test_a_changed_context_or_part_is_seen_through_a_cached_plan(tmp_path):
    with pccheck.Checkpointer(tmp_path) as ck:
        for step, (tag, value) in enumerate([("a", 1.0), ("a", 2.0), ("b", 2.0), ("longer", 3.0)]):
            ck.save(step, [tagged(tag, value)])
            ck.wait()
            back = ck.restore().state[0]
            assert (back.tag, float(back[0, 0])) == (tag, value)


def test_a_class_that_is_not_registered_is_refused_at_load_and_nothing_is_imported(tmp_path, monkeypatch):
    monkeypatch.setattr(registering, "_by_class", {})
    monkeypatch.setattr(registering, "_by_name", {})
    with pytest.raises(UnsupportedLeafError, match="register"):
        kind.describe(tagged())
    pccheck_torch.register_flattenable(Scaled)
    with pccheck.Checkpointer(tmp_path) as ck:
        ck.save(1, {"a": {"q": scaled()}, "w": torch.ones(2)})
    monkeypatch.setattr(registering, "_by_class", {})
    monkeypatch.setattr(registering, "_by_name", {})
    with pccheck.Checkpointer(tmp_path) as ck:
        with pytest.raises(UnsupportedLeafError, match=r"Scaled.*not registered here") as caught:
            ck.restore()
        assert caught.value.path == "a/q"
        assert ck.restore(like={"w": torch.ones(2)}, partial=True).state["w"].tolist() == [1, 1]


@pytest.mark.usefixtures("registered")
def test_what_registration_refuses():
    with pytest.raises(UsageError, match="already"):
        pccheck_torch.register_flattenable(Scaled)
    with pytest.raises(UsageError, match="no subclass"):
        pccheck_torch.register(torch.Tensor, lambda t: ({}, None), lambda p, c: None)
    with pytest.raises(UsageError, match="__tensor_flatten__"):
        pccheck_torch.register_flattenable(Other)
    with pytest.raises(UsageError, match="functions"):
        pccheck_torch.register(Other, None, None)


class Other(torch.Tensor):
    pass


BAD_FLATTEN = {
    "dict of names": lambda t: ([torch.ones(1)], None),
    "context holds a builtins.object": lambda t: ({"a": torch.ones(1)}, object()),
    "no dense tensor": lambda t: ({"a": torch.ones(1, device="meta")}, None),
    "more than": lambda t: ({str(i): torch.ones(1) for i in range(1025)}, None),
}


@pytest.mark.usefixtures("registered")
@pytest.mark.parametrize("reason", BAD_FLATTEN)
def test_what_a_flatten_may_not_give(reason, tmp_path):
    pccheck_torch.register(Other, BAD_FLATTEN[reason], lambda p, c: None)
    with pccheck.Checkpointer(tmp_path) as ck:
        with pytest.raises(UnsupportedLeafError, match=reason) as caught:
            ck.save(1, {"x": [torch.ones(2).as_subclass(Other)]})
    assert caught.value.path == "x/0"


CONTEXTS = [
    None, True, 1, -(2**80), 1.5, float("inf"), float("-inf"), "a", [1, (2, [3])], {"a": {1: (), (1, 2): "b"}},
    torch.float8_e4m3fn, torch.device("cuda", 1), torch.Size([1, 2]), {"tuple": [1]},
]  # fmt: skip


@pytest.mark.parametrize("context", CONTEXTS, ids=str)
def test_contexts_are_json_and_come_back(context):
    import json

    told = json.loads(json.dumps(registering.encode(context), allow_nan=False))
    back = registering.decode(told)
    assert back == context
    assert type(back) is type(context)
    assert np.isnan(registering.decode(registering.encode(float("nan"))))


@pytest.mark.parametrize(
    "told", [{"a": 1}, {"dtype": "load"}, {"dtype": 3}, {"size": ["x"]}, {"device": "no"}, {"dict": [1]}, {"tuple": 1},
             {}, {"int": "x"}, {"float": "1"}, {"dict": [[{"dict": []}, 1]]}, {"size": [-1.5]}]
)  # fmt: skip
def test_contexts_that_were_never_encoded_are_format_errors(told):
    with pytest.raises(FormatError):
        registering.decode(told)


def test_contexts_are_of_bounded_depth():
    deep, told = [], []
    for _ in range(50):
        deep, told = [deep], [told]
    with pytest.raises(UsageError):
        registering.encode(deep)
    with pytest.raises(FormatError):
        registering.decode(told)


# -- what a file may claim -------------------------------------------------------------------------------------------


def stored(value):
    spec = kind.describe(value)
    host = kind.host_bytes(value)
    return spec, bytearray(host.keep.numpy().tobytes())


def changed(spec, row, **what):
    parts = [dict(p) for p in spec.extra["parts"]]
    parts[row].update(what)
    return replace(spec, extra={**spec.extra, "parts": parts})


def hostile():
    coo, data = stored(dense().to_sparse())
    csr, csr_data = stored(dense().to_sparse_csr())
    g, g_data = stored(torch.Generator())
    wrong = [
        changed(coo, 0, offset=64), changed(coo, 0, offset=3), changed(coo, 0, nbytes=1 << 60),
        changed(coo, 0, shape=[2, 4]), changed(coo, 0, dtype="float64"), changed(coo, 0, name="x"),
        changed(coo, 0, name=3), changed(coo, 1, dtype="no"), changed(coo, 1, dtype="qint8"), changed(coo, 1, shape=3),
        changed(coo, 0, shape=[-2, 3]), changed(coo, 1, nbytes=-8), replace(coo, shape=(4, 2)),
        replace(coo, dtype="sparse_coo[float32]"), replace(coo, extra={**coo.extra, "parts": {}}),
        replace(coo, extra={**coo.extra, "parts": [1]}), replace(coo, extra={**coo.extra, "parts": []}),
        replace(coo, extra={**coo.extra, "parts": coo.extra["parts"] * 999}),
        replace(coo, extra={**coo.extra, "layout": "sparse_csr"}), replace(coo, shape=(2**62, 2**62)),
    ]  # fmt: skip
    far = bytearray(data)
    far[0:8] = (1 << 40).to_bytes(8, "little")
    backwards = bytearray(data)
    backwards[0:8] = (3).to_bytes(8, "little")
    jumping = bytearray(csr_data)
    jumping[8:16] = (1 << 40).to_bytes(8, "little")
    yield from ((w, data) for w in wrong)
    yield coo, far
    yield coo, backwards  # says that it is coalesced, and is not sorted
    yield csr, jumping
    yield changed(g, 0, shape=[4, 1264]), g_data
    yield replace(g, nbytes=64), g_data[:64]


def test_a_wrong_spec_of_parts_is_a_format_error():
    for spec, data in hostile():
        with pytest.raises(FormatError):
            kind.build(spec, memoryview(data))


def test_a_generator_of_a_device_that_is_not_there_is_refused():
    spec, data = stored(torch.Generator())
    with pytest.raises(UnsupportedLeafError, match="not there"):
        kind.build(replace(spec, extra={**spec.extra, "device": "hpu:7"}), memoryview(data))


def test_a_wrong_meta_spec_is_a_format_error():
    spec = kind.describe(torch.ones(2, 3, device="meta"))
    for wrong in (
        replace(spec, dtype="qint8"), replace(spec, shape=(2**62, 2**62)), replace(spec, dtype="x"),
        replace(spec, extra={**spec.extra, "order": [1]}), replace(spec, extra={**spec.extra, "order": "ab"}),
    ):  # fmt: skip
        with pytest.raises(FormatError):
            kind.build(wrong, memoryview(b""))


# -- other rows of the table -----------------------------------------------------------------------------------------


def test_nothing_distributed_is_imported_for_who_does_not_use_it():
    program = (
        "import sys, torch, pccheck_torch\n"
        "from pccheck.state.kinds import kind_of\n"
        "from pccheck.state.planner import Planner\n"
        "p = Planner(kind_of, 4096)\n"
        "for _ in range(2): p.prepare([torch.ones(3), torch.eye(3).to_sparse(), torch.Generator()], step=1)\n"
        "print([m for m in ('torch.distributed.tensor', 'torch._dynamo', 'pccheck_torch.dcp') if m in sys.modules])\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[]"


def test_the_keys_and_views_that_others_lose_are_kept(keep):
    big = torch.zeros(1 << 20)
    state = {
        "a.b": 1, "a": {"b": 2}, "0": "text", 0: "number", "view": big[5:9], "expanded": torch.ones(1).expand(1000),
        "float8": torch.zeros(3).to(torch.float8_e8m0fnu), "empty": {}, "neg": torch._neg_view(torch.ones(2)),
        "rng": torch.get_rng_state(),
    }  # fmt: skip
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        back = keep(state)
    assert list(back) == list(state)
    assert (back["a.b"], back["a"], back["0"], back[0], back["empty"]) == (1, {"b": 2}, "text", "number", {})
    assert back["expanded"].tolist() == [1.0] * 1000
    assert back["neg"].tolist() == [-1, -1]
    assert torch.equal(back["rng"], state["rng"])


# -- without torch ---------------------------------------------------------------------------------------------------

READER = """
import sys
from importlib.machinery import PathFinder

class NoTorch(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        if name.split(".")[0] == "torch":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, NoTorch)
import numpy as np, pccheck
state = pccheck.open(sys.argv[1]).restore().state
assert "torch" not in sys.modules
coo, csr, g = state["coo"], state["csr"], state["g"]
assert set(coo) == {"indices", "values"} and coo["indices"].dtype == np.int64 and coo["values"].dtype == np.float64
assert coo["indices"].tolist() == [[0, 2, 3], [1, 0, 5]] and coo["values"].tolist() == [1, -2, 3]
assert set(csr) == {"crow_indices", "col_indices", "values"} and csr["crow_indices"].tolist() == [0, 1, 1, 2, 3]
assert g["state"].dtype == np.uint8 and g["state"].nbytes > 1000
assert set(state["t"]) == {"values"} and state["t"]["values"].tolist() == [[1, 1]] * 4
assert state["meta"] == {"device": "meta", "dtype": "bfloat16", "shape": [2, 3]}
assert state["w"].tolist() == [1, 1]
print("read")
"""


@pytest.mark.usefixtures("registered")
def test_a_reader_without_torch_gets_the_parts_as_arrays(tmp_path):
    state = {
        "coo": dense().to_sparse(), "csr": dense().to_sparse_csr(), "g": torch.Generator(), "t": tagged(),
        "meta": torch.ones(2, 3, device="meta", dtype=torch.bfloat16), "w": torch.ones(2),
    }  # fmt: skip
    with pccheck.Checkpointer(tmp_path, chunk_bytes=1 << 16) as ck:
        ck.save(1, state)
    done = subprocess.run([sys.executable, "-c", READER, str(tmp_path)], capture_output=True, text=True, timeout=120)
    assert (done.stdout, done.returncode) == ("read\n", 0), done.stderr
