"""Tells at C speed whether a state is built as it was before, and gives its leaves (floor 0: imports containers,
forms, nodes).

A trainer saves the same tree hundreds of times. Walking 20,000 leaves in Python costs as much as copying them, so the
tree is learnt once, level by level, and later each level is compared as a whole: its types, the lengths and keys of its
containers, with `map` and list comparison only. Paths are not built, and no leaf or container is kept. Containers that
an adapter opens are opened one by one, once.
"""

from __future__ import annotations

import operator
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain, compress
from typing import Any, TypeAlias, final

import msgspec

from pccheck.containers import ContainerKind
from pccheck.state import nodes
from pccheck.state.forms import field_names, form_of

Pick: TypeAlias = Callable[[Sequence[Any]], Sequence[Any]]
_PLAIN_KEYS = frozenset({str, int, bool, bytes, type(None)})  # equal and of the same type means the same
_MAPPINGS = frozenset({dict, OrderedDict, defaultdict, Counter})
_flat = chain.from_iterable
_factory = operator.attrgetter("default_factory")


def picker(indices: Sequence[int]) -> Pick:
    """Give what takes the items at `indices` out of a sequence."""
    if len(indices) == 0:
        return lambda items: ()
    if len(indices) == 1:
        (index,) = indices
        return lambda items: (items[index],)
    return operator.itemgetter(*indices)


@dataclass(frozen=True)
class _Group:
    """The containers of one class on one level."""

    cls: type
    mask: list[bool] | None  # None: the whole level
    facts: list[Any]
    kind: ContainerKind | None  # what opens them

    def select(self, level: list[Any]) -> list[Any]:
        return level if self.mask is None else list(compress(level, self.mask))

    def below(self, members: list[Any]) -> list[Any] | None:
        """Give the children of these; None if they are not built as the ones learnt."""
        facts, children = _opened(self.kind, members)[:2] if self.kind is not None else _looked_at(self.cls, members)
        return children if facts == self.facts else None


@dataclass(frozen=True)
class _Level:
    types: list[type]
    ends: list[bool] | None  # which of its items are leaves or small values; None: none
    groups: list[_Group]


@dataclass(frozen=True)
class _Row:
    """Where the children of each item of a level stand on the next level."""

    start: list[int]
    count: list[int]
    attributes: dict[int, int]  # of an OrderedDict: the place of its attributes
    ends: list[int]  # the items that are no containers


@final
class Structure:
    """How a state is built: container classes, their keys in order, and the types of what is no container.

    Args:
        state: any that `tree.flatten` has accepted; so it is finite.
        container: gives what opens a dataclass, or what is neither leaf nor value; None = nothing does. It is asked of
            one value of each class.
        is_leaf: tells whether a value of a class that no skeleton holds is stored as a leaf.
    """

    def __init__(
        self,
        state: object,
        container: Callable[[object], ContainerKind | None] = lambda value: None,
        is_leaf: Callable[[object], int] = lambda value: True,
    ) -> None:
        self._container, self._is_leaf = container, is_leaf
        self._levels: list[_Level] = []
        rows: list[_Row] = []
        level: list[Any] = [state]
        while level:
            row = _Row([0] * len(level), [0] * len(level), {}, [])
            known, level = self._learn(level, row)
            self._levels.append(known)
            rows.append(row)
        self.order = _depth_first(rows)

    def match(self, state: object) -> list[Any] | None:
        """Give what is no container, level after level, if the state is built as the one learnt; else None.

        `order` gives the places, in this list, of the same items in the order in which `tree.flatten` meets them.
        """
        level: list[Any] = [state]
        found: list[Any] = []
        for known in self._levels:
            if list(map(type, level)) != known.types:
                return None
            if known.ends is not None:
                found += compress(level, known.ends)
            below: list[Any] = []
            for group in known.groups:
                try:
                    children = group.below(group.select(level))
                except Exception:  # a field of a dataclass is not set, or an adapter refuses a container
                    return None
                if children is None:
                    return None
                below += children
            level = below
        return found

    def _kind(self, cls: type, value: Any) -> ContainerKind | None:
        form = form_of(cls)
        if form == "dataclass" or (form is None and not self._is_leaf(value)):
            return self._container(value)
        return None

    def _learn(self, level: list[Any], row: _Row) -> tuple[_Level, list[Any]]:
        """Learn one level, and enter into `row` where the children of each item stand on the next, which is given."""
        types = list(map(type, level))
        groups: list[_Group] = []
        opened: set[type] = set()
        below: list[Any] = []
        for cls in dict.fromkeys(types):
            kind = self._kind(cls, level[types.index(cls)])
            if kind is None and form_of(cls) in _ENDS:
                continue
            opened.add(cls)
            mask = [t is cls for t in types]
            members = list(compress(level, mask))
            if kind is not None:
                facts, children, counts = _opened(kind, members)
            else:
                facts, children = _looked_at(cls, members)
                fields = form_of(cls) == "dataclass"
                counts = [len(field_names(cls))] * len(members) if fields else list(map(len, members))
            groups.append(_Group(cls, None if all(mask) else mask, facts, kind))
            offset = len(below)
            places = list(compress(range(len(level)), mask))
            for i, count in zip(places, counts, strict=True):
                row.start[i], row.count[i] = offset, count
                offset += count
            if cls is OrderedDict:  # their attributes follow, as one dict each
                row.attributes.update(zip(places, range(offset, offset + len(places)), strict=True))
            below += children
        ends = [t not in opened for t in types]
        row.ends.extend(compress(range(len(level)), ends))
        return _Level(types, ends if any(ends) else None, groups), below


