"""A part of an outline with something else in place of each stored leaf (imports pccheck.leaves)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from pccheck.leaves import StoredLeaf

Keys = tuple[Any, ...]


def replaced(stored: Any, give: Callable[[Keys, StoredLeaf], Any], keys: Keys = ()) -> Any:
    """Give a part of an outline with what `give(keys, leaf)` gives in place of each leaf; containers are new ones.

    Args:
        stored: the part: any nesting of the containers that a state comes back in.
        give: is told the keys and indices that lead to the leaf, and the leaf.
        keys: those that lead to the part.
    """
    if isinstance(stored, StoredLeaf):
        return give(keys, stored)
    if isinstance(stored, Mapping):
        return _mapping_as(stored, {key: replaced(child, give, (*keys, key)) for key, child in stored.items()})
    if isinstance(stored, (list, tuple)):
        values = [replaced(child, give, (*keys, i)) for i, child in enumerate(stored)]
        return type(stored)(*values) if hasattr(stored, "_fields") else type(stored)(values)
    return stored


def _mapping_as(stored: Any, made: dict[Any, Any]) -> Any:
    if hasattr(stored, "default_factory"):
        return type(stored)(stored.default_factory, made)
    copied = type(stored)(made)
    if hasattr(copied, "__dict__"):  # an OrderedDict with attributes
        vars(copied).update(vars(stored))
    return copied
