"""Which boxes of a global array lie where, and which of them this process stores (imports jax, pccheck.leaves)."""

from __future__ import annotations

import functools
import operator
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
from jax.sharding import AbstractMesh, NamedSharding, Sharding

from pccheck.leaves import Box, part_of

_sharding = operator.attrgetter("sharding")
NOWHERE = -1  # a shard that is on no device of this process


class Share(NamedTuple):
    """A part of an array that this process stores.

    Args:
        shard: number among the shards of this process (`addressable_data`), or NOWHERE.
        box: what of the global array it is; None = all of it, which no other process stores.
        rows: which rows of the shard; None = all of it.
    """

    shard: int
    box: Box | None = None
    rows: tuple[int, int] | None = None


_ALL = (Share(0),)


@functools.lru_cache(maxsize=4096)
def shares(sharding: Sharding, shape: tuple[int, ...]) -> tuple[Share, ...]:
    """Give what this process stores of an array: each box that it holds once, by rows where other processes hold it.

    All processes together store each element once; an array without axes or elements is each one's own.
    """
    mine = local_boxes(sharding, shape)
    if len(sharding.device_set) == 1 or not shape or 0 in shape:
        return _ALL if mine else (Share(NOWHERE, _nothing(shape)),)
    holders: dict[Box, set[int]] = {}
    everywhere: Mapping[Any, Any] = sharding.devices_indices_map(shape)
    for device, index in everywhere.items():
        holders.setdefault(_box(index, shape), set()).add(device.process_index)
    found: dict[Box, Share] = {}
    for number, (device, box) in enumerate(mine):
        if box not in found:
            processes = sorted(holders[box])
            found[box] = _share(number, box, processes.index(device.process_index), len(processes), shape)
    stored = tuple(share for share in found.values() if share.box is None or share.box.elements)
    return stored or (Share(NOWHERE, _nothing(shape)),)


def local_boxes(sharding: Sharding, shape: tuple[int, ...]) -> list[tuple[Any, Box]]:
    """Give the devices of this process that hold a part, in the order of `addressable_data`, and which."""
    found = sharding.addressable_devices_indices_map(shape)
    return [(device, _box(index, shape)) for device, index in found.items()]


def _share(number: int, box: Box, index: int, count: int, shape: tuple[int, ...]) -> Share:
    if count == 1:
        return Share(number, None if box.sizes == shape else box)
    part = part_of(box, index, count)
    if part.sizes == box.sizes:
        return Share(number, part)
    first = part.offsets[0] - box.offsets[0]
    return Share(number, part, (first, first + part.sizes[0]))


def _nothing(shape: tuple[int, ...]) -> Box:
    return Box((0,) * len(shape), (0,) * len(shape))


def _box(index: Any, shape: tuple[int, ...]) -> Box:
    bounds = [s.indices(n)[:2] for s, n in zip(index, shape, strict=True)]
    return Box(tuple(first for first, _ in bounds), tuple(max(0, end - first) for first, end in bounds))


@functools.lru_cache(maxsize=4096)
def is_single(sharding: Sharding) -> bool:
    """Tell whether an array lies on one device."""
    return len(sharding.device_set) == 1


@functools.lru_cache(maxsize=4096)
def is_on_host(sharding: Sharding) -> bool:
    """Tell whether an array lies in this machine's memory: that of the CPU backend, or the host memory of another."""
    memory = sharding.memory_kind or ""
    devices: Iterable[Any] = sharding.device_set
    return memory.endswith("host") or all(device.platform == "cpu" for device in devices)


def are_single(values: Sequence[Any]) -> bool:
    """Tell whether all of these arrays lie on one device each; asked of thousands on every save."""
    return all(map(is_single, different(map(_sharding, values))))


def are_on_host(values: Sequence[Any]) -> bool:
    """Tell whether all of these arrays lie in this machine's memory."""
    return all(map(is_on_host, different(map(_sharding, values))))


def different(shardings: Iterable[Any]) -> Iterable[Any]:
    """Give each sharding once, or more often where equal ones are different objects: by identity, which is quick."""
    return {id(each): each for each in shardings}.values()


def concrete(sharding: Any) -> Sharding | None:
    """Give a sharding with devices: of an abstract mesh (`jax.eval_shape`) the one that `jax.set_mesh` set; else None.

    None also stands for "the default device".
    """
    if not isinstance(sharding, Sharding):
        return None
    if not isinstance(sharding, NamedSharding) or not isinstance(sharding.mesh, AbstractMesh):
        return sharding
    mesh = jax.sharding.get_mesh()
    if mesh.empty or mesh.abstract_mesh.axis_names != sharding.mesh.axis_names:
        return None
    return NamedSharding(mesh, sharding.spec, memory_kind=sharding.memory_kind)
