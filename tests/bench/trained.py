"""A model that is nothing but leaves, and an optimizer whose step changes each of them (bench: imports torch)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, final

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn import Module, Parameter
from torch.optim import Optimizer


@final
class Leaves(Module):
    """As many float32 parameters of one shape as are asked for, all different."""

    def __init__(self, count: int, *shape: int) -> None:
        super().__init__()
        size = torch.Size(shape)
        for i in range(count):
            values = torch.arange(size.numel(), dtype=torch.float32).add_(i * 0.37).reshape(size)
            self.register_parameter(f"p{i}", Parameter(values, requires_grad=False))


@final
class Touch(Optimizer):
    """Adds 1 to the first and the last element of every parameter: what an optimizer changes, for next to nothing.

    A checkpoint that mixes two steps has mixed ends.
    """

    def __init__(self, model: Module) -> None:
        super().__init__(list(model.parameters()), {})
        flats = (local(p).view(-1) for p in model.parameters())
        self._ends = [flat[:: max(1, flat.numel() - 1)] for flat in flats]

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Change every parameter."""
        torch._foreach_add_(self._ends, 1.0)


def local(tensor: Tensor) -> Tensor:
    """Give what this rank has of a tensor, itself where it is not shared out."""
    held: Tensor = tensor.to_local() if isinstance(tensor, DTensor) else tensor.detach()
    return held.detach()


def copies(model: Module) -> dict[str, Tensor]:
    """Give copies of what this rank has of each parameter, by name."""
    return {name: local(p).clone() for name, p in model.named_parameters()}
