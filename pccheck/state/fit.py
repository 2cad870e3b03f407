"""Holds a checkpoint against `like`, and says leaf by leaf what goes where (floor 0: imports floor 0).

`like` gives the structure, the container classes, the kinds and the devices that come back; the checkpoint gives the
values. Nothing is read before the whole of it fits: one report names every place that does not.
"""

from __future__ import annotations

import collections
import copy
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias, final

from pccheck.containers import ContainerKind
from pccheck.errors import UnsupportedLeafError, UsageError
from pccheck.leaves import KindTable, LeafKind, LeafSpec, StoredLeaf
from pccheck.state import nodes, paths, tree
from pccheck.state.entries import StoredLeaves
from pccheck.state.forms import field_names, form_of
from pccheck.state.mismatch import MAX_MISMATCHES, Mismatch, Problem
from pccheck.state.nodes import MAX_DEPTH, Node
from pccheck.state.tree import type_name
from pccheck.state.wanting import NUMBERS, TEXT_KINDS, Differs, Join, as_stored, of_number, shown, wanted
from pccheck.state.wanting import Want as Want

Make: TypeAlias = Callable[[Callable[[Want | Join], Any]], Any]


@dataclass(frozen=True)
class Fit:
    """What `match` found: the leaves to read, and how to put the state together from them."""

    wants: tuple[Want, ...]
    mismatches: tuple[Mismatch, ...]
    make: Make = field(repr=False)  # called with what gives the value of a Want or a Join


def match(like: object, skeleton: Node, stored: StoredLeaves, kind_of: KindTable) -> Fit:
    """Hold `like` against the skeleton and leaves of a checkpoint.

    What is `...` in `like` is left out: nothing of it is read, and `...` comes back. A `like` with a method
    `__pccheck_like__` is asked for the tree that is meant, once it is known what is stored: it is given the
    checkpoint's tree with a StoredLeaf in place of every leaf.

    Where they differ, what `like` has stays in the state that `Fit.make` gives, and what the checkpoint has is left
    out: that is what `partial=True` means.

    Raises:
        UsageError: `like` holds something that can be no leaf at all, or is nested too deeply.
    """
    if (ask := getattr(type(like), "__pccheck_like__", None)) is not None:
        like = ask(like, tree.build(skeleton, lambda index: StoredLeaf("", stored.specs[index])))
    matching = _Matching(stored, kind_of)
    make = matching.node(like, skeleton, "", 0)
    return Fit(tuple(matching.wants), tuple(matching.mismatches), make)


