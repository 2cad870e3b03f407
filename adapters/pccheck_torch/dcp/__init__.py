"""PyTorch Distributed Checkpoint over pccheck (imports torch, pccheck's public names, pccheck_torch)."""

from pccheck_torch.dcp.backend import Backend
from pccheck_torch.dcp.fitting import Difference, StateDictError
from pccheck_torch.dcp.futures import Saving
from pccheck_torch.dcp.load_planner import LoadPlanner
from pccheck_torch.dcp.loading import Loaded
from pccheck_torch.dcp.plans import SavePlanner
from pccheck_torch.dcp.reader import Reader
from pccheck_torch.dcp.writer import Writer

__all__ = [
    "Backend",
    "Difference",
    "LoadPlanner",
    "Loaded",
    "Reader",
    "SavePlanner",
    "Saving",
    "StateDictError",
    "Writer",
]
