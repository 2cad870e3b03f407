"""A state put together again out of skeleton and leaves (floor 0: imports errors, apart, forms, nodes, paths).

The skeleton is JSON (see nodes) from which the exact Python types come back, with no pickle and no import; `flatten`
makes it.
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Sequence
from typing import Any, get_args

from pccheck.errors import FormatError
from pccheck.state import nodes, paths
from pccheck.state.apart import MAX_CLASSES
from pccheck.state.apart import flatten as flatten
from pccheck.state.apart import type_name as type_name
from pccheck.state.forms import tuple_class
from pccheck.state.nodes import MAX_DEPTH, Node


def unflatten(skeleton: Node, values: Sequence[Any]) -> Any:
    """Put a state together again: `values[i]` goes where leaf i was.

    namedtuples and dataclasses come back as a namedtuple of their name and fields, made here, or as a dict where
    these are no legal names; nothing is imported.

    Raises:
        FormatError: the skeleton is not what `flatten` makes.
    """

    def leaf(index: int) -> Any:
        if not 0 <= index < len(values):
            raise FormatError(f"the tree names leaf {index}, of {len(values)}")
        return values[index]

    return build(skeleton, leaf)


def build(skeleton: Node, leaf: Callable[[int], Any]) -> Any:
    """Put a state together as `unflatten` does, with `leaf(i)` called in order for what goes where leaf i was."""
    return _Together(leaf).value(skeleton, 0)


def check(skeleton: Node, leaves: Sequence[int]) -> None:
    """Raise FormatError unless `unflatten` would succeed, and these leaves stand in the tree in order, each once."""
    seen: list[int] = []
    build(skeleton, seen.append)
    if seen != list(leaves):
        raise FormatError(f"the tree does not name its {len(leaves)} leaves in order, each once")


def children_of(node: Any) -> list[tuple[str, Any]]:
    """Give what is in a container of a skeleton, with the component of its path; nothing for a leaf or value.

    The attributes of an OrderedDict are left out.
    """
    if isinstance(node, (nodes.Dict, nodes.Ordered, nodes.Default, nodes.Counter)):
        return [(paths.component(nodes.decode_key(key)), child) for key, child in node.items]
    if isinstance(node, (nodes.Named, nodes.Data)):
        return [(paths.component(name), child) for name, child in zip(node.fields, node.items, strict=True)]
    if isinstance(node, (nodes.List, nodes.Tuple)):
        return [(str(i), child) for i, child in enumerate(node.items)]
    return []


class _Together:
    def __init__(self, leaf: Callable[[int], Any]) -> None:
        self.leaf = leaf
        self.classes: set[tuple[str, tuple[str, ...]]] = set()

    def value(self, node: Any, depth: int) -> Any:
        if isinstance(node, nodes.Leaf):
            return self.leaf(node.index)
        if not isinstance(node, _CONTAINERS):
            return nodes.decode_value(node)
        if depth == MAX_DEPTH:
            raise FormatError(f"the tree is nested more than {MAX_DEPTH} levels deep")
        if isinstance(node, (nodes.List, nodes.Tuple)):
            sequence = [self.value(item, depth + 1) for item in node.items]
            return sequence if isinstance(node, nodes.List) else tuple(sequence)
        if isinstance(node, (nodes.Named, nodes.Data)):
            return self._fields(node, depth + 1)
        if isinstance(node, nodes.Default):
            factory = None if node.factory is None else nodes.FACTORIES[node.factory]
            return collections.defaultdict(factory, self._items(node.items, depth + 1))
        if isinstance(node, nodes.Ordered):
            ordered = collections.OrderedDict(self._items(node.items, depth + 1))
            vars(ordered).update(self._attributes(node, depth + 1))
            return ordered
        items = self._items(node.items, depth + 1)
        return collections.Counter(items) if isinstance(node, nodes.Counter) else items

    def _items(self, items: list[tuple[Any, Any]], depth: int) -> dict[Any, Any]:
        built = {nodes.decode_key(key): self.value(child, depth) for key, child in items}
        if len(built) != len(items):
            raise FormatError("a dict of the tree has a key twice")
        return built

    def _attributes(self, node: nodes.Ordered, depth: int) -> dict[str, Any]:
        built = self._items(node.attributes, depth)
        if not all(type(name) is str for name in built):
            raise FormatError("an attribute of the tree has no name")
        return built

    def _fields(self, node: nodes.Named | nodes.Data, depth: int) -> Any:
        names = tuple(node.fields)
        if len(names) != len(node.items) or len(set(names)) != len(names):
            raise FormatError(f"a {node.name[:80]!r} of the tree has {len(node.items)} values for fields {names[:8]}")
        self.classes.add((node.name, names))
        if len(self.classes) > MAX_CLASSES:
            raise FormatError(f"the tree has more than {MAX_CLASSES} namedtuples of different kinds")
        items = [self.value(item, depth) for item in node.items]
        cls = tuple_class(node.name, names)
        return dict(zip(names, items, strict=True)) if cls is None else cls(*items)


_CONTAINERS: Any = tuple(
    cls for cls in get_args(Node) if isinstance(cls, type) and {"items"} & set(getattr(cls, "__struct_fields__", ()))
)
