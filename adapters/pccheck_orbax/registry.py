"""Which handler Orbax takes for which args: ours for its own (may import pccheck, Orbax)."""

from __future__ import annotations

import orbax.checkpoint as ocp

from pccheck_orbax.args import Restore, Save
from pccheck_orbax.engine import Engine
from pccheck_orbax.handler import Handler
from pccheck_orbax.layout import DEFAULT_ITEM

ARGS = (
    Save,
    Restore,
    ocp.args.StandardSave,
    ocp.args.StandardRestore,
    ocp.args.PyTreeSave,
    ocp.args.PyTreeRestore,
)


def registry(*items: str, engine: Engine | None = None) -> ocp.handlers.DefaultCheckpointHandlerRegistry:
    """Give a registry by which Standard and PyTree args are saved and restored through pccheck.

    For `ocp.CheckpointManager(directory, handler_registry=pccheck_orbax.registry())` and
    `ocp.CompositeCheckpointHandler`. Other args, such as JsonSave, keep their handlers.

    Args:
        items: the items it is for; none given = any.
        engine: what saves; None = one of its own, with the defaults.
    """
    handler = Handler(engine)
    table = ocp.handlers.DefaultCheckpointHandlerRegistry()
    for item in items or (None, DEFAULT_ITEM):
        for args in ARGS:
            table.add(item, args, handler)
    return table
