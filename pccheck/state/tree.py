"""A state taken apart into skeleton and leaves, and put together again (floor 0: imports errors, forms, nodes, paths).

The skeleton is JSON (see nodes) from which the exact Python types come back, with no pickle and no import. What is
not one of those types, nor a leaf that some adapter knows, is refused with its path, before anything is written.
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Iterable, Sequence
from typing import Any, get_args

from pccheck.errors import FormatError, UnsupportedLeafError
from pccheck.state import nodes, paths
from pccheck.state.forms import BUILTIN, MAX_FIELDS, SMALL_BYTES, Form, field_names, form_of, tuple_class
from pccheck.state.nodes import MAX_DEPTH, Node

MAX_NODES = 10_000_000  # of one state: a few lists that hold each other twice would otherwise be endless
MAX_CLASSES = 1000  # namedtuple classes of one state: each costs its reader a class


# -- apart -----------------------------------------------------------------------------------------------------------


def flatten(
    state: object, is_leaf: Callable[[object], bool], on_value: Callable[[Any], Any] = nodes.encode_value
) -> tuple[Node, list[Any], list[str]]:
    """Take a state apart: give its skeleton, its leaves, and the path of each leaf.

    Args:
        state: any nesting of the containers in `nodes`, small values, and leaves. Shared containers become copies.
        is_leaf: tells whether a value of any other type is stored as a leaf, and so is a str or bytes longer than
            SMALL_BYTES; may raise UnsupportedLeafError with an empty path.
        on_value: gives what stands in the skeleton for a small value.

    Raises:
        UnsupportedLeafError: something cannot be stored exactly: another type, a cycle, more than MAX_DEPTH levels.
    """
    apart = _Apart(is_leaf, on_value)
    try:
        skeleton = apart.node(state, "", 0)
    except RecursionError:
        raise _refused("", state, "it is nested too deeply for what is left of the interpreter's stack here") from None
    if len(set(apart.paths)) != len(apart.paths):
        path = next(p for p, n in collections.Counter(apart.paths).items() if n > 1)
        raise UnsupportedLeafError(path, "dict", "two of its keys cannot be told apart (two nan?)")
    return skeleton, apart.leaves, apart.paths


class _Apart:
    def __init__(self, is_leaf: Callable[[object], bool], on_value: Callable[[Any], Any]) -> None:
        self.is_leaf, self.on_value = is_leaf, on_value
        self.leaves: list[Any] = []
        self.paths: list[str] = []
        self.count = 0
        self.open: set[int] = set()  # ids of the containers between the root and here
        self.classes: set[tuple[str, tuple[str, ...]]] = set()

    def node(self, value: Any, path: str, depth: int) -> Any:
        self.count += 1
        if self.count > MAX_NODES:
            raise _refused(path, value, f"the state has more than {MAX_NODES:,} values")
        form = form_of(type(value))
        if form == "value" or (form == "text" and len(value) <= SMALL_BYTES):
            return self.on_value(value)
        if form is None or form == "text":
            return self._leaf(value, path)
        if id(value) in self.open:
            raise _refused(path, value, "it contains itself; a cycle cannot be stored")
        if depth == MAX_DEPTH:
            raise _refused(path, value, f"it is nested more than {MAX_DEPTH} levels deep")
        self.open.add(id(value))
        try:
            return self._container(form, value, path, depth + 1)
        finally:
            self.open.discard(id(value))

    def _leaf(self, value: Any, path: str) -> nodes.Leaf:
        try:
            known = self.is_leaf(value)
        except UnsupportedLeafError as error:
            raise error.at(path) from None
        if not known:
            raise _refused(path, value, _why_not(value))
        self.leaves.append(value)
        self.paths.append(path)
        return nodes.Leaf(len(self.leaves) - 1)

    def _container(self, form: Form, value: Any, path: str, depth: int) -> Node:
        if form == "dict":
            return nodes.Dict(self._items(value, path, depth))
        if form == "list":
            return nodes.List(self._sequence(value, path, depth))
        if form == "tuple":
            return nodes.Tuple(self._sequence(value, path, depth))
        if form == "OrderedDict":
            items = self._items(value, path, depth)
            return nodes.Ordered(items, self._attributes(value, path, depth))
        if form == "Counter":
            return nodes.Counter(self._items(value, path, depth))
        if form == "defaultdict":
            factory = value.default_factory
            name = None if factory is None else str(getattr(factory, "__name__", ""))
            if name is not None and nodes.FACTORIES.get(name) is not factory:
                allowed = ", ".join(nodes.FACTORIES)
                raise _refused(path, value, f"its default_factory {factory!r} is none of {allowed}; use dict(...)")
            return nodes.Default(name, self._items(value, path, depth))  # type: ignore[arg-type]
        return self._fields(form, value, path, depth)

    def _items(self, value: dict[Any, Any], path: str, depth: int) -> list[tuple[Any, Any]]:
        items = []
        for key, child in value.items():
            try:
                code = nodes.encode_key(key)
            except TypeError as error:
                reason = f"a key of it cannot be stored: {error}; keys are str, int, float, complex, bool, None, bytes "
                raise _refused(path, value, reason + "and tuples of these") from None
            items.append((code, self.node(child, _below(path, paths.component(key), depth), depth)))
        return items

    def _attributes(self, value: Any, path: str, depth: int) -> list[tuple[Any, Any]]:
        return [
            (nodes.encode_key(name), self.node(child, _below(path, paths.attribute(name), depth), depth))
            for name, child in vars(value).items()
        ]

    def _sequence(self, value: Iterable[Any], path: str, depth: int) -> list[Any]:
        return [self.node(child, _below(path, str(i), depth), depth) for i, child in enumerate(value)]

    def _fields(self, form: Form, value: Any, path: str, depth: int) -> Node:
        cls = type(value)
        names = field_names(cls)
        self.classes.add((cls.__name__, names))
        if len(names) > MAX_FIELDS or len(self.classes) > MAX_CLASSES:
            raise _refused(path, value, f"more than {MAX_FIELDS} fields, or {MAX_CLASSES} such classes in one state")
        if form == "namedtuple":
            if len(value) != len(names):
                raise _refused(path, value, f"it has {len(value)} items for {len(names)} fields")
            children: Sequence[Any] = value
        else:
            missing = [n for n in names if not hasattr(value, n)]
            if missing:
                raise _refused(path, value, f"its field {missing[0]!r} is not set")
            children = [getattr(value, n) for n in names]
        items = [
            self.node(child, _below(path, paths.component(name), depth), depth)
            for name, child in zip(names, children, strict=True)
        ]
        if form == "namedtuple":
            return nodes.Named(cls.__name__, list(names), items)
        return nodes.Data(cls.__name__, list(names), items)


def _below(path: str, part: str, depth: int) -> str:
    return paths.join(path, part, is_root=depth == 1)


def _place(path: str) -> str:
    return path or "the state itself"


def _refused(path: str, value: object, reason: str) -> UnsupportedLeafError:
    return UnsupportedLeafError(_place(path), type_name(value), reason)


def type_name(value: object) -> str:
    """Give the full name of a value's class, for messages."""
    cls = type(value)
    return cls.__qualname__ if cls.__module__ == "builtins" else f"{cls.__module__}.{cls.__qualname__}"


