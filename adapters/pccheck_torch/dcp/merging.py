"""The states of all ranks that saved a checkpoint as one tree, and how it is read (imports torch, pccheck, fitting)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, final

import torch

import pccheck
from pccheck.errors import MismatchError
from pccheck.leaves import StoredLeaf
from pccheck_torch.dcp.fitting import filled, leaves_of
from pccheck_torch.leaves.dense import dtype_of
from pccheck_torch.outlines import Keys


class Part(NamedTuple):
    """A leaf, or a part of one, to read.

    Args:
        keys: where it is in the tree.
        offsets: first element of the part along each axis; None = as `like` says.
        sizes: elements along each axis.
    """

    keys: Keys
    offsets: tuple[int, ...] | None = None
    sizes: tuple[int, ...] = ()


Restore = Callable[[Any], pccheck.Restored]


@final
class Merged:
    """One tree of the states of all ranks. Where several ranks have a place, that of the rank that loads counts.

    Ranks mostly save the same keys; with pipeline parallelism each has its own.

    Args:
        outline: the checkpoint.
        rank: which rank loads.
    """

    def __init__(self, outline: pccheck.Outline, rank: int) -> None:
        self.outline, self.home = outline, rank % outline.world
        self.tree = outline.trees[self.home]
        self._origin: dict[Keys, int] = {}  # where it is not home
        for other, tree in enumerate(outline.trees):
            if other != self.home:
                self.tree = self._with(self.tree, tree, (), other)

    def read(self, parts: Mapping[Part, Any], restore_home: Restore | None = None) -> dict[Part, Any]:
        """Read and verify parts; give their values.

        Args:
            parts: each with what comes back for it: a tensor or StoredLeaf (see `like` of `Checkpointer.restore`).
            restore_home: reads what lies in this rank's own tree, and is called exactly once; None = the outline does.

        Raises:
            MismatchError: the checkpoint has another dtype or shape there.
            (any): as `Outline.restore`.
        """
        found: dict[Part, Any] = {}
        left, first = dict(parts), restore_home
        while left or first is not None:
            origin = self.home if first is not None else min(self._of(part.keys) for part in left)
            mine: dict[Keys, Part] = {}
            for part in left:
                if self._of(part.keys) == origin:
                    mine.setdefault(part.keys, part)  # another part of the same leaf waits for the next round
            like = filled(self.outline.trees[origin], (), {k: _like(p, parts[p]) for k, p in mine.items()}.get)
            restored = first(like) if first is not None else self._restore(like, origin)
            first = None
            for keys, part in mine.items():
                found[part] = _at(restored.state, keys)
                del left[part]
            paths = {leaf.path for keys, leaf in leaves_of(self.outline.trees[origin], ()) if keys in mine}
            wrong = [m for m in restored.mismatches if m.path in paths]
            if wrong:
                raise MismatchError(wrong)
        return found

    def _restore(self, like: Any, origin: int) -> pccheck.Restored:
        return self.outline.restore(like=like, partial=True, rank=origin)

    def _of(self, keys: Keys) -> int:
        return self._origin.get(keys, self.home)

    def _with(self, tree: Any, other: Any, keys: Keys, rank: int) -> Any:
        """Give a tree with what another one has besides."""
        if not isinstance(tree, Mapping) or not isinstance(other, Mapping):
            return tree
        changed: dict[Any, Any] = {}
        for key, child in other.items():
            below = (*keys, key)
            if key not in tree:
                changed[key] = child
                self._origin.update(dict.fromkeys((k for k, _ in leaves_of(child, below)), rank))
            elif isinstance(child, Mapping):
                merged = self._with(tree[key], child, below, rank)
                if merged is not tree[key]:
                    changed[key] = merged
        return {**tree, **changed} if changed else tree


def _like(part: Part, like: Any) -> Any:
    if part.offsets is None or not isinstance(like, StoredLeaf):
        return like
    local = torch.empty(part.sizes, dtype=dtype_of(like.spec.dtype), device="meta")
    if part.sizes == like.spec.shape:
        return local
    return pccheck.Shard(local, shape=like.spec.shape, offsets=part.offsets)


def _at(state: Any, keys: Keys) -> Any:
    for key in keys:
        state = state[key]
    return state.array if isinstance(state, pccheck.Shard) else state
