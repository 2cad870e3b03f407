"""Files of every format version that was ever released are read for ever, by pccheck and by the independent reader."""

from __future__ import annotations

import collections
import importlib.util
import json
import re
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import pccheck
from pccheck.audit import audit, exit_code
from pccheck.errors import StepNotFoundError

HERE = Path(__file__).parent
V1 = HERE / "v1"
EXAMPLE = HERE.parents[1] / "examples" / "read_checkpoint.py"
FILES = sorted(path.name for path in V1.glob("*.pcc"))
LEAVES: dict[str, dict[str, str]] = json.loads((V1 / "leaves.json").read_text())


def golden() -> Any:
    """Load the script beside this test, which says what the files hold."""
    spec = importlib.util.spec_from_file_location("make_golden", HERE / "make_golden.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["make_golden"] = module
    spec.loader.exec_module(module)
    return module


GOLDEN = golden()


def check(found: Any, wanted: Any, place: str = "state") -> None:
    """Fail unless two states are the same: types, keys in order, every bit of every number and array."""
    kind = type(wanted)
    if isinstance(wanted, tuple) and hasattr(wanted, "_fields"):
        assert type(found).__name__ == kind.__name__, place
        assert found._fields == wanted._fields, place
        check(tuple(found), tuple(wanted), place)
    elif hasattr(wanted, "__dataclass_fields__"):
        assert type(found).__name__ == kind.__name__, place
        check(found._asdict(), vars(wanted), place)
    elif kind.__module__.split(".")[0] == "torch":
        assert (kind, found.dtype, found.shape, found.requires_grad) == (
            type(found), wanted.dtype, wanted.shape, wanted.requires_grad
        ), place  # fmt: skip
        assert found.equal(wanted), place
    else:
        assert type(found) is kind, f"{place}: {type(found)}"
        check_plain(found, wanted, place)


def check_plain(found: Any, wanted: Any, place: str) -> None:
    if isinstance(wanted, (np.ndarray, np.generic)):
        assert (found.dtype, found.shape) == (wanted.dtype, wanted.shape), place
        assert found.tobytes() == wanted.tobytes(), place
        if isinstance(wanted, np.ndarray) and wanted.ndim > 1 and wanted.flags.f_contiguous:
            assert found.flags.f_contiguous, place
    elif isinstance(wanted, dict):
        assert [(type(k), k) for k in found] == [(type(k), k) for k in wanted], place
        assert getattr(found, "default_factory", None) is getattr(wanted, "default_factory", None), place
        if isinstance(wanted, collections.OrderedDict):
            check(vars(found), vars(wanted), f"{place}.__dict__")
        for key, value in wanted.items():
            check(found[key], value, f"{place}[{key!r}]")
    elif isinstance(wanted, (list, tuple)):
        assert len(found) == len(wanted), place
        for index, value in enumerate(wanted):
            check(found[index], value, f"{place}[{index}]")
    elif isinstance(wanted, float):
        assert struct.pack("<d", found) == struct.pack("<d", wanted), place
    elif isinstance(wanted, complex):
        assert struct.pack("<2d", found.real, found.imag) == struct.pack("<2d", wanted.real, wanted.imag), place
    else:
        assert found == wanted, place


def test_the_files_are_all_there() -> None:
    assert set(FILES) == set(LEAVES)
    assert len(FILES) == 6


@pytest.mark.parametrize("name", FILES)
def test_version_1_is_read_as_it_was_saved(name: str) -> None:
    if name == "tensors.pcc":
        pytest.importorskip("torch")
    with pccheck.open(V1 / name) as view:
        restored = view.restore()
    assert restored is not None
    assert (restored.step, restored.counter, restored.metadata, restored.skipped) == (123, 1, {"name": name[:-4]}, ())
    check(restored.state, GOLDEN.states()[name[:-4]])


def test_tied_leaves_are_tied_again() -> None:
    with pccheck.open(V1 / "arrays.pcc") as view:
        state = view.checkpoint().state()
    assert state["tied"][0] is state["tied"][1]["again"]


@pytest.mark.parametrize("name", [*FILES, "store"])
def test_version_1_is_whole(name: str) -> None:
    reports = audit(V1 / name, verify=True)
    assert exit_code(reports) == 0
    assert all(slot.verified for report in reports for slot in report.slots if slot.verdict == "ok")


def test_the_store_of_version_1() -> None:
    with pccheck.open(V1 / "store") as view:
        assert view.steps() == [10, 20, 30, 35]
        assert view.latest() == 35
        newest = view.restore()
        assert newest is not None
        np.testing.assert_array_equal(newest.state["w"], np.full(1000, 35, "<i4"))
        for step in (10, 20, 30, 40):  # 40 was abandoned, and is kept: it can be had, by step only
            older = view.restore(step=step)
            assert older is not None
            np.testing.assert_array_equal(older.state["w"], np.full(1000, step, "<i4"))
            assert older.metadata == {"loss": 1 / step}
        with pytest.raises(StepNotFoundError):
            view.restore(step=50)
    (report,) = audit(V1 / "store")
    assert report.check is not None
    assert report.check.abandoned.ranges == ((4, 4),)
    published = report.published
    assert published is not None
    assert (published.step, published.incarnation, published.base) == (35, 2, 3)
    assert {slot.name: slot.state for slot in report.slots if slot.name.startswith("kept/")} == {
        "kept/10-c1.pcc": "kept",
        "kept/40-c4.pcc": "abandoned",
    }


# -- the independent reader ------------------------------------------------------------------------------------------


def example(path: Path) -> list[str]:
    """Run it in a Python that has no pccheck to import."""
    code = "import sys, runpy; sys.modules.update(pccheck=None, xxhash=None, msgspec=None, ml_dtypes=None)\n"
    code += "sys.argv = sys.argv[1:]; runpy.run_path(sys.argv[0], run_name='__main__')"
    done = subprocess.run(
        [sys.executable, "-c", code, str(EXAMPLE), str(path)], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.mark.parametrize("name", FILES)
def test_the_independent_reader_reads_every_file(name: str) -> None:
    first, *lines = example(V1 / name)
    assert first == f"{name}: step 123, counter 1, metadata {{'name': '{name[:-4]}'}}"
    found = dict(re.findall(r"^(\S*)  \S+ \S+ \[.*?\]  .*?  sha256 ([0-9a-f]{16})$", "\n".join(lines), re.M | re.S))
    assert found == {path: digest[:16] for path, digest in LEAVES[name].items()}


def test_the_independent_reader_finds_the_newest_of_a_store() -> None:
    first, line = example(V1 / "store")
    assert "step 35, counter 5" in first
    assert line.startswith("w  numpy <i4 [1000]  [35, 35, 35, 35]  sha256 ")


def test_the_independent_reader_is_short_and_stands_alone() -> None:
    text = EXAMPLE.read_text()
    assert len(text.splitlines()) <= 130
    modules = set(re.findall(r"^(?:import|from) (\w+)", text, re.M))
    assert modules <= {*sys.stdlib_module_names, "numpy"}
