"""Registered pytree nodes as containers: flax, optax, nnx and whatever a user registers (imports jax, pccheck).

They are opened one level at a time through `jax.tree_util`, so that each keeps what it does not tell (static fields)
to itself: that comes back from `like`. Nodes without children under a private name, such as what nnx keeps of its own
in every module, hold nothing to store and are left out.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, final

import jax
from jax import tree_util

from pccheck.containers import ContainerKind

_LEAF: Any = tree_util.tree_structure(0)
_PYTHON = (dict, list, tuple, set, frozenset, str, bytes, bytearray, type(None))


@final
class PytreeKind(ContainerKind):
    """What `jax.tree_util` knows and Python does not: flax.struct, FrozenDict, nnx.State, nnx modules and variables.

    Stateless, thread-safe.
    """

    def recognises(self, value: object) -> bool:
        """Tell whether it is a registered pytree node of no class, nor subclass, of Python's own containers."""
        if isinstance(value, (*_PYTHON, jax.Array, jax.ShapeDtypeStruct, type)):
            return False
        return bool(_structure(value) != _LEAF)

    def open(self, value: Any) -> tuple[tuple[Any, ...], Sequence[Any]]:
        """Give the keys by which `jax.tree_util` names the children, and those of them that hold anything."""
        keys, children = _opened(value)
        nothing = _nothing(keys, children)
        if not nothing:
            return keys, children
        kept = [n for n in range(len(keys)) if n not in nothing]
        return tuple(keys[n] for n in kept), [children[n] for n in kept]

    def close(self, like: Any, children: Sequence[Any]) -> Any:
        """Give a node like this one with these children, made by what its class was registered with."""
        keys, own = _opened(like)
        nothing, rest = _nothing(keys, own), iter(children)
        made = [own[n] if n in nothing else next(rest) for n in range(len(own))]
        return tree_util.tree_unflatten(_structure(like), made)


def _structure(value: Any) -> Any:
    """Give the structure of a node alone."""
    return tree_util.tree_structure(value, is_leaf=lambda x: x is not value)


def _opened(value: Any) -> tuple[tuple[Any, ...], list[Any]]:
    found, _ = tree_util.tree_flatten_with_path(value, is_leaf=lambda x: x is not value)
    return _keys(tuple([path for path, _ in found])), [child for _, child in found]


def _nothing(keys: Sequence[Any], children: Sequence[Any]) -> Sequence[int]:
    """Give the places of children of private names that are registered nodes without any children."""
    private = [n for n, key in enumerate(keys) if type(key) is str and key[:1] == "_"]
    return [n for n in private if not isinstance(children[n], _PYTHON) and _is_empty(_structure(children[n]))]


def _is_empty(structure: Any) -> bool:
    return bool(structure != _LEAF and structure.num_leaves == 0)


@functools.lru_cache(maxsize=4096)
def _keys(paths: tuple[Any, ...]) -> tuple[Any, ...]:
    """Give keys that a dict may have, one for each path of one step; numbers where two would be the same."""
    keys = tuple(_key(path[0]) if len(path) == 1 else tree_util.keystr(path) for path in paths)
    return keys if len({(type(key), key) for key in keys}) == len(keys) else tuple(range(len(keys)))


def _key(step: Any) -> Any:
    for attribute in ("key", "name", "idx"):
        key = getattr(step, attribute, None)
        if isinstance(key, (str, int, float, bool, bytes)):
            return key
    return str(step)
