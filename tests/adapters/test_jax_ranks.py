"""Several processes of jax.distributed, on 127.0.0.1: what they agree on, and what each stores and restores."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("jax")

from pccheck_jax import JaxCoordinator

from pccheck.errors import OptionError, UsageError
from tests.adapters.jobs import free_port, outputs

WORKER = Path(__file__).with_name("jax_rank_worker.py")


def run(scene, folder, world, devices, place="service", *, codes=(0,)):
    """Run a scene in `world` processes; give the lines of each."""
    port = free_port()
    processes = [
        subprocess.Popen(
            [sys.executable, WORKER, scene, folder, str(rank), str(world), str(port), str(devices), place],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for rank in range(world)
    ]  # fmt: skip
    told = outputs(processes, 150)
    for process, (out, err) in zip(processes, told, strict=True):
        assert process.returncode in codes, out + err
    return [out.splitlines() for out, _ in told]


@pytest.mark.parametrize("place", ["service", "folder"])
def test_what_two_processes_saved_any_number_of_processes_restores(tmp_path, place):
    for lines in run("save", tmp_path, 2, 2, place):
        assert lines == ["devices 2 of 4", "saved 5"]
    for world, devices in ((2, 2), (1, 1), (1, 3), (2, 1)) if place == "service" else ((2, 2), (1, 3)):
        for lines in run("restore", tmp_path, world, devices, place):
            assert lines[1:] == ["restored 5 True", "placed True"], (world, devices)


def test_what_one_process_saved_two_restore(tmp_path):
    run("save", tmp_path, 1, 4)
    for lines in run("restore", tmp_path, 2, 2):
        assert lines[1:] == ["restored 5 True", "placed True"]


def test_no_coordinator_believes_what_an_earlier_one_left(tmp_path):
    for lines in run("sessions", tmp_path, 2, 1):
        assert lines[1:10] == ["none of an earlier life True", "heard True", "replaced True"] * 3
        assert lines[10] == "left True"
        assert lines[11:] == ["replaced coordinator True"]


def test_a_lost_service_is_an_error_and_no_hang(tmp_path):
    first, second = run("lost", tmp_path, 2, 1, codes=(0, 1, -6))
    assert first[-1] == "ready"
    assert second[-1] in ("lost CoordinatorLostError", "ready"), "JAX itself may have ended the process first"


def test_without_jax_distributed_it_says_what_to_call():
    with pytest.raises(UsageError, match=r"jax\.distributed\.initialize"):
        JaxCoordinator()
    with pytest.raises(OptionError):
        JaxCoordinator(timeout_s=0)
    with pytest.raises(OptionError):
        JaxCoordinator(name="a/b")
