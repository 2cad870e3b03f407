"""Trees by path, whatever their containers are: as Orbax compares them (may import pccheck, pccheck_jax, JAX).

Orbax compares keys, not containers: a dict, a NamedTuple and a flax dataclass with the same names are the same tree to
it, and so are a list and a tuple.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

import jax
from pccheck_jax.trees import key_of

from pccheck.errors import UsageError

Path: TypeAlias = tuple[str, ...]


def flat(tree: Any) -> tuple[dict[Path, Any], Any]:
    """Give the leaves of a tree of JAX's by path, and its form; no leaves and None for None.

    Raises:
        UsageError: two leaves have the same path.
    """
    if tree is None:
        return {}, None
    leaves, form = jax.tree_util.tree_flatten_with_path(tree)
    found: dict[Path, Any] = {}
    for keys, leaf in leaves:
        path = tuple([str(key_of(key)) for key in keys])
        if path in found:
            raise UsageError(f"the target has two leaves at {'/'.join(path)}: keys must differ as text")
        found[path] = leaf
    return found, form


def rebuilt(node: Any, leaf: Callable[[Path, Any], Any], whole: dict[Path, Any], path: Path = ()) -> Any:
    """Give a plain tree with what `leaf` makes of its leaves; also of containers that are one leaf in `whole`."""
    children = None if path in whole else _children(node)
    if children is None:
        return leaf(path, node)
    made = [rebuilt(child, leaf, whole, (*path, token)) for token, child in children]
    if isinstance(node, dict):
        return dict(zip(node, made, strict=True))
    if isinstance(node, tuple) and hasattr(node, "_fields"):
        return type(node)(*made)
    return type(node)(made)


def leaves(node: Any, whole: dict[Path, Any], path: Path = ()) -> Iterator[tuple[Path, Any]]:
    """Give the leaves of a plain tree with their paths; containers too, that are one leaf in `whole`."""
    children = None if path in whole else _children(node)
    if children is None:
        yield path, node
        return
    for token, child in children:
        yield from leaves(child, whole, (*path, token))


def plain(tree: Any, leaf: Callable[[Path, Any], Any] = lambda path, value: value, path: Path = ()) -> Any:
    """Give a tree of plain containers as Orbax has them: fields become keys, and what has no fields becomes None."""
    if isinstance(tree, dict):
        return {key: plain(child, leaf, (*path, str(key))) for key, child in tree.items()}
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        return {name: plain(child, leaf, (*path, name)) for name, child in zip(tree._fields, tree, strict=True)} or None
    if isinstance(tree, (list, tuple)):
        return type(tree)(plain(child, leaf, (*path, str(i))) for i, child in enumerate(tree))
    return leaf(path, tree)


def _children(node: Any) -> Iterator[tuple[str, Any]] | None:
    """Give what is in a container of a plain tree; None for a leaf."""
    if isinstance(node, dict):
        return ((str(key), child) for key, child in node.items())
    if isinstance(node, tuple) and hasattr(node, "_fields"):
        return zip(node._fields, node, strict=True)
    if isinstance(node, (list, tuple)):
        return ((str(i), child) for i, child in enumerate(node))
    return None
