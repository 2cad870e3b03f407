"""DTensors: which box of the global array is here, and how a part becomes one again (imports torch, pccheck.leaves).

torch.distributed is imported only once a DTensor was seen, so that programs of one process never load it.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter

from pccheck.errors import UnsupportedLeafError
from pccheck.leaves import Box, DeviceBytes, HostBytes, LeafSpec, part_of
from pccheck_torch.leaves import dense
from pccheck_torch.leaves.fingerprints import DenseFingerprint

_MODULES = ("torch.distributed.tensor", "torch.distributed._tensor")
_local, _spec = operator.attrgetter("_local_tensor"), operator.attrgetter("_spec")


class Place(NamedTuple):
    """Where a DTensor's local part belongs.

    Args:
        box: the part of the global array; None for an array without axes.
        replica, replicas: which of how many ranks that hold the same box this is.
    """

    box: Box | None
    replica: int
    replicas: int

    @property
    def share(self) -> Box | None:
        """What of the box this rank stores: each of the replicas another part."""
        return None if self.box is None else part_of(self.box, self.replica, self.replicas)


def is_dtensor_class(cls: type) -> bool:
    """Tell whether it is DTensor itself, without importing it."""
    return cls.__name__ == "DTensor" and cls.__module__.startswith(_MODULES)


def describe(value: Any) -> LeafSpec:
    """Give the spec of what this rank stores; UnsupportedLeafError for placements that are no box."""
    local, place = _dense_local(value), place_of(value)
    share = place.share
    nbytes = (local.numel() if share is None else share.elements) * local.element_size()
    return LeafSpec(
        kind=dense.KIND, dtype=dense.dtype_name(local.dtype), shape=tuple(value.shape), nbytes=nbytes,
        extra=dense.gradient_of(value), box=share,
    )  # fmt: skip


def asked(value: Any) -> LeafSpec:
    """Give what a DTensor in `like` asks for: all of its local part, of which a replica stores only a share."""
    place = place_of(value)
    elements = math.prod(value.shape) if place.box is None else place.box.elements
    dtype = value.dtype
    return LeafSpec(
        kind=dense.KIND, dtype=dense.dtype_name(dtype), shape=tuple(value.shape), nbytes=elements * dtype.itemsize,
        box=place.box,
    )  # fmt: skip


def bytes_of(value: Any) -> HostBytes | DeviceBytes:
    """Give the bytes of this rank's share in C order, in place where they lie so."""
    return dense.bytes_of(memory_of(value), keep=value, c_order=True)


def memory_of(value: Any) -> Tensor:
    """Give the tensor over this rank's share."""
    _dense_local(value), place_of(value)  # refuses what is no box with values
    return memories([value])[0]


def memories(values: Sequence[Any]) -> list[Tensor]:
    """Give the tensor over this rank's share of each; asked of thousands on every save."""
    rank = _rank() if values else 0
    rows = [_rows(spec, rank) for spec in map(_spec, values)]
    return [
        local if mine is None else local[mine[0] : mine[1]] if mine[1] > mine[0] else local.flatten()[:0]
        for local, mine in zip(map(_local, values), rows, strict=True)
    ]


def addresses(values: Sequence[Any]) -> list[int]:
    """Give where this rank's share of each begins in memory."""
    locals_, rank = list(map(_local, values)), _rank() if values else 0
    found = list(map(Tensor.data_ptr, locals_))
    for i, spec in enumerate(map(_spec, values)):
        rows = _rows(spec, rank)
        if rows is not None and rows[0]:
            found[i] += rows[0] * locals_[i].stride(0) * locals_[i].element_size()
    return found