_ENDS = ("value", "text", None)


def _opened(kind: ContainerKind, members: list[Any]) -> tuple[list[Any], list[Any], list[int]]:
    """Open containers: give what must be equal for two rows to be built alike, their children, and how many of each."""
    opened = list(map(kind.open, members))
    counts = [len(children) for _, children in opened]
    return (
        [counts, *_facts_of_keys([key for keys, _ in opened for key in keys])],
        [child for _, children in opened for child in children],
        counts,
    )


def _looked_at(cls: type, members: list[Any]) -> tuple[list[Any], list[Any]]:
    """Give what must be equal, besides the class, for two rows of containers to be built alike, and their children."""
    if form_of(cls) == "dataclass":
        names = field_names(cls)
        found = map(operator.attrgetter(*names), members) if names else ()
        return [], list(_flat(found) if len(names) > 1 else found)
    facts: list[Any] = [list(map(len, members))]
    if cls not in _MAPPINGS:
        return facts, list(_flat(members))
    as_dicts = list(_flat(map(dict.__iter__, members)))
    if cls is not OrderedDict:
        facts += _facts_of_keys(as_dicts)
        if cls is defaultdict:
            facts.append(list(map(_factory, members)))
        return facts, list(_flat(map(dict.values, members)))
    # Its order is its own, and finding the value of each key in turn takes long: mostly it is that of the dict.
    keys = list(_flat(members))
    values = dict.values if keys == as_dicts else OrderedDict.values
    return facts + _facts_of_keys(keys), [*_flat(map(values, members)), *map(vars, members)]  # and their attributes


def _facts_of_keys(keys: list[Any]) -> list[Any]:
    types = list(map(type, keys))
    if types.count(str) == len(types) or _PLAIN_KEYS.issuperset(types):  # the first takes a tenth of the second
        return [keys, types]
    # 0.0 equals -0.0, and (1,) equals (True,)
    return [keys, types, [msgspec.json.encode(nodes.encode_key(key)) for key in keys]]


def _depth_first(rows: list[_Row]) -> list[int]:
    """Give the items that are no containers, numbered level after level, in depth-first order."""
    number: list[dict[int, int]] = []
    before = 0
    for row in rows:
        number.append({item: before + n for n, item in enumerate(row.ends)})
        before += len(row.ends)
    order: list[int] = []
    stack = [(0, 0)]
    while stack:
        level, item = stack.pop()
        if item in number[level]:
            order.append(number[level][item])
            continue
        row = rows[level]
        if item in row.attributes:
            stack.append((level + 1, row.attributes[item]))
        start = row.start[item]
        stack += [(level + 1, child) for child in reversed(range(start, start + row.count[item]))]
    return order
