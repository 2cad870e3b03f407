"""pccheck: many durable checkpoints in flight, and always one whole, verified step to restore.

Loads no framework: an adapter is found when the first leaf of its kind is seen.
"""

from pccheck import errors, events, links, tuning
from pccheck.bill.report import Report, report
from pccheck.checkpointer import Checkpointer
from pccheck.control.controller import Controller
from pccheck.control.lastsave import Answer
from pccheck.options import Options
from pccheck.probing import probe
from pccheck.ranks.shared_directory import SharedDirectory
from pccheck.reading.outline import Outline, outline
from pccheck.reading.restoring import Restored, Skipped
from pccheck.saving.save import Save
from pccheck.saving.stats import Stats
from pccheck.state.mismatch import Mismatch
from pccheck.state.shards import Shard
from pccheck.version import __version__
from pccheck.view import View, open

__all__ = [
    "Answer",
    "Checkpointer",
    "Controller",
    "Mismatch",
    "Options",
    "Outline",
    "Report",
    "Restored",
    "Save",
    "Shard",
    "SharedDirectory",
    "Skipped",
    "Stats",
    "View",
    "__version__",
    "errors",
    "events",
    "links",
    "open",
    "outline",
    "probe",
    "report",
    "tuning",
]
