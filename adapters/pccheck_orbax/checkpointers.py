"""Checkpointers of single folders, without a manager (may import pccheck, Orbax)."""

from __future__ import annotations

from typing import Any, final

import orbax.checkpoint as ocp

from pccheck_orbax.engine import Engine
from pccheck_orbax.handler import Handler


@final
class StandardCheckpointer(ocp.AsyncCheckpointer):
    """Saves a tree into a folder in the background and restores it, as `ocp.StandardCheckpointer` does.

    The store that the folders' files belong to is `.pccheck` beside them.

    Args:
        engine: what saves; None = one of its own, with the defaults, closed with the checkpointer.
        **options: of `ocp.AsyncCheckpointer`.
    """

    def __init__(self, *, engine: Engine | None = None, **options: Any) -> None:
        super().__init__(Handler(engine), **options)

    def save(
        self,
        directory: Any,
        state: Any,
        *,
        save_args: Any = None,
        force: bool = False,
        custom_metadata: dict[str, Any] | None = None,
    ) -> None:
        """Start saving a tree into a folder that is not there yet, or with `force` replaces what is there.

        Waits for an earlier save of this checkpointer and raises what it failed with.
        """
        args = ocp.args.StandardSave(state, save_args=save_args)
        super().save(directory, args=args, force=force, custom_metadata=custom_metadata)

    def restore(self, directory: Any, target: Any = None, *, strict: bool = True) -> Any:
        """Give the tree in a folder, with the structure, dtypes and shardings of a target if there is one."""
        return super().restore(directory, args=ocp.args.StandardRestore(target, strict=strict))
