"""A small real training whose state can be checked at any step, bit for bit (floor 0: imports nothing of pccheck).

A perceptron with one hidden layer learns from batches that are made of the number of the step; Adam updates it in
place. Ballast gives the state its size. Every step changes all of it, as an optimizer would, in a way that follows from
the number of the step alone, so that each byte of a restored state can be held against what it must be.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, final

import numpy as np
import xxhash
from numpy.typing import NDArray

State = dict[str, NDArray[Any]]

_IN, _HIDDEN, _OUT, _BATCH = 64, 64, 16, 32  # so small that no BLAS would start threads for it
_RATE, _BETA1, _BETA2, _EPSILON = 1e-3, 0.9, 0.999, 1e-8  # Adam, as its paper has them
_PART = 4 << 20  # most elements of one leaf of ballast: 16 MiB
_TILE = 256 << 10  # elements of the pattern that ballast is made of
_PER_TILE, _PER_STEP = 0x9E3779B1, 0x85EBCA77  # odd: no two tiles, and no two steps, look alike


@final
class Training:
    """A training and its state, which is changed in place. Not thread-safe.

    Args:
        state_bytes: size of the state, about; at least that of the perceptron.
        seed: of what it learns, where it begins, and the pattern of its ballast.
    """

    def __init__(self, state_bytes: int, *, seed: int = 0) -> None:
        self._seed = seed
        self._tile = np.random.default_rng((seed, 1)).integers(-(2**31), 2**31, _TILE, dtype=np.int32)
        self._scratch = np.empty_like(self._tile)
        self._teacher = np.random.default_rng((seed, 2)).standard_normal((_IN, _OUT), np.float32)
        shapes = {"w1": (_IN, _HIDDEN), "b1": (_HIDDEN,), "w2": (_HIDDEN, _OUT), "b2": (_OUT,)}
        self._params = {name: np.zeros(shape, np.float32) for name, shape in shapes.items()}
        self._m = {name: np.zeros_like(p) for name, p in self._params.items()}
        self._v = {name: np.zeros_like(p) for name, p in self._params.items()}
        self._grads = {name: np.zeros_like(p) for name, p in self._params.items()}
        self._count = np.zeros(1, np.int64)
        small: State = {"step": self._count}
        for group, leaves in (("model", self._params), ("adam_m", self._m), ("adam_v", self._v)):
            small |= {f"{group}/{name}": leaf for name, leaf in leaves.items()}
        left = max(0, (state_bytes - sum(leaf.nbytes for leaf in small.values())) // 4)
        self._ballast = [np.empty(min(_PART, left - at), np.int32) for at in range(0, left, _PART)]
        self._small = small
        self.state: State = small | {f"ballast/{i:03}": part for i, part in enumerate(self._ballast)}
        self.reset()

    @property
    def step(self) -> int:
        """Steps done so far."""
        return int(self._count[0])

    @property
    def state_bytes(self) -> int:
        """Bytes of the state."""
        return sum(leaf.nbytes for leaf in self.state.values())

    def reset(self) -> None:
        """Begin anew, at step 0."""
        dice = np.random.default_rng((self._seed, 3))
        for name, param in self._params.items():
            param[...] = dice.standard_normal(param.shape, np.float32) / np.sqrt(max(param.shape[0], 1))
            self._m[name][...] = 0
            self._v[name][...] = 0
        self._count[0] = 0
        for number, piece in self._tiles(self._ballast):
            np.add(self._tile[: piece.size], _offset(number, 0), out=piece)

    def gradients(self) -> float:
        """Compute what the next update needs, of the next batch; reads the state only. Gives the loss."""
        dice = np.random.default_rng((self._seed, 4, self.step))
        batch = dice.standard_normal((_BATCH, _IN), np.float32)
        hidden = np.tanh(batch @ self._params["w1"] + self._params["b1"])
        error = hidden @ self._params["w2"] + self._params["b2"] - np.tanh(batch @ self._teacher)
        back = error * np.float32(2 / error.size)
        self._grads["w2"], self._grads["b2"] = hidden.T @ back, back.sum(0)
        inner = (back @ self._params["w2"].T) * (1 - hidden * hidden)
        self._grads["w1"], self._grads["b1"] = batch.T @ inner, inner.sum(0)
        return float(np.mean(error * error))

    def update(self) -> None:
        """Do the step: change all of the state, in place."""
        self._count += 1
        rate = np.float32(_RATE * (1 - _BETA2**self.step) ** 0.5 / (1 - _BETA1**self.step))
        for name, param in self._params.items():
            m, v, grad = self._m[name], self._v[name], self._grads[name]
            m += np.float32(1 - _BETA1) * (grad - m)
            v += np.float32(1 - _BETA2) * (grad * grad - v)
            param -= rate * m / (np.sqrt(v) + np.float32(_EPSILON))
        for part in self._ballast:
            np.add(part, _signed(_PER_STEP), out=part)

    def digest(self) -> str:
        """Give a digest of all but the ballast: the same for the same step of the same training."""
        return _digest(self._small)

    def refusal(self, step: int, state: Mapping[str, Any], digests: Mapping[int, str]) -> str | None:
        """Tell why a state cannot be that of a step; None if it is, in every bit.

        Args:
            step: that it is said to be of.
            state: what was restored; it may hold arrays of this training's own.
            digests: by step, of what was saved.
        """
        if sorted(state) != sorted(self.state):
            return f"its leaves are {sorted(state)[:4]}..., not {sorted(self.state)[:4]}..."
        for name, mine in self.state.items():
            theirs = state[name]
            if not isinstance(theirs, np.ndarray) or (theirs.dtype, theirs.shape) != (mine.dtype, mine.shape):
                return f"{name} is {_kind(theirs)}, not {_kind(mine)}"
        if step not in digests:
            return f"no save of step {step} was ever begun"
        if int(state["step"][0]) != step:
            return f"it is of step {int(state['step'][0])}, and was called one of step {step}"
        if _digest({name: state[name] for name in self._small}) != digests[step]:
            return f"parameters or moments are not those of step {step}"
        for number, piece in self._tiles([state[f"ballast/{i:03}"] for i in range(len(self._ballast))]):
            rest = np.subtract(piece, self._tile[: piece.size], out=self._scratch[: piece.size])
            if not np.all(rest == _offset(number, step)):
                return f"ballast is not that of step {step}, in its tile {number}"
        return None

    def adopt(self, state: Mapping[str, NDArray[Any]]) -> None:
        """Go on from a state that `refusal` has nothing against."""
        for name, mine in self.state.items():
            if state[name] is not mine:
                np.copyto(mine, state[name])

    def _tiles(self, parts: list[NDArray[Any]]) -> Iterator[tuple[int, NDArray[Any]]]:
        """Give each stretch of ballast that one tile makes, and its number."""
        number = 0
        for part in parts:
            for at in range(0, part.size, _TILE):
                yield number, part[at : at + _TILE]
                number += 1


def _digest(leaves: Mapping[str, NDArray[Any]]) -> str:
    digest = xxhash.xxh3_128()
    for name in sorted(leaves):
        digest.update(np.ascontiguousarray(leaves[name]).tobytes())
    return digest.hexdigest()


def _kind(value: object) -> str:
    return f"{value.dtype}{list(value.shape)}" if isinstance(value, np.ndarray) else type(value).__name__


def _offset(tile: int, step: int) -> np.int32:
    """Give what a tile of ballast is above the pattern, at a step."""
    return _signed(tile * _PER_TILE + step * _PER_STEP)


def _signed(value: int) -> np.int32:
    return np.int32((value + 2**31) % 2**32 - 2**31)
