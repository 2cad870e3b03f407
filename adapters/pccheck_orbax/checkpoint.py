"""`orbax.checkpoint` with pccheck's managers and checkpointers: for the import line of a script (imports Orbax).

`import pccheck_orbax.checkpoint as ocp` in place of `import orbax.checkpoint as ocp`: all other names are Orbax's.
"""

from __future__ import annotations

from typing import Any

import orbax.checkpoint

from pccheck_orbax.checkpointers import StandardCheckpointer
from pccheck_orbax.manager import CheckpointManager

__all__ = ["CheckpointManager", "StandardCheckpointer"]


def __getattr__(name: str) -> Any:
    return getattr(orbax.checkpoint, name)


def __dir__() -> list[str]:
    return sorted({*dir(orbax.checkpoint), *globals()})
