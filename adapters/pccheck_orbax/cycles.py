"""Finds what contains itself before JAX is asked to flatten it (may import pccheck_jax).

JAX's `tree.flatten` ends such a tree with a RecursionError, and never gives the depth back that it has counted: from
then on every call of the process raises RecursionError (measured with jax 0.10).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from pccheck_jax import containers


def contains_itself(tree: Any) -> bool:
    """Tell whether a tree of JAX's contains itself; what it is built of is opened only where its attributes do."""
    return _is_cyclic(tree, _attributes) and _is_cyclic(tree, _opened)


def _is_cyclic(tree: Any, children_of: Callable[[Any], Iterable[Any]]) -> bool:
    on_path: set[int] = set()
    done: set[int] = set()
    kept: list[Any] = []  # what is made while it is opened must keep its id
    stack: list[tuple[Any, Any]] = [(None, iter((tree,)))]
    while stack:
        owner, children = stack[-1]
        for child in children:
            if id(child) in on_path:
                return True
            if id(child) in done:
                continue
            below = children_of(child)
            kept.append(child)
            if below:
                on_path.add(id(child))
                stack.append((child, iter(below)))
                break
        else:
            stack.pop()
            on_path.discard(id(owner))
            done.add(id(owner))
    return False


def _attributes(value: Any) -> Any:
    cls = type(value)
    if cls is dict:
        return value.values()
    if isinstance(value, (list, tuple)):
        return value
    return getattr(value, "__dict__", {}).values() if not isinstance(value, type) else ()


def _opened(value: Any) -> Any:
    if isinstance(value, dict):
        return value.values()
    if isinstance(value, (list, tuple)):
        return value
    return containers.open(value)[1] if containers.recognises(value) else ()
