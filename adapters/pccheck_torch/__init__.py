"""PyTorch leaves for pccheck (imports torch and pccheck's public names)."""

from pccheck_torch.leaves import TorchKind

__all__ = ["TorchKind", "kind"]

kind = TorchKind()
