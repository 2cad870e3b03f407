"""The training state that is saved, marked with the step at every change (bench: imports torch, numpy)."""

from __future__ import annotations

import math

import numpy as np
import torch

MIB = 1 << 20
LAYERS = 8
State = dict[str, dict[str, torch.Tensor]]


GROUPS = ("model", "exp_avg", "exp_avg_sq")


def gpt_state(size_bytes: int) -> State:
    """Give a GPT's float32 weights and AdamW moments of about `size_bytes` in all, and the step.

    No two tensors and no two neighbours hold the same values, so that bytes in the wrong place are seen.
    """
    shapes = gpt_shapes(size_bytes)
    state: State = {
        group: {name: _filled(shape, 1000 * g + i) for i, (name, shape) in enumerate(shapes.items())}
        for g, group in enumerate(GROUPS)
    }
    return {**state, "progress": {"step": torch.zeros(1, dtype=torch.int64)}}


def gpt_shapes(size_bytes: int) -> dict[str, tuple[int, ...]]:
    """Give the shapes of a GPT's weights, of which those in float32 and two moments are about `size_bytes` in all.

    Eight layers share three quarters of the bytes, the embeddings take the rest, as in small GPTs.
    """
    width = max(16, int(math.sqrt(size_bytes * 0.75 / (3 * 4 * 12 * LAYERS))) // 8 * 8)
    shapes: dict[str, tuple[int, ...]] = {}
    for layer in range(LAYERS):
        for name, shape in (
            ("ln_1.weight", (width,)),
            ("attn.qkv.weight", (3 * width, width)),
            ("attn.qkv.bias", (3 * width,)),
            ("attn.proj.weight", (width, width)),
            ("attn.proj.bias", (width,)),
            ("ln_2.weight", (width,)),
            ("mlp.up.weight", (4 * width, width)),
            ("mlp.up.bias", (4 * width,)),
            ("mlp.down.weight", (width, 4 * width)),
            ("mlp.down.bias", (width,)),
        ):
            shapes[f"h.{layer}.{name}"] = shape
    rest = size_bytes // 12 - sum(math.prod(shape) for shape in shapes.values())
    shapes["wte.weight"] = (max(1, rest // width), width)
    return shapes


def many_leaves(count: int, leaf_bytes: int, kind: str = "torch") -> dict[str, dict[str, object]]:
    """Give `count` float32 leaves of one size, as torch tensors or NumPy arrays."""
    tensors = {f"p{i}": _filled((leaf_bytes // 4,), i) for i in range(count)}
    return {"model": {name: t if kind == "torch" else np.asarray(t) for name, t in tensors.items()}}


def _filled(shape: tuple[int, ...], seed: int) -> torch.Tensor:
    return torch.arange(math.prod(shape), dtype=torch.float32).add_(seed * 0.37).reshape(shape)


def size_of(state: State) -> int:
    """Give the bytes of a state."""
    return sum(t.numel() * t.element_size() for group in state.values() for t in group.values())


class Marks:
    """Writes the step into a few places of every tensor, in place: what an optimizer step does, but cheap.

    A checkpoint that mixes two steps has mixed marks.
    """

    def __init__(self, state: State) -> None:
        self._step = state["progress"]["step"]
        flats = [t.view(-1) for group, tensors in state.items() if group != "progress" for t in tensors.values()]
        self._places = [flat[:: max(1, flat.numel() // 3)] for flat in flats]

    def set(self, step: int) -> None:
        """Change the state: it is now that of `step`."""
        self._step.fill_(step)
        for place in self._places:
            place.fill_(step)


def differences(restored: State, expected: State) -> list[str]:
    """Give the names of tensors that differ in any bit, in shape or in type, or are not in both."""
    found = []
    for group in sorted(restored.keys() | expected.keys()):
        mine, theirs = expected.get(group, {}), restored.get(group, {})
        for name in sorted(mine.keys() | theirs.keys()):
            a, b = mine.get(name), theirs.get(name)
            if a is None or b is None or a.dtype != b.dtype or not torch.equal(a, b):
                found.append(f"{group}.{name}")
    return found
