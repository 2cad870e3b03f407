"""A state taken apart into skeleton and leaves (floor 0: imports errors, containers, forms, nodes, paths).

What is not one of the types that a skeleton holds, nor a leaf or container that some adapter knows, is refused with its
path, before anything is written.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from pccheck.containers import ContainerKind
from pccheck.errors import UnsupportedLeafError
from pccheck.state import nodes, paths
from pccheck.state.forms import BUILTIN, MAX_FIELDS, SMALL_BYTES, Form, field_names, form_of
from pccheck.state.nodes import MAX_DEPTH, Node

MAX_NODES = 10_000_000  # of one state: a few lists that hold each other twice would otherwise be endless
MAX_PARTS = 1024  # of one leaf: they are compared in pairs
MAX_CLASSES = 1000  # namedtuple classes of one state: each costs its reader a class


def flatten(
    state: object,
    is_leaf: Callable[[object], int],
    on_value: Callable[[Any], Any] = nodes.encode_value,
    container: Callable[[object], ContainerKind | None] = lambda value: None,
) -> tuple[Node, list[Any], list[str]]:
    """Take a state apart: give its skeleton, its leaves, and the path of each leaf.

    A leaf of several parts stands in the list once for each, with its path each time; the skeleton names the first.

    Args:
        state: any nesting of the containers in `nodes`, small values, and leaves. Shared containers become copies.
        is_leaf: tells in how many parts a value of any other type is stored as a leaf (0 or False: it is none), and so
            is a str or bytes longer than SMALL_BYTES; may raise UnsupportedLeafError with an empty path.
        on_value: gives what stands in the skeleton for a small value.
        container: gives what opens a dataclass, or what is neither leaf nor value; None = nothing does.

    Raises:
        UnsupportedLeafError: something cannot be stored exactly: another type, a cycle, more than MAX_DEPTH levels.
    """
    apart = _Apart(is_leaf, on_value, container)
    try:
        skeleton = apart.node(state, "", 0)
    except RecursionError:
        raise _refused("", state, "it is nested too deeply for what is left of the interpreter's stack here") from None
    named = [apart.paths[i] for i in apart.firsts]
    if len(set(named)) != len(named):
        path = next(p for p, n in collections.Counter(named).items() if n > 1)
        raise UnsupportedLeafError(path, "dict", "two of its keys cannot be told apart (two nan?)")
    return skeleton, apart.leaves, apart.paths


class _Apart:
    def __init__(
        self,
        is_leaf: Callable[[object], int],
        on_value: Callable[[Any], Any],
        container: Callable[[object], ContainerKind | None],
    ) -> None:
        self.is_leaf, self.on_value, self.container = is_leaf, on_value, container
        self.firsts: list[int] = []  # where the parts of each leaf begin
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
        kind = self.container(value) if form == "dataclass" else None
        if form is None or form == "text":
            parts = self._parts(value, path)
            if parts:
                return self._leaf(value, path, parts)
            kind = self.container(value)
            if kind is None:
                raise _refused(path, value, _why_not(value))
        if id(value) in self.open:
            raise _refused(path, value, "it contains itself; a cycle cannot be stored")
        if depth == MAX_DEPTH:
            raise _refused(path, value, f"it is nested more than {MAX_DEPTH} levels deep")
        self.open.add(id(value))
        try:
            if kind is not None:
                return self._opened(kind, value, path, depth + 1)
            return self._container(form, value, path, depth + 1)
        finally:
            self.open.discard(id(value))

    def _parts(self, value: Any, path: str) -> int:
        try:
            return self.is_leaf(value)
        except UnsupportedLeafError as error:
            raise error.at(path) from None

    def _leaf(self, value: Any, path: str, parts: int) -> nodes.Leaf:
        if parts > MAX_PARTS:
            raise _refused(path, value, f"it is stored in {parts:,} parts; {MAX_PARTS:,} are the most")
        self.firsts.append(len(self.leaves))
        self.leaves += [value] * parts
        self.paths += [path] * parts
        return nodes.Leaf(self.firsts[-1])

    def _opened(self, kind: ContainerKind, value: Any, path: str, depth: int) -> Node:
        """Store a container that an adapter knows: by field, if it is a dataclass that says so, else as a dict."""
        cls = type(value)
        try:
            keys, children = kind.open(value)
        except UnsupportedLeafError as error:
            raise error.at(path) from None
        try:
            different = len(set(keys))  # as keys of the dict that comes back: 1 and True are one
        except TypeError:
            different = -1
        if not different == len(keys) == len(children):
            raise _refused(path, value, f"it opens as {len(children)} values for keys {keys!r:.200}")
        fields = tuple(keys)
        if not dataclasses.is_dataclass(cls) or len(keys) > MAX_FIELDS or not all(map(_is_field, keys)):
            return nodes.Dict(self._items(zip(keys, children, strict=True), value, path, depth))
        self._class(cls.__name__, fields, value, path)
        return nodes.Data(cls.__name__, list(fields), self._named(fields, children, path, depth))

    def _container(self, form: Form | None, value: Any, path: str, depth: int) -> Node:
        if form == "dict":
            return nodes.Dict(self._items(value.items(), value, path, depth))
        if form == "list":
            return nodes.List(self._sequence(value, path, depth))
        if form == "tuple":
            return nodes.Tuple(self._sequence(value, path, depth))
        if form == "OrderedDict":
            items = self._items(value.items(), value, path, depth)
            return nodes.Ordered(items, self._attributes(value, path, depth))
        if form == "Counter":
            return nodes.Counter(self._items(value.items(), value, path, depth))
        if form == "defaultdict":
            factory = value.default_factory
            name = None if factory is None else str(getattr(factory, "__name__", ""))
            if name is not None and nodes.FACTORIES.get(name) is not factory:
                allowed = ", ".join(nodes.FACTORIES)
                raise _refused(path, value, f"its default_factory {factory!r} is none of {allowed}; use dict(...)")
            return nodes.Default(name, self._items(value.items(), value, path, depth))  # type: ignore[arg-type]
        return self._fields(form, value, path, depth)

    def _items(self, found: Iterable[tuple[Any, Any]], value: Any, path: str, depth: int) -> list[tuple[Any, Any]]:
        items = []
        for key, child in found:
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

    def _class(self, name: str, fields: tuple[str, ...], value: Any, path: str) -> None:
        self.classes.add((name, fields))
        if len(fields) > MAX_FIELDS or len(self.classes) > MAX_CLASSES:
            raise _refused(path, value, f"more than {MAX_FIELDS} fields, or {MAX_CLASSES} such classes in one state")

    def _named(self, names: Sequence[str], children: Sequence[Any], path: str, depth: int) -> list[Any]:
        return [
            self.node(child, _below(path, paths.component(name), depth), depth)
            for name, child in zip(names, children, strict=True)
        ]

    def _fields(self, form: Form | None, value: Any, path: str, depth: int) -> Node:
        cls = type(value)
        names = field_names(cls)
        self._class(cls.__name__, names, value, path)
        if form == "namedtuple":
            if len(value) != len(names):
                raise _refused(path, value, f"it has {len(value)} items for {len(names)} fields")
            children: Sequence[Any] = value
        else:
            missing = [n for n in names if not hasattr(value, n)]
            if missing:
                raise _refused(path, value, f"its field {missing[0]!r} is not set")
            children = [getattr(value, n) for n in names]
        items = self._named(names, children, path, depth)
        if form == "namedtuple":
            return nodes.Named(cls.__name__, list(names), items)
        return nodes.Data(cls.__name__, list(names), items)


def _is_field(key: object) -> bool:
    return type(key) is str and key.isidentifier()


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
