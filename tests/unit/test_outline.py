"""What a checkpoint holds, told without its bytes, and read by that."""

from __future__ import annotations

from collections import OrderedDict

import numpy as np
import pytest

import pccheck
from pccheck.errors import DamagedError, MediumError, NoValidCheckpointError, StepNotFoundError
from pccheck.leaves import StoredLeaf

STATE = {
    "w": np.arange(6.0).reshape(2, 3), 0: {"n": 1, "t": (1, [None, "x"])}, "long": "y" * 5000,
    "o": OrderedDict(b=np.ones(2, np.int8)),
}  # fmt: skip


@pytest.fixture
def store(tmp_path):
    with pccheck.Checkpointer(tmp_path, keep=3) as ck:
        for step in (1, 2, 3):
            ck.save(step, {**STATE, "step": step}, metadata={"loss": step})
            ck.wait(60)
    return tmp_path


def flip(path, counter):
    """Damage the manifest of a checkpoint."""
    name = next(e.name for e in pccheck.open(path).checkpoints if e.counter == counter)
    data = (path / name).read_bytes()
    at = data.index(b'"data_bytes"')
    (path / name).write_bytes(data[:at] + b"X" + data[at + 1 :])


def test_the_tree_has_leaves_for_arrays_and_values_as_they_are(store):
    outline = pccheck.outline(store)
    assert (outline.step, outline.counter, outline.world, outline.metadata) == (3, 3, 1, {"loss": 3})
    (tree,) = outline.trees
    assert list(tree) == ["w", 0, "long", "o", "step"]
    assert tree[0] == {"n": 1, "t": (1, [None, "x"])}
    assert isinstance(tree["o"], OrderedDict)
    leaves = {"w": ("w", "numpy", (2, 3)), "long": ("long", "str", (5000,))}
    for key, (path, kind, shape) in leaves.items():
        assert isinstance(tree[key], StoredLeaf)
        assert (tree[key].path, tree[key].spec.kind, tree[key].spec.shape) == (path, kind, shape)
    assert tree["o"]["b"].path == "o/b"


def test_a_stored_leaf_in_like_comes_back_as_it_was_saved(store):
    outline = pccheck.outline(store, 2)
    whole = outline.restore(like=outline.trees[0])
    assert whole.step == 2
    assert not whole.mismatches
    assert whole.state["w"].tolist() == STATE["w"].tolist()
    assert whole.state["long"] == STATE["long"]
    assert whole.state[0] == STATE[0]
    some = outline.restore(like={"o": outline.trees[0]["o"]}, partial=True)
    assert some.state["o"]["b"].tolist() == [1, 1]
    assert list(some.state) == ["o"]
    assert {m.problem for m in some.mismatches} == {"unexpected"}
    assert outline.restore().state["step"] == 2


def test_which_checkpoint(store, tmp_path):
    assert pccheck.outline(store, before=3).step == 2
    assert pccheck.outline(store, before=1) is None
    with pytest.raises(StepNotFoundError) as caught:
        pccheck.outline(store, 9)
    assert caught.value.available == (1, 2, 3)
    (tmp_path / "empty").mkdir()
    assert pccheck.outline(tmp_path / "empty") is None
    with pytest.raises(MediumError):
        pccheck.outline(tmp_path / "nowhere")
    with pccheck.Checkpointer(tmp_path / "new"):
        pass
    assert pccheck.outline(tmp_path / "new") is None


def test_manifests_that_are_not_whole_are_passed_over(store):
    flip(store, 3)
    outline = pccheck.outline(store)
    assert outline.step == 2
    assert [(s.counter, s.step) for s in outline.skipped] == [(3, 3)]
    flip(store, 2)
    flip(store, 1)
    with pytest.raises(NoValidCheckpointError):
        pccheck.outline(store)


def test_what_is_damaged_is_found_when_it_is_read(store):
    outline = pccheck.outline(store)
    name = pccheck.open(store).checkpoints[0].name
    with (store / name).open("r+b") as file:
        file.seek(65536)
        file.write(b"\xff")
    with pytest.raises(DamagedError):
        outline.restore()
