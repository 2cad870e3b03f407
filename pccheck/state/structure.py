"""Tells at C speed whether a state is built as it was before, and gives its leaves (floor 0: imports forms, nodes).

A trainer saves the same tree hundreds of times. Walking 20,000 leaves in Python costs as much as copying them, so the
tree is learnt once, level by level, and later each level is compared as a whole: its types, the lengths and keys of its
containers, with `map` and list comparison only. Paths are not built, and no leaf or container is kept.
"""

from __future__ import annotations

import operator
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain, compress
from typing import Any, TypeAlias, final

import msgspec

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
    children: Callable[[list[Any]], list[Any]]

    def select(self, level: list[Any]) -> list[Any]:
        return level if self.mask is None else list(compress(level, self.mask))


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
    """

    def __init__(self, state: object) -> None:
        self._levels: list[_Level] = []
        rows: list[_Row] = []
        level: list[Any] = [state]
        while level:
            row = _Row([0] * len(level), [0] * len(level), {}, [])
            self._levels.append(_learn(level, row))
            rows.append(row)
            level = [child for group in self._levels[-1].groups for child in group.children(group.select(level))]
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
                members = group.select(level)
                try:
                    if _facts(group.cls, members) != group.facts:
                        return None
                    below += group.children(members)
                except AttributeError:  # a field of a dataclass is not set
                    return None
            level = below
        return found


_ENDS = ("value", "text", None)


def _learn(level: list[Any], row: _Row) -> _Level:
    """Learn one level, and enter into `row` where the children of each item will stand on the next."""
    types = list(map(type, level))
    groups, offset = [], 0
    for cls in dict.fromkeys(types):
        if form_of(cls) in _ENDS:
            continue
        mask = [t is cls for t in types]
        group = _Group(cls, None if all(mask) else mask, _facts(cls, list(compress(level, mask))), _children(cls))
        groups.append(group)
        members = [i for i, member in enumerate(mask) if member]
        for i in members:
            count = len(field_names(cls)) if form_of(cls) == "dataclass" else len(level[i])
            row.start[i], row.count[i] = offset, count
            offset += count
        if cls is OrderedDict:  # their attributes follow, as one dict each
            for i in members:
                row.attributes[i] = offset
                offset += 1
    ends = [form_of(t) in _ENDS for t in types]
    row.ends.extend(compress(range(len(level)), ends))
    return _Level(types, ends if any(ends) else None, groups)


def _facts(cls: type, members: list[Any]) -> list[Any]:
    """Give what must be equal, besides the class, for two rows of containers to be built alike."""
    form = form_of(cls)
    if form == "dataclass":
        return []
    facts: list[Any] = [list(map(len, members))]
    if cls in _MAPPINGS:
        keys = list(_flat(members))
        types = list(map(type, keys))
        facts += [keys, types]
        if not _PLAIN_KEYS.issuperset(types):  # 0.0 equals -0.0, and (1,) equals (True,)
            facts.append([msgspec.json.encode(nodes.encode_key(key)) for key in keys])
        if cls is defaultdict:
            facts.append(list(map(_factory, members)))
    return facts


def _children(cls: type) -> Callable[[list[Any]], list[Any]]:
    """Give what makes, out of a row of containers of one class, the row of their children."""
    if cls is OrderedDict:
        return lambda members: [*_flat(map(OrderedDict.values, members)), *map(vars, members)]
    if cls in _MAPPINGS:
        return lambda members: list(_flat(map(dict.values, members)))
    if form_of(cls) == "dataclass":
        names = field_names(cls)
        if not names:
            return lambda members: []
        fields = operator.attrgetter(*names)
        return lambda members: list(map(fields, members) if len(names) == 1 else _flat(map(fields, members)))
    return lambda members: list(_flat(members))


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