@functools.lru_cache(maxsize=4096)
def _rows(spec: Any, rank: int) -> tuple[int, int] | None:
    """Give which rows of its local part a rank stores; None = all of it. The spec has mesh and shape, and no tensor."""
    coordinate = spec.mesh.get_coordinate()
    place = _place(
        tuple(spec.shape), spec.mesh, tuple(spec.placements), None if coordinate is None else tuple(coordinate)
    )
    share, box = place.share, place.box
    if share is None or box is None or share.sizes == box.sizes:
        return None
    first = share.offsets[0] - box.offsets[0]
    return (first, first + share.sizes[0]) if share.elements else (0, 0)


def _rank() -> int:
    import torch.distributed as dist

    return dist.get_rank() if dist.is_initialized() else 0


def _dense_local(value: Any) -> Tensor:
    local = _local_of(value)
    if not dense.is_plain(local):
        raise dense.refused(value, f"its local part is a {dense.type_name(local)} on {local.device}, no dense tensor")
    dense.assert_dense(local)
    return local


def _local_of(value: Any) -> Tensor:
    try:
        local = _local(value)
    except AttributeError:
        raise dense.refused(value, f"torch {torch.__version__} keeps a DTensor's local part elsewhere") from None
    assert isinstance(local, Tensor)
    return local


def place_of(value: Any) -> Place:
    """Give where a DTensor's local part belongs; UnsupportedLeafError for one that is no box."""
    mesh, placements = value.device_mesh, tuple(value.placements)
    coordinate = mesh.get_coordinate()
    try:
        return _place(tuple(value.shape), mesh, placements, None if coordinate is None else tuple(coordinate))
    except UnsupportedLeafError as error:
        raise dense.refused(value, error.reason) from None


@functools.lru_cache(maxsize=4096)
def _place(shape: tuple[int, ...], mesh: Any, placements: tuple[Any, ...], coordinate: tuple[int, ...] | None) -> Place:
    if any(p.is_partial() for p in placements):
        raise UnsupportedLeafError("", "", "it is Partial, a sum not yet made; .redistribute() it first")
    if not shape:
        return Place(None, 0, 1)
    if coordinate is None:  # this rank is not in the mesh
        return Place(Box((0,) * len(shape), (0,) * len(shape)), 0, 1)
    box = _box(shape, mesh, placements)
    replica, replicas = 0, 1
    for at, count, placement in zip(coordinate, mesh.shape, placements, strict=True):
        if placement.is_replicate():
            replica, replicas = replica * count + at, replicas * count
    return Place(box, replica, replicas)


def _box(shape: tuple[int, ...], mesh: Any, placements: tuple[Any, ...]) -> Box:
    try:
        from torch.distributed.tensor._utils import compute_local_shape_and_global_offset as compute
    except ImportError:
        raise UnsupportedLeafError(
            "", "", f"torch {torch.__version__} has no compute_local_shape_and_global_offset; store .to_local() parts"
        ) from None
    sizes, offsets = (tuple(map(int, numbers)) for numbers in compute(shape, mesh, placements))
    if any(type(p).__name__ == "_StridedShard" for p in placements):
        _assert_whole_runs(shape, mesh, placements, sizes, offsets)
    if 0 in sizes:  # where an empty part begins is told in more than one way
        return Box((0,) * len(shape), sizes)
    box = Box(offsets, sizes)
    if not box.fits(shape):
        raise UnsupportedLeafError("", "", f"placements {placements} put its part out of shape {shape}")
    return box