@final
class _Matching:
    def __init__(self, stored: StoredLeaves, kind_of: KindTable) -> None:
        self.stored, self.specs, self.kind_of = stored, stored.specs, kind_of
        self.wants: list[Want] = []
        self.mismatches: list[Mismatch] = []

    def node(self, like: Any, node: Any, path: str, depth: int) -> Make:
        if isinstance(like, StoredLeaf):
            return self._as_stored(node)
        if like is ...:
            return lambda build: ...
        form = form_of(type(like))
        if depth > MAX_DEPTH:
            raise UsageError(f"`like` is nested more than {MAX_DEPTH} levels deep at {path}")
        if form == "value" or form == "text":
            return self._value(like, node, path)
        kind = container_of(like, self.kind_of)
        if kind is not None:
            return self._opened(kind, like, node, path, depth + 1)
        if form is None:
            return self._leaf(like, node, path)
        if isinstance(node, (nodes.Dict, nodes.Ordered, nodes.Default, nodes.Counter)):
            if isinstance(like, dict):
                return self._mapping(like, node, path, depth + 1)
        elif isinstance(node, (nodes.Named, nodes.Data)):
            if form in ("namedtuple", "dataclass"):
                return self._fields(like, node, path, depth + 1)
        elif (isinstance(node, nodes.List) and form == "list") or (isinstance(node, nodes.Tuple) and form == "tuple"):
            return self._sequence(like, node.items, path, depth + 1)
        return self._differs(path, "type", type_name(like), self._told(node), like)

    # -- containers -----------------------------------------------------------------------------------------------

    def _opened(self, kind: ContainerKind, like: Any, node: Any, path: str, depth: int) -> Make:
        """Fit a container that an adapter knows to any container that was stored by key or field."""
        stored = _by_key(node)
        if stored is None:
            return self._differs(path, "type", type_name(like), self._told(node), like)
        makes = []
        for key, child in zip(*kind.open(like), strict=True):
            below = paths.join(path, paths.component(key), is_root=depth == 1)
            makes.append(self._child(child, stored.pop((type(key), key), _NOTHING), below, depth))
        self._unexpected(((paths.component(key), child) for (_, key), child in stored.items()), path, depth)
        return lambda build: kind.close(like, [make(build) for make in makes])

    def _mapping(self, like: dict[Any, Any], node: Any, path: str, depth: int) -> Make:
        stored = _by_key(node) or {}
        parts: list[tuple[Any, Make]] = []
        for key, child in like.items():
            below = paths.join(path, paths.component(key), is_root=depth == 1)
            parts.append((key, self._child(child, stored.pop((type(key), key), _NOTHING), below, depth)))
        self._unexpected((((paths.component(key), child) for (_, key), child in stored.items())), path, depth)
        attributes = self._as_stored(nodes.Dict(node.attributes if isinstance(node, nodes.Ordered) else []))
        return lambda build: _mapping_like(like, [(key, make(build)) for key, make in parts], attributes(build))

    def _fields(self, like: Any, node: Any, path: str, depth: int) -> Make:
        stored = dict(zip(node.fields, node.items, strict=True))
        parts: list[tuple[str, Make]] = []
        for name in field_names(type(like)):
            below = paths.join(path, paths.component(name), is_root=depth == 1)
            child = getattr(like, name, None)
            parts.append((name, self._child(child, stored.pop(name, _NOTHING), below, depth)))
        self._unexpected(((paths.component(name), child) for name, child in stored.items()), path, depth)
        return lambda build: fields_like(like, [(name, make(build)) for name, make in parts])

    def _sequence(self, like: Sequence[Any], items: list[Any], path: str, depth: int) -> Make:
        makes = [
            self._child(
                child, items[i] if i < len(items) else _NOTHING, paths.join(path, str(i), is_root=depth == 1), depth
            )
            for i, child in enumerate(like)
        ]
        self._unexpected(((str(i), items[i]) for i in range(len(like), len(items))), path, depth)
        cls = type(like)
        return lambda build: cls([make(build) for make in makes])  # type: ignore[call-arg]

    def _as_stored(self, node: Node) -> Make:
        """What an OrderedDict carries besides its items (module versions) is of the checkpoint, not of `like`."""
        wants: dict[int, tuple[Want, ...]] = {}

        def want(index: int) -> None:
            wants[index] = as_stored(index, self.stored, self.kind_of.named)

        def made(index: int, build: Callable[[Want | Join], Any]) -> Any:
            found = list(map(build, wants[index]))
            return found if index in self.stored.split else found[0]

        tree.build(node, want)
        self.wants += (each for parts in wants.values() for each in parts)
        return lambda build: tree.build(node, lambda index: made(index, build))

    def _child(self, like: Any, node: Any, path: str, depth: int) -> Make:
        if node is not _NOTHING:
            return self.node(like, node, path, depth)
        self._missing(like, path, depth)
        return lambda build: like

    def _missing(self, like: Any, path: str, depth: int) -> None:
        """Report every leaf of what is missing, or an empty container itself."""
        if len(self.mismatches) >= MAX_MISMATCHES or like is ...:
            return
        children = list(children_of(like, self.kind_of)) if depth < MAX_DEPTH else []
        for part, child in children:
            self._missing(child, paths.join(path, part, is_root=False), depth + 1)
        if not children:
            self.mismatches.append(Mismatch(path, "missing", self._asked(like, path), ""))

    def _unexpected(self, found: Any, path: str, depth: int) -> None:
        for part, node in found:
            self._unexpected_node(node, paths.join(path, part, is_root=depth == 1), depth)

    def _unexpected_node(self, node: Any, path: str, depth: int) -> None:
        children = list(tree.children_of(node))
        for part, child in children:
            self._unexpected_node(child, paths.join(path, part, is_root=False), depth + 1)
        if not children:
            self.mismatches.append(Mismatch(path, "unexpected", "", self._told(node)))

    # -- leaves and values ----------------------------------------------------------------------------------------

    def _value(self, like: Any, node: Any, path: str) -> Make:
        if isinstance(node, nodes.Leaf):
            spec = self.specs[node.index]
            kind = self.kind_of.named(spec.kind)
            if TEXT_KINDS.get(spec.kind) is type(like) and kind is not None:
                return self._want(Want(node.index, kind, spec, like))
            if type(like) in NUMBERS and kind is not None and kind.holds_number(spec, type(like)()):
                return self._wanted(like, kind, replace(spec, box=None), node.index, path)
            return self._differs(path, "kind", type_name(like), self._told(node), like)
        if isinstance(node, _CONTAINER_NODES):
            return self._differs(path, "type", type_name(like), self._told(node), like)
        value = nodes.decode_value(node)
        if type(value) is not type(like):
            return self._differs(path, "type", type_name(like), type_name(value), like)
        return lambda build: value

    def _leaf(self, like: Any, node: Any, path: str) -> Make:
        asked = self._kind_and_spec(like, path)
        if asked is None:
            raise UsageError(f"`like` has a {type_name(like)} at {path or 'its root'}, which can be no leaf")
        kind, want = asked
        if isinstance(node, nodes.Leaf) and self.specs[node.index].kind not in TEXT_KINDS:
            return self._wanted(like, kind, want, node.index, path)
        if not isinstance(node, (nodes.Leaf, *_CONTAINER_NODES)):
            value = nodes.decode_value(node)
            if type(value) in NUMBERS and kind.holds_number(want, value):
                return lambda build: of_number(value, kind, like)
            if type(value) in NUMBERS and kind.holds_number(want, type(value)()):
                return self._differs(path, "value", shown(want), f"{value!r:.80}", like)
        return self._differs(path, "kind", shown(want), self._told(node), like)

    def _wanted(self, like: Any, kind: LeafKind, want: LeafSpec, index: int, path: str) -> Make:
        found = wanted(like, kind, want, index, self.stored, self.kind_of)
        if isinstance(found, Differs):
            return self._differs(path, *found, like)
        self.wants += (found,) if isinstance(found, Want) else {id(want): want for want in found.wants}.values()
        return lambda build: build(found)

    def _kind_and_spec(self, like: Any, path: str) -> tuple[LeafKind, LeafSpec] | None:
        try:
            return self.kind_of.like(like)
        except UnsupportedLeafError as error:
            raise error.at(path, restoring=True) from None

    def _want(self, want: Want) -> Make:
        self.wants.append(want)
        return lambda build: build(want)

    def _differs(self, path: str, problem: Problem, expected: str, found: str, like: Any) -> Make:
        self.mismatches.append(Mismatch(path, problem, expected, found))
        return lambda build: like

    def _asked(self, like: Any, path: str) -> str:
        if form_of(type(like)) is not None:
            return type_name(like)
        asked = self._kind_and_spec(like, path)
        return type_name(like) if asked is None else shown(asked[1])

    def _told(self, node: Any) -> str:
        if isinstance(node, nodes.Leaf):
            return shown(self.specs[node.index])
        if isinstance(node, _CONTAINER_NODES):
            return str(node.__struct_config__.tag)
        return type_name(nodes.decode_value(node))


