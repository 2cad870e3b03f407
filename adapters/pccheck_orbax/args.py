"""The args that ask Orbax for pccheck, by item (may import pccheck, Orbax)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, final

import orbax.checkpoint as ocp

from pccheck_orbax.handler import Handler


@final
@ocp.args.register_with_handler(Handler, for_save=True)
@dataclass
class Save(ocp.args.CheckpointArgs):
    """Save an item through pccheck.

    Args:
        item: any tree that pccheck stores: arrays, numbers, text, bytes, in any containers.
        custom_metadata: small JSON, given back by `item_metadata(step).custom_metadata`.
    """

    item: Any
    custom_metadata: Any = None


@final
@ocp.args.register_with_handler(Handler, for_restore=True)
@dataclass
class Restore(ocp.args.CheckpointArgs):
    """Restore an item that was saved through pccheck.

    Args:
        item: a tree of arrays or abstract arrays whose structure, dtypes and shardings come back; None = plain
            containers, with the leaves as they were saved. A leaf `ocp.PLACEHOLDER` is left out.
        partial: restore what `item` has, and nothing else.
    """

    item: Any = None
    partial: bool = False
