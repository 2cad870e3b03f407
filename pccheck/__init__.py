"""pccheck: many durable checkpoints in flight, and always one whole, verified step to restore.

Loads no framework: an adapter is found when the first leaf of its kind is seen.
"""

from pccheck import errors, events
from pccheck.checkpointer import Checkpointer
from pccheck.options import Options
from pccheck.reading.restoring import Restored, Skipped
from pccheck.saving.flight import Stats
from pccheck.saving.save import Save
from pccheck.version import __version__
from pccheck.view import View, open

__all__ = [
    "Checkpointer",
    "Options",
    "Restored",
    "Save",
    "Skipped",
    "Stats",
    "View",
    "__version__",
    "errors",
    "events",
    "open",
]
