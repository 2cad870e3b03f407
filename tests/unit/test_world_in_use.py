"""Stores of several ranks that are being written: what a reader beside them sees, and who can go on from them."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import numpy as np

import pccheck
from pccheck import SharedDirectory
from pccheck.audit import audit
from pccheck.reports import exit_code, world_reports

WORLD, STEPS = 2, 25


def state(rank: int, step: int) -> dict[str, Any]:
    return {"model": {"w": np.full((50, 100), float(step)), "b": np.full(7, step)}, "rank": rank, "step": step}


def save_all(root: Path, reached: threading.Event, errors: list[BaseException]) -> list[threading.Thread]:
    def run(rank: int) -> None:
        try:
            place = SharedDirectory(root / "agree", rank=rank, world=WORLD)
            how: Any = {"in_flight": 1, "chunk_bytes": 4096, "replicated": ["model"]}
            with pccheck.Checkpointer(root, coordinator=place, **how) as ck:
                for step in range(1, STEPS + 1):
                    ck.save(step, state(rank, step)).durable.result(timeout=60)
                    reached.set()
        except BaseException as error:  # the test raises it
            errors.append(error)
            reached.set()

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(WORLD)]
    for thread in threads:
        thread.start()
    return threads


def test_a_reader_beside_the_writers_of_all_ranks_sees_one_whole_step_each_time(tmp_path: Path) -> None:
    reached, errors, steps = threading.Event(), [], []
    threads = save_all(tmp_path, reached, errors)
    assert reached.wait(60)
    with pccheck.open(tmp_path) as seen:
        while any(thread.is_alive() for thread in threads) and not errors:
            restored = seen.restore()
            assert restored is not None
            assert restored.skipped == ()
            step = restored.step
            assert restored.state["step"] == step
            assert (restored.state["model"]["w"] == step).all()
            assert restored.state["model"]["b"].tolist() == [step] * 7
            steps.append(step)
            assert not any(report.damaged for report in audit(tmp_path))
    for thread in threads:
        thread.join()
    assert not errors
    assert steps == sorted(steps)
    with pccheck.open(tmp_path) as seen:
        assert seen.latest() == STEPS
        assert seen["model/w"][0, 0] == STEPS
    reports = audit(tmp_path, verify=True)
    assert exit_code(reports) == 0
    assert next(w.counter for w in world_reports(reports) if w.state == "complete") == STEPS
    with pccheck.Checkpointer(tmp_path, in_flight=1) as alone:  # one process goes on from what all ranks saved
        restored = alone.restore()
        assert restored is not None
        assert (restored.step, restored.state["rank"]) == (STEPS, 0)
        assert (restored.state["model"]["w"] == STEPS).all()
        alone.save(STEPS + 1, state(0, STEPS + 1)).durable.result(timeout=60)
    with pccheck.open(tmp_path) as seen:
        assert seen.latest() == STEPS + 1
