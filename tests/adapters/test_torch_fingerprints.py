"""What a plan depends on is noticed on every save: by torch's check of all tensors at once, and in public words."""

from __future__ import annotations

import gc
import subprocess
import sys
import weakref

import pytest

torch = pytest.importorskip("torch")

from pccheck_torch import kind  # noqa: E402
from pccheck_torch.leaves import fingerprints  # noqa: E402
from pccheck_torch.leaves.fingerprints import DenseFingerprint  # noqa: E402

Parameter = torch.nn.Parameter


@pytest.fixture(params=["at once", "one by one"])
def how(request, monkeypatch):
    """Ask in both ways."""
    if request.param == "one by one":
        monkeypatch.setattr(fingerprints, "can_check_at_once", lambda: False)
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


def test_after_a_change_of_mode_all_are_asked_at_once_again():
    assert fingerprints.can_check_at_once(), "this torch is asked one by one: saves of many tensors take longer"
    values = base()
    fingerprint = DenseFingerprint(values)
    asked = []
    with pytest.MonkeyPatch.context() as patch:
        one_by_one = DenseFingerprint._asked_one_by_one
        patch.setattr(DenseFingerprint, "_asked_one_by_one", lambda self, t: asked.append(1) or one_by_one(self, t))
        assert fingerprint.fits(values)
        with torch.inference_mode():
            assert fingerprint.fits(values)
            assert asked == [1]
            assert fingerprint.fits(values)
            assert fingerprint.fits(values)
        assert asked == [1]


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


def test_a_torch_whose_check_notices_less_is_not_trusted(monkeypatch):
    fingerprints.can_check_at_once.cache_clear()
    try:
        monkeypatch.setattr(fingerprints, "_check_of", lambda *tensors: lambda *others: True)
        assert not fingerprints.can_check_at_once()
        fingerprints.can_check_at_once.cache_clear()

        def gone(*tensors):
            raise ImportError

        monkeypatch.setattr(fingerprints, "_check_of", gone)
        assert not fingerprints.can_check_at_once()
        test_every_change_is_noticed("dtype", "one by one")
    finally:
        fingerprints.can_check_at_once.cache_clear()


def test_the_check_is_found_trustworthy_in_any_mode_and_without_a_word():
    program = (
        "import warnings, torch\n"
        "warnings.simplefilter('error')\n"
        "from pccheck_torch.leaves.fingerprints import can_check_at_once as can\n"
        "for mode in (torch.inference_mode(), torch.no_grad(), torch.device('meta'), torch.autocast('cpu')):\n"
        "    can.cache_clear()\n"
        "    with mode: assert can(), mode\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")
