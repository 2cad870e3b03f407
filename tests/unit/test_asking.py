"""A `like` that is asked what it wants once it is known what is stored."""

from __future__ import annotations

import numpy as np
import pytest

import pccheck
from pccheck.errors import MismatchError
from pccheck.leaves import StoredLeaf


class Asked:
    """Wants whatever is stored of "a", and remembers what that was."""

    def __init__(self, b):
        self.b, self.stored, self.times = b, None, 0

    def __pccheck_like__(self, stored):
        self.stored, self.times = stored, self.times + 1
        return {"a": stored["a"], "b": self.b}


@pytest.fixture
def ck(tmp_path):
    with pccheck.Checkpointer(tmp_path) as ck:
        ck.save(3, {"a": [np.arange(5), 1.5, (None,)], "b": np.ones((2, 3), np.float32)})
        ck.wait()
        yield ck


def test_it_is_given_the_outline_and_gives_the_like(ck):
    like = Asked(np.zeros((2, 3), np.float32))
    restored = ck.restore(like=like)
    assert restored.state["a"][0].tolist() == [0, 1, 2, 3, 4]
    assert restored.state["a"][1:] == [1.5, (None,)]
    assert restored.state["b"].sum() == 6
    leaf = like.stored["a"][0]
    assert isinstance(leaf, StoredLeaf)
    assert (leaf.spec.shape, like.stored["b"].spec.dtype) == ((5,), "<f4")


def test_what_it_asks_for_must_fit(ck):
    with pytest.raises(MismatchError, match="b: shape"):
        ck.restore(like=Asked(np.zeros((2, 4), np.float32)))
    restored = ck.restore(like=Asked(np.zeros((2, 4), np.float32)), partial=True)
    assert [m.path for m in restored.mismatches] == ["b"]


@pytest.mark.parametrize("how", ["checkpointer", "view", "checkpoint", "mapped"])
def test_it_is_asked_once(ck, tmp_path, how):
    like = Asked(np.zeros((2, 3), np.float32))
    with pccheck.open(tmp_path) as view:
        stored = view.checkpoint()
        calls = {
            "checkpointer": ck.restore, "view": view.restore, "checkpoint": stored.restore, "mapped": stored.mapped,
        }  # fmt: skip
        calls[how](like=like)
    assert like.times == 1
