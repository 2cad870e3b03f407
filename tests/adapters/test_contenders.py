"""The contenders of a live replay: each gives back, in another instance, what it was given, whatever came after."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import numpy as np
import pytest

from pccheck.replay.contender import Contender, find, installed
from pccheck.replay.live import Settings, run
from pccheck.replay.trace import Trace
from pccheck.replay.training import Training

NEEDS = {"pccheck": "numpy", "torch.save": "torch", "dcp": "torch", "orbax": "orbax"}
SIZE = 3 << 20

pytestmark = pytest.mark.filterwarnings("ignore")  # of frameworks: they are what is measured


@pytest.fixture(params=NEEDS)
def name(request) -> str:
    if importlib.util.find_spec(NEEDS[request.param]) is None:
        pytest.skip(f"needs {NEEDS[request.param]}")
    found: str = request.param
    return found


def open_in(directory: Path, name: str) -> Contender:
    directory.mkdir(exist_ok=True)
    return find(name)(directory)


def trained(steps: int) -> Training:
    training = Training(SIZE)
    for _ in range(steps):
        training.gradients()
        training.update()
    return training


def train(contender: Contender, training: Training, steps: int, every: int) -> dict[int, str]:
    """Train as a live replay does; give the digests of what was saved."""
    digests = {}
    for _ in range(steps):
        training.gradients()
        contender.fence()
        training.update()
        if training.step % every == 0:
            digests[training.step] = training.digest()
            contender.save(training.step, training.state)
    return digests


def check_restores(contender: Contender, step: int, digests: dict[int, str]) -> None:
    training = trained(0)
    restored = contender.restore(training.state)
    assert restored is not None
    assert restored[0] == step
    assert training.refusal(step, restored[1], digests) is None
    training.adopt(restored[1])
    assert training.step == step


def test_all_are_installed_by_entry_point():
    assert set(installed()) >= set(NEEDS)


def test_nothing_is_restored_where_nothing_was_saved(tmp_path, name):
    contender = open_in(tmp_path / "store", name)
    assert contender.restore(trained(0).state) is None
    contender.close()


def test_the_newest_save_is_restored_though_training_went_on(tmp_path, name):
    contender, training = open_in(tmp_path / "store", name), trained(0)
    assert contender.restore(training.state) is None
    digests = train(contender, training, 14, every=3)  # and two more steps after the last save
    contender.close()
    again = open_in(tmp_path / "store", name)
    check_restores(again, 12, digests)
    again.close()


def test_it_goes_on_saving_after_a_restore(tmp_path, name):
    contender, training = open_in(tmp_path / "store", name), trained(0)
    digests = train(contender, training, 4, every=2)
    contender.close()
    contender = open_in(tmp_path / "store", name)
    training = trained(0)
    restored = contender.restore(training.state)
    assert restored is not None
    training.adopt(restored[1])
    digests |= train(contender, training, 6, every=2)
    contender.close()
    contender = open_in(tmp_path / "store", name)
    check_restores(contender, 10, digests)
    contender.close()


def test_old_checkpoints_do_not_pile_up(tmp_path, name):
    contender, training = open_in(tmp_path / "store", name), trained(0)
    train(contender, training, 12, every=1)
    contender.close()
    held = sum(file.stat().st_blocks * 512 for file in (tmp_path / "store").rglob("*") if file.is_file())
    assert held < 4.2 * SIZE  # of twelve: the room that a live replay asks for


def test_what_a_killed_process_left_of_a_save_is_passed_over(tmp_path):
    torch = pytest.importorskip("torch")
    contender, training = open_in(tmp_path / "store", "dcp"), trained(0)
    digests = train(contender, training, 2, every=2)
    contender.close()
    torn = tmp_path / "store" / "step-4"
    torn.mkdir()
    (torn / "__0_0.distcp").write_bytes(b"torn")
    (tmp_path / "store" / "step-4" / ".metadata.tmp").write_bytes(b"torn")
    contender = open_in(tmp_path / "store", "dcp")
    check_restores(contender, 2, digests)
    digests |= train(contender, training, 2, every=2)  # of the same step: what was left gives way
    contender.close()
    check_restores(open_in(tmp_path / "store", "dcp"), 4, digests)
    assert [folder.name for folder in (tmp_path / "store").iterdir()] == ["step-4"]

    contender = open_in(tmp_path / "file", "torch.save")
    digests = train(contender, training, 2, every=2)
    (tmp_path / "file" / "new.pt").write_bytes(b"torn")
    check_restores(open_in(tmp_path / "file", "torch.save"), 6, digests)
    assert torch.load(tmp_path / "file" / "checkpoint.pt", weights_only=True)["step"] == 6


def test_the_state_of_a_save_is_not_that_of_the_next_step(tmp_path, name):
    """A save whose bytes are read late must have been fenced: what is restored is of one step, not of two."""
    contender, training = open_in(tmp_path / "store", name), trained(0)
    for _ in range(5):
        digests = train(contender, training, 1, every=1)
        contender.fence()
        for leaf in training.state.values():
            if leaf.dtype == np.int32:
                leaf[...] = -1  # at once, all over it
        training = trained(training.step)
    contender.close()
    contender = open_in(tmp_path / "store", name)
    check_restores(contender, 5, digests)
    contender.close()


@pytest.mark.slow
def test_all_live_through_the_same_kills(tmp_path):
    trace = Trace(losses=(50.0,), end_s=100.0)
    small = {"duration_s": 3.0, "restart_s": 0.1, "every": 4, "step_s": 0.02, "state_bytes": 1 << 20, "measure_s": 0.2}
    results = run(trace, list(NEEDS), Settings(directory=tmp_path, **small))
    assert not results.failed
    here = [name for name, module in NEEDS.items() if importlib.util.find_spec(module) is not None]
    assert [o.contender for o in results.outcomes] == here
    assert set(results.skipped) == set(NEEDS) - set(here)
    for outcome in results.outcomes:
        assert (outcome.kills, outcome.refused) == (1, ())
        assert outcome.steps > 0
