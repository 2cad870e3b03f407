"""Items that Orbax's own handlers saved: a run that changes over to pccheck goes on from them (may import Orbax)."""

from __future__ import annotations

import os
from typing import Any

import orbax.checkpoint as ocp
from etils import epath

from pccheck import links
from pccheck_orbax.layout import LISTING
from pccheck_orbax.marking import MARK, is_ours


def is_of_orbax(folder: str) -> bool:
    """Tell whether an item's folder holds a tree that Orbax's own handlers saved."""
    ours = (LISTING, links.rank_name(0))
    if not os.path.isfile(os.path.join(folder, MARK)) or any(os.path.lexists(os.path.join(folder, n)) for n in ours):
        return False
    return not is_ours(folder)  # of ours both files may be lost: then the error is to say so


def restore(folder: str, args: Any) -> Any:
    """Give it, as args of ours or of Orbax's ask for it."""
    path, item = epath.Path(folder), getattr(args, "item", None)
    if getattr(args, "partial", False):
        how = ocp.checkpoint_utils.construct_restore_args(item)
        args = ocp.args.PyTreeRestore(item, restore_args=how, partial_restore=True)
    if isinstance(args, ocp.args.PyTreeRestore):
        return ocp.PyTreeCheckpointHandler().restore(path, args=args)
    if not isinstance(args, ocp.args.StandardRestore):
        args = ocp.args.StandardRestore(item)
    return ocp.StandardCheckpointHandler().restore(path, args=args)


def metadata(folder: str) -> Any:
    """Give its metadata."""
    return ocp.StandardCheckpointHandler().metadata(epath.Path(folder))
