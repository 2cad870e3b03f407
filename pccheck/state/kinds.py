"""Which kind of leaf a value is: NumPy's own or an installed adapter's (floor 1: imports floors 0 and 1).

Adapters are found by entry point, on first sight of a type: `import pccheck` loads no framework. The group is
"pccheck.leaves", the entry's name the top-level module of a class that the leaf's type derives from. What opens other
containers is found in the group "pccheck.containers", by modules that are loaded.
"""

from __future__ import annotations

import sys
from importlib.metadata import EntryPoint, entry_points
from typing import Any, final

from pccheck.containers import ContainerKind
from pccheck.errors import PccheckError, UnsupportedLeafError
from pccheck.leaves import LeafKind, LeafSpec
from pccheck.state.numpy_leaves import NumpyKind
from pccheck.state.shards import Shard, ShardKind
from pccheck.state.text_leaves import BytesKind, StrKind
from pccheck.state.tree import type_name

GROUP = "pccheck.leaves"
CONTAINERS = "pccheck.containers"
# What to install for the types of frameworks that pccheck has adapters for, by top-level module.
PROVIDERS = {"torch": "pccheck[torch]", "jax": "pccheck[jax]", "jaxlib": "pccheck[jax]"}
_MAX_TYPES = 4096


@final
class Kinds:
    """Finds the kind of a leaf; remembers what it found, and nothing else. Thread-safe."""

    def __init__(self) -> None:
        self._numpy = NumpyKind()
        self._named: dict[str, LeafKind | None] = {k.name: k for k in (self._numpy, BytesKind(), StrKind())}
        self._by_type: dict[type, LeafKind | None] = {str: self._named["str"], bytes: self._named["bytes"]}
        self._shards: dict[LeafKind, ShardKind] = {}  # by the kind of the arrays inside
        self._entries: dict[str, EntryPoint] | None = None
        self._like_by_type: dict[type, tuple[LeafKind, ...]] = {}
        self._openers: dict[str, EntryPoint | ContainerKind | None] | None = None  # by module; None = not installed
        self._container_by_type: dict[type, ContainerKind] = {}

    def __call__(self, value: object) -> LeafKind | None:
        """Give the kind that stores values of this type; None if there is none.

        Raises:
            UnsupportedLeafError: pccheck has an adapter for this type, but it is not installed (path "").
        """
        if isinstance(value, Shard):
            inner = self(value.array)
            return None if inner is None else self._of_shards(inner)
        cls = type(value)
        try:
            return self._by_type[cls]
        except KeyError:
            pass
        kind = self._find(value)
        if len(self._by_type) < _MAX_TYPES:
            self._by_type[cls] = kind
        return kind

    def named(self, name: str) -> LeafKind | None:
        """Give the kind of this name; None if its adapter, or the framework that this needs, is not installed."""
        if name not in self._named:
            entry = self._installed().get(name)
            if entry is None:
                return None  # names out of files are not remembered: there is no end to them
            self._named[name] = _loaded(entry, LeafKind)
        return self._named[name]

    def like(self, value: object) -> tuple[LeafKind, LeafSpec] | None:
        """Give the kind and spec that a leaf of `like` asks for, abstract arrays included; None if it is no array."""
        if isinstance(value, Shard):
            asked = self.like(value.array)
            shards = None if asked is None else self._of_shards(asked[0])
            part = None if shards is None else shards.like(value)
            return None if shards is None or part is None else (shards, part)
        for kind in self._asked(value):
            spec = kind.like(value)
            if spec is not None:
                return kind, spec
        return None

    def container(self, value: object) -> ContainerKind | None:
        """Give what opens a container of this class; None if nothing does.

        Only adapters of modules that are loaded are asked. That nothing opens a class is remembered of leaves alone:
        another class may be registered later.

        Raises:
            PccheckError: what is installed as a ContainerKind is none.
        """
        cls = type(value)
        kind = self._container_by_type.get(cls)
        if kind is not None or self._by_type.get(cls) is not None:
            return kind
        if self._openers is None:
            self._openers = {entry.name: entry for entry in entry_points(group=CONTAINERS)}
        for module in self._openers:
            kind = self._opener(self._openers, module) if module in sys.modules else None
            if kind is not None and kind.recognises(value):
                if len(self._container_by_type) < _MAX_TYPES:
                    self._container_by_type[cls] = kind
                return kind
        return None

    def _opener(self, openers: dict[str, EntryPoint | ContainerKind | None], module: str) -> ContainerKind | None:
        known = openers[module]
        if isinstance(known, EntryPoint):
            openers[module] = known = _loaded(known, ContainerKind)
        return known

    def _asked(self, value: object) -> tuple[LeafKind, ...]:
        """Give the kinds that may know what a leaf of `like` asks for: of an abstract array it is none that stores it.

        So kinds are found by the name of its module, too: before NumPy's, which takes anything with shape and dtype.
        """
        cls = type(value)
        known = self._like_by_type.get(cls)
        if known is None:
            stores = self(value)
            found = [stores] if stores is not None else [self.named(module) for module in _modules(cls)]
            known = tuple(dict.fromkeys(kind for kind in (*found, self._numpy) if kind is not None))
            if len(self._like_by_type) < _MAX_TYPES:
                self._like_by_type[cls] = known
        return known

    def _of_shards(self, inner: LeafKind) -> ShardKind:
        return self._shards.setdefault(inner, ShardKind(inner))

    def _find(self, value: object) -> LeafKind | None:
        if self._numpy.recognises(value):
            return self._numpy
        modules = _modules(type(value))
        for module in modules:
            kind = self.named(module)
            if kind is not None and kind.recognises(value):
                return kind
        for module in modules:
            if module in PROVIDERS and self.named(module) is None:
                raise UnsupportedLeafError(
                    "", type_name(value),
                    f"no adapter for {module} is installed (entry point {module!r} of group {GROUP!r}); "
                    f"run: pip install '{PROVIDERS[module]}'",
                )  # fmt: skip
        return None

    def _installed(self) -> dict[str, EntryPoint]:
        if self._entries is None:  # reads the metadata of every installed package: some 10 ms, once
            self._entries = {entry.name: entry for entry in entry_points(group=GROUP)}
        return self._entries


def _loaded(entry: EntryPoint, cls: type) -> Any:
    """Give what an entry point offers, an instance of `cls`; None if the framework that it needs is not installed."""
    try:
        found = entry.load()
    except ImportError:
        return None
    if found is not None and not isinstance(found, cls):
        raise PccheckError(
            f"the entry point {entry.name!r} of group {entry.group!r} is a {type_name(found)}, no {cls.__name__}"
        )
    return found


def _modules(cls: type) -> list[str]:
    """Give the top-level modules of the classes that a class derives from."""
    modules = dict.fromkeys(str(base.__module__).split(".")[0] for base in cls.__mro__)
    modules.pop("builtins", None)
    return list(modules)


kind_of = Kinds()
