"""Trees of jax arrays that a jitted update changes, donated to it or not (bench: imports jax, states)."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, final

import jax
import numpy as np

from .states import GROUPS, gpt_shapes

Shapes = dict[str, dict[str, tuple[int, ...]]]
Tree = dict[str, Any]
TURNS = 20  # without donation an update is a copy: each changes one leaf in so many
AT_ONCE = 100  # leaves in one call, so that thousands of them compile in a second


def gpt(size_bytes: int) -> Shapes:
    """Give the shapes of a GPT's float32 weights and two moments, of about `size_bytes` in all."""
    shapes = gpt_shapes(size_bytes)
    return dict.fromkeys(GROUPS, shapes)


def many(count: int, leaf_bytes: int) -> Shapes:
    """Give the shapes of `count` float32 leaves of one size."""
    return {"model": {f"p{i}": (8, leaf_bytes // 32) for i in range(count)}}


def bytes_of(shapes: Shapes) -> int:
    """Give the bytes of all arrays of these shapes, in float32."""
    return sum(4 * math.prod(shape) for group in shapes.values() for shape in group.values())


@final
class Arrays:
    """Random arrays; each update writes the step into the first, the middle and the last row of leaves.

    With donation XLA changes all leaves in place, which costs little: what it costs when something else still holds
    their memory, so that it must copy, is the saver's doing. Without, every leaf that an update changes is a new array.
    A checkpoint that mixes two steps has mixed rows. What they hold can be made again, so that no copy is kept.

    Args:
        shapes: of the leaves.
        donated: whether an update is given the memory of what it replaces.
    """

    def __init__(self, shapes: Shapes, *, donated: bool) -> None:
        self._names = [(group, name, shape) for group, shapes_of in shapes.items() for name, shape in shapes_of.items()]
        self._donated = donated
        self._leaves: list[Any] = [jax.device_put(values, may_alias=False) for _, _, values in self._expected(0)]
        self._step = 0
        for turn in range(TURNS):  # compiles; and from then on all memory is XLA's own
            self._update(turn, 0)

    @property
    def state(self) -> Tree:
        """The tree as it is now, with the step."""
        tree: Tree = {"progress": {"step": jax.device_put(np.int32(self._step))}}
        for (group, name, _), leaf in zip(self._names, self._leaves, strict=True):
            tree.setdefault(group, {})[name] = leaf
        return tree

    def set(self, step: int) -> None:
        """Change it, and wait until that is done."""
        self._step = step
        self._update(step % TURNS, step)

    def _update(self, turn: int, step: int) -> None:
        mark, leaves = np.float32(step), self._leaves
        if self._donated:
            for first in range(0, len(leaves), AT_ONCE):
                part = slice(first, first + AT_ONCE)
                leaves[part] = _in_place(leaves[part], mark)
        else:
            for index in range(turn, len(leaves), TURNS):
                leaves[index] = _anew([leaves[index]], mark)[0]
        jax.block_until_ready(leaves)  # type: ignore[no-untyped-call]

    def differences(self, restored: Tree, step: int) -> list[str]:
        """Give the names of arrays that are not those of `step` in every bit, or not jax arrays of that dtype."""
        found = [] if self.step_of(restored) == step else ["progress.step"]
        count = 0
        for group, name, values in self._expected(step):
            leaf = restored.get(group, {}).get(name)
            count += leaf is not None
            same = isinstance(leaf, jax.Array) and leaf.dtype == values.dtype and leaf.shape == values.shape
            if not same or not np.array_equal(np.asarray(leaf).view(np.uint32), values.view(np.uint32)):
                found.append(f"{group}.{name}")
        surplus = sum(len(group) for name, group in restored.items() if name != "progress") - count
        return found + [f"{surplus} leaves too many"] * (surplus > 0)

    def step_of(self, restored: Tree) -> int:
        """Give the step."""
        return int(restored["progress"]["step"])

    def _expected(self, step: int) -> Iterator[tuple[str, str, np.ndarray[Any, Any]]]:
        """Give group, name and values of each leaf at `step`."""
        for index, (group, name, shape) in enumerate(self._names):
            values = np.random.default_rng(index).standard_normal(shape, np.float32)
            changed = step if self._donated else max(0, step - (step - index) % TURNS)
            values[[0, shape[0] // 2, -1]] = changed
            yield group, name, values


def _marked(leaves: list[Any], mark: Any) -> list[Any]:
    return [leaf.at[0].set(mark).at[leaf.shape[0] // 2].set(mark).at[-1].set(mark) for leaf in leaves]


_in_place = jax.jit(_marked, donate_argnums=0)
_anew = jax.jit(_marked)
