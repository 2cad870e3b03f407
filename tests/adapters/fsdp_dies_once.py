"""Runs examples/fsdp_train.py as a rank of torchrun; rank 1 kills itself after its eighth step, in its first life."""

from __future__ import annotations

import os
import runpy
import signal
from pathlib import Path

from torch.optim.optimizer import register_optimizer_step_post_hook

EXAMPLE = Path(__file__).parents[2] / "examples" / "fsdp_train.py"
steps = 0


def count(*_: object) -> None:
    global steps
    steps += 1
    if steps == 8:
        os.kill(os.getpid(), signal.SIGKILL)


if os.environ["RANK"] == "1" and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    register_optimizer_step_post_hook(count)
runpy.run_path(str(EXAMPLE), run_name="__main__")
