"""The FSDP2 example under torchrun: a rank dies, the agent starts all again, and they go on where all had agreed."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")

import pccheck
from pccheck.audit import audit, exit_code

WORKER = Path(__file__).with_name("fsdp_dies_once.py")


@pytest.mark.slow
def test_torchrun_starts_the_example_again(tmp_path):
    command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--max-restarts=1", WORKER]
    options = ["--out", tmp_path, "--steps", 12, "--save-every", 2]
    line = [sys.executable, *map(str, [*command, *options])]
    # torch 2.13 hands restarted workers a store in which gloo finds the addresses of the dead, unless told not to
    environment = {**os.environ, "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(line, capture_output=True, text=True, timeout=200, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    told = done.stdout.splitlines()
    begins = [re.fullmatch(r"rank (\d) of 2 begins with step (\d+), digest (\w+)", one) for one in told]
    begins = [(number, *begin.groups()) for number, begin in enumerate(begins) if begin]
    assert len(begins) == 4, "both ranks begin twice"
    first, again = begins[:2], begins[2:]
    assert {step for _, _, step, _ in first} == {"0"}
    assert sorted(rank for _, rank, _, _ in again) == ["0", "1"]
    assert len({(step, digest) for _, _, step, digest in again}) == 1
    before = [re.fullmatch(r"rank \d: all ranks hold step (\d+)", one) for one in told[: again[0][0]]]
    agreed = max((int(one[1]) for one in before if one), default=-1)
    start = int(again[0][2])
    assert agreed < start <= 8, "what was agreed on is there, and no more was trained"
    assert start % 2 == (1 if start else 0), "after one of the steps that were saved"
    assert exit_code(audit(tmp_path, verify=True)) == 0
    with pccheck.open(tmp_path) as view:
        assert view.latest() == 11
