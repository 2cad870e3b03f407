"""Registered pytree nodes as containers: flax, optax, nnx and whatever a user registers (imports jax, pccheck).

They are opened one level at a time through `jax.tree_util`, so that each keeps what it does not tell (static fields)
to itself: that comes back from `like`. Nodes without children under a private name, such as what nnx keeps of its own
in every module, hold nothing to store and are left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, final

import jax
from jax import tree_util

from pccheck.containers import ContainerKind
from pccheck.errors import UnsupportedLeafError

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
        _check(value, keys)
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


def key_of(step: Any) -> Any:
    """Give the key of one step of a path of JAX's, as the dict has it that comes back without `like`.

    What such a dict can be stored with stays itself: str, int, float, bool, bytes, None, and tuples of these. Any other
    key is its text.
    """
    for attribute in ("key", "name", "idx"):
        if hasattr(step, attribute):
            key = getattr(step, attribute)
            return key if _is_plain(key) else str(key)
    return str(step)


def _is_plain(key: Any) -> bool:
    if type(key) is tuple:
        return all(map(_is_plain, key))
    return type(key) in _KEYS


_KEYS = frozenset({str, int, float, bool, bytes, type(None)})


def _structure(value: Any) -> Any:
    """Give the structure of a node alone."""
    return tree_util.tree_structure(value, is_leaf=_below_first())


def _below_first() -> Any:
    """Give what takes all but the first value that it is asked of for a leaf: a node may be its own child."""
    first = iter((False,))
    return lambda _: next(first, True)


def _opened(value: Any) -> tuple[tuple[Any, ...], list[Any]]:
    found, _ = tree_util.tree_flatten_with_path(value, is_leaf=_below_first())
    for path, _ in found:
        try:
            hash(path)
        except TypeError:
            raise _refused(value, f"it has a key that cannot be one of a dict: {path[0]!s:.200}") from None
    return tuple([key_of(path[0]) for path, _ in found]), [child for _, child in found]


def _check(value: Any, keys: Sequence[Any]) -> None:
    """Refuse keys that are the same as text: whoever asks for one by its path would get either."""
    texts = keys if all(type(key) is str for key in keys) else list(map(str, keys))
    if len(set(texts)) != len(texts):
        twice = next(text for n, text in enumerate(texts) if text in texts[:n])
        raise _refused(value, f"it has several keys that are {twice!r:.200} in a path; keys must differ as text")


def _refused(value: Any, reason: str) -> UnsupportedLeafError:
    return UnsupportedLeafError("", type(value).__qualname__, reason)


def _nothing(keys: Sequence[Any], children: Sequence[Any]) -> Sequence[int]:
    """Give the places of children of private names that are registered nodes without any children."""
    private = [n for n, key in enumerate(keys) if type(key) is str and key[:1] == "_"]
    return [n for n in private if not isinstance(children[n], _PYTHON) and _is_empty(_structure(children[n]))]


def _is_empty(structure: Any) -> bool:
    return bool(structure != _LEAF and structure.num_leaves == 0)
