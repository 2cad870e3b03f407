"""The stock Orbax CheckpointManager in a live replay (imports orbax, jax, none of pccheck).

`pccheck replay --live` finds it by its entry point.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, final

import jax
import orbax.checkpoint as ocp
from numpy.typing import NDArray

State = dict[str, NDArray[Any]]


@final
class Orbax:
    """Orbax's own manager, asynchronous as by default, which keeps two steps and removes what a killed process left.

    Args:
        directory: of the steps.
    """

    def __init__(self, directory: Path) -> None:
        config: Any = jax.config
        config.update("jax_platforms", "cpu")  # all arrays are NumPy's: an accelerator would be taken in vain
        options = ocp.CheckpointManagerOptions(max_to_keep=2, cleanup_tmp_directories=True)
        self._manager = ocp.CheckpointManager(directory, options=options)

    def restore(self, like: State) -> tuple[int, State] | None:
        """Load the newest step; None where there is none."""
        step = self._manager.latest_step()
        if step is None:
            return None
        return step, self._manager.restore(step, args=ocp.args.StandardRestore(like))

    def save(self, step: int, state: State) -> None:
        """Wait for the save before, copy the state, and return."""
        self._manager.save(step, args=ocp.args.StandardSave(state))

    def fence(self) -> None:
        """Return at once: the state was copied by `save`."""

    def close(self) -> None:
        """Wait for the save under way, and close."""
        self._manager.close()