def _why_not(value: object) -> str:
    if isinstance(value, (set, frozenset)):
        return "a set has no order of its own; store sorted(...) of it"
    if isinstance(value, (bytearray, memoryview)):
        return "store bytes(...) of it, or a NumPy array"
    for base in BUILTIN:
        if isinstance(value, base):
            return f"a subclass of {base.__name__} would come back as something else; store {base.__name__}(...) of it"
    if hasattr(type(value), "__pccheck_state__"):
        return "it stands for a whole state: give it to save() as it is, or store what its __pccheck_state__() gives"
    if callable(getattr(type(value), "state_dict", None)):
        return "it is no value; store its .state_dict()"
    return (
        "it is no container, Python value, or array that pccheck knows (dict, list, tuple, namedtuple, dataclass, "
        "None, bool, int, float, complex, str, bytes, NumPy, and arrays of installed adapters); convert it, or leave "
        "it out"
    )


# -- together --------------------------------------------------------------------------------------------------------


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


def check(skeleton: Node, leaf_count: int) -> None:
    """Raise FormatError unless `unflatten` would succeed, and the leaves stand in the tree in order, each once."""
    seen: list[int] = []
    build(skeleton, seen.append)
    if seen != list(range(leaf_count)):
        raise FormatError(f"the tree does not name its {leaf_count} leaves in order, each once")


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
