"""How arrays were spread over devices, told beside an item, so that they come back so (may import pccheck, Orbax, JAX).

Orbax gives an array back with the sharding that it was saved with, where nobody asks for another and the devices are
there. The core knows the boxes of an array, but not the mesh and the axes that made them.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping
from typing import Any, final

import jax
import orbax.checkpoint as ocp
from jax.sharding import NamedSharding

from pccheck.errors import UsageError
from pccheck.leaves import StoredLeaf
from pccheck_orbax.paths import Path, flat, leaves

KEY = "shardings"  # in the metadata of a save
_MAX_CHARACTERS = 32 * 1024  # of it all: half of what a save's metadata may have


@final
class Recorder:
    """Tells the shardings of a state's arrays as small JSON; at once for the next save of the same. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._last: tuple[Any, list[Any], dict[str, Any] | None] | None = None

    def record(self, state: Any) -> dict[str, Any] | None:
        """Give the shardings over several devices, and which leaves have them; None where none has."""
        try:
            values, form = jax.tree.flatten(state)
        except (TypeError, ValueError):  # keys that cannot be sorted: pccheck stores them, JAX has no order for them
            return None
        found = [getattr(value, "sharding", None) for value in values]  # isinstance(jax.Array) takes ten times as long
        if not any(map(_is_spread, {id(each): each for each in found}.values())):
            return None
        with self._lock:
            last = self._last
            told = last[2] if last is not None and last[0] == form and last[1] == found else _told(state)
            self._last = (form, found, told)  # compared by identity first: results of the same step share their objects
            return told


def saved_shardings(metadata: Mapping[str, Any], stored: Any) -> dict[Path, ocp.metadata.ShardingMetadata]:
    """Give the shardings that were told beside an item, by the paths in its tree of StoredLeaf."""
    told = metadata.get(KEY)
    if not isinstance(told, dict):
        return {}
    paths = sorted(p for p, leaf in leaves(stored, {}) if isinstance(leaf, StoredLeaf) and leaf.spec.kind == "jax")
    kinds, of = told.get("kinds"), told.get("of")
    if not isinstance(kinds, list) or not isinstance(of, list) or len(of) != len(paths):
        return {}
    try:
        read = [ocp.metadata.NamedShardingMetadata.from_deserialized_dict(json.loads(kind)) for kind in kinds]
        return {path: read[index] for path, index in zip(paths, of, strict=True) if index is not None}
    except (ValueError, TypeError, KeyError, IndexError, AttributeError):
        return {}  # of another release of Orbax: it only says where to put what comes back


def with_devices(sharding: Any) -> Any:
    """Give a sharding with the devices of this program; None where it tells of devices that are not there."""
    if not isinstance(sharding, ocp.metadata.ShardingMetadata):
        return sharding
    try:
        return sharding.to_jax_sharding()
    except ValueError:
        return None


def _is_spread(sharding: Any) -> bool:
    return isinstance(sharding, NamedSharding) and len(sharding.device_set) > 1


def _told(state: Any) -> dict[str, Any] | None:
    kinds: dict[str, int] = {}
    of: list[int | None] = []
    try:
        found = flat(state)[0]
    except UsageError:  # two keys that are the same as text
        return None
    for path in sorted(found):
        leaf = found[path]
        if not isinstance(leaf, jax.Array):
            continue
        if not _is_spread(leaf.sharding):
            of.append(None)
            continue
        text = ocp.metadata.NamedShardingMetadata.from_jax_sharding(leaf.sharding).to_serialized_string()
        of.append(kinds.setdefault(text, len(kinds)))
    told = {"kinds": list(kinds), "of": of}
    return told if len(json.dumps(told)) <= _MAX_CHARACTERS else None