_NOTHING: Any = object()
_CONTAINER_NODES = (
    nodes.Dict, nodes.Ordered, nodes.Default, nodes.Counter, nodes.List, nodes.Tuple, nodes.Named, nodes.Data,
)  # fmt: skip


def container_of(value: Any, kind_of: KindTable) -> ContainerKind | None:
    """Give what opens a container of a state that an adapter knows; None for any other, and for what is none."""
    return kind_of.container(value) if form_of(type(value)) in (None, "dataclass") else None


def children_of(like: Any, kind_of: KindTable) -> Iterable[tuple[str, Any]]:
    """Give what is in a container of a state, with the component of its path; nothing for a leaf or value."""
    form, kind = form_of(type(like)), container_of(like, kind_of)
    if kind is not None:
        return ((paths.component(k), child) for k, child in zip(*kind.open(like), strict=True))
    if isinstance(like, dict) and form is not None:
        return ((paths.component(k), child) for k, child in like.items())
    if form in ("list", "tuple"):
        return ((str(i), child) for i, child in enumerate(like))
    if form in ("namedtuple", "dataclass"):
        return ((paths.component(n), getattr(like, n, None)) for n in field_names(type(like)))
    return ()


def _by_key(node: Any) -> dict[Any, Any] | None:
    """Give the children of what was stored by key or field; None for anything else."""
    if isinstance(node, (nodes.Named, nodes.Data)):
        return {(str, name): child for name, child in zip(node.fields, node.items, strict=True)}
    if isinstance(node, (nodes.Dict, nodes.Ordered, nodes.Default, nodes.Counter)):
        return {(type(k), k): child for k, child in ((nodes.decode_key(k), child) for k, child in node.items)}
    return None


def _mapping_like(like: dict[Any, Any], items: list[tuple[Any, Any]], attributes: Any) -> Any:
    if isinstance(like, collections.defaultdict):
        return collections.defaultdict(like.default_factory, items)
    if isinstance(like, collections.Counter):
        return collections.Counter(dict(items))
    if isinstance(like, collections.OrderedDict):
        made: collections.OrderedDict[Any, Any] = collections.OrderedDict(items)
        vars(made).update(attributes or vars(like))
        return made
    return dict(items)


def fields_like(like: Any, items: list[tuple[str, Any]]) -> Any:
    """Give an instance of `like`'s class with these fields; its constructor is not called for a dataclass."""
    if isinstance(like, tuple):
        return tuple.__new__(type(like), [value for _, value in items])
    made = copy.copy(like)
    for name, value in items:
        object.__setattr__(made, name, value)
    return made
