"""Puts a restored state into a live one, in place, after all of it was found to fit (floor 1: imports floor 0)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, final

import numpy as np

from pccheck.containers import ContainerKind
from pccheck.errors import UnsupportedLeafError, UsageError
from pccheck.leaves import KindTable, LeafKind, LeafSpec
from pccheck.state import nodes, paths
from pccheck.state.fit import children_of, container_of, fields_like
from pccheck.state.forms import field_names, form_of
from pccheck.state.mismatch import MAX_MISMATCHES, Mismatch, Problem, told
from pccheck.state.nodes import MAX_DEPTH
from pccheck.state.tree import type_name
from pccheck.state.wanting import shown

_SIDE = "the target"
_FIXED = "that cannot be written (use restore(like=...), which gives new arrays)"


@final
class Assigning:
    """Holds a restored state against a live one; `carry_out` then writes what fits. Used by one thread.

    `mismatches` are the places that differ.

    Args:
        kind_of: finds kinds of leaves.
        target: the live state.
        state: the restored one.

    Raises:
        UsageError: the target holds something that can be no leaf, or is nested too deeply.
    """

    def __init__(self, kind_of: KindTable, target: Any, state: Any) -> None:
        self._kind_of = kind_of
        self._found: list[Mismatch] = []
        self._writes: list[tuple[str, LeafKind, Any, Any]] = []
        self._sets: list[Callable[[], None]] = []
        self._written: dict[int, Any] = {}  # by id of a live leaf, what it is to hold
        self._node(target, state, "", 0, replaceable=False)
        self.mismatches: tuple[Mismatch, ...] = tuple(self._found)

    def carry_out(self) -> None:
        """Write every leaf that fits, then replace the Python values."""
        for path, kind, target, value in self._writes:
            try:
                kind.assign(target, value)
            except UnsupportedLeafError as error:
                raise error.at(path, restoring=True) from error
        for put in self._sets:
            put()

    def _node(self, target: Any, value: Any, path: str, depth: int, *, replaceable: bool) -> Any:
        """Give what is to stand where `target` stands; `replaceable` tells whether another object can."""
        if value is ...:  # left out of what was restored
            return target
        form = form_of(type(target))
        if depth > MAX_DEPTH:
            raise UsageError(f"the target is nested more than {MAX_DEPTH} levels deep at {path}")
        if form == "value" or form == "text":
            return self._value(target, value, path, replaceable)
        kind = container_of(target, self._kind_of)
        if kind is not None:
            found = self._by_key(value)
            if found is not None:
                return self._opened(kind, target, found, path, depth + 1, replaceable)
            return self._differs(target, path, "type", type_name(target), type_name(value))
        if form is None:
            return self._leaf(target, value, path, replaceable)
        if form in ("namedtuple", "dataclass"):
            stored = _fields_of(value)
            if stored is not None:
                return self._fields(target, stored, path, depth + 1, replaceable)
        elif isinstance(target, dict):
            if isinstance(value, dict):
                return self._mapping(target, value, path, depth + 1)
        elif form_of(type(value)) == form:
            return self._sequence(target, value, path, depth + 1, replaceable)
        return self._differs(target, path, "type", type_name(target), type_name(value))

    # -- containers ------------------------------------------------------------------------------------------------

    def _by_key(self, value: Any) -> dict[Any, Any] | None:
        """Give the children, by type and key, of what may stand for a container that an adapter knows."""
        kind = container_of(value, self._kind_of)
        if kind is not None:
            found = dict(zip(*kind.open(value), strict=True))
        elif isinstance(value, dict):
            found = value
        else:
            fields = _fields_of(value)
            if fields is None:
                return None
            found = fields
        return {(type(key), key): child for key, child in found.items()}

    def _opened(
        self, kind: ContainerKind, target: Any, stored: dict[Any, Any], path: str, depth: int, replaceable: bool
    ) -> Any:
        """Fit a container that an adapter knows: its leaves are written where they are, else it is made anew."""
        keys, children = kind.open(target)
        items = []
        for key, child in zip(keys, children, strict=True):
            below = paths.join(path, paths.component(key), is_root=depth == 1)
            items.append(child)
            if (type(key), key) in stored:
                now = stored.pop((type(key), key))
                items[-1] = self._node(child, now, below, depth, replaceable=replaceable)
            else:
                self._lacks("missing", child, below, depth)
        self._unexpected([(paths.component(key), child) for (_, key), child in stored.items()], path, depth)
        return target if _same(items, children) else kind.close(target, items)

    def _mapping(self, target: dict[Any, Any], value: dict[Any, Any], path: str, depth: int) -> Any:
        stored = {(type(k), k): child for k, child in value.items()}
        for key, child in target.items():
            below = paths.join(path, paths.component(key), is_root=depth == 1)
            if (type(key), key) not in stored:
                self._lacks("missing", child, below, depth)
                continue
            now = self._node(child, stored.pop((type(key), key)), below, depth, replaceable=True)
            if now is not child:
                self._sets.append(lambda key=key, now=now: target.__setitem__(key, now))  # type: ignore[misc]
        self._unexpected([(paths.component(key), child) for (_, key), child in stored.items()], path, depth)
        return target

    def _sequence(self, target: Any, value: Any, path: str, depth: int, replaceable: bool) -> Any:
        mutable, items = isinstance(target, list), []
        for i, child in enumerate(target):
            below = paths.join(path, str(i), is_root=depth == 1)
            if i >= len(value):
                self._lacks("missing", child, below, depth)
                items.append(child)
                continue
            items.append(self._node(child, value[i], below, depth, replaceable=mutable or replaceable))
            if mutable and items[-1] is not child:
                self._sets.append(lambda i=i, now=items[-1]: target.__setitem__(i, now))  # type: ignore[misc]
        self._unexpected([(str(i), value[i]) for i in range(len(target), len(value))], path, depth)
        return target if mutable or _same(items, target) else tuple(items)

    def _fields(self, target: Any, stored: dict[str, Any], path: str, depth: int, replaceable: bool) -> Any:
        parameters = getattr(type(target), "__dataclass_params__", None)
        mutable, items = parameters is not None and not parameters.frozen, []
        for name in field_names(type(target)):
            child, below = getattr(target, name, None), paths.join(path, paths.component(name), is_root=depth == 1)
            if name not in stored:
                self._lacks("missing", child, below, depth)
                items.append((name, child))
                continue
            now = self._node(child, stored.pop(name), below, depth, replaceable=mutable or replaceable)
            items.append((name, now))
            if mutable and now is not child:
                self._sets.append(lambda name=name, now=now: setattr(target, name, now))  # type: ignore[misc]
        self._unexpected([(paths.component(name), child) for name, child in stored.items()], path, depth)
        same = all(now is getattr(target, name, None) for name, now in items)
        return target if mutable or same else fields_like(target, items)

    def _unexpected(self, found: Sequence[tuple[str, Any]], path: str, depth: int) -> None:
        for part, value in found:
            self._lacks("unexpected", value, paths.join(path, part, is_root=depth == 1), depth)

    def _lacks(self, problem: Problem, value: Any, path: str, depth: int) -> None:
        """Report every leaf of what one side lacks, or an empty container itself."""
        if len(self._found) >= MAX_MISMATCHES:
            return
        children = list(children_of(value, self._kind_of)) if depth < MAX_DEPTH else []
        for part, child in children:
            self._lacks(problem, child, paths.join(path, part, is_root=False), depth + 1)
        if not children:
            sides = (self._told(value), "") if problem == "missing" else ("", self._told(value))
            self._found.append(Mismatch(path, problem, *sides, _SIDE))

    # -- leaves and values -----------------------------------------------------------------------------------------

    def _value(self, target: Any, value: Any, path: str, replaceable: bool) -> Any:
        if type(value) is not type(target):
            return self._differs(target, path, "type", type_name(target), self._told(value))
        if nodes.encode_value(value) == nodes.encode_value(target):
            return target
        return self._replaced(target, value, path, replaceable)

    def _replaced(self, target: Any, value: Any, path: str, replaceable: bool) -> Any:
        if replaceable:
            return value
        return self._differs(target, path, "value", f"{target!r:.80}, which cannot be replaced,", f"{value!r:.80}")

    def _leaf(self, target: Any, value: Any, path: str, replaceable: bool) -> Any:
        kind, want = self._asked(target, path)
        if form_of(type(value)) is not None:
            return self._differs(target, path, "kind", shown(want), type_name(value))
        other, have = self._asked(value, path)
        if other.name != kind.name:
            return self._differs(target, path, "kind", shown(want), f"{shown(have)} (restore with `like` to convert)")
        if have.shape != want.shape:
            return self._differs(target, path, "shape", str(want.shape), str(have.shape))
        if have.dtype != want.dtype or have.extra.get("struct") != want.extra.get("struct"):
            return self._differs(target, path, "dtype", want.dtype, have.dtype)
        if have.box != want.box:
            sides = ["all of it" if box is None else told(box) for box in (want.box, have.box)]
            return self._differs(target, path, "part", *sides)
        if isinstance(target, np.generic) or "value" in want.extra:
            same = have.extra == want.extra and (not isinstance(target, np.generic) or _bits(target) == _bits(value))
            return target if same else self._replaced(target, value, path, replaceable)
        if not kind.assignable(target):
            return self._differs(target, path, "kind", f"{shown(want)} {_FIXED}", shown(have))
        known = self._written.setdefault(id(target), value)
        if known is value:
            self._writes.append((path, kind, target, value))
        elif not _is_tied(kind, known, other, value):
            return self._differs(target, path, "tied", "one array that stands elsewhere, too", "an array of its own")
        return target

    def _asked(self, leaf: Any, path: str) -> tuple[LeafKind, LeafSpec]:
        try:
            asked = self._kind_of.like(leaf)
        except UnsupportedLeafError as error:
            raise error.at(path, restoring=True) from None
        if asked is None:
            hint = "; pass its .state_dict()" if callable(getattr(type(leaf), "state_dict", None)) else ""
            raise UsageError(f"the target has a {type_name(leaf)} at {path or 'its root'}, which can be no leaf{hint}")
        return asked

    def _differs(self, target: Any, path: str, problem: Problem, expected: str, found: str) -> Any:
        self._found.append(Mismatch(path, problem, expected, found, _SIDE))
        return target

    def _told(self, value: Any) -> str:
        try:
            asked = None if form_of(type(value)) is not None else self._kind_of.like(value)
        except UnsupportedLeafError:
            asked = None
        return type_name(value) if asked is None else shown(asked[1])


def _fields_of(value: Any) -> dict[str, Any] | None:
    """Give the fields of what may stand for a namedtuple or dataclass: one, or a dict where its names are not legal."""
    form = form_of(type(value))
    if form in ("namedtuple", "dataclass"):
        return {name: getattr(value, name) for name in field_names(type(value))}
    return dict(value) if form == "dict" and all(type(key) is str for key in value) else None


def _same(items: Sequence[Any], others: Sequence[Any]) -> bool:
    return len(items) == len(others) and all(a is b for a, b in zip(items, others, strict=True))


def _bits(scalar: Any) -> bytes:
    return np.asarray(scalar).tobytes()


def _is_tied(kind: LeafKind, known: Any, other: LeafKind, value: Any) -> bool:
    """Tell whether two restored leaves are the same memory seen alike."""
    aliases = [part.host_bytes(known).alias for part in _parts(kind, known)]
    return None not in aliases and aliases == [part.host_bytes(value).alias for part in _parts(other, value)]


def _parts(kind: LeafKind, leaf: Any) -> list[LeafKind]:
    count = kind.parts(leaf)
    return [kind] if count == 1 else [kind.part(n) for n in range(count)]
