"""What a training state holds besides: plain values, and random generators (imports torch, numpy)."""

from __future__ import annotations

import random
from collections.abc import Mapping, MutableMapping
from typing import Any, final

import numpy as np
import torch
from torch import Tensor

from pccheck_torch.sections import KIND, Problems, Section, told


@final
class Plain(Section):
    """A tree of plain values and arrays, that lies in a mapping under its name.

    Containers that can change are filled in place, and so are arrays of the same shape and dtype: whoever holds them
    sees what was restored. Anything else is put into the mapping anew.
    """

    def __init__(self, holder: MutableMapping[str, Any], name: str) -> None:
        self._holder, self._name = holder, name

    def tree(self) -> Any:
        """Give what is to be saved, as it is now."""
        return self._holder[self._name]

    def check(self, stored: Any, path: str, found: Problems) -> None:
        """Report an array of another shape or dtype; below containers, all may change."""
        live = self.tree()
        if isinstance(live, (Tensor, np.ndarray)):
            found.leaf(path, live, stored)
        elif isinstance(live, (Mapping, list, tuple)) and type(live) is not type(stored):
            found.differs(path, "type", told(live), told(stored))

    def load(self, stored: Any) -> None:
        """Load what fits, in place."""
        found = Problems()
        self.check(stored, "", found)
        if not found.found:
            self._holder[self._name] = refilled(self.tree(), stored)


def refilled(live: Any, stored: Any) -> Any:
    """Give what is to stand where `live` stood: itself, filled, where it can take what is stored."""
    if isinstance(live, Tensor) and isinstance(stored, Tensor):
        if live.shape == stored.shape and live.dtype == stored.dtype:
            KIND.assign(live, stored.detach())
            return live
        return stored.clone()
    if isinstance(live, np.ndarray) and isinstance(stored, np.ndarray):
        if live.shape == stored.shape and live.dtype == stored.dtype and live.flags.writeable:
            np.copyto(live, stored)
            return live
        return stored.copy()
    if isinstance(live, MutableMapping) and isinstance(stored, Mapping):
        filled = {key: refilled(live.get(key), value) for key, value in stored.items()}
        live.clear()
        live.update(filled)
        return live
    if type(live) is list and type(stored) is list:
        lives = live + [None] * (len(stored) - len(live))
        live[:] = [refilled(mine, value) for mine, value in zip(lives, stored, strict=False)]
        return live
    return stored


@final
class Generator(Section):
    """A random generator of torch or NumPy that somebody made."""

    def __init__(self, generator: torch.Generator | np.random.Generator) -> None:
        self._generator = generator

    def tree(self) -> Any:
        """Give what is to be saved, as it is now."""
        if isinstance(self._generator, torch.Generator):
            return self._generator.get_state()
        return self._generator.bit_generator.state

    def check(self, stored: Any, path: str, found: Problems) -> None:
        """Report what would keep it from being loaded."""
        live = self.tree()
        if isinstance(live, Tensor):
            found.leaf(path, live, stored)
        elif not isinstance(stored, Mapping) or stored.get("bit_generator") != live["bit_generator"]:
            kind = stored.get("bit_generator") if isinstance(stored, Mapping) else told(stored)
            found.differs(path, "type", live["bit_generator"], kind)

    def load(self, stored: Any) -> None:
        """Load what fits, in place."""
        if isinstance(self._generator, torch.Generator):
            self._generator.set_state(stored.clone())
        else:
            self._generator.bit_generator.state = stored


@final
class Randomness(Section):
    """The generators that everything draws from: of Python, NumPy, torch, and each CUDA device in use.

    CUDA is not woken by looking. A checkpoint from another number of devices loads into those that are in both.
    """

    def tree(self) -> Any:
        """Give what is to be saved, as it is now."""
        found: dict[str, Any] = {
            "python": random.getstate(),
            "numpy": np.random.get_state(),
            "torch": torch.get_rng_state(),
        }
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            found["cuda"] = torch.cuda.get_rng_state_all()
        return found

    def check(self, stored: Any, path: str, found: Problems) -> None:
        """Report what would keep it from being loaded."""
        for name in ("python", "numpy", "torch"):
            if not isinstance(stored, Mapping):
                found.differs(path, "type", "dict", told(stored))
                return
            if name not in stored:
                found.missing(f"{path}/{name}", "generator")

    def load(self, stored: Any) -> None:
        """Load what fits, in place."""
        if not isinstance(stored, Mapping):
            return
        if "python" in stored:
            random.setstate(stored["python"])
        if "numpy" in stored:
            np.random.set_state(stored["numpy"])
        if "torch" in stored:
            torch.set_rng_state(stored["torch"].clone())
        if torch.cuda.is_available():
            for device, state in zip(range(torch.cuda.device_count()), stored.get("cuda", ()), strict=False):
                torch.cuda.set_rng_state(state.clone(), device)
