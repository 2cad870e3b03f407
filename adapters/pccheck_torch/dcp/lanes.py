"""What one save in flight has for itself, and how the ranks of a job agree (imports torch, pccheck_torch.ranks)."""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist

from pccheck_torch.dcp.futures import Saving
from pccheck_torch.ranks import StoreCoordinator


@dataclass
class Lane:
    """A process group that one save at a time uses: DCP mixes up two saves that share one.

    Args:
        group: None where there is no other rank.
        last: the save that has it, or had it last.
    """

    group: dist.ProcessGroup | None
    last: Saving | None = None


def new_group(process_group: dist.ProcessGroup | None, timeout_s: float) -> dist.ProcessGroup:
    """Make a gloo group of the same ranks (None = all); each of them must call this."""
    ranks = None if process_group is None else dist.get_process_group_ranks(process_group)
    made: dist.ProcessGroup = dist.new_group(
        ranks, timeout=timedelta(seconds=timeout_s), backend="gloo", use_local_synchronization=ranks is not None
    )
    return made


def coordinator(directory: str | os.PathLike[str], process_group: dist.ProcessGroup | None) -> StoreCoordinator:
    """Let ranks agree under a name that no other directory or group of the job has."""
    ranks = "all" if process_group is None else dist.get_process_group_ranks(process_group)
    place = f"{os.path.abspath(os.fspath(directory))} {ranks}"
    name = f"dcp-{hashlib.blake2s(place.encode(), digest_size=8).hexdigest()}"
    return StoreCoordinator(rank=dist.get_rank(process_group), world=dist.get_world_size(process_group), name=name)
