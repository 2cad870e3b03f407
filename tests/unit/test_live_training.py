"""What a live replay trains: any restored state can be told from the right one, bit for bit."""

from __future__ import annotations

import numpy as np
import pytest

from pccheck.replay.training import Training

SIZE = 5 << 20  # five tiles, the last one not whole


def stepped(training: Training) -> float:
    loss = training.gradients()
    training.update()
    return loss


def trained(steps: int, *, seed: int = 0) -> Training:
    training = Training(SIZE, seed=seed)
    for _ in range(steps):
        stepped(training)
    return training


def copy(training: Training) -> dict[str, np.ndarray]:
    return {name: leaf.copy() for name, leaf in training.state.items()}


def test_it_learns():
    training = Training(0)
    losses = [stepped(training) for _ in range(300)]
    assert np.mean(losses[-20:]) < 0.7 * np.mean(losses[:20])


def test_the_same_training_has_the_same_bits_and_another_seed_has_others():
    one, two, other = trained(7), trained(7), trained(7, seed=1)
    assert one.digest() == two.digest() != other.digest()
    for name, leaf in one.state.items():
        assert leaf.tobytes() == two.state[name].tobytes(), name


def test_every_step_changes_all_of_the_ballast():
    training = trained(1)
    before = copy(training)
    stepped(training)
    for name in [n for n in before if n.startswith("ballast/")]:
        assert not np.any(before[name] == training.state[name])


@pytest.mark.parametrize("size", [1, 1 << 20, SIZE, 40 << 20])
def test_the_state_has_the_size_that_was_asked_for(size):
    training = Training(size)
    smallest = Training(0).state_bytes
    assert max(size, smallest) - 4 < training.state_bytes <= max(size, smallest)


def test_what_was_saved_is_adopted_and_goes_on_as_if_nothing_had_happened():
    never, killed = trained(12), trained(5)
    saved, digests = copy(killed), {5: killed.digest()}
    again = trained(9)
    assert again.refusal(5, saved, digests) is None
    again.adopt(saved)
    assert again.step == 5
    for _ in range(7):
        stepped(again)
    assert again.digest() == never.digest()
    assert again.refusal(12, never.state, {12: never.digest()}) is None
    assert again.refusal(12, again.state, {12: never.digest()}) is None


def test_reset_begins_anew():
    training = trained(4)
    training.reset()
    fresh = Training(SIZE)
    assert training.refusal(0, fresh.state, {0: training.digest()}) is None
    assert training.refusal(0, training.state, {0: fresh.digest()}) is None


def flip(name: str, at: int):
    def damage(state: dict[str, np.ndarray]) -> None:
        state[name].view(np.uint8).reshape(-1)[at] ^= 1

    return damage


def swap_tiles(state: dict[str, np.ndarray]) -> None:
    part, tile = state["ballast/000"], 256 << 10
    part[:tile], part[tile : 2 * tile] = part[tile : 2 * tile].copy(), part[:tile].copy()


def mix(name: str):
    def damage(state: dict[str, np.ndarray]) -> None:
        state[name][-1000:] = trained(6).state[name][-1000:]

    return damage


DAMAGE = {
    "a bit of the first ballast": (flip("ballast/000", 0), "in its tile 0"),
    "a bit of the last ballast": (flip("ballast/000", -1), "in its tile 4"),
    "a bit of a parameter": (flip("model/w1", 77), "parameters or moments"),
    "a bit of a moment": (flip("adam_v/b2", 3), "parameters or moments"),
    "tiles in each other's place": (swap_tiles, "in its tile 0"),
    "ballast of two steps": (mix("ballast/000"), "in its tile 4"),
    "another step inside": (flip("step", 0), "called one of step 5"),
    "a leaf too few": (lambda state: state.pop("model/w2"), "its leaves"),
    "a leaf too many": (lambda state: state.update(more=np.zeros(1)), "its leaves"),
    "another dtype": (lambda state: state.update({"model/b1": np.zeros(64, np.float64)}), "model/b1 is float64"),
    "another shape": (lambda state: state.update({"model/b1": np.zeros(63, np.float32)}), "not float32[64]"),
    "no array": (lambda state: state.update({"model/b1": [0.0] * 64}), "model/b1 is list"),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_whatever_is_wrong_with_a_restored_state_is_told(kind):
    training = trained(5)
    state, (damage, told) = copy(training), DAMAGE[kind]
    damage(state)
    assert told in (training.refusal(5, state, {5: training.digest()}) or "")


def test_a_step_that_was_never_saved_is_refused():
    training = trained(5)
    assert "no save of step 5" in (training.refusal(5, copy(training), {4: training.digest()}) or "")
