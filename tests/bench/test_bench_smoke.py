"""The benchmark runs, every table has its rows, and every contender gives back what it saved. No timing is judged."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")
pytest.importorskip("safetensors")
pytest.importorskip("orbax.checkpoint")

from tests.bench.__main__ import ALL
from tests.bench.contenders import Nothing, Pccheck, RawWrite
from tests.bench.jax_tables import TABLES as JAX
from tests.bench.lab import Lab, MeasurementError
from tests.bench.loops import Loop, measure_slowdown
from tests.bench.peers import DcpAsync, SafeTensors, TorchCheckpointing, TorchSave
from tests.bench.scale import QUICK, size_text
from tests.bench.smoke import ROOT, Stale, quick_run
from tests.bench.states import MIB, Marks, differences, gpt_state, size_of
from tests.bench.tables import Figure
from tests.bench.trainers import KINDS, Training, measure_mode, measure_trainer

DCP = {DcpAsync().name, DcpAsync(process=True).name}
PEERS = {TorchSave.name, SafeTensors.name, DcpAsync().name}
OURS = {f"pccheck {snapshot}, in_flight {n}" for snapshot in ("lazy", "copy") for n in (1, 2, 3)}
LAZY = {name for name in OURS if "lazy" in name}
SMALL = Loop(state_bytes=MIB, step_s=0.001, every=2, intervals=2)

ROWS = {  # what each table must have, where no disk can be limited by the kernel; those of jax: test_bench_jax
    "slowdown": {Nothing.name, *OURS, *PEERS},
    "every-step": {Nothing.name, *LAZY, "pccheck copy, in_flight 2", *PEERS},
    "limited-disk": LAZY,
    "network": {*LAZY, "pccheck lazy, in_flight 4"},
    "rates": {
        "raw write", "save until durable", "raw read, touched memory", "raw read, fresh memory",
        "restore, fresh memory",
    },
    "trainers": {
        f"{count} x {size_text(size)}: {name}" for count, size in QUICK.trained for name in {
            Nothing.name, RawWrite.name, "pccheck lazy, in_flight 2", "pccheck lazy, in_flight 2, TrainingState",
            "pccheck copy, in_flight 2", *DCP, TorchCheckpointing.name, TorchSave.name,
        }
    },
    "snapshots": {"copy", "lazy", "device", "auto"},
    "ranks": {
        f"{world} ranks: {name}" for world in QUICK.worlds for name in {
            DcpAsync().name,
            *(f"pccheck lazy, in_flight {n}, StoreCoordinator" for n in (1, 2)),
            *(f"pccheck lazy, in_flight {n}, SharedDirectory" for n in (1, 2)),
        }
    },
    "calls": {"torch", "numpy"},
    "advice": {f"raw, {loop}: in_flight {n}" for loop in ("keeps up", "too often") for n in (1, 2, 3)}
    | {"raw, as advised"},
    "controller": {f"interval {number}" for number in range(1, 12)},
    "memory": {"pccheck lazy, in_flight 1", "pccheck lazy, in_flight 2", "pccheck copy, in_flight 2", *PEERS},
}  # fmt: skip


@pytest.fixture(scope="module")
def quick(tmp_path_factory):
    """The tables of a quick run, by name, and its output."""
    folder = tmp_path_factory.mktemp("bench")
    # no tool for a limited disk, so that no test mounts anything
    found, text = quick_run(folder, "--slow-disk=none", *(f"--only={name}" for name in ROWS))
    assert found["machine"]["native extension"]
    return {table["name"]: table for table in found["tables"]}, text


@pytest.mark.slow
def test_quick_run_has_every_table_and_row(quick):
    tables, text = quick
    assert ROWS.keys() == ALL.keys() - JAX.keys() == tables.keys()
    for name, rows in ROWS.items():
        assert {row[""] for row in tables[name]["rows"]} == rows, name
        assert all(row in text for row in rows)
        figures = [cell for row in tables[name]["rows"] for cell in row.values() if isinstance(cell, dict)]
        assert len(figures) >= len(rows)
        assert all(figure["low"] <= figure["median"] <= figure["high"] for figure in figures)


@pytest.mark.slow
def test_quick_run_restores_what_every_contender_saved(quick):
    tables, _ = quick
    loops = [row for name in ("slowdown", "every-step", "limited-disk", "network") for row in tables[name]["rows"]]
    for row in loops:
        whole, _, runs = row["restored"].partition(" of ")
        assert row["restored"] == "-" if row[""] == Nothing.name else whole == runs > "0", row


def test_a_restored_step_is_the_last_saved(tmp_path):
    found = measure_slowdown(Pccheck("lazy", 2), tmp_path / "store", SMALL)
    saves = SMALL.warm_up + SMALL.lead + SMALL.intervals
    assert found.restored == SMALL.warm_up + (SMALL.intervals + SMALL.lead + SMALL.intervals - 1) * SMALL.every + 1
    assert saves == 6
    assert found.ratio > 0


def test_a_contender_that_does_not_save_is_found_out(tmp_path):
    with pytest.raises(AssertionError, match="restored another state"):
        measure_slowdown(Stale(SafeTensors()), tmp_path / "store", SMALL)


class Late:
    """Copies what it saves only when it is asked to finish: a state that was changed since is not what was saved."""

    name, in_flight = "late", 1

    def prepare(self, directory):
        self._pending = False

    def train(self, model, optimizer):
        self._model = model
        return model

    def save(self, step, state):
        self._pending = True

    def fence(self): ...

    def busy(self):
        return False

    def finish(self):
        if self._pending:
            self._saved = {"model": {name: value.clone() for name, value in self._model.state_dict().items()}}
            self._pending = False

    def restore(self, like):
        return self._saved


def test_a_contender_that_saves_another_step_of_a_trainer_is_found_out(tmp_path):
    training = Training(leaves=(4, 64), kinds=KINDS[:1], pass_s=0.001, long_s=0.002, pairs_s=0.0, long_pairs_s=0.001)
    with pytest.raises(AssertionError, match="restored another state"):
        measure_trainer(Late(), tmp_path / "store", training)
    found = measure_trainer(Pccheck("lazy", 1), tmp_path / "good", training)
    assert found.keys() == {KINDS[0]}
    assert len(found[KINDS[0]].lost_ms) >= 3


def test_auto_tells_which_mode_it_chose(tmp_path):
    found = measure_mode(Pccheck("auto", 1), tmp_path / "store", (4, 64), 3, 0.0, 9)
    assert found.mode in ("copy", "lazy", "device")
    assert len(found.save_ms) == len(found.gate_ms) == 3


def test_ranks_that_fail_are_reported_by_the_first(monkeypatch):
    monkeypatch.syspath_prepend(ROOT)
    with pytest.raises(MeasurementError, match=r"(?s)list.*TypeError"):
        Lab(60.0).together(list, 2)


def test_every_changed_bit_and_every_mixed_step_is_a_difference():
    state, other = gpt_state(MIB), gpt_state(MIB)
    assert abs(size_of(state) - MIB) < MIB // 20
    assert differences(other, state) == []
    Marks(state).set(3)
    assert len(differences(other, state)) == sum(map(len, state.values()))
    Marks(other).set(3)
    other["model"]["wte.weight"].view(-1)[7] += 1
    del other["exp_avg"]["h.0.ln_1.weight"]
    assert differences(other, state) == ["exp_avg.h.0.ln_1.weight", "model.wte.weight"]


def test_a_failure_in_a_process_is_reported_with_its_place(monkeypatch):
    monkeypatch.syspath_prepend(ROOT)  # a fresh process has to find this package
    with pytest.raises(MeasurementError, match=r"(?s)ValueError.*no number"):
        Lab(60.0).run(int, "no number")


def test_figures_show_median_and_range():
    assert str(Figure([1.0, 3.0, 2.0], 1, "ms")) == "2.0 [1.0..3.0] ms"
    assert str(Figure([1.5], 2)) == "1.50"
