"""Finding the kind of a leaf: by entry point, on first sight, with a way out where it is missing."""

from __future__ import annotations

from importlib.metadata import EntryPoint

import ml_dtypes
import numpy as np
import pytest

from pccheck.errors import PccheckError, UnsupportedLeafError
from pccheck.state import kinds
from pccheck.state.kinds import Kinds
from pccheck.state.planner import Planner


def installed(monkeypatch, **entries):
    """Let the installed packages offer these adapters and no others; count how often they are asked for."""
    asked = []
    found = [EntryPoint(name, value, kinds.GROUP) for name, value in entries.items()]

    def entry_points(*, group):
        asked.append(group)
        return found

    monkeypatch.setattr(kinds, "entry_points", entry_points)
    return asked


def value_of(module, base=object):
    return type("Tensor", (base,), {"__module__": module})()


def test_the_core_knows_numpy_and_long_texts(monkeypatch):
    asked = installed(monkeypatch)
    table = Kinds()
    for value in (np.zeros(1), np.float32(1), ml_dtypes.bfloat16(1), np.str_("a"), np.ma.masked_array([1])):
        assert table(value).name == "numpy"
    assert table("x").name == "str"
    assert table(b"x").name == "bytes"
    assert not asked, "no package's metadata is read for them"


def test_what_nobody_knows_has_no_kind_and_is_asked_for_once(monkeypatch):
    asked = installed(monkeypatch)
    table = Kinds()
    for _ in range(3):
        assert table(value_of("stranger.deep")) is None
        assert table({1}) is None
    assert asked == [kinds.GROUP]


def test_an_adapter_is_found_by_any_class_that_a_type_derives_from(monkeypatch):
    installed(monkeypatch, alien="pccheck.state.numpy_leaves:NumpyKind")
    table = Kinds()
    with pytest.raises(PccheckError, match="no LeafKind"):
        table(value_of("mine", type(value_of("alien.sub"))))
    monkeypatch.setattr("pccheck.state.numpy_leaves.the_kind", WholeAlien(), raising=False)
    installed(monkeypatch, alien="pccheck.state.numpy_leaves:the_kind")
    assert Kinds()(value_of("mine", type(value_of("alien.sub")))).name == "alien"
    assert Kinds().named("alien").name == "alien"


class WholeAlien(kinds.BytesKind.__mro__[1]):
    name = "alien"

    def recognises(self, value):
        return True

    def describe(self, value): ...
    def fingerprint(self, values): ...
    def host_bytes(self, value): ...
    def build(self, spec, data): ...
    def like(self, value): ...
    def convert(self, value, like): ...


@pytest.mark.parametrize(("module", "package"), kinds.PROVIDERS.items())
def test_a_missing_adapter_is_named_with_what_to_install(monkeypatch, module, package):
    installed(monkeypatch)
    table = Kinds()
    for _ in range(2):
        with pytest.raises(UnsupportedLeafError) as caught:
            Planner(table, 4096).prepare({"m": [value_of(f"{module}._sub")]}, step=1)
        assert caught.value.path == "m/0"
        assert f"pip install '{package}'" in str(caught.value)


def test_an_adapter_whose_framework_is_missing_counts_as_not_installed(monkeypatch):
    installed(monkeypatch, torch="no_such_package_at_all:kind")
    assert Kinds().named("torch") is None
    with pytest.raises(UnsupportedLeafError, match="pip install"):
        Kinds()(value_of("torch"))


def test_names_out_of_files_are_not_remembered(monkeypatch):
    installed(monkeypatch)
    table = Kinds()
    for i in range(1000):
        assert table.named(f"kind-{i}") is None
    assert len(table._named) < 10


def test_like_takes_abstract_arrays():
    class Abstract:
        shape, dtype = (2, 3), np.dtype("f4")

    kind, spec = Kinds().like(Abstract())
    assert (kind.name, spec.shape, spec.dtype) == ("numpy", (2, 3), "<f4")
    assert Kinds().like(object()) is None
