"""Holds a target of Orbax against what is stored, by path, as Orbax does (may import pccheck, Orbax, JAX).

The target's own classes come back, since JAX makes its tree again out of leaves.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, final

import jax

import pccheck
from pccheck.errors import MismatchError
from pccheck.leaves import StoredLeaf
from pccheck_orbax.paths import Path, flat, leaves, plain, rebuilt
from pccheck_orbax.requests import Request
from pccheck_orbax.shardings import saved_shardings, with_devices
from pccheck_orbax.wants import AS_STORED, Ask, Wanted, ask_of, shown, wanted, with_args


@final
class Target:
    """A `like` for one restore: the core asks it for the tree that is meant, once it is known what is stored.

    Args:
        request: what to restore.
        about: gives what was saved beside the item, which tells how its arrays were spread over devices; called if
            nothing else says where they go.
    """

    def __init__(self, request: Request, about: Callable[[], Mapping[str, Any]]) -> None:
        self._request, self._about = request, about
        self._posts: dict[Path, Callable[[Any], Any]] = {}
        self._kept: dict[Path, Any] = {}
        self._targets, self._form = flat(request.item)
        self._args, _ = flat(request.restore_args)

    def __pccheck_like__(self, stored: Any) -> Any:
        """Give the stored tree with what the target's leaves ask for; raises MismatchError."""
        self._posts, self._kept = {}, {}
        mismatches: list[pccheck.Mismatch] = []
        missing = dict(self._targets)
        saved = functools.cache(lambda: saved_shardings(self._about(), stored))

        def leaf(path: Path, value: Any) -> Any:
            if value is None and path not in missing:
                return None
            if self._form is not None and path not in missing:
                mismatches.append(_mismatch(path, "unexpected", "", value))
                return ...
            target = missing.pop(path, None)
            if target is ...:
                self._kept[path] = ...
                return ...
            found = wanted(self._ask(path, target, value, saved), target, value, "/".join(path))
            if isinstance(found, Wanted):
                self._posts[path] = found.post
                return found.like
            mismatches.append(found)
            return ...

        like = rebuilt(stored, leaf, self._targets)
        for path, target in missing.items():
            self._kept[path] = target
            mismatches.append(_mismatch(path, "missing", target, ""))
        if self._request.partial:
            mismatches = [m for m in mismatches if m.problem not in ("missing", "unexpected")]
        if mismatches:
            raise MismatchError(mismatches)
        return like

    def made_of(self, state: Any) -> Any:
        """Give what was asked for out of the state that the core restored."""
        if self._form is None:
            return plain(rebuilt(state, lambda path, value: self._posts.get(path, _same)(value), {}))
        values = dict(leaves(state, self._targets))
        made = [
            self._kept[path] if path in self._kept else self._posts.get(path, _same)(values[path])
            for path in self._targets
        ]
        return jax.tree.unflatten(self._form, made)

    def _ask(self, path: Path, target: Any, stored: Any, saved: Callable[[], dict[Path, Any]]) -> Ask:
        request = self._request
        of_jax = isinstance(stored, StoredLeaf) and stored.spec.kind == "jax"
        ask = AS_STORED if self._form is None else ask_of(target)
        if request.structure_only:  # of its leaves only the place counts
            placed = of_jax and ask.form == "jax" and ask.shape == stored.spec.shape
            ask = replace(AS_STORED, sharding=ask.sharding) if placed else AS_STORED
        ask = with_args(replace(ask, strict=request.strict), self._args.get(path))
        if of_jax and ask.form in ("stored", "jax"):
            sharding = ask.sharding if ask.sharding is not None else with_devices(saved().get(path))
            sharding = request.fallback_sharding if sharding is None else sharding
            ask = replace(ask, form="jax" if sharding is not None else ask.form, sharding=sharding)
        return ask


def _mismatch(path: Path, problem: Any, expected: Any, found: Any) -> pccheck.Mismatch:
    def told(value: Any) -> str:
        if isinstance(value, StoredLeaf):
            return shown(value)
        return value if value == "" and isinstance(value, str) else type(value).__name__

    return pccheck.Mismatch("/".join(path), problem, told(expected), told(found))


def _same(value: Any) -> Any:
    return value
