"""What a plan depends on is noticed on every save: by one native call for all tensors, and in torch's own words."""

from __future__ import annotations

import gc
import itertools
import weakref

import pytest

torch = pytest.importorskip("torch")

from pccheck_torch import kind  # noqa: E402
from pccheck_torch.leaves.dense import DTYPES, QUANTIZED  # noqa: E402
from pccheck_torch.leaves.fingerprints import DenseFingerprint  # noqa: E402

from pccheck import dlpack  # noqa: E402

Parameter = torch.nn.Parameter


@pytest.fixture(params=["at once", "one by one"])
def how(request, monkeypatch):
    """Ask in both ways."""
    if request.param == "one by one":
        monkeypatch.setattr(dlpack, "described", lambda *_: None)
    return request.param


def base():
    return [torch.ones(4, 6), torch.zeros(3, dtype=torch.complex64), Parameter(torch.ones(2, 2)), torch.ones(5)]


def z():
    return torch.zeros(3, dtype=torch.complex64)


CHANGES = {
    "dtype": (0, lambda: torch.ones(4, 6, dtype=torch.int32)),
    "dtype of the same size": (0, lambda: torch.ones(4, 6).view(torch.int32)),
    "bfloat16 for float16": (3, lambda: torch.ones(5, dtype=torch.bfloat16)),
    "shape": (0, lambda: torch.ones(6, 4)),
    "axes": (0, lambda: torch.ones(24)),
    "an axis of one": (0, lambda: torch.ones(4, 6, 1)),
    "transposed": (0, lambda: torch.ones(6, 4).t()),
    "strided": (0, lambda: torch.ones(4, 12)[:, ::2]),
    "conjugate": (1, lambda: z().conj()),
    "negative": (0, lambda: torch._neg_view(torch.ones(4, 6))),
    "negative complex": (1, lambda: torch._neg_view(z())),
    "gradient": (0, lambda: torch.ones(4, 6, requires_grad=True)),
    "frozen": (2, lambda: Parameter(torch.ones(2, 2), requires_grad=False)),
    "meta": (0, lambda: torch.ones(4, 6, device="meta")),
    "sparse": (0, lambda: torch.ones(4, 6).to_sparse()),
    "csr": (0, lambda: torch.ones(4, 6).to_sparse_csr()),
    "csc": (0, lambda: torch.ones(4, 6).to_sparse_csc()),
    "nested": (0, lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])),
    "quantized": (0, lambda: torch.quantize_per_tensor(torch.ones(4, 6), 0.1, 0, torch.qint8)),
    "mkldnn": (0, lambda: torch.ones(4, 6).to_mkldnn() if torch.backends.mkldnn.is_available() else torch.ones(1)),
}


def is_unchanged(values, fingerprint):
    """As a planner asks: what raises is not unchanged."""
    try:
        return kind.unchanged(values, fingerprint)
    except Exception:
        return False


@pytest.mark.filterwarnings("ignore:.*(parse|quantiz|nested).*")
@pytest.mark.parametrize("what", CHANGES)
def test_every_change_is_noticed(what, how):
    at, make = CHANGES[what]
    values = base()
    fingerprint = kind.fingerprint(values)
    assert is_unchanged(values, fingerprint)
    values[at] = make()
    assert not is_unchanged(values, fingerprint)
    try:
        changed = kind.fingerprint(values)
    except Exception:
        return  # a tensor that is refused has none
    assert not is_unchanged(base(), changed)


def test_new_values_and_new_tensors_are_no_change(how):
    fingerprint = kind.fingerprint(base())
    assert kind.unchanged(base(), fingerprint)
    values = base()
    values[0].add_(1)
    assert kind.unchanged(tuple(values), fingerprint)


def test_whether_a_tensor_is_a_leaf_of_the_graph_is_noticed(how):
    leaf = torch.ones(3, requires_grad=True)
    fingerprint = kind.fingerprint([leaf])
    assert not kind.unchanged([leaf * 2], fingerprint)
    assert kind.unchanged([torch.ones(3, requires_grad=True)], fingerprint)


MODES = {
    "no_grad": torch.no_grad, "inference": torch.inference_mode, "autocast": lambda: torch.autocast("cpu"),
    "default device": lambda: torch.device("meta"),
}  # fmt: skip


@pytest.mark.parametrize("later", MODES)
@pytest.mark.parametrize("first", MODES)
def test_the_mode_of_torch_makes_no_difference(first, later):
    values = base()
    with MODES[first]():
        fingerprint = kind.fingerprint(values)
    for mode in (later, first, later, later):
        with MODES[mode]():
            assert kind.unchanged(values, fingerprint)
    values[3] = torch.ones(6)
    with MODES[later]():
        assert not kind.unchanged(values, fingerprint)


def test_with_the_extension_all_tensors_are_asked_at_once():
    if not dlpack.NATIVE or not hasattr(torch.Tensor, "__dlpack_c_exchange_api__"):
        pytest.skip("this torch is asked one by one: saves of many tensors take longer")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("pccheck_torch.leaves.fingerprints._Words", None)
        assert DenseFingerprint(base()).addresses(base()) is not None


def test_the_same_tensor_twice_is_no_change():
    t = torch.ones(3)
    fingerprint = kind.fingerprint([t, t])
    assert kind.unchanged([t, t], fingerprint)
    assert kind.unchanged([torch.ones(3), torch.ones(3)], fingerprint)
    separate = kind.fingerprint([torch.ones(3), torch.ones(3)])
    assert kind.unchanged([t, t], separate)
    assert not kind.unchanged([t, t.int()], separate)


def test_a_fingerprint_keeps_no_tensor_alive(how):
    values = [*base(), torch.ones(3).to_sparse(), torch.ones(2, device="meta"), torch.Generator()]
    gone = [weakref.ref(v) for v in values if isinstance(v, torch.Tensor)]
    fingerprint = kind.fingerprint(values)
    assert kind.unchanged(values, fingerprint)
    del values
    gc.collect()
    assert [r() for r in gone] == [None] * len(gone)
    assert fingerprint is not None


def dtypes():
    """Give those of which there are tensors."""
    for name, dtype in DTYPES.items():
        if name not in QUANTIZED:
            try:
                torch.empty(4, dtype=dtype)
            except (RuntimeError, TypeError):
                continue
            yield dtype


@pytest.mark.filterwarnings("ignore:ComplexHalf support")
def test_no_two_dtypes_are_taken_for_one_another(how):
    found = list(dict.fromkeys(dtypes()))
    assert {torch.uint8, torch.bfloat16, torch.bool, torch.complex64} <= set(found)
    planned = {dtype: DenseFingerprint([torch.empty(4, dtype=dtype)]) for dtype in found}
    for before, after in itertools.product(found, found):
        try:
            same = planned[before].addresses([torch.empty(4, dtype=after)]) is not None
        except RuntimeError:  # DLPack has no name for it
            same = False
        assert same == (before == after), (before, after)


def test_addresses_come_with_the_answer(how):
    values = base()
    fingerprint = DenseFingerprint(values)
    values[0].data = torch.zeros(4, 6)
    assert fingerprint.addresses(values).tolist() == [t.data_ptr() for t in values]
    dense = [values[0], values[2]]
    held, places = kind.held_at(dense, kind.fingerprint(dense))
    assert held is None
    assert places.tolist() == [t.data_ptr() for t in dense]
    told = kind.fingerprint(dense)
    dense[1].untyped_storage().resize_(0)
    with pytest.raises(ValueError, match="freed"):
        kind.held_at(dense, told)
    assert kind.held_at([torch.ones(4, 6), torch.ones(1, 2)], told) is None