def _assert_whole_runs(
    shape: tuple[int, ...], mesh: Any, placements: tuple[Any, ...], sizes: tuple[int, ...], offsets: tuple[int, ...]
) -> None:
    """Refuse parts that are not contiguous along an axis, which `_StridedShard` can make (with TP, FSDP2 makes boxes).

    The axis is cut as the placements say, written out with the public meaning of both: `Shard` cuts what is left in
    chunks; `_StridedShard(split_factor=s)` first in s pieces, and of each it takes the same chunk.
    """
    coordinate = mesh.get_coordinate()
    for axis, count in enumerate(shape):
        rows = [torch.arange(count, device="cpu")]
        for at, n, placement in zip(coordinate, mesh.shape, placements, strict=True):
            if getattr(placement, "dim", None) != axis or placement.is_replicate():
                continue
            pieces = _chunks(torch.cat(rows), int(getattr(placement, "split_factor", 1)))
            rows = [_chunks(piece, n)[at] for piece in pieces]
        found = torch.cat(rows)
        whole = torch.arange(offsets[axis], offsets[axis] + sizes[axis], device="cpu")
        if found.numel() and not torch.equal(found, whole):
            raise UnsupportedLeafError(
                "", "", f"placements {placements} on mesh {tuple(mesh.shape)} make its part no box of shape {shape}; "
                "redistribute it to Shard placements first",
            )  # fmt: skip


def _chunks(rows: Tensor, count: int) -> list[Tensor]:
    found = list(torch.chunk(rows, count)) if rows.numel() else []
    return found + [rows[:0]] * (count - len(found))


# -- what a cached plan depends on -----------------------------------------------------------------------------------


class Fingerprint:
    """What tells two rows of DTensors apart, but for addresses; keeps meshes, and no tensor."""

    def __init__(self, values: Sequence[Any]) -> None:
        self._specs = list(map(_spec, values))
        self._facts = list(map(_facts, values))
        self._locals = DenseFingerprint(locals_of(values))

    def fits(self, values: Sequence[Any]) -> bool:
        """Tell whether all of that is still so."""
        if not all(map(operator.is_, map(_spec, values), self._specs)) and list(map(_facts, values)) != self._facts:
            return False
        gradients = [(v.requires_grad, v.is_leaf) for v in values] == [f[4:6] for f in self._facts]
        return gradients and self._locals.addresses(locals_of(values)) is not None


def _facts(value: Any) -> tuple[Any, ...]:
    return (
        tuple(value.shape), value.device_mesh, tuple(value.placements), isinstance(value, Parameter),
        value.requires_grad, value.is_leaf,
    )  # fmt: skip


def locals_of(values: Sequence[Any]) -> list[Tensor]:
    """Give the local parts."""
    return list(map(_local, values))


# -- restoring -------------------------------------------------------------------------------------------------------


def convert(local: Tensor, like: Any) -> Any:
    """Give a DTensor of a restored local part, with the placements, device and gradient of another."""
    from torch.distributed.tensor import DTensor

    place = place_of(like)
    sizes = tuple(like.shape) if place.box is None else place.box.sizes
    model = _local_of(like)
    if tuple(local.shape) != sizes:
        raise dense.refused(like, f"a part of shape {tuple(local.shape)} was restored where {sizes} belongs")
    local = local.detach().reshape(model.shape)
    on_meta = model.device.type == "meta"
    local = local.to(like.device_mesh.device_type) if on_meta else dense.placed(local, model)
    made = DTensor.from_local(
        local, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
    )
    if isinstance(like, Parameter):
        return Parameter(made, requires_grad=like.requires_grad)
    return made.requires_grad_() if like.requires_grad and like.is_leaf else made


def placement(like: Any) -> tuple[Any, ...]:
    """Give mesh and placements, and device and strides of the local part."""
    local = _local_of(like)
    return like.device_mesh, tuple(like.placements), local.device, local.stride()


def assign(target: Any, value: Any) -> None:
    """Copy the local part of a DTensor, or that part of a whole tensor, into a DTensor, in place."""
    local, place = _local_of(target), place_of(target)
    if is_dtensor_class(type(value)):
        mine = _local_of(value)
        if place_of(value).box != place.box:
            raise dense.refused(target, "what was restored is another part of the global array")
    elif place.box is not None and tuple(value.shape) != place.box.sizes:
        mine = value.detach()[tuple(slice(o, e) for o, e in zip(place.box.offsets, place.box.ends, strict=True))]
    else:
        mine = value.detach()
    dense.copy_into(local, mine.reshape(local.shape))
