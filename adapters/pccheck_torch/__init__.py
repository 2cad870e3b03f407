"""PyTorch leaves for pccheck (imports torch and pccheck's public names)."""

from pccheck_torch.lazy import Attachment, attach
from pccheck_torch.leaves.kind import TorchKind
from pccheck_torch.leaves.registering import register, register_flattenable
from pccheck_torch.ranks import StoreCoordinator
from pccheck_torch.training.sampling import ResumableLoader, ResumableSampler
from pccheck_torch.training.state import TrainingState

__all__ = [
    "Attachment",
    "ResumableLoader",
    "ResumableSampler",
    "StoreCoordinator",
    "TorchKind",
    "TrainingState",
    "attach",
    "kind",
    "register",
    "register_flattenable",
]

kind = TorchKind()
