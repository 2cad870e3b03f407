"""pccheck under Orbax: its own args, managers and checkpointers, several saves in flight (imports pccheck, Orbax)."""

from pccheck_orbax.args import Restore, Save
from pccheck_orbax.checkpointers import StandardCheckpointer
from pccheck_orbax.engine import Engine
from pccheck_orbax.handler import Handler
from pccheck_orbax.manager import CheckpointManager
from pccheck_orbax.registry import registry

__all__ = ["CheckpointManager", "Engine", "Handler", "Restore", "Save", "StandardCheckpointer", "registry"]
