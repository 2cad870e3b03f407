"""PyTorch leaves for pccheck (imports torch and pccheck's public names)."""

from pccheck_torch.lazy import Attachment, attach
from pccheck_torch.leaves import TorchKind
from pccheck_torch.ranks import StoreCoordinator
from pccheck_torch.registering import register, register_flattenable
from pccheck_torch.sampling import ResumableLoader, ResumableSampler
from pccheck_torch.training import TrainingState

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
