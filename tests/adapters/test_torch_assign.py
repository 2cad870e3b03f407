"""Restoring onto the device, dtype and layout of `like`, and in place into live tensors."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

import pccheck_torch  # noqa: E402
from pccheck_torch import kind  # noqa: E402
from pccheck_torch.leaves import registering  # noqa: E402
from pccheck_torch.leaves.kind import DTYPES, QUANTIZED  # noqa: E402

import pccheck  # noqa: E402
from pccheck.errors import MismatchError, UnsupportedLeafError  # noqa: E402

Parameter = torch.nn.Parameter
pytestmark = pytest.mark.filterwarnings("ignore:.*([Ss]parse|ComplexHalf).*")


def bits(tensor):
    size = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}[tensor.element_size()]
    return tensor.detach().contiguous().view(size).flatten().tolist()


@pytest.mark.parametrize("name", sorted(set(DTYPES) - QUANTIZED))
def test_every_dtype_is_assigned_to_the_bit(name):
    dtype = DTYPES[name]
    raw = torch.arange(6 * dtype.itemsize, dtype=torch.uint8) % (2 if dtype is torch.bool else 255)
    value, target = raw.view(dtype), torch.zeros(6 * dtype.itemsize, dtype=torch.uint8).view(dtype)
    kind.assign(target, value)
    assert bits(target) == bits(value)


LIVE = {
    "plain": lambda: torch.zeros(2, 3, 4, 5),
    "channels_last": lambda: torch.zeros(2, 3, 4, 5).to(memory_format=torch.channels_last),
    "transposed": lambda: torch.zeros(5, 4, 3, 2).permute(3, 2, 1, 0),
    "a part": lambda: torch.zeros(4, 3, 4, 10)[::2, :, :, ::2],
    "parameter": lambda: Parameter(torch.zeros(2, 3, 4, 5)),
    "frozen": lambda: Parameter(torch.zeros(2, 3, 4, 5), requires_grad=False),
    "wants gradient": lambda: torch.zeros(2, 3, 4, 5, requires_grad=True),
    "negative": lambda: torch._neg_view(torch.zeros(2, 3, 4, 5)),
    "0-d": lambda: torch.zeros(()),
    "empty": lambda: torch.zeros(0, 3),
}


@pytest.mark.parametrize("live", LIVE)
def test_live_tensors_are_changed_in_place_and_stay_what_they_are(live):
    target = LIVE[live]()
    value = torch.arange(float(target.numel())).reshape(target.shape)
    facts = target.data_ptr(), target.stride(), target.requires_grad, target.is_leaf, type(target)
    assert kind.assignable(target)
    kind.assign(target, value)
    assert torch.equal(target.detach().resolve_neg(), value)
    assert facts == (target.data_ptr(), target.stride(), target.requires_grad, target.is_leaf, type(target))


def test_an_optimizer_that_was_assigned_steps_as_the_saved_one():
    def made():
        torch.manual_seed(0)
        model = torch.nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
        return model, torch.optim.AdamW(model.parameters(), lr=0.1)

    def step(model, optimizer, x=torch.ones(2, 3, 5, 5)):  # noqa: B008
        optimizer.zero_grad()
        model(x).square().sum().backward()
        optimizer.step()

    (a, opt_a), (b, opt_b) = made(), made()
    for _ in range(3):
        step(a, opt_a)
    step(b, opt_b)
    for target, value in zip(b.state_dict().values(), a.state_dict().values(), strict=True):
        kind.assign(target, value)
    for mine, saved in zip(opt_b.state.values(), opt_a.state.values(), strict=True):
        for key in mine:
            kind.assign(mine[key], saved[key])
    step(a, opt_a), step(b, opt_b)
    assert all(torch.equal(x, y) for x, y in zip(a.parameters(), b.parameters(), strict=True))
    assert b.weight.is_contiguous(memory_format=torch.channels_last)


def test_inference_tensors_can_be_assigned():
    with torch.inference_mode():
        target = torch.zeros(3)
    kind.assign(target, torch.arange(3.0))
    assert target.tolist() == [0, 1, 2]


@pytest.mark.parametrize("to", ["to_sparse", "to_sparse_csr", "to_sparse_csc"])
def test_sparse_tensors_take_the_restored_elements(to):
    target, value = getattr(torch.eye(4), to)(), getattr(torch.ones(4, 4).triu(), to)()
    assert kind.assignable(target)
    kind.assign(target, value)
    assert torch.equal(target.to_dense(), value.to_dense())
    with pytest.raises(UnsupportedLeafError):
        kind.assign(target, torch.ones(4, 4))
    with pytest.raises(UnsupportedLeafError):
        kind.assign(torch.ones(4, 4), value)


def test_sparse_tensors_keep_whether_they_are_coalesced():
    value = torch.sparse_coo_tensor([[1, 1]], [1.0, 2.0], (3,))
    target = torch.eye(3)[0].to_sparse()
    kind.assign(target, value)
    assert not target.is_coalesced()
    assert target.to_dense().tolist() == [0, 3, 0]


def test_a_generator_takes_the_restored_state():
    a, b = torch.Generator().manual_seed(1), torch.Generator().manual_seed(2)
    kind.assign(b, a)
    assert torch.equal(torch.rand(3, generator=a), torch.rand(3, generator=b))


class Pair(torch.Tensor):
    """Two tensors that a class holds."""

    @staticmethod
    def __new__(cls, a, b, copies=False):
        made = torch.Tensor._make_wrapper_subclass(cls, a.shape, dtype=a.dtype)
        made.a, made.b, made.copies = a, b, copies
        return made

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        raise NotImplementedError(func)


@pytest.fixture
def pair(monkeypatch):
    """Let a test make registered tensors."""
    monkeypatch.setattr(registering, "_by_class", {})
    monkeypatch.setattr(registering, "_by_name", {})

    def flatten(p):
        return {"a": p.a.clone() if p.copies else p.a, "b": p.b}, p.copies

    pccheck_torch.register(Pair, flatten, lambda parts, copies: Pair(parts["a"], parts["b"], copies))
    return lambda n, **how: Pair(torch.full((3,), float(n)), torch.full((2,), n), **how)


def test_registered_tensors_are_changed_part_by_part(pair):
    target = pair(1)
    a = target.a
    assert kind.assignable(target)
    kind.assign(target, pair(7))
    assert (target.a.tolist(), target.b.tolist()) == ([7, 7, 7], [7, 7])
    assert target.a is a
    assert not kind.assignable(pair(1, copies=True))
    for wrong in (pair(1, copies=True), torch.ones(3), Pair(torch.ones(3), torch.ones(2).double())):
        with pytest.raises(UnsupportedLeafError):
            kind.assign(target, wrong)
    with pytest.raises(UnsupportedLeafError, match="copies"):
        kind.assign(pair(1, copies=True), pair(2, copies=True))


UNASSIGNABLE = [
    torch.ones(1).expand(3), torch.ones(3, device="meta"), torch.Size([1]), torch.float32, torch.device("cpu"),
    torch.ones(4).as_strided((3,), (0,)),
]  # fmt: skip


@pytest.mark.parametrize("target", UNASSIGNABLE, ids=lambda t: f"{type(t).__name__}{tuple(getattr(t, 'shape', ()))}")
def test_what_has_no_values_of_its_own_cannot_be_assigned(target):
    assert not kind.assignable(target)
    if isinstance(target, torch.Tensor):
        with pytest.raises(UnsupportedLeafError):
            kind.assign(target, torch.arange(3.0))


def test_a_freed_tensor_cannot_be_assigned():
    t = torch.ones(3)
    t.untyped_storage().resize_(0)
    assert not kind.assignable(t)


@pytest.mark.parametrize("value", [torch.ones(3, dtype=torch.float64), torch.ones(4), torch.ones(1, 3)], ids=str)
def test_another_dtype_or_shape_is_never_assigned(value):
    target = torch.zeros(3)
    with pytest.raises(UnsupportedLeafError):
        kind.assign(target, value)
    assert not target.any()


# -- like ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("saved_as", ["plain", "channels_last", "transposed"])
@pytest.mark.parametrize("wanted", ["plain", "channels_last", "transposed", "a part"])
def test_like_gives_the_memory_order(saved_as, wanted, tmp_path):
    value, like = LIVE[saved_as](), LIVE[wanted]()
    value.copy_(torch.arange(120.0).reshape(2, 3, 4, 5))
    with pccheck.Checkpointer(tmp_path, chunk_bytes=1 << 16) as ck:
        ck.save(1, [value])
        ck.wait()
        back = ck.restore(like=[like]).state[0]
    assert torch.equal(back, value)
    assert back.stride() == (value.stride() if wanted == "a part" else like.stride())


# -- case 35: what a checkpoint lacks, has besides, or has otherwise -------------------------------------------------


def trained(steps):
    torch.manual_seed(3)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 2))
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(6, 4)).square().sum().backward()
        optimizer.step()
    return model, optimizer


def test_one_report_names_everything_missing_unexpected_or_different(tmp_path):
    model, optimizer = trained(2)
    with pccheck.Checkpointer(tmp_path, chunk_bytes=1 << 16) as ck:
        ck.save(1, {"model": model.state_dict(), "optimizer": optimizer.state_dict()})
        ck.wait()
        like = {"model": dict(model.state_dict()), "optimizer": optimizer.state_dict()}
        del like["model"]["0.bias"]
        like["model"]["extra"] = torch.ones(2)
        like["model"]["0.weight"] = torch.ones(8, 5)
        like["model"]["2.weight"] = torch.ones(2, 8, dtype=torch.bfloat16)
        like["model"]["2.bias"] = 3
        with pytest.raises(MismatchError) as caught:
            ck.restore(like=like)
        found = {m.path: m.problem for m in caught.value.mismatches if not m.path.startswith("model/@")}
        assert found == {
            "model/0.bias": "unexpected", "model/extra": "missing", "model/0.weight": "shape",
            "model/2.weight": "dtype", "model/2.bias": "kind",
        }  # fmt: skip
        partly = ck.restore(like=like, partial=True).state
        assert torch.equal(partly["model"]["1.weight"], model.state_dict()["1.weight"])
        assert partly["model"]["0.weight"] is like["model"]["0.weight"]


def test_a_fresh_optimizer_without_state_is_not_restored_into_in_silence(tmp_path):
    model, optimizer = trained(2)
    _, fresh = trained(0)
    with pccheck.Checkpointer(tmp_path, chunk_bytes=1 << 16) as ck:
        ck.save(1, {"optimizer": optimizer.state_dict()})
        ck.wait()
        with pytest.raises(MismatchError) as caught:
            ck.restore(like={"optimizer": fresh.state_dict()})
        lost = {m.path for m in caught.value.mismatches if m.problem == "unexpected"}
        assert {f"optimizer/state/{i}/exp_avg" for i in range(len(list(model.parameters())))} <= lost
        with pytest.raises(MismatchError) as caught:
            ck.restore().load_into({"optimizer": fresh.state_dict()})
        assert {m.problem for m in caught.value.mismatches} == {"unexpected"}


def test_live_state_is_untouched_where_anything_does_not_fit(tmp_path):
    model, _ = trained(2)
    target, _ = trained(0)
    before = {k: v.clone() for k, v in target.state_dict().items()}
    live = {"model": dict(target.state_dict())}
    with pccheck.Checkpointer(tmp_path, chunk_bytes=1 << 16) as ck:
        ck.save(1, {"model": dict(model.state_dict())})
        ck.wait()
        restored = ck.restore()
        restored.load_into(live)
        assert all(torch.equal(v, model.state_dict()[k]) for k, v in target.state_dict().items())
        for k, v in before.items():
            target.state_dict()[k].copy_(v)
        live["model"]["2.bias"] = torch.ones(3)
        with pytest.raises(MismatchError, match=r"2\.bias"):
            restored.load_into(live)
        assert all(torch.equal(v, before[k]) for k, v in target.state_dict().items())


def test_tied_leaves_stay_tied_wherever_like_puts_them(tmp_path):
    value = torch.arange(12.0).reshape(3, 4)
    state = {"a": value, "b": value, "c": Parameter(value), "d": value}

    def fortran():
        return torch.zeros(4, 3).t()

    like = {"a": fortran(), "b": fortran(), "c": Parameter(fortran()), "d": torch.zeros(3, 4)}
    with pccheck.Checkpointer(tmp_path, chunk_bytes=1 << 16) as ck:
        ck.save(1, state)
        ck.wait()
        back = ck.restore(like=like).state
    assert back["a"] is back["b"]
    assert type(back["c"]) is Parameter
    assert all(torch.equal(back[k], value) for k in like)
    assert [back[k].stride() for k in like] == [like[k].stride() for k in like]
